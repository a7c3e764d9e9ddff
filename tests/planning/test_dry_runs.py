"""Dry runs: stage by stage, in threads, and until a time limit or an interrupt."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.applications import (
    MixedSources,
    Recalibration,
    ScaledGroups,
    SelectedSources,
    WarmStarted,
)
from dpbilevel.bilevel import OneLevel, Refitted
from dpbilevel.planning import auto_plan, dry_runs, race
from tests.cases import slow

SIZES = dpb.Sizes(20, 60, "disjoint")
SOURCES = dpb.source_weighting(dpb.logistic_loss, 2)
TUNING = dpb.penalty_tuning(dpb.logistic_loss, np.arange(4) // 2)
W0 = (jnp.zeros(2), jnp.zeros(4))
FIT, FAST = dpb.NoisyGD(3, 1.0, 1.0), dpb.NoisyGD(3, 1.0, 1.0, momentum=0.5)
RECALIBRATED = WarmStarted(
    SelectedSources(FIT, FAST, fit_reads="both"), Recalibration(intercept=-1)
)
PENALTY = dpb.PenaltyBilevel(2, 10.0, FIT, clip_norm=1.0, step_size=1.0)
RELATIONS = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize(
    ("problem", "solver", "relation"),
    [
        (SOURCES, OneLevel(FIT, reads="both"), RELATIONS[1]),
        *slow(
            (SOURCES, SelectedSources(FIT, FIT), RELATIONS[0]),
            (SOURCES, RECALIBRATED, RELATIONS[0]),
            (SOURCES, MixedSources(FAST, FIT, FIT, FAST), RELATIONS[0]),
            (TUNING, ScaledGroups(FIT), RELATIONS[0]),
            (SOURCES, Refitted(PENALTY, FIT), RELATIONS[0]),
        ),
    ],
)
def test_a_dry_run_releases_what_solve_releases(problem, solver, relation):
    solver = solver.with_neighbours(relation)
    plan = dpb.calibrate(
        problem, solver, dpb.PrivacyBudget(2.0, 1e-5), sizes=SIZES, precision="float"
    )
    drawn = planning.Alike().draw(problem, W0, SIZES, jax.random.key(1))
    run = problem, plan.solver, drawn.data, W0
    found = dry_runs.released(*run, key=jax.random.key(2))
    expected = dpb.solve(*run, key=jax.random.key(2)).value
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), found, expected
    )
    other = dpb.solve(*run, key=jax.random.key(3)).value  # the control
    assert np.max(np.abs(found[1] - other[1])) > 1e-2


def test_pipelines_that_differ_in_another_stage_share_a_program():
    both = SelectedSources(FIT, FAST, fit_reads="both")
    lower = SelectedSources(FIT, FIT)
    for name, same in (("model", True), ("score", True), ("fit", False)):
        pair = [jax.tree.structure(v.for_stage(name)) for v in (both, lower)]
        assert (pair[0] == pair[1]) is same
    alike = dry_runs.accelerated(lower)
    assert alike.fit.momentum == alike.model.momentum == 0.0
    assert alike.score is lower.score
    assert dry_runs.accelerated(RECALIBRATED).then is RECALIBRATED.then


METHODS = [planning.Candidate(name, (), 1) for name in "aab"]


def stopped_after(runs, error):
    """Outcomes and constant answers of a race that stops after so many runs."""

    def dry_run(index, run):
        runs[0] -= 1
        if runs[0] < 0:
            raise error
        return [0.1 * index + 0.5]

    return race.race(METHODS, (1, 3), dry_run, lambda _: [1.0], lambda *_: None)


def test_a_stopped_race_compares_the_runs_that_all_settings_made():
    # In the first run a, b, then the other setting of a; two settings stay.
    for error in (dry_runs.Stopped(), KeyboardInterrupt()):
        found, constants = stopped_after([2], error)
        assert [(v.setting, len(v.losses)) for v in found] == [(0, 1), (2, 1)]
        found, constants = stopped_after([6], error)
        assert [len(v.losses) for v in found] == [2, 2]
        assert len(constants) == 2
        with pytest.raises(type(error)):
            stopped_after([0], error)


def test_threads_have_the_settings_of_the_caller():
    def dtype(_):
        return jnp.zeros(()).astype(float).dtype

    with jax.enable_x64(True):
        assert [*dry_runs.Workers().each(dtype, [0, 1])] == [jnp.float64] * 2
    assert [*dry_runs.Workers().each(dtype, [0])] == [jnp.float32]


def test_the_time_limit_holds_once_a_run_is_finished():
    late = dry_runs.Workers(1e-9)
    assert [*late.each(str, [1, 2])] == ["1", "2"]
    late.finished = True
    with pytest.raises(dry_runs.Stopped):
        next(late.each(str, [1]))
    assert late.stopped == "Stopped by the time limit"


ONE, BUDGET = dpb.FiniteSum(dpb.logistic_loss), dpb.PrivacyBudget(2.0, 1e-5)
OPTIONS = {"sizes": 100, "w0": jnp.zeros(3), "synthetic": planning.Alike()}


def few(problem, w0, clip_norm, records=None, intercept=None):
    """Two methods of one level, with one setting each."""
    fit = dpb.NoisyGD(3, clip_norm, 4.0)
    longer = dataclasses.replace(fit, num_steps=4)
    return planning.Candidate("short", (fit,), 1), planning.Candidate("b", (longer,), 1)


def test_every_method_is_tried_before_the_time_limit_holds(monkeypatch, capsys):
    monkeypatch.setattr(auto_plan, "candidates", few)
    seconds = itertools.count(0, 100)  # each look at the clock is late
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(dry_runs, "time", clock)

    def one_by_one(self, fun, items):  # threads run ahead
        for item in items:
            self.check()
            yield fun(item)

    monkeypatch.setattr(dry_runs.Workers, "each", one_by_one)
    with pytest.warns(UserWarning, match="Stopped by the time limit; the plan is the"):
        plan = dpb.auto(ONE, BUDGET, **OPTIONS, time_limit=1.0, progress=True)
    assert plan.report.epsilon <= 2.0
    assert {trial.method for trial in plan.trials} == {"short", "b"}
    assert {trial.runs for trial in plan.trials} == {1}
    assert plan.left_out == {}
    assert "Stopped by the time limit after 1 runs" in plan.reason
    assert "seconds on two cores" in capsys.readouterr().err.splitlines()[0]
    with pytest.raises(ValueError, match="time_limit"):
        dpb.auto(ONE, BUDGET, **OPTIONS, time_limit=0.0)


def test_a_method_that_an_interrupt_kept_from_a_trial_is_named(monkeypatch):
    real = race.DryRuns.losses

    def losses(self, solver, run):
        if solver.num_steps == 4:
            raise KeyboardInterrupt
        return real(self, solver, run)

    monkeypatch.setattr(auto_plan, "candidates", few)
    monkeypatch.setattr(race.DryRuns, "losses", losses)
    with pytest.warns(UserWarning, match="Stopped by an interrupt"):
        plan = dpb.auto(ONE, BUDGET, **OPTIONS)
    assert [trial.method for trial in plan.trials] == ["short"]
    assert "b: left out. No dry run was made before the stop." in str(plan)
