"""Small instances of every family of saddle points with a known gap."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.games import SaddleProblem, VariationalInequality
from dpbilevel.sets import Ball, Simplex
from tests.zoo import games as zoo
from tests.zoo.games import (
    SaddleExample,
    _exact,
    _largest_on_ball,
    _largest_singular,
    _longest,
)

N = 40


def normal(*shape, seed=0, scale=1.0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(scale * values, jnp.float32)


def affine_operator(
    matrices: jax.Array,
    offsets: jax.Array,
    *,
    radius: float = 1.0,
):
    r"""Return $F_i(w) = Q_i w + q_i$ on a ball; $\bar Q$ is $\mu I$ plus skew.

    $$\langle \bar q, \hat w \rangle + \sup_w \bigl(\langle w, \bar Q^\top \hat w - \bar
    q \rangle - \mu \|w\|^2\bigr).$$

    A rotation, $Q$ skew and orthogonal with $q = 0$, has the gap $R \|w\|$, and steps
    against its operator go round in circles.

    Args:
        matrices: $Q_i$.
        offsets: $q_i$.
        radius: $R$.
    """
    matrix, offset = jnp.mean(matrices, 0), jnp.mean(offsets, 0)
    mu = float(jnp.trace(matrix)) / len(offset)

    @_exact
    def gap(w):
        return offset @ w + _largest_on_ball(matrix.T @ w - offset, radius, 2 * mu)

    lipschitz = _largest_singular(matrices)
    problem = VariationalInequality(
        lambda w, z: z["matrix"] @ w + z["offset"],
        w_set=Ball(radius),
        lipschitz=lipschitz,
        bound=lipschitz * radius + _longest(offsets) + 1e-6,
    )
    data = {"matrix": matrices, "offset": offsets}
    return SaddleExample(problem, data, jnp.zeros_like(offset), gap)


def worst_group(targets: jax.Array, groups: jax.Array, radius: float = 1.0):
    r"""Return $\min_x \max_j$ of the mean $\frac12 \|x - t_i\|^2$ of group $j$.

    The weights $y$ of the groups are on a simplex and a record enters with $n / n_j$
    times its loss. With one group $y$ is a point, and the gap is the excess risk of
    the mean.

    Args:
        targets: $t$, within the ball.
        groups: From 0; every one has a record. Their sizes are taken for public.
        radius: $R$ of the ball of $x$.
    """
    counts = np.bincount(np.asarray(groups))
    n, k = len(groups), len(counts)
    dtype = targets.dtype
    members = (groups[:, None] == jnp.arange(k)[None]).astype(dtype)
    share = members / jnp.asarray(counts, dtype)[None]
    centers = _exact(jnp.matmul)(share.T, targets)
    spreads = 0.5 * (share.T @ jnp.sum(targets**2, 1))

    def losses(x):
        return 0.5 * (x @ x) - centers @ x + spreads

    @_exact
    def gap(w):
        x, y = w
        best = losses(y @ centers) @ y  # the weighted mean of targets is in the ball
        return jnp.max(losses(x)) - best

    weights = jnp.asarray(n / counts, dtype)

    def fun(x, y, z):
        weight = jnp.take(weights * y, z["group"])
        return weight * 0.5 * jnp.sum((x - z["target"]) ** 2)

    most, far = float(n / np.min(counts)), 2 * radius
    problem = SaddleProblem(
        fun,
        x_set=Ball(radius),
        y_set=Simplex(),
        lipschitz=most * (1 + far),
        bound=most * math.hypot(far, far**2 / 2),
    )
    w0 = (jnp.zeros_like(targets[0]), jnp.full(k, 1 / k, dtype))
    return SaddleExample(problem, {"target": targets, "group": groups}, w0, gap)


def rotation(n=N, angle=1.0):
    matrix = jnp.asarray([[0.0, angle], [-angle, 0.0]], jnp.float32)
    return affine_operator(jnp.tile(matrix, (n, 1, 1)), jnp.zeros((n, 2)))


def affine(mu=0.3):
    skew = normal(N, 3, 3, seed=5, scale=0.5)
    skew = skew - jnp.swapaxes(skew, 1, 2)
    matrices = skew + mu * jnp.eye(3)[None]
    return affine_operator(matrices, normal(N, 3, seed=6, scale=0.2))


def targets(n=N):
    return jax.vmap(dpb.sets.Ball(1.0).project)(normal(n, 2, seed=7, scale=0.5))


@functools.cache
def example(name):
    match name:
        case "constant":  # (A)
            return zoo.constant_operator(jnp.sign(normal(N, 4)) / 2)
        case "rotation":  # (B)
            return rotation()
        case "bilinear" | "strong":  # (C), (E)
            mu = 0.5 if name == "strong" else 0.0
            parts = normal(N, 2, 3), normal(N, 2, seed=1), normal(N, 3, seed=2)
            return zoo.bilinear_saddle(*parts, convexity=mu)
        case "game":  # (D)
            return zoo.matrix_game(normal(N, 3, 4, seed=3))
        case "affine":  # (F)
            return affine()
        case "groups":  # (G)
            groups = jnp.arange(N, dtype=jnp.int32) % 4
            return worst_group(targets(), jnp.minimum(groups, 2))
        case "mean":  # (H)
            return worst_group(targets(), jnp.zeros(N, jnp.int32))
    raise ValueError(name)


FAMILIES = ("constant", "rotation", "bilinear", "game", "strong", "affine")
FAMILIES += ("groups", "mean")
# Those whose operator is affine, so that the variational gap is computable.
AFFINE = ("constant", "rotation", "bilinear", "game", "strong", "affine")
SADDLES = ("bilinear", "game", "strong", "groups", "mean")


def point(name, seed=9):
    """A random feasible point."""
    made = example(name)
    leaves = jax.tree.leaves(made.w0)
    random = [normal(*v.shape, seed=seed + i) for i, v in enumerate(leaves)]
    w = jax.tree.unflatten(jax.tree.structure(made.w0), random)
    return jax.jit(made.problem.w_set.project)(w)
