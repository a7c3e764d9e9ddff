"""The base rates of the classes, from a release of their own before the fit.

With few records a model of a rare class is worse than the constant answer, so the
descent starts at that answer. The less the loss of a rare class is curved, the larger
is the ridge that keeps the model there. With more records both would cost accuracy.
"""

import dataclasses
import statistics

import numpy as np
from jaxtyping import Float, Int

from ..core.usability import released_mean
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from ..privacy.releases import Release
from .planned import Planned, release_within

_SHARE = 0.002, 0.1  # of the squared budget
_WANTED = 0.01  # noise of a rate that is worth more of the budget
_MOST_NOISE = 0.25  # with more, no rate is released
_CLEAR = 2.5  # a class is not rare for the records if its rate has so many noises


@dataclasses.dataclass(frozen=True)
class BaseRates:
    """A planned release of the shares of the classes.

    Attributes:
        release: The release; None if the records are too few, or delta is 0.
        rows: Indicators of the class, centred; zeros where there is none, in the
            planned number. NON-PRIVATE.
    """

    release: Release | None
    rows: Float[np.ndarray, "n k"]

    @classmethod
    def planned(
        cls,
        budget: PrivacyBudget,
        planned: Planned,
        labels: Int[np.ndarray, " n"],
        count: int,
    ) -> "BaseRates":
        """Return the release, for .2 % to 10 % of the squared budget.

        Args:
            budget: The budget of the whole fit.
            planned: The public number of records, and the relation.
            labels: The number of each record's class, -1 if it has none.
            count: The number of classes.

        Privacy:
            Touches no data.
        """
        one_hot = labels[:, None] == np.arange(count)
        rows = np.where(labels[:, None] >= 0, one_hot - 1 / count, 0)
        release = release_within(
            budget,
            planned,
            "base rates",
            clip_norm=(1 - 1 / count) ** 0.5,
            shares=_SHARE,
            wanted=_WANTED,
            most_noise=_MOST_NOISE,
        )
        return cls(release, planned.rows(rows.astype(np.float32)))

    @property
    def releases(self) -> tuple[Release, ...]:
        """The release for `calibrate(before=)`."""
        return () if self.release is None else (self.release,)

    def found(self, *, key: PRNGKey, owner: str) -> Float[np.ndarray, " k"]:
        """Release the rates: positive, with sum 1.

        Args:
            key: A typed key for this release alone.
            owner: Name for error messages.

        Returns:
            Equal rates without a release, or if every class has many records.

        Privacy:
            The one release of `release`.
        """
        even = 1 / self.rows.shape[1]
        equal = np.full(self.rows.shape[1], even)
        if self.release is None:
            return equal
        mean = released_mean(self.release, self.rows, key=key, owner=owner)
        shares = np.asarray(mean, float)
        shares += even - shares.mean()
        noise = self.release.noise_std * (1 - even) ** 0.5
        if shares.min() > _CLEAR * noise:
            return equal
        rates = np.asarray([_expected(share, noise) for share in shares.tolist()])
        return rates / rates.sum()


def _expected(share: float, noise: float) -> float:
    """Return the mean of a rate in [0, 1], uniform before its noisy share was seen."""
    share = min(max(share, -4 * noise), 1 + 4 * noise)
    normal = statistics.NormalDist(share, noise)
    chance = normal.cdf(1) - normal.cdf(0)
    return share + noise**2 * (normal.pdf(0) - normal.pdf(1)) / chance
