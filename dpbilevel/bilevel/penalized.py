"""Queries that read both levels, and the one-level problems inside a bilevel one."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .._checks import AbstractVar
from ..core.curvature import float_array, overshooting_row
from ..core.descent import Descent
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.budget import People
from ..privacy.queries import LEVELS, Query
from ..privacy.rows import ForecastRow
from ..privacy.sampling.base import AbstractSampling
from ..sets import AbstractSet, Box
from .problem import BilevelProblem, Levels, Sizes

Scalar = Float[Array, ""]

_SIGNS = (-jnp.inf, jnp.inf)


def levels_queries(
    clip_norms: Levels, sampling: AbstractSampling, sizes: Sizes
) -> tuple[tuple[Query, ...], bool]:
    """One query for each level that is read, and whether they share one batch.

    The clip norm of a level that is not read is `None`.
    """
    queries = tuple(
        Query(role, getattr(sizes, role), clip_norm, sampling)
        for role in LEVELS
        if (clip_norm := getattr(clip_norms, role)) is not None
    )
    return queries, sizes.people is People.SHARED and len(queries) > 1


class AbstractLevel(AbstractFiniteSum):
    """A one-level problem inside a bilevel one, whose records it reads.

    Attributes:
        problem: The bilevel problem.
    """

    problem: AbstractVar[BilevelProblem]

    @override
    def sizes_of(self, data: Levels, people: People | str | None = None) -> Sizes:
        return self.problem.sizes_of(data, people)

    @override
    def check_sizes(self, owner: str, sizes: object) -> None:
        self.problem.check_sizes(owner, sizes)

    @override
    def check_people(self, data: Levels, people: People) -> None:
        self.problem.check_people(data, people)

    def check(self, w0: PyTree, data: Levels) -> None:
        """Nothing to check: the bilevel problem was checked as a whole."""


def noise_std(solver: Any, level: AbstractFiniteSum, sizes: Sizes | None) -> Array:
    """Return the standard deviation of the noise of one release, in a program too.

    Args:
        solver: A one-level solver of clipped means, with its noise.
        level: What it solves.
        sizes: The planned sizes.
    """
    queries, _ = level.queries(solver.clip_norm, solver.sampling, sizes)
    parts = sum(q.clip_norm / q.sampling.denominator(q.size) for q in queries)
    noise = solver.release_noise
    return noise.multiplier * noise.neighbours.contributions * parts


class PenalizedLevel(AbstractLevel):
    r"""The one-level problems inside a bilevel one, at a fixed $x$.

    $\min_y g(x, y)$ when `penalty` is `None`, else $\min_y g(x, y) + f(x, y) /
    \lambda$, which has the minimizer of $f + \lambda g$ and gradients of order one.

    Args:
        problem: The bilevel problem.
        x: The upper variable, already private.
        penalty: $\lambda$, or `None` for the lower level alone.
        upper_clip_norm: The clip norm of $\nabla_y f(x, y; z)$, before $1/\lambda$.
    """

    problem: BilevelProblem
    x: PyTree
    penalty: float | Scalar | None = None
    upper_clip_norm: float | Scalar | None = None

    @property
    def w_set(self) -> AbstractSet:
        """The feasible set of y."""
        return self.problem.y_set

    def record_gradients(self, w: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
        r"""$\nabla_y g$ of a lower record, $\nabla_y f / \lambda$ of an upper one."""

        def lower(record):
            return jax.grad(self.problem.lower, 1)(self.x, w, record)

        def upper(record):
            gradient = jax.grad(self.problem.upper, 1)(self.x, w, record)
            return jax.tree.map(lambda v: v / self.penalty, gradient)  # g + f / lambda

        return {"lower": lower} | ({} if self.penalty is None else {"upper": upper})

    def public_gradient(self, w: PyTree) -> PyTree:
        r"""$\nabla_y r_g$, plus $\nabla_y r_f / \lambda$."""
        total = optax.tree.zeros_like(w)
        if self.problem.lower_public is not None:
            total = jax.grad(self.problem.lower_public, 1)(self.x, w)
        if self.problem.upper_public is not None and self.penalty is not None:
            upper = jax.grad(self.problem.upper_public, 1)(self.x, w)
            total = jax.tree.map(lambda a, b: a + b / self.penalty, total, upper)
        return total

    def queries(self, clip_norm, sampling, sizes) -> tuple[tuple[Query, ...], bool]:
        """One query on the lower records, and one on the upper ones if penalized."""
        above = None
        if self.penalty is not None and self.upper_clip_norm is not None:
            above = self.upper_clip_norm / self.penalty
        return levels_queries(Levels(above, clip_norm), sampling, sizes)


def both_levels(
    owner: str, problem: BilevelProblem, x: PyTree, sizes: Sizes | None, clip_norm: Any
) -> PenalizedLevel:
    """Both levels at a fixed x: every record weighs the same, under one clip norm.

    Args:
        owner: As in `equal_weights`.
        problem: The problem.
        x: The upper variable, already private.
        sizes: The planned sizes.
        clip_norm: That of a record's gradient.

    Raises:
        ValueError: As `equal_weights`.
    """
    return PenalizedLevel(problem, x, equal_weights(owner, sizes), clip_norm)


def shortened_in_x(
    problem: BilevelProblem, descent: Descent, gradient: PyTree, x: PyTree, y: PyTree
) -> PyTree:
    """The direction of x, shorter where a step overshoots the upper public term.

    Privacy:
        Post-processing of released values, `y` among them: free.
    """
    upper_public = problem.upper_public
    if upper_public is None:
        return gradient
    return descent.curvature_limited(
        gradient, lambda x: jax.grad(upper_public)(x, y), x
    )


def rows_of_steps(
    problem: BilevelProblem,
    w0: PyTree,
    steps: Mapping[str, Any],
    penalty: float | Scalar | None = None,
) -> tuple[ForecastRow, ...]:
    """The rows of a forecast on steps in y that overshoot the public terms.

    Args:
        problem: The problem.
        w0: The starting point.
        steps: What moves variables like y, by its name: solvers of one level, or
            `Descent`s. Those without a `step_size` say nothing about their steps.
        penalty: Of the penalized level, or `None` for the lower one alone.

    Returns:
        As `overshooting_row`: one row for the starting point, and one, where that is
        worse and `from_start` is false, for both ends of a box of x.
    """
    if problem.lower_public is None and problem.upper_public is None:
        return ()
    sizes = {k: v.step_size for k, v in steps.items() if hasattr(v, "step_size")}
    x, y = jax.tree.map(float_array, w0[0]), w0[1]

    def worst(x: PyTree) -> list[ForecastRow]:
        gradient = PenalizedLevel(problem, x, penalty).public_gradient
        rows = [
            dataclasses.replace(row, release=f"steps of {name}")
            for name, size in sizes.items()
            for row in overshooting_row(size, gradient, y)
        ]
        return sorted(rows, key=_excess)[-1:]

    at_start = worst(problem.x_set.project(x))
    at_ends = [row for end in _ends(problem.x_set, x) for row in worst(end)]
    worse = [
        dataclasses.replace(row, from_start=False)
        for row in sorted(at_ends, key=_excess)[-1:]
        if not at_start or _excess(row) > _excess(at_start[0])
    ]
    return (*at_start, *worse)


def row_in_x(
    problem: BilevelProblem, step_size: Any, w0: PyTree
) -> tuple[ForecastRow, ...]:
    """The row on steps in x that overshoot the upper public term at the start."""
    upper_public = problem.upper_public
    if upper_public is None:
        return ()
    x, y = problem.x_set.project(jax.tree.map(float_array, w0[0])), w0[1]
    rows = overshooting_row(step_size, lambda x: jax.grad(upper_public)(x, y), x)
    return tuple(dataclasses.replace(row, release="steps of x") for row in rows)


def _excess(row: ForecastRow) -> float:
    return (row.step_size or 0.0) * (row.public_curvature or 0.0)


def _ends(x_set: AbstractSet, x: PyTree) -> list[PyTree]:
    """Both ends of a box, with the entries of x where it has none."""
    if not isinstance(x_set, Box):
        return []
    infinite = [jax.tree.map(lambda v, s=s: jnp.full_like(v, s), x) for s in _SIGNS]
    return [
        jax.tree.map(lambda v, e: jnp.where(jnp.isfinite(e), e, v), x, end)
        for end in map(x_set.project, infinite)
    ]


def equal_weights(owner: str, sizes: Sizes | None) -> float:
    """The penalty n_g / n_f, at which every record of both levels weighs the same.

    Args:
        owner: Who asks, for the error.
        sizes: The planned sizes.

    Raises:
        ValueError: They are not known yet.
    """
    if sizes is None:
        raise ValueError(
            f"{owner}: fits on both levels weight them by their sizes; call "
            "solver.with_sizes(sizes), as calibrate does."
        )
    return sizes.lower / sizes.upper


class _AbstractUpperLevel(AbstractLevel):
    r"""The upper level $f(x, y)$ in one of its arguments.

    Attributes:
        argument: The position of that argument.
    """

    argument: ClassVar[int]

    @abc.abstractmethod
    def at(self, w: PyTree) -> tuple[PyTree, PyTree]:
        """The pair (x, y) at `w`."""

    def record_gradients(self, w: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
        r"""$\nabla f(x, y; z)$ of an upper record."""

        def upper(record):
            return jax.grad(self.problem.upper, self.argument)(*self.at(w), record)

        return {"upper": upper}

    def public_gradient(self, w: PyTree) -> PyTree:
        r"""$\nabla r_f(x, y)$."""
        if self.problem.upper_public is None:
            return optax.tree.zeros_like(w)
        return jax.grad(self.problem.upper_public, self.argument)(*self.at(w))

    def queries(
        self, clip_norm, sampling: AbstractSampling, sizes: Sizes
    ) -> tuple[tuple[Query, ...], bool]:
        """One query on the upper records."""
        return levels_queries(Levels(clip_norm, None), sampling, sizes)


class UpperLevel(_AbstractUpperLevel):
    r"""The one-level problem $\min_x f(x, y)$ at a fixed $y$.

    Args:
        problem: The bilevel problem.
        y: The lower variable, already private.
    """

    problem: BilevelProblem
    y: PyTree
    argument: ClassVar[int] = 0

    @property
    def w_set(self) -> AbstractSet:
        """The feasible set of x."""
        return self.problem.x_set

    @override
    def at(self, w: PyTree) -> tuple[PyTree, PyTree]:
        return w, self.y


class ValidationLevel(_AbstractUpperLevel):
    r"""The one-level problem $\min_y f(x, y)$ at a fixed $x$.

    Args:
        problem: The bilevel problem.
        x: The upper variable, already private.
    """

    problem: BilevelProblem
    x: PyTree
    argument: ClassVar[int] = 1

    @property
    def w_set(self) -> AbstractSet:
        """The feasible set of y."""
        return self.problem.y_set

    @override
    def at(self, w: PyTree) -> tuple[PyTree, PyTree]:
        return self.x, w


def penalty_gradients(
    problem: BilevelProblem, penalty: float | Scalar, x: PyTree, y: PyTree, z: PyTree
) -> dict[str, Callable[[PyTree], PyTree]]:
    r"""What one record adds to the gradient in x of $f + \lambda (g - g^*)$.

    $\nabla_x f(x, z)$ of an upper record, $\lambda (\nabla_x g(x, z) - \nabla_x g(x,
    y))$ of a lower one, for the roles whose losses read x; with $y$ the solution of the
    lower and $z$ that of the penalized level.
    """

    def upper(record):
        return jax.grad(problem.upper)(x, z, record)

    def lower(record):
        difference = optax.tree.sub(
            jax.grad(problem.lower)(x, z, record), jax.grad(problem.lower)(x, y, record)
        )
        return jax.tree.map(lambda v: penalty * v, difference)

    funs = {"upper": upper, "lower": lower}
    return {role: fun for role, fun in funs.items() if problem.reads_x(role)}


def public_penalty_gradient(
    problem: BilevelProblem, penalty: float | Scalar, x: PyTree, y: PyTree, z: PyTree
) -> PyTree:
    """The public terms' part of that gradient."""
    total = optax.tree.zeros_like(x)
    if problem.upper_public is not None:
        total = optax.tree.add(total, jax.grad(problem.upper_public)(x, z))
    if problem.lower_public is not None:
        difference = optax.tree.sub(
            jax.grad(problem.lower_public)(x, z), jax.grad(problem.lower_public)(x, y)
        )
        total = jax.tree.map(lambda a, b: a + penalty * b, total, difference)
    return total
