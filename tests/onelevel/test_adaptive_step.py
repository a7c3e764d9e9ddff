"""AdaptiveGD: the formula of a step, where its size goes, and what it costs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel import OneLevel
from dpbilevel.onelevel import AdaptiveGD
from dpbilevel.onelevel.noisy_gd import NoisyGD
from tests.cases import Audited, Case, planned, slow
from tests.problems import LEVELS, LOWER, ONE_LEVEL, WEIGHTING, X0, Y0

N, D = 64, 400
RNG = np.random.default_rng(0)
CENTRES = jnp.asarray(RNG.normal(size=(N, D)) + 3, jnp.float32)
BOWL = dpb.FiniteSum(lambda w, z: 0.5 * jnp.sum((w - z) ** 2))
SLOPES = dpb.FiniteSum(lambda w, z: jnp.vdot(w, z))  # a record is its gradient
STEPS = 150

CONTRACT = {
    "adaptive_step_both": Case(
        WEIGHTING,
        OneLevel(AdaptiveGD(4), reads="both"),
        LEVELS,
        (X0, Y0),
        "disjoint",
        keeps_x=True,
        adaptive=2.0,
    ),
    "adaptive_step": Case(ONE_LEVEL, AdaptiveGD(4), LOWER, Y0, adaptive=2.0),
}


def planned_step(kind=AdaptiveGD, **fields):
    settings = {"weight": 1.0, "rate": 0.01, "first_step": 0.1} | fields
    return planned(kind(4, 0.7, **settings))


AUDITS = {
    "AdaptiveGD": Audited(planned_step()),
    "AdaptiveGD, add or remove": Audited(
        planned_step(neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE)
    ),
}


@jax.jit
def followed(solver, problem, records, w):
    """The states of a run, one row each, the first state left out."""

    def step(state, key):
        state = solver.step(problem, records, state, key=key)
        return state, state

    keys = jax.random.split(jax.random.key(0), solver.num_steps)
    return jax.lax.scan(step, solver.init(problem, w), keys)[1]


def run(solver, problem, records, w, scale=0.0):
    bound = solver.with_noise(scale).with_sizes(len(records)).with_precision("float")
    return followed(bound, problem, records, w)


def test_a_run_is_that_of_the_formula():
    steps, rate, first, norm = 5, 0.3, 200.0, 500.0
    solver = AdaptiveGD(steps, norm, first, rate=rate, kept=0.7)
    states = run(solver, BOWL, CENTRES, jnp.zeros(D))
    centre, w, m = np.asarray(CENTRES, float).mean(0), np.zeros(D), np.zeros(D)
    length = first
    for t in range(steps):
        q = (w - centre) / norm  # nothing is clipped
        cosine = q @ m / (np.linalg.norm(q) * np.linalg.norm(m)) if t else 0.0
        fade = 1 - t / steps
        length *= math.exp(rate * fade * np.clip(cosine * D**0.5 / 3, -1, 1))
        if t:
            most = 0.3 * np.linalg.norm(w) / (fade * np.linalg.norm(q))
            length = min(length, most)
        w, m = w - fade * length * q, 0.9 * m + q
        norm *= math.exp(-rate)  # all is kept, more than 0.7
        found = (states.length[t], states.clip_norm[t])
        assert found == pytest.approx((length, norm), rel=1e-4)
        np.testing.assert_allclose(states.w[t], w, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0.005, *slow(50.0)])
def test_a_bad_first_step_is_recovered_from(first):
    """The control is descent with steps of the shorter length."""
    start, centre = jnp.ones(D), np.asarray(CENTRES).mean(0)

    def distance(w):
        return float(np.linalg.norm(w - centre) / np.linalg.norm(start - centre))

    found = run(AdaptiveGD(STEPS, first_step=first), BOWL, CENTRES, start, 0.05)
    assert distance(found.w[-1]) < 0.1
    plain = run(NoisyGD(STEPS, 1.0, 0.005), BOWL, CENTRES, start, 0.05)
    assert distance(plain.w[-1]) > 3 * distance(found.w[-1])


def test_a_clip_norm_that_is_too_short_is_recovered_from():
    found = run(AdaptiveGD(STEPS, 0.01), BOWL, CENTRES, jnp.ones(D), 0.05)
    good = run(AdaptiveGD(STEPS, 1.0), BOWL, CENTRES, jnp.ones(D), 0.05)
    centre = np.asarray(CENTRES).mean(0)
    far, near = (np.linalg.norm(s.w[-1] - centre) for s in (found, good))
    assert far < 1.5 * near


@pytest.mark.slow
def test_noise_alone_does_not_move_the_step_size_in_one_direction():
    """The mean of the logarithm is 0, within four standard errors."""
    zeros, start = jnp.zeros((N, D)), jnp.full(D, 1e6)
    solver = AdaptiveGD(400, rate=0.01)
    lengths = np.log(np.asarray(run(solver, SLOPES, zeros, start, 1.0).length))
    changes = np.diff(lengths) / (0.01 * (1 - np.arange(1, 400) / 400))
    error = changes.std() / len(changes) ** 0.5
    assert abs(changes.mean()) < 4 * error
    assert changes.std() == pytest.approx(1 / 3, rel=0.15)  # cosines of noise
    # The control: a constant gradient in the noise does.
    signal = zeros + 0.05
    lengths = np.log(np.asarray(run(solver, SLOPES, signal, start, 1.0).length))
    assert np.diff(lengths).mean() > 4 * error * 0.01


def test_no_step_is_longer_than_its_part_of_the_iterate():
    start = jnp.ones(D)
    states = run(AdaptiveGD(20, first_step=1e3), SLOPES, CENTRES, start, 1.0)
    path = np.concatenate([np.ones((1, D)), np.asarray(states.w)])
    moves = np.linalg.norm(np.diff(path, axis=0), axis=1)
    ratios = moves / np.linalg.norm(path[:-1], axis=1)
    assert ratios.max() == pytest.approx(0.3, rel=1e-3)


def test_a_public_gradient_that_is_not_finite_leaves_the_run_as_it_was():
    broken = dpb.FiniteSum(BOWL.loss, lambda w: jnp.inf * jnp.sum(w))
    states = run(AdaptiveGD(3), broken, CENTRES, jnp.ones(D))
    np.testing.assert_array_equal(states.w[-1], np.ones(D))
    assert (states.length == 0.5).all()
    assert np.isfinite(states.direction).all()


def test_the_noise_is_two_percent_more_than_without_tuning():
    (release,) = AdaptiveGD(4).with_noise(1.0).ledger(ONE_LEVEL, 50).releases
    plain = NoisyGD(4, 1.0, 0.1).with_noise(1.0).ledger(ONE_LEVEL, 50).releases[0]
    assert release.noise_multiplier == plain.noise_multiplier
    assert release.noise_std / plain.noise_std == pytest.approx(1.04**0.5)
    assert release.noise_std / plain.noise_std < 1.03


@pytest.mark.parametrize("field", ["kept", "rate", "weight", "first_step"])
def test_a_bad_field_is_named_in_the_error(field):
    with pytest.raises(ValueError, match=f"AdaptiveGD: {field} must be"):
        AdaptiveGD(4, **{field: 0.0})
