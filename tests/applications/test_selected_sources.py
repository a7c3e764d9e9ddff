"""SelectedSources: scores of sources, and one model of those that are kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.applications import (
    ScoringModel,
    SelectedSources,
    source_weights,
)
from dpbilevel.applications.selected_sources import score_objective
from dpbilevel.audit.worst_cases import worst_case
from dpbilevel.privacy.accounting import profiles
from tests.applications.sources import (
    DATA,
    LONG,
    RIDGE,
    SELECTED,
    TWO,
    W0,
    WEIGHTING,
    K,
    alone,
    descend,
    levels,
    long,
    of_sources,
    runs,
    scores,
)
from tests.cases import Audited, Case, planned

OF_BOTH = dataclasses.replace(SELECTED, fit_reads="both")


def squared_loss_of_two(y, record):
    """A model of two parameters, of another shape than the released one."""
    return (record["features"][1:] @ y["w"] - record["label"]) ** 2 / 4


SCORING = ScoringModel(squared_loss_of_two, {"w": jnp.zeros(2)})

SCORED = dataclasses.replace(OF_BOTH, scoring=SCORING)


def planned_selected(kind=SelectedSources, **fields):
    """For canary records; with much of the budget in each run, so that each shows.

    Among 1 000 records the released share of the one is below the least that counts:
    its noise, which would hide the noise of the fit, does not move the fit's steps.
    """
    solver = kind(TWO, TWO, budget_split=(0.3, 0.4, 0.3), **fields).with_noise(1.0)
    return solver.with_sizes(dpb.Sizes(10, 1000, "overlapping"))


def planned_fit_of_both(kind=SelectedSources):
    """The same with nearly all of it in a fit that people of either level pay for."""
    solver = kind(TWO, TWO, budget_split=(0.05, 0.05, 0.9), fit_reads="both")
    return planned(solver, "disjoint")


def planned_selected_by_another():
    """The same with a scoring model, which is the worst case's own."""
    problem, (_, start) = worst_case(planned_selected(), True, jnp.zeros(()))
    return planned_selected(scoring=ScoringModel(problem.loss, start))


CONTRACT = {
    "selected_sources": Case(WEIGHTING, SELECTED, DATA, W0, "disjoint"),
    "selected_sources_both": Case(WEIGHTING, OF_BOTH, DATA, W0, "disjoint"),
    "selected_sources_scored": Case(WEIGHTING, SCORED, DATA, W0, "overlapping"),
}
AUDITS = {
    "SelectedSources": Audited(planned_selected()),
    "SelectedSources, both levels": Audited(planned_selected(fit_reads="both")),
    "SelectedSources, another model": Audited(planned_selected_by_another()),
}


@functools.cache
def selected():
    return runs(LONG)


def test_sources_are_scored_by_signs_of_improvement_and_their_sizes():
    _, found = selected()
    np.testing.assert_allclose(found["score"], scores(found["model"]), 1e-5, 1e-7)


@pytest.mark.parametrize(
    ("field", "value"),
    [("label", jnp.nan), ("features", jnp.inf), ("source", -1), ("source", K)],
)
def test_records_that_no_model_is_fitted_to_say_nothing_about_their_source(
    field, value
):
    spoilt = {**DATA.lower, field: DATA.lower[field].at[:30].set(value)}
    with_them = scored_by(jax.tree.map(jnp.asarray, spoilt))
    rest = jax.tree.map(lambda v: v[30:], DATA.lower)
    np.testing.assert_allclose(with_them, scored_by(rest), rtol=1e-5)
    # The control: they count where nothing is wrong with them.
    assert not np.allclose(scored_by(DATA.lower), scored_by(rest), rtol=1e-2)


@jax.jit
def scored_by(lower):
    """The sums of the scores of training records by a fixed model."""
    model = jnp.array([1.0, -2.0, 0.5])
    value_of = score_objective(WEIGHTING, model, W0[1]).records["lower"]
    return jnp.sum(jax.vmap(value_of, (None, 0))(jnp.zeros((2, K)), lower), axis=0)


def test_a_source_is_kept_for_its_own_score_whatever_its_size():
    units = jnp.array([[0.96], [0.28]])
    found = {"score": units * jnp.array([[0.022, 0.04, 0.001], [0.1, 0.86, 0.001]])}
    # Scores of 0.22 and 0.05; the last is far below a tenth of the mean size.
    np.testing.assert_array_equal(LONG.kept(found), [1, 0, 0])
    assert LONG.kept_fraction(found) == pytest.approx(0.1)
    over_mean_size = 3 * found["score"][0] / 0.96
    assert not np.array_equal(over_mean_size > LONG.keep_above, [True, False, False])


@pytest.mark.slow
def test_the_model_of_kept_sources_is_a_fit_on_their_records_alone():
    (x, y), found = selected()
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(found["model"], alone(DATA.upper, long(20), 0.0), 1e-5)
    np.testing.assert_allclose(y, alone(of_sources(DATA, [0, 1]), long(30)), 1e-4)
    np.testing.assert_array_equal(y, found["fit"])


@pytest.mark.slow
def test_a_fit_on_both_levels_is_one_on_kept_and_validation_records_pooled():
    (_, y), _ = runs(dataclasses.replace(LONG, fit_reads="both"))
    kept = of_sources(DATA, [0, 1])
    kept = {name: kept[name] for name in DATA.upper}
    pooled = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), DATA.upper, kept)
    np.testing.assert_allclose(y, alone(pooled, long(30)), rtol=1e-4)


@pytest.mark.slow
def test_another_model_scores_the_sources_and_is_not_released():
    solver = dataclasses.replace(LONG, scoring=SCORING)
    (x, y), found = runs(solver)

    def mean(w, records):
        return jnp.mean(jax.vmap(SCORING.loss, (None, 0))({"w": w}, records))

    model = descend(lambda w: mean(w, DATA.upper), SCORING.start["w"], 20)
    np.testing.assert_allclose(found["model"]["w"], model, rtol=1e-4)
    expected = scores({"w": model}, SCORING.loss, SCORING.start)
    np.testing.assert_allclose(found["score"], expected, 1e-5, 1e-7)
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(y, alone(of_sources(DATA, [0, 1]), long(30)), 1e-4)


def test_a_fit_on_both_levels_is_paid_by_both():
    sizes = dpb.Sizes(30, 60, "disjoint")
    solver = dataclasses.replace(OF_BOTH, budget_split=(0.03, 0.02, 0.95))
    ledger = solver.with_noise(1.0).ledger(WEIGHTING, sizes)
    paid = {r.name.split(":")[0]: {q.role for q in r.queries} for r in ledger.releases}
    assert paid == {"model": {"upper"}, "score": {"lower"}, "fit": {"upper", "lower"}}
    for role, share in {"upper": 0.03, "lower": 0.02}.items():
        mu = (share + 0.95 / 4) ** 0.5  # half of what someone in each level moves
        assert profiles.gaussian_mu(ledger.events()[role]) == pytest.approx(mu)


def test_a_step_on_kept_sources_is_one_of_the_mean_over_their_records():
    data = levels(counts=(10, 20, 30))
    (x, y), _ = runs(LONG, data)
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)
    expected = alone(of_sources(data, [0, 1]), long(30))
    np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_a_step_on_few_kept_records_is_at_most_four_times_as_long():
    data = levels(counts=(6, 24, 30), flipped=(1, 2))
    (x, y), _ = runs(LONG, data)
    np.testing.assert_allclose(source_weights(x), [1.0, 0.0, 0.0], atol=1e-12)
    # A tenth of the records is kept: four tenths of a step on these alone.
    expected = alone(of_sources(data, [0]), long(30, 0.4 * 0.5))
    np.testing.assert_allclose(y, expected, rtol=1e-4)
    unlimited = alone(of_sources(data, [0]), long(30))
    assert not np.allclose(y, unlimited, rtol=1e-2)


@pytest.mark.slow
def test_steps_of_an_optax_rule_are_taken_as_they_are():
    rule = dpb.NoisyGD(3, 100.0, optax.sgd(0.5))
    (_, y), _ = runs(SelectedSources(long(20), rule))
    expected = alone(of_sources(DATA, [0, 1]), long(3, 0.5 * 2 / 3))
    np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_all_sources_are_kept_where_none_passes():
    data = levels(flipped=(0, 1, 2))
    (x, y), found = runs(LONG, data)
    assert jnp.all(found["score"][0] < 0)
    np.testing.assert_array_equal(x, jnp.zeros(K))
    np.testing.assert_allclose(y, alone(data.lower, long(30)), rtol=1e-4)


@pytest.mark.slow
def test_weights_are_in_the_parametrization_of_the_problem():
    simplex = dpb.source_weighting(
        dpb.logistic_loss, K, ridge=RIDGE, parametrization="simplex"
    )
    w0 = jnp.full(K, 1 / K), W0[1]
    (x, y), _ = runs(LONG, problem=simplex, w0=w0)
    np.testing.assert_allclose(x, [0.5, 0.5, 0.0])
    np.testing.assert_allclose(y, selected()[0][1], rtol=1e-5)


def test_a_record_moves_a_sign_whatever_its_length():
    # The model of the validation records, by which it is scored, does not see it.
    first = DATA.lower | {"features": DATA.lower["features"].at[0].multiply(1e6)}
    second = first | {"label": first["label"].at[0].multiply(-1)}
    scores = [
        60 * runs(LONG, dpb.Levels(DATA.upper, lower))[1]["score"]
        for lower in (first, second)
    ]
    moved = np.ravel(scores[0] - scores[1])
    np.testing.assert_allclose(np.sort(np.abs(moved)), [0, 0, 0, 0, 0, 1.92], atol=1e-5)


def test_starts_of_another_number_of_sources_are_refused():
    with pytest.raises(ValueError, match=r"x must have shape \(3,\)"):
        WEIGHTING.check((jnp.zeros(2), W0[1]), DATA)
