import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpbilevel.draws import (
    AlternatingSampler,
    ConvexEnvelope,
    StochasticRejection,
)
from dpbilevel.draws.samplers import rejection
from dpbilevel.draws.samplers.base import (
    AbstractPotential,
    AbstractSumPotential,
    Regularity,
)
from dpbilevel.draws.samplers.proximal import ProximalPlan, ProximalTarget
from dpbilevel.sets import Ball, Box, Euclidean, Simplex

ALPHA = 1e-4


class Kink(AbstractPotential):
    """k (|x - a| + mu x^2 / 2) in one dimension."""

    scale: float = 1.0
    corner: float = 0.3
    mu: float = 2.0

    def __call__(self, x):
        value = jnp.abs(x - self.corner) + 0.5 * self.mu * x**2
        return self.scale * jnp.sum(value)


class Hinges(AbstractSumPotential):
    """The mean of k max(0, 1 - b_i x), and a quadratic."""

    slopes: jax.Array
    scale: float
    quadratic: float
    num_terms: int = eqx.field(static=True)

    def term(self, index, x):
        return self.scale * jnp.maximum(0.0, 1 - jnp.sum(self.slopes[index] * x))

    def __call__(self, x):
        terms = jax.vmap(self.term, (0, None))(jnp.arange(self.num_terms), x)
        return jnp.mean(terms) + 0.5 * self.quadratic * jnp.sum(x**2)


class Quadratic(AbstractPotential):
    precision: jax.Array
    middle: jax.Array

    def __call__(self, x):
        return 0.5 * jnp.sum(self.precision * (x - self.middle) ** 2)


def hinges(scale, quadratic):
    slopes = -jnp.asarray([0.9, 1.0, 0.8, 1.0, 1.0, 1.0])
    return Hinges(slopes, scale, quadratic, 6)


def pvalue(sample, potential, feasible, scale=1.0, extra=None):
    lower, upper = feasible.lower, feasible.upper
    grid = np.linspace(lower, upper, 4001)
    values = np.asarray(jax.vmap(potential)(jnp.asarray(grid, jnp.float32)))
    exponent = scale * values.astype(float) + (0 if extra is None else extra(grid))
    density = np.exp(exponent.min() - exponent)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    law = functools.partial(np.interp, xp=grid, fp=mass / mass[-1])
    return scipy.stats.kstest(np.asarray(sample, float).ravel(), law).pvalue


@eqx.filter_jit
def attempts(oracle, potential, feasible, y, step_size, keys):
    target = ProximalTarget(potential, feasible, step_size)
    common = oracle.prepare(target, y)

    def attempt(key):
        return oracle.attempt(target, y, common, key=key)

    return jax.vmap(attempt)(keys)


def accepted_tries(oracle, potential, feasible, y, step_size, seed, count):
    keys = jax.random.split(jax.random.key(seed), count)
    x, accepted, queries = attempts(oracle, potential, feasible, y, step_size, keys)
    return np.asarray(x)[np.asarray(accepted)], accepted, queries


# Terms that move by at most 1/2 on the interval, where nothing is clipped.
SHORT = Box(-0.2, 0.3)
FREE = StochasticRejection(stages=14, draw_tries=1)


@pytest.mark.slow
def test_a_stochastic_try_has_the_law_of_the_sum():
    potential, eta, y = hinges(1.0, 3.0), 0.5, jnp.asarray(0.4)
    sample, accepted, queries = accepted_tries(
        FREE, potential, SHORT, y, eta, seed=1, count=400_000
    )

    def near(x):
        return (x - 0.4) ** 2 / (2 * eta)

    assert pvalue(sample, potential, SHORT, extra=near) > ALPHA
    # Controls: another temperature of the terms, one without the quadratic.
    hot = hinges(1.1, 3.0)
    assert pvalue(sample, hot, SHORT, extra=near) < ALPHA
    assert pvalue(sample, hinges(1.0, 0.0), SHORT, extra=near) < ALPHA
    assert np.mean(accepted) > 0.499
    assert np.mean(queries) == pytest.approx(2 * (math.e - 1), rel=0.01)


@pytest.mark.slow
def test_a_try_that_reaches_every_stage_is_told_from_a_stochastic_one(monkeypatch):
    def always(stages, dtype, key):
        return jnp.ones(stages, bool)

    monkeypatch.setattr(rejection, "_reached", always)
    potential, y = Hinges(jnp.asarray([-1.0]), 1.0, 0.0, 1), jnp.asarray(0.1)
    sample, _, _ = accepted_tries(
        FREE, potential, SHORT, y, 100.0, seed=2, count=1_000_000
    )
    assert pvalue(sample, potential, SHORT) < ALPHA


class Unlifted(AbstractPotential):
    """A potential and a line, which its gradient leaves out."""

    potential: AbstractPotential
    slope: jax.Array
    middle: jax.Array

    def __call__(self, x):
        return self.potential(x) + self.slope * (x - self.middle)

    def value_and_gradient(self, x):
        return self.potential.value_and_gradient(x)


def envelope(potential, feasible, **known):
    regularity = Regularity(1, **known)
    sampler = AlternatingSampler(ConvexEnvelope(), 0.01)
    return sampler.with_counts(regularity, feasible), regularity


def test_a_try_under_the_envelope_has_the_law_of_the_potential():
    potential, feasible, y = Kink(3.0), Box(-1.0, 1.0), jnp.asarray(0.6)
    sampler, regularity = envelope(
        potential, feasible, lipschitz=9.0, strong_convexity=6.0
    )
    oracle, eta = sampler.oracle, 0.08

    def near(x):
        return (x - 0.6) ** 2 / (2 * eta)

    tries = functools.partial(accepted_tries, oracle, feasible=feasible, y=y, seed=3)
    sample, accepted, _ = tries(
        Unlifted(potential, jnp.zeros(()), y), step_size=eta, count=50_000
    )
    assert pvalue(sample, potential, feasible, extra=near) > ALPHA
    assert pvalue(sample, potential, feasible, 1.1, extra=near) < ALPHA
    assert np.mean(accepted) > oracle.acceptance(
        ProximalPlan(regularity, feasible, eta)
    )
    # Control: the line is left out of the acceptance.
    slope = jax.grad(potential)(y)
    wrong, _, _ = tries(Unlifted(potential, slope, y), step_size=eta, count=50_000)
    assert pvalue(wrong, potential, feasible, extra=near) < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(("smoothness", "lipschitz"), [(4.0, 8.0)])
def test_tries_under_the_envelope_are_accepted_as_often_as_is_claimed(
    smoothness, lipschitz
):
    feasible, middle = Ball(1.0), jnp.asarray([0.9, 0.0, 0.3])
    potential = Quadratic(jnp.asarray([4.0, 1.0, 2.0]), middle)
    regularity = Regularity(3, lipschitz, 1.0, smoothness)
    sampler = AlternatingSampler(ConvexEnvelope(), 1e-6)
    sampler = sampler.with_counts(regularity, feasible)
    oracle, eta = sampler.oracle, sampler.step_size
    bound = oracle.acceptance(ProximalPlan(regularity, feasible, eta))
    for y in (jnp.zeros(3), jnp.asarray([-1.5, 0.0, 0.0])):
        _, accepted, _ = accepted_tries(
            oracle, potential, feasible, y, eta, seed=4, count=2000
        )
        assert np.mean(accepted) > bound - 0.03


def draws(sampler, potential, feasible, start, count, seed=5):
    @jax.jit
    def batch(keys):
        return jax.vmap(lambda key: sampler.draw(potential, feasible, start, key=key))(
            keys
        )

    return np.asarray(batch(jax.random.split(jax.random.key(seed), count)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_draws_of_a_kink_have_its_law_and_no_other_temperature(dtype):
    feasible = Box(-1.0, 1.0)
    with jax.enable_x64(dtype == "float64"):
        potential = Kink(2.0, -0.9, 1.0)
        sampler, _ = envelope(potential, feasible, lipschitz=4.0, strong_convexity=2.0)
        sample = draws(sampler, potential, feasible, jnp.zeros((), dtype), 10_000)
        assert sample.dtype == dtype
        assert pvalue(sample, potential, feasible) > ALPHA
        assert pvalue(sample, potential, feasible, 1.1) < ALPHA


@pytest.mark.slow
def test_draws_of_a_sum_have_its_law_and_no_other_temperature():
    potential, feasible = hinges(0.5, 3.0), Box(1.0, 3.0)
    regularity = Regularity(1, 9.5, 3.0, num_terms=6, term_lipschitz=0.5, quadratic=3.0)
    sampler = AlternatingSampler(StochasticRejection(), 0.02)
    sampler = sampler.with_counts(regularity, feasible)
    sample = draws(sampler, potential, feasible, jnp.zeros(()), 10_000)
    assert pvalue(sample, potential, feasible) > ALPHA
    assert pvalue(sample, potential, feasible, 1.1) < ALPHA


@pytest.mark.slow
def test_needed_queries_are_those_that_the_guarantee_expects():
    potential, feasible = hinges(0.5, 3.0), Box(1.0, 3.0)
    regularity = Regularity(1, 9.5, 3.0, num_terms=6, term_lipschitz=0.5, quadratic=3.0)
    sampler = AlternatingSampler(StochasticRejection(), 0.02)
    sampler = sampler.with_counts(regularity, feasible)
    start = jnp.zeros(())

    @jax.jit
    def count(keys):
        return jax.vmap(
            lambda key: sampler.run(potential, feasible, start, key=key).queries
        )(keys)

    needed = count(jax.random.split(jax.random.key(8), 500))
    claimed = sampler.guarantee(regularity, feasible).queries
    assert 0.9 * claimed < np.mean(needed) < 1.05 * claimed


@pytest.mark.slow
def test_draws_of_a_gaussian_in_a_box_are_truncated_normal_values():
    middle, precision = np.asarray([0.4, -0.9]), np.asarray([2.0, 5.0])
    potential = Quadratic(*jnp.asarray([precision, middle], jnp.float32))
    feasible, regularity = Box(-1.0, 0.5), Regularity(2, 9.0, 2.0, 5.0)
    sampler = AlternatingSampler(ConvexEnvelope(), 0.01).with_counts(
        regularity, feasible
    )
    sample = draws(sampler, potential, feasible, jnp.zeros(2), 10_000)
    for column, factor, holds in ((0, 1.0, True), (1, 1.0, True), (0, 1.2, False)):
        deviation = factor / math.sqrt(precision[column])
        ends = (np.asarray([-1, 0.5]) - middle[column]) / deviation
        law = scipy.stats.truncnorm(*ends, middle[column], deviation)
        found = scipy.stats.kstest(sample[:, column], law.cdf).pvalue
        assert (found > ALPHA) == holds


def gaussian_chain(convexity, step_size, start, num_steps):
    """Mean and variance of the chain for U = a x^2 / 2 on the line."""
    shrink, mean, variance = 1 / (1 + convexity * step_size), start, 0.0
    for _ in range(num_steps):
        mean = shrink * mean
        variance = shrink**2 * (variance + step_size) + step_size * shrink
    return mean, variance


@pytest.mark.parametrize("num_steps", [1, 3, 10, 40])
def test_a_gaussian_chain_mixes_within_the_bound(num_steps):
    convexity, step_size, start = 2.0, 0.1, 3.0
    mean, variance = gaussian_chain(convexity, step_size, start, num_steps)
    width = math.hypot(start, math.sqrt(1 / convexity))  # W2 of the start
    squared = mean**2 + (math.sqrt(variance) - math.sqrt(1 / convexity)) ** 2
    rate = 1 + convexity * step_size
    assert math.sqrt(squared) <= width / rate**num_steps + 1e-12
    grid = np.linspace(-12, 12, 100_001)
    here = scipy.stats.norm(mean, math.sqrt(variance)).pdf(grid)
    there = scipy.stats.norm(0, math.sqrt(1 / convexity)).pdf(grid)
    distance = np.abs(here - there).sum() * (grid[1] - grid[0]) / 2
    bound = width / (2 * math.sqrt(step_size) * rate ** (num_steps - 1))
    assert distance <= bound < 40 * distance


@pytest.mark.parametrize("variance", [1 / 8, 1 / 32, 1 / 80])
def test_clipping_costs_less_than_is_claimed(variance):
    # One linear term on the line: the gap is normal with variance sigma^2.
    v = np.linspace(-12, 12, 200_001) * math.sqrt(variance)
    density = scipy.stats.norm(0, math.sqrt(variance)).pdf(v) * (v[1] - v[0])
    exact = np.sum(np.abs(np.exp(np.clip(v, -0.5, 0.5)) - np.exp(v)) * density)
    regularity = Regularity(1, 1.0, num_terms=1, term_lipschitz=1.0)
    plan = ProximalPlan(regularity, Box(-1.0, 1.0), variance / 2)
    bound = StochasticRejection().bias(plan)
    assert exact < bound < 40 * exact


CASES = {
    "sum on a box": (StochasticRejection(), Box(-1.0, 1.0), 1e-6),
    "sum on a ball": (StochasticRejection(), Ball(2.0), 1e-12),
    "sum on a simplex": (StochasticRejection(), Simplex(), 1e-3),
    "envelope on a box": (ConvexEnvelope(), Box(-1.0, 1.0), 1e-12),
    "envelope on a ball": (ConvexEnvelope(), Ball(2.0, jnp.ones(10)), 1e-6),
}
KNOWN = Regularity(
    10, 6.0, 1.0, smoothness=20.0, num_terms=7, term_lipschitz=5.0, quadratic=1.0
)


@pytest.mark.parametrize("case", CASES)
def test_planned_counts_meet_the_distance_without_waste(case):
    oracle, feasible, distance = CASES[case]
    sampler = AlternatingSampler(oracle, distance, max_queries=10**9)
    sampler = sampler.with_counts(KNOWN, feasible)
    found = sampler.guarantee(KNOWN, feasible)
    assert found.proved
    assert 0.5 * distance < found.distance <= distance
    fewer = dataclasses.replace(sampler, num_steps=sampler.num_steps // 2)
    cut = fewer.guarantee(KNOWN, feasible)
    assert not cut.proved
    assert cut.distance > distance
    rushed = dataclasses.replace(sampler, tries=sampler.num_steps)
    assert not rushed.guarantee(KNOWN, feasible).proved


def test_inexact_values_cost_steps_and_tries():
    feasible = Box(-1.0, 1.0)
    inexact = dataclasses.replace(KNOWN, error=0.1, gradient_error=0.05)
    plans = [
        AlternatingSampler(ConvexEnvelope(), 0.01).with_counts(known, feasible)
        for known in (KNOWN, inexact)
    ]
    assert plans[0].num_steps < plans[1].num_steps
    assert plans[0].tries < plans[1].tries
    assert plans[1].oracle.slack == pytest.approx(0.2 + 0.05 * 2 * math.sqrt(10))
    assert plans[1].guarantee(inexact, feasible).proved


def private_erm(dimension, num_records, epsilon=1.0, delta=1e-6):
    """The certified queries at the k and mu of Gopi, Lee and Liu, Theorem 27."""
    base = math.log(3 / (4 * delta))
    ratio = math.sqrt(2 * base + 2 * epsilon) - math.sqrt(2 * base)
    mu = math.sqrt(2 * dimension) / (num_records * ratio)
    k = mu * (num_records * ratio) ** 2
    known = Regularity(
        dimension,
        k + k * mu,
        k * mu,
        num_terms=num_records,
        term_lipschitz=k,
        quadratic=k * mu,
    )
    sampler = AlternatingSampler(StochasticRejection(), 1e-7, max_queries=10**12)
    sampler = sampler.with_counts(known, Ball(0.5))
    return sampler.guarantee(known, Ball(0.5)).queries


def test_certified_queries_grow_with_the_square_of_the_records_not_with_dimension():
    few = private_erm(10, 200)
    assert 0.7 < private_erm(100, 200) / few < 1.5
    assert 3 < private_erm(10, 400) / few < 6


@pytest.mark.parametrize(
    ("known", "feasible", "sampler", "message"),
    [
        ({"strong_convexity": None}, Ball(1.0), {}, "must be strongly convex"),
        ({"strong_convexity": 0.0}, Ball(1.0), {}, "must be strongly convex"),
        ({}, Euclidean(), {}, "must be bounded"),
        ({}, Ball(1.0), {"step_size": 1.0}, "is too large"),
        ({"term_lipschitz": None}, Ball(1.0), {}, "Use ConvexEnvelope"),
        ({"error": 0.1}, Ball(1.0), {}, "needs exact terms"),
        ({"term_lipschitz": 1e6}, Ball(1.0), {}, "raise distance"),
    ],
)
def test_what_is_not_served_is_refused(known, feasible, sampler, message):
    regularity = dataclasses.replace(KNOWN, **known)
    sampler = AlternatingSampler(StochasticRejection(), 1e-6, **sampler)
    with pytest.raises(ValueError, match=message):
        sampler.with_counts(regularity, feasible)


def test_an_envelope_refuses_a_step_at_which_nothing_is_accepted():
    steep = Regularity(10, 1000.0, 1.0)
    sampler = AlternatingSampler(ConvexEnvelope(), 1e-6, step_size=1.0)
    with pytest.raises(ValueError, match="is too large"):
        sampler.with_counts(steep, Ball(1.0))


def test_drawing_needs_a_plan_and_a_sum_where_terms_are_drawn():
    sampler = AlternatingSampler(StochasticRejection(), 0.5)
    with pytest.raises(ValueError, match="not planned"):
        sampler.draw(Kink(), Ball(1.0), jnp.zeros(()), key=jax.random.key(0))
    known = Regularity(1, 1.0, 5.0, num_terms=2, term_lipschitz=0.1)
    sampler = sampler.with_counts(known, Box(-1.0, 1.0))
    with pytest.raises(TypeError, match="AbstractSumPotential"):
        sampler.draw(Kink(), Box(-1.0, 1.0), jnp.zeros(()), key=jax.random.key(0))


class Broken(AbstractSumPotential):
    num_terms: int = 3
    quadratic: float = 1.0

    def term(self, index, x):
        return jnp.where(index == 0, jnp.nan, jnp.inf) * jnp.sum(x["a"])

    def __call__(self, x):
        return jnp.nan * jnp.sum(x["a"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "oracle",
    [pytest.param(StochasticRejection(), marks=pytest.mark.slow), ConvexEnvelope()],
)
def test_a_broken_potential_gives_a_point_of_the_set(oracle):
    known = Regularity(3, 0.2, 1.0, num_terms=3, term_lipschitz=0.1, quadratic=1.0)
    sampler = AlternatingSampler(oracle, 0.1).with_counts(known, Ball(1.0))
    start = {"a": jnp.zeros(2), "b": jnp.ones(())}
    point = jax.jit(lambda key: sampler.draw(Broken(), Ball(1.0), start, key=key))(
        jax.random.key(0)
    )
    assert Ball(1.0).contains(point)
