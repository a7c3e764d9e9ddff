"""NON-PRIVATE distances from a saddle point, or from a solution.

All of them read the records. A gap that is computed from the records is a release that
is not in the ledger: for tests, figures and public data.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .. import _checks
from ..sets import AbstractSet
from .problem import AbstractSaddleProblem, AbstractVariationalInequality, Scalar

# A linear objective has no curvature to take a step size from.
_LEAST_CURVATURE = 1e-3


@dataclasses.dataclass(frozen=True)
class Gap:
    """Interval that holds a gap. NON-PRIVATE.

    Attributes:
        lower: The attained value.
        upper: The proved bound; `lower` up to the inner solve's accuracy.
    """

    lower: Scalar
    upper: Scalar


def mean_operator(
    problem: AbstractVariationalInequality, w: PyTree, data: PyTree
) -> PyTree:
    """NON-PRIVATE. Return the mean operator, unclipped, plus the public one."""
    with jax.default_matmul_precision("highest"):
        values = jax.vmap(lambda record: problem.record_operator(w, record))(data)
        mean = jax.tree.map(lambda v: jnp.mean(v, axis=0), values)
        return optax.tree.add(mean, problem.public_operator(w))


def saddle_gap(
    problem: AbstractSaddleProblem, w: PyTree, data: PyTree, *, num_steps: int = 300
) -> Gap:
    r"""NON-PRIVATE. Bound the gap $\max_y f(\hat x, y) - \min_x f(x, \hat y)$.

    Both problems are convex and are solved by accelerated projected gradients. By
    convexity what is missing is at most $\sup_u \langle \nabla, u - u_k \rangle$, which
    the support functions of the sets give, so the interval holds whatever the solver
    did. For linear problems it is a point.

    Args:
        problem: A problem with a declared `lipschitz` on bounded sets.
        w: $(\hat x, \hat y)$.
        data: The records.
        num_steps: Gradient steps of either problem.

    Raises:
        TypeError: The problem is no `SaddleProblem`.
        ValueError: A Lipschitz constant is not declared, or shapes do not fit.
    """
    _checks.instance("saddle_gap", AbstractSaddleProblem, problem=problem)
    problem.check(w, data)
    x_hat, y_hat = w
    smoothness = _smoothness(problem)

    def value(x, y):
        with jax.default_matmul_precision("highest"):
            values = jax.vmap(lambda record: problem.fun(x, y, record))(data)
            public = 0.0 if problem.public is None else problem.public(x, y)
        return jnp.mean(values) + public

    def least(x):
        return -value(x, y_hat)

    most = functools.partial(value, x_hat)
    best = _maximum(most, problem.y_set, y_hat, smoothness, num_steps)
    worst = _maximum(least, problem.x_set, x_hat, smoothness, num_steps)
    return Gap(best.lower + worst.lower, best.upper + worst.upper)


def variational_gap(
    problem: AbstractVariationalInequality,
    w: PyTree,
    data: PyTree,
    *,
    num_steps: int = 300,
) -> Gap:
    r"""NON-PRIVATE. Bound $\sup_u \langle F(u), \hat w - u \rangle$, for affine $F$.

    For an affine monotone operator the supremum is a concave problem, solved and
    bounded as in `saddle_gap`. An affine, monotone operator is assumed, which
    cannot be checked. For others the objective need not be concave and the interval
    means nothing.

    Args:
        problem: A problem with a declared `lipschitz` on a bounded set and with affine
            operators.
        w: $\hat w$.
        data: The records.
        num_steps: Gradient steps.

    Raises:
        TypeError: The problem is no variational inequality or saddle problem.
        ValueError: A Lipschitz constant is not declared, or shapes do not fit.
    """
    kind = AbstractVariationalInequality
    _checks.instance("variational_gap", kind, problem=problem)
    problem.check(w, data)
    smoothness = 2 * _smoothness(problem)

    def value(u):
        operator = mean_operator(problem, u, data)
        return jnp.asarray(optax.tree.vdot(operator, optax.tree.sub(w, u)))

    return _maximum(value, problem.w_set, w, smoothness, num_steps)


def _smoothness(problem: AbstractVariationalInequality) -> float:
    declared = problem.constant("lipschitz") + problem.constant("public_lipschitz")
    return max(declared, _LEAST_CURVATURE)


def _maximum(value, feasible: AbstractSet, start, smoothness, num_steps) -> Gap:
    """Maximize a concave function; return the attained value and an upper bound."""
    _checks.count("gap", num_steps=num_steps)
    gradient = jax.grad(value)

    def step(state, t):
        u, ahead = state
        moved = jax.tree.map(lambda a, g: a + g / smoothness, ahead, gradient(ahead))
        new = feasible.project(moved)
        momentum = (t / (t + 3)).astype(jax.tree.leaves(u)[0].dtype)  # Nesterov's
        ahead = jax.tree.map(lambda a, b: a + momentum * (a - b), new, u)
        return (new, ahead), None

    u = feasible.project(start)
    times = jnp.arange(num_steps, dtype=jnp.result_type(float))
    (u, _), _ = jax.lax.scan(step, (u, u), times)
    slope = gradient(u)
    attained = value(u)
    missing = feasible.support(slope) - optax.tree.vdot(slope, u)  # by concavity
    return Gap(attained, attained + jnp.maximum(missing, 0))
