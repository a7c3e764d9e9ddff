"""Correlated noise: its sensitivity by brute force, its law, and its rounding."""

import dataclasses
import functools
import itertools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.correlated import (
    Correlated,
    CorrelatedRelease,
    rounded_feedback,
    sensitivity,
    square_root_feedback,
)
from dpbilevel.privacy.keys import wrapped
from dpbilevel.privacy.mechanisms import ROUNDING_MARGIN
from dpbilevel.privacy.queries import Query
from tests.cases import slow

RNG = np.random.default_rng(0)
FEEDBACKS = (0.5,), (0.9,), square_root_feedback(4), (0.2, 0.0, 0.3)
STEPS, VALUES = 4, 20_000


def noising(feedback, steps):
    """The inverse of the strategy matrix C."""
    return np.eye(steps) - sum(
        a * np.eye(steps, k=-lag) for lag, a in enumerate(feedback, 1)
    )


def brute_force(feedback, steps, gap):
    """Over all records, all steps that one may be in and all signs."""
    strategy = np.linalg.inv(noising(feedback, steps))
    found = 0.0
    for first in range(gap):
        places = range(first, steps, gap)
        for signs in itertools.product((-1, 0, 1), repeat=len(places)):
            found = max(found, np.linalg.norm(strategy[:, places] @ np.array(signs)))
    return found


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_the_sensitivity_is_that_of_the_worst_participation(feedback):
    for steps, gap in ((1, 1), (5, 1), (6, 2), (7, 3), (6, 6)):
        exact = brute_force(feedback, steps, gap)
        assert sensitivity(feedback, steps, gap) == pytest.approx(exact, rel=1e-8)
        assert sensitivity(feedback, steps, gap) >= exact
    # The control: one participation counted for several is too little.
    assert sensitivity(feedback, 6, 6) < 0.8 * brute_force(feedback, 6, 2)


def test_epsilon_is_that_of_dp_accounting_on_random_plans():
    for _ in range(40):
        steps, batch = int(RNG.integers(1, 40)), int(RNG.integers(1, 20))
        feedback = tuple(RNG.dirichlet(np.ones(RNG.integers(2, 5)))[1:])
        if RNG.random() < 0.5:
            sampling, gap = dpb.privacy.SinglePass(batch), 20 // batch
        else:
            sampling, gap = dpb.FullBatch(), 1
        solver = dpb.onelevel.CorrelatedGD(steps, 1.0, 0.1, feedback, sampling=sampling)
        multiplier = float(RNG.uniform(1, 20))
        solver = dataclasses.replace(solver, noise_multiplier=multiplier)
        ledger = solver.ledger(dpb.FiniteSum(lambda w, z: w), 20)
        matrix = noising(solver.feedback, steps)
        covariance = multiplier**2 * matrix @ matrix.T
        change = np.zeros(steps)
        change[::gap] = 1.0
        mu = math.sqrt(change @ np.linalg.solve(covariance, change))
        expected = dp_accounting.get_epsilon_gaussian(1 / mu, 1e-5)
        assert ledger.epsilon(1e-5) == pytest.approx(expected, rel=1e-4)
        assert ledger.epsilon(1e-5) >= expected * (1 - 1e-9)


class Forgetful(Correlated):
    """The fed-back noise of the first lag is left out."""

    def integers(self, shapes, doublings, *, key):
        less = dataclasses.replace(self, feedback=(0.0, *self.feedback[1:]))
        return Correlated.integers(less, shapes, doublings, key=key)


class Reused(Correlated):
    """The noise of the step itself is fed back, not that of the step before."""

    def integers(self, shapes, doublings, *, key):
        words = jax.random.key_data(key)
        earlier = jnp.broadcast_to(words, self.earlier.shape)
        again = dataclasses.replace(self, earlier=earlier)
        return Correlated.integers(again, shapes, doublings, key=key)


def released(kind, feedback, precision, value, seeds):
    """The releases of a run at a constant value, and its sensitivity at one step."""
    records = jnp.full((10, VALUES), value, jnp.float32)
    query = Query("records", 10, 1.0)
    read = functools.partial(query.read, lambda z: z, precision=precision, key=None)
    bounded = jax.jit(read)(records)

    @jax.jit
    def step(earlier, words, t):
        mechanism = kind(2.0, precision=precision, feedback=feedback, num_steps=STEPS)
        mechanism = dataclasses.replace(mechanism, earlier=earlier, step=t)
        return mechanism.release(bounded, key=wrapped(words, "chacha20"))

    found, earlier = [], jnp.zeros((len(feedback), 8), jnp.uint32)
    for t, words in enumerate(seeds):
        found.append(np.asarray(step(earlier, words, t), np.float64))
        earlier = jnp.concatenate([jnp.asarray(words)[None], earlier[:-1]])
    return np.array(found), bounded.sensitivity(dpb.Neighbours.REPLACE_ONE)


@functools.cache
def covariance(kind, feedback, precision):
    seeds = np.random.default_rng(1).integers(2**32, size=(STEPS, 8), dtype=np.uint32)
    noise, unit = released(kind, feedback, precision, 0.0, seeds)
    return np.cov(noise / (2.0 * float(unit)))


def is_the_law(found, feedback):
    matrix = noising(feedback, STEPS)
    return np.abs(found - matrix @ matrix.T).max() < 6 * 2 / math.sqrt(VALUES)


@pytest.mark.parametrize("precision", ["float", *slow("grid")])
def test_noise_has_the_covariance_of_the_noising_matrix(precision):
    feedback = rounded_feedback((0.6, 0.25))
    assert is_the_law(covariance(Correlated, feedback, precision), feedback)
    # The controls: a coefficient left out, and a step's own noise fed back.
    for broken in (Forgetful, Reused):
        assert not is_the_law(covariance(broken, feedback, precision), feedback)


def test_noise_and_value_are_added_exactly_on_the_grid():
    seeds = np.random.default_rng(2).integers(2**32, size=(2, 8), dtype=np.uint32)
    first, unit = released(Correlated, (0.5,), "grid", 0.0, seeds)
    second, _ = released(Correlated, (0.5,), "grid", 0.25 / VALUES**0.5, seeds)
    moved = second - first
    # The same bits of noise: only rounding of the released numbers is left.
    scale = float(unit) * 2.0 * 2.0**-22
    np.testing.assert_allclose(moved, 0.25 / VALUES**0.5, atol=4 * scale)


def joint_change(feedback, steps, gap, contribution, seed):
    """Norm of the shifts of fresh noise between neighbours with the same releases.

    In integers, as on a grid with this contribution of a record in steps.
    """
    rng = np.random.default_rng(seed)
    numerators = [int(a * 2**15) for a in feedback]

    def fed_back(noise, t):
        pairs = ((m, noise[t - lag]) for lag, m in enumerate(numerators, 1) if lag <= t)
        return sum((m * z + 2**14) >> 15 for m, z in pairs)

    ours, theirs = [], []
    for t in range(steps):
        ours.append(int(rng.normal() * 4 * contribution))
        change = contribution if t % gap == 0 else 0
        answer = ours[t] - fed_back(ours, t)  # at a value of zero
        theirs.append(answer - change + fed_back(theirs, t))
    shifts = (a - b for a, b in zip(ours, theirs, strict=True))
    return math.sqrt(sum(v**2 for v in shifts))


@pytest.mark.parametrize(("feedback", "steps"), [((0.97,), 400), ((0.5, 0.3), 100)])
def test_rounding_of_earlier_noise_stays_within_the_margin_on_every_path(
    feedback, steps
):
    mechanism = Correlated(1.0, feedback=feedback, num_steps=steps)

    def excess(gap, contribution, seed):
        joint = sensitivity(mechanism.feedback, steps, gap)
        run = mechanism.feedback, steps, gap, contribution, seed
        return joint_change(*run) / contribution / joint

    # One coordinate: the step is at most 2**-13 of a contribution, and finer.
    fine = 2 ** (13 + mechanism.finer)
    found = [excess(gap, fine, seed) for gap in (1, 10, steps) for seed in range(3)]
    assert min(found) > 1 - 1e-3
    assert max(found) <= 1 + ROUNDING_MARGIN / 4
    # The control: steps as coarse as a tenth of a contribution break the bound.
    assert max(excess(steps, 10, seed) for seed in range(3)) > 1 + ROUNDING_MARGIN


def ledger_of(count=6, **fields):
    solver = dpb.onelevel.CorrelatedGD(count, 1.0, 0.1, (0.5,), **fields)
    solver = dataclasses.replace(solver, noise_multiplier=3.0)
    return solver, solver.ledger(dpb.FiniteSum(lambda w, z: w), 20)


def test_a_run_is_charged_once_and_its_parts_cost_less():
    solver, ledger = ledger_of()
    (event,) = ledger.events()["records"].events
    assert event.noise_multiplier == pytest.approx(3 / sensitivity((0.5,), 6, 1))
    problem = dpb.FiniteSum(lambda w, z: w)
    parts = [solver.ledger_of_steps(problem, 20, n).epsilon(1e-5) for n in (1, 3, 6)]
    assert parts[0] < parts[1] < parts[2] == ledger.epsilon(1e-5)
    alone = dpb.onelevel.NoisyGD(1, 1.0, 0.1, noise_multiplier=3.0)
    assert parts[0] == pytest.approx(alone.ledger(problem, 20).epsilon(1e-5))
    # Two runs share no noise: their costs compose.
    twice = ledger.repeat(2)
    assert len(twice.events()["records"].events) == 2
    assert "charged as one" in ledger.releases[0].notes[0]


@pytest.mark.parametrize("sampling", [dpb.Poisson(0.5), dpb.FixedSize(4)])
def test_sampling_without_a_fixed_gap_is_refused(sampling):
    with pytest.raises(ValueError, match="correlated noise is not accounted for"):
        ledger_of(sampling=sampling)
    query = Query("records", 20, 1.0, sampling)
    with pytest.raises(ValueError, match="correlated noise is not accounted for"):
        CorrelatedRelease("value", 2, (query,), Correlated(1.0))


def test_what_is_not_accounted_for_is_refused():
    query = Query("records", 20, 1.0)
    with pytest.raises(ValueError, match="depends on that of other releases"):
        dpb.privacy.Release("value", 2, (query,), Correlated(1.0, num_steps=2))
    with pytest.raises(TypeError, match="mechanism"):
        CorrelatedRelease("value", 2, (query,), dpb.privacy.Gaussian(1.0))
    for feedback in ((), (-0.1,), (0.5, 0.5)):
        with pytest.raises(ValueError, match="sum is below 1"):
            Correlated(1.0, feedback=feedback)
    with pytest.raises(ValueError, match="no grid is fine enough"):
        Correlated(1.0, feedback=(1 - 2.0**-15,), num_steps=10**6)
    relation = dpb.Neighbours.ADD_OR_REMOVE_ONE
    _, ledger = ledger_of(sampling=dpb.privacy.SinglePass(4), neighbours=relation)
    with pytest.raises(ValueError, match="replace"):
        ledger.events()


def test_the_inverse_square_root_begins_with_its_series():
    assert square_root_feedback(4) == (0.5, 0.125, 0.0625)
