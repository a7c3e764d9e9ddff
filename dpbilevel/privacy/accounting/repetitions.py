"""The law of a random number of repetitions."""

import dataclasses
import functools
import math

import numpy as np
import scipy
from jaxtyping import Float

from .._lazy import dp_accounting


@dataclasses.dataclass(frozen=True)
class Repetitions:
    r"""The law of a random number of repetitions $K$.

    For a finite shape $\eta$ a negative binomial law on $K \ge 1$ with $P(K = k)
    \propto (1 - \gamma)^k \Gamma(k + \eta) / k!$: the geometric law at $\eta = 1$, the
    logarithmic one at 0. An infinite shape is the Poisson law, with which there may be
    no repetition at all.

    Args:
        mean: The expected number, above 1.
        shape: $\eta \ge 0$, possibly infinite.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.mean) and self.mean > 1):
            raise ValueError(
                f"Repetitions: mean must be a number above 1, got {self.mean!r}."
            )
        if not self.shape >= 0:
            raise ValueError(
                "Repetitions: shape must be at least 0 (1 is geometric, math.inf "
                f"Poisson), got {self.shape!r}."
            )

    def __str__(self) -> str:
        """The law in words."""
        mean = f"mean {self.mean:.6g}"
        if math.isinf(self.shape):
            return f"Poisson, {mean}"
        return f"truncated negative binomial, shape {self.shape:.6g}, {mean}"

    @functools.cached_property
    def gamma(self) -> float:
        r"""$\gamma$ of the negative binomial law."""

        def excess(log_gamma: float) -> float:
            return _mean(math.exp(log_gamma), self.shape) - self.mean

        low = math.log(1e-3 / self.mean / (1 + self.shape))
        return math.exp(scipy.optimize.brentq(excess, low, -1e-12, xtol=1e-14))

    def slope(self, p: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        r"""$f'(1 - p)$, where $f(s)$ is the mean of $s^K$.

        Args:
            p: Chances in [0, 1].
        """
        if math.isinf(self.shape):
            return self.mean * np.exp(-self.mean * p)
        ratio = self.gamma / (self.gamma + (1 - self.gamma) * p)
        return self.mean * ratio ** (1 + self.shape)

    def beyond(self, count: int) -> Float[np.ndarray, " count+1"]:
        """The probabilities of more than 0, 1, ..., `count` repetitions."""
        numbers = np.arange(count + 1)
        if math.isinf(self.shape):
            return scipy.stats.poisson.sf(numbers, self.mean)
        if self.shape > 0:
            law = scipy.stats.nbinom(self.shape, self.gamma)
            none = -math.expm1(self.shape * math.log(self.gamma))
            return np.minimum(law.sf(numbers) / none, 1.0)
        # Summed from the far end, so that small ones keep their digits.
        terms = np.arange(1, count + math.ceil(60 / self.gamma))
        chances = np.exp(terms * math.log1p(-self.gamma)) / terms
        chances /= -math.log(self.gamma)
        return np.minimum(np.cumsum(chances[::-1])[::-1][: count + 1], 1.0)

    def event(self, base: "dp_accounting.DpEvent") -> "dp_accounting.DpEvent":
        """The event of the best of $K$ runs, each of the event `base`."""
        events = dp_accounting.dp_event
        return events.RepeatAndSelectDpEvent(base, self.mean, self.shape)


def _mean(gamma: float, shape: float) -> float:
    """The mean of the negative binomial law on positive numbers."""
    if shape == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 / gamma - 1) / -math.expm1(shape * math.log(gamma))
