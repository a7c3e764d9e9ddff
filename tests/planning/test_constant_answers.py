"""Plans beside the best constant answer, on synthetic records that look like tables."""

import dataclasses
import math
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.applications import Recalibration, SelectedSources, WarmStarted
from dpbilevel.bilevel import OneLevel
from dpbilevel.planning import Candidate, conclusions, methods, race
from dpbilevel.planning.candidates import toml_of
from tests.cases import fast_first

D = 6
SOURCES = dpb.source_weighting(dpb.logistic_loss, 5)
W0 = jnp.zeros(5), jnp.zeros(D)
SIZES = dpb.Sizes(200, 4000, "disjoint")
ONE = dpb.FiniteSum(dpb.logistic_loss)
GD = dpb.NoisyGD(20, 1.0, 4.0)


def entropy(share):
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


def drawn(population, seed=1):
    return population.draw(SOURCES, W0, SIZES, jax.random.key(seed))


@pytest.mark.parametrize("place", [-1, 2])
def test_the_constant_answer_of_labels_is_their_entropy(place):
    features = np.random.default_rng(0).normal(size=(400, D))
    features[:, place] = 1.0
    label = np.where(np.arange(400) < 80, 1.0, -1.0)
    test = {"features": jnp.asarray(features), "label": jnp.asarray(label)}
    found = methods.constant_loss(ONE, jnp.zeros(D), test, place)
    assert found == pytest.approx(entropy(0.2), abs=1e-4)
    # Without a constant feature it is the loss of the initial point.
    start = methods.constant_loss(ONE, jnp.zeros(D), test, None)
    assert start == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.slow
def test_the_constant_answer_of_classes_is_their_entropy():
    def loss(y, record):
        return -jax.nn.log_softmax(record["features"] @ y)[record["label"]]

    label = np.repeat([0, 1, 2], [100, 60, 40])
    test = {"features": jnp.ones((200, 1)), "label": jnp.asarray(label)}
    found = methods.constant_loss(dpb.FiniteSum(loss), jnp.zeros((1, 3)), test, -1)
    shares = np.asarray([0.5, 0.3, 0.2])
    assert found == pytest.approx(-np.sum(shares * np.log(shares)), abs=1e-4)


def test_losses_are_compared_with_the_constant_answers_of_the_same_draws():
    # Draws whose labels are harder from run to run, and a method that is always better.
    method = Candidate("method", (), 1)
    runs = [0.1, 0.3, 0.9]
    found, known = race.race(
        [method],
        (1, 2),
        lambda index, number: [runs[number] - 0.05],
        lambda number: [runs[number]],
        lambda done, total: None,
    )
    ((_, losses_of_runs, missed),) = found
    assert np.mean(losses_of_runs) < np.mean(runs)
    np.testing.assert_allclose(known, [[run] for run in runs])
    assert missed == 0


def one_draw_and_all(rates):
    """Plan with synthetic labels of these rates, draw by draw."""
    left = [*rates]

    def synthetic(key, sizes):
        rate = left.pop(0) if len(left) > 1 else left[0]
        label = np.where(np.arange(sizes) < rate * sizes, 1.0, -1.0)
        return {"features": np.ones((sizes, 1)), "label": label}

    return synthetic


def test_the_constant_answer_is_that_of_all_draws_and_harm_is_warned_of():
    budget = dpb.PrivacyBudget(1.0, 1e-5)
    with pytest.warns(UserWarning, match="may be worse than the best constant answer"):
        plan = dpb.auto(
            ONE,
            budget,
            sizes=400,
            w0=jnp.zeros(1),
            synthetic=one_draw_and_all([0.02, 0.5]),
        )
    # The first draw alone has .098.
    assert plan.start_losses[0] > 0.6


@pytest.mark.parametrize(
    "population",
    fast_first([*planning.populations(SOURCES), *planning.populations(ONE)]),
)
def test_synthetic_records_have_a_constant_and_the_rate_of_tables(population):
    problem, w0, sizes = (SOURCES, W0, SIZES)
    drawn_data = population.draw(problem, w0, sizes, jax.random.key(3))
    label, features = (np.asarray(drawn_data.test[k]) for k in ("label", "features"))
    if population.rate is not None:
        assert np.mean(label > 0) == pytest.approx(population.rate, abs=0.04)
    assert features[:, -1].min() > 0
    if population.columns == "skewed":
        assert np.abs(np.mean(features[:, 0])) > 0.1  # means that are not 0
        pair = np.corrcoef(features[:, 1], features[:, 3])[0, 1]
        assert pair > 0.1


def test_sources_with_missing_positives_have_fewer_than_the_population():
    drawn_data = drawn(planning.MissingPositives(rate=0.4))
    source = np.asarray(drawn_data.data.lower["source"])
    positive = np.asarray(drawn_data.data.lower["label"]) > 0
    rates = [positive[source == k].mean() for k in range(5)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 0.39
    assert rates[-1] < 0.23
    assert np.mean(np.asarray(drawn_data.test["label"]) > 0) > 0.36


def trial(name, losses, regret, levels=2):
    return conclusions.Trial(name, None, levels, losses, regret, 5)


def test_no_method_that_is_worse_than_the_constant_answer_is_before_one_that_is_not():
    harmful = trial("better elsewhere", (0.2, 0.512), 0.1)
    harmless = trial("never worse", (0.4, 0.499), 0.4)
    starts = [0.7, 0.5]
    assert conclusions.ranked_best({1: harmful, 2: harmless}, starts) == [2, 1]
    # The control: with a constant answer that is worse, the order is the other one.
    assert conclusions.ranked_best({1: harmful, 2: harmless}, [0.7, 0.6]) == [1, 2]


def test_a_plan_that_needs_luck_does_not_improve_on_the_constant_answer():
    steady = conclusions.Trial("a", None, 2, (0.3, 0.4), 0.1, 50, (-0.2, 0.04))
    lucky = dataclasses.replace(steady, excess=(-0.2, 0.06))
    assert conclusions.improves(steady, [0.7, 0.5])
    assert not conclusions.improves(lucky, [0.7, 0.5])
    assert not conclusions.improves(steady, [0.7, 0.4])
    reason = conclusions.reason_of(
        [lucky], dpb.PrivacyBudget(1.0, 1e-5), [], [0.7, 0.5]
    )
    assert "The plan, a, may be worse than the best constant answer." in reason


def test_the_excess_of_a_run_is_over_the_constant_answer_to_its_records():
    losses, answers = [[0.5, 0.6], [0.9, 0.6]], [[0.5, 0.5], [1.0, 0.8]]
    found = conclusions.excess_of(losses, answers)
    np.testing.assert_allclose(found, [0.0, 0.1 / 0.65], rtol=1e-6)


def test_of_one_method_a_setting_that_is_never_worse_is_preferred():
    settings = trial("a", (0.2, 0.55), 0.1), trial("a", (0.4, 0.48), 0.4)
    assert conclusions.ranked_best(dict(enumerate(settings)), [0.7, 0.5]) == [1]


def kinds(w0, intercept):
    found = planning.candidates(SOURCES, w0, 1.0, None, intercept)
    return {type(solver) for method in found for solver in method.solvers}


def test_the_base_rate_is_a_candidate_of_linear_models_with_a_constant_feature():
    network = W0[0], {"a": jnp.zeros((D, 2)), "b": jnp.zeros(2)}
    assert {Recalibration, WarmStarted} <= kinds(W0, -1)
    assert kinds(W0, -1) - kinds(W0, None) == {Recalibration}
    assert not {Recalibration, WarmStarted} & kinds(network, None)


def test_methods_that_choose_sources_are_recalibrated_for_two_classes_alone():
    def names(y0):
        found = planning.candidates(SOURCES, (W0[0], y0), 1.0, None, -1)
        return {method.name for method in found}

    chosen = {"SelectedSources", "MixedSources"}
    recalibrated = {f"{name}, recalibrated" for name in chosen}
    assert names(jnp.zeros(D)) & (chosen | recalibrated) == recalibrated
    assert names(jnp.zeros((D, 3))) & (chosen | recalibrated) == chosen


def test_steps_of_candidates_are_not_longer_than_the_curvature_admits():
    models = jax.tree.leaves(
        [method.solvers for method in planning.candidates(ONE, jnp.zeros(D), 2.0)],
        is_leaf=lambda v: isinstance(v, dpb.NoisyGD),
    )
    # Logistic rows of norm 2 have a curvature of at most 1: accelerated steps diverge
    # above 1.33.
    assert max(m.step_size for m in models if m.momentum is not None) <= 1.33
    assert max(m.step_size for m in models if m.momentum is None) <= 2
    assert max(model.momentum or 0.0 for model in models) > 0.7


@pytest.mark.parametrize(
    "solver",
    [
        Recalibration(GD),
        WarmStarted(OneLevel(GD, "lower"), Recalibration(), (1.0, 1.0)),
        WarmStarted(SelectedSources(GD, GD), Recalibration(GD, GD, 2), (0.75, 0.25)),
    ],
)
def test_such_plans_can_be_written_into_a_config(solver):
    from dpbilevel.cli.config import _solver
    from dpbilevel.cli.toml_tables import Location

    tables = tomllib.loads(toml_of(solver))
    read = _solver(tables, Location("plan.toml"), solver.neighbours, type(SOURCES))
    assert str(read) == str(solver)


def test_a_place_that_is_no_feature_is_refused():
    with pytest.raises(ValueError, match="auto: intercept must be a place in y"):
        dpb.auto(
            ONE, dpb.PrivacyBudget(1.0, 1e-6), sizes=100, w0=jnp.zeros(3), intercept=3
        )
