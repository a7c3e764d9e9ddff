import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from dpbilevel.draws.samplers import restricted
from dpbilevel.draws.samplers.restricted import acceptance, reach, restricted_normal
from dpbilevel.draws.samplers.truncated import (
    log_probability,
    mills_ratio,
    tail_exponent,
    truncated_normal,
)
from dpbilevel.sets import Ball, Box, Euclidean, Product, Simplex
from tests.cases import slow

ALPHA = 1e-4
DTYPES = {"float32": jnp.float32, "float64": jnp.float64}


def pvalue(sample, density, lower, upper):
    """Of the Kolmogorov-Smirnov test against a density known up to its mass."""
    grid = np.linspace(lower, upper, 20_001)
    values = density(grid)
    mass = np.concatenate([[0], np.cumsum((values[1:] + values[:-1]) / 2)])
    law = functools.partial(np.interp, xp=grid, fp=mass / mass[-1])
    return scipy.stats.kstest(np.asarray(sample, float), law).pvalue


@functools.partial(jax.jit, static_argnames="count")
def truncated(mean, deviation, lower, upper, key, count=20_000):
    spread = [jnp.full(count, v) for v in (mean, lower, upper)]
    return truncated_normal(spread[0], deviation, *spread[1:], key=key)


# Mean, deviation, lower and upper end.
INTERVALS = {
    "around": (0.3, 1.0, -1.0, 2.0),
    "narrow": (0.0, 1.0, 0.1, 0.1001),
    "far above": (0.0, 1.0, 30.0, 31.0),
    "far below": (0.0, 0.1, -100.0, -10.0),
    "at the end": (0.0, 2.0, -2.0, 0.0),
    "wide": (0.2, 0.01, -1.0, 1.0),
    "half-line": (2.0, 0.5, -math.inf, 0.0),
    "line": (0.0, 1.0, -math.inf, math.inf),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", INTERVALS)
def test_values_on_an_interval_have_the_law_of_the_normal_there(case, dtype):
    mean, deviation, lower, upper = INTERVALS[case]
    with jax.enable_x64(dtype == "float64"):
        numbers = [jnp.asarray(v, DTYPES[dtype]) for v in INTERVALS[case]]
        sample = np.asarray(truncated(*numbers, jax.random.key(3)))
    assert sample.dtype == dtype
    ends = np.asarray([lower, upper], dtype)
    assert ends[0] <= sample.min()
    assert sample.max() <= ends[1]
    standard = ((lower - mean) / deviation, (upper - mean) / deviation)
    law = scipy.stats.truncnorm(*standard, mean, deviation)
    # In the narrow interval there are some 800 float32 values only.
    spread = (upper - lower) * 1e-3 if case == "narrow" else 0
    jitter = np.random.default_rng(0).uniform(-spread, spread, sample.size)
    assert scipy.stats.kstest(sample + jitter, law.cdf).pvalue > ALPHA
    # The tests must be able to fail: a deviation a fifth larger.
    if case in ("around", "wide", "line", "far above"):
        wide = scipy.stats.truncnorm(
            *(v / 1.2 for v in standard), mean, 1.2 * deviation
        )
        assert scipy.stats.kstest(sample, wide.cdf).pvalue < ALPHA


def test_clipping_a_normal_value_is_told_from_restricting_it():
    normal = np.random.default_rng(1).normal(0.3, 1.0, 20_000)
    law = scipy.stats.truncnorm(-1.3, 1.7, 0.3, 1.0)
    assert scipy.stats.kstest(np.clip(normal, -1, 2), law.cdf).pvalue < ALPHA


def test_intervals_a_thousand_deviations_out_give_finite_values_inside():
    sample = np.asarray(truncated(0.0, 1.0, 1000.0, 2000.0, jax.random.key(1)))
    excess = (sample.astype(float) - 1000.0) * 1000.0
    assert 0.9 < excess.mean() < 1.1  # of an exponential value
    point = truncated(0.0, 1.0, 5.0, 5.0, jax.random.key(2))
    np.testing.assert_array_equal(point, 5.0)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float64", 1e-13), *slow(("float32", 4e-6))]
)
def test_tails_are_computed_without_cancellation(dtype, rtol):
    with jax.enable_x64(dtype == "float64"):
        x = np.concatenate([np.linspace(0, 12, 500), np.logspace(1, 4, 50)])
        ratio = np.asarray(jax.jit(mills_ratio)(jnp.asarray(x, DTYPES[dtype])))
        scale = math.sqrt(math.pi / 2)
        expected = scale * scipy.special.erfcx(x.astype(dtype) / math.sqrt(2))
        np.testing.assert_allclose(ratio, expected, rtol=rtol)
        width = jnp.asarray([0.5, 2.0, math.inf], DTYPES[dtype])
        exponent = np.asarray(jax.jit(tail_exponent)(jnp.full_like(width, 3.0), width))
        logs = scipy.special.log_ndtr([-3.0, -3.5, -5.0])
        np.testing.assert_allclose(exponent[:2], logs[0] - logs[1:], rtol=1e2 * rtol)
        assert exponent[2] > 2000
        mass = jax.jit(log_probability)(
            *jnp.asarray([[0.5, 9.0], [1.0, 2.0]], width.dtype)
        )
        exact = scipy.stats.norm.cdf([0.5, -7.0]) - scipy.stats.norm.cdf([-1.5, -11.0])
        np.testing.assert_allclose(mass, np.log(exact), rtol=1e2 * rtol)


@functools.partial(jax.jit, static_argnames=("feasible", "tries", "count"))
def points(feasible, mean, deviation, key, tries=40, count=20_000):
    def draw(k):
        return restricted_normal(feasible, mean, deviation, tries, key=k)

    return jax.vmap(draw)(jax.random.split(key, count))


@functools.partial(jax.jit, static_argnames=("feasible", "count"))
def single_tries(feasible, mean, deviation, key, count=20_000):
    if isinstance(feasible, Ball):
        scaled = jnp.asarray(feasible.radius / deviation, mean.dtype)
        drawn, accepted = restricted._ball(mean / deviation, scaled, count, key)
        return drawn * deviation, accepted
    return restricted._simplex(mean, deviation, float(feasible.scale), count, key)


def axis(size, length):
    return jnp.zeros(size).at[0].set(length)


@pytest.mark.slow
@pytest.mark.parametrize("length", [0.0, 0.9, 1.5])
def test_draws_on_a_ball_have_the_law_of_the_normal_there(length):
    size, deviation, key = 6, 0.8, jax.random.key(5)
    sample = np.asarray(points(Ball(1.0), axis(size, length), deviation, key))
    assert np.linalg.norm(sample, axis=1).max() < 1 + 1e-6

    def along(x):
        rest = scipy.stats.chi2.cdf((1 - x**2) / deviation**2, size - 1)
        return np.exp(-((x - length) ** 2) / (2 * deviation**2)) * rest

    assert pvalue(sample[:, 0], along, -1, 1) > ALPHA
    # Given the first coordinate, the others have no direction.
    assert scipy.stats.ks_2samp(sample[:, 1], -sample[:, 2]).pvalue > ALPHA
    # Controls: projecting instead of restricting, and proposals all accepted.
    noise = np.random.default_rng(0).normal(size=sample.shape)
    free = np.asarray(axis(size, length)) + deviation * noise
    free = free / np.maximum(1, np.linalg.norm(free, axis=1, keepdims=True))
    assert length == 0 or pvalue(free[:, 0], along, -1, 1) < ALPHA
    again = jax.random.key(6)
    proposed, _ = single_tries(Ball(1.0), axis(size, length), deviation, again)
    inside = np.asarray(proposed)[np.linalg.norm(proposed, axis=1) < 1]
    assert pvalue(inside[:, 0], along, -1, 1) < ALPHA


@pytest.mark.slow
def test_a_ball_around_any_center_serves_pytrees():
    center = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray(3.0)}
    sample = jax.jit(
        lambda key: restricted_normal(Ball(0.5, center), center, 10.0, 60, key=key)
    )(jax.random.key(0))
    assert jax.tree.map(jnp.shape, sample) == {"a": (2,), "b": ()}
    assert Ball(0.5, center).contains(sample)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mean",
    [
        pytest.param((0.2, 0.1), marks=pytest.mark.slow),
        (3.0, -3.0),
        pytest.param((-1.0, 2.0), marks=pytest.mark.slow),
    ],
)
def test_draws_on_two_corners_are_normal_values_on_an_interval(mean):
    deviation, scale = 0.5, 2.0
    sample = points(
        Simplex(scale), jnp.asarray(mean), deviation, jax.random.key(1), 200, 5000
    )
    np.testing.assert_allclose(np.sum(sample, 1), scale, rtol=1e-6)
    middle = (mean[0] - mean[1] + scale) / 2

    def law(x):
        return np.exp(-((x - middle) ** 2) / deviation**2)

    def hot(x):
        return np.exp(-((x - middle) ** 2) / deviation**2 / 1.5)

    assert pvalue(np.asarray(sample)[:, 0], law, 0, scale) > ALPHA
    assert pvalue(np.asarray(sample)[:, 0], hot, 0, scale) < ALPHA


@pytest.mark.slow
def test_draws_on_three_corners_have_the_marginal_of_the_normal_there():
    mean, deviation = np.asarray([0.5, -0.2, 0.4]), 0.3
    sample = points(
        Simplex(), jnp.asarray(mean, jnp.float32), deviation, jax.random.key(2), 300
    )
    other = np.linspace(0, 1, 2001)[None, :]

    def first(x, means=mean):
        x = x[:, None]
        rest = 1 - x - other
        square = sum((v - a) ** 2 for v, a in zip((x, other, rest), means, strict=True))
        values = np.where(rest >= 0, np.exp(-square / (2 * deviation**2)), 0)
        return values.sum(1)

    coarse = np.linspace(0, 1, 401)
    law = functools.partial(np.interp, xp=coarse, fp=first(coarse))
    control = functools.partial(np.interp, xp=coarse, fp=first(coarse, mean * 1.2))
    assert pvalue(np.asarray(sample)[:, 0], law, 0, 1) > ALPHA
    assert pvalue(np.asarray(sample)[:, 0], control, 0, 1) < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "deviation"),
    [
        pytest.param(2, 1.0, marks=pytest.mark.slow),
        pytest.param(30, 0.03, marks=pytest.mark.slow),
        (30, 0.3),
    ],
)
def test_a_try_on_a_ball_is_accepted_as_often_as_is_claimed(size, deviation):
    far = reach(Ball(1.0), size, deviation, 1e-9)
    bound = acceptance(Ball(1.0), size, deviation, far)
    rates = []
    for length in (0.0, 0.5, 0.9, 1.0, 1 + far / 2, 1 + far):
        mean, key = axis(size, length), jax.random.key(1)
        _, accepted = single_tries(Ball(1.0), mean, deviation, key, 3000)
        rates.append(float(jnp.mean(accepted)))
    assert bound < min(rates) + 0.02
    assert bound > 0.5 * min(rates)  # and not idly so


@pytest.mark.parametrize(("size", "deviation"), [(5, 2.0), *slow((40, 0.02))])
def test_a_try_on_a_simplex_is_accepted_as_often_as_is_claimed(size, deviation):
    bound = acceptance(Simplex(), size, deviation, 0.0)
    generator = np.random.default_rng(0)
    means = [np.ones(size), -5 * deviation * generator.normal(size=size)]
    for mean in [*means, np.arange(size) * deviation]:
        at = jnp.asarray(mean, jnp.float32)
        _, accepted = single_tries(Simplex(), at, deviation, jax.random.key(1), 3000)
        assert float(jnp.mean(accepted)) > bound


def test_noise_leaves_a_ball_by_more_than_the_reach_as_rarely_as_is_claimed():
    far, generator = reach(Ball(1.0), 20, 0.1, 0.05), np.random.default_rng(0)
    noise = 0.1 * generator.normal(size=(20_000, 20))
    noise[:, 0] += 1
    beyond = np.mean(np.linalg.norm(noise, axis=1) > 1 + far)
    assert 0 < beyond < 0.05


@pytest.mark.slow
def test_rejected_tries_leave_the_projection_of_the_mean():
    mean = jnp.asarray([0.9, 0.0, 0.0, 0.1, 0.0])
    sample = points(Simplex(), mean, 3.0, jax.random.key(0), 1, 200)
    fallen = np.all(np.isclose(sample, mean, atol=1e-6), axis=1).mean()
    assert 0.5 < fallen < 1


def test_products_of_boxes_are_boxes():
    sets = Product((Box(0.0, 1.0), Box(-2.0, -1.0)))
    mean = (jnp.zeros(3), jnp.zeros(2))
    draw = jax.jit(lambda key: restricted_normal(sets, mean, 1.0, 1, key=key))
    sample = draw(jax.random.key(0))
    assert sets.contains(sample, 0.0)


@pytest.mark.parametrize("feasible", [Euclidean(), Product((Ball(1.0), Box(0.0, 1.0)))])
def test_other_sets_are_refused(feasible):
    with pytest.raises(ValueError, match="the set must be a Box"):
        restricted_normal(feasible, jnp.zeros(2), 1.0, 1, key=jax.random.key(0))


def test_the_scale_of_a_simplex_may_be_traced():
    draw = jax.jit(functools.partial(restricted_normal, tries=8))
    point = draw(Simplex(2.0), jnp.full(3, 0.5), 0.1, key=jax.random.key(0))
    assert float(point.sum()) == pytest.approx(2.0, abs=1e-5)
