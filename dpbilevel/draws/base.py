"""Base class of solvers that draw their answer: one step, one point."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, Self
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import PyTree
from typing_extensions import override

from .._checks import Count, Number
from ..bilevel.problem import BilevelProblem
from ..core.loop import check_planned_dtype
from ..core.solver import AbstractSolver
from ..onelevel.problem import FiniteSum
from ..privacy.budget import Neighbours, People
from ..privacy.ledger import Ledger
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.per_example.clipping import Basis
from ..privacy.queries import LEVELS, RECORDS, Query, check_rows, of_role
from ..sets import AbstractSet
from .mean_loss import AbstractScore, DrawProblem
from .mechanisms import AbstractDrawMechanism, Draw
from .samplers.base import AbstractSampler, Regularity
from .samplers.grid import Grid

DRAW = "draw of x"


class DrawState(eqx.Module):
    """Public initial point, and the answer once it is drawn."""

    start: PyTree  # (x, y) for two levels
    x: PyTree  # that of the initial point, then the drawn one
    levels: int = eqx.field(static=True)


class DrawPlan(NamedTuple):
    """Score, mechanism, rate and regularity of a draw, planned without any data."""

    score: AbstractScore
    contributions: dict[str, Any]  # of one record per role, as in BoundedScore
    regularity: Regularity  # of the score
    mechanism: AbstractDrawMechanism
    rate: float  # k
    potential: Regularity  # of the potential that the sampler is given


class AbstractDrawSolver(AbstractSolver[Any, DrawState]):
    """A solver whose only step is one draw."""

    sampler: AbstractSampler
    mechanism: AbstractDrawMechanism = eqx.field(kw_only=True)
    # The declared number of coordinates of x.
    dimension: Count | None = eqx.field(static=True, default=None, kw_only=True)
    # The dtype of scores in the plan; set by `calibrate`.
    dtype: str | None = eqx.field(static=True, default=None, kw_only=True)
    problem_type: ClassVar[Any] = BilevelProblem | FiniteSum
    in_config: ClassVar[bool] = False
    basis: ClassVar[Basis] = Basis.CONSTANTS  # unless a subclass enforces a bound
    num_steps: ClassVar[int] = 1
    declared_convexity: AbstractVar[float | None]  # strong convexity of the score

    @abc.abstractmethod
    def score_of(self, problem: DrawProblem, sizes: Any) -> AbstractScore:
        """Return the `AbstractScore` of a problem at the planned sizes."""

    @abc.abstractmethod
    def density(
        self, problem: DrawProblem, sensitivity: Number
    ) -> tuple[AbstractDrawMechanism, Number]:
        """Return the draw's mechanism and the regularized score's strong convexity."""

    @abc.abstractmethod
    def declarations(self, plan: DrawPlan) -> tuple[str, ...]:
        """Return sentences as a tuple: declarations besides the score's assumptions."""

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.mechanism.neighbours

    def init(self, problem, w0) -> DrawState:
        """Return the public state before the draw, at `w0` projected onto the set.

        Raises:
            ValueError: It is of another size than planned for.
        """
        w0 = jax.tree.map(jnp.asarray, w0)
        two_levels = isinstance(problem, BilevelProblem)
        x, planned = (w0[0] if two_levels else w0), self.coordinates()
        if optax.tree.size(x) != planned:
            size = optax.tree.size(x)
            raise ValueError(
                f"solve: the plan is for {planned} coordinates, the start has {size}."
            )
        check_planned_dtype(type(self).__name__, self.dtype, w0)
        x = feasible_set(problem).project(x)
        return DrawState((x, w0[1]) if two_levels else x, x, 2 if two_levels else 1)

    @override
    def step(self, problem, data, state, *, key) -> DrawState:
        roles = LEVELS if state.levels == 2 else (RECORDS,)
        for role in roles:
            records, size = of_role(data, role), of_role(self.sizes, role)
            check_rows(role, records, size, self.neighbours)
        dtype = self.scored_dtype(state.start)
        sealed = self.score_of(problem, self.sizes).bounded(data, state.start, dtype)
        sensitivity = self.neighbours.contributions * sealed.contribution
        mechanism, convexity = self.density(problem, sensitivity)
        declared = self.declared_convexity or 0.0
        shape: Any = {"regularizer": convexity - declared, "convexity": declared}
        feasible, start = feasible_set(problem), state.x
        # Lowy and Liu, (4) and (5)
        x = mechanism.draw(sealed, self.sampler, feasible, start, key=key, **shape)
        return dataclasses.replace(state, x=x)

    def released(self, state) -> PyTree:
        """Return the drawn $x$; for two levels the pair `(x, None)`."""
        return (state.x, None) if state.levels == 2 else state.x

    def plan(self, problem: DrawProblem, sizes: Any) -> DrawPlan:
        """Return the `DrawPlan` of score, mechanism and rate, on the host, or raise.

        Refuses a problem that lacks constants, a solver that is not calibrated, and
        a default floating-point dtype that is too coarse.
        """
        # If the number of records is private and the denominator public, no constant
        # bounds the mean loss, which all draws but those from candidates depend on.
        moved = isinstance(problem, BilevelProblem) or self.sampler.continuous
        if moved and self.neighbours is not Neighbours.REPLACE_ONE:
            raise ValueError(
                f"{type(self).__name__}: proved under replace-one only. Use "
                "REPLACE_ONE, or ExponentialMechanism(Grid(...)) on one level."
            )
        # The dtype of the plan or the default dtype, whichever is coarser.
        default = jnp.result_type(float)
        dtypes = default, jnp.dtype(self.dtype or default)
        dtype = min(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)
        score, size = self.score_of(problem, sizes), self.coordinates()
        contributions = score.contributions(dtype)
        sensitivity = self.neighbours.contributions * sum(contributions.values())
        mechanism, convexity = self.density(problem, sensitivity)
        # In double precision, whatever the numbers were given in.
        mechanism, convexity = jax.tree.map(float, (mechanism, convexity))
        rate = float(mechanism.rate(sensitivity * (1 + ROUNDING_MARGIN), convexity))
        declared, regularity = self.declared_convexity, score.regularity(dtype, size)
        regularity = dataclasses.replace(regularity, strong_convexity=declared)
        regularizer = convexity - (declared or 0.0)
        # The center of the quadratic term is a point of the set.
        reach = feasible_set(problem).diameter if regularizer else 0.0
        potential = regularity.of_potential(rate, regularizer, reach)
        return DrawPlan(score, contributions, regularity, mechanism, rate, potential)

    def planned(self, problem: DrawProblem) -> tuple[DrawPlan, Any]:
        """Return `DrawPlan` and `Draw`; refuse uncalibrated or unproved solvers."""
        owner = f"{type(self).__name__}.bound"
        if self.sizes is None:
            raise ValueError(f"{owner}: calibrate the solver first.")
        draw: Any = self.ledger(problem, self.sizes).releases[0]
        if not draw.guarantee.proved:
            raise ValueError(
                f"{owner}: the sampler is cut short. Leave out its counts."
            )
        return self.plan(problem, self.sizes), draw

    @override
    def ledger(self, problem: DrawProblem, sizes: Any) -> Ledger:
        plan = self.plan(problem, sizes)
        queries = tuple(
            Query.of_contribution(role, of_role(sizes, role), float(contribution))
            for role, contribution in plan.contributions.items()
        )
        inexact = 0.0
        if plan.mechanism.measure == "slope":  # a spread includes the errors
            error = plan.regularity.error + plan.regularity.rounding
            # Densities within exp(+-2 z) of each other are tanh(z) apart at most.
            inexact = math.tanh(plan.rate * error)
        guarantee = self.sampler.guarantee(plan.potential, feasible_set(problem))
        basis = plan.score.basis.worse(self.basis)
        parts = plan.mechanism, plan.rate, guarantee, basis, inexact
        draw = Draw(DRAW, 1, queries, *parts)
        declared = *self.declarations(plan), *plan.score.assumptions
        people = getattr(sizes, "people", People.OVERLAPPING)
        return Ledger((draw,), people, (*declared, *self.sampler.assumptions))

    @override
    def with_noise(self, scale: Number) -> Self:
        mechanism = self.mechanism.with_multiplier(scale)
        return dataclasses.replace(self, mechanism=mechanism)

    def with_counts(self, problem, sizes=None) -> Self:
        """Return a copy with dtype and sampler counts set, for JAX's default dtype."""
        solver = dataclasses.replace(self, dtype=jnp.result_type(float).name)
        sizes = self.sizes if sizes is None else sizes
        potential = solver.plan(problem, sizes).potential
        sampler = self.sampler.with_counts(potential, feasible_set(problem))
        return dataclasses.replace(solver, sampler=sampler)

    @override
    def dimensions(self, w0) -> dict[str, int]:
        return {DRAW: self.coordinates()}

    def coordinates(self) -> int:
        """Return the number of coordinates of x, of the candidates or as declared.

        Raises:
            ValueError: It is not declared.
        """
        if isinstance(self.sampler, Grid):
            return self.sampler.dimension
        if self.dimension is None:
            raise ValueError(f"{type(self).__name__}: give dimension=, the size of x.")
        return self.dimension

    def scored_dtype(self, start: PyTree) -> jnp.dtype:
        """Return the dtype whose rounding counts: the planned one, else `start`'s.

        Otherwise the draw would have another rate than its sampler was planned for.
        """
        return jnp.dtype(self.dtype or jnp.result_type(*jax.tree.leaves(start)))


def feasible_set(problem: DrawProblem) -> AbstractSet:
    """Return the set of a problem that $x$ is drawn from."""
    return problem.x_set if isinstance(problem, BilevelProblem) else problem.w_set
