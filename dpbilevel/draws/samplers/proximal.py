r"""What draws from $e^{-U(x) - \|x - y\|^2 / (2 \eta)}$ on a set, try by try."""

import abc
import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from ...privacy.noise import PRNGKey
from ...sets import AbstractSet, Ball
from . import restricted
from .base import AbstractPotential, Regularity

_MOST_DRAW_TRIES = 100_000


class AbstractProximalOracle(eqx.Module):
    r"""Tries to draw $x \propto e^{-U(x) - \|x - y\|^2 / (2 \eta)}$ on a set.

    Each try is accepted with a probability that is bounded from below before any data
    is seen, so that a fixed number of tries serves all steps of a sampler.

    Attributes:
        draw_tries: Tries of one draw from a Gaussian restricted to the set; planned.
        draws: How many such draws a try makes.
    """

    draw_tries: eqx.AbstractVar[int | None]
    draws: ClassVar[int]

    @abc.abstractmethod
    def largest_step(self, regularity: Regularity, feasible: AbstractSet) -> float:
        r"""The largest $\eta$ worth considering.

        Args:
            regularity: What is known of the potential.
            feasible: The set.

        Raises:
            ValueError: The oracle does not serve such a potential.
        """

    @abc.abstractmethod
    def planned(
        self,
        regularity: Regularity,
        feasible: AbstractSet,
        *,
        step_size: float,
        num_steps: int,
        tries: int,
        share: float,
    ) -> Self:
        r"""The oracle with every count that was left open.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
            step_size: $\eta$.
            num_steps: How many accepted tries are needed.
            tries: How many tries are made in all.
            share: What the draws of all tries may fail with.
        """

    @abc.abstractmethod
    def serves(self, regularity: Regularity, feasible: AbstractSet) -> bool:
        """Whether what planning fixed is right for such a potential.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
        """

    @abc.abstractmethod
    def bias(self, regularity: Regularity, step_size: float) -> float:
        r"""How far, in total variation, the law of an accepted try is from its target.

        Args:
            regularity: What is known of the potential.
            step_size: $\eta$.
        """

    @abc.abstractmethod
    def acceptance(
        self, regularity: Regularity, feasible: AbstractSet, step_size: float
    ) -> float:
        r"""A lower bound on the probability that a try is accepted.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
            step_size: $\eta$.
        """

    @abc.abstractmethod
    def gaussian(
        self, regularity: Regularity, feasible: AbstractSet, step_size: float
    ) -> tuple[float, float, float]:
        r"""Of the proposals, what their tries are planned from.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
            step_size: $\eta$.

        Returns:
            The standard deviation, and $w$ and $b$ such that the mean is at most $w
            \operatorname{dist}(y, X) + b$ from the set.
        """

    @abc.abstractmethod
    def evaluations(self) -> tuple[float, int]:
        """Per try, how many evaluations are needed on average, and are made at most."""

    @abc.abstractmethod
    def prepared(
        self,
        potential: AbstractPotential,
        feasible: AbstractSet,
        y: PyTree,
        step_size: float,
    ) -> PyTree:
        r"""What all tries at one $y$ share.

        Args:
            potential: $U$.
            feasible: The set.
            y: $y$.
            step_size: $\eta$.
        """

    @abc.abstractmethod
    def attempt(
        self,
        potential: AbstractPotential,
        feasible: AbstractSet,
        y: PyTree,
        prepared: PyTree,
        step_size: float,
        *,
        key: PRNGKey,
    ) -> tuple[PyTree, Bool[Array, ""], Float[Array, ""]]:
        r"""One try.

        Args:
            potential: $U$.
            feasible: The set.
            y: $y$.
            prepared: What `prepared` gave for $y$.
            step_size: $\eta$.
            key: A typed key.

        Returns:
            The proposal, whether it is accepted, and how many evaluations were needed.
        """


def planned_draw_tries(
    oracle: AbstractProximalOracle,
    regularity: Regularity,
    feasible: AbstractSet,
    *,
    step_size: float,
    num_steps: int,
    tries: int,
    share: float,
) -> int:
    r"""The least number of tries with which `draw_failure` is at most `share`.

    Args:
        oracle: Whose proposals are drawn.
        regularity: What is known of the potential.
        feasible: The set.
        step_size: $\eta$.
        num_steps: How many points $y$ there are.
        tries: How many tries of the oracle.
        share: What all draws may fail with.

    Raises:
        ValueError: More than 100 000 tries would be needed.
    """
    chance, _ = _draw_chance(
        oracle, regularity, feasible, step_size, share / (2 * num_steps)
    )
    if chance >= 1:
        return 1
    need = math.log(share / (2 * oracle.draws * tries))
    count = math.ceil(need / math.log1p(-chance)) if chance > 0 else math.inf
    if count > _MOST_DRAW_TRIES:
        raise ValueError(
            f"{type(oracle).__name__}: a Gaussian restricted to the "
            f"{type(feasible).__name__} would need {count} tries in {tries} draws; at "
            f"most {_MOST_DRAW_TRIES} are made. Use a smaller step_size, or a Box."
        )
    return max(1, int(count))


def draw_failure(
    oracle: AbstractProximalOracle,
    regularity: Regularity,
    feasible: AbstractSet,
    *,
    step_size: float,
    num_steps: int,
    tries: int,
    share: float,
) -> float:
    r"""The chance that any draw of a proposal runs out of its tries.

    That some $y$ comes farther from the set than a reach, plus that of rejecting all
    tries of any draw within it.

    Args:
        oracle: Whose proposals are drawn.
        regularity: What is known of the potential.
        feasible: The set.
        step_size: $\eta$.
        num_steps: How many points $y$ there are.
        tries: How many tries of the oracle.
        share: Half of it is the chance that the reach is chosen for.
    """
    far = share / (2 * num_steps)
    chance, unbounded = _draw_chance(oracle, regularity, feasible, step_size, far)
    if chance >= 1:
        return 0.0
    rejected = math.exp((oracle.draw_tries or 1) * math.log1p(-chance))
    return (0.0 if unbounded else num_steps * far) + oracle.draws * tries * rejected


def _draw_chance(oracle, regularity, feasible, step_size, far) -> tuple[float, bool]:
    """The least chance that a try of a draw is accepted, and whether at any mean."""
    deviation, weight, shift = oracle.gaussian(regularity, feasible, step_size)
    reach = restricted.reach(feasible, regularity.dimension, math.sqrt(step_size), far)
    chance = restricted.acceptance(
        feasible, regularity.dimension, deviation, weight * reach + shift
    )
    return chance, not isinstance(feasible, Ball)


def finite(tree: PyTree) -> PyTree:
    """The tree with zero in place of NaN and infinite values.

    Args:
        tree: Arrays.
    """
    return jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, 0), tree)


def combination(scale: Any, tree: PyTree, other_scale: Any, other: PyTree) -> PyTree:
    """The sum of two trees times their scales, in the dtypes of the first.

    Args:
        scale: Of the first.
        tree: The first.
        other_scale: Of the second.
        other: The second.
    """
    return optax.tree.add(scaled(scale, tree), scaled(other_scale, other))


def scaled(scale: Any, tree: PyTree) -> PyTree:
    """The tree times a number, in its dtypes.

    Args:
        scale: The number.
        tree: Arrays.
    """
    return jax.tree.map(lambda v: jnp.asarray(scale, v.dtype) * v, tree)
