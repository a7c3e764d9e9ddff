"""Declared trainings: what a search is charged for private training elsewhere."""

import dataclasses
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.accounting.closed_forms import gaussian_delta
from dpbilevel.privacy.ledger import Ledger
from dpbilevel.search import (
    BlackBox,
    DeclaredTraining,
    NoisyUCB,
    RandomSearch,
    RepeatAndSelect,
)
from dpbilevel.search.declared import Trainings
from tests.privacy import second_accountant
from tests.privacy.test_second_accountant import is_right

BUDGET = dpb.PrivacyBudget(2.0, 1e-5)
HISTORY = [(6.0, 0.02, 200), (40.0, 1.0, 3)]


def poisson(multiplier, rate, steps):
    """The event of private training, as dp-accounting and jax_privacy write it."""
    batch = dp_accounting.PoissonSampledDpEvent(
        rate, dp_accounting.GaussianDpEvent(multiplier)
    )
    return dp_accounting.SelfComposedDpEvent(batch, steps)


SOLVER = NoisyUCB(10, 1.0)


def planned(training, solver=SOLVER, budget=BUDGET):
    problem = BlackBox(None, 1_000, training=training, trainings_after=1)
    plan = dpb.calibrate(problem, solver, budget, sizes=1_000, w0=jnp.zeros(1))
    return plan, plan.solver.ledger(problem, 1_000)


def test_overlapping_people_are_charged_for_the_search_and_all_trainings():
    plan, _ = planned(DeclaredTraining.gdp(0.1, 50_000))
    assert plan.report.epsilon_by_person.keys() == {"records"}
    mu = math.hypot(
        1 / plan.solver.run_noise.event().noise_multiplier, 0.1 * math.sqrt(11)
    )
    assert gaussian_delta(mu, BUDGET.epsilon) == pytest.approx(BUDGET.delta, rel=1e-6)


def test_disjoint_people_are_charged_for_one_side_each():
    plan, _ = planned(DeclaredTraining.gdp(0.1, 50_000, "disjoint"))
    alone, _ = planned(None)
    noise = [p.solver.run_noise.event().noise_multiplier for p in (plan, alone)]
    assert noise[0] == pytest.approx(noise[1], rel=1e-9)
    epsilon = plan.report.epsilon_by_person["training records"]
    delta = gaussian_delta(0.1 * math.sqrt(11), epsilon)
    assert delta == pytest.approx(BUDGET.delta, rel=1e-6)


def test_poisson_batches_cost_what_the_accountant_of_dp_accounting_says():
    plan, _ = planned(DeclaredTraining(HISTORY[:1], 50_000, "disjoint"))
    claimed = plan.report.epsilon_by_person["training records"]
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE

    def peer(multiplier):
        accountant = dp_accounting.pld.PLDAccountant(relation)
        accountant.compose(poisson(multiplier, *HISTORY[0][1:]), 11)
        return accountant.get_epsilon(BUDGET.delta)

    assert claimed == pytest.approx(peer(HISTORY[0][0]), rel=1e-3)
    assert claimed > 1.5 * peer(2 * HISTORY[0][0])  # the control: half of the shift


@pytest.mark.parametrize("people", ["overlapping", "disjoint"])
@pytest.mark.parametrize("solver", [SOLVER, RandomSearch(10, 1.0)])
def test_the_second_accountant_agrees(people, solver):
    plan, ledger = planned(DeclaredTraining(HISTORY, 50_000, people), solver)
    claimed, delta = plan.report.epsilon_by_person, plan.report.delta
    assert is_right(ledger, claimed, delta) == (True, True)


def test_the_second_accountant_refuses_a_ledger_without_the_trainings():
    plan, ledger = planned(DeclaredTraining(HISTORY, 50_000))
    fewer = dataclasses.replace(ledger, releases=ledger.releases[:1])
    smaller = fewer.epsilons(plan.report.delta)
    assert smaller["records"] < 0.9 * plan.report.epsilon
    found = second_accountant.deltas(ledger, smaller)
    assert found["records"] > plan.report.delta


def test_an_event_is_the_history_it_is_made_of():
    event = dp_accounting.ComposedDpEvent(
        [poisson(*HISTORY[0]), dp_accounting.NoOpDpEvent()]
        + 3 * [dp_accounting.GaussianDpEvent(40.0)]
    )
    found = DeclaredTraining.of_event(event, 50_000)
    assert found.history == (HISTORY[0], *3 * [(40.0, 1.0, 1)])
    events = [
        Ledger((Trainings("training", 2, (), t),))
        for t in (found, DeclaredTraining(HISTORY, 50_000))
    ]
    first, second = (ledger.epsilon(1e-5) for ledger in events)
    assert first == pytest.approx(second, rel=1e-9)


def test_the_report_has_a_row_for_the_trainings_and_survives_json():
    plan, _ = planned(DeclaredTraining(HISTORY, 300, "disjoint"))
    report = plan.report
    again = dpb.privacy.PrivacyReport.from_json(report.to_json())
    assert again == report
    assert report.status is dpb.privacy.Status.CONDITIONAL
    assert "11 x training: declared, 200 steps of noise multiplier 6 on" in str(again)
    assert "nobody has a record in both the training and the evaluation data" in str(
        again
    )


def test_a_delta_that_is_large_for_the_training_records_is_warned_of():
    planned(DeclaredTraining(HISTORY, 99_999))
    with pytest.warns(UserWarning, match="is not below one over the number of records"):
        planned(DeclaredTraining(HISTORY, 100_001))


def test_a_search_with_declared_trainings_runs():
    problem = BlackBox(
        lambda point: np.abs(np.linspace(0, 1, 1_000) - point[0]),
        1_000,
        training=DeclaredTraining.gdp(0.1, 50_000),
    )
    solver = RandomSearch(10, 1.0)
    key = jax.random.key(0)
    with jax.enable_x64(True):
        found = dpb.search.minimize(
            problem, solver, jnp.zeros(1), budget=BUDGET, key=key
        )
    assert found.report.epsilon <= BUDGET.epsilon
    assert any(row.declared is not None for row in found.report.ledger)


SELECT = RepeatAndSelect(200, 1.0, mean=10.0)


@pytest.mark.slow
def test_a_selection_has_the_training_in_every_run():
    for people, with_both in (("overlapping", True), ("disjoint", False)):
        training = DeclaredTraining.gdp(0.1, 50_000, people)
        plan, ledger = planned(training, SELECT)
        selection, last = ledger.releases
        assert last.count == 1  # that of the final model
        value = 1 / plan.solver.release_noise.event().noise_multiplier
        mus = selection.run_mus(ledger.people)
        assert mus["records"] == pytest.approx(
            math.hypot(value, 0.1) if with_both else value
        )
        assert ledger.epsilon(BUDGET.delta) <= BUDGET.epsilon
        assert plan.report.status is dpb.privacy.Status.CONDITIONAL
    assert mus["training records"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="private selection has no accounting for"):
        planned(DeclaredTraining(HISTORY, 50_000), SELECT)


def test_trainings_that_cost_more_than_the_budget_are_refused():
    with pytest.raises(ValueError, match="up to 11 declared trainings"):
        planned(DeclaredTraining([(1.0, 0.02, 1_000)], 50_000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 10), "history has no phase"),
        (([(1.0, 0.1)], 10), r"\(noise_multiplier, sample_rate, num_steps\)"),
        (((1.0, 0.1, 10), 10), "history must hold"),
        (([(0.0, 0.1, 10)], 10), "noise_multiplier must be positive"),
        (([(1.0, 1.5, 10)], 10), "sample_rate must be at most 1"),
        (([(1.0, 0.1, 10.0)], 10), "num_steps must be an integer"),
        (([(1.0, 0.1, 10)], 0), "num_records must be an integer"),
        (([(1.0, 0.1, 10)], 10, "shared"), "people must be one of"),
        (([(1.0, 0.1, 10)], 10, dpb.People.SHARED), "people must be one of"),
    ],
)
def test_what_is_no_training_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeclaredTraining(*arguments)


def test_other_events_are_refused():
    event = dp_accounting.LaplaceDpEvent(1.0)
    with pytest.raises(ValueError, match=r"LaplaceDpEvent is not supported\. Give"):
        DeclaredTraining.of_event(event, 10)
