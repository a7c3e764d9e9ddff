"""Exact sums, noise on the same grid, and the attack that floating point permits."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import dpbilevel as dpb
from dpbilevel.privacy.exact import floats
from dpbilevel.privacy.exact.grid import Grid
from dpbilevel.privacy.exact.int61 import Limbs
from dpbilevel.privacy.exact.normal import _from_words, normal_integers
from dpbilevel.privacy.mechanisms import ROUNDING_MARGIN
from tests.cases import slow

MARGIN = 1 + ROUNDING_MARGIN
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def rows(n, d, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.normal(size=(n, d)), jnp.float32)


@functools.partial(jax.jit, static_argnames=("clip_norm", "denominator", "options"))
def compiled(records, mask, clip_norm, denominator, options):
    """As one program, which compiles sooner than its operations."""
    numbers = {"clip_norm": clip_norm, "denominator": denominator}
    return dpb.privacy.clipped_mean(
        lambda z: z, records, mask=mask, **numbers, **dict(options)
    )


def mean(
    records, precision="grid", clip_norm=1.0, mask=None, denominator=None, **options
):
    options |= {"precision": precision}
    if isinstance(clip_norm, float) and isinstance(denominator, float | None):
        given = tuple(options.items())
        return compiled(records, mask, clip_norm, denominator, given)
    options |= {"clip_norm": clip_norm, "mask": mask, "denominator": denominator}
    return dpb.privacy.clipped_mean(lambda z: z, records, **options)


def real(grid):
    """The value of a scalar or vector grid in float64."""
    return np.asarray(grid.counts, np.float64) * 2.0 ** float(grid.exponent)


def grid_of(counts, exponent=0):
    high, low = [v >> 30 for v in counts], [v & (2**30 - 1) for v in counts]
    return Grid(
        Limbs(jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32)),
        jnp.int32(exponent),
        jnp.float32(2.0 ** (exponent + 23)),
        (jnp.dtype(jnp.float32),),
    )


@pytest.mark.parametrize("most", [2**21 + 3, 2**22])
def test_the_nearest_integer_is_that_of_numpy_and_cut(most):
    edges = [0.5, 1.5, 2.5, most - 0.5, most + 1, 2e7, 1e38, math.inf]
    sample = np.random.default_rng(0).normal(size=(3, 1000)) * [[1], [1e3], [1e6]]
    values = np.append(sample, np.append(edges, np.negative(edges))).astype(np.float32)
    found = jax.jit(floats.nearest_integer)(values, jnp.int32(most))
    assert np.array_equal(found, np.clip(np.rint(values), -most, most))
    beyond = floats.nearest_integer(jnp.float32([math.nan, -math.nan]), jnp.int32(most))
    assert np.array_equal(beyond, [-most, -most])


@pytest.mark.parametrize("n", [0, 63, *slow(1, 1000)])
@pytest.mark.parametrize("denominator", [None, 700.0])
def test_the_grid_mean_is_the_clipped_mean_up_to_one_step_a_record(n, denominator):
    records = rows(n, 5, scale=0.6)
    bounded = mean(records, denominator=denominator)
    norms = np.linalg.norm(np.asarray(records, np.float64), axis=1, keepdims=True)
    expected = np.sum(records * np.minimum(1, 1 / np.maximum(norms, 1e-9)), axis=0)
    expected = expected / (denominator or max(n, 1))
    assert bounded.precision == "grid"
    step = 2.0 ** float(bounded.raw.exponent)
    assert 2.0**-24 < step / bounded.contribution <= 2.0**-23
    assert np.abs(real(bounded.raw) - expected).max() <= max(n, 1) * 4 * step


@pytest.mark.parametrize("microbatch", ["auto", 10, *slow(1, 64, 100)])
def test_the_sum_is_the_same_for_every_order(microbatch):
    records = rows(1000, 7)
    orders = [np.random.default_rng(seed).permutation(1000) for seed in range(4)]
    in_order = (records, *(records[order] for order in orders))
    same = [np.asarray(mean(r, microbatch=microbatch).raw.counts) for r in in_order]
    assert all((v == same[0]).all() for v in same)
    # The control: floating-point sums depend on the order.
    other = [np.cumsum(np.asarray(r, np.float32), axis=0)[-1] for r in in_order]
    assert not all((v == other[0]).all() for v in other)


@functools.partial(jax.jit, static_argnums=1)
def rounded(records, clip_norm):
    return mean(records, clip_norm=clip_norm)


@given(st.lists(finite, min_size=3, max_size=3), st.sampled_from([1e-20, 0.7, 1e9]))
def test_a_rounded_record_stays_within_the_clip_norm(row, clip_norm):
    grid = rounded(jnp.asarray([row], jnp.float32), clip_norm).raw
    norm = math.sqrt(sum(int(k) ** 2 for k in np.asarray(grid.counts)))
    assert norm * 2.0 ** float(grid.exponent) <= clip_norm


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_hostile_record_counts_for_nothing_on_the_grid(bad):
    records = rows(10, 3)
    hostile = records.at[4, 1].set(bad)
    without = mean(records, mask=jnp.arange(10) != 4).raw.counts
    np.testing.assert_array_equal(mean(hostile).raw.counts, without)


@pytest.mark.slow
def test_float64_records_are_released_in_float64():
    with jax.enable_x64(True):
        records = jnp.asarray(np.random.default_rng(2).normal(size=(50, 3)))
        bounded = mean(records, clip_norm=10.0)
        np.testing.assert_allclose(
            real(bounded.raw), np.mean(records, axis=0), rtol=0, atol=10 * 2.0**-23
        )
        gaussian = dpb.privacy.Gaussian(1.0, precision="grid")
        released = jax.jit(gaussian.release)(bounded, key=jax.random.key(0))
    assert released.dtype == jnp.float64


@pytest.mark.parametrize("exponents", [(0, 0), (-3, 5), (5, -3), (0, 30)])
def test_adding_grids_is_exact(exponents):
    left, right = ([3, -7, 2**30], [5, 11, -(2**20)])
    total = grid_of(left, exponents[0]) + grid_of(right, exponents[1])
    expected = [
        a * 2.0 ** exponents[0] + b * 2.0 ** exponents[1]
        for a, b in zip(left, right, strict=True)
    ]
    np.testing.assert_array_equal(real(total), expected)


@pytest.mark.parametrize("places", [31, *slow(60, 200)])
def test_grids_too_far_apart_are_released_as_noise_alone(places):
    @functools.partial(jax.jit, static_argnums=1)
    def run(count, places):
        total = grid_of([count], places - 100) + grid_of([5], -100)
        return total.with_noise(jnp.float32(2.0**-70), True, key=jax.random.key(0))

    left, right = (run(count, places) for count in (3, 4))
    np.testing.assert_array_equal(left, right)
    # The control: closer together, the sum is released.
    assert (run(3, 30) != run(4, 30)).all()


def test_the_noise_grid_resolves_the_role_with_the_smallest_share():
    large, small = mean(rows(20, 3)), mean(rows(20, 3, seed=1), denominator=1e7)
    total = large + small
    assert float(total.raw.contribution) == pytest.approx(1e-7)
    moved = np.asarray(released(total, 0.0), np.float64) - real(total.raw)
    # A step fit for the larger share alone would hide or double the smaller one.
    assert np.abs(moved).max() <= 1e-7 * 2.0**-13 + 2.0**-25


@pytest.mark.parametrize("first", [2**40, 2**60 - 2, -(2**60)])
def test_sums_beyond_the_range_are_cut_and_never_wrap_around(first):
    # Neighbours: one count more at the role with the large share.
    small = grid_of([5], 0)
    sums = (grid_of([first + more], 38) + small for more in (0, 1))
    left, right = (int(np.asarray(v.counts)[0]) for v in sums)
    gap = right - left
    assert 0 <= gap <= 2**38


def test_shares_too_far_apart_for_the_grid_are_refused_when_planned():
    def ledger(penalty, precision):
        problem = dpb.source_weighting(dpb.logistic_loss, 2, ridge=0.1)
        inner = dpb.NoisyGD(2, 1.0, step_size=1.0)
        solver = dpb.PenaltyBilevel(2, penalty, inner, step_size=1)
        return dpb.calibrate(
            problem,
            solver,
            dpb.PrivacyBudget(1.0, 1e-5),
            sizes=dpb.Sizes(1000, 1000, "disjoint"),
            precision=precision,
        )

    ledger(1e7, "grid")
    ledger(1e9, "float")
    with pytest.raises(ValueError, match="no grid holds both"):
        ledger(1e9, "grid")


def test_shares_too_far_apart_are_refused_for_few_records_too():
    def release(ratio):
        queries = (
            dpb.privacy.Query(role, 4, clip_norm)
            for role, clip_norm in (("upper", 1.0), ("lower", ratio))
        )
        gaussian = dpb.privacy.Gaussian(1.0, precision="grid")
        return dpb.privacy.Release("sum", 1, tuple(queries), gaussian)

    release(2.0**29)
    with pytest.raises(ValueError, match="no grid holds both"):
        release(2.0**30)


def test_values_of_different_precision_do_not_mix():
    records = rows(4, 2)
    both = [mean(records, precision) for precision in ("grid", "float")]
    with pytest.raises(ValueError, match="values of different precision"):
        both[0] + both[1]
    for bounded, precision in zip(both, ("float", "grid"), strict=True):
        mechanism = dpb.privacy.Gaussian(1.0, precision=precision)
        with pytest.raises(ValueError, match="Give clipped_mean the same"):
            mechanism.release(bounded, key=jax.random.key(0))


def test_an_unknown_precision_is_refused():
    for make in (
        lambda: mean(rows(2, 2), "exact"),
        lambda: dpb.privacy.Gaussian(1.0, precision="exact"),
    ):
        with pytest.raises(ValueError, match="precision must be one of"):
            make()


@jax.jit
def released(bounded, multiplier=1.0, seed=0):
    mechanism = dpb.privacy.Gaussian(multiplier, precision="grid")
    return mechanism.release(bounded, key=jax.random.key(seed))


def steps_of(bounded):
    """The value in steps of its release, the step, and how often noise is doubled."""
    counts = np.asarray(bounded.raw.counts, object)
    exponent = -14 - math.ceil(math.log2(counts.size) / 2)
    exponent += math.frexp(bounded.raw.contribution)[1] - 1
    std = float(np.float32(MARGIN) * np.float32(bounded.sensitivity()))
    mantissa, largest = math.frexp(std)
    numerator = 2**30 // math.ceil(mantissa * 2**16)
    step = 2.0 ** (exponent + 15) / numerator
    doublings = largest - 1 - 10 - exponent
    assert 1 <= step * 2 ** (10 + doublings) / std <= 1 + 1e-4
    shift = exponent - int(bounded.raw.exponent)
    halves = (counts + (1 << shift >> 1)) >> shift if shift > 0 else counts << -shift
    return (halves * numerator + 2**14) >> 15, step, doublings


@pytest.mark.parametrize("d", [1, *slow(100)])
def test_the_noise_is_the_normal_integer_of_the_same_key(d):
    bounded = mean(rows(30, d))
    base, step, doublings = steps_of(bounded)
    draw = jax.jit(functools.partial(normal_integers, [(d,)]))
    (noise,) = draw(jnp.int32(doublings), key=jax.random.key(0))
    noise = np.asarray(noise, object)
    expected = ((base + noise) * step).astype(float)
    np.testing.assert_allclose(released(bounded), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("multiplier", [1e-6, *slow(0.3, 1e7)])
def test_the_step_follows_from_the_noise_whatever_its_size(multiplier):
    bounded = mean(rows(30, 10_000))
    noise = np.asarray(released(bounded, multiplier), np.float64) - real(bounded.raw)
    noise = noise / (bounded.sensitivity() * MARGIN * multiplier)
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-4
    assert scipy.stats.kstest(noise * 1.1, "norm").pvalue < 1e-4


def wide_types(fun, *arguments):
    """The element types of 64 bits in a lowered program."""
    types = re.findall(r"[<x]([a-z]+64)>", jax.jit(fun).lower(*arguments).as_text())
    return set(types)


def test_every_leaf_has_noise_of_its_own():
    sizes = {"a": 3000, "b": 3000, "c": 1}

    @jax.jit
    def released(key):
        bounded = dpb.privacy.clipped_mean(
            lambda _: {name: jnp.zeros(size) for name, size in sizes.items()},
            jnp.zeros(2),
            clip_norm=1.0,
            precision="grid",
        )
        return dpb.privacy.Gaussian(1.0, precision="grid").release(bounded, key=key)

    noise = released(jax.random.key(0))
    assert {name: v.size for name, v in noise.items()} == sizes
    assert abs(np.corrcoef(noise["a"], noise["b"])[0, 1]) < 5 / math.sqrt(3000)
    # The control: noise that is the same in both.
    assert np.corrcoef(noise["a"], noise["a"])[0, 1] > 0.99
    assert np.unique(np.concatenate([*noise.values()])).size > 5900


def test_a_release_of_single_precision_holds_no_type_of_64_bits():
    def release(records, extra, key):
        both = mean(records) + mean(extra, denominator=7.0)
        gaussian = dpb.privacy.Gaussian(1.0, precision="grid")
        return gaussian.release(both, key=key)

    arguments = rows(200, 3), rows(10, 3, seed=1), jax.random.key(0)
    # JAX's own generators count in them, on every device.
    generator = wide_types(lambda key: jax.random.bits(key, (7, 3)), jax.random.key(0))
    assert wide_types(release, *arguments) == generator == {"ui64"}
    # The control: such types are found where they are.
    with jax.enable_x64(True):
        assert "f64" in wide_types(lambda v: v.astype(jnp.float64), jnp.ones(3, "f4"))


@pytest.mark.parametrize("d", [1000, *slow(1)])
def test_rounding_to_the_noise_grid_moves_a_value_by_less_than_the_margin(d):
    bounded = mean(rows(30, d))
    moved = np.linalg.norm(np.asarray(released(bounded, 0.0)) - real(bounded.raw))
    assert 0 < moved <= 2.0**-13 * bounded.contribution
    assert 2.0**-12 < ROUNDING_MARGIN


@pytest.mark.slow
def test_grid_noise_has_the_claimed_scale_and_is_normal():
    bounded = mean(rows(30, 20_000))
    noise = (released(bounded, 3.0) - real(bounded.raw)) / bounded.sensitivity() / 3
    assert scipy.stats.kstest(noise / MARGIN, "norm").pvalue > 1e-4
    # The test must be able to fail: a 10% smaller scale is rejected.
    assert scipy.stats.kstest(noise / MARGIN / 0.9, "norm").pvalue < 1e-4


@pytest.mark.parametrize("multiplier", [jnp.nan, jnp.inf, 1e20])
def test_noise_that_leaves_the_grid_is_released_alone(multiplier):
    @jax.jit
    def run(records, multiplier):
        return released(mean(records), multiplier)

    left, right = (run(v, multiplier) for v in (rows(5, 3), rows(5, 3, seed=9)))
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("std", [1e-40, 2.0**-149])
def test_noise_below_the_normal_numbers_is_released_alone(std):
    release = jax.jit(lambda grid, std, key: grid.with_noise(std, True, key=key))
    left, right = (
        release(grid_of([count], -140), jnp.float32(std), jax.random.key(0))
        for count in (0, 2**40)
    )
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("multiplier", [1e-14, 1e-20, 1e-30])
def test_noise_too_small_for_the_finest_grid_is_as_large_as_that_allows(multiplier):
    zeros = mean(jnp.zeros((32, 10_000)))
    noise = np.asarray(released(zeros, multiplier), np.float64)
    assert scipy.stats.kstest(noise * 32 * 2.0**43, "norm").pvalue > 1e-4
    # The control: what was asked for.
    asked = zeros.sensitivity() * MARGIN * multiplier
    assert scipy.stats.kstest(noise / asked, "norm").pvalue < 1e-4


def test_a_mean_is_released_beside_one_whose_share_is_far_larger():
    small, large = (mean(rows(20, 3), denominator=v) for v in (1e7, 20.0))
    other = mean(rows(20, 3, seed=1), denominator=20.0)
    moved = released(large + small, 30.0) - released(other + small, 30.0)
    expected = real(large.raw) - real(other.raw)
    assert 0.01 < np.abs(expected).max()
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("clip_norm", [1e-27, 1e31, jnp.nan, jnp.inf, -1.0])
def test_traced_clip_norms_out_of_range_release_noise_alone(clip_norm):
    @jax.jit
    def run(records, clip_norm):
        return released(mean(records, clip_norm=clip_norm))

    left, right = (run(v, clip_norm) for v in (rows(5, 3), rows(5, 3, seed=9)))
    np.testing.assert_array_equal(left, right)


LOGISTIC = dpb.FiniteSum(dpb.logistic_loss, lambda w: 0.05 * jnp.sum(w * w))


def logistic_records(n=40, d=3):
    features = rows(n, d)
    return {"features": features, "label": jnp.sign(features[:, 0])}


def run(step_size, precision, key, scale=1.0):
    solver = dpb.NoisyGD(4, 1.0, step_size=step_size).with_noise(scale)
    solver = solver.with_precision(precision).with_sizes(40)
    return dpb.solve(LOGISTIC, solver, logistic_records(), jnp.zeros(3), key=key).value


@pytest.mark.slow
@pytest.mark.reuses_keys
def test_grid_solvers_run_under_jit_vmap_and_grad():
    keys = jax.random.split(jax.random.key(1), 3)
    grid = functools.partial(run, precision="grid")
    # Rounding may move a mean by a step of the grid: 2**-12 of 1 / 40 / sqrt(3).
    with jax.default_matmul_precision("highest"):
        one = jnp.stack([grid(0.5, key=key) for key in keys])
        many = jax.jit(jax.vmap(lambda key: grid(0.5, key=key)))(keys)
    np.testing.assert_allclose(one, many, rtol=1e-6, atol=1e-5)
    slopes = [
        float(jax.grad(lambda s, p=precision: jnp.sum(run(s, p, keys[0], 1e-3)))(0.5))
        for precision in ("grid", "float")
    ]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.02)
    steps = jnp.asarray([0.4, 0.5])
    assert jax.vmap(lambda s: grid(s, key=keys[0]))(steps).shape == (2, 3)


def test_precision_reaches_every_release_and_the_report():
    problem = dpb.source_weighting(dpb.logistic_loss, 2, ridge=0.1)
    solver = dpb.PenaltyBilevel(2, 3.0, dpb.NoisyGD(2, 1.0, step_size=1.0), step_size=1)
    solver = dpb.Refitted(solver, dpb.NoisyGD(2, 1.0, step_size=1.0), (0.8, 0.2))
    budget = dpb.PrivacyBudget(1.0, 1e-5)
    sizes = dpb.Sizes(30, 30, "disjoint")
    for options, precision in (({}, "grid"), ({"precision": "float"}, "float")):
        plan = dpb.calibrate(problem, solver, budget, sizes=sizes, **options)
        assert {row.precision for row in plan.report.ledger} == {precision}
        research = "precision float, for research" in str(plan.report)
        assert research == (precision == "float")


# One release of one number, and the same with one record replaced.
NEIGHBOURS = [jnp.asarray([first, 0.7, -0.31]) for first in (0.123, -0.4)]
RUNS = 5000


@functools.cache
def outputs(precision):
    """Many releases from the first of two neighbours."""
    mechanism = dpb.privacy.Gaussian(1.0, precision=precision)

    @jax.jit
    @jax.vmap
    def release(key):
        return mechanism.release(mean(NEIGHBOURS[0], precision), key=key)

    return np.asarray(release(jax.random.split(jax.random.key(4), RUNS)))


def possible_in_float(records):
    """The share of the outputs within one standard deviation these can lead to."""
    bounded = dpb.privacy.clipped_mean(
        lambda z: z, records, clip_norm=1.0, precision="float"
    )
    std = MARGIN * bounded.sensitivity()
    values = outputs("float")
    values = values[np.abs(values - bounded.raw) < std]
    # Every float32 this far out is the nearest one of some draws.
    near = ((values - np.float64(bounded.raw)) / std).astype(np.float32)
    places = near.view(np.int32) + np.arange(-64, 65, dtype=np.int32)[:, None]
    z = jnp.asarray(places.view(np.float32))
    reached = jax.jit(lambda z, raw=bounded.raw, std=std: raw + std * z)(z)
    return np.mean((np.asarray(reached) == values).any(axis=0))


def possible_on_grid(records):
    """The same on the grid: for each output, random bits that lead to it."""
    base, step, doublings = steps_of(mean(records))
    drawn = np.round(outputs("grid").astype(np.float64) / step).astype(int) - int(base)
    value_of = jax.jit(lambda words: _from_words(words, jnp.int32(doublings)))

    def reached(cells, added):
        """The value of a column of the table and the bits of its first number."""
        words = np.zeros((8, len(drawn)), np.uint32)
        words[0] = (cells + 2**14) << 17
        words[3] = added << (32 - doublings)
        return np.asarray(value_of(jnp.asarray(words)))

    zero = np.zeros_like(drawn)
    cells, added = np.divmod(drawn - reached(zero, zero), 2**doublings)
    return np.mean(reached(cells, added) == drawn)


def test_float_outputs_give_away_a_record():
    # Compiled, a few products are rounded otherwise, so that it is not quite 1.
    assert possible_in_float(NEIGHBOURS[0]) > 0.95
    assert possible_in_float(NEIGHBOURS[1]) < 0.9


def test_grid_outputs_are_possible_from_both_neighbours():
    for records in NEIGHBOURS:
        assert possible_on_grid(records) == 1.0
