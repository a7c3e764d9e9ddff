"""One-level problems inside a bilevel one: the records they read, their objectives.

And the gradients of the penalty method in x, and forecasts of steps that overshoot.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from typing_extensions import override

from .._checks import Number
from ..core.descent import Descent, float_array, overshooting_row
from ..core.proximal import operator, smooth_part
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.budget import People
from ..privacy.queries import LEVELS, Query
from ..privacy.rows import ForecastRow
from ..privacy.sampling.base import AbstractSampling
from ..sets import AbstractSet, Box, corners
from .problem import BilevelProblem, Levels, Sizes

Reads = Literal["upper", "lower", "both"]
# The queries at a clip norm, and whether they share one batch.
Queries = Callable[[Any, AbstractSampling, Sizes], tuple[tuple[Query, ...], bool]]
# The gradient of one record's loss at a point; arguments are the point and the record.
RecordGradient = Callable[[PyTree, PyTree], PyTree]


def levels_queries(
    clip_norms: Levels, sampling: AbstractSampling, sizes: Sizes
) -> tuple[tuple[Query, ...], bool]:
    """Return a tuple of queries, one per level read, and whether they share a batch.

    The clip norm of a level that is not read is `None`.
    """
    queries = tuple(
        Query(role, getattr(sizes, role), clip_norm, sampling)
        for role in LEVELS
        if (clip_norm := getattr(clip_norms, role)) is not None
    )
    return queries, sizes.people is People.SHARED and len(queries) > 1


def queries_of(reads: Reads) -> Queries:
    """Return a function from clip norm, sampling, sizes to (queries, same batch?).

    A run on both has one clip norm and weighs records equally: upper gradients
    are multiplied by `1 / equal_weights(sizes)` after they are clipped.
    """

    def queries(clip_norm, sampling, sizes):
        above = clip_norm / equal_weights(sizes) if reads == "both" else clip_norm
        upper = None if reads == "lower" else above
        lower = None if reads == "upper" else clip_norm
        return levels_queries(Levels(upper, lower), sampling, sizes)

    return queries


def equal_weights(sizes: Sizes | None) -> float:
    """Return the penalty that weighs all records alike: lower over upper count."""
    if sizes is None:
        raise ValueError("both levels need sizes; call solver.with_sizes(sizes).")
    return sizes.lower / sizes.upper


def noise_std(solver: Any, queries: Queries, sizes: Any) -> Array:
    """Return the noise standard deviation of one release of a one-level solver.

    For a solver of clipped means, with its noise; the number may be traced.
    """
    read, _ = queries(solver.clip_norm, solver.sampling, sizes)
    parts = sum(q.clip_norm / q.sampling.denominator(q.size) for q in read)
    noise = solver.release_noise
    return noise.deviation * noise.neighbours.contributions * parts


@dataclasses.dataclass(frozen=True)
class Objective:
    """Function that a one-level run minimizes, given by its gradients."""

    w_set: AbstractSet
    records: Mapping[str, RecordGradient]  # by the level of the record
    # The gradient of the public terms but for a proximal one, which has an operator.
    public: Callable[[PyTree], PyTree] = optax.tree.zeros_like
    prox: Callable[[Any, PyTree], PyTree] | None = None


class Level(AbstractFiniteSum):
    """One-level problem inside a bilevel one, such as the lower level at one x."""

    problem: BilevelProblem
    reads: Queries = eqx.field(static=True)  # depend on no released value
    # An `Objective`; `None` for a ledger, which needs the queries alone.
    objective: Any = eqx.field(static=True, default=None)

    @property
    def w_set(self) -> AbstractSet:
        """Feasible set of the objective."""
        return self.objective.w_set

    @override
    def record_gradients(self, w):
        gradients = self.objective.records.items()
        return {role: functools.partial(fun, w) for role, fun in gradients}

    @override
    def public_gradient(self, w):
        return self.objective.public(w)

    @override
    def proximal_step(self):
        return self.objective.prox

    @override
    def queries(self, clip_norm, sampling, sizes):
        return self.reads(clip_norm, sampling, sizes)

    @override
    def sizes_of(self, data, people=None):
        return self.problem.sizes_of(data, people)

    @override
    def check_sizes(self, owner, sizes):
        self.problem.check_sizes(owner, sizes)

    @override
    def check_people(self, data, people):
        self.problem.check_people(data, people)

    def check(self, w0: PyTree, data: Levels) -> None:
        """Check nothing: the bilevel problem was checked as a whole."""


def lower_level(problem: BilevelProblem, x: PyTree) -> Level:
    """Return the `Level` in y of the lower level at a released x."""
    return Level(problem, queries_of("lower"), lower_objective(problem, x))


def penalized_level(
    problem: BilevelProblem, x: PyTree, penalty: Number, upper_clip_norm: Number
) -> Level:
    r"""Return the `Level` in y of lower plus upper / penalty, at a released x.

    It is $\min_y g(x, y) + f(x, y) / \lambda$ at a released x; `penalty` is $\lambda$.
    `upper_clip_norm` is that of $\nabla_y f(x, y; z)$, before $1 / \lambda$.
    """

    def queries(clip_norm, sampling, sizes):
        upper = upper_clip_norm / penalty
        return levels_queries(Levels(upper, clip_norm), sampling, sizes)

    return Level(problem, queries, lower_objective(problem, x, penalty))


def lower_objective(
    problem: BilevelProblem, x: PyTree, penalty: Number | None = None
) -> Objective:
    r"""Return the lower `Objective` in y, plus upper / penalty if one is given.

    The latter is $g + f / \lambda$: it has the minimizer of $f + \lambda g$, and
    gradients of order one. `x` is released.
    """

    def upper(w, record):
        gradient = jax.grad(problem.upper, 1)(x, w, record)
        return jax.tree.map(lambda v: v / penalty, gradient)

    def lower(w, record):
        return jax.grad(problem.lower, 1)(x, w, record)

    def public(w):
        total = _public_gradient(smooth_part(problem.lower_public), 1, x, w)
        if problem.upper_public is None or penalty is None:
            return total
        above = jax.grad(problem.upper_public, 1)(x, w)
        return jax.tree.map(lambda a, b: a + b / penalty, total, above)

    records = {"lower": lower} | ({} if penalty is None else {"upper": upper})
    return Objective(problem.y_set, records, public, operator(problem.lower_public, x))


def upper_objective(problem: BilevelProblem, y: PyTree) -> Objective:
    """Return the upper level's `Objective` as a function of x, at a released y."""

    def upper(w, record):
        return jax.grad(problem.upper)(w, y, record)

    def public(w):
        return _public_gradient(problem.upper_public, 0, w, y)

    return Objective(problem.x_set, {"upper": upper}, public)


def validation_objective(problem: BilevelProblem, x: PyTree) -> Objective:
    """Return the upper level's `Objective` as a function of y, at a released x."""

    def upper(w, record):
        return jax.grad(problem.upper, 1)(x, w, record)

    def public(w):
        return _public_gradient(problem.upper_public, 1, x, w)

    return Objective(problem.y_set, {"upper": upper}, public)


def _public_gradient(term: Callable | None, argument: int, *pair: PyTree) -> PyTree:
    if term is None:
        return optax.tree.zeros_like(pair[argument])
    return jax.grad(term, argument)(*pair)


def penalty_gradients(
    problem: BilevelProblem, penalty: Number, x: PyTree, y: PyTree, z: PyTree
) -> dict[str, Callable[[PyTree], PyTree]]:
    r"""Return a dict by level reading x: function from record to penalty gradient in x.

    $\nabla_x f(x, z)$ of an upper record, $\lambda (\nabla_x g(x, z) - \nabla_x g(x,
    y))$ of a lower one, for the levels whose losses read x. Here $y$ is the solution of
    the lower level and $z$ that of the penalized level.
    """

    def upper(record):
        return jax.grad(problem.upper)(x, z, record)

    def lower(record):
        at_z, at_y = (jax.grad(problem.lower)(x, w, record) for w in (z, y))
        return jax.tree.map(lambda a, b: penalty * (a - b), at_z, at_y)

    funs = {"upper": upper, "lower": lower}
    return {role: fun for role, fun in funs.items() if problem.reads_x(role)}


def public_penalty_gradient(
    problem: BilevelProblem, penalty: Number, x: PyTree, y: PyTree, z: PyTree
) -> PyTree:
    """Return the public terms' part of the penalty method's gradient in x."""
    of_upper = _public_gradient(problem.upper_public, 0, x, z)
    at_z, at_y = (_public_gradient(problem.lower_public, 0, x, w) for w in (z, y))
    return jax.tree.map(lambda u, a, b: u + penalty * (a - b), of_upper, at_z, at_y)


def shortened_in_x(
    problem: BilevelProblem, descent: Descent, gradient: PyTree, x: PyTree, y: PyTree
) -> PyTree:
    """Return `gradient`, shortened if a step in x overshoots the upper public term.

    Privacy:
        Post-processing of released values, `y` among them: free.
    """
    public = problem.upper_public
    if public is None:
        return gradient
    return descent.curvature_limited(gradient, lambda x: jax.grad(public)(x, y), x)


def rows_of_steps(
    problem: BilevelProblem,
    w0: PyTree,
    steps: Mapping[str, Any],
    penalty: Number | None = None,
) -> tuple[ForecastRow, ...]:
    """Return at most two `ForecastRow`s: the steps in y that overshoot most, if any.

    `steps` are solvers of one level or `Descent`s, by name; those without a `step_size`
    have no row. The level is the penalized one, or the lower one without a penalty. As
    `overshooting_row`: one row for the initial point. One more row, whose `from_start`
    is false, if an end of a box of x is worse.
    """
    if problem.lower_public is None and problem.upper_public is None:
        return ()
    sizes = {k: v.step_size for k, v in steps.items() if hasattr(v, "step_size")}
    x, y = jax.tree.map(float_array, w0[0]), w0[1]

    def worst(x: PyTree) -> list[ForecastRow]:
        gradient = lower_objective(problem, x, penalty).public
        rows = [
            dataclasses.replace(row, release=f"steps of {name}")
            for name, size in sizes.items()
            for row in overshooting_row(size, gradient, y)
        ]
        return sorted(rows, key=_excess)[-1:]

    at_start = worst(problem.x_set.project(x))
    at_ends = []
    ends = corners(problem.x_set, x) if isinstance(problem.x_set, Box) else ()
    for end in ends:  # with entries of x where the box is unbounded
        inside = jax.tree.map(lambda v, e: jnp.where(jnp.isfinite(e), e, v), x, end)
        at_ends += worst(inside)
    worse = [
        dataclasses.replace(row, from_start=False)
        for row in sorted(at_ends, key=_excess)[-1:]
        if not at_start or _excess(row) > _excess(at_start[0])
    ]
    return (*at_start, *worse)


def row_in_x(
    problem: BilevelProblem, step_size: Any, w0: PyTree
) -> tuple[ForecastRow, ...]:
    """Return a tuple: a `ForecastRow` if steps in x overshoot at `w0`, else nothing."""
    public = problem.upper_public
    if public is None:
        return ()
    x, y = problem.x_set.project(jax.tree.map(float_array, w0[0])), w0[1]
    rows = overshooting_row(step_size, lambda x: jax.grad(public)(x, y), x)
    return tuple(dataclasses.replace(row, release="steps of x") for row in rows)


def _excess(row: ForecastRow) -> float:
    return (row.step_size or 0.0) * (row.public_curvature or 0.0)
