"""Steps that are too long for the curvature of the records are taken back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.core.descent import LastStep
from dpbilevel.privacy.mechanisms import Gaussian
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.releases import Release
from tests.cases import slow

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
SQUARED = dpb.FiniteSum(dpb.squared_loss)
ONE = {"features": jnp.ones((4, 1)), "label": jnp.zeros(4)}  # of curvature 1
TAIL = dpb.outputs.TailMean()


def path(step_size, **kept):
    """The iterates from 1 without noise."""
    solver = dpb.NoisyGD(4, 100.0, step_size, noise_multiplier=0.0, precision="float")
    solver = dataclasses.replace(solver, sizes=4, **kept)
    key = jax.random.key(0)
    found = dpb.solve(SQUARED, solver, ONE, jnp.ones(1), key=key, trajectory=True)
    return np.ravel(found.trajectory)


@pytest.mark.parametrize("step_size", [0.5, 1.0, 1.45])
def test_steps_up_to_three_halves_over_the_curvature_are_taken_as_they_are(step_size):
    expected = (1 - step_size) ** np.arange(1, 5)
    np.testing.assert_allclose(path(step_size), expected, rtol=1e-5, atol=1e-6)


def test_a_longer_step_is_taken_back_to_the_minimum_along_it():
    # The gradient after a step of 2.5 says that the curvature is 1.
    np.testing.assert_allclose(path(2.5), [-1.5, 0.0, 0.0, 0.0], 1e-5)
    np.testing.assert_allclose(path(optax.sgd(2.5)), (-1.5) ** np.arange(1, 5), 1e-5)


def test_the_step_after_one_that_was_too_long_is_as_short():
    last = LastStep(jnp.asarray([-2.0]), jnp.asarray(2.0), jnp.asarray(0.5))  # q = 1
    gradient, before = jnp.asarray([-1.5]), jnp.asarray([-1.0])
    w, then = last.then(gradient, 0.0, before, jnp.asarray([7.0]))
    assert float(last.excess(gradient, 0.0)) == 2.5
    assert float(last.excess(gradient, 0.4)) == 1.0  # 3 < 1 + 3 * .4 * 2
    np.testing.assert_allclose([w[0], then.move[0]], [1 - 2 / 2.5, -2 / 2.5], rtol=1e-6)
    np.testing.assert_allclose([then.slope, then.factor], [2 / 2.5, 0.2], rtol=1e-6)


@pytest.mark.parametrize("size", [1, 8])
def test_noise_alone_takes_back_one_step_in_700_at_the_most(size):
    rng = np.random.default_rng(0)
    now, last = rng.normal(size=(2, 40_000, size)).astype("f4")
    slopes = np.sum(last**2, -1)

    def share(deviation):
        def is_long(gradient, move, slope):
            return LastStep(-move, slope, jnp.ones(())).excess(gradient, deviation) > 1

        return float(jnp.mean(jax.vmap(is_long)(now, last, slopes)))

    assert share(1.0) <= 1 / 700
    assert share(0.0) > 0.04  # without an allowance for noise


def test_the_deviation_of_a_release_is_that_of_noise_and_batches():
    def deviation(sampling):
        queries = (
            Query("upper", 50, 1.0, sampling),
            Query("lower", 200, 2.0, sampling),
        )
        return Release("step", 1, queries, Gaussian(3.0)).deviation

    noise = 3.0 * 2 * (1 / 50 + 2 / 200)
    assert deviation(dpb.FullBatch()) == pytest.approx(noise)
    rate = dpb.Poisson(0.5).realised_rate
    noise, batches = noise / rate, (50 * rate) ** -0.5 + 2 * (200 * rate) ** -0.5
    expected = np.hypot(noise, batches)
    assert deviation(dpb.Poisson(0.5)) == pytest.approx(expected)


def uncentred(seed, n, columns, truth):
    """Unit rows with a large mean, of which curvatures of nearly 1/4 follow."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0, 0.7, (n, columns))
    rows[:, -1] = 1.0
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    margin = rows @ truth
    margin -= margin.mean()
    label = np.where(rng.random(n) < 1 / (1 + np.exp(-margin)), 1.0, -1.0)
    return {"features": rows.astype("f4"), "label": label.astype("f4")}


TRUTH = np.asarray([3.0, -3.0, 1.0, 0.0, 0.0, -0.3])
RECORDS = uncentred(0, 6000, 6, TRUTH)


def loss_of(problem, solver, sizes, data, w0):
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=sizes)
    return dpb.solve(problem, plan.solver, data, w0, key=jax.random.key(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [dpb.FullBatch(), *slow(dpb.Poisson(0.3))],
    ids=lambda v: type(v).__name__,
)
def test_steps_beyond_stability_end_near_those_that_are_stable(sampling):
    problem, data = dpb.FiniteSum(dpb.logistic_loss), RECORDS

    def loss(step_size):
        solver = dpb.NoisyGD(60, 0.7, step_size, sampling=sampling, output=TAIL)
        found = loss_of(problem, solver, 6000, data, jnp.zeros(6)).value
        losses = jax.vmap(dpb.logistic_loss, (None, 0))(found, data)
        return float(jnp.mean(losses))

    stable = loss(6.0)
    assert stable < 0.67
    for step_size in (16.0, 32.0, 200.0):
        assert loss(step_size) < stable + 0.015
    # As they are: worse than a coin.
    assert loss(optax.sgd(32.0)) > 0.8
