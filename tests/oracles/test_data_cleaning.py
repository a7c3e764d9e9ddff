"""Hyper-data-cleaning: one weight for each training record."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.oracles import implicit_hypergradient, lower_solve

N, D, CLASSES = 301, 5, 3


def loss(y, record):
    logits = record["features"] @ y
    return jax.nn.logsumexp(logits) - record["label"] @ logits


def lower(x, y, record):
    return jax.nn.sigmoid(x[record["index"]]) * loss(y, record)


def by_one_hot(x, y, record):
    """The same by a product with a unit vector, which makes an n x n array."""
    weight = jax.nn.one_hot(record["index"], N, dtype=x.dtype) @ x
    return jax.nn.sigmoid(weight) * loss(y, record)


def records(flipped=0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D))
    label = np.argmax(x @ rng.normal(size=(D, CLASSES)), 1)
    noisy = np.where(np.arange(N) < flipped, (label + 1) % CLASSES, label)
    upper, rows = (
        {
            "features": jnp.asarray(x[:n], jnp.float32),
            "label": jnp.asarray(np.eye(CLASSES)[label[:n]], jnp.float32),
        }
        for n, label in ((100, label), (N, noisy))
    )
    return dpb.Levels(upper, rows | {"index": jnp.arange(N, dtype=jnp.int32)})


def weighted(lower):
    return dpb.BilevelProblem(
        lambda _, y, record: loss(y, record),
        lower,
        lower_public=lambda _, y: 1e-2 * jnp.sum(y * y),
        x_in_records=("lower",),
    )


def step(problem):
    def run(x, y, data):
        y, _ = lower_solve(problem, x, data, y0=y)
        return implicit_hypergradient(problem, x, y, data)[0], y

    return run


def sizes(jaxpr):
    """How many numbers each value of a program holds, those of its loops included."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from sizes(inner)


@pytest.mark.parametrize(("weight", "quadratic"), [(lower, False), (by_one_hot, True)])
def test_weights_of_records_are_gathered_and_no_array_is_quadratic(weight, quadratic):
    arguments = jnp.zeros(N), jnp.zeros((D, CLASSES)), records()
    program = jax.make_jaxpr(step(weighted(weight)))(*arguments)
    assert (max(sizes(program.jaxpr)) >= N * N) == quadratic


@pytest.mark.slow
def test_wrong_labels_lose_their_weight():
    problem, data = weighted(lower), records(flipped=100)
    run = jax.jit(step(problem))
    x, y = jnp.zeros(N), jnp.zeros((D, CLASSES))
    for _ in range(8):
        slope, y = run(x, y, data)
        x = x - 0.3 * jnp.sign(slope)
    # A third of the labels is wrong; by chance a third of the found ones would be.
    found, wrong = np.asarray(x) < 0, np.arange(N) < 100
    assert np.mean(found[wrong]) > 0.9
    assert np.mean(wrong[found]) > 0.8
