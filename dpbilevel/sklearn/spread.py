"""Center and unit of the target, from noisy comparisons before the fit.

Noise and clip norm are in proportion to the unit of the target. A declared range that
is far too wide would leave nothing but noise, so the unit follows from the records. One
search finds the median, and another one a quantile of the distances from it. Each step
releases the excess of targets above the tested value, with noise.
"""

import dataclasses
import statistics

import jax
import numpy as np
from jaxtyping import Float

from ..core.usability import released_mean
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from .public_size import Beforehand, PublicSize, release_within

# Numbers of comparisons with centers and distances, and the values that are tested.
_COMPARED = 12, 6
_CENTERS = np.linspace(-1, 1, 1025)
_DISTANCES = 2.0 ** np.arange(-13, 0.1, 0.25)
_SAME = 2.0**-12  # a smaller distance means that most targets are equal
# Fraction of targets that are farther from the center than the distance: the smaller
# one shows long tails, and the larger one stands out of more noise.
_FARTHER = 0.1, 1 / 3
_DEVIATIONS = 4.0  # the unit, if targets were normal
# Least and largest part of the squared budget.
_PART = 0.01, 0.15
# Noise of a fraction that is worth more budget; and the largest useful noise.
_WANTED, _MOST_NOISE = 0.1, 0.25


@dataclasses.dataclass(frozen=True)
class Spread(Beforehand):
    """Planned noisy comparisons of targets, and the targets.

    Attributes:
        release: Comparisons; None if there are too few records for fractions with
            little noise, or delta is 0.
        public: Public number of records, and the relation.
        targets: Targets in [-1, 1]; NaN for records that do not count. NON-PRIVATE.
        centered: Whether to search for the center, which is 0 otherwise.
    """

    public: PublicSize
    targets: Float[np.ndarray, " n"]
    centered: bool

    @classmethod
    def plan(
        cls,
        budget: PrivacyBudget,
        public: PublicSize,
        targets: Float[np.ndarray, " n"],
        centered: bool,
    ) -> "Spread":
        """Return comparisons, for 1 % to 15 % of the squared budget.

        Args:
            budget: The budget of the whole fit.
            public: The public number of records, and the relation.
            targets: As the attribute.
            centered: As the attribute.

        Privacy:
            Touches no data.
        """
        release = release_within(
            budget,
            public,
            "sides of targets",
            count=sum(_COMPARED if centered else _COMPARED[1:]),
            clip_norm=0.5,
            parts=_PART,
            wanted=_WANTED,
            most_noise=_MOST_NOISE,
        )
        return cls(release, public, targets, centered)

    def center_and_unit(self, *, key: PRNGKey, owner: str) -> tuple[float, float]:
        """Release the center and the unit, in units of the targets.

        Args:
            key: A typed key for these comparisons alone.
            owner: Name for error messages.

        Returns:
            About the median, and about four standard deviations. They are 0 and 1, as
            declared, if that is less, if most targets are equal, or without a release.

        Privacy:
            As many releases as `release` counts, each the mean of one number a record.
        """
        release = self.release
        if release is None:
            return 0.0, 1.0
        keys, noise = jax.random.split(key, release.count), release.noise_std

        def quantile(
            values: Float[np.ndarray, " n"],
            fraction: float,
            grid: Float[np.ndarray, " k"],
            keys: PRNGKey,
        ) -> float:
            """Return about the value of a sorted grid that a fraction of values exceed.

            Every answer has a weight by its noise, so later ones correct a wrong one.
            """
            belief = np.zeros(len(grid))  # log probabilities
            for own in keys:
                value = middle(grid, belief)
                # Rows are added afterwards: they must contribute 0.
                rows = self.public.rows(comparisons(values, value, fraction))
                mean = released_mean(release, rows, key=own, owner=owner)
                more = float(mean[0]) - (fraction - 0.5)
                belief += np.where(grid > value, 0.5, -0.5) * more / noise**2
            return middle(grid, belief)

        center = 0.0
        if self.centered:
            center = quantile(self.targets, 0.5, _CENTERS, keys[: -_COMPARED[1]])
        longest = 1 + abs(center)
        distance = np.abs(self.targets - center) / longest
        least, most = _FARTHER
        farther = min(max(least, 2 * noise), most)
        found = quantile(distance, farther, _DISTANCES, keys[-_COMPARED[1] :])
        if found < _SAME:  # if most targets are zero, the few others matter
            return 0.0, 1.0
        normal = statistics.NormalDist().inv_cdf(1 - farther / 2)
        unit = _DEVIATIONS * longest * found / normal
        return (center, unit) if unit < 1 else (0.0, 1.0)


def middle(grid: Float[np.ndarray, " k"], belief: Float[np.ndarray, " k"]) -> float:
    """Return the median of a grid by log probabilities."""
    chances = np.cumsum(np.exp(belief - belief.max()))
    return float(grid[np.searchsorted(chances, chances[-1] / 2)])


def comparisons(
    values: Float[np.ndarray, " n"], value: float, fraction: float
) -> Float[np.ndarray, "n 1"]:
    """Return 1/2 for each value that is larger, and -1/2 for each that is not.

    NaN becomes the expected mean, so that it moves no comparison.

    Privacy:
        Row by row. NON-PRIVATE until `Spread.center_and_unit` releases the mean.
    """
    sides = np.where(values > value, 0.5, -0.5)
    return np.where(np.isnan(values), fraction - 0.5, sides)[:, None].astype(np.float32)
