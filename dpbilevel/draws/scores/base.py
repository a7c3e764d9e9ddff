r"""What a score is: computed from records, sealed before it leaves.

The modules here are the third place that reads records: mean losses of clipped range,
and objectives of two levels whose sensitivity constants prove.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ...bilevel.problem import BilevelProblem
from ...onelevel.problem import FiniteSum
from ...privacy.clipping import Basis, one_record
from ..mechanisms import BoundedScore, Measure
from ..samplers.base import AbstractPotential, Regularity

DrawProblem = BilevelProblem | FiniteSum

# What the error of computed values may add to a spread.
SOLVES, ROUNDING = 0.01, 0.05
# Points whose lower levels are solved side by side.
TOGETHER = 128


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a score before any data is seen, or from the problem alone.

    Attributes:
        contributions: One record's share per role, in the sense of `BoundedScore`.
        basis: What they rest on.
        lipschitz: The Lipschitz constant of the score.
        smoothness: That of its gradient.
        error: How far a computed score may be off; for a spread that is part of the
            contributions as well.
        gradient_error: The same for its gradient.
        rounding: How far rounding alone moves a score that is computed exactly but for
            that, and its gradient times the diameter of the set, where that is not part
            of the contributions either.
        num_terms: The number of records, where the score is a mean over them.
        term_lipschitz: The Lipschitz constant of each term.
        assumptions: What all this rests on, in the words of the report.
    """

    contributions: dict[str, Any]
    basis: Basis
    lipschitz: Any
    smoothness: Any = math.inf
    error: Any = 0.0
    gradient_error: Any = 0.0
    rounding: Any = 0.0
    num_terms: int | None = None
    term_lipschitz: float | None = None
    assumptions: tuple[str, ...] = ()

    def regularity(self, dimension: int, convexity: float | None) -> Regularity:
        """As samplers want it.

        Args:
            dimension: The number of coordinates.
            convexity: The declared strong convexity, or `None` where the score is not
                declared convex.
        """
        return Regularity(
            dimension=dimension,
            lipschitz=float(self.lipschitz),
            strong_convexity=convexity,
            smoothness=float(self.smoothness),
            error=float(self.error),
            gradient_error=float(self.gradient_error),
            rounding=float(self.rounding),
            num_terms=self.num_terms,
            term_lipschitz=self.term_lipschitz,
        )


@dataclasses.dataclass(frozen=True)
class AbstractScore(abc.ABC):
    """A score of a problem, with one measure of its sensitivity.

    Args:
        problem: The problem.
        measure: `"spread"` or `"slope"`, as in `BoundedScore`.
        sizes: The planned sizes.
    """

    problem: Any
    measure: Measure
    sizes: Any

    @abc.abstractmethod
    def facts(self, dtype: DTypeLike) -> Facts:
        """What is known of it where values are computed in `dtype`.

        On the host, but inside a program whose argument the problem is.

        Raises:
            ValueError: Constants are missing, or `dtype` is too coarse.
        """

    @abc.abstractmethod
    def potential(self, data: PyTree, start: PyTree) -> AbstractPotential:
        """The score itself. NON-PRIVATE."""

    def bounded(
        self, data: PyTree, start: PyTree, dtype: DTypeLike | None = None
    ) -> BoundedScore:
        """The score, sealed.

        Args:
            data: The records.
            start: A public point; its dtype is computed in.
            dtype: What was planned for, if that is coarser.
        """
        if dtype is None:
            dtype = jnp.result_type(*jax.tree.leaves(start))
        facts = self.facts(dtype)
        share = sum(facts.contributions.values())
        raw = self.potential(data, start)
        return BoundedScore(raw, share, self.measure, facts.basis)


def check_error(error: Any, spread: Any, dtype: DTypeLike, remedy: str) -> None:
    """Refuses a dtype in which computed scores are too far off.

    Args:
        error: How far one computed score may be off.
        spread: What a record may change without it.
        dtype: What scores are computed in.
        remedy: What to do besides enabling 64-bit.

    Raises:
        ValueError: Four errors are more than 6 % of the spread.
    """
    if isinstance(error / spread, jax.Array):  # in a program: checked when planned
        return
    if 4 * error <= (SOLVES + ROUNDING) * spread:
        return
    enable = ""
    if jnp.dtype(dtype) != jnp.float64:
        enable = (
            'enable 64-bit (jax.config.update("jax_enable_x64", True), with float64 '
            "records and starting point); or "
        )
    raise ValueError(
        f"ExponentialMechanism: in {jnp.dtype(dtype).name}, errors of computed scores "
        f"may add {4 * error / spread:.2g} of what a record may change, and "
        f"{SOLVES + ROUNDING:.2g} is allowed. {enable}{remedy}."
    )


def check_loss_dtype(
    loss: Callable, points: tuple[PyTree, ...], records: PyTree
) -> None:
    """Refuses a loss that is coarser than what errors are planned for.

    Args:
        loss: The loss of one record.
        points: Its first arguments.
        records: The records, or their shapes.

    Raises:
        ValueError: The loss returns a coarser dtype than that of the points.
    """
    found = jax.eval_shape(loss, *points, one_record(records)).dtype
    wanted = jnp.result_type(*jax.tree.leaves(points))
    if jnp.finfo(found).bits < jnp.finfo(wanted).bits:
        raise ValueError(
            f"a loss of dtype {found} is coarser than the starting point, {wanted}, "
            "which errors of scores are planned for; compute the loss in the dtype of "
            "its arguments, and give records of it."
        )


def least(first: Any, second: Any) -> Any:
    """The smaller of two numbers, on the host or in a program.

    Args:
        first: A number.
        second: Another.
    """
    known = not isinstance(first, jax.Array) and not isinstance(second, jax.Array)
    return min(first, second) if known else jnp.minimum(first, second)


def batched(potential: AbstractPotential, xs: PyTree) -> Float[Array, " m"]:
    """A potential at many points, some of them side by side.

    Args:
        potential: The potential.
        xs: The points, stacked.
    """
    return jax.lax.map(potential, xs, batch_size=TOGETHER)
