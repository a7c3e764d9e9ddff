"""NON-PRIVATE answers of the lower level, also at kinks, and checks of arguments.

Near a solution whose active set is certain, entries at a kink of a proximal term or at
a bound of a box do not move, and the objective is smooth in the others, the free ones.
The implicit formulas hold for these.

References:
    Bertrand, Klopfenstein, Massias, Blondel, Vaiter, Gramfort and Salmon, "Implicit
    differentiation for fast hyperparameter selection in non-smooth convex learning",
    JMLR 2022.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .. import _checks
from ..bilevel.problem import BilevelProblem, Levels
from ..core.proximal import Proximal
from ..onelevel.problem import check_scalar
from ..privacy.per_example.clipping import one_record
from ..privacy.queries import LEVELS
from ..sets import AbstractSet, Box, Euclidean, NonNegative, corners
from . import objectives
from .linear import AbstractLinearSolver, ConjugateGradient, differentiable_solve
from .minimizers import AbstractLowerSolver, LowerInfo, NewtonCG, mapping
from .objectives import Objective

# Sets in which the implicit formulas hold.
DIFFERENTIABLE = Euclidean | Box | NonNegative


def free_entries(problem: BilevelProblem, x: PyTree, y: PyTree) -> PyTree | None:
    """Return a mask of entries of y at no kink or bound; `None` if y has neither."""
    term, y_set = problem.lower_public, problem.y_set
    flags = [term.is_smooth(x, y)] if isinstance(term, Proximal) else []
    if isinstance(y_set, Box | NonNegative):
        inside = jax.tree.map(lambda v, a, b: (a < v) & (v < b), y, *corners(y_set, y))
        flags.append(inside)
    return jax.tree.map(lambda *v: jnp.stack(v).all(0), *flags) if flags else None


def select(free: PyTree | None, tree: PyTree, other: PyTree) -> PyTree:
    """Return `tree` at free entries, and `other` at the others."""
    return tree if free is None else jax.tree.map(jnp.where, free, tree, other)


def linearized(problem, objective: Objective, x, y, linear_solver) -> tuple:
    """Return lower value, gradient or stand-in norm, Hessian product on free entries.

    The Hessian is the identity at the other entries. The gradient is replaced by how
    far a proximal gradient step of size 1 moves y, or the point after one Newton step
    in the free entries if that is more; it is infinite if an entry is free before such
    a step and not after it, or the reverse. The Newton step solves a quadratic lower
    level if the free entries are the right ones, so that others are noticed.
    """
    value, slope, whole = objective.linearize(x, y)
    free, smooth = free_entries(problem, x, y), objective.composite()
    if free is None:
        return value, slope, whole
    zero = optax.tree.zeros_like(y)

    def product(v):
        return select(free, whole(select(free, v, zero)), v)

    def moved(y):
        at = x, y, smooth.gradient(x, y), jnp.ones(())
        ahead, norm = mapping(smooth, *at, problem.y_set)
        same = jax.tree.map(jnp.array_equal, free, free_entries(problem, x, ahead))
        return jnp.where(jnp.stack(jax.tree.leaves(same)).all(), norm, jnp.inf)

    newton = linear_solver.solve(product, select(free, slope, zero)).value
    after = moved(optax.tree.sub(y, newton))
    # A Newton step that fails shows nothing; y itself may be NaN, which is passed on.
    norm = jnp.maximum(moved(y), jnp.where(jnp.isnan(after), jnp.inf, after))
    return value, norm, product


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
    tolerance: float | None = objectives.CONVERGED,
) -> PyTree:
    r"""NON-PRIVATE. Return the lower solution at `x`, with implicit derivatives.

    The derivative is the implicit one, $dy^* = -[\nabla^2_{yy} g]^{-1} d(\nabla_y
    g)$, in forward and reverse mode, to any order, under `jax.jit` and `jax.vmap`; in
    `x`, in `data` and in what the functions of the problem close over. It is as exact
    as the solve: `lower_solve` returns how that ended. Entries at a kink of a term of
    `proximal` or at a bound of a box do not move; the formula is that of the others.

    Args:
        problem: The problem, strongly convex in $y$.
        x: The upper variable.
        data: The records.
        solver: Minimizes $g(x, \cdot)$.
        y0: An initial point: a pytree of arrays, or a module whose arrays are the
            variable. Has no influence on derivatives.
        linear_solver: Solves the system of a derivative.
        tolerance: The solve has converged if $\|\nabla_y g\|$ is at most this times
            the larger of 1 and $\|\nabla^2_{yy} g\, y\|$; with a proximal term or a
            box, if a proximal gradient step moves the answer no more, and if the same
            entries are at kinks and bounds after it. `None` takes any answer; a curved
            `y_set`, such as `Ball`, is not checked.

    Returns:
        A pytree like `y0`; NaN if the gradient at the solver's answer is not finite,
        as with a NaN in a record, or if the solve has not converged.

    Raises:
        TypeError: An argument of another type, such as the class of a solver.
        ValueError: No `y0`, arguments that do not fit, or a set that `solver` cannot
            keep to. Outside `jax.jit`, the solve has not converged. On
            differentiation, a curved `y_set`: the formula holds inside it only.

    Example:
        >>> import jax, jax.numpy as jnp, dpbilevel as dpb
        >>> problem = dpb.BilevelProblem(
        ...     lambda x, y, z: x @ y, lambda x, y, z: jnp.sum((y - z) ** 2)
        ... )
        >>> data = dpb.Levels.shared(jnp.asarray([[1.0], [3.0]]))
        >>> dpb.oracles.lower_solution(problem, jnp.zeros(1), data, y0=jnp.zeros(1))
        Array([2.], dtype=float32)
    """
    owner = "lower_solution"
    y, _ = _solve(owner, problem, x, data, solver, y0, linear_solver)
    if not isinstance(problem.y_set, DIFFERENTIABLE):
        return y
    at, rest = objectives.split(y)
    fixed = jax.lax.stop_gradient((x, at))
    lower = objectives.lower_objective(problem, data, rest)
    linearization = linearized(problem, lower, *fixed, linear_solver)
    at = objectives.if_converged(owner, at, fixed[1], linearization, tolerance)
    return objectives.merge(at, rest)


def lower_solve(
    problem: BilevelProblem,
    x: PyTree,
    data: Levels,
    *,
    solver: AbstractLowerSolver = DEFAULT_SOLVER,
    y0: PyTree = None,
    linear_solver: AbstractLinearSolver = DEFAULT_LINEAR_SOLVER,
) -> tuple[PyTree, LowerInfo]:
    """NON-PRIVATE. Return `lower_solution`, and a `LowerInfo` on how the solve ended.

    The value is not checked: its derivatives are wrong if the solve has not converged.
    The `LowerInfo` has no derivative. Arguments are those of `lower_solution`.

    Raises:
        TypeError: As `lower_solution`.
        ValueError: As `lower_solution`.
    """
    return _solve("lower_solve", problem, x, data, solver, y0, linear_solver)


def minimize_or_nan(
    solver: AbstractLowerSolver,
    objective: objectives.AbstractObjective,
    x: PyTree,
    y0: PyTree,
    y_set: AbstractSet,
) -> tuple[PyTree, LowerInfo]:
    """Return a solver's minimizer, NaN after non-finite numbers, and a `LowerInfo`."""
    y, info = solver.minimize(objective, x, y0, y_set)
    return objectives.nan_unless_finite(y, info.gradient_norm), info


def _solve(
    owner: str, problem, x, data, solver, y0, linear_solver
) -> tuple[PyTree, LowerInfo]:
    solvers: Any = {"solver": solver, "linear_solver": linear_solver}
    roles = ("lower",)
    y0, rest = check_arguments(owner, problem, x, y0, data, roles=roles, **solvers)
    objective = objectives.lower_objective(problem, data, rest)
    smooth = objective.composite()
    if not isinstance(problem.y_set, DIFFERENTIABLE):
        y, info = minimize_or_nan(solver, smooth, x, y0, problem.y_set)
        return objectives.merge(_without_derivative(owner, y), rest), info

    def slope(y):
        # A Hessian that does not depend on y would be finite where y is not. A factor
        # with a derivative would make every derivative compute the gradient again.
        factor = jax.tree.map(lambda u: 1 + 0 * jax.lax.stop_gradient(u), y)
        # At other entries the slope is y minus its own value: 0, with derivative 1.
        free, held = free_entries(problem, x, y), jax.lax.stop_gradient(y)
        gradient = objective.gradient(x, select(free, y, held))
        gradient = select(free, gradient, optax.tree.sub(y, held))
        return jax.tree.map(jnp.multiply, gradient, factor)

    def solve(_, y0):
        y, info = minimize_or_nan(solver, smooth, x, y0, problem.y_set)
        # The derivative rule of custom_root takes no integers beside the root.
        return y, tuple(v.astype(info.gradient_norm.dtype) for v in info)

    def tangent_solve(product, b):
        linear = objectives.lay_out(product, b)
        return differentiable_solve(linear_solver, linear, b).value

    y, (norm, steps, converged) = jax.lax.custom_root(
        slope, y0, solve, tangent_solve, has_aux=True
    )
    info = LowerInfo(norm, steps.astype(jnp.int32), converged > 0.5)
    return objectives.merge(y, rest), info


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_derivative(owner, y):
    return y


@_without_derivative.defjvp
def _refuse(owner, primals, tangents):
    raise ValueError(
        f"{owner}: the implicit derivative holds inside y_set only. Replace it by "
        "Euclidean() if y*(x) never touches its boundary."
    )


_KINDS = {"solver": AbstractLowerSolver, "linear_solver": AbstractLinearSolver}


def check_arguments(
    owner: str,
    problem: BilevelProblem,
    x: PyTree,
    y: PyTree,
    data: Levels,
    *,
    name: str = "y0",
    roles: tuple[str, ...] = LEVELS,
    v0: PyTree = None,
    **solvers: object,
) -> tuple[PyTree, PyTree]:
    """Check all arguments; return two pytrees: float arrays of `y`, other leaves.

    In errors `name` is the owner's name of `y`. Only the levels of `roles` are checked.

    Raises:
        TypeError: An argument of another type.
        ValueError: No arrays of floats where the variables should be, records that
            share no leading axis, a loss or a public term that is not a scalar, or a
            `v0` unlike `y`.
    """
    _checks.instance(owner, BilevelProblem, problem=problem)
    _checks.instance(owner, Levels, data=data)
    for key, value in solvers.items():
        _checks.instance(owner, _KINDS[key], **{key: value})
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        kind = _kind(leaf)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(
                f"{owner}: x{jax.tree_util.keystr(path)} must be a floating-point "
                f"array, got {_described(leaf)}. Split other leaves off by "
                "equinox.partition(x, equinox.is_inexact_array)."
            )
    variable, rest = _split(owner, name, y)
    if v0 is not None:
        _check_alike(owner, v0, variable)

    # Leaves of a module that are no arrays cannot be traced.
    def of_arrays(term: Callable) -> Callable:
        return lambda x, y, *record: term(x, objectives.merge(y, rest), *record)

    for role in roles:
        records, where = getattr(data, role), f"{owner}: problem.{role}"
        _checks.leading_axis(f"{owner}: data.{role}", records)
        loss, public = getattr(problem, role), getattr(problem, f"{role}_public")
        check_scalar(where, of_arrays(loss), x, variable, one_record(records))
        if public is not None:
            kind = "the public term"
            check_scalar(f"{where}_public", of_arrays(public), x, variable, of=kind)
    return variable, rest


def _split(owner: str, name: str, y: PyTree) -> tuple[PyTree, PyTree]:
    if y is None:
        text = f"{owner}: the shape of y is not known without an initial point. Pass"
        raise ValueError(f"{text} {name}=, for instance jnp.zeros(d).")
    variable, rest = objectives.split(y)
    if not jax.tree.leaves(variable):
        kinds = sorted({_described(leaf) for leaf in jax.tree.leaves(y)})
        raise ValueError(
            f"{owner}: {name} must be a pytree with arrays of floats, got "
            f"{' and '.join(kinds) or 'no leaves'}."
        )
    return variable, rest


def _check_alike(owner: str, v0: PyTree, variable: PyTree) -> None:
    expected = jax.tree.map(_described, variable)
    try:
        given = jax.tree.map(_described, jax.eval_shape(lambda v: v, v0))
    except TypeError:
        given = jax.tree.map(_described, v0)
    unlike = jax.tree.structure(given) != jax.tree.structure(expected)
    if unlike or jax.tree.leaves(given) != jax.tree.leaves(expected):
        raise ValueError(
            f"{owner}: v0 must be like the arrays of floats of y, {expected}, got "
            f"{given}. Pass solution.value of an earlier LinearSolution."
        )


def _kind(leaf: object) -> jnp.dtype | None:
    known = hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)
    return jnp.result_type(leaf) if known else None


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = _kind(value)
    if kind is None:
        return type(value).__name__
    return f"{kind}{list(jnp.shape(value))}"
