"""What solvers that draw their answer have in common: one step, one point."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .. import _checks
from ..bilevel.problem import BilevelProblem
from ..core.loop import check_planned_dtype
from ..core.solver import AbstractSolver
from ..onelevel.problem import FiniteSum
from ..privacy.budget import Neighbours
from ..privacy.queries import RECORDS, Query
from .samplers.base import AbstractSampler, Regularity
from .samplers.grid import Grid
from .scores.base import DrawProblem, Facts

if TYPE_CHECKING:
    from typing import ClassVar as AbstractVar
else:
    from equinox import AbstractVar

DRAW = "draw of x"


class DrawState(eqx.Module):
    """The public start, and the answer once it is drawn.

    Attributes:
        start: The start: `(x, y)` for two levels.
        x: The start's, then the drawn one.
        levels: How many levels the problem has. Static.
    """

    start: PyTree
    x: PyTree
    levels: int = eqx.field(static=True)


class AbstractDrawSolver(AbstractSolver[DrawProblem, DrawState]):
    """A solver whose only step is one draw.

    Attributes:
        sampler: How it draws.
        mechanism: What makes the draw private.
        dimension: The declared number of coordinates of x.
        dtype: What the plan takes scores to be computed in; set by `calibrate`.
    """

    sampler: AbstractVar[AbstractSampler]
    mechanism: AbstractVar[Any]
    dimension: AbstractVar[int | None]
    dtype: AbstractVar[str | None]
    problem_type: ClassVar[Any] = BilevelProblem | FiniteSum
    in_config: ClassVar[bool] = False

    @abc.abstractmethod
    def regularity(self, problem: DrawProblem, sizes: Any) -> Regularity:
        """What is known of the potential that the sampler is given.

        Args:
            problem: The problem.
            sizes: The planned sizes.
        """

    @property
    def num_steps(self) -> int:
        """One."""
        return 1

    @property
    def neighbours(self) -> Neighbours:
        """The relation of the mechanism."""
        return self.mechanism.neighbours

    def init(self, problem: DrawProblem, w0: PyTree) -> DrawState:
        """Starts at `w0`, which is public and only some samplers read.

        Raises:
            ValueError: It is of another size than planned for.
        """
        w0 = jax.tree.map(jnp.asarray, w0)
        two = isinstance(problem, BilevelProblem)
        x, planned = (w0[0] if two else w0), self.coordinates()
        if optax.tree.size(x) != planned:
            raise ValueError(
                f"solve: the plan is for {planned} coordinates, but the starting point "
                f"has {optax.tree.size(x)}; give candidates, or dimension=, of that "
                "size."
            )
        check_planned_dtype(type(self).__name__, self.dtype, w0)
        x = feasible_set(problem).project(x)
        return DrawState((x, w0[1]) if two else x, x, 2 if two else 1)

    def released(self, state: DrawState) -> PyTree:
        """The drawn `x`; no `y`."""
        return (state.x, None) if state.levels == 2 else state.x

    def with_counts(self, problem: DrawProblem, sizes: Any = None) -> Self:
        """The same solver with the counts of its sampler.

        Args:
            problem: The problem.
            sizes: The planned sizes; its own by default.
        """
        now: dict[str, Any] = {"dtype": jnp.result_type(float).name}
        solver = dataclasses.replace(self, **now)
        regularity = solver.regularity(problem, self.sizes if sizes is None else sizes)
        counts: dict[str, Any] = {
            "sampler": self.sampler.planned(regularity, feasible_set(problem))
        }
        return dataclasses.replace(solver, **counts)

    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """The draw has the size of x."""
        del w0
        return {DRAW: self.coordinates()}

    def coordinates(self) -> int:
        """The number of coordinates, from the candidates or as declared.

        Raises:
            ValueError: It is not declared.
        """
        owner = type(self).__name__
        if isinstance(self.sampler, Grid):
            return self.sampler.dimension
        if self.dimension is None:
            raise ValueError(
                f"{owner}: {type(self.sampler).__name__} takes more steps in more "
                "dimensions, and they are fixed before data is seen; give dimension=, "
                "the number of coordinates of x."
            )
        _checks.count(owner, dimension=self.dimension)
        return self.dimension

    def check_relation(self, problem: DrawProblem) -> None:
        """Raises unless everything that is proved holds under the relation.

        With a private number of records over a public denominator no constant bounds
        the mean loss, on which all but draws from single points rest.

        Args:
            problem: The problem.

        Raises:
            ValueError: Add-or-remove-one with two levels or a continuous sampler.
        """
        if self.neighbours is Neighbours.REPLACE_ONE:
            return
        if isinstance(problem, BilevelProblem) or self.sampler.continuous:
            raise ValueError(
                f"{type(self).__name__}: with two levels, or a sampler on a "
                "continuous set, what it rests on is proved under replace-one only, "
                f"got {self.neighbours}. Use Neighbours.REPLACE_ONE, or "
                "ExponentialMechanism(Grid(...)) on one level."
            )

    def planned_dtype(self) -> jnp.dtype:
        """What scores are planned for: the coarser of the plan's and the default."""
        default = jnp.result_type(float)
        planned = jnp.dtype(self.dtype or default)
        return min(default, planned, key=lambda dtype: jnp.finfo(dtype).bits)

    def scored_dtype(self, start: PyTree) -> jnp.dtype:
        """What a draw counts rounding in: the plan's dtype, for finer starts too.

        Otherwise the draw would have another rate than its sampler was planned for.

        Args:
            start: The starting point.
        """
        return jnp.dtype(self.dtype or jnp.result_type(*jax.tree.leaves(start)))


def feasible_set(problem: DrawProblem) -> Any:
    """The set that is drawn from.

    Args:
        problem: A `FiniteSum` or a `BilevelProblem`.
    """
    return problem.x_set if isinstance(problem, BilevelProblem) else problem.w_set


def queries_of(facts: Facts, sizes: Any) -> tuple[Query, ...]:
    """What the score reads, one query per role.

    Args:
        facts: The shares.
        sizes: The planned sizes.
    """
    return tuple(
        Query(role, n, float(share) * n)
        for role, share in facts.contributions.items()
        for n in [sizes if role == RECORDS else getattr(sizes, role)]
    )
