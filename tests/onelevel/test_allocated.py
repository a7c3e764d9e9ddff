"""AllocatedGD: its updates against a loop, and its cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.onelevel import AllocatedGD
from dpbilevel.privacy.sampling.fixed_size import RandomAllocation
from tests.cases import Audited, Case
from tests.problems import LEVELS, LOWER, ONE_LEVEL, WEIGHTING, X0, Y0

N = 60
POINTS = np.random.default_rng(0).normal(size=(N, 3))
RECORDS = jnp.asarray(POINTS, jnp.float32)
PROBLEM = dpb.FiniteSum(
    lambda w, z: 0.5 * jnp.sum((w - z) ** 2), lambda w: 0.25 * jnp.sum(w**2)
)
ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE

CONTRACT = {
    "allocated": Case(ONE_LEVEL, AllocatedGD(2, 2, 1.0, 0.5), LOWER, Y0),
    "allocated_adam": Case(
        ONE_LEVEL,
        AllocatedGD(3, 2, 1.0, optax.adam(0.1), output=dpb.outputs.Mean()),
        LOWER,
        Y0,
    ),
    "penalty_allocated": Case(
        WEIGHTING,
        dpb.PenaltyBilevel(2, 10.0, step_size=1.0, inner=AllocatedGD(1, 2, 1.0, 0.1)),
        LEVELS,
        (X0, Y0),
        "overlapping",
    ),
}


def planned_allocated(kind=AllocatedGD, relation=dpb.Neighbours.REPLACE_ONE):
    fields = {"neighbours": relation, "output": dpb.outputs.Mean()}
    return kind(1, 2, 0.7, 0.1, **fields).with_noise(0.5).with_sizes(10)


AUDITS = {
    "AllocatedGD": Audited(planned_allocated(), exact=False),
    "AllocatedGD, add or remove": Audited(
        planned_allocated(relation=ADD_OR_REMOVE), exact=False
    ),
}


def run(solver, key=0, **options):
    solved = jax.jit(dpb.solve, static_argnames="trajectory")
    w0 = jnp.full(3, 2.0)
    return solved(PROBLEM, solver, RECORDS, w0, key=jax.random.key(key), **options)


def placed(places):
    """A pass whose batches are given."""

    def in_pass(self, records, *, key):
        return dataclasses.replace(self, places=jnp.asarray(places))

    return in_pass


@pytest.mark.slow
def test_noiseless_passes_equal_a_loop_over_batches(monkeypatch):
    drawn = np.arange(N) * 7 % 5
    monkeypatch.setattr(RandomAllocation, "in_pass", placed(drawn))
    solver = AllocatedGD(2, 5, 1e6, 0.1, noise_multiplier=0.0, precision="float")
    jax.clear_caches()
    found = run(solver, trajectory=True)
    w, path = np.full(3, 2.0), []
    for _ in range(2):
        for batch in range(5):
            mean = np.sum(w - POINTS[drawn == batch], axis=0) / (N / 5)
            w = w - 0.1 * (mean + w / 2)
        path.append(w)
    np.testing.assert_allclose(found.trajectory, path, rtol=1e-4)
    np.testing.assert_allclose(found.value, w, rtol=1e-4)
    jax.clear_caches()


@pytest.mark.slow
def test_the_mean_is_that_of_all_updates(monkeypatch):
    one = AllocatedGD(
        1,
        4,
        1e6,
        0.1,
        noise_multiplier=0.0,
        precision="float",
        output=dpb.outputs.Mean(),
    )
    monkeypatch.setattr(RandomAllocation, "in_pass", placed(np.zeros(N, int)))
    jax.clear_caches()
    w, visited = np.full(3, 2.0), []
    for batch in range(4):
        total = np.sum(w - POINTS, axis=0) / (N / 4) if batch == 0 else 0.0
        w = w - 0.1 * (total + w / 2)
        visited.append(w)
    np.testing.assert_allclose(run(one).value, np.mean(visited, 0), rtol=1e-4)
    jax.clear_caches()


@pytest.mark.slow
def test_passes_of_one_run_and_of_two_keys_differ():
    solver = AllocatedGD(1, 5, 1e6, 0.1, noise_multiplier=0.0, precision="float")
    assert np.any(run(solver, 0).value != run(solver, 1).value)
    alone = AllocatedGD(1, 1, 1e6, 0.1, noise_multiplier=0.0, precision="float")
    np.testing.assert_array_equal(run(alone, 0).value, run(alone, 1).value)


def test_one_batch_is_noisy_descent():
    passes = AllocatedGD(5, 1, 1.0, 0.3).with_noise(1.0)
    steps = dpb.NoisyGD(5, 1.0, 0.3).with_noise(1.0)
    releases = [s.release(PROBLEM, N) for s in (passes, steps)]
    assert releases[0].noise_std == pytest.approx(releases[1].noise_std)
    budget = dpb.PrivacyBudget(1.0, 1e-6)
    stds = [
        dpb.calibrate(PROBLEM, s, budget, sizes=N).solver.release(PROBLEM, N).noise_std
        for s in (AllocatedGD(5, 1, 1.0, 0.3), dpb.NoisyGD(5, 1.0, 0.3))
    ]
    assert stds[1] <= stds[0] <= 1.01 * stds[1]


@pytest.mark.parametrize(
    ("field", "value"), [("num_passes", 0), ("batches", 1.5), ("clip_norm", -1.0)]
)
def test_wrong_settings_are_refused(field, value):
    settings = {"num_passes": 2, "batches": 3, "clip_norm": 1.0, "step_size": 0.1}
    with pytest.raises((TypeError, ValueError), match=f"AllocatedGD: {field} must be"):
        AllocatedGD(**(settings | {field: value}))
