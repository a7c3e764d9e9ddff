"""CorrelatedGD: its updates against a loop, its cases, and its broken copies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.onelevel import CorrelatedGD
from dpbilevel.privacy import square_root_feedback
from tests.cases import Audited, Case, planned, slow
from tests.problems import LOWER, ONE_LEVEL, Y0

ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE
N = 12
RECORDS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
PROBLEM = dpb.FiniteSum(
    lambda w, z: 0.5 * jnp.sum((w - z) ** 2), lambda w: 0.25 * jnp.sum(w**2)
)

CONTRACT = {
    "correlated": Case(ONE_LEVEL, CorrelatedGD(3, 1.0, 0.3, (0.5,)), LOWER, Y0),
    "correlated_in_passes": Case(
        ONE_LEVEL,
        CorrelatedGD(
            4,
            1.0,
            optax.adam(0.1),
            (0.4, 0.2),
            sampling=dpb.privacy.SinglePass(2),
            output=dpb.outputs.Mean(),
        ),
        LOWER,
        Y0,
    ),
}


def planned_correlated(kind=CorrelatedGD, **fields):
    settings = {"num_steps": 3, "clip_norm": 0.7, "step_size": 0.1, "feedback": (0.4,)}
    return planned(kind(**(settings | fields)))


AUDITS = {
    "CorrelatedGD": Audited(planned_correlated()),
    "CorrelatedGD, add or remove": Audited(
        planned_correlated(neighbours=ADD_OR_REMOVE)
    ),
    "CorrelatedGD, single pass": Audited(
        planned_correlated(num_steps=4, sampling=dpb.privacy.SinglePass(5)),
        exact=False,
    ),
}


def test_noiseless_steps_equal_a_loop_over_batches():
    solver = CorrelatedGD(
        5,
        1e6,
        0.1,
        sampling=dpb.privacy.SinglePass(4),
        noise_multiplier=0.0,
        precision="float",
    )
    w, points = np.full(3, 2.0), np.asarray(RECORDS, np.float64)
    found = jax.jit(dpb.solve)(
        PROBLEM, solver, RECORDS, jnp.full(3, 2.0), key=jax.random.key(0)
    )
    for t in range(5):
        w = w - 0.1 * (np.mean(w - points[t % 3 :: 3], axis=0) + w / 2)
    np.testing.assert_allclose(found.value, w, rtol=1e-4)


def flat(w, z, key=None):
    return 0.0 * jnp.sum(w)


@pytest.mark.parametrize(
    ("relation", "loss"),
    [
        (dpb.Neighbours.REPLACE_ONE, flat),
        *slow(
            (ADD_OR_REMOVE, flat), (dpb.Neighbours.REPLACE_ONE, dpb.Randomized(flat))
        ),
    ],
)
def test_the_sum_of_all_noise_is_smaller_than_with_independent_noise(relation, loss):
    # No signal: the iterate is the sum of all noise, whose deviation is known.
    problem, steps, size = dpb.FiniteSum(loss), 8, 4000
    noise = {"noise_multiplier": 1.0, "precision": "float", "neighbours": relation}
    records = jnp.zeros(4)

    def deviation(solver):
        run = jax.jit(dpb.solve)
        solver = solver.with_sizes(4)
        w = run(problem, solver, records, jnp.zeros(size), key=jax.random.key(1)).value
        return float(jnp.std(w)) / (relation.contributions / 4)

    found = deviation(CorrelatedGD(steps, 1.0, 1.0, (0.75,), **noise))
    expected = np.sqrt(1 + (steps - 1) * 0.25**2)
    assert found == pytest.approx(expected, rel=0.05)
    independent = deviation(dpb.NoisyGD(steps, 1.0, 1.0, **noise))
    assert independent == pytest.approx(np.sqrt(steps), rel=0.05)


def test_the_run_is_as_private_as_its_scale_says():
    solver = planned_correlated()
    joint = solver.run_noise.event().noise_multiplier
    assert joint == pytest.approx(1.0)
    (event,) = solver.ledger(PROBLEM, 10).events()["records"].events
    assert event.noise_multiplier == pytest.approx(1.0)
    with pytest.raises(ValueError, match="set momentum in the optax"):
        CorrelatedGD(3, 1.0, optax.sgd(0.1), momentum=0.5)


def test_a_trajectory_shows_no_key():
    solver = dataclasses.replace(planned_correlated(), sizes=None)
    state = solver.init(PROBLEM, jnp.zeros(3))
    (shown,) = jax.tree.leaves(solver.adversary_view(state))
    assert shown is state.w


def test_noise_beyond_the_grid_is_refused_when_planned():
    problem, w0 = dpb.FiniteSum(lambda w, z: jnp.vdot(w, z)), jnp.zeros(100_000)
    budget = dpb.PrivacyBudget(1.0, 1e-5)
    planned = {"sizes": 10, "w0": w0}
    few = CorrelatedGD(3000, 1.0, 0.1, (0.5,))
    dpb.calibrate(problem, few, budget, **planned)  # the control
    many = CorrelatedGD(3000, 1.0, 0.1, square_root_feedback(64))
    with pytest.raises(ValueError, match="too large for the grid"):
        dpb.calibrate(problem, many, budget, **planned)
