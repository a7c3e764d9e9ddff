"""The unit of rows is released, charged for, and fits the records."""

import math

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core import usability
from dpbilevel.core.plan import least_multiplier
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.sklearn import DPLogisticRegression, DPRidge, base
from dpbilevel.sklearn.beforehand import PART, Lengths, PublicSize, in_bins
from tests.cases import slow

N = 2000
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


def rows_of(scale, seed=0):
    """Rows of lengths around a scale, in units of the longest row."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(N, 8)) * scale / math.sqrt(8)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)


def planned(rows, budget=BUDGET, neighbours=Neighbours.REPLACE_ONE, longest=1.0):
    public = PublicSize(neighbours, len(rows))
    return Lengths(budget, public, public.rows(rows), longest)


@pytest.mark.parametrize("scale", [0.9, 0.3, 0.05])
def test_a_quarter_of_the_rows_is_longer(scale, getkey):
    rows = rows_of(scale)
    found = planned(rows).typical_length(key=getkey(), owner="fit")
    exact = np.quantile(np.linalg.norm(rows, axis=1), 0.75)
    assert found == pytest.approx(exact, rel=0.25)
    # Of half the records, the length is that of the usable ones.
    rows[::2] = np.nan
    found = planned(rows).typical_length(key=getkey(), owner="fit")
    assert found == pytest.approx(exact, rel=0.35)


@pytest.mark.reuses_keys
def test_rows_in_another_unit_have_the_same_fraction(getkey):
    rows, key = rows_of(0.3), getkey()
    one = planned(rows).typical_length(key=key, owner="fit")
    two = planned(3.0 * rows, longest=3.0).typical_length(
        key=jax.random.clone(key), owner=""
    )
    assert one == pytest.approx(two, rel=1e-6)
    assert planned(rows, longest=3.0).unit(0.5) == 1.5


def test_the_declared_unit_is_kept_without_records_enough(getkey):
    few = planned(rows_of(0.5)[:60])
    unusable = planned(np.full((N, 3), np.nan))
    pure = planned(rows_of(0.5), dpb.PrivacyBudget(1.0, 0.0))
    for lengths in (few, unusable, pure):
        length = lengths.typical_length(key=getkey(), owner="fit")
        assert math.isnan(length)
        assert lengths.unit(length) == 1.0
    assert not few.releases
    assert not pure.releases


@pytest.mark.slow
def test_a_fiftieth_of_the_squared_budget_is_charged():
    X = np.random.default_rng(0).uniform(-1, 1, (N, 3))
    model = DPLogisticRegression(classes=[0, 1], bounds=(-1, 1), max_iter=2)
    model.fit(X, (X[:, 0] > 0).astype(int), key=jax.random.key(0))
    _, row, _, _ = model.privacy_report_.ledger
    assert row.release == "lengths of rows"
    whole = least_multiplier(dpb.privacy.FullBatch(), 1, 1, BUDGET)
    assert row.noise_multiplier == pytest.approx(whole / PART**0.5, rel=1e-6)
    assert row.roles["records"].sensitivity == pytest.approx(2 / N)
    assert model.privacy_report_.epsilon <= 1


STRANGE = ([np.nan, 0, 0], [np.inf, 0, 0], [1e300, 1e300, 0], [0, 0, 0], [1, 0, 0])


def largest_move(bins_of):
    """How far a strange record moves the sum of bins, in l2."""
    rows = np.random.default_rng(0).uniform(-0.5, 0.5, (64, 3))
    sums = []
    for strange in STRANGE:
        rows[0] = strange
        with np.errstate(over="ignore", invalid="ignore"):
            sums.append(bins_of(rows).sum(axis=0))
    return max(np.linalg.norm(a - b) for a in sums for b in sums)


def test_one_record_moves_the_bins_by_what_is_charged():
    assert largest_move(in_bins) == pytest.approx(math.sqrt(2))

    def of_records(rows):  # a broken copy: its unit is that of the records
        with np.errstate(over="ignore", invalid="ignore"):
            return in_bins(rows / np.nanmax(np.abs(rows)))

    assert largest_move(of_records) > 2


def spread_of(lengths, monkeypatch, share=1.0):
    """The noise in the first share, over what the ledger claims."""
    released, seen = usability._released, []

    def less(query, mechanism, rows, *, key):
        mechanism = mechanism.scaled(share) if share != 1 else mechanism
        found = released(query, mechanism, rows, key=key)
        seen.append(float(found[0]))
        return found

    monkeypatch.setattr(usability, "_released", less)
    for key in jax.random.split(jax.random.key(3), 400):
        lengths.typical_length(key=key, owner="fit")
    monkeypatch.undo()
    return np.std(seen) / lengths.release.noise_std


def test_the_noise_is_what_the_ledger_claims(monkeypatch):
    lengths = planned(rows_of(0.5))
    assert spread_of(lengths, monkeypatch) == pytest.approx(1, abs=0.12)
    assert spread_of(lengths, monkeypatch, share=0.7) < 0.85  # the control


@pytest.mark.parametrize("kind", [DPLogisticRegression, *slow(DPRidge)])
def test_coefficients_are_in_units_of_the_features(kind):
    rng = np.random.default_rng(1)
    X = rng.uniform(-1, 1, (N, 2))
    more = {"bounds": (-5, 5), "epsilon": 100.0}
    if kind is DPRidge:
        model = kind(**more, target_bounds=(-3, 3))
        model.fit(X, X @ [1, -1] + 0.5, key=jax.random.key(0))
        np.testing.assert_allclose(model.coef_, [1, -1], atol=0.1)
        assert model.intercept_ == pytest.approx(0.5, abs=0.1)
    else:
        chance = 1 / (1 + np.exp(-(X @ [2, -2] + 0.5)))
        y = (rng.random(N) < chance).astype(int)
        model = kind(**more, classes=[0, 1]).fit(X, y, key=jax.random.key(0))
        np.testing.assert_allclose(model.coef_[0], [2, -2], atol=0.5)
    assert model.row_length_ == pytest.approx(0.14, rel=0.3)


@pytest.mark.slow
def test_bounds_that_are_far_too_wide_are_warned_of():
    X = np.random.default_rng(0).uniform(-1, 1, (N, 3))
    y = (X[:, 0] > 0).astype(int)
    wide = DPLogisticRegression(classes=[0, 1], bounds=(-50, 50), max_iter=2)
    with pytest.warns(UserWarning, match="far shorter than the longest.*data_norm="):
        wide.fit(X, y, key=jax.random.key(0))
    assert wide.row_length_ < 0.05


def test_an_interrupted_fit_shows_no_released_length(monkeypatch):
    def interrupted(*run, key):
        raise KeyboardInterrupt

    X = np.random.default_rng(0).uniform(-1, 1, (N, 3))
    model = DPLogisticRegression(classes=[0, 1], bounds=(-1, 1), max_iter=2)
    monkeypatch.setattr(base, "compiled_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, (X[:, 0] > 0).astype(int))
    assert not hasattr(model, "row_length_")


def test_after_an_interrupted_fit_predictions_are_those_of_the_last_one(monkeypatch):
    def interrupted(*run, key):
        raise KeyboardInterrupt

    X = np.random.default_rng(0).uniform(-1, 1, (N, 3))
    y = (X[:, 0] > 0).astype(int)
    model = DPLogisticRegression(classes=[0, 1], bounds=(-1, 1), max_iter=2)
    before = model.fit(X, y, key=jax.random.key(0)).predict_proba(X)
    monkeypatch.setattr(base, "compiled_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.set_params(bounds=(-0.1, 0.1)).fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), before)
