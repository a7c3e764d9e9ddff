"""Estimators whose records are people with several rows."""

import dataclasses

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.privacy.records.people import PersonUnit, combined
from dpbilevel.sklearn import (
    DPLogisticRegression,
    DPMLPClassifier,
    DPRidge,
    DPSourceReweighting,
    FairClassifier,
)
from dpbilevel.sklearn.beforehand import PublicSize, Rows, in_bins
from dpbilevel.sklearn.logistic import Effects, rows_of
from dpbilevel.sklearn.ridge import comparisons
from tests.cases import fast_first

KEY = 0
RNG = np.random.default_rng(0)
X = RNG.normal(size=(320, 2))
Y = (X[:, 0] > X[:, 1]).astype(int)
SIDES = np.where(RNG.random(len(X)) < 0.5, "left", "right")
DECLARED = {"classes": [0, 1], "bounds": (-4, 4), "delta": 1e-3}
ESTIMATORS = [
    (DPLogisticRegression(8.0, **DECLARED), "groups", {}),
    (DPRidge(8.0, 1e-3, bounds=(-4, 4), target_bounds=(0, 1)), "groups", {}),
    (DPMLPClassifier(8.0, max_iter=5, **DECLARED), "groups", {}),
    (
        FairClassifier(8.0, shares={"left": 0.5, "right": 0.5}, **DECLARED),
        "person",
        {"groups": SIDES},
    ),
]
estimators = pytest.mark.parametrize(("model", "name", "more"), fast_first(ESTIMATORS))


@pytest.mark.slow
@estimators
def test_people_of_one_row_have_the_model_of_records(model, name, more):
    given = more | {"key": jax.random.key(KEY)}
    alone = model.fit(X, Y, **given).predict(X)
    people = dataclasses.replace(model, most_rows=1).fit(
        X, Y, **given, **{name: np.arange(len(X))}
    )
    np.testing.assert_allclose(people.predict(X), alone, atol=1e-3)
    assert people.privacy_report_.unit == "one person (at most 1 row each)"


@estimators
def test_a_fit_on_people_plans_for_their_number(model, name, more):
    ids = np.arange(len(X)) // 4
    fitted = model.fit(X, Y, **more, **{name: ids}, key=jax.random.key(KEY))
    report = fitted.privacy_report_
    assert report.unit == "one person (at most 8 rows each)"
    sizes = {p.records for row in report.ledger for p in row.roles.values()}
    assert sizes == {80}


BINS, FEATURES = 14, 2
FIRST_RELEASES = {
    "lengths": (lambda v: in_bins(v / 4), 1.0),
    "effects": (
        lambda v: rows_of(v, (v[:, 0] > 0).astype(int), 2),
        Effects(
            dpb.PrivacyBudget(1.0, 1e-6),
            PublicSize(Neighbours.REPLACE_ONE, 100),
            2,
            FEATURES,
        ).terms.clip_norm,
    ),
    "sides": (lambda v: comparisons(v[:, 0], 0.0, 0.5), 0.5),
}


@pytest.mark.parametrize("name", FIRST_RELEASES)
def test_eight_rows_move_a_first_release_no_more_than_one_row(name):
    fun, clip_norm = FIRST_RELEASES[name]
    unit = PersonUnit(8)
    for scale in (1.0, 1e30, np.inf):
        rows = np.clip(RNG.normal(size=(64, FEATURES)) * scale, -1, 1) / FEATURES**0.5
        rows[::2] = rows[0]  # all rows of half of the people are the same
        people = Rows(np.arange(64) // 8, unit)
        means = combined(fun, people.records(rows), unit)
        norms = np.linalg.norm(means, axis=1)
        assert norms.max() <= clip_norm * (1 + 1e-6)
        # The control: the sum of the rows of a person is up to eight times as long.
        sums = np.add.reduceat(fun(rows), np.arange(0, 64, 8))
        assert np.linalg.norm(sums, axis=1).max() > clip_norm


def test_ids_in_both_levels_contradict_disjoint_people():
    model = DPSourceReweighting(sources=["left", "right"], **DECLARED)
    ids = np.arange(len(X)) // 4
    texts = set()
    for shared in (1, 40):
        clean = X[:160].copy(), Y[:160], ids[:160] + 80 - shared
        with pytest.raises(ValueError, match="an id is in both levels") as error:
            model.fit(X, Y, SIDES, clean, groups=ids, people="disjoint")
        texts.add(str(error.value))
    assert len(texts) == 1


def test_ids_must_be_given_for_both_levels():
    model = DPSourceReweighting(sources=["left", "right"], **DECLARED)
    with pytest.raises(ValueError, match=r"clean must be \(X, y, groups\)"):
        model.fit(X, Y, SIDES, (X, Y), groups=np.arange(len(X)))


def test_a_search_of_private_training_takes_no_ids():
    training = dpb.search.DeclaredTraining([(1.1, 0.01, 100)], num_records=320)
    search = dpb.PrivateSearch(
        DPRidge(bounds=(-4, 4), target_bounds=(0, 1)),
        {"ridge": dpb.search.Range(0.1, 1.0)},
        dpb.PrivacyBudget(8.0, 1e-3),
        solver=dpb.search.RandomSearch(2, 1.0),
        losses=lambda estimator, X, y: X[:, 0],
        training=training,
    )
    with pytest.raises(ValueError, match="takes no ids of people"):
        search.fit(X, Y, validation=(X, Y, np.arange(len(X))))


def test_a_search_takes_the_mean_loss_of_a_person():
    def losses(estimator, X, y):
        return X[:, 0] + estimator.alpha

    from sklearn.linear_model import Ridge

    search = dpb.PrivateSearch(
        Ridge(),
        {"alpha": dpb.search.Range(0.5, 1.0)},
        dpb.PrivacyBudget(1.0, 1e-3),
        losses=losses,
        most_rows=2,
    )
    pair, people = search._by_person((X, Y, np.arange(len(X)) // 4))
    of_people = search._rows(X, Y).black_box(*pair, people)(np.zeros(1))
    rows = search._rows(X, Y).black_box(*pair)(np.zeros(1))
    np.testing.assert_allclose(of_people, rows.reshape(-1, 4)[:, :2].mean(1))
