"""Weights of classes are declared, and so are bins in place of numbers."""

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import dpbilevel as dpb
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.sklearn import DPLogisticRegression, DPMLPClassifier, DPRidge
from dpbilevel.sklearn.beforehand import PublicSize
from dpbilevel.sklearn.declared import frame, weights_of
from dpbilevel.sklearn.logistic import Effects
from tests.cases import slow

N = 4000
RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (N, 2))
Y = (RNG.random(N) < 1 / (1 + np.exp(2 - X @ [2.0, -1.0]))).astype(int)
CLASSES = np.asarray([0, 1])


def test_weights_count_relative_to_the_largest():
    assert weights_of("fit", CLASSES, None) is None
    for weights in ({1: 4}, {0: 10, 1: 40.0}):
        np.testing.assert_array_equal(weights_of("fit", CLASSES, weights), [0.25, 1])


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ("balanced", "would read the records"),
        ({2: 1.0}, "a dict of declared classes"),
        ([1, 2], "a dict of declared classes"),
        ({0: 0.0}, "class_weight"),
        ({0: float("nan")}, "class_weight"),
    ],
)
@pytest.mark.parametrize("kind", [DPLogisticRegression, DPMLPClassifier])
def test_weights_that_are_not_declared_are_refused(kind, weights, text):
    model = kind(classes=[0, 1], bounds=(-1, 1), class_weight=weights)
    with pytest.raises(ValueError, match=text):
        model.fit(X, Y)


WEIGHTS = [(0.2, 1.0), *slow(((1.0, 1.0),), ((0.3, 1.0, 0.6),))]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_start_and_the_ridge_are_those_of_the_weighted_loss(weights, getkey):
    weights, count = np.asarray(weights), len(weights)
    rng = np.random.default_rng(1)
    labels = rng.choice(count, 20_000, p=(0.8, 0.2) if count == 2 else (0.5, 0.3, 0.2))
    features = rng.uniform(-0.3, 0.3, (20_000, 3))
    features[:, 0] += 0.3 + 0.2 * (labels == count - 1)
    budget = dpb.PrivacyBudget(50.0, 1e-5)
    public = PublicSize(Neighbours.REPLACE_ONE, 20_000)
    effects = Effects(budget, public, count, 3, True, weights)
    given = {"key": getkey(), "owner": "fit"}
    rates, ridge = effects.rates_and_ridge(
        {"features": features, "label": labels}, **given
    )
    own = weights[labels]
    one_hot = np.eye(count)[labels]
    expected = (own @ one_hot) / own.sum()
    np.testing.assert_allclose(rates, expected, atol=0.01)
    gradient = (own[:, None] * (one_hot - expected)).T @ features / len(features)
    spread = np.square(features - features.mean(0)).sum(1).mean()
    trace = own.mean() * spread * (1 - expected @ expected)
    strength = np.square(gradient).sum()
    assert ridge == pytest.approx(trace / (2 * strength), rel=0.1)


@pytest.mark.slow
def test_a_weighted_fit_is_that_of_weighted_records():
    model = DPLogisticRegression(
        30.0, classes=[0, 1], bounds=(-1, 1), class_weight={0: 1, 1: 4}
    ).fit(X, Y, key=jax.random.key(0))
    exact = LogisticRegression(C=1e6, class_weight={0: 1, 1: 4}).fit(X, Y)
    np.testing.assert_allclose(model.coef_, exact.coef_, atol=0.3)
    found = model.predict_proba(X)[:, 1].mean()
    assert found == pytest.approx(exact.predict_proba(X)[:, 1].mean(), abs=0.03)
    assert found > Y.mean() + 0.15  # probabilities are of the weighted law


@pytest.mark.slow
def test_a_network_learns_the_weighted_law():
    model = DPMLPClassifier(
        30.0, classes=[0, 1], bounds=(-1, 1), class_weight={0: 1, 1: 4}, max_iter=30
    ).fit(X, Y, key=jax.random.key(0))
    weights = np.where(Y == 1, 4, 1)
    weighted = (weights * Y).sum() / weights.sum()
    found = np.average(model.predict_proba(X)[:, 1], weights=weights)
    assert found == pytest.approx(weighted, abs=0.06)


def test_bins_are_indicators_of_equal_width():
    units = frame("fit", 3, ([0, 0, -4], [8, 1, 4]), None, True, 4)
    table = np.asarray(
        [[0.0, 1, -4], [1.9, 0, -2.1], [8, 0.5, 3.9], [99, -3, 4], [np.nan, 0, 0]]
    )
    rows = units.rows(table) * units.scale
    assert rows.shape == (5, 9)  # the second column is an indicator
    assert np.argmax(rows[:4, :4], axis=1).tolist() == [0, 0, 3, 3]
    assert rows[:4, 4].tolist() == [1, 0, 0.5, 0]
    assert np.argmax(rows[:4, 5:], axis=1).tolist() == [0, 0, 3, 3]
    assert np.isnan(rows[4]).all()
    assert rows[:4, :4].sum(1).tolist() == [1] * 4
    lengths = np.linalg.norm(units.rows(table)[:4], axis=1)
    assert lengths.max() <= units.longest + 1e-9
    assert units.outside(table)[:4].tolist() == [
        [False] * 3,
        [False] * 3,
        [False] * 3,
        [True, True, False],
    ]


@pytest.mark.parametrize(
    "more", [{"bins": 1, "bounds": (0, 1)}, {"bins": 3, "data_norm": 1.0}]
)
def test_bins_need_bounds_and_at_least_two(more):
    with pytest.raises(ValueError, match="bins must be at least 2, and need bounds="):
        DPLogisticRegression(classes=[0, 1], **more).fit(X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DPRidge, DPLogisticRegression])
def test_bins_learn_an_effect_that_is_not_linear(kind):
    middle = np.abs(X[:, 0]) < 0.5
    facts = {"classes": [0, 1], "max_iter": 200}
    if kind is DPRidge:
        facts = {"target_bounds": (-1, 2), "max_iter": 200}
    model = kind(10.0, bounds=(-1, 1), bins=4, **facts)
    model.fit(X, middle.astype(int), key=jax.random.key(0))
    assert model.coef_.reshape(-1).shape == (8,)
    assert model.n_features_in_ == 2
    scores = model.predict(X)
    assert np.mean((scores > 0.5) == middle) > 0.95
    place = np.minimum(((X + 1) * 2).astype(int), 3)
    one_hot = np.eye(4)[place].reshape(N, 8)
    own = one_hot @ model.coef_.reshape(-1) + np.ravel(model.intercept_)
    is_ridge = isinstance(model, DPRidge)
    of_rows = scores if is_ridge else model.decision_function(X)
    np.testing.assert_allclose(of_rows, own, atol=1e-5)
