"""Private selection: the best of a random number of repetitions."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import scipy
from jaxtyping import Float

from .. import _checks
from .._lazy import dp_accounting
from ..clipping import Basis
from .budget import Neighbours, People
from .ledger import AbstractRelease
from .mechanisms import Gaussian


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
                f"RepeatAndSelect: mean must be a number above 1, got {self.mean!r}."
            )
        if not self.shape >= 0:
            raise ValueError(
                "RepeatAndSelect: shape must be at least 0 (1 is geometric, math.inf "
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

    def beyond(self, count: int) -> Float[np.ndarray, " count+1"]:
        """The probabilities of more than 0, 1, ..., `count` repetitions.

        Args:
            count: The last number.
        """
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
        return np.minimum(chances[::-1].cumsum()[::-1][: count + 1], 1.0)

    def event(self, base: "dp_accounting.DpEvent") -> "dp_accounting.DpEvent":
        """The event of releasing the best of $K$ runs of a base mechanism.

        Args:
            base: The event of one run.
        """
        return dp_accounting.dp_event.RepeatAndSelectDpEvent(
            base, self.mean, self.shape
        )


@dataclasses.dataclass(frozen=True)
class Selection(AbstractRelease):
    r"""`count` releases of the best of $K$ Gaussian releases, with its value.

    Args:
        name: What is selected.
        count: How many times.
        queries: What one run reads, one query.
        mechanism: The noise of one run.
        repetitions: The law of $K$.
        runs: The fixed number of runs that are made; those after the first $K$ are left
            out.
        basis: What the sensitivity rests on.

    Privacy:
        $K$ is drawn once, without data, and never shown. At most `runs` repetitions are
        possible, so that the law of what is released is within $P(K >$ `runs`$)$ in
        total variation of what is charged.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022; Liu and Talwar, "Private selection from private candidates", STOC
        2019, for the geometric law.
    """

    mechanism: Gaussian
    repetitions: Repetitions
    runs: int
    basis: Basis = Basis.CLIPPED

    def __post_init__(self):
        super().__post_init__()
        _checks.instance("Selection", Gaussian, mechanism=self.mechanism)
        _checks.count("Selection", runs=self.runs)

    @property
    def neighbours(self) -> Neighbours:
        """The mechanism's."""
        return self.mechanism.neighbours

    @property
    def noise_multiplier(self) -> float:
        """The noise of one run over its sensitivity."""
        return self.mechanism.event().noise_multiplier

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise of one run."""
        return self.noise_multiplier * self.neighbours.contributions * self.contribution

    @property
    def clip_norm(self) -> float:
        """The largest norm of the noiseless value of one run."""
        return sum(query.clip_norm for query in self.queries)

    @property
    def value_norm(self) -> None:
        """None: the largest value is the clip norm."""
        return None

    @property
    def clip_ratio(self) -> None:
        """None: no bound on the losses is declared."""
        return None

    @property
    def failure(self) -> float:
        """The chance of more repetitions than there are runs."""
        return self.count * float(self.repetitions.beyond(self.runs)[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """The law of the number of repetitions."""
        return (
            f"{self.name}: the best of K, {self.repetitions}; drawn once, never shown, "
            f"and above the {self.runs} runs made with probability {self.failure:.3g}, "
            "counted in delta",
        )

    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        """The events of all selections."""
        (query,) = self.queries
        event = self.repetitions.event(self.mechanism.event())
        yield query.role, dp_accounting.SelfComposedDpEvent(event, self.count)


def _mean(gamma: float, shape: float) -> float:
    """The mean of the negative binomial law on positive numbers."""
    if shape == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 / gamma - 1) / -math.expm1(shape * math.log(gamma))
