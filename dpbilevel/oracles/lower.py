"""NON-PRIVATE answers of the lower level, with implicit derivatives."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..problems.bilevel import BilevelProblem, Levels
from ..sets import Euclidean
from .linear import AbstractLinearSolver, ConjugateGradient, differentiable_solve
from .minimizers import AbstractLowerSolver, LowerInfo, NewtonCG
from .objectives import lower_objective, merge, split

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
) -> PyTree:
    r"""NON-PRIVATE. $y^*(x) = \arg\min_y g(x, y)$, differentiable in all it depends on.

    The derivative is the implicit one, $dy^* = -[\nabla^2_{yy} g]^{-1} d(\nabla_y
    g)$, in forward and reverse mode, to any order, under `jax.jit` and `jax.vmap`; in
    `x`, in `data` and in what the functions of the problem close over. It is as exact
    as the solve: `lower_solve` tells how that ended.

    Args:
        problem: The problem, strongly convex in $y$.
        x: The upper variable.
        data: The records.
        solver: Minimizes $g(x, \cdot)$.
        y0: A starting point: a pytree of arrays, or a module whose arrays are the
            variable. Has no influence on derivatives.
        linear_solver: Solves the system of a derivative.

    Returns:
        A pytree like `y0`.

    Raises:
        ValueError: No `y0`, or a set that `solver` cannot keep to. On differentiation,
            any `y_set` but `Euclidean()`: the formula holds inside a set only.

    Example:
        >>> import jax, jax.numpy as jnp, dpbilevel as dpb
        >>> example = dpb.zoo.leak(jnp.asarray([[1.0], [3.0]]))
        >>> dpb.lower_solution(
        ...     example.problem, jnp.zeros(1), example.data, y0=jnp.zeros(1)
        ... )
        Array([2.], dtype=float32)
    """
    return lower_solve(
        problem, x, data, solver=solver, y0=y0, linear_solver=linear_solver
    )[0]


def lower_solve(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    solver: AbstractLowerSolver = DEFAULT_SOLVER,
    y0: PyTree = None,
    linear_solver: AbstractLinearSolver = DEFAULT_LINEAR_SOLVER,
) -> tuple[PyTree, LowerInfo]:
    """NON-PRIVATE. `lower_solution`, and how the solve ended.

    Args:
        problem: The problem.
        x: The upper variable.
        data: The records.
        solver: Minimizes over y.
        y0: A starting point.
        linear_solver: Solves the system of a derivative.

    Returns:
        `lower_solution`'s value and a `LowerInfo`, which has no derivative.

    Raises:
        ValueError: As `lower_solution`.
    """
    if y0 is None:
        raise ValueError(
            "lower_solution: the shape of y is not known without a starting point; "
            "pass y0=, for instance jnp.zeros(d)."
        )
    y0, rest = split(y0)
    objective = lower_objective(problem, data, rest)
    if not isinstance(problem.y_set, Euclidean):
        y, info = solver.minimize(objective, x, y0, problem.y_set)
        return merge(_without_derivative(y), rest), info

    def solve(_, y0):
        y, info = solver.minimize(objective, x, y0)
        # The derivative rule of custom_root takes no integers beside the root.
        return y, tuple(v.astype(info.gradient_norm.dtype) for v in info)

    y, (norm, steps, converged) = jax.lax.custom_root(
        lambda y: objective.gradient(x, y),
        y0,
        solve,
        lambda product, b: differentiable_solve(linear_solver, product, b).value,
        has_aux=True,
    )
    info = LowerInfo(norm, steps.astype(jnp.int32), converged > 0.5)
    return merge(y, rest), info


def check_interior(owner: str, problem: BilevelProblem) -> None:
    """Raises `ValueError` where the implicit formula does not hold up to a boundary."""
    if not isinstance(problem.y_set, Euclidean):
        raise ValueError(
            f"{owner}: the implicit derivative holds where y*(x) is inside y_set, and "
            f"y_set is {type(problem.y_set).__name__}. If y*(x) never touches its "
            "boundary, pass dataclasses.replace(problem, y_set=Euclidean()); otherwise "
            "use unrolled_hypergradient or penalty_hypergradient."
        )


@jax.custom_jvp
def _without_derivative(y):
    return y


@_without_derivative.defjvp
def _refuse(primals, tangents):
    del primals, tangents
    raise ValueError(
        "lower_solution: cannot be differentiated with a y_set other than Euclidean(): "
        "the implicit derivative holds inside the set only. If y*(x) never touches the "
        "boundary, pass dataclasses.replace(problem, y_set=Euclidean())."
    )
