"""NON-PRIVATE derivatives of lower solutions with entries at kinks or bounds.

Near a solution whose active set is certain, entries at a kink of a proximal term or at
a bound of a box do not move, and the objective is smooth in the others, the free ones.
The implicit formulas hold for these.

References:
    Bertrand, Klopfenstein, Massias, Blondel, Vaiter, Gramfort and Salmon, "Implicit
    differentiation for fast hyperparameter selection in non-smooth convex learning",
    JMLR 2022.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..bilevel.problem import BilevelProblem
from ..core.proximal import Proximal
from ..sets import Box, Euclidean, NonNegative
from .minimizers import mapping
from .objectives import Objective

# Sets in which the implicit formulas hold.
DIFFERENTIABLE = Euclidean | Box | NonNegative


def free_entries(problem: BilevelProblem, x: PyTree, y: PyTree) -> PyTree | None:
    """Return for each entry of y whether it is free; `None` if all are, always."""
    term, y_set = problem.lower_public, problem.y_set
    flags = [term.is_smooth(x, y)] if isinstance(term, Proximal) else []
    if isinstance(y_set, Box | NonNegative):
        ends = optax.tree.full_like(y, -jnp.inf), optax.tree.full_like(y, jnp.inf)
        low, high = map(y_set.project, ends)
        flags.append(jax.tree.map(lambda v, a, b: (a < v) & (v < b), y, low, high))
    return jax.tree.map(lambda *v: jnp.stack(v).all(0), *flags) if flags else None


def select(free: PyTree | None, tree: PyTree, other: PyTree) -> PyTree:
    """Return `tree` at free entries, and `other` at the others."""
    return tree if free is None else jax.tree.map(jnp.where, free, tree, other)


def free_gradient(problem, objective: Objective, x, y) -> PyTree:
    """Return the gradient at free entries, and at the others y less its value."""
    free, held = free_entries(problem, x, y), jax.lax.stop_gradient(y)
    gradient = objective.gradient(x, select(free, y, held))
    return select(free, gradient, optax.tree.sub(y, held))


def linearized(problem, objective: Objective, x, y, linear_solver) -> tuple:
    r"""Return the `linearize` of the lower objective in the free entries alone.

    The Hessian is the identity at the other entries. The gradient is replaced by how
    far a proximal gradient step of size 1 moves y, or the point after one Newton step
    in the free entries if that is more; it is infinite if an entry is free before such
    a step and not after it, or the reverse. The Newton step solves a quadratic lower
    level if the free entries are the right ones, so that others are noticed.

    Args:
        problem: The problem.
        objective: The lower objective.
        x: The upper variable.
        y: The lower variable, its arrays of floats.
        linear_solver: Solves for the Newton step.
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
