"""What estimators release of the records themselves, and what they warn of."""

import math
import warnings

import jax
import numpy as np
import pytest

from dpbilevel import NoisyGD, bilevel
from dpbilevel.core import usability
from dpbilevel.sklearn import (
    DPLogisticRegression,
    DPRidge,
    DPSourceReweighting,
    FairClassifier,
    base,
)
from dpbilevel.sklearn.beforehand import PublicSize
from dpbilevel.sklearn.logistic import Effects
from tests.cases import slow
from tests.sklearn import test_guarantee
from tests.sklearn.test_guarantee import STRANGE, fits, others, table

N = 2000
FEW = {"bounds": (0, 1), "max_iter": 5}


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((N, 3))
    return X, np.where(X[:, 0] > 0.25, "Yes", "No")


def fitted(X, y, *classes, **more):
    model = DPLogisticRegression(classes=classes, **FEW, **more)
    return model.fit(X, y, key=jax.random.key(0))


def test_records_as_declared_are_said_to_be_usable():
    model = fitted(*drawn(), "No", "Yes")
    assert model.records_usable_ == pytest.approx(1, abs=0.1)
    assert model.constant_accuracy_ == pytest.approx(0.75, abs=0.1)
    first, lengths, _, gradient = model.privacy_report_.ledger
    assert (first.release, first.count) == ("usable records", 1)
    assert (lengths.release, gradient.count) == ("lengths of rows", 5)
    assert model.privacy_report_.epsilon <= 1


def test_a_misspelt_class_is_warned_of_by_its_name():
    with pytest.warns(UserWarning, match="many records: 'y'.*'No' .*'Yse' "):
        model = fitted(*drawn(), "No", "Yse")
    assert model.records_usable_ < 0.5
    with pytest.warns(UserWarning, match="Many records have wrong cells.*'X.:, 1.'"):
        fitted(drawn()[0] * [1, 1000, 1], drawn()[1], "No", "Yes")


def of_groups(place, *declared):
    """A fit of each estimator of groups or sources, and what was released of it."""
    X, y = drawn()
    shares = {name: 1 / len(declared) for name in declared}
    settings = {"epsilon": 4.0, "classes": ["No", "Yes"], "bounds": (0, 1)}
    fair = FairClassifier(shares=shares, max_iter=1, **settings)
    yield fair.fit(X, y, groups=place, key=jax.random.key(0)).records_check_
    one = bilevel.OneLevel(NoisyGD(1, 1.0, 1.0), reads="both")
    weighed = DPSourceReweighting(sources=list(declared), solver=one, **settings)
    clean = X[::2] + 0, y[::2]
    found = weighed.fit(X, y, sources=place, clean=clean, key=jax.random.key(0))
    yield found.records_check_


@pytest.mark.slow
def test_a_misspelt_group_or_source_is_warned_of_by_its_name():
    place = np.where(np.arange(N) % 4, "urban", "rural")
    for found in of_groups(place, "rural", "urban"):
        assert not found.remarks  # nor a warning
    with pytest.warns(UserWarning, match="no record seems to have 'rurl';"):
        misspelt = [*of_groups(place, "rurl", "urban")]
    assert [found.stops for found in misspelt] == [True, True]


@pytest.mark.slow
def test_a_misspelt_rare_class_is_warned_of_by_its_name():
    X, _ = drawn()
    y = np.where(X[:, 0] > 0.75, "yes", "no")
    with pytest.warns(UserWarning, match="no record seems to have 'Yes';"):
        fitted(X, y, "no", "Yes")
    assert not fitted(X, y, "no", "yes").records_check_.remarks


@pytest.mark.slow
def test_a_column_of_texts_and_wrong_targets_are_warned_of():
    X, y = drawn()
    cells = X.astype(object)
    cells[:, 2] = [f"€{v:.2f}" for v in X[:, 2]]
    with pytest.warns(UserWarning, match="'X.:, 2.'"):
        fitted(cells, y, "No", "Yes")
    ridge = DPRidge(**FEW, target_bounds=(0, 1))
    with pytest.warns(UserWarning, match="'y'"):
        ridge.fit(X, 100 * X[:, 0])


def test_a_norm_below_that_of_most_rows_is_warned_of():
    X, y = drawn()
    model = DPLogisticRegression(classes=["No", "Yes"], data_norm=0.1, max_iter=5)
    with pytest.warns(UserWarning, match="outside the declared range.*'X.:, 0.'"):
        model.fit(X, y, key=jax.random.key(0))
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    model.set_params(data_norm=1.0)
    model.fit(unit.astype(np.float32), y, key=jax.random.key(0))  # no warning


@pytest.mark.slow
def test_many_columns_are_checked_in_groups():
    X = np.random.default_rng(0).random((N, 200))
    X[:, 7] = np.nan
    with pytest.warns(UserWarning, match=r"'X.:, 6. to X.:, 8.' \("):
        model = fitted(X, drawn()[1], "No", "Yes")
    assert len(model.records_check_.levels["records"].columns) == 65


@pytest.mark.slow
def test_the_check_is_left_out_where_it_says_nothing_or_is_not_wanted():
    X, y = drawn()
    unchecked = fitted(X, y, "No", "Yes", check_records=False)
    small = fitted(X[:60], y[:60], "No", "Yes")
    for model in (unchecked, small):
        made = [row.release for row in model.privacy_report_.ledger]
        assert "usable records" not in made
        assert math.isnan(model.records_usable_)
        assert math.isnan(model.constant_accuracy_)
    assert "not checked" in str(small.privacy_report_)
    with pytest.raises(TypeError, match="check_records"):
        fitted(X, y, "No", "Yes", check_records=1)


BUDGET = base.PrivacyBudget(200.0, 1e-5)


@pytest.fixture
def checks(monkeypatch):
    """What is released before a run, with more budget, so that 64 records do."""
    seen = []
    monkeypatch.setattr(base, "PrivacyBudget", lambda *_: BUDGET)
    released = usability._released

    def spy(query, mechanism, rows, *, key):
        means = released(query, mechanism, rows, key=key)
        seen.append((query, jax.tree.map(np.asarray, rows), np.asarray(means)))
        return means

    monkeypatch.setattr(usability, "_released", spy)
    return seen


def of_indicators(checks):
    """Releases whose rows follow from no earlier answer, unlike those of effects.

    Comparisons of targets, which do, release one number a record.
    """
    planned = PublicSize(base.Neighbours.REPLACE_ONE, 64)
    effects = Effects(BUDGET, planned, 2, 3).release
    assert effects is not None
    (query,) = effects.queries
    return [
        check
        for check in checks
        if len(check[2]) > 1 and check[0].clip_norm != query.clip_norm
    ]


@pytest.mark.parametrize(
    "name", ["logistic", *slow("ridge", "sources", "network", "fair")]
)
def test_one_record_moves_its_own_indicators_alone(name, checks, getkey):
    X, y = table()
    fit = fits()[name]
    first = fit(X, y, getkey())
    # Values that targets are compared with follow from earlier answers.
    made = len(of_indicators(checks))
    charged = [row.release for row in first.privacy_report_.ledger]
    first_ones = ("usable records", "lengths of rows")
    assert made == sum(text.startswith(first_ones) for text in charged) > 0
    for row, label in STRANGE.values():
        with warnings.catch_warnings(record=True) as caught:
            fit(*test_guarantee.replaced(X, y, row, label), getkey())
        assert not caught
    checks = of_indicators(checks)
    for start in range(made, len(checks), made):
        for (query, rows, _), (_, strange, _) in zip(
            checks[:made], checks[start : start + made], strict=True
        ):
            assert query.role in ("records", "upper", "lower")
            assert all(map(np.array_equal, others(rows), others(strange)))


def test_every_fit_has_noise_of_its_own(checks):
    X, y = table()
    fits()["logistic"](X, y, jax.random.key(1))
    fits()["logistic"](X, y, jax.random.key(2))
    means = [means for _, _, means in checks]
    for one, other in zip(means[:3], means[3:], strict=True):
        assert not np.any(one == other)


@pytest.mark.slow
def test_a_private_number_of_records_shows_in_no_indicator(checks):
    X, y = table()
    private = {"neighbours": "add_or_remove_one", "size": 50, "classes": [0, 1]}
    model = DPLogisticRegression(**private, bounds=(-1, 1), max_iter=1)
    for rows in (64, 63, 0):
        model.fit(X[:rows], y[:rows], key=jax.random.key(rows))
    checked, measured = checks[::3], checks[1::3]
    assert len({rows.records.shape for _, rows, _ in checked}) == 1
    assert len({rows.records.shape for _, rows, _ in measured}) == 1
    assert np.isnan(checked[-1][1].records).all()
    assert not measured[-1][1].records.any()


@pytest.mark.slow
def test_undeclared_labels_are_warned_of_where_their_share_stands_out():
    rng = np.random.default_rng(1)
    X, size = rng.random((8000, 3)), 1440  # 18 %
    y = np.where(X[:, 0] > 0.25, "Yes", "No").astype(object)
    y[:size] = "?"
    with pytest.warns(UserWarning, match=r"8\d.* of the records can be used.*'y'"):
        fitted(X, y, "No", "Yes", epsilon=0.3)


@pytest.mark.slow
def test_a_fit_that_is_all_noise_is_warned_of():
    X, y = drawn()
    with pytest.warns(UserWarning, match="noise of all steps together"):
        fitted(X[:100], y[:100], "No", "Yes", epsilon=0.1)


@pytest.mark.slow
def test_many_indicators_are_not_taken_for_wide_bounds():
    rng = np.random.default_rng(2)
    X = np.eye(100)[rng.integers(0, 100, N)]
    y = np.where(X[:, :50].sum(axis=1) > 0, "Yes", "No")
    model = fitted(X, y, "No", "Yes", epsilon=3.0)
    assert model.row_length_ < 1 / 8
