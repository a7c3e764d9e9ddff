"""The center and unit of the target are released, charged for, and fit the records."""

import math
import warnings

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core import usability
from dpbilevel.privacy import Ledger
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.sklearn import DPRidge, ridge
from dpbilevel.sklearn.beforehand import PublicSize
from dpbilevel.sklearn.ridge import Spread, comparisons

N = 4000
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


def records(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 1, (N, 3))
    return X, X @ [3, -2, 1] + rng.normal(0, 0.7, N)


def planned(targets, size=None, neighbours=Neighbours.REPLACE_ONE, budget=BUDGET):
    public = PublicSize(neighbours, len(targets) if size is None else size)
    return Spread(budget, public, targets, centered=True)


@pytest.mark.parametrize("middle", [-0.9, 0.0, 0.6])
def test_center_and_deviations_are_found_in_a_far_wider_range(middle, getkey):
    targets = middle + 0.005 * np.random.default_rng(0).normal(size=N)
    targets[::5] = np.nan  # records that do not count move nothing
    center, unit = planned(targets).center_and_unit(key=getkey(), owner="fit")
    assert center == pytest.approx(middle, abs=0.01)
    assert unit == pytest.approx(4 * 0.005, rel=0.4)


def test_a_range_that_fits_is_kept(getkey):
    targets = np.random.default_rng(0).uniform(-1, 1, N)
    assert planned(targets).center_and_unit(key=getkey(), owner="fit") == (0.0, 1.0)


def test_the_declared_range_is_kept_without_records_enough(getkey):
    few, pure = np.zeros(50), dpb.PrivacyBudget(1.0, 0.0)
    for found in (planned(few), planned(np.zeros(N), budget=pure)):
        assert found.center_and_unit(key=getkey(), owner="fit") == (0.0, 1.0)
        assert not found.releases


@pytest.mark.parametrize(
    ("size", "share"), [(600, 0.15), (3000, 0.026), (10 * N, 0.01)]
)
def test_at_most_15_percent_of_the_squared_budget_is_charged(size, share):
    budget = dpb.PrivacyBudget(0.3, 1e-5)
    (release,) = planned(np.zeros(size), budget=budget).releases
    assert release.count == 18
    whole = release.mechanism.scaled(share**0.5)
    one = Ledger((type(release)(release.name, 18, release.queries, whole),))
    assert one.epsilon(1e-5) == pytest.approx(0.3, rel=0.02)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("relation", Neighbours)
def test_one_record_moves_a_comparison_by_what_is_charged(relation, share):
    public, found = PublicSize(relation, 64), []
    for strange in ([], [np.nan], [1.0], [-1.0], [0.0]):
        if strange or relation is Neighbours.ADD_OR_REMOVE_ONE:
            values = np.asarray([*strange, *np.zeros(60)])
            rows = public.rows(comparisons(values, 0.5, share))
            found.append(float(np.nansum(rows)))  # rows of NaN contribute 0
    (release,) = planned(np.zeros(64), budget=dpb.PrivacyBudget(9, 1e-5)).releases
    most = relation.contributions * release.queries[0].clip_norm
    assert most >= max(abs(v - found[0]) for v in found)
    if relation is Neighbours.REPLACE_ONE:
        assert max(found) - min(found) == most


def rows_read(targets, monkeypatch):
    """Return the rows of all comparisons of a search whose answers are fixed."""
    answers, seen = iter(np.linspace(-0.3, 0.3, 18)), []

    def spy(query, mechanism, rows, *, key):
        seen.append(np.asarray(rows))
        return np.asarray([next(answers)])

    with monkeypatch.context() as patch:
        patch.setattr(usability, "_released", spy)
        planned(targets).center_and_unit(key=jax.random.key(0), owner="fit")
    return np.concatenate(seen, axis=1)


def moves_of_the_first_record(monkeypatch):
    """Return the largest move of its rows, and of the rows of others."""
    targets = np.random.default_rng(0).normal(0, 0.1, N)
    first, moves = rows_read(targets, monkeypatch), []
    for strange in (np.nan, 1.0, -1.0, 0.0):
        found = rows_read(np.append(strange, targets[1:]), monkeypatch)
        moves.append(np.abs(found - first).max(axis=1))
    return np.max(moves, 0)[0], np.max(moves, 0)[1:].max()


def test_one_record_moves_its_own_comparisons_alone(monkeypatch):
    own, of_others = moves_of_the_first_record(monkeypatch)
    assert 0 < own <= 1
    assert of_others == 0
    # A copy that compares with a statistic of all records, the largest target.
    compare = ridge.comparisons
    monkeypatch.setattr(
        ridge,
        "comparisons",
        lambda values, value, fraction: compare(
            values, value * np.nanmax(np.abs(values)), fraction
        ),
    )
    assert moves_of_the_first_record(monkeypatch)[1] > 0


def test_if_most_targets_are_equal_the_declared_range_is_kept(getkey):
    targets = np.where(np.arange(N) % 13, 0.0, 0.7)
    assert planned(targets).center_and_unit(key=getkey(), owner="fit") == (0.0, 1.0)


@pytest.mark.slow
def test_every_comparison_has_the_noise_of_the_ledger_and_its_own_key(monkeypatch):
    released, seen = usability._released, []

    def spy(query, mechanism, rows, *, key):
        mean = released(query, mechanism, rows, key=key)
        seen.append(float(mean[0]) - float(np.mean(rows)))
        return mean

    monkeypatch.setattr(usability, "_released", spy)
    found = planned(records()[1] / 10)
    for key in jax.random.split(jax.random.key(1), 60):
        found.center_and_unit(key=key, owner="fit")
    assert len(set(seen)) == len(seen) == 60 * 18
    assert found.release is not None
    # The standard error is 2 %; a copy with nine tenths of the noise is rejected.
    assert np.std(seen) == pytest.approx(found.release.noise_std, rel=0.07)


@pytest.mark.slow
@pytest.mark.parametrize("width", [10, 100])
def test_a_target_range_far_too_wide_costs_little_and_is_warned_of(width):
    X, y = records()
    exact = np.var(X @ [3, -2, 1]) / np.var(y)
    model = DPRidge(bounds=(0, 1), target_bounds=(-3, -3 + 10 * width))
    with pytest.warns(UserWarning, match=r"most targets lie between .*target_bounds"):
        model.fit(X, y, key=jax.random.key(0))
    assert model.score(X, y) > exact - 0.05
    low, high = model.target_range_
    assert np.mean((y > low) & (y < high)) > 0.95
    assert high - low < 20
    model.set_params(target_bounds=(low, high))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*most targets")
        model.fit(X, y, key=jax.random.key(1))
    assert model.target_range_ == pytest.approx((low, high), rel=0.3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*most targets")
def test_without_a_constant_the_unit_is_found_about_zero(getkey):
    X, y = records()
    model = DPRidge(bounds=(0, 1), target_bounds=(-500, 500), fit_intercept=False)
    assert model.fit(X, y, key=getkey()).score(X, y) > 0.5
    assert model.intercept_ == 0
    assert math.isclose(model.target_range_[0], -model.target_range_[1])
