"""Integers of 61 bits in two of 32 bits, against the integers of Python."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel.privacy.exact import int61
from dpbilevel.privacy.exact.int61 import MOST_PLACES, Limbs

LEAST, LARGEST = -(2**60), 2**60 - 1
MASK = 2**30 - 1
draw = random.Random(5)
EXTREME = [LEAST, LEAST + 1, LARGEST, LARGEST - 1, 0, 1, -1, MASK, MASK + 1, -MASK]
EXTREME += [
    sign * (2**p + more) for p in range(60) for sign in (1, -1) for more in (0, -1)
]
RANDOM = [draw.randint(-(2**p), 2**p - 1) for p in range(1, 61) for _ in range(20)]
VALUES = EXTREME + RANDOM


def wide(values):
    high, low = [v >> 30 for v in values], [v & MASK for v in values]
    return Limbs(jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32))


def whole(value):
    """The integers of Python; every limb must be in its range."""
    high, low = (np.ravel(np.asarray(v)).tolist() for v in (value.high, value.low))
    assert all(0 <= v <= MASK for v in low)
    assert all(-(2**30) <= v < 2**30 for v in high)
    return [a * 2**30 + b for a, b in zip(high, low, strict=True)]


def cut(value):
    return min(max(value, LEAST), LARGEST)


def test_sums_of_two_are_exact_and_cut_at_the_ends():
    others = VALUES[1:] + VALUES[:1]
    for right in (others, VALUES, [-v - 1 for v in VALUES]):
        total = jax.jit(Limbs.__add__)(wide(VALUES), wide(right))
        expected = [cut(a + b) for a, b in zip(VALUES, right, strict=True)]
        assert whole(total) == expected


def test_shifts_round_half_up_and_are_cut_at_the_ends():
    shift = jax.jit(jax.vmap(Limbs.shifted, (None, 0)))
    places = range(-MOST_PLACES, MOST_PLACES + 1)
    shifted = shift(wide(VALUES), jnp.asarray(places, jnp.int32))
    for row, p in zip(
        zip(*[iter(whole(shifted))] * len(VALUES), strict=True), places, strict=True
    ):
        if p >= 0:
            expected = [cut(v << p) for v in VALUES]
        else:
            expected = [(v + (1 << (-p - 1))) >> -p for v in VALUES]
        assert list(row) == expected, p


def test_a_sum_that_is_cut_sets_neighbours_no_further_apart():
    for p in (1, 20, 29, 30):
        near = jax.jit(Limbs.shifted)(
            wide([v + 1 for v in VALUES if v < LARGEST]), jnp.int32(p)
        )
        here = jax.jit(Limbs.shifted)(
            wide([v for v in VALUES if v < LARGEST]), jnp.int32(p)
        )
        gaps = [a - b for a, b in zip(whole(near), whole(here), strict=True)]
        assert all(0 <= gap <= 2**p for gap in gaps)


@pytest.mark.parametrize("m", [0, 1, 2**14, 2**14 + 1, 23_456, 2**15 - 1, 2**15])
def test_a_product_with_a_fraction_is_rounded_once(m):
    product = jax.jit(Limbs.times_fraction)(wide(VALUES), jnp.int32(m))
    assert whole(product) == [(v * m + 2**14) >> 15 for v in VALUES]


def nearest(value):
    """The nearest float32 by integer arithmetic, ties to even."""
    size = abs(value)
    behind = max(size.bit_length() - 24, 0)
    quotient, rest = divmod(size, 2**behind)
    twice = 2 * rest - 2**behind
    quotient += behind > 0 and (twice > 0 or (twice == 0 and quotient % 2 == 1))
    return (1 if value >= 0 else -1) * float(quotient << behind)


def test_float32_is_the_nearest_number():
    ties = [
        (2**24 + k) * 2**p + more
        for k in (1, 2, 3)
        for p in range(1, 35)
        for more in (2 ** (p - 1), 2 ** (p - 1) + 1, 2 ** (p - 1) - 1)
    ]
    values = VALUES + ties + [-v for v in ties]
    result = jax.jit(functools.partial(Limbs.astype, dtype=jnp.float32))(wide(values))
    assert result.dtype == jnp.float32
    assert np.asarray(result, np.float64).tolist() == [nearest(v) for v in values]


def test_float64_is_the_nearest_number():
    with jax.enable_x64(True):
        result = wide(VALUES).astype(jnp.float64)
        assert np.asarray(result).tolist() == [float(v) for v in VALUES]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_are_rounded_to_the_nearest_integer(dtype):
    with jax.enable_x64(dtype == "float64"):
        values = [float(v) for v in VALUES] + [0.5, 1.5, -0.5, -2.5, 0.49, 1e-40, 1e30]
        values = np.asarray([*values, -1e30, np.inf, -np.inf], dtype)
        result = jax.jit(int61.from_float)(jnp.asarray(values))
        expected = [
            cut(round(float(v))) if np.isfinite(v) else (LARGEST if v > 0 else LEAST)
            for v in values
        ]
        assert whole(result) == expected


def test_integers_of_32_bits_are_kept():
    values = [-(2**31), 2**31 - 1, 0, -1, 2**30, -(2**30), *range(-5, 5)]
    assert whole(int61.from_int32(jnp.asarray(values, jnp.int32))) == values


@pytest.mark.parametrize("rows", [0, 1, 7, 2**15, 2**15 + 1, 3 * 2**15 + 11])
def test_sums_over_many_rows_are_exact(rows):
    rng = np.random.default_rng(rows)
    counts = rng.integers(-(2**31), 2**31, (rows, 4), dtype=np.int32)
    counts[:, 0], counts[:, 1] = -(2**31), 2**31 - 1  # nothing else sums higher
    total = jax.jit(int61.sum_rows)(jnp.asarray(counts))
    assert whole(total) == counts.sum(axis=0, dtype=np.int64).tolist()
    # The control: 32 bits alone wrap around.
    wrapped = counts.sum(axis=0, dtype=np.int32)
    assert rows < 2 or whole(total) != wrapped.tolist()


def test_a_scan_over_chunks_carries():
    chunks, rows = 100, 512
    counts = np.full((chunks, rows, 2), 2**31 - 1, np.int32)
    counts[..., 1] = -(2**31)

    @jax.jit
    def run(counts):
        return jax.lax.scan(
            lambda total, chunk: (total + int61.sum_rows(chunk), None),
            int61.zeros((2,)),
            counts,
        )[0]

    expected = counts.sum(axis=(0, 1), dtype=np.int64).tolist()
    assert whole(run(jnp.asarray(counts))) == expected
    batched = jax.vmap(run)(
        jnp.stack([jnp.asarray(counts[:9]), jnp.asarray(counts[9:18])])
    )
    assert whole(batched) == [9 * v // chunks for v in expected] * 2


def test_more_rows_than_fit_are_refused():
    with pytest.raises(ValueError, match="at most 536870912 rows"):
        jax.eval_shape(int61.sum_rows, jax.ShapeDtypeStruct((2**29 + 1,), jnp.int32))
    with pytest.raises(ValueError, match="at most 268435456 rows"):
        jax.eval_shape(
            int61.sum_floats, jax.ShapeDtypeStruct((2**28 + 1,), jnp.float32)
        )


@pytest.mark.parametrize("n", [1, 3, 2**13, 2**13 + 1, 3 * 2**13])
def test_sums_of_rounded_floats_are_exact(n):
    rng = np.random.default_rng(n)
    values = (rng.uniform(-1, 1, (n, 2)) * 2.0 ** rng.integers(0, 33, (n, 2))).astype(
        np.float32
    )
    values[0] = [2.0**32, -(2.0**32)]
    values[-1] = [0.5, -1.5]  # ties go to even
    expected = [sum(int(v) for v in np.round(column)) for column in values.T]
    assert whole(jax.jit(int61.sum_floats)(jnp.asarray(values))) == expected


@pytest.mark.parametrize("places", [1, 5000])
def test_sums_at_indices_are_exact_and_drop_what_is_out_of_range(places):
    rng = np.random.default_rng(places)
    indices = rng.integers(-3, 9, (4, places)).astype(np.int32)
    counts = rng.integers(-(2**24), 2**24, (4, places, 2)).astype(np.int32)
    counts[0] = 2**24  # the most that a record may have, at every place
    found = jax.jit(functools.partial(int61.sum_at, (7, 2)))(indices, counts)
    expected = [
        sum(int(v) for v in counts[..., j][indices == i])
        for i in range(7)
        for j in range(2)
    ]
    assert whole(found) == expected


def along(values, devices):
    """The sums over devices of as many values each, as a program of all finds them."""
    rows = wide(values)
    rows = jax.tree.map(lambda v: v.reshape(devices, -1), rows)
    total = jax.vmap(lambda v: int61.sum_over(v, "i"), axis_name="i", out_axes=None)
    return whole(jax.jit(total)(rows))


@pytest.mark.parametrize(
    "devices", [1, 2, 3, 8, pytest.param(2047, marks=pytest.mark.slow)]
)
def test_sums_over_devices_are_exact_and_cut_at_the_ends(devices):
    columns = [VALUES[i:] + VALUES[:i] for i in range(min(devices, 8))]
    columns = [columns[i % len(columns)] for i in range(devices)]
    found = along([v for column in columns for v in column], devices)
    assert found == [cut(sum(row)) for row in zip(*columns, strict=True)]


def test_sums_over_devices_of_the_largest_that_cancel_are_exact():
    columns = [[LARGEST, LEAST, MASK, -MASK]] * 1000 + [[LEAST, LARGEST, 1, -1]] * 1000
    found = along([v for column in columns for v in column], 2000)
    assert found == [sum(row) for row in zip(*columns, strict=True)] != [0] * 4


def test_a_plain_sum_of_limbs_over_devices_is_not_exact():
    values = [LARGEST, LARGEST, 1 - LARGEST, 1 - LARGEST]
    rows = jax.tree.map(lambda v: v.reshape(4, 1), wide(values))
    high, low = (int(jnp.sum(v, dtype=jnp.int32)) for v in (rows.high, rows.low))
    assert along(values, 4) == [2] != [high * 2**30 + low]


def test_sums_over_more_devices_than_fit_are_refused():
    with pytest.raises(ValueError, match="fewer than 2048 devices"):
        along([1] * 2048, 2048)
