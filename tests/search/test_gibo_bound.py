"""The bound of GradientInformativeBO, by runs on losses of the kernel's space."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.core.loop import scan_steps
from dpbilevel.privacy.keys import step_keys
from dpbilevel.search.gibo_bound import excess_of_samples
from dpbilevel.search.gp import gradient_posterior

pytestmark = pytest.mark.usefixtures("x64")
# A well of the kernel's length-scale around a record: the mean loss of equal records
# has curvature 1 at its minimum and less within RADIUS of it.
SCALE, RADIUS, N, D = 4.0, 1.0, 4, 2
WELLS = dpb.FiniteSum(
    lambda w, z: SCALE**2 * -jnp.expm1(-jnp.sum((w - z) ** 2) / (2 * SCALE**2))
)
RECORDS, START = np.full((N, D), 0.1), np.full(D, 0.3)
CONSTANTS = {
    "smoothness": 1.0,
    "strong_convexity": math.exp(-1 / (2 * SCALE**2)) * (1 - 1 / SCALE**2),
    "gradient_bound": SCALE * math.exp(-0.5),
    # The loss is a constant less a kernel function.
    "norm": SCALE**2 * math.sqrt(1 + 1e-4),
    "radius": RADIUS,
}
GAP = float(WELLS.loss(START, RECORDS[0]))
FAILURE, RUNS = 0.3, 300


def solver(steps, scale=0.4, **fields):
    defaults = {"clip_norm": 2.5, "step_size": 1.0, "max_batch": 4, "keep": 8}
    defaults |= {"kernel": dpb.search.RBF(SCALE), "tolerance": 1e-5, "polish": 0}
    made = dpb.search.GradientInformativeBO(
        steps, **(defaults | {"portfolio": None} | fields)
    )
    return made.with_noise(scale / steps**0.5).with_sizes(N)


def bound(made, problem=WELLS, **changes):
    given = CONSTANTS | {"initial_gap": GAP, "failure": FAILURE} | changes
    return made.bound(problem, START, **given)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_gap_exceeds_the_bound_no_more_often_than_stated(steps):
    made = solver(steps, 0.4 if steps == 1 else 0.3)

    def gap(key):
        state, (_, each) = made.init(WELLS, START), step_keys(key, steps)
        state, _ = scan_steps(WELLS, made, jnp.asarray(RECORDS), state, each)
        return WELLS.loss(state.w, RECORDS[0]), state.unmet

    keys = jax.random.split(jax.random.key(0), RUNS)
    gaps, unmet = map(np.asarray, jax.jit(jax.vmap(gap))(keys))
    assert not unmet.any()
    found, most = np.mean(gaps > bound(made)), FAILURE + 3 * (FAILURE / RUNS) ** 0.5
    assert found <= most
    if steps == 1:  # no union over the steps, and a gap that is nearly quadratic
        assert found > FAILURE / 2
    # The control: a part of the bound is broken.
    assert np.mean(gaps > bound(made) / (1 + steps)) > most


def test_without_noise_the_bias_is_left():
    tau, trace = CONSTANTS["strong_convexity"], 1e-5 * D / SCALE**2
    rounding = 2.0**-22 * 2.5 * D**0.5
    left = (1 - tau / 2) ** 3
    error = CONSTANTS["norm"] * trace**0.5 + rounding
    expected = left * GAP + (1 - left) * error**2 / (2 * tau)
    found = bound(solver(3, 0.0, step_size=0.5))
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_tolerance_of_the_noise_makes_a_bias_of_its_typical_norm():
    like_noise, free = (
        solver(1, 1e-3, tolerance=tolerance) for tolerance in ("noise", 1e-30)
    )
    (release,) = free.ledger(WELLS, N).releases
    tau = CONSTANTS["strong_convexity"]
    errors = [
        ((bound(made) - (1 - tau) * GAP) * 2) ** 0.5 for made in (like_noise, free)
    ]
    expected = CONSTANTS["norm"] * release.noise_std * D**0.5
    assert errors[0] - errors[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("records", [1, 20, 200])
def test_errors_of_sampled_losses_exceed_their_bound_as_seldom_as_stated(records):
    """Values and slopes are drawn together from the prior, in one dimension."""
    noise, failure, rng = 0.3, 0.2, np.random.default_rng(0)
    kernel, points = dpb.search.RBF(1.0), jnp.asarray([[-0.4], [0.3], [0.5]])
    options = {"nugget": noise**2, "constant": 0.0}
    posterior = gradient_posterior(kernel, jnp.zeros(1), points, **options)
    values = kernel.covariance(points, points, jnp.zeros(1)) + noise**2 * np.eye(3)
    across, prior = kernel.slope(jnp.zeros(1), points), kernel.prior(jnp.zeros(1))
    joint = np.block([[values, across], [across.T, prior]])
    drawn = rng.multivariate_normal(np.zeros(4), joint, size=(2_000, records))
    errors = drawn[..., 3] - drawn[..., :3] @ np.asarray(posterior.weights[0])
    means = (errors**2).mean(axis=1) / float(posterior.trace)
    assert np.mean(means > excess_of_samples(records, failure) ** 2) <= failure
    # The control: the mean of the errors alone is exceeded.
    assert np.mean(means > 1) > failure


def test_with_noisy_evaluations_the_norm_is_that_of_samples():
    noisy, anywhere = solver(1, evaluation_noise=0.01), {"radius": None}
    norm = excess_of_samples(N, FAILURE / 2)
    alike = bound(solver(1), norm=norm, failure=FAILURE / 2, **anywhere)
    assert bound(noisy, norm=None, **anywhere) == pytest.approx(alike, rel=1e-12)
    assert 1 < excess_of_samples(10**6, 1e-3) < 1.004


REFUSED = {
    "calibrated": {"sizes": None},
    "output": {"output": dpb.outputs.TailMean(0.5)},
    "step_size": {"step_size": 1.1},
    "a number": {"step_size": optax.adam(0.1)},
    "batch": {"batch": 3},
    "stationary": {"kernel": dpb.search.Quadratic()},
    "clip_norm": {"clip_norm": 2.0},
    "norm=": {"evaluation_noise": 0.1},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_plan_that_the_theorems_do_not_cover_is_refused(words):
    wrong = dataclasses.replace(solver(2), **REFUSED[words])
    with pytest.raises(ValueError, match=words):
        bound(wrong)


def test_problems_and_constants_that_the_theorems_do_not_cover_are_refused():
    with pytest.raises(ValueError, match="public term"):
        bound(solver(1), dataclasses.replace(WELLS, public=jnp.sum))
    mirrored = dataclasses.replace(WELLS, w_set=dpb.sets.Simplex(entropy=True))
    with pytest.raises(ValueError, match="projected steps"):
        bound(solver(1), mirrored)
    with pytest.raises(ValueError, match="keep of at least 16"):
        bound(solver(4, evaluation_noise=0.1), norm=None)
    with pytest.raises(ValueError, match="up to smoothness"):
        bound(solver(1), strong_convexity=1.5)
    with pytest.raises(ValueError, match="leave the ball"):
        bound(solver(1), radius=0.5)
