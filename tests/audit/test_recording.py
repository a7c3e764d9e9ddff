"""What an outside auditor records and replays; broken copies are caught."""

import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.audit import record, replay
from dpbilevel.privacy.queries import Query
from tests.cases import ROOT, slow
from tests.contract.recorded import calibrated

KEY = jax.random.key(0)
W0 = np.zeros(3, np.float32)
SIZE = 8
ROWS = np.random.default_rng(0).normal(size=(SIZE, 3)).astype(np.float32)
BUDGET = dpb.PrivacyBudget(1.0, 1e-3)


def loss(w, record):
    return jnp.sum((w - record) ** 2) / 2


PROBLEM = dpb.FiniteSum(loss)


def plan_of(kind=dpb.NoisyGD, neighbours="replace_one"):
    relation = dpb.Neighbours(neighbours)
    solver = kind(3, 1.0, 0.5, neighbours=relation)
    plan = dpb.calibrate(PROBLEM, solver, BUDGET, sizes=SIZE, precision="float")
    return plan


def neighbours_of(relation):
    """Two data sets that differ in one record, which is far outside of the clip."""
    data = ROWS.copy()
    data[-1] = 1e3
    if relation == "add_or_remove_one":
        return data, data[:-1]
    other = data.copy()
    other[-1] = -1e3
    return data, other


def replayed(plan, relation="replace_one"):
    def run(data):
        return dpb.solve(PROBLEM, plan.solver, data, W0, key=KEY)

    return replay(run, *neighbours_of(relation))


class ClipsTheBatch(Query):
    """A query that clips the mean of a batch, and claims what clipped records have."""

    def read(self, fun, records, *, key=None, **options):
        def whole(_):
            return jax.tree.map(lambda v: v.mean(0), jax.vmap(fun)(records))

        return super().read(whole, records, key=key, **options)


class ClipsTheBatchGD(dpb.NoisyGD):
    """A solver that clips the batch instead of the record."""

    def release(self, problem, sizes):
        release = super().release(problem, sizes)
        (query,) = release.queries
        broken = ClipsTheBatch(query.role, query.size, query.clip_norm, query.sampling)
        return dataclasses.replace(release, queries=(broken,))


class ForgetsNoise(dpb.NoisyGD):
    """A solver with half of the noise in its steps, which its ledger does not say."""

    def step(self, problem, data, state, *, key):
        quiet = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 2)
        return dpb.NoisyGD.step(quiet, problem, data, state, key=key)


class AnswersWithTheMean(dpb.NoisyGD):
    """A solver that adds the raw mean of the records to its last iterate."""

    def step(self, problem, data, state, *, key):
        state = super().step(problem, data, state, key=key)
        last = jnp.where(state.t == 3, jnp.mean(data, 0), 0.0)
        return dataclasses.replace(state, w=state.w + last)


class AddsNoNoise(dpb.NoisyGD):
    """A solver whose steps add no noise, which its ledger does not say."""

    def step(self, problem, data, state, *, key):
        silent = dataclasses.replace(self, noise_multiplier=0 * self.noise_multiplier)
        return dpb.NoisyGD.step(silent, problem, data, state, key=key)


@pytest.mark.parametrize("relation", ["replace_one", *slow("add_or_remove_one")])
def test_a_right_solver_moves_at_most_one_sensitivity_and_by_all_of_it(relation):
    plan = plan_of(neighbours=relation)
    found = replayed(plan, relation)
    assert found.passed
    assert len(found.pairs) == 3
    np.testing.assert_allclose(found.movements, 1.0, atol=1e-3)
    assert found.mu == pytest.approx(plan.report.mu, rel=1e-3)
    assert "no violation found" in str(found)
    assert "3 x gradient: at most" in str(found)


def test_a_solver_that_clips_the_batch_instead_of_the_record_is_caught():
    found = replayed(plan_of(ClipsTheBatchGD))
    assert found.largest > 2
    assert not found.passed
    assert "VIOLATION" in str(found)


def test_an_answer_with_records_that_were_not_released_is_caught():
    found = replayed(plan_of(AnswersWithTheMean))
    assert found.largest == pytest.approx(1.0, abs=1e-3)  # each release is right
    assert not found.same_answer
    assert not found.passed
    assert "the answer depends on records, but through no release" in str(found)


def test_steps_without_noise_are_caught():
    found = replayed(plan_of(AddsNoNoise))
    assert found.largest == pytest.approx(1.0, abs=1e-3)
    assert found.same_answer
    assert found.mu == np.inf
    assert not found.passed
    assert "mu is inf" in str(found)


@pytest.mark.parametrize("relation", ["replace_one", *slow("add_or_remove_one")])
def test_answers_are_compared_number_by_number(relation):
    plan = plan_of(neighbours=relation)

    def run(data, bad=0.0):
        found = dpb.solve(PROBLEM, plan.solver, data, W0, key=KEY, trajectory=True)
        return found, KEY, "text", np.float64(np.nan), None, bad

    pair = neighbours_of(relation)
    assert replay(run, *pair).passed
    assert not replay(lambda data: run(data, data.sum()), *pair).passed
    assert not replay(lambda data: run(data, data), *pair).passed


def test_noise_that_the_ledger_overstates_is_caught_by_mu():
    plan = plan_of(ForgetsNoise)
    found = replayed(plan)
    assert found.passed  # the sensitivity is right
    assert found.mu > 1.9 * plan.report.mu


@pytest.mark.slow
def test_a_run_that_is_recorded_is_the_same_run():
    plan = plan_of()
    run = jax.jit(lambda key: dpb.solve(PROBLEM, plan.solver, ROWS, W0, key=key).value)
    before = run(KEY)  # compiled without a record
    with record() as releases:
        during = run(KEY)
    after = run(KEY)
    np.testing.assert_array_equal(before, during)
    np.testing.assert_array_equal(before, after)
    assert len(releases) == 3  # and no later run adds to them


def test_a_run_of_another_thread_is_not_recorded_and_compiled_as_without_a_record():
    plan = plan_of()
    other = jax.jit(lambda key: dpb.solve(PROBLEM, plan.solver, -ROWS, W0, key=key))
    found = []
    thread = threading.Thread(target=lambda: found.append(other(KEY).value))
    with record() as releases:
        thread.start()
        thread.join()
        dpb.solve(PROBLEM, plan.solver, ROWS, W0, key=KEY)
    assert len(releases) == 3
    assert "callback" not in other.lower(KEY).as_text()
    np.testing.assert_array_equal(found[0], other(KEY).value)


def test_a_record_has_what_the_ledger_declares():
    plan = plan_of()
    with record() as releases:
        dpb.solve(PROBLEM, plan.solver, ROWS, W0, key=KEY)
    (row,) = plan.report.ledger
    assert {r.name for r in releases} == {row.release}
    assert {r.mechanism for r in releases} == {row.mechanism}
    assert len(releases) == row.count
    for release in releases:
        assert release.sensitivity == pytest.approx(row.roles["records"].sensitivity)
        assert release.multiplier == pytest.approx(row.noise_multiplier)
        assert release.noise_std == pytest.approx(row.noise_std)
    w, clipped = W0, [r / max(1.0, np.linalg.norm(r)) for r in W0 - ROWS]
    np.testing.assert_allclose(releases[0].noiseless[0], np.mean(clipped, 0), atol=1e-3)
    for release in releases:  # the states follow the released values
        w = w - 0.5 * release.released[0]
    final = dpb.solve(PROBLEM, plan.solver, ROWS, W0, key=KEY).value
    np.testing.assert_allclose(w, final, atol=1e-5)


def test_both_runs_of_a_replay_take_the_steps_of_the_first():
    found = replayed(plan_of())
    for first, second in found.pairs:
        assert first.key == second.key
    # The second raw value is that of the neighbour at the released iterate.
    w, (_, other) = W0 - 0.5 * found.pairs[0][0].released[0], neighbours_of("")
    far = [r / max(1.0, np.linalg.norm(r)) for r in w - other]
    np.testing.assert_allclose(
        found.pairs[1][1].noiseless[0], np.mean(far, 0), atol=1e-3
    )


def test_a_draw_is_recorded_but_its_scores_are_not_opened():
    problem, solver, data, w0 = calibrated("exponential")
    with record() as releases:
        drawn = dpb.solve(problem, solver, data, w0, key=KEY).value
    (draw,) = releases
    assert (draw.mechanism, draw.noiseless) == ("Exponential", ())
    assert np.isnan(draw.noise_std)
    assert draw.multiplier == pytest.approx(solver.mechanism.epsilon)
    np.testing.assert_allclose(draw.released[0], drawn)


def test_runs_that_cannot_be_compared_are_refused_with_the_reason():
    plan = plan_of()
    keys = iter(jax.random.split(KEY, 2))

    def another_key(data):
        return dpb.solve(PROBLEM, plan.solver, data, W0, key=next(keys))

    pair = neighbours_of("replace_one")
    with pytest.raises(ValueError, match="give both the same key"):
        replay(another_key, *pair)
    with pytest.raises(ValueError, match="makes no release with noise"):
        replay(lambda data: data, *pair)


@pytest.mark.slow
def test_the_code_of_the_page_runs_and_its_test_passes():
    text = (ROOT / "docs/outside_audit.md").read_text()
    names = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    names["test_one_record_moves_no_release_by_more_than_declared"]()
