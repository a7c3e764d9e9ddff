"""Gradients in bfloat16 that are kept as factors are as accurate as formed ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel.privacy.per_example import factored
from dpbilevel.privacy.per_example.clipping import clipped_mean, unsealed
from tests.cases import slow

HALF = jnp.bfloat16
# The terms of the places nearly cancel, so that their errors are long beside the sum.
SIGNS = np.tile([[1.0], [-1.0]], (32, 1)).astype(HALF)


def number(value):
    return jnp.asarray(value, HALF)


def total(hidden):
    return jnp.sum(SIGNS * jnp.tanh(hidden))


def convolved(w, rows):
    layout = ("NHC", "HIO", "NHC")
    kernel = w.reshape(2, 16, 24) * number(0.37)
    image = rows[None, :, :16]
    return total(
        jax.lax.conv_general_dilated(
            image, kernel, (1,), "SAME", dimension_numbers=layout
        )[0]
    )


def converted(w, rows):
    scaled = (w.astype(jnp.float32) * 0.37).astype(HALF) / number(0.7)
    return total(rows @ scaled).astype(jnp.float32)


LOSSES = {
    "a layer": lambda w, rows: total(rows @ w),
    "a scaled layer": lambda w, rows: total(rows @ (w * number(0.37))),
    "a divided layer": lambda w, rows: total(rows @ -(w / number(3))),
    "three numbers": lambda w, rows: total(
        rows @ (w * number(0.37) / number(0.7) * number(1.3))
    ),
    "conversions": converted,
    "a transposed layer": lambda w, rows: total(
        ((w.T * number(0.37)).reshape(24, 32) @ rows.T).T
    ),
    "a convolution": convolved,
    "a table": lambda w, rows: total(
        rows[:, :8] + w.reshape(96, 8)[np.arange(64)] * number(0.37)
    ),
    "one place": lambda w, rows: jnp.sum(jnp.tanh(rows[0] @ (w * number(0.37)))),
}


def means(names):
    """The gradient of each loss, formed and as `clipped_mean` computes it."""
    rng = np.random.default_rng(0)
    base, noise = rng.normal(size=(1, 32)), rng.normal(size=(64, 32))
    rows = jnp.asarray(base + 0.05 * noise, HALF)
    w = jnp.asarray(0.1 * rng.normal(size=(32, 24)), HALF)

    def pair(loss):
        def slope(rows):
            return jax.grad(loss)(w, rows)

        mean = clipped_mean(slope, rows[None], clip_norm=100.0, precision="float")
        return slope(rows), unsealed(mean)

    # Operation by operation: a compiler leaves out roundings to bfloat16 as it likes.
    with jax.disable_jit():
        pairs = {name: pair(LOSSES[name]) for name in names}
    return jax.tree.map(lambda v: np.asarray(v, np.float64), pairs)


def errors(names):
    return {
        name: np.linalg.norm(mean - formed) / np.linalg.norm(formed)
        for name, (formed, mean) in means(names).items()
    }


@pytest.mark.slow
def test_factors_round_no_more_than_formed_gradients():
    assert max(errors(LOSSES).values()) < 2**-7


def test_numbers_that_round_every_factor_are_off_by_more(monkeypatch):
    # The control: factors that stay in half precision.
    monkeypatch.setattr(factored, "_widened", lambda v: v)
    found = errors(["three numbers"])
    assert min(found.values()) > 2**-7


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
def test_means_of_half_precision_are_in_float32(dtype):
    rows = jnp.ones((4, 8, 5), dtype)
    w = jnp.ones((5, 3), dtype)

    def slope(rows):
        return jax.grad(lambda w: jnp.sum(jnp.sin(rows @ w) / 3).astype(dtype))(w)

    assert (
        unsealed(clipped_mean(slope, rows, clip_norm=1.0, precision="float")).dtype
        == jnp.float32
    )
