"""Saddle points and inequalities with gaps in closed form, for tests and figures."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..sets import Ball, Simplex
from .problem import AbstractVariationalInequality, SaddleProblem, VariationalInequality

__all__ = [
    "SaddleExample",
    "bilinear_saddle",
    "constant_operator",
    "matrix_game",
]

Vector = Float[Array, " d"]

# Accelerators round the factors of matrix products by default.
_exact = jax.default_matmul_precision("highest")


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
    r"""Return $F_i(w) = z_i$ on a ball: no algorithm does better than the mean allows.

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
    return SaddleExample(
        problem,
        records,
        jnp.zeros_like(mean),
        _exact(lambda w: w @ mean + radius * jnp.linalg.norm(mean)),
    )


def bilinear_saddle(
    matrices: Float[Array, "n p q"],
    linear_x: Float[Array, "n p"],
    linear_y: Float[Array, "n q"],
    *,
    radius: float = 1.0,
    convexity: float = 0.0,
):
    r"""Return $x^\top A_i y + \langle b_i, x \rangle - \langle c_i, y \rangle$.

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

    def fun(x, y, z):
        return x @ (z["matrix"] @ y) + z["x"] @ x - z["y"] @ y

    def public(x, y):
        return convexity / 2 * (x @ x - y @ y)

    lipschitz = _largest_singular(matrices)
    along = [lipschitz * radius + _longest(v) for v in (linear_x, linear_y)]
    terms = {"public_lipschitz": convexity, "public_bound": convexity * radius * 2**0.5}
    problem = SaddleProblem(
        fun,
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
    r"""Return $x^\top A_i y$ on two simplices: a zero-sum game of mean payoffs.

    The gap is $\max_j (\bar A^\top x)_j - \min_i (\bar A y)_i$.

    Args:
        payoffs: $A_i$, what the first player pays.
    """
    matrix = jnp.mean(payoffs, 0)
    p, q = matrix.shape
    largest = float(jnp.max(jnp.abs(payoffs)))
    problem = SaddleProblem(
        lambda x, y, z: x @ (z @ y),
        x_set=Simplex(),
        y_set=Simplex(),
        lipschitz=_largest_singular(payoffs),
        bound=largest * math.sqrt(p + q),
    )
    w0 = tuple(jnp.full(k, 1 / k, payoffs.dtype) for k in (p, q))
    return SaddleExample(
        problem,
        payoffs,
        w0,
        _exact(lambda w: jnp.max(matrix.T @ w[0]) - jnp.min(matrix @ w[1])),
    )


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
