r"""Interface of scores: computed from records, sealed before they leave.

The modules here read records: mean losses of clipped range, and objectives of two
levels whose sensitivity constants prove.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ...bilevel.problem import BilevelProblem
from ...onelevel.problem import FiniteSum
from ...privacy.exact.floats import check_rounding
from ...privacy.per_example.clipping import Basis, one_record
from ..mechanisms import BoundedScore, Measure
from ..samplers.base import AbstractPotential, Regularity

DrawProblem = BilevelProblem | FiniteSum

# The fractions that errors of solves and rounding may add to a spread.
SOLVES, ROUNDING = 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class AbstractScore(abc.ABC):
    """Score of a problem, with one measure of its sensitivity.

    Args:
        problem: The problem.
        measure: `"spread"` or `"slope"`, as in `BoundedScore`.
        sizes: The planned sizes.
    """

    problem: Any
    measure: Measure
    sizes: Any

    @abc.abstractmethod
    def contributions(self, dtype: DTypeLike) -> dict[str, Any]:
        """Return the contribution of one record per role, as in `BoundedScore`.

        A spread counts the errors of scores that are computed in `dtype`.

        Raises:
            ValueError: Constants are missing, or `dtype` is too coarse.
        """

    @abc.abstractmethod
    def regularity(self, dtype: DTypeLike, dimension: int) -> Regularity:
        """Return what is known of the score, besides convexity. On the host."""

    @property
    def basis(self) -> Basis:
        """Basis of the contributions."""
        return Basis.CONSTANTS

    @property
    @abc.abstractmethod
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions of the guarantee, in the words of the report."""

    @abc.abstractmethod
    def potential(self, data: PyTree, start: PyTree) -> AbstractPotential:
        """Return the score itself. NON-PRIVATE."""

    def bounded(
        self, data: PyTree, start: PyTree, dtype: DTypeLike | None = None
    ) -> BoundedScore:
        """Seal the score; `dtype` is what was planned for, if that is coarser."""
        if dtype is None:
            dtype = jnp.result_type(*jax.tree.leaves(start))
        contribution = sum(self.contributions(dtype).values())
        raw = self.potential(data, start)
        return BoundedScore(raw, contribution, self.measure, self.basis)


def check_error(error: Any, spread: Any, dtype: DTypeLike, remedy: str) -> None:
    """Refuse a dtype in which computed scores are too far off.

    Raises:
        ValueError: Four errors are more than 6 % of what a record changes without them.
    """
    check_rounding(
        "ExponentialMechanism",
        "errors of computed scores",
        4 * error,
        spread,
        dtype,
        allowed=SOLVES + ROUNDING,
        remedy=remedy,
    )


def check_loss_dtype(loss: Callable, points: tuple, records: PyTree) -> None:
    """Refuse a loss that is coarser than what errors are planned for.

    Raises:
        ValueError: At `(*points, record)` it has a coarser dtype than the points.
    """
    dtype = jax.eval_shape(loss, *points, one_record(records)).dtype
    planned = jnp.result_type(*jax.tree.leaves(points))
    if jnp.finfo(dtype).bits < jnp.finfo(planned).bits:
        raise ValueError(
            f"a loss of dtype {dtype} is coarser than the planned {planned} of the "
            "initial point. Compute the loss, and give records, in that dtype."
        )
