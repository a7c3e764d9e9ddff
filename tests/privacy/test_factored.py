"""Gradients by factors: equal to dense ones, and no record moves a sum by more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.clipping import clipped_mean, unsealed
from dpbilevel.privacy.factored import Factored, is_factored, per_record_gradient


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def dense(tree):
    return jax.tree.map(
        lambda v: v.dense() if is_factored(v) else v, tree, is_leaf=is_factored
    )


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def linear(w, record):
    return jnp.logaddexp(0, -record[1] * (record[0] @ w))


def mlp(w, record):
    hidden = jax.nn.relu(record[0] @ w["a"] + w["b"])
    return -jax.nn.log_softmax(hidden @ w["c"])[record[1]]


def shared(w, record):
    return jnp.sum(jnp.tanh(jnp.tanh(record @ w) @ w.T) ** 2)


def called_twice(w, record):
    layer = jax.jit(lambda x: jnp.sin(x @ w))
    return jnp.sum(layer(record) * layer(record + 1))


def attention(w, record):
    q, k, v = (jnp.einsum("td,dhk->thk", record, w[name]) for name in "qkv")
    shares = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
    mixed = jnp.einsum("hts,shk->thk", shares, v)
    return jnp.sum(jnp.einsum("thk,hkd->td", mixed, w["o"]) ** 2)


HEADS = {name: normal(40, 2, 20, seed=i) for i, name in enumerate("qkv")}
HEADS |= {"o": normal(2, 20, 40, seed=3)}
LAYERS = {"a": normal(5, 7), "b": normal(7, seed=2), "c": normal(7, 3, seed=3)}
# Loss, parameters, record, and how many leaves are factored.
LOSSES = {
    "linear": (linear, normal(5), (normal(5, seed=1), 1.0), 1),
    "mlp": (mlp, LAYERS, (normal(5, seed=4), 1), 2),
    "weights shared with their transpose": (shared, normal(5, 7), normal(5, seed=3), 1),
    "a layer called twice": (called_twice, normal(5, 7), normal(5, seed=3), 1),
    "checkpoint": (
        lambda w, r: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(r)),
        normal(5, 7),
        normal(5, seed=3),
        1,
    ),
    "attention": (attention, HEADS, normal(3, 40, seed=7), 4),
    "matrix on the left": (
        lambda w, r: jnp.sum((w @ r) ** 2),
        normal(40, 50),
        normal(50, 6, seed=2),
        1,
    ),
    "custom_vjp": (
        lambda w, r: jnp.sum(doubled(r @ w)),
        normal(5, 7),
        normal(5, seed=3),
        1,
    ),
    "stop_gradient": (
        lambda w, r: jnp.sum(jnp.sin(r @ w) * jax.lax.stop_gradient(r @ w)),
        normal(5, 7),
        normal(5, seed=3),
        1,
    ),
    "scan": (
        lambda w, r: jnp.sum(
            jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), r, None, length=3)[0]
        ),
        normal(5, 5),
        normal(5, seed=3),
        0,
    ),
    "a penalty beside the product": (
        lambda w, r: jnp.sum(jnp.sin(r @ w)) + jnp.sum(w**2),
        normal(5, 7),
        normal(5, seed=3),
        0,
    ),
    "a batched product": (
        lambda w, r: jnp.sum(jnp.einsum("bi,bij->bj", r, w) ** 2),
        normal(4, 5, 6),
        normal(4, 5, seed=2),
        0,
    ),
    "places enough to form the matrix": (
        lambda w, r: jnp.sum(jnp.sin(r @ w)),
        normal(3, 4),
        normal(50, 3, seed=2),
        0,
    ),
    "a scalar": (lambda w, r: w * r, jnp.asarray(2.0), jnp.asarray(3.0), 0),
}


def wide(leaf):
    leaf = jnp.asarray(leaf)
    return leaf.astype(float) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_jax(name, x64):
    loss, w, record, factored = LOSSES[name]
    w, record = jax.tree.map(wide, (w, record))
    gradient = per_record_gradient(loss)
    found = gradient(w, record)
    leaves = jax.tree.leaves(found, is_leaf=is_factored)
    assert sum(map(is_factored, leaves)) == factored
    expected = jax.grad(loss)(w, record)
    for ours, theirs in zip(
        jax.tree.leaves(dense(found)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    jitted = jax.jit(lambda w, record: dense(gradient(w, record)))(w, record)
    for ours, theirs in zip(
        jax.tree.leaves(jitted), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def batch_of(record, n):
    return jax.tree.map(
        lambda v: jnp.stack([jnp.asarray(v) * (1 + i % 7) for i in range(n)]), record
    )


@pytest.mark.parametrize("precision", ["float", "grid"])
@pytest.mark.parametrize(
    "name", ["linear", "attention", "weights shared with their transpose"]
)
def test_the_clipped_mean_is_that_of_dense_gradients(name, precision):
    loss, w, record, _ = LOSSES[name]
    records = batch_of(record, 70)

    def mean(gradient):
        fun = functools.partial(gradient(loss), w)
        return unsealed(clipped_mean(fun, records, clip_norm=1.0, precision=precision))

    ours, theirs = map(jax.jit(mean, static_argnums=0), (per_record_gradient, jax.grad))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, atol=5e-3 * scale)
