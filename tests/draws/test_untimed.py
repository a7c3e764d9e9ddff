"""Draws whose running time is not protected."""

import dataclasses
import math

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.draws import (
    AlternatingSampler,
    ConvexEnvelope,
    StochasticRejection,
    mean_loss,
)
from dpbilevel.draws.samplers import _untimed
from dpbilevel.draws.samplers.base import AbstractPotential, Regularity
from dpbilevel.draws.samplers.proximal import Mixing, ProximalPlan, ProximalTarget
from dpbilevel.privacy.keys import step_keys
from tests.cases import slow

ALPHA = 1e-4
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
UNTIMED = AlternatingSampler(ConvexEnvelope(), 1e-9, running_time="unprotected")
LINE = dpb.sets.Box(-1.0, 1.0)


class Corner(AbstractPotential):
    """8 |x - 0.3| + 3 x^2 / 2 in one dimension."""

    def __call__(self, x):
        return jnp.sum(8 * jnp.abs(x - 0.3) + 1.5 * x**2)


def regularized(dimension, sampler=UNTIMED):
    return dpb.draws.RegularizedExponentialMechanism(
        sampler, convex=True, dimension=dimension
    )


def energy(points, records, rate, mu):
    """k (mean absolute loss + mu / 2 |x|^2)."""
    margins = points @ np.asarray(records["features"]).T
    losses = np.abs(margins - np.asarray(records["label"])).mean(1)
    return rate * (losses + mu / 2 * (points**2).sum(1))


def moments(dimension, records, rate, mu, temperature=1.0):
    """Mean and deviation of the energy under exp(-energy / T), by quadrature."""
    axis = np.linspace(-1, 1, 200_001 if dimension == 1 else 801)
    grid = np.stack(np.meshgrid(*[axis] * dimension), -1).reshape(-1, dimension)
    grid = grid[(grid**2).sum(1) <= 1]
    values = np.concatenate(
        [energy(part, records, rate, mu) for part in np.array_split(grid, 50)]
    )
    weights = np.exp((values.min() - values) / temperature)
    mean = np.average(values, weights=weights)
    return mean, math.sqrt(np.average((values - mean) ** 2, weights=weights))


def drawn(problem, plan, records, dimension, count):
    def one(key):
        w0 = jnp.zeros(dimension)
        return dpb.solve(problem, plan.solver, records, w0, key=key).value

    _, keys = step_keys(jax.random.key(11), count)
    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(keys))


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [1, 2])
def test_unprotected_draws_have_the_exact_law_and_a_wrong_temperature_is_seen(
    dimension,
):
    rng = np.random.default_rng(dimension)
    with jax.enable_x64(True):
        rows = rng.normal(size=(40, dimension))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        labels = rows @ np.full(dimension, 0.3)
        records = {"features": jnp.asarray(rows), "label": jnp.asarray(labels)}
        problem = dpb.onelevel.linear_risk("absolute", radius=1.0)
        budget = dpb.PrivacyBudget(4.0, 1e-2)
        solver = regularized(dimension, dataclasses.replace(UNTIMED, distance=1e-5))
        plan = dpb.calibrate(problem, solver, budget, sizes=40)
        found = plan.solver.plan(problem, 40)
        law = records, found.rate, found.potential.quadratic / found.rate
        points = drawn(problem, plan, records, dimension, 2_000)

    sample = energy(points, *law)

    def score(temperature):
        mean, deviation = moments(dimension, *law, temperature)
        return abs(sample.mean() - mean) / (deviation / math.sqrt(len(sample)))

    assert score(1.0) < 3
    assert score(1.1) > 3.5


@pytest.mark.parametrize("center", [-0.6, *slow(0.29, 0.45)])
def test_a_try_has_its_law_at_any_center_and_step(center):
    known = Regularity(1, 11.0, 3.0)
    plan = ProximalPlan(known, LINE, 0.1)
    oracle = ConvexEnvelope().without_counts(plan)
    target, y = ProximalTarget(Corner(), LINE, 0.1), jnp.asarray([0.6])

    def one(key):
        common = oracle._tangent(target, jnp.asarray([center], jnp.float32))
        return oracle.attempt(target, y, common, key=key)

    keys = jax.random.split(jax.random.key(3), 100_000)
    x, accepted, _ = jax.jit(jax.vmap(one))(keys)
    sample = np.asarray(x)[np.asarray(accepted), 0]
    grid = np.linspace(-1, 1, 4001)
    exponent = 8 * np.abs(grid - 0.3) + 1.5 * grid**2 + 5 * (grid - 0.6) ** 2

    def pvalue(exponent):
        density = np.exp(exponent.min() - exponent)
        mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
        return scipy.stats.kstest(
            sample, lambda v: np.interp(v, grid, mass / mass[-1])
        ).pvalue

    assert len(sample) > 1_000
    assert pvalue(exponent) > ALPHA
    assert pvalue(exponent - 5 * (grid - 0.6) ** 2) < ALPHA  # without the step


@pytest.mark.slow
def test_a_step_of_the_walk_has_the_law_of_noise_and_then_of_the_density_near_by():
    target, start = ProximalTarget(Corner(), LINE, 0.3), 0.9
    plan = ProximalPlan(Regularity(1, 11.0, 3.0), LINE, 0.3)
    oracle = ConvexEnvelope().without_counts(plan)

    def one(key):
        x0 = jnp.asarray([start], jnp.float32)
        return _untimed.walk(oracle, target, x0, jnp.asarray(1), key=key)[0]

    keys = jax.random.split(jax.random.key(7), 20_000)
    sample = np.asarray(jax.jit(jax.vmap(one))(keys))
    grid, wide = np.linspace(-1, 1, 2001), np.linspace(-3, 5, 801)

    def pvalue(start):
        exponent = 8 * np.abs(grid - 0.3) + 1.5 * grid**2
        near = exponent + (grid - wide[:, None]) ** 2 / 0.6
        density = np.exp(near.min(1, keepdims=True) - near)
        density /= density.sum(1, keepdims=True)
        mass = np.cumsum(np.exp(-((wide - start) ** 2) / 0.6) @ density)
        return scipy.stats.kstest(
            sample, lambda v: np.interp(v, grid, mass / mass[-1])
        ).pvalue

    assert pvalue(start) > ALPHA
    assert pvalue(start - 0.1) < ALPHA  # the control


class WithoutGradient(AbstractPotential):
    """|x - 0.3|, of which JAX's gradient is NaN everywhere."""

    def __call__(self, x):
        return jnp.sum(jnp.abs(x - 0.3)) + jnp.linalg.norm(0 * x)


@pytest.mark.slow
def test_a_try_has_its_law_where_the_gradient_is_not_finite():
    plan = ProximalPlan(Regularity(1, 1.0), LINE, 0.1)
    oracle = ConvexEnvelope().without_counts(plan)
    target, y = ProximalTarget(WithoutGradient(), LINE, 0.5), jnp.asarray([-0.6])
    assert np.isnan(jax.grad(target.potential)(y)).all()

    def one(oracle, key):
        x, accepted, _ = oracle.attempt(target, y, oracle.prepare(target, y), key=key)
        return x[0], accepted

    grid = np.linspace(-1, 1, 4001)
    density = np.exp(-np.abs(grid - 0.3) - (grid + 0.6) ** 2)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])

    def pvalue(oracle, seed):
        keys = jax.random.split(jax.random.key(seed), 100_000)
        x, accepted = map(np.asarray, jax.jit(jax.vmap(one, (None, 0)))(oracle, keys))
        assert accepted.sum() > 1_000
        return scipy.stats.kstest(
            x[accepted], lambda v: np.interp(v, grid, mass / mass[-1])
        ).pvalue

    assert pvalue(oracle, 4) > ALPHA
    assert pvalue(dataclasses.replace(oracle, drop=0.0), 5) < ALPHA  # the control


def test_a_record_without_gradient_lowers_the_tangent_by_its_share_alone():
    def loss(x, record):  # of slope 1; the norm of zeros has the gradient NaN
        return jnp.linalg.norm(record[0] * (x - record[1:]))

    n, half = 20, 4.0
    records = jnp.full((n, 3), 0.4).at[:, 0].set(1.0).at[0].set(0.0)
    problem = dpb.FiniteSum(loss, lipschitz=1.0)
    terms = mean_loss._Terms(problem, records, jnp.zeros(2), half, n)
    center, *others = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (50, 2)))
    value, slope = jax.jit(lambda x: terms.value_and_gradient(x))(center)
    values = jax.jit(jax.vmap(terms))(jnp.stack([center, *others]))
    assert float(values[0] - value) == pytest.approx(half / n, rel=1e-4)
    for x, there in zip(others, values[1:], strict=True):
        assert float(there - value - slope @ (x - center)) >= 0
    assert np.isnan(jax.jit(jax.grad(terms))(center)).all()  # the control
    # A walk computes it record by record only there.
    quick = jax.jit(lambda x: _untimed._Quick(terms).value_and_gradient(x))(center)
    chex.assert_trees_all_close(quick, (value, slope), rtol=1e-5)
    smooth = mean_loss._Terms(problem, records[1:], jnp.zeros(2), half, n - 1)
    quick, sums = jax.jit(
        lambda x: (
            _untimed._Quick(smooth).value_and_gradient(x),
            jax.value_and_grad(smooth)(x),
        )
    )(others[0])
    chex.assert_trees_all_close(quick, sums, rtol=1e-5)


@pytest.mark.parametrize("step_size", [1e-3, 0.05, 1.0, 20.0])
def test_the_bound_on_mixing_holds_at_any_step(step_size):
    """Against the chain itself, on a fine lattice."""
    mixing = Mixing(2.0, 3.0)
    grid = np.linspace(-1, 1, 801)
    energy = 8 * np.abs(grid - 0.3) + 1.5 * grid**2
    # y is integrated over the whole line.
    wide = np.linspace(-12, 12, 4801) * max(1, math.sqrt(step_size))
    noise = np.exp(-((wide[:, None] - grid[None]) ** 2) / (2 * step_size))
    target = np.exp(energy.min() - energy)
    back = noise * target[None]
    back /= np.maximum(back.sum(1, keepdims=True), 1e-300)
    forth = noise / noise.sum(0)
    kernel = back.T @ forth  # columns are the points that a step starts from
    target /= target.sum()
    assert np.abs(kernel @ target - target).sum() < 1e-6
    law = np.zeros(len(grid))
    law[0] = 1.0
    for count in range(1, 60):
        law = kernel @ law
        apart = np.abs(law - target).sum() / 2
        assert apart <= mixing.remaining(step_size, count) + 1e-6
    steps = mixing.num_steps(step_size, 1e-3)
    assert mixing.remaining(step_size, int(steps)) <= 1e-3
    assert steps == 1 or mixing.remaining(step_size, int(steps) - 1) > 1e-3


def test_the_report_says_that_time_is_unprotected():
    problem = dpb.onelevel.linear_risk("absolute", radius=1.0)
    with jax.enable_x64(True):
        plan = dpb.calibrate(problem, regularized(2), BUDGET, sizes=40)
        fixed = AlternatingSampler(ConvexEnvelope(), 1e-9)
        safe = dpb.calibrate(problem, regularized(2, fixed), BUDGET, sizes=20)
    texts = plan.report.assumptions
    assert any(text.startswith("unprotected: how long the draw") for text in texts)
    assert not any("unprotected" in text for text in safe.report.assumptions)
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL


def test_what_records_choose_cannot_be_given():
    with pytest.raises(ValueError, match="leave out num_steps"):
        dataclasses.replace(UNTIMED, num_steps=100)
    known = Regularity(2, 5.0, 1.0, num_terms=10, term_lipschitz=5.0)
    rejection = dataclasses.replace(UNTIMED, oracle=StochasticRejection())
    with pytest.raises(ValueError, match="exact at any step size"):
        rejection.with_counts(known, dpb.sets.Ball(1.0))


def test_a_sampler_of_another_potential_is_heuristic():
    known, ball = Regularity(2, 5.0, 1.0), dpb.sets.Ball(1.0)
    sampler = UNTIMED.with_counts(known, ball)
    assert sampler.guarantee(known, ball).proved
    flatter = dataclasses.replace(known, strong_convexity=0.5)
    assert not sampler.guarantee(flatter, ball).proved
    assert not sampler.guarantee(known, dpb.sets.Ball(2.0)).proved
    with pytest.raises(ValueError, match="not planned"):
        UNTIMED.draw(Corner(), ball, jnp.zeros(1), key=jax.random.key(0))


@pytest.mark.slow
def test_the_step_is_never_below_the_planned_one_and_longer_where_losses_bend_less():
    known = Regularity(1, 11.0, 3.0)
    sampler = UNTIMED.with_counts(known, LINE)
    assert sampler.step_size is not None
    target = ProximalTarget(Corner(), LINE, float(sampler.step_size))
    center = _untimed.minimizer(target, jnp.zeros(1))
    assert float(center[0]) == pytest.approx(0.3, abs=1e-3)
    found = _untimed.best_step(
        sampler.oracle, target, 100.0, center, key=jax.random.key(1)
    )
    assert float(found) >= sampler.step_size

    class Flat(AbstractPotential):
        def __call__(self, x):
            return jnp.sum(1.5 * x**2)

    flat = eqx.tree_at(lambda v: v[0], target, Flat())
    longer = _untimed.best_step(
        sampler.oracle, flat, 100.0, center, key=jax.random.key(1)
    )
    assert float(longer) > 4 * float(found)
