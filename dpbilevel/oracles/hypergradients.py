r"""NON-PRIVATE gradients of $F(x) = f(x, y^*(x))$: implicit, penalty, unrolled."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..bilevel.problem import BilevelProblem, Levels
from ..core.descent import add_scaled
from . import lower, objectives
from .linear import AbstractLinearSolver, LinearSolution, differentiable_solve
from .minimizers import AbstractLowerSolver, AcceleratedGradient


def implicit_hypergradient(
    problem: BilevelProblem,
    x: PyTree,
    y: PyTree,
    data: Levels,
    *,
    linear_solver: AbstractLinearSolver = lower.DEFAULT_LINEAR_SOLVER,
    v0: PyTree = None,
    tolerance: float | None = objectives.CONVERGED,
) -> tuple[PyTree, LinearSolution]:
    r"""NON-PRIVATE. Return the implicit hypergradient, and its `LinearSolution`.

    It is $\nabla_x f - \nabla^2_{xy} g\, v$ with $\nabla^2_{yy} g\, v = \nabla_y f$. At
    another $y$ the error is at most $C \|y - y^*(x)\|$, and $y$ is refused (NaN inside
    `jax.jit`) unless `tolerance=None`. The Hessian is never formed: its products come
    from one linearization of $\nabla_y g$ at $(x, y)$. Along a trajectory of $x$ pass
    `v0`. With a proximal term or a box the formula is that of the entries of $y$ at no
    kink and no bound.

    Args:
        problem: The problem.
        x: The upper variable.
        y: The lower variable; a module's arrays are the variable.
        data: The records.
        linear_solver: Solves for $v$.
        v0: An initial point of that solve: `solution.value` of an earlier call, or
            `extrapolate` from the last ones.
        tolerance: As in `lower_solution`. `None` accepts any $y$, for methods that
            follow a path of $x$.

    Returns:
        The gradient, a pytree like `x`, NaN if $y$ has not converged; and the
        `LinearSolution` with $v$, the norm of its residual and the number of Hessian
        products.

    Raises:
        TypeError: An argument of another type, such as the class of a solver.
        ValueError: Arguments that do not fit, or a curved `y_set`, such as `Ball`: the
            formula holds inside it only. Outside `jax.jit`, $y$ has not converged.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", equation 9.
    """
    owner = "implicit_hypergradient"
    y, rest = lower.check_arguments(
        owner, problem, x, y, data, name="y", v0=v0, linear_solver=linear_solver
    )
    if not isinstance(problem.y_set, lower.DIFFERENTIABLE):
        raise ValueError(
            f"{owner}: the implicit derivative holds inside y_set, and y_set is "
            f"{type(problem.y_set).__name__}. Replace it by Euclidean() if y*(x) never "
            "touches its boundary, or use unrolled_hypergradient."
        )
    f = objectives.upper_objective(problem, data, rest)
    g = objectives.lower_objective(problem, data, rest)
    linearization = lower.linearized(problem, g, x, y, linear_solver)
    slope = objectives.nan_unless_finite(f.gradient(x, y), y)
    free = lower.free_entries(problem, x, y)
    slope = lower.select(free, slope, optax.tree.zeros_like(y))
    start = jax.tree.map(jnp.asarray, v0)
    v = differentiable_solve(linear_solver, linearization[-1], slope, start)
    cross = g.cross_product(x, y, v.value)
    gradient = optax.tree.sub(f.gradient(x, y, "x"), cross)
    return objectives.if_converged(owner, gradient, y, linearization, tolerance), v


def penalty_hypergradient(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    penalty: float | Float[Array, ""],
    solver: AbstractLowerSolver,
    y0: PyTree,
) -> PyTree:
    r"""NON-PRIVATE. Return the penalty method's approximate hypergradient.

    $\nabla_x f(x, y_\lambda) + \lambda (\nabla_x g(x, y_\lambda) - \nabla_x g(x,
    y^*))$ with $y_\lambda$ minimizing $f + \lambda g$: first derivatives only, of an
    error of order $1 / \lambda$. Errors of the solves enter multiplied by $\lambda$.

    Args:
        problem: The problem; any `y_set` that `solver` keeps to.
        x: The upper variable.
        data: The records.
        penalty: $\lambda > 0$.
        solver: Minimizes $g$ and $g + f / \lambda$ over $y$.
        y0: An initial point.

    Returns:
        A pytree like `x`.

    Raises:
        TypeError: An argument of another type, such as the class of a solver.
        ValueError: `penalty` out of range, arguments that do not fit, or a set that
            `solver` cannot keep to.

    References:
        Kornowski, "Differentially private bilevel optimization", Section 4.
    """
    owner = "penalty_hypergradient"
    y0, rest = lower.check_arguments(owner, problem, x, y0, data, solver=solver)
    _checks.positive(owner, penalty=penalty)
    f = objectives.upper_objective(problem, data, rest)
    g = objectives.lower_objective(problem, data, rest)
    smooth = g.composite()
    y, _ = lower.minimize_or_nan(solver, smooth, x, y0, problem.y_set)
    weight = 1 / jnp.asarray(penalty)
    # (f + lambda g) / lambda
    penalized = objectives.WeightedSum(smooth, f, weight, smooth.prox)
    # From y, which is near.
    near, _ = lower.minimize_or_nan(solver, penalized, x, y, problem.y_set)
    change = optax.tree.sub(g.gradient(x, near, "x"), g.gradient(x, y, "x"))
    return add_scaled(f.gradient(x, near, "x"), penalty, change)


def unrolled_hypergradient(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    solver: AcceleratedGradient,
    y0: PyTree,
) -> PyTree:
    r"""NON-PRIVATE. Return the upper loss's gradient in x through a solver's steps.

    Memory: $y_0, \dots, y_T$ and one step's intermediate values; each step is computed
    again on the way back.

    Args:
        problem: The problem; with a `y_set`, through the projections.
        x: The upper variable.
        data: The records.
        solver: With a fixed number of steps, `tolerance=None`.
        y0: An initial point.

    Returns:
        A pytree like `x`.

    Raises:
        TypeError: `solver` is not an `AcceleratedGradient`, or another argument not
            of its type.
        ValueError: `solver` stops early, which reverse mode cannot follow, or
            arguments that do not fit.
    """
    owner = "unrolled_hypergradient"
    _checks.instance(owner, AcceleratedGradient, solver=solver)
    if solver.tolerance is not None:
        text = f"{owner}: reverse mode needs a fixed number of steps. Pass "
        raise ValueError(f"{text}AcceleratedGradient(..., tolerance=None).")
    y0, rest = lower.check_arguments(owner, problem, x, y0, data, solver=solver)

    def composed(x):
        g = objectives.lower_objective(problem, data, rest).composite()
        y, _ = lower.minimize_or_nan(solver, g, x, y0, problem.y_set)
        return objectives.upper_objective(problem, data, rest).value(x, y)

    return jax.grad(composed)(x)
