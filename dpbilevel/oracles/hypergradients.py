r"""NON-PRIVATE gradients of $F(x) = f(x, y^*(x))$: implicit, penalty, unrolled."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..problems.bilevel import BilevelProblem, Levels
from .linear import AbstractLinearSolver, LinearSolution, differentiable_solve
from .lower import DEFAULT_LINEAR_SOLVER, check_interior
from .minimizers import AbstractLowerSolver, AcceleratedGradient
from .objectives import WeightedSum, lower_objective, split, upper_objective


def implicit_hypergradient(
    problem: BilevelProblem,
    x: PyTree,
    y: PyTree,
    data: Levels,
    *,
    linear_solver: AbstractLinearSolver = DEFAULT_LINEAR_SOLVER,
    v0: PyTree = None,
) -> tuple[PyTree, LinearSolution]:
    r"""NON-PRIVATE. $\nabla_x f - \nabla^2_{xy} g\, v$ with $\nabla^2_{yy} g\, v =
    \nabla_y f$, at any $y$.

    At $y = y^*(x)$ the gradient of $F$; elsewhere off by at most $C \|y - y^*(x)\|$.
    The Hessian is never formed: its products come from one linearization of
    $\nabla_y g$ at $(x, y)$. Along a trajectory of $x$ pass the last $v$ as `v0`.

    Args:
        problem: The problem.
        x: The upper variable.
        y: The lower variable; a module's arrays are the variable.
        data: The records.
        linear_solver: Solves for $v$.
        v0: A starting point of that solve, such as `solution.value` of an earlier call.

    Returns:
        The gradient, a pytree like `x`, and the `LinearSolution` with $v$, the norm of
        its residual and the number of Hessian products.

    Raises:
        ValueError: `y_set` is not `Euclidean()`: the formula holds inside a set only.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", equation 9.
    """  # noqa: D205
    check_interior("implicit_hypergradient", problem)
    y, rest = split(y)
    upper = upper_objective(problem, data, rest)
    lower = lower_objective(problem, data, rest)
    _, product = lower.linearized(x, y)
    v = differentiable_solve(linear_solver, product, upper.gradient(x, y), v0)
    cross = lower.cross_product(x, y, v.value)
    return jax.tree.map(jnp.subtract, upper.gradient(x, y, "x"), cross), v


def penalty_hypergradient(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    penalty: float | Float[Array, ""],
    solver: AbstractLowerSolver,
    y0: PyTree,
) -> PyTree:
    r"""NON-PRIVATE. The gradient of $\min_y f + \lambda g - \lambda \min_y g$.

    $\nabla_x f(x, y_\lambda) + \lambda (\nabla_x g(x, y_\lambda) - \nabla_x g(x,
    y^*))$ with $y_\lambda$ minimizing $f + \lambda g$: first derivatives only, of an
    error of order $1 / \lambda$. Errors of the solves enter multiplied by $\lambda$.

    Args:
        problem: The problem; any `y_set` that `solver` keeps to.
        x: The upper variable.
        data: The records.
        penalty: $\lambda > 0$.
        solver: Minimizes $g$ and $g + f / \lambda$ over $y$.
        y0: A starting point.

    Returns:
        A pytree like `x`.

    Raises:
        ValueError: `penalty` out of range, or a set that `solver` cannot keep to.

    References:
        Kornowski, "Differentially private bilevel optimization", Section 4.
    """
    _checks.positive("penalty_hypergradient", penalty=penalty)
    y0, rest = split(y0)
    upper = upper_objective(problem, data, rest)
    lower = lower_objective(problem, data, rest)
    y, _ = solver.minimize(lower, x, y0, problem.y_set)
    penalized = WeightedSum(lower, upper, 1 / jnp.asarray(penalty))
    near, _ = solver.minimize(penalized, x, y, problem.y_set)
    slopes = lower.gradient(x, near, "x"), lower.gradient(x, y, "x")

    def combine(direct, above, below):
        return direct + jnp.asarray(penalty).astype(direct.dtype) * (above - below)

    return jax.tree.map(combine, upper.gradient(x, near, "x"), *slopes)


def unrolled_hypergradient(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    solver: AcceleratedGradient,
    y0: PyTree,
) -> PyTree:
    r"""NON-PRIVATE. The gradient of $f(x, y_T(x))$ through the $T$ steps of a solver.

    Memory: $y_0, \dots, y_T$ and one step's intermediate values; each step is computed
    again on the way back.

    Args:
        problem: The problem; with a `y_set`, through the projections.
        x: The upper variable.
        data: The records.
        solver: With a fixed number of steps, `tolerance=None`.
        y0: A starting point.

    Returns:
        A pytree like `x`.

    Raises:
        ValueError: `solver` stops early, which reverse mode cannot follow.
        TypeError: `solver` is not an `AcceleratedGradient`.
    """
    owner = "unrolled_hypergradient"
    _checks.instance(owner, AcceleratedGradient, solver=solver)
    if solver.tolerance is not None:
        raise ValueError(
            f"{owner}: reverse mode needs a fixed number of steps; pass "
            "AcceleratedGradient(num_steps, step_size, momentum, tolerance=None)."
        )
    y0, rest = split(y0)

    def composed(x):
        y, _ = solver.minimize(
            lower_objective(problem, data, rest), x, y0, problem.y_set
        )
        return upper_objective(problem, data, rest).value(x, y)

    return jax.grad(composed)(x)
