import doctest
import functools
import importlib
import math
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpbilevel as dpb
from dpbilevel.privacy.per_example import microbatches, summation
from dpbilevel.privacy.per_example.clipping import unsealed
from dpbilevel.privacy.per_example.microbatches import _chunk_rows, microbatch_rows
from tests.cases import slow


def identity(record):
    return record


def reference(records, clip_norm, mask=None):
    flat = np.asarray(records, np.float64).reshape(len(records), -1)
    norms = np.linalg.norm(flat, axis=1)
    factors = np.minimum(1, clip_norm / np.maximum(norms, 1e-300))
    keep = np.ones(len(flat), bool) if mask is None else np.asarray(mask)
    return np.sum(flat * (factors * keep)[:, None], axis=0)


def gaussian_records(n=37, d=6, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.normal(size=(n, d)), jnp.float32)


@pytest.mark.parametrize("clip_norm", [0.1, 2.5, 1e3])
@pytest.mark.parametrize("denominator", [None, 50.0])
def test_clipped_mean_equals_a_numpy_reference(clip_norm, denominator):
    records = gaussian_records()
    bounded = dpb.privacy.clipped_mean(
        identity,
        records,
        clip_norm=clip_norm,
        denominator=denominator,
        precision="float",
    )
    expected = reference(records, clip_norm) / (denominator or len(records))
    np.testing.assert_allclose(bounded.raw, expected, rtol=1e-4, atol=1e-6 * clip_norm)


@pytest.mark.slow
def test_the_norm_runs_over_the_whole_pytree():
    records = gaussian_records(scale=5.0)
    tree = {"a": records[:, :2], "b": records[:, 2:].reshape(-1, 2, 2)}
    bounded = dpb.privacy.clipped_mean(identity, tree, clip_norm=1.0, precision="float")
    flat = np.concatenate([bounded.raw["a"], bounded.raw["b"].ravel()])
    np.testing.assert_allclose(flat, reference(records, 1.0) / 37, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("neighbours", "factor"),
    [(dpb.Neighbours.REPLACE_ONE, 2), (dpb.Neighbours.ADD_OR_REMOVE_ONE, 1)],
)
def test_sensitivity_is_the_clip_norm_over_the_denominator(neighbours, factor):
    records = gaussian_records()
    mask = jnp.arange(37) < 5
    bounded = dpb.privacy.clipped_mean(
        identity, records, clip_norm=3.0, mask=mask, denominator=37.0, precision="float"
    )
    assert bounded.sensitivity(neighbours) == pytest.approx(factor * 3 / 37)
    assert bounded.basis is dpb.privacy.Basis.CLIPPED
    doubled = bounded + bounded
    assert doubled.sensitivity(neighbours) == pytest.approx(2 * factor * 3 / 37)
    np.testing.assert_array_equal(doubled.raw, 2 * np.asarray(bounded.raw))


def test_adding_a_declared_bound_lowers_the_basis():
    clipped = dpb.privacy.Bounded(jnp.ones(2), 1.0)
    declared = dpb.privacy.Bounded(jnp.ones(2), 1.0, dpb.privacy.Basis.CONSTANTS)
    assert (clipped + declared).basis is dpb.privacy.Basis.CONSTANTS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("microbatch", ["auto", 4])
def test_a_record_that_is_not_finite_has_no_influence(bad, microbatch):
    records = gaussian_records()
    spoiled = records.at[5, 2].set(bad)
    mask = jnp.arange(37) != 5
    with_bad, without = (
        dpb.privacy.clipped_mean(
            identity, r, clip_norm=1.0, mask=m, microbatch=microbatch, precision="float"
        )
        for r, m in ((spoiled, None), (records, mask))
    )
    np.testing.assert_array_equal(with_bad.raw, without.raw)


@pytest.mark.parametrize("precision", ["float", "grid"])
@pytest.mark.parametrize("clip_norm", [1e-20, 1e20, *slow(1.0)])
def test_a_finite_record_counts_in_its_direction_however_long_it_is(
    precision, clip_norm
):
    long = [1e18, 1.8e19, 1.9e19, 1e30, 3e38]
    means = []
    for length in long:
        record = jnp.asarray([[length, 0.0, -length]], jnp.float32)
        bounded = dpb.privacy.clipped_mean(
            identity, record, clip_norm=clip_norm, precision=precision
        )
        raw = bounded.raw
        means.append(np.asarray(raw.values() if precision == "grid" else raw))
    expected = np.array([clip_norm, 0, -clip_norm]) / np.sqrt(2)
    for length, found in zip(long, means, strict=True):
        if length > 10 * clip_norm:
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_gradient_that_is_not_a_number_has_no_influence():
    gradient = jax.grad(lambda w, z: jnp.sqrt(z) * w)  # NaN for a negative record
    records = jnp.asarray([1.0, -1.0, 4.0])
    value = dpb.privacy.clipped_mean(
        lambda z: gradient(1.0, z), records, clip_norm=9.0, precision="float"
    )
    assert float(value.raw) == pytest.approx(1.0)


@pytest.mark.parametrize("microbatch", ["auto", *slow(1, 3)])
def test_no_records_and_no_unmasked_records_give_zero(microbatch):
    query = functools.partial(
        dpb.privacy.clipped_mean,
        identity,
        clip_norm=1.0,
        microbatch=microbatch,
        precision="float",
    )
    empty = query(jnp.zeros((0, 3)), denominator=10.0)
    masked = query(jnp.ones((5, 3)), mask=jnp.zeros(5, bool))
    for bounded in (empty, masked):
        np.testing.assert_array_equal(bounded.raw, np.zeros(3))
        assert bounded.contribution > 0


def test_masked_rows_may_hold_anything_and_the_denominator_stays():
    records = gaussian_records().at[20:].set(jnp.nan)
    mask = jnp.arange(37) < 20
    bounded = dpb.privacy.clipped_mean(
        identity, records, clip_norm=1.0, mask=mask, precision="float"
    )
    expected = reference(records[:20], 1.0) / 37
    np.testing.assert_allclose(bounded.raw, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("microbatch", [7, 37, *slow(1, 3, 36, 100)])
def test_microbatches_change_nothing_but_rounding(microbatch):
    records = {"x": gaussian_records(), "k": jnp.arange(37)}
    mask = jnp.arange(37) % 5 != 0

    def fun(record):
        return record["x"] * record["k"].astype(jnp.float32)

    @functools.partial(jax.jit, static_argnames="size")
    def mean(records, mask, size):
        return dpb.privacy.clipped_mean(
            fun, records, clip_norm=4.0, mask=mask, microbatch=size, precision="float"
        ).raw

    whole, parts = (mean(records, mask, size) for size in ("auto", microbatch))
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)


def peak_bytes(query, n, d=64):
    records = jax.ShapeDtypeStruct((n, d), jnp.float32)
    return jax.jit(query).lower(records).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_number_of_records(monkeypatch):
    # One of an accelerator's size would hold most of the records.
    monkeypatch.setattr(microbatches, "_MICROBATCH_BYTES", {})
    monkeypatch.setattr(microbatches, "_MICROBATCH_BYTES_ACCELERATOR", 2**24)

    def outer(record):
        return record[:, None] * record[None, :]

    def chunked(records):
        return dpb.privacy.clipped_mean(
            outer, records, clip_norm=1.0, precision="float"
        ).raw

    def at_once(records):
        n = records.shape[0]
        return dpb.privacy.clipped_mean(
            outer, records, clip_norm=1.0, microbatch=n, precision="float"
        ).raw

    sizes = (20_000, 80_000)
    small, large = (peak_bytes(chunked, n) for n in sizes)
    assert large <= small + 4 * sizes[1]
    # The control: one batch of everything grows with n.
    small, large = (peak_bytes(at_once, n) for n in sizes)
    assert large > 2 * small


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float16)])
def test_half_precision_records_are_summed_in_float32(dtype):
    n = 4000
    records = jnp.full((n, 1), 0.3, dtype)
    options = {"clip_norm": 1.0, "denominator": 1.0, "precision": "float"}
    mean = functools.partial(dpb.privacy.clipped_mean, identity, **options)
    total = jax.jit(lambda records: mean(records).raw)(records)
    assert total.dtype == jnp.float32
    exact = n * float(records[0, 0])
    assert float(total[0]) == pytest.approx(exact, rel=1e-5)
    # The control: a running sum in the records' own precision is far off.
    running, _ = jax.lax.scan(lambda s, v: (s + v, None), records[0] * 0, records)
    assert abs(float(running[0]) - exact) > 0.05 * exact


@pytest.mark.parametrize("d", [1, 1000, *slow(1_000_000)])
@pytest.mark.parametrize("clip_norm", [1e-19, 1e-3, 0.7])
def test_clipped_norm_never_exceeds_the_clip_norm(d, clip_norm):
    rng = np.random.default_rng(d)
    for scale in (1e-20, 1e-3, 1.0, 1e6):
        records = (scale * rng.normal(size=(1, d))).astype(np.float32)
        value = dpb.privacy.clipped_mean(
            identity, jnp.asarray(records), clip_norm=clip_norm, precision="float"
        )
        assert np.linalg.norm(np.asarray(value.raw, np.float64)) <= clip_norm


@pytest.mark.slow
def test_mixed_precisions_are_clipped_to_the_norm_of_the_coarser():
    with jax.enable_x64(True):
        records = jnp.asarray(np.random.default_rng(0).normal(size=(1, 500)))
        both = dpb.privacy.clipped_mean(
            lambda z: {"a": z, "b": z.astype(jnp.float32)},
            records,
            clip_norm=1.0,
            precision="float",
        ).raw
    assert (both["a"].dtype, both["b"].dtype) == (jnp.float64, jnp.float32)
    flat = np.concatenate([np.asarray(v, np.float64) for v in both.values()])
    assert 0.999 < np.linalg.norm(flat) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be positive and finite, got 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be positive and finite, got nan"),
        ({"clip_norm": math.inf}, "clip_norm must be positive and finite, got inf"),
        (
            {"clip_norm": None},
            "clip_norm must be a number, positive and finite, got None",
        ),
        ({"denominator": 0.0}, "denominator must be positive"),
        (
            {"microbatch": 0},
            "microbatch, unless .auto., must be an integer",
        ),
        (
            {"microbatch": 2.5},
            "microbatch, unless .auto., must be an integer",
        ),
        ({"mask": jnp.ones(4, bool)}, r"mask must be \(5,\) booleans"),
        ({"mask": jnp.ones(5)}, "mask must be .* booleans"),
        ({"records": {"a": jnp.ones(3), "b": jnp.ones(4)}}, "share their leading axis"),
        ({"records": jnp.ones(())}, "share their leading axis"),
    ],
)
def test_misuse_is_refused_with_a_reason(arguments, message):
    fields = {"records": jnp.ones((5, 2)), "clip_norm": 1.0} | arguments
    with pytest.raises(ValueError, match=message):
        dpb.privacy.clipped_mean(identity, **fields)


def test_no_value_is_refused():
    with pytest.raises(TypeError, match="float arrays, got none"):
        dpb.privacy.clipped_mean(
            lambda _: None, jnp.ones(3), clip_norm=1.0, precision="float"
        )


def test_integer_values_are_refused():
    with pytest.raises(TypeError, match="float arrays, got int32"):
        dpb.privacy.clipped_mean(
            identity, jnp.arange(3), clip_norm=1.0, precision="float"
        )


def test_numbers_are_traced_not_compiled_in():
    traces = []

    @jax.jit
    def query(clip_norm):
        traces.append(None)
        return dpb.privacy.clipped_mean(
            identity, jnp.full((4, 1), 9.0), clip_norm=clip_norm, precision="float"
        )

    for clip_norm in (1.0, 2.0):
        assert float(query(clip_norm).raw[0]) == pytest.approx(clip_norm, rel=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_automatic_microbatches_are_powers_of_two_that_shrink_with_the_values(backend):
    shapes = [jax.ShapeDtypeStruct((10**k,), jnp.float32) for k in range(10)]
    rows = [microbatch_rows(shape, shape, backend) for shape in shapes]
    assert all(math.log2(r).is_integer() for r in rows)
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] == 1


@given(st.integers(1, 10**6), st.integers(0, 17))
def test_chunks_cover_the_records_and_hold_no_more_than_was_asked(n, power):
    rows = 2**power
    size = _chunk_rows(n, rows)
    chunks = -(-n // size)
    assert size <= min(rows, n)
    assert size == n or size % min(rows, 64) == 0
    assert (chunks - 1) * size < n <= chunks * size


MODULES = [m.name for m in pkgutil.walk_packages(dpb.__path__, "dpbilevel.")]


# Those whose examples compile most.
LONG = {"dpbilevel.sklearn.logistic", "dpbilevel.runs.run", "dpbilevel.oracles.lower"}
LONG |= {"dpbilevel.applications.adapters", "dpbilevel.oracles.linear"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(m, marks=pytest.mark.slow if m in LONG else ())
        for m in MODULES
        if "__main__" not in m
    ],
)
def test_examples_in_docstrings_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted > 0 or name != "dpbilevel.privacy.per_example.clipping"


def test_more_records_than_sums_have_room_for_are_refused():
    value = jax.ShapeDtypeStruct((2,), jnp.float32)
    one = jnp.float32(1)
    summation.GridSum(value, one, one, 2**34, 64)
    with pytest.raises(ValueError, match="at most 17179869184 records"):
        summation.GridSum(value, one, one, 2**34 + 1, 64)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU alone gains by it")
@pytest.mark.parametrize("precision", ["grid", *slow("float")])
def test_records_beyond_the_caches_are_read_in_parts_with_the_same_sum(
    precision, monkeypatch
):
    records = jax.random.normal(jax.random.key(2), (1000, 64))
    w = jax.random.normal(jax.random.key(3), (64,))

    def mean():
        bounded = dpb.privacy.clipped_mean(
            lambda z: jax.grad(lambda w: jnp.logaddexp(0, z @ w))(w),
            records,
            clip_norm=2.0,
            precision=precision,
        )
        return unsealed(bounded)

    whole = jax.jit(mean)()
    monkeypatch.setattr(microbatches, "cached_bytes", lambda: 2**16)
    monkeypatch.setattr(microbatches, "_PART_BYTES", 2**15)
    parts = jax.jit(lambda: mean())  # not the program above
    assert "while" in str(parts.lower().as_text())
    # A record's own gradient may be rounded differently by another program.
    np.testing.assert_allclose(parts(), whole, rtol=0, atol=1e-7)


def test_parts_follow_the_cache_of_one_machine_and_of_no_machine_of_several(
    monkeypatch,
):
    alone = microbatches.cached_bytes.__wrapped__()
    assert alone > 0
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert microbatches.cached_bytes.__wrapped__() == 16 * 2**20
