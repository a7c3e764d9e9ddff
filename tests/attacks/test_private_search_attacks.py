"""A validation record of a private search stops, says and moves nothing but itself."""

import gc
import pickle
import warnings

import jax
import numpy as np
import pytest
import scipy.sparse
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, SimpleImputer
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Ridge,
    RidgeClassifier,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    LabelBinarizer,
    OneHotEncoder,
    minmax_scale,
)
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils.validation import check_array

import dpbilevel as dpb
from dpbilevel.search.estimator import PrivateSearch, Range
from dpbilevel.search.row_losses import RowLosses

RNG = np.random.default_rng(0)
X, V = RNG.normal(size=(40, 3)), RNG.normal(size=(8, 3))
Y, T = X @ [1.0, 2.0, 3.0], V @ [1.0, 2.0, 3.0]
CLASSES, LABELS = (Y > 0).astype(int), (T > 0).astype(int)
WORDS, TOLD = ([[word] for word in RNG.choice(["a", "b"], n)] for n in (40, 8))
RIDGE = Ridge(), {"alpha": Range(0.1, 1.0)}, X, Y
TREE = DecisionTreeRegressor(random_state=0), {"ccp_alpha": Range(0.1, 1.0)}, X, Y
LOGISTIC = LogisticRegression(), {"C": Range(0.1, 1.0)}, X, CLASSES
MARGIN = LinearSVC(random_state=0), {"C": Range(0.1, 1.0)}, X, CLASSES
ENCODED = (
    make_pipeline(OneHotEncoder(), Ridge()),
    {"ridge__alpha": Range(0.1, 1.0)},
    WORDS,
    Y,
)


def with_first(rows, value):
    rows = list(rows) if isinstance(rows, list) else rows.copy()
    rows[0] = value
    return rows


def evaluated(tuned, inputs, targets, losses=None):
    estimator, space, X, y = tuned
    owner = PrivateSearch(estimator, space, None, losses=losses)
    rows = owner._rows(X, y)
    rows.check_row_independence(np.zeros(1))
    black_box = rows.black_box(inputs, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return black_box(np.zeros(1))


@pytest.mark.parametrize(
    ("tuned", "inputs", "targets"),
    [
        (RIDGE, with_first(V.tolist(), [np.nan] * 3), T),
        (RIDGE, with_first(V.tolist(), [1.0]), T),
        (RIDGE, with_first(V, 1e200), T),
        (RIDGE, V, with_first(T, 1e200)),
        (RIDGE, V, with_first(T.tolist(), "secret")),
        (RIDGE, V, with_first(T.tolist(), 10**400)),
        (TREE, with_first(V, 1e200), T),
        (TREE, with_first(V, np.inf), T),
        (LOGISTIC, V, with_first(LABELS.tolist(), "secret")),
        (LOGISTIC, V, with_first(LABELS.tolist(), [1, 2])),
        (LOGISTIC, with_first(V.tolist(), ["a", "b", "c"]), LABELS),
        (MARGIN, V, with_first(LABELS.tolist(), "secret")),
        (ENCODED, with_first(TOLD, ["secret"]), T),
    ],
)
def test_a_hostile_record_is_silent_and_alone(tuned, inputs, targets):
    plain = TOLD if tuned is ENCODED else V
    expected = evaluated(tuned, plain, T if tuned[3] is Y else LABELS)
    found = evaluated(tuned, inputs, targets)
    np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-12)
    assert np.isfinite(expected).all()


def test_losses_that_mix_rows_and_fail_once_are_refused():
    """A failure on the rows as they are is no sign that rows are independent."""
    calls = []

    def mixing(fitted, X, y):
        calls.append(len(X))
        if len(calls) == 2:
            raise RuntimeError("for a moment")
        errors = (fitted.predict(X) - y) ** 2
        return errors - errors.mean()

    with pytest.raises(ValueError, match="change with the rows beside"):
        evaluated(RIDGE, V, T, losses=mixing)


def test_time_is_listed_as_unprotected():
    """A rejected row costs further predictions."""
    report = fit(T).report_
    assert any(a.startswith("unprotected: the time") for a in report.assumptions)
    assert any("treats each record alone" in a for a in report.assumptions)


@pytest.mark.parametrize(
    "kind", [scipy.sparse.csr_array, np.float32, np.asfortranarray]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_rejected_row_of_any_table_counts_as_the_worst_alone(kind, value):
    tuned = *RIDGE[:2], kind(X), Y
    inputs = V.copy()
    inputs[[0, 5], 1] = value
    losses = evaluated(tuned, kind(inputs), T)
    assert np.isnan(losses[[0, 5]]).all()
    others = np.delete(np.arange(len(V)), [0, 5])
    expected = evaluated(tuned, kind(V), T)[others]
    np.testing.assert_array_equal(losses[others], expected)


def test_an_estimator_that_accepts_missing_values_has_losses_for_them():
    inputs = with_first(V, np.nan)
    imputed = make_pipeline(SimpleImputer(), Ridge())
    losses = evaluated((imputed, {"ridge__alpha": Range(0.1, 1.0)}, X, Y), inputs, T)
    assert np.isfinite(losses).all()


def squeezed(fitted, X, y):
    return np.squeeze((fitted.predict(X)[:, None] - y[:, None]) ** 2)


def in_company(fitted, X, y):
    if len(y) < 8:
        raise ValueError("too few rows")
    return (fitted.predict(X) - y) ** 2


class Panic(BaseException):
    """What compiled code may raise."""


def panics(fitted, X, y):
    if not np.isfinite(X).all():
        raise Panic("secret")
    if len(y) == len(V):
        print("secret")
    return (fitted.predict(X) - y) ** 2


@pytest.mark.parametrize("losses", [squeezed, in_company, panics])
def test_a_row_that_raises_leaves_the_others_where_they_are(losses, capsys):
    inputs = with_first(V, np.nan)
    found = evaluated(RIDGE, inputs, T, losses)
    assert np.isnan(found[0])
    np.testing.assert_array_equal(found[1:], evaluated(RIDGE, V, T, losses)[1:])
    assert "secret" not in "".join(capsys.readouterr())


def test_where_all_rows_raise_all_losses_are_nan():
    found = evaluated(RIDGE, np.full_like(V, np.nan), T)
    assert np.isnan(found).all()


def test_rounding_of_the_others_does_not_change_with_a_row_that_raises():
    inputs = RNG.normal(size=(300, 37))
    labels = (inputs @ RNG.normal(size=37) > 0).astype(int)
    tuned = RidgeClassifier(), {"alpha": Range(0.1, 1.0)}, inputs, labels
    model = RidgeClassifier(alpha=0.55).fit(inputs, labels)
    moved, before = 0, 0
    for tie in RNG.normal(size=(20, 37)):
        for _ in range(3):  # all records on the boundary
            tie[0] -= model.decision_function(tie[None])[0] / np.ravel(model.coef_)[0]
        same = np.tile(tie, (101, 1))
        bad = same.copy()
        bad[50, 3] = np.nan
        both = [evaluated(tuned, X, np.zeros(101, int)) for X in (same, bad)]
        moved += np.sum(np.delete(both[0] != both[1], 50))
        # The control: in parts, as they would be without the bad row, they change.
        parts = [model.predict(X) for X in (same[:50], same[51:])]
        before += np.sum(np.concatenate(parts) != np.delete(model.predict(same), 50))
    assert moved == 0 < before


class Counting(RegressorMixin, BaseEstimator):
    """Predicts by random numbers of its own, or in place."""

    def __init__(self, alpha=1.0, rows_fixed=False):
        self.alpha, self.rows_fixed = alpha, rows_fixed

    def fit(self, X, y):
        self.random_ = np.random.default_rng(0)
        return self

    def predict(self, X):
        check_array(X)
        if self.rows_fixed:
            X += 1.0
            return X[:, 0]
        return X[:, 0] + self.random_.normal()


@pytest.mark.parametrize("rows_fixed", [False, True])
def test_earlier_calls_leave_no_trace_in_later_ones(rows_fixed):
    tuned = Counting(rows_fixed=rows_fixed), {"alpha": Range(0.1, 1.0)}, X, Y
    inputs = with_first(V, np.nan)
    expected = evaluated(tuned, V, T)
    np.testing.assert_array_equal(evaluated(tuned, inputs, T)[1:], expected[1:])
    np.testing.assert_array_equal(inputs[1:], V[1:])


def test_values_that_training_did_not_know_are_no_reason_to_refuse():
    inputs = np.tile([[0.0], [1.0]], (20, 1))
    tuned = make_pipeline(OneHotEncoder(), Ridge()), {"ridge__alpha": Range(0.1, 1.0)}
    found = evaluated((*tuned, inputs, Y), with_first(inputs[:8], 2.0), T)
    assert np.isnan(found[0])
    assert np.isfinite(found[1:]).all()


def binarized(fitted, X, y):
    chances = fitted.predict_proba(X)
    return -np.log(np.sum(chances * LabelBinarizer().fit_transform(y), axis=1))


@pytest.mark.parametrize(
    ("estimator", "targets", "losses"),
    [
        (
            make_pipeline(
                IterativeImputer(sample_posterior=True, random_state=0), Ridge()
            ),
            Y,
            None,
        ),
        (make_pipeline(FunctionTransformer(minmax_scale), Ridge()), Y, None),
        (LogisticRegression(), np.digitize(Y, [-1.0, 1.0]), binarized),
    ],
)
def test_estimators_whose_rows_share_something_are_refused(estimator, targets, losses):
    search = PrivateSearch(estimator, {}, None, losses=losses)
    with pytest.raises(ValueError, match="change with the rows beside them"):
        search._rows(X, targets).check_row_independence(np.zeros(0))


def test_targets_in_one_column_are_not_compared_with_all_predictions():
    tuned = LinearRegression(), {"tol": Range(0.1, 1.0)}, X, Y
    column = [[v] for v in T]
    moved = evaluated(tuned, with_first(V, 5.0), column)
    np.testing.assert_array_equal(moved[1:], evaluated(tuned, V, T)[1:])
    with pytest.raises(ValueError, match="y of validation must have the columns"):
        fit(T[:, None])


def test_a_loss_that_mixes_rows_is_refused():
    """The control: what the probe is for."""

    def centred(fitted, X, y):
        errors = (fitted.predict(X) - y) ** 2
        return errors - errors.mean()

    with pytest.raises(ValueError, match="change with the rows beside them"):
        evaluated(RIDGE, V, T, centred)


def fit(targets, **options):
    search = PrivateSearch(
        *RIDGE[:2], dpb.PrivacyBudget(1.0, 1e-3), solver=dpb.search.RandomSearch(3, 2.0)
    )
    validation = V, targets
    return search.fit(X, Y, validation=validation, key=jax.random.key(0), **options)


def test_a_search_does_not_go_on_with_records_in_another_order(tmp_path, monkeypatch):
    def stops(*args):
        raise RuntimeError("the cluster went away")

    with monkeypatch.context() as patch:
        patch.setattr(RowLosses, "black_box", lambda *_, **__: stops)
        with pytest.raises(RuntimeError):
            fit(T, folder=tmp_path / "run")
    with pytest.raises(ValueError, match="are not those the run began with"):
        fit(T[::-1].copy(), folder=tmp_path / "run")
    found = [fit(T.copy(), folder=tmp_path / name) for name in ("run", "whole")]
    assert found[0].best_params_ == found[1].best_params_


def test_nothing_of_the_validation_records_stays_in_the_fitted_search():
    targets = T + 0.123456789
    search = fit(targets)
    assert targets.tobytes()[:8] not in pickle.dumps(search)
    assert T.tobytes()[:8] in pickle.dumps(T)  # the control
    gc.collect()
    assert not [o for o in gc.get_referrers(targets) if isinstance(o, tuple)]
