r"""Strength of the effects of the features, from a release before the fit.

With many features and few records the noise of a fit needs a ridge; with strong effects
the same ridge would hide them. If coefficients are equally likely in all directions,
noise of the deviation $s$ is added to gradients, and the ridge is larger than the
curvature, then the expected loss is least with

$$\rho = \frac{s^2 \operatorname{tr} H}{2 G^2}$$

for the second derivative $H$ of the mean loss at the constant answer and the length $G$
of its gradient there. Both follow from the mean row of each class.
"""

import dataclasses
import math
import statistics

import numpy as np
from jaxtyping import Float, Int

from ..core.usability import released_mean
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from .public_size import Beforehand, PublicSize, release_within

# benchmarks/results/constants.md, "Estimators".
_PART = 0.01, 0.1  # of the squared budget
_WANTED = 0.2  # noise worth more, times the number of parameters to the power 3/4
_MOST_NOISE = 0.2  # with more noise nothing is released
# Weights beside products of indicators and features: indicators, features, squares.
_RATE, _ROW, _SQUARE = 0.5, 0.25, 0.25
_SPREAD = 0.05, 0.85  # limits of the mean squared distance of rows from their mean
_WEAKEST = 0.25  # the variance of scores of effects that have the largest ridge
_STRONGEST = 1.25  # squared distance of a class from others, over that of rows


@dataclasses.dataclass(frozen=True)
class Effects(Beforehand):
    """A planned release of the rates of the classes and the mean row of each.

    Attributes:
        release: Release; None if the records are too few, or delta is 0.
        classes: Number of classes.
        width: Number of features, without a constant.
        centered: Whether the model has a constant.
    """

    classes: int
    width: int
    centered: bool

    @classmethod
    def plan(
        cls,
        budget: PrivacyBudget,
        public: PublicSize,
        classes: int,
        width: int,
        *,
        centered: bool = True,
    ) -> "Effects":
        """Return the release, for 1 % to 10 % of the squared budget, or none.

        Args:
            budget: The budget of the whole fit.
            public: The public number of records, and the relation.
            classes: As the attribute.
            width: As the attribute.
            centered: As the attribute.

        Privacy:
            Touches no data.
        """
        products = 0.25 if classes == 2 else 1 - 1 / classes
        squared = products * (1 + _RATE**2) + _ROW**2 + _SQUARE**2
        release = release_within(
            budget,
            public,
            "rates and effects",
            clip_norm=math.sqrt(squared),
            parts=_PART,
            wanted=_WANTED / (width * (classes - 1)) ** 0.75,
            most_noise=_MOST_NOISE,
        )
        return cls(release, classes, width, centered)

    def rates_and_ridge(
        self,
        features: Float[np.ndarray, "n d"],
        labels: Int[np.ndarray, " n"],
        *,
        key: PRNGKey,
        owner: str,
    ) -> tuple[Float[np.ndarray, " k"], float]:
        r"""Release the rates, and the weight of a ridge for noise 1.

        Args:
            features: Rows of length about 1, without a constant; NaN for rows that do
                not count.
            labels: The number of each record's class.
            key: A typed key for this release alone.
            owner: Name for error messages.

        Returns:
            Rates, positive and with sum 1, equal without a constant; and $\rho / s^2$.
            Without a release rates are equal, and the ridge is for scores of variance
            1. Longer rows are shortened, so that the rate of a class is too small if
            only its rows are longer than 1: 2 and 5 times as long, by a third and half.

        Privacy:
            The one release of `release`.
        """
        count, parameters = self.classes, self.width * (self.classes - 1)
        equal = np.full(count, 1 / count)
        if self.release is None:
            return equal, self.width / float(1 - equal @ equal)
        rows = rows_of(features, labels, count)
        mean = released_mean(self.release, rows, key=key, owner=owner)
        noise, blocks = self.release.noise_std, 1 if count == 2 else count
        ends = np.cumsum((blocks * self.width, blocks, self.width))
        products, offsets, row, square = np.split(np.asarray(mean, float), ends)
        products, row = products.reshape(blocks, -1), row / _ROW
        offsets = offsets / _RATE
        if count == 2:  # the other class has the opposite mean
            products, offsets = np.stack([-products[0], products[0]]), offsets * [-1, 1]
        # Noise of a rate, and of a coordinate of the gradient.
        of_rate = noise / _RATE * (1 if count == 2 else math.sqrt(1 - 1 / count))
        variance = noise**2 * (2 if count == 2 else 1)
        rates, length = equal, 0.0
        if self.centered:
            noisy = (offsets + equal).tolist()
            rates = np.asarray([_expected(rate, of_rate) for rate in noisy])
            rates /= rates.sum()
            length = float(row @ row) - self.width * (noise / _ROW) ** 2
            products -= (rates - equal)[:, None] * row
            variance += float(np.square(rates - equal).mean()) * (noise / _ROW) ** 2
        gradient = products - products.mean(axis=0)
        squared = float(np.square(gradient).sum()) - parameters * variance
        squared -= count * of_rate**2 * max(length, 0.0)
        spread = min(max(float(square[0]) / _SQUARE - length, _SPREAD[0]), _SPREAD[1])
        trace = spread * float(1 - rates @ rates)
        least = trace**2 / spread * _WEAKEST / (2 * self.width)
        most = _STRONGEST * spread * float(np.square(rates * (1 - rates)).sum())
        strength = _expected_square((least, most), squared, variance, parameters)
        return rates, trace / (2 * strength)


def rows_of(
    features: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"], classes: int
) -> Float[np.ndarray, "n w"]:
    """Return rows whose mean is released; NaN for records that do not count.

    Args:
        features: As for `Effects.rates_and_ridge`.
        labels: As for `Effects.rates_and_ridge`.
        classes: The number of classes.

    Privacy:
        Row by row. NON-PRIVATE until `Effects.rates_and_ridge` releases the mean.
    """
    one_hot = (labels[:, None] == np.arange(classes)).astype(np.float32)
    indicators = one_hot - np.float32(1 / classes)
    if classes == 2:
        indicators = indicators[:, 1:]
    with np.errstate(all="ignore"):  # an exception would reveal a record
        features = features.astype(np.float32)
        products = indicators[:, :, None] * features[:, None, :]
        squares = np.square(features).sum(axis=1, keepdims=True)
        beside = _RATE * indicators, _ROW * features, _SQUARE * squares
        parts = products.reshape(len(features), -1), *beside
        return np.concatenate(parts, axis=1, dtype=np.float32)


def _expected(rate: float, noise: float) -> float:
    """Return the posterior mean of a rate in [0, 1] with a uniform prior."""
    rate = min(max(rate, -4 * noise), 1 + 4 * noise)
    normal = statistics.NormalDist(rate, noise)
    chance = normal.cdf(1) - normal.cdf(0)
    return rate + noise**2 * (normal.pdf(0) - normal.pdf(1)) / chance


def _expected_square(
    limits: tuple[float, float], squared: float, variance: float, count: int
) -> float:
    """Return the posterior mean of the squared length of a vector with normal noise.

    The prior of the squared length is in proportion to its inverse square, within
    limits. The squared length of the noisy vector is about normal.

    Args:
        limits: The least and the largest squared length.
        squared: The squared length with noise, less its expected excess.
        variance: The variance of the noise of a coordinate.
        count: The number of coordinates.
    """
    least, most = limits
    squares = np.geomspace(least, max(most, 2 * least), 60)
    deviation = np.sqrt(2 * variance * (count * variance + 2 * squares))
    belief = -0.5 * ((squared - squares) / deviation) ** 2
    belief -= np.log(deviation * squares)
    chances = np.exp(belief - belief.max())
    return float(chances @ squares / chances.sum())
