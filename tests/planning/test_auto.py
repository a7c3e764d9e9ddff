"""auto: which solver, by dry runs on synthetic records."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.applications import SelectedSources
from dpbilevel.bilevel import OneLevel
from dpbilevel.planning import auto_plan
from tests.cases import slow

SIZES = dpb.Sizes(100, 3000, "disjoint")
SOURCES = dpb.source_weighting(dpb.logistic_loss, 5)
W0 = (jnp.zeros(5), jnp.zeros(6))
BUDGET = dpb.PrivacyBudget(2.0, 1e-5)
ONE = dpb.FiniteSum(dpb.logistic_loss)
FIT = dpb.NoisyGD(20, 1.0, 4.0)

LAYOUT = {
    "features": jax.ShapeDtypeStruct((3, 2), jnp.float32),
    "label": planning.Classes(3),
}


def few(problem, w0, clip_norm, records=None, intercept=None):
    """One setting of a method of one level and one of two."""
    fit = dpb.NoisyGD(20, clip_norm, 4.0)
    return (
        planning.Candidate("both", (OneLevel(fit, reads="both"),), 1),
        planning.Candidate("selected", (SelectedSources(fit, fit),), 2),
    )


@functools.cache
def plan_for(*populations):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_plan, "candidates", few)
        return dpb.auto(SOURCES, BUDGET, sizes=SIZES, w0=W0, synthetic=populations)


@functools.cache
def plan_of_one_level():
    return dpb.auto(ONE, BUDGET, sizes=2000, w0=jnp.zeros(6))


@functools.cache
def plan_of_one_method():
    with pytest.MonkeyPatch.context() as patch:
        one = planning.Candidate("NoisyGD", (FIT,), 1)
        patch.setattr(auto_plan, "candidates", lambda *_, **__: (one,))
        alike = planning.Alike()
        return dpb.auto(ONE, BUDGET, sizes=2000, w0=jnp.zeros(6), synthetic=alike)


@pytest.mark.parametrize("planned", [plan_of_one_method, *slow(plan_of_one_level)])
def test_the_plan_stays_within_the_budget_and_is_that_of_calibrate(planned):
    plan = planned()
    again = dpb.calibrate(
        ONE, plan.trials[0].solver, BUDGET, sizes=2000, w0=jnp.zeros(6)
    )
    assert plan.report.epsilon <= BUDGET.epsilon
    assert plan.report.to_json() == again.report.to_json()
    assert str(plan.solver) == str(again.solver)


@pytest.mark.slow
def test_every_method_is_listed_best_first():
    regrets = [trial.regret for trial in plan_of_one_level().trials]
    assert min(np.diff(regrets)) > -0.03  # in the order of another mean of regrets
    methods = {c.name for c in planning.candidates(ONE, jnp.zeros(6), 1.0)}
    assert {trial.method for trial in plan_of_one_level().trials} == methods


@pytest.mark.slow
def test_the_chosen_setting_is_better_than_the_start_on_fresh_records():
    plan = plan_of_one_level()
    drawn = planning.Alike(rate=0.5).draw(ONE, jnp.zeros(6), 2000, jax.random.key(77))
    w = dpb.solve(ONE, plan.solver, drawn.data, jnp.zeros(6), key=jax.random.key(1))
    loss = jnp.mean(jax.vmap(dpb.logistic_loss, (None, 0))(w.value, drawn.test))
    assert loss < 0.8 * np.log(2)


@pytest.mark.slow
def test_two_levels_are_planned_where_sources_are_good_or_bad():
    plan = plan_for(planning.GoodOrBad())
    assert plan.two_levels
    assert isinstance(plan.solver, SelectedSources)
    assert "best method of one level, both, reaches" in plan.reason
    assert "(GoodOrBad)." in plan.reason
    assert "Pass synthetic=" not in plan.reason
    assumed = "gradients have norm 1 at most, and feature -1 is the same for all"
    assert assumed in str(plan)


@pytest.mark.slow
def test_one_level_is_planned_where_all_records_are_alike():
    plan = plan_for(planning.Alike(rate=0.5))
    assert not plan.two_levels
    assert isinstance(plan.solver, OneLevel)
    assert "One level is as good here as two levels" in plan.reason
    assert "Two levels are no better at epsilon = 32 either." in plan.reason


@pytest.mark.slow
def test_a_plan_shows_why_settings_and_guarantee():
    text = str(plan_for(planning.GoodOrBad()))
    for part in ("GoodOrBad", "constant answer", "SelectedSources(", "epsilon = 2"):
        assert part in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "effort", "runs"),
    [
        (2000 * 6, "fast", 3 * 1 + 3 + 6 + 8),
        (2000 * 6 - 1, "fast", 2 * 1 + 1 + 2 + 3),
        (2000 * 6 - 1, "thorough", 3 * 2 + 6 + 22 + 22),
    ],
)
def test_large_problems_are_planned_from_fewer_settings_and_runs(
    limit, effort, runs, monkeypatch
):
    def three(*args):
        return [planning.Candidate("NoisyGD", (FIT, FIT, FIT), 1)]

    made = []
    monkeypatch.setattr(auto_plan, "candidates", three)
    monkeypatch.setattr(auto_plan, "_LARGE", limit)
    options = {"sizes": 2000, "w0": jnp.zeros(6), "effort": effort}
    dpb.auto(ONE, BUDGET, **options, progress=lambda *of: made.append(of))
    assert made[-1] == (runs, runs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"effort": "more"}, "effort"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"synthetic": []}, "at least one population"),
        ({"w0": {"a": jnp.zeros(2), "b": jnp.zeros(2)}}, "Pass records="),
        ({"records": {"rows": jnp.zeros(2)}}, "one leaf of Classes"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(changes, message):
    options = {"sizes": 100, "w0": jnp.zeros(6)} | changes
    with pytest.raises(ValueError, match=message):
        dpb.auto(ONE, BUDGET, **options)


def test_the_clip_norm_of_a_network_is_no_norm_of_features():
    problem, model = dpb.source_weighting(dpb.logistic_loss, 3), [jnp.zeros(3)] * 2
    populations = auto_plan._populations(
        problem, (jnp.zeros(3), model), 8.0, LAYOUT, None
    )
    assert {population.norm for population in populations} == {1.0}


def test_a_start_above_the_least_penalties_is_remarked():
    problem = dpb.penalty_tuning(dpb.logistic_loss, np.arange(4) // 2)
    start = dpb.applications.penalty_start(problem, jnp.zeros(4))
    assert np.array_equal(start[0], [-8.0, -8.0])
    assert auto_plan._remark_on(problem, start) == ""
    above = start[0].at[1].set(-4.0), start[1]
    assert "start at applications.penalty_start" in auto_plan._remark_on(problem, above)


def network_loss(y, record):
    hidden = jnp.tanh(jnp.ravel(record["features"]) @ y["in"])
    return -jax.nn.log_softmax(hidden @ y["out"])[record["label"]]


@pytest.mark.slow
def test_a_network_is_planned_on_records_of_the_declared_layout():
    keys = jax.random.split(jax.random.key(0))
    start = {
        "in": jax.random.normal(keys[0], (6, 8)),
        "out": jax.random.normal(keys[1], (8, 3)),
    }
    problem = dpb.source_weighting(network_loss, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_plan, "candidates", few)
        plan = dpb.auto(
            problem, BUDGET, sizes=SIZES, w0=(jnp.zeros(5), start), records=LAYOUT
        )
    # Fast: one population of sources of each kind.
    assert plan.populations == ("GoodOrBad", "Shifted", "Alike (skewed)")
    best = min(plan.trials, key=lambda trial: trial.losses[0])
    assert best.losses[0] < 0.95 * plan.start_losses[0]  # there is something to learn
    key = jax.random.key(5)
    drawn = planning.Alike(LAYOUT).draw(problem, (jnp.zeros(5), start), SIZES, key)
    assert drawn.data.lower["features"].shape == (3000, 3, 2)
    assert drawn.data.upper["label"].dtype == jnp.int32


@pytest.mark.slow
def test_a_plan_under_add_or_remove_one_is_that_of_calibrate_under_it():
    relation = dpb.Neighbours.ADD_OR_REMOVE_ONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_plan, "candidates", few)
        plan = dpb.auto(
            SOURCES,
            BUDGET,
            sizes=SIZES,
            w0=W0,
            synthetic=[planning.Alike(rate=0.5)],
            neighbours=relation,
        )
    again = dpb.calibrate(SOURCES, plan.trials[0].solver, BUDGET, sizes=SIZES, w0=W0)
    assert plan.solver.neighbours is relation
    assert plan.report.relation == "add_or_remove_one"
    assert plan.report.to_json() == again.report.to_json()


TUNING = dpb.linear_tuning(dpb.Logistic(), [0, 0, 1], bounds=(-1.0, 1.0))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:auto. The plan")  # penalties start far too large
def test_methods_with_and_without_a_certificate_are_compared_on_the_same_data():
    x = jnp.full(2, -1.0), jnp.zeros(3)
    sizes = dpb.Sizes(300, 1000, "disjoint")
    plan = dpb.auto(TUNING, BUDGET, sizes=sizes, w0=x)
    tried = {trial.method for trial in plan.trials}
    assert {"ImplicitBilevel, refitted", "ScaledGroups"} <= tried
    relation = dpb.Neighbours.ADD_OR_REMOVE_ONE
    added = dpb.auto(TUNING, BUDGET, sizes=sizes, w0=x, neighbours=relation)
    assert "ImplicitBilevel, refitted" in added.left_out
    assert added.report.relation == "add_or_remove_one"


def test_a_budget_that_no_method_reaches_is_refused_with_the_reasons():
    with pytest.raises(ValueError, match=r"no method reaches the budget.*delta = 0"):
        dpb.auto(ONE, dpb.PrivacyBudget(1.0, 0.0), sizes=100, w0=jnp.zeros(6))


@pytest.mark.slow
def test_losses_that_do_not_read_the_synthetic_data_are_refused_with_what_to_do():
    problem = dpb.FiniteSum(lambda w, z: jnp.sum(w * z["rows"]))
    with pytest.raises(ValueError, match="the loss cannot read"):
        dpb.auto(problem, BUDGET, sizes=100, w0=jnp.zeros(6))


def test_problems_without_candidates_are_refused():
    game = dpb.games.VariationalInequality(lambda w, z: w)
    with pytest.raises(TypeError, match=r"no candidates are known.*GroupDescent\(\)"):
        dpb.auto(game, BUDGET, sizes=100, w0=jnp.zeros(6))


def test_a_start_of_two_levels_that_is_no_pair_is_refused():
    problem = dpb.source_weighting(dpb.logistic_loss, 2)
    sizes = dpb.Sizes(10, 20, "disjoint")
    with pytest.raises(ValueError, match=r"w0 must be a pair \(x, y\).*got"):
        dpb.auto(problem, BUDGET, sizes=sizes, w0=jnp.zeros(17))


def test_a_solver_that_cannot_serve_a_relation_refuses_it():
    output, sizes = dpb.outputs.Last(), dpb.Sizes(100, 100, "disjoint")
    certified = dpb.ImplicitBilevel(num_steps=2, step_size=1.0, output=output)
    planned = certified.with_noise(1.0).with_sizes(sizes)
    with pytest.raises(ValueError, match="needs Neighbours"):
        planned.with_neighbours(dpb.Neighbours.ADD_OR_REMOVE_ONE)
