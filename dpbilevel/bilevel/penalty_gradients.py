"""Gradients of the penalty method in x, and forecasts of steps that overshoot."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .._checks import Number
from ..core.curvature import float_array, overshooting_row
from ..core.descent import Descent
from ..privacy.rows import ForecastRow
from ..sets import AbstractSet, Box
from .levels import lower_objective
from .problem import BilevelProblem


def penalty_gradients(
    problem: BilevelProblem, penalty: Number, x: PyTree, y: PyTree, z: PyTree
) -> dict[str, Callable[[PyTree], PyTree]]:
    r"""Return, by level, a record's gradient function of $f + \lambda (g - g^*)$ in x.

    $\nabla_x f(x, z)$ of an upper record, $\lambda (\nabla_x g(x, z) - \nabla_x g(x,
    y))$ of a lower one, for the levels whose losses read x. Here $y$ is the solution of
    the lower level and $z$ that of the penalized level.
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
    problem: BilevelProblem, penalty: Number, x: PyTree, y: PyTree, z: PyTree
) -> PyTree:
    r"""Return the public part of the gradient in x of $f + \lambda (g - g^*)$."""
    total = optax.tree.zeros_like(x)
    if problem.upper_public is not None:
        total = optax.tree.add(total, jax.grad(problem.upper_public)(x, z))
    if problem.lower_public is not None:
        difference = optax.tree.sub(
            jax.grad(problem.lower_public)(x, z), jax.grad(problem.lower_public)(x, y)
        )
        total = jax.tree.map(lambda a, b: a + penalty * b, total, difference)
    return total


def shortened_in_x(
    problem: BilevelProblem, descent: Descent, gradient: PyTree, x: PyTree, y: PyTree
) -> PyTree:
    """Return the direction of x, shortened if a step overshoots the upper public term.

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
    """Return `ForecastRow`s for steps in y that overshoot the public terms.

    Args:
        problem: The problem.
        w0: The initial point.
        steps: Solvers of one level or `Descent`s that move variables like y, by name.
            A solver without a `step_size` has no row.
        penalty: The penalty of the penalized level, or `None` for the lower level.

    Returns:
        As `overshooting_row`: one row for the initial point. One more row, whose
        `from_start` is false, if an end of a box of x is worse.
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
    """Return a tuple: a `ForecastRow` if steps in x overshoot at `w0`, else nothing."""
    public = problem.upper_public
    if public is None:
        return ()
    x, y = problem.x_set.project(jax.tree.map(float_array, w0[0])), w0[1]
    rows = overshooting_row(step_size, lambda x: jax.grad(public)(x, y), x)
    return tuple(dataclasses.replace(row, release="steps of x") for row in rows)


def _excess(row: ForecastRow) -> float:
    return (row.step_size or 0.0) * (row.public_curvature or 0.0)


def _ends(x_set: AbstractSet, x: PyTree) -> list[PyTree]:
    """Return a list of a box's two ends, with entries of x where it is unbounded."""
    if not isinstance(x_set, Box):
        return []
    infinite = (
        jax.tree.map(lambda v, s=s: jnp.full_like(v, s), x) for s in (-jnp.inf, jnp.inf)
    )
    return [
        jax.tree.map(lambda v, e: jnp.where(jnp.isfinite(e), e, v), x, end)
        for end in map(x_set.project, infinite)
    ]
