"""NON-PRIVATE answers of the lower level, with implicit derivatives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..bilevel.problem import BilevelProblem, Levels
from ..sets import AbstractSet, Euclidean
from .arguments import check_arguments
from .linear import AbstractLinearSolver, ConjugateGradient, differentiable_solve
from .minimizers import AbstractLowerSolver, LowerInfo
from .newton import NewtonCG
from .objectives import (
    CONVERGED,
    AbstractObjective,
    if_converged,
    lay_out,
    lower_objective,
    merge,
    nan_unless_finite,
    split,
)

DEFAULT_SOLVER = NewtonCG()
DEFAULT_LINEAR_SOLVER = ConjugateGradient()


def lower_solution(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    solver: AbstractLowerSolver = DEFAULT_SOLVER,
    y0: PyTree = None,
    linear_solver: AbstractLinearSolver = DEFAULT_LINEAR_SOLVER,
    tolerance: float | None = CONVERGED,
) -> PyTree:
    r"""NON-PRIVATE. Return $y^*(x) = \arg\min_y g(x, y)$, with implicit derivatives.

    The derivative is the implicit one, $dy^* = -[\nabla^2_{yy} g]^{-1} d(\nabla_y
    g)$, in forward and reverse mode, to any order, under `jax.jit` and `jax.vmap`; in
    `x`, in `data` and in what the functions of the problem close over. It is as exact
    as the solve: `lower_solve` returns how that ended.

    Args:
        problem: The problem, strongly convex in $y$.
        x: The upper variable.
        data: The records.
        solver: Minimizes $g(x, \cdot)$.
        y0: An initial point: a pytree of arrays, or a module whose arrays are the
            variable. Has no influence on derivatives.
        linear_solver: Solves the system of a derivative.
        tolerance: The solve has converged if $\|\nabla_y g\|$ is at most this times
            the larger of 1 and $\|\nabla^2_{yy} g\, y\|$. `None` takes any answer; a
            `y_set` other than `Euclidean()` is not checked.

    Returns:
        A pytree like `y0`; NaN if the gradient at the solver's answer is not finite,
        as with a NaN in a record, or if the solve has not converged.

    Raises:
        TypeError: An argument of another type, such as the class of a solver.
        ValueError: No `y0`, arguments that do not fit, or a set that `solver` cannot
            keep to. Outside `jax.jit`, the solve has not converged. On
            differentiation, any `y_set` but `Euclidean()`: the formula holds inside a
            set only.

    Example:
        >>> import jax, jax.numpy as jnp, dpbilevel as dpb
        >>> example = dpb.bilevel.zoo.leak(jnp.asarray([[1.0], [3.0]]))
        >>> dpb.oracles.lower_solution(
        ...     example.problem, jnp.zeros(1), example.data, y0=jnp.zeros(1)
        ... )
        Array([2.], dtype=float32)
    """
    owner = "lower_solution"
    y, _ = _solve(owner, problem, x, data, solver, y0, linear_solver)
    if not isinstance(problem.y_set, Euclidean):
        return y
    at, rest = split(y)
    fixed = jax.lax.stop_gradient((x, at))
    linearization = lower_objective(problem, data, rest).linearize(*fixed)
    return merge(if_converged(owner, at, fixed[1], linearization, tolerance), rest)


def lower_solve(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    solver: AbstractLowerSolver = DEFAULT_SOLVER,
    y0: PyTree = None,
    linear_solver: AbstractLinearSolver = DEFAULT_LINEAR_SOLVER,
) -> tuple[PyTree, LowerInfo]:
    """NON-PRIVATE. Return `lower_solution`, and how the solve ended.

    Args:
        problem: The problem.
        x: The upper variable.
        data: The records.
        solver: Minimizes over y.
        y0: An initial point.
        linear_solver: Solves the system of a derivative.

    Returns:
        `lower_solution`'s value and a `LowerInfo`, which has no derivative.

    Raises:
        TypeError: As `lower_solution`.
        ValueError: As `lower_solution`.
    """
    return _solve("lower_solve", problem, x, data, solver, y0, linear_solver)


def minimize_or_nan(
    solver: AbstractLowerSolver,
    objective: AbstractObjective,
    x: PyTree,
    y0: PyTree,
    y_set: AbstractSet,
) -> tuple[PyTree, LowerInfo]:
    """Return `solver.minimize`, but NaN if a solver met numbers that are not finite."""
    y, info = solver.minimize(objective, x, y0, y_set)
    return nan_unless_finite(y, info.gradient_norm), info


def _solve(
    owner: str, problem, x, data, solver, y0, linear_solver
) -> tuple[PyTree, LowerInfo]:
    solvers: Any = {"solver": solver, "linear_solver": linear_solver}
    roles = ("lower",)
    y0, rest = check_arguments(owner, problem, x, y0, data, roles=roles, **solvers)
    objective = lower_objective(problem, data, rest)
    if not isinstance(problem.y_set, Euclidean):
        y, info = minimize_or_nan(solver, objective, x, y0, problem.y_set)
        return merge(_without_derivative(owner, y), rest), info

    def slope(y):
        # A Hessian that does not depend on y would be finite where y is not. A factor
        # with a derivative would make every derivative compute the gradient again.
        factor = jax.tree.map(lambda u: 1 + 0 * jax.lax.stop_gradient(u), y)
        return jax.tree.map(jnp.multiply, objective.gradient(x, y), factor)

    def solve(_, y0):
        y, info = minimize_or_nan(solver, objective, x, y0, problem.y_set)
        # The derivative rule of custom_root takes no integers beside the root.
        return y, tuple(v.astype(info.gradient_norm.dtype) for v in info)

    def tangent_solve(product, b):
        return differentiable_solve(linear_solver, lay_out(product, b), b).value

    y, (norm, steps, converged) = jax.lax.custom_root(
        slope, y0, solve, tangent_solve, has_aux=True
    )
    info = LowerInfo(norm, steps.astype(jnp.int32), converged > 0.5)
    return merge(y, rest), info


def check_interior(owner: str, problem: BilevelProblem) -> None:
    """Check that the implicit formula holds: `y_set` has no boundary."""
    if not isinstance(problem.y_set, Euclidean):
        raise ValueError(
            f"{owner}: the implicit derivative holds inside y_set, and y_set is "
            f"{type(problem.y_set).__name__}. Replace it by Euclidean() if y*(x) never "
            "touches its boundary, or use unrolled_hypergradient."
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_derivative(owner, y):
    return y


@_without_derivative.defjvp
def _refuse(owner, primals, tangents):
    raise ValueError(
        f"{owner}: the implicit derivative holds inside y_set only. Replace it by "
        "Euclidean() if y*(x) never touches its boundary."
    )
