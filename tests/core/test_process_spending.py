"""The private runs of a process: which are counted, what is said, what they add to."""

import math
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core.process_spending import ProcessRun, ProcessSpending

PROBLEM = dpb.FiniteSum(lambda w, z: w * z)
SOLVER = dpb.NoisyGD(2, 1.0, 0.1)
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
RECORDS = jnp.ones(30)


def fitted(records=RECORDS, budget=BUDGET, key=0):
    key = dpb.root_key() if key is None else jax.random.key(key)
    return dpb.fit(PROBLEM, SOLVER, records, jnp.zeros(()), budget=budget, key=key)


def solved(solver, records=RECORDS):
    return dpb.solve(PROBLEM, solver, records, jnp.zeros(()), key=jax.random.key(1))


def row(epsilon=1.0, delta=1e-5, **fields):
    found = {"relation": "replace_one", "people": "", "records": "30 records"} | fields
    return ProcessRun("fit: NoisyGD", epsilon, delta, **found)


@pytest.mark.slow
def test_the_second_run_on_records_of_a_shape_warns_and_the_third_does_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpb.PrivacyWarning)
        fitted(key=None)
        fitted(jnp.ones(31), key=None)
        with pytest.warns(dpb.PrivacyWarning, match=r"epsilon = 2 at delta = 2e-05"):
            fitted(key=None)
        fitted(key=None)


def test_the_second_run_with_a_key_warns_on_any_records():
    fitted()
    with pytest.warns(dpb.PrivacyWarning, match="used the same key"):
        fitted(jnp.zeros(30))
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpb.PrivacyWarning)
        fitted(jnp.full(30, 2.0))  # said once for each key
        fitted(jnp.full(30, 3.0), key=5)


def test_runs_are_listed_in_order_with_their_total():
    plan = dpb.calibrate(PROBLEM, SOLVER, dpb.PrivacyBudget(0.5, 1e-6), sizes=30)
    fitted()
    solved(plan.solver)
    solved(plan.solver)
    first, last = dpb.spent().runs
    assert first.method == "fit: NoisyGD"
    assert (last.method, last.times) == ("solve: NoisyGD", 2)
    assert (first.epsilon, first.delta) == pytest.approx((1.0, 1e-5), rel=1e-4)
    assert dpb.spent().epsilon == pytest.approx(2.0, rel=1e-4)
    assert dpb.spent().delta == pytest.approx(1.2e-5)
    assert "30 records" in str(dpb.spent())


def test_a_run_without_a_plan_says_what_it_costs(capsys):
    solver = dpb.NoisyGD(100, 1.0, 0.1, noise_multiplier=10.0)
    solved(solver)
    found = dpb.spent().runs[0]
    assert found.delta == 1e-3  # a tenth of 1/n, rounded down to a power of ten
    expected = solver.ledger(PROBLEM, 30).epsilon(1e-3)
    assert found.epsilon == expected
    said = capsys.readouterr().err
    assert "without a plan, this run costs epsilon = " in said
    solved(solver)  # the same object: it is said once
    assert capsys.readouterr().err == ""


def test_what_jax_traces_and_what_fails_is_no_run():
    plan = dpb.calibrate(PROBLEM, SOLVER, BUDGET, sizes=30)
    args = PROBLEM, plan.solver, RECORDS, jnp.zeros(())
    jax.jit(dpb.solve)(*args, key=jax.random.key(0))
    with pytest.raises(ValueError, match="plan is for 30"):
        solved(plan.solver, jnp.ones(31))
    with pytest.raises(ValueError, match="no noise multiplier yet"):
        solved(SOLVER)
    assert dpb.spent().runs == ()
    assert "no private run" in str(dpb.spent())


def test_a_run_whose_callback_fails_counts_in_full():
    seen = []

    def stop(run):
        seen.append(dpb.spent())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dpb.fit(
            PROBLEM,
            SOLVER,
            RECORDS,
            jnp.zeros(()),
            budget=BUDGET,
            key=jax.random.key(0),
            callback=stop,
        )
    assert seen[0].epsilon == pytest.approx(1.0, rel=1e-4)  # before the first call
    assert dpb.spent() == seen[0]


def test_a_search_counts_from_its_first_release_on():
    def search():
        box = dpb.search.BlackBox(None, 5, dpb.sets.Box(0.0, 1.0))
        solver = dpb.search.RandomSearch(4, 1.0)
        budget = dpb.PrivacyBudget(0.25, 0.0)
        return dpb.search.AskTell(
            box, solver, np.zeros(1), key=jax.random.key(0), budget=budget
        )

    search().ask()
    assert dpb.spent().runs == ()
    for _ in range(2):
        begun = search()
        begun.tell(np.ones((len(begun.ask()), 5)))
    (found,) = dpb.spent().runs
    assert (found.method, found.times) == ("AskTell: RandomSearch", 2)
    assert dpb.spent().epsilon == pytest.approx(0.5, rel=1e-4)


def test_the_second_search_with_a_key_warns():
    box = dpb.search.BlackBox(None, 5, dpb.sets.Box(0.0, 1.0))
    given = box, dpb.search.RandomSearch(4, 1.0), np.zeros(1)
    budget = dpb.PrivacyBudget(0.25, 0.0)
    dpb.search.AskTell(*given, key=jax.random.key(0), budget=budget)
    with pytest.warns(dpb.PrivacyWarning, match="used the same key"):
        dpb.search.AskTell(*given, key=jax.random.key(0), budget=budget)


def test_a_search_that_trains_privately_counts_before_its_first_training():
    def losses(point):
        raise RuntimeError("after a training")

    training = dpb.search.DeclaredTraining([(20.0, 1.0, 1)], num_records=100)
    box = dpb.search.BlackBox(losses, 5, dpb.sets.Box(0.0, 1.0), training=training)
    with pytest.raises(RuntimeError, match="after a training"):
        dpb.search.minimize(
            box,
            dpb.search.NoisyUCB(2, 1.0),
            np.zeros(1),
            key=jax.random.key(0),
            budget=BUDGET,
        )
    assert dpb.spent().epsilon == pytest.approx(1.0, rel=1e-3)


def test_runs_of_threads_are_all_counted():
    plan = dpb.calibrate(PROBLEM, SOLVER, BUDGET, sizes=30)
    solved(plan.solver)
    threads = [threading.Thread(target=solved, args=(plan.solver,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(run.times for run in dpb.spent().runs) == 9


def test_under_different_relations_there_is_no_total():
    spent = ProcessSpending((row(), row(relation="add_or_remove_one")))
    assert spent.epsilon == math.inf
    assert "no total is stated" in str(spent)


def test_a_notebook_shows_the_total_as_escaped_text():
    page = ProcessSpending((row(records="<script>"),))._repr_html_()
    assert page.startswith("<pre>spending")
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
