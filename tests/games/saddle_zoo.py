"""Small instances of every family of saddle points with a known gap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.games import zoo

N = 40


def normal(*shape, seed=0, scale=1.0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(scale * values, jnp.float32)


def rotation(n=N, angle=1.0):
    matrix = jnp.asarray([[0.0, angle], [-angle, 0.0]], jnp.float32)
    return zoo.affine_operator(jnp.tile(matrix, (n, 1, 1)), jnp.zeros((n, 2)))


def affine(mu=0.3):
    skew = normal(N, 3, 3, seed=5, scale=0.5)
    skew = skew - jnp.swapaxes(skew, 1, 2)
    matrices = skew + mu * jnp.eye(3)[None]
    return zoo.affine_operator(matrices, normal(N, 3, seed=6, scale=0.2))


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
            return zoo.worst_group(targets(), jnp.minimum(groups, 2))
        case "mean":  # (H)
            return zoo.worst_group(targets(), jnp.zeros(N, jnp.int32))
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
    return made.problem.w_set.project(w)
