"""The default solver of PrivateSearch, and the scales it takes from training rows."""

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.datasets import make_classification
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

import dpbilevel as dpb
from dpbilevel.search.defaults import default_solver
from dpbilevel.search.space import Space
from tests.search.test_private_search import BUDGET, SPACE, TRAINING, searched


@pytest.mark.slow
def test_default_steps_are_in_units_of_the_slopes_of_training_records():
    search = dpb.PrivateSearch(Ridge(), SPACE, BUDGET)
    slope = search._rows(*TRAINING).gradient_scale(1)
    sides = [
        (
            Ridge(alpha=search.parameters(np.full(1, p))["alpha"])
            .fit(*(v[::2] for v in TRAINING))
            .predict(TRAINING[0][1::2])
            - TRAINING[1][1::2]
        )
        ** 2
        / np.var(TRAINING[1])
        for p in (0.3, -0.3)
    ]
    assert slope == pytest.approx(np.quantile(np.abs(sides[0] - sides[1]), 0.95) / 0.6)


class Flat(RegressorMixin, BaseEstimator):
    def __init__(self, a=0.0, b=0.5, c=1, names="none"):
        self.a, self.b, self.c, self.names = a, b, c, names

    def fit(self, X, y):
        return self

    def predict(self, X):
        return np.tanh(self.a) + X[:, 0] * np.mean(self.b)


@pytest.mark.parametrize(
    ("space", "delta", "kind"),
    [
        ({"a": {}, "b": {}}, 1e-5, dpb.search.RandomSearch),
        ({"a": {}, "b": {"size": 3}}, 1e-5, dpb.search.GradientInformativeBO),
        ({"a": {"integer": True}, "b": {"size": 3}}, 1e-5, dpb.search.RandomSearch),
        ({"a": {}, "b": {"size": 3}}, 0.0, dpb.search.RandomSearch),
    ],
)
def test_the_method_follows_from_the_number_and_kind_of_the_parameters(
    space, delta, kind
):
    space = {name: dpb.search.Range(-1, 1, **kw) for name, kw in space.items()}
    budget = dpb.PrivacyBudget(1.0, delta)
    search = dpb.PrivateSearch(Flat(), space, budget)
    starts = [Space(space).position(v) for v in ({"a": 1.0}, search._own_parameters())]
    rows = search._rows(*TRAINING)
    solver = default_solver(Space(space), budget, rows, np.stack(starts))
    assert type(solver) is kind
    if kind is dpb.search.GradientInformativeBO:
        np.testing.assert_allclose(solver.portfolio.starts[0], [1, 0, 0, 0])
        np.testing.assert_allclose(solver.portfolio.starts[1], [0, 0.5, 0.5, 0.5])


class Better(ClassifierMixin, BaseEstimator):
    """A classifier whose chances are the better, the larger its parameters are."""

    def __init__(self, goods=0.0):
        self.goods = goods

    def fit(self, X, y):
        self.classes_ = np.asarray([False, True])
        return self

    def predict(self, X):
        return X[:, 0] > 0

    def predict_proba(self, X):
        right = 0.5 + 0.4 * np.mean(self.goods)
        chances = np.where(X[:, 0] > 0, right, 1 - right)
        return np.stack([1 - chances, chances], axis=1)


class Rigid(Better):
    """Without chances."""

    predict_proba = property()


def planned_default(estimator, delta):
    labels = TRAINING[0][:, 0] > 0
    space = Space({"goods": dpb.search.Range(-1, 1, size=4)})
    search = dpb.PrivateSearch(estimator, space.entries, BUDGET)
    rows = search._rows(TRAINING[0], labels)
    budget = dpb.PrivacyBudget(1.0, delta)
    return default_solver(space, budget, rows, np.zeros((1, 4))), rows


@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_points_that_training_rows_favour_are_among_those_of_the_default(delta):
    solver, _ = planned_default(Better(), delta)
    starts = solver.starts if delta == 0 else solver.portfolio.starts
    np.testing.assert_allclose(starts[0], 0)
    means = np.mean(starts[1:], axis=1)
    assert len(means) == (35 if delta == 0 else 60)
    # The best sixth of points whose means have a standard deviation of 12**-.5.
    assert np.min(means) > 0.8 * 12**-0.5
    assert np.all(np.diff(means) <= 1e-12)
    if delta == 0:
        assert solver.num_candidates == 70


def test_losses_with_a_bound_are_not_cut_below_it():
    solver, rows = planned_default(Better(), 0.0)
    assert rows.unit * solver.clip_range == 1.0
    solver, rows = planned_default(Better(), 1e-5)
    assert rows.unit * solver.portfolio.clip_range == pytest.approx(1.0)
    rows.bound = None  # the control
    assert rows.unit * rows.loss_scale([np.zeros(4)]) == pytest.approx(0.25)


def test_losses_of_zero_or_one_are_not_descended_along():
    assert isinstance(planned_default(Rigid(), 1e-5)[0], dpb.search.RandomSearch)


def test_training_rows_that_fail_favour_no_point():
    class Failing(Better):
        def fit(self, X, y):
            if self.goods[0] > 0:
                raise ValueError
            return super().fit(X, y)

    starts = planned_default(Failing(), 0.0)[0].starts
    assert np.max(starts[:, 0]) <= 0


def test_a_scale_that_training_rows_do_not_give_is_one():
    halves = {"n_neighbors": dpb.search.Range(1, 99, integer=True)}
    rows = dpb.PrivateSearch(KNeighborsRegressor(), halves, BUDGET)._rows(*TRAINING)
    with pytest.warns(
        UserWarning, match=r"training rows give no scale of gradients .*n_neighbors"
    ):
        assert rows.gradient_scale(1) == 1.0
    with pytest.warns(
        UserWarning, match=r"training rows give no scale of losses .*n_neighbors"
    ):
        assert rows.loss_scale([np.zeros(1)]) == 1.0


def log_losses(estimator, X, y):
    return -np.log(np.maximum(estimator.predict_proba(X)[np.arange(len(y)), y], 1e-7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "better"),
    [(None, True), (log_losses, False)],
)
def test_a_heavy_tail_does_not_lead_the_default_the_wrong_way(losses, better):
    # 15 neighbours are best. That few are too few is told by few rows of a log loss.
    inputs, labels = make_classification(
        1_300, 20, n_informative=8, n_redundant=4, flip_y=0.1, random_state=0
    )
    inputs /= inputs.std(axis=0)
    result = searched(
        KNeighborsClassifier(),
        {"n_neighbors": dpb.search.Range(1, 100, log=True, integer=True)},
        public=(inputs[:300], labels[:300]),
        validation=(inputs[300:], labels[300:]),
        solver=None,
        losses=losses,
    )
    assert (result.best_params_["n_neighbors"] >= 7) == better
