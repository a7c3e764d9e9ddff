"""NON-PRIVATE distances from a solution, and examples where they have a closed form.

All of them read the records. A gap that is computed from the records is a release that
is not in the ledger: for tests, figures and public data.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from dpbilevel.games import BilinearGame, VariationalInequality
from dpbilevel.games.problem import (
    AbstractSaddleProblem,
    AbstractVariationalInequality,
    Scalar,
)
from dpbilevel.sets import AbstractSet, Ball

__all__ = ["SaddleExample", "bilinear_saddle", "constant_operator", "matrix_game"]

Vector = Float[Array, " d"]

# Accelerators round the factors of matrix products by default.
_exact = jax.default_matmul_precision("highest")


# A linear objective has no curvature to take a step size from.
_LEAST_CURVATURE = 1e-3
_STEPS = 300  # of gradients, to maximize a concave function


@dataclasses.dataclass(frozen=True)
class SaddleExample:
    r"""Problem, its records and its gap. NON-PRIVATE: constants and gap read them.

    Attributes:
        problem: The problem, with constants that hold for these records.
        data: The records.
        w0: An initial point.
        gap: The gap of a point on these records: $\max_y f(\hat x, y) - \min_x f(x,
            \hat y)$ for saddle points, $\sup_w \langle F(w), \hat w - w \rangle$ for
            inequalities.
    """

    problem: AbstractVariationalInequality
    data: PyTree
    w0: PyTree
    gap: Callable[[PyTree], Float[Array, ""]]


def constant_operator(records: Float[Array, "n d"], radius: float = 1.0):
    r"""Return a `SaddleExample`: $F_i(w) = z_i$ on a ball, as in lower bounds.

    The gap is $\langle \bar z, w \rangle + R \|\bar z\|$, the same weak and strong. The
    instance of the lower bounds, with entries of $z$ equal to $\pm M / \sqrt d$.

    Args:
        records: $z$.
        radius: $R$.

    References:
        Boob and Guzman, Proposition 12.
    """
    mean = jnp.mean(records, 0)
    problem = VariationalInequality(
        lambda w, z: z, w_set=Ball(radius), lipschitz=0.0, bound=_longest(records)
    )
    gap = _exact(lambda w: w @ mean + radius * jnp.linalg.norm(mean))
    return SaddleExample(problem, records, jnp.zeros_like(mean), gap)


def bilinear_saddle(
    matrices: Float[Array, "n p q"],
    linear_x: Float[Array, "n p"],
    linear_y: Float[Array, "n q"],
    *,
    radius: float = 1.0,
    convexity: float = 0.0,
):
    r"""Return a `SaddleExample`: $x^\top A_i y + b_i^\top x - c_i^\top y$ on balls.

    With $\mu > 0$ the public term $\frac\mu2 (\|x\|^2 - \|y\|^2)$ makes it strongly
    convex and strongly concave.

    Args:
        matrices: $A_i$.
        linear_x: $b_i$.
        linear_y: $c_i$.
        radius: The radius of both balls.
        convexity: $\mu$.
    """
    matrix, b, c = (jnp.mean(v, 0) for v in (matrices, linear_x, linear_y))

    @_exact
    def gap(w):
        x, y = w
        linear = b @ x + c @ y + convexity / 2 * (x @ x + y @ y)
        slopes = matrix.T @ x - c, matrix @ y + b
        return linear + sum(_largest_on_ball(v, radius, convexity) for v in slopes)

    def public(x, y):
        return convexity / 2 * (x @ x - y @ y)

    lipschitz = _largest_singular(matrices)
    along = [lipschitz * radius + _longest(v) for v in (linear_x, linear_y)]
    most = convexity * radius * 2**0.5
    terms: Any = {"public_lipschitz": convexity, "public_bound": most}
    problem = BilinearGame(
        lambda z: z["matrix"],
        lambda z: z["x"],
        lambda z: -z["y"],
        public if convexity else None,
        x_set=Ball(radius),
        y_set=Ball(radius),
        lipschitz=lipschitz,
        bound=math.hypot(*along) + 1e-6,
        **(terms if convexity else {}),
    )
    data = {"matrix": matrices, "x": linear_x, "y": linear_y}
    return SaddleExample(problem, data, (jnp.zeros_like(b), jnp.zeros_like(c)), gap)


def matrix_game(payoffs: Float[Array, "n p q"]):
    r"""Return a `SaddleExample`: $x^\top A_i y$ on two simplices, a zero-sum game.

    The gap is $\max_j (\bar A^\top x)_j - \min_i (\bar A y)_i$.

    Args:
        payoffs: $A_i$, what the first player pays.
    """
    matrix = jnp.mean(payoffs, 0)
    p, q = matrix.shape
    largest = float(jnp.max(jnp.abs(payoffs)))
    problem = BilinearGame(
        lambda z: z,
        lipschitz=_largest_singular(payoffs),
        bound=largest * math.sqrt(p + q),
    )
    w0 = tuple(jnp.full(k, 1 / k, payoffs.dtype) for k in (p, q))
    gap = _exact(lambda w: jnp.max(matrix.T @ w[0]) - jnp.min(matrix @ w[1]))
    return SaddleExample(problem, payoffs, w0, gap)


def _largest_on_ball(slope: Vector, radius: float, curvature: float):
    r"""Return $\max_u \langle g, u \rangle - \frac\kappa2 \|u\|^2$ on a ball."""
    length = jnp.linalg.norm(slope)
    outer = radius * length - curvature * radius**2 / 2
    if curvature <= 0:
        return outer
    inner = length**2 / (2 * curvature)
    return jnp.where(length <= curvature * radius, inner, outer)


def _longest(vectors: Array) -> float:
    return float(jnp.max(jnp.linalg.norm(vectors, axis=-1)))


def _largest_singular(matrices: Array) -> float:
    norms = np.linalg.norm(np.asarray(matrices, np.float64), 2, axis=(1, 2))
    return float(np.max(norms))


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


def saddle_gap(problem: AbstractSaddleProblem, w: PyTree, data: PyTree) -> Gap:
    r"""NON-PRIVATE. Return a `Gap` of $\max_y f(\hat x, y) - \min_x f(x, \hat y)$.

    Both problems are convex and are solved by accelerated projected gradients. By
    convexity what is missing is at most $\sup_u \langle \nabla, u - u_k \rangle$, which
    the support functions of the sets give, so the interval holds whatever the solver
    did. For linear problems it is a point.

    Args:
        problem: A problem with a declared `lipschitz` on bounded sets.
        w: $(\hat x, \hat y)$.
        data: The records.

    Raises:
        TypeError: The problem is no `SaddleProblem`.
        ValueError: A Lipschitz constant is not declared, or shapes do not fit.
    """
    problem.check(w, data)
    x_hat, y_hat = w
    smoothness = _smoothness(problem)

    def value(x, y):
        with jax.default_matmul_precision("highest"):
            fun = problem.of_record(problem.fun)
            values = jax.vmap(lambda record: fun(x, y, record))(data)
            public = 0.0 if problem.public is None else problem.public(x, y)
        return jnp.mean(values) + public

    def least(x):
        return -value(x, y_hat)

    most = functools.partial(value, x_hat)
    best = _maximum(most, problem.y_set, y_hat, smoothness)
    worst = _maximum(least, problem.x_set, x_hat, smoothness)
    return Gap(best.lower + worst.lower, best.upper + worst.upper)


def variational_gap(
    problem: AbstractVariationalInequality,
    w: PyTree,
    data: PyTree,
) -> Gap:
    r"""NON-PRIVATE. Return a `Gap` of $\sup_u F(u)^\top (\hat w - u)$, for affine $F$.

    For an affine monotone operator the supremum is a concave problem, solved and
    bounded as in `saddle_gap`. An affine, monotone operator is assumed, which
    cannot be checked. For others the objective need not be concave and the interval
    means nothing.

    Args:
        problem: A problem with a declared `lipschitz` on a bounded set and with affine
            operators.
        w: $\hat w$.
        data: The records.

    Raises:
        TypeError: The problem is no variational inequality or saddle problem.
        ValueError: A Lipschitz constant is not declared, or shapes do not fit.
    """
    problem.check(w, data)
    smoothness = 2 * _smoothness(problem)

    def value(u):
        operator = mean_operator(problem, u, data)
        return jnp.asarray(optax.tree.vdot(operator, optax.tree.sub(w, u)))

    return _maximum(value, problem.w_set, w, smoothness)


def _smoothness(problem: AbstractVariationalInequality) -> float:
    declared = problem.constant("lipschitz") + problem.constant("public_lipschitz")
    return max(declared, _LEAST_CURVATURE)


def _maximum(value, feasible: AbstractSet, start, smoothness) -> Gap:
    """Maximize a concave function; return a `Gap`: attained value and upper bound."""
    gradient = jax.grad(value)

    def step(state, t):
        u, ahead = state
        moved = jax.tree.map(lambda a, g: a + g / smoothness, ahead, gradient(ahead))
        new = feasible.project(moved)
        momentum = (t / (t + 3)).astype(jax.tree.leaves(u)[0].dtype)  # Nesterov's
        ahead = jax.tree.map(lambda a, b: a + momentum * (a - b), new, u)
        return (new, ahead), None

    u = feasible.project(start)
    times = jnp.arange(_STEPS, dtype=jnp.result_type(float))
    (u, _), _ = jax.lax.scan(step, (u, u), times)
    slope = gradient(u)
    attained = value(u)
    missing = feasible.support(slope) - optax.tree.vdot(slope, u)  # by concavity
    return Gap(attained, attained + jnp.maximum(missing, 0))
