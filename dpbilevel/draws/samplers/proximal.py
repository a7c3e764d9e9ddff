r"""Oracles that draw from $e^{-U(x) - \|x - y\|^2 / (2 \eta)}$ on a set, try by try."""

import abc
import bisect
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, Self
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Bool, Float, PyTree

from ...privacy.keys import PRNGKey
from ...sets import AbstractSet, Ball
from . import restricted
from .base import AbstractPotential, Regularity

_MOST_DRAW_TRIES = 100_000
_MOST_TRIES = 10**9

# A proposal, whether it is accepted, and how many evaluations were needed.
Attempt = tuple[PyTree, Bool[Array, ""], Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class ProximalPlan:
    """Public numbers from which the counts and bounds of an oracle follow."""

    regularity: Regularity  # of the potential
    feasible: AbstractSet
    step_size: float  # eta
    num_steps: int = 0  # how many accepted tries are needed; 0 while that is open
    tries: int = 0  # how many are made in all; 0 while that is open
    failure: float = 0.0  # the chance with which draws of proposals may run out

    @property
    def width(self) -> float:
        """Diameter of the set."""
        return restricted.diameter(self.feasible, self.regularity.dimension)

    @property
    def convexity(self) -> float:
        """Strong convexity of the potential; 0 if none is known."""
        return float(self.regularity.strong_convexity or 0.0)


class Mixing(eqx.Module):
    r"""Convergence of `AlternatingSampler` from any initial point, by step size."""

    width: float  # D
    convexity: float  # alpha'

    @classmethod
    def of(cls, plan: ProximalPlan) -> "Mixing":
        """Return the `Mixing` of a plan's potential and set."""
        error = plan.regularity.error + plan.regularity.rounding
        return cls(plan.width, plan.convexity * math.exp(-2 * error))

    def remaining(self, step_size: float, num_steps: int) -> float:
        """Return a bound on the total variation distance after `num_steps` steps."""
        rate = math.log1p(self.convexity * step_size)
        start = self.width / (2 * math.sqrt(step_size))
        return start * math.exp(-(num_steps - 1) * rate)

    def num_steps(self, step_size: Any, distance: float, xp: Any = np) -> Any:
        """Return the fewest steps whose `remaining` distance is at most `distance`.

        On the host use NumPy; in a program `jax.numpy`, whose logarithms round.
        """
        start = self.width / (2 * step_size**0.5 * distance)
        steps = xp.ceil(xp.log(start) / xp.log1p(self.convexity * step_size))
        return 1 + xp.maximum(steps, 0)


class ProximalTarget(NamedTuple):
    """Potential, set and step size of the densities that oracles draw from."""

    potential: AbstractPotential  # U
    feasible: AbstractSet
    step_size: float  # eta


class AbstractProximalOracle(eqx.Module):
    r"""Oracle that tries to draw $\propto e^{-U(x) - \|x - y\|^2 / (2 \eta)}$ on a set.

    Each try is accepted with a probability that is bounded from below before any data
    is seen, so that a fixed number of tries serves all steps of a sampler. Methods take
    the plan of the run, whose counts may be open but where tries are counted from them:
    in `with_counts`, `enough_draw_tries` and `draw_failure`.

    Attributes:
        draw_tries: Tries of one draw from a Gaussian restricted to the set; set by
            `with_counts`.
        draws: How many such draws a try makes.
    """

    draw_tries: AbstractVar[int | None]
    draws: ClassVar[int]
    assumptions: ClassVar[tuple[str, ...]] = ()  # what a report lists

    @abc.abstractmethod
    def largest_step(self, regularity: Regularity, feasible: AbstractSet) -> float:
        """Return the largest step size worth considering.

        Raises:
            ValueError: The oracle does not serve such a potential.
        """

    @abc.abstractmethod
    def with_counts(self, plan: ProximalPlan) -> Self:
        """Return a copy with every count set that was left open.

        Raises:
            ValueError: A draw of a proposal would need too many tries.
        """

    @abc.abstractmethod
    def serves(self, plan: ProximalPlan) -> bool:
        """Return whether the oracle's fixed numbers hold for this plan."""

    @abc.abstractmethod
    def bias(self, plan: ProximalPlan) -> float:
        """Return a bound on the total variation from an accepted try to its target."""

    @abc.abstractmethod
    def acceptance(self, plan: ProximalPlan) -> float:
        """Return a lower bound on the probability that a try is accepted."""

    @abc.abstractmethod
    def gaussian(self, plan: ProximalPlan) -> tuple[float, float, float]:
        r"""Return proposals' deviation; w, b: mean within w dist(y) + b of the set.

        Returns:
            The standard deviation, and $w$ and $b$ such that the mean is at most $w
            \operatorname{dist}(y, X) + b$ from the set.
        """

    @abc.abstractmethod
    def evaluations(self) -> tuple[float, int]:
        """Return the mean and the largest number of evaluations of a try."""

    @abc.abstractmethod
    def prepare(self, target: ProximalTarget, y: PyTree) -> PyTree:
        """Return a pytree of the values that all tries at one $y$ share."""

    @abc.abstractmethod
    def attempt(
        self, target: ProximalTarget, y: PyTree, common: PyTree, *, key: PRNGKey
    ) -> Attempt:
        """Make one try at $y$; return point, acceptance and number of evaluations.

        Returns:
            The proposal, whether it is accepted, and how many evaluations were needed.
        """

    def enough_draw_tries(self, plan: ProximalPlan) -> int:
        """Return the tries of a draw: `draw_tries`, or as many as the plan needs.

        Raises:
            ValueError: More than 100 000 tries would be needed.
        """
        if self.draw_tries:
            return self.draw_tries
        chance, _ = self._draw_chance(plan)
        if chance >= 1:
            return 1
        need = math.log(plan.failure / (2 * self.draws * plan.tries))
        count = math.ceil(need / math.log1p(-chance)) if chance > 0 else math.inf
        if count > _MOST_DRAW_TRIES:
            raise ValueError(
                f"{type(self).__name__}: needs {count} tries per draw; lower step_size."
            )
        return max(1, int(count))

    def draw_failure(self, plan: ProximalPlan) -> float:
        """Return a bound on the chance that any draw of a proposal runs out of tries.

        It adds the chance that some $y$ is farther from the set than a reach, which is
        half of `plan.failure`, and that of rejecting all tries of a draw within it.
        """
        chance, any_mean = self._draw_chance(plan)
        if chance >= 1:
            return 0.0
        rejected = math.exp((self.draw_tries or 1) * math.log1p(-chance))
        far = 0.0 if any_mean else plan.num_steps * _far(plan)
        return far + self.draws * plan.tries * rejected

    def _draw_chance(self, plan: ProximalPlan) -> tuple[float, bool]:
        """Return a proposal's least acceptance, and whether it holds at any mean."""
        deviation, weight, shift = self.gaussian(plan)
        feasible, dimension = plan.feasible, plan.regularity.dimension
        noise = math.sqrt(plan.step_size)
        reach = restricted.reach(feasible, dimension, noise, _far(plan))
        reach = weight * reach + shift  # of the mean
        chance = restricted.acceptance(feasible, dimension, deviation, reach)
        return chance, not isinstance(feasible, Ball)


class AbstractExactOracle(AbstractProximalOracle):
    """Oracle whose accepted tries have the exact distribution, at a step of any size.

    Whatever they have in common, which may depend on tries that were rejected.
    """

    @abc.abstractmethod
    def without_counts(self, plan: ProximalPlan) -> Self:
        """Return a copy for steps of any size and as many tries as they take."""

    @abc.abstractmethod
    def proposal(
        self, target: ProximalTarget, y: PyTree, common: PyTree, *, key: PRNGKey
    ) -> tuple[PyTree, Float[Array, ""]]:
        """Return a proposal, and minus the log of the chance to accept it."""

    @abc.abstractmethod
    def move(self, target: ProximalTarget, y: PyTree, common: PyTree) -> PyTree:
        """Return new common values for tries at `y`, after many rejected ones."""


def enough_tries(num_steps: int, chance: float, failure: float) -> int:
    """Return the fewest tries with `num_steps` successes, but for chance `failure`."""

    def serves(tries):
        return scipy.stats.binom.cdf(num_steps - 1, tries, chance) <= failure

    most = max(num_steps, math.ceil(num_steps / chance))
    while not serves(most):
        most *= 2
    high = bisect.bisect_left(range(most), True, num_steps, key=serves)
    if high > _MOST_TRIES:
        raise ValueError(f"AlternatingSampler: needs {high} tries; raise distance.")
    return high


def _far(plan: ProximalPlan) -> float:
    """Return the allowed chance that one point $y$ is beyond the assumed distance."""
    return plan.failure / (2 * plan.num_steps)


def finite_part(tree: PyTree) -> PyTree:
    """Return a pytree with NaN and infinite values replaced by zero."""
    return jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, 0), tree)
