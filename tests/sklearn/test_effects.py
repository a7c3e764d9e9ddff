"""Rates and effects are released, charged for, and decide the ridge of a fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import log_loss

import dpbilevel as dpb
from dpbilevel.core import usability
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.sklearn import DPLogisticRegression, base, logistic
from dpbilevel.sklearn.beforehand import PublicSize
from dpbilevel.sklearn.logistic import Effects

BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
WIDTH = 3


def planned(count, classes, budget=BUDGET):
    public = PublicSize(Neighbours.REPLACE_ONE, count)
    return Effects(budget, public, classes, WIDTH)


def records(size, rates, strength, seed=0):
    """Rows of length below 1 whose first feature is larger for the last class."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(len(rates), size, p=rates)
    features = rng.uniform(-0.3, 0.3, (size, WIDTH))
    features[:, 0] += 0.3 + strength * (labels == len(rates) - 1)
    return features, labels


@pytest.mark.parametrize("rates", [(0.98, 0.02), (0.5, 0.5), (0.55, 0.43, 0.02)])
def test_rates_are_found(rates, getkey):
    features, labels = records(4000, rates, 0.2)
    found, _ = planned(4000, len(rates)).rates_and_ridge(
        {"features": features, "label": labels}, key=getkey(), owner="fit"
    )
    assert found == pytest.approx(rates, abs=0.06)
    assert found.sum() == pytest.approx(1)
    assert min(found) > 0


@pytest.mark.parametrize("classes", [2, 5])
def test_rows_of_length_1_have_the_declared_norm(classes):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, WIDTH))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    rows = logistic.rows_of(features, rng.integers(0, classes, 200), classes)
    release = planned(200, classes).release
    assert release is not None
    (query,) = release.queries
    norms = np.linalg.norm(rows, axis=1)
    assert norms == pytest.approx(np.full(200, query.clip_norm), rel=1e-6)


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.8, 0.2), (0.5, 0.3, 0.2)])
def test_strong_effects_have_the_ridge_of_the_formula(rates, getkey):
    features, labels = records(20_000, rates, 0.3)
    count, rich = len(rates), dpb.PrivacyBudget(50.0, 1e-5)
    _, weight = planned(20_000, count, rich).rates_and_ridge(
        {"features": features, "label": labels}, key=getkey(), owner="fit"
    )
    one_hot = np.eye(count)[labels]
    shares, centred = one_hot.mean(0), features - features.mean(0)
    gradient = centred.T @ (one_hot - shares) / len(features)
    if count == 2:  # of the one score of a logistic model
        gradient = gradient[:, 1:]
    trace = np.square(centred).sum(1).mean() * (1 - shares @ shares)
    trace /= 2 if count == 2 else 1
    assert weight == pytest.approx(trace / (2 * np.square(gradient).sum()), rel=0.1)


def test_effects_that_noise_hides_have_a_ridge_within_the_limits(getkey):
    features, labels = records(100, (0.5, 0.5), 0.0)
    poor = dpb.PrivacyBudget(0.1, 1e-5)
    for key in jax.random.split(getkey(), 5):
        _, weight = planned(100, 2, poor).rates_and_ridge(
            {"features": features, "label": labels}, key=key, owner="fit"
        )
        assert WIDTH / 4 < weight < 4 * WIDTH / logistic._WEAKEST


@pytest.mark.slow
def test_weak_effects_of_many_records_have_the_largest_ridge(getkey):
    features, labels = records(50_000, (0.5, 0.5), 0.0)
    _, weight = planned(50_000, 2).rates_and_ridge(
        {"features": features, "label": labels}, key=getkey(), owner="fit"
    )
    assert weight == pytest.approx(2 * WIDTH / logistic._WEAKEST, rel=0.2)


@pytest.mark.parametrize("budget", [(1.0, 0.0), (0.1, 1e-5)])
def test_without_delta_or_enough_records_nothing_is_released(budget, getkey):
    found = planned(50, 2, dpb.PrivacyBudget(*budget))
    assert not found.releases
    features, labels = records(50, (0.5, 0.5), 0.0)
    rates, weight = found.rates_and_ridge(
        {"features": features, "label": labels}, key=getkey(), owner="fit"
    )
    assert rates.tolist() == [0.5, 0.5]
    assert weight == 2 * WIDTH


def test_a_record_that_does_not_count_moves_nothing(getkey):
    features, labels = records(600, (0.5, 0.5), 0.2)
    features[0] = np.nan
    key = getkey()
    found = [
        planned(600, 2).rates_and_ridge(
            {"features": features, "label": labels ^ (np.arange(600) == 0) * other},
            key=jax.random.clone(key),
            owner="fit",
        )
        for other in (0, 1)
    ]
    assert found[0][0].tolist() == found[1][0].tolist()
    assert found[0][1] == found[1][1]


def test_a_record_moves_its_own_row_alone():
    features, labels = records(20, (0.5, 0.5), 0.2)
    rows = logistic.rows_of(features, labels, 2)
    features[3], labels[3] = [1e6, -1e6, 1e-6], 1 - labels[3]
    moved = np.any(rows != logistic.rows_of(features, labels, 2), axis=1)
    assert np.flatnonzero(moved).tolist() == [3]


def runs_with_fixed_answers(monkeypatch, tables, **parameters):
    """What each table's run would be if every release had the same answer."""
    runs = []

    def spied(problem, solver, records, w0, *, key):
        probe = np.arange(1.0, 1 + w0.size).reshape(w0.shape)
        penalty = float(problem.public(probe / np.linalg.norm(probe[:-1])))
        runs.append((np.asarray(w0), penalty, float(solver.step_size)))
        raise KeyboardInterrupt

    def fixed(query, mechanism, rows, *, key):
        return jnp.linspace(0.01, 0.3, rows.shape[1])

    with monkeypatch.context() as patch:
        patch.setattr(usability, "_released", fixed)
        patch.setattr(base, "compiled_run", spied)
        for X, y in tables:
            model = DPLogisticRegression(classes=[0, 1], bounds=(-1, 1), **parameters)
            with pytest.raises(KeyboardInterrupt):
                model.fit(X, y, key=jax.random.key(0))
    return runs


def are_equal(runs):
    return all(
        np.array_equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True)
    )


def test_records_reach_a_run_through_released_numbers_alone(monkeypatch):
    features, labels = records(600, (0.7, 0.3), 0.2)
    strange = np.full_like(features, 1e-30)
    strange[:5] = np.asarray([1e300, -1e300, np.nan, np.inf, 1e-300])[:, None]
    tables = (features, labels), (strange, np.full(600, 7)), (-features, 1 - labels)
    with np.errstate(all="raise"):
        assert are_equal(runs_with_fixed_answers(monkeypatch, tables))

    def leaking(release, rows, *, key, owner):
        return np.nan_to_num(rows).mean(axis=0)

    monkeypatch.setattr(logistic, "released_mean", leaking)
    assert not are_equal(runs_with_fixed_answers(monkeypatch, tables))  # the control


@pytest.mark.parametrize("weight", [3.0, 300.0])
def test_the_ridge_is_the_weight_times_squared_noise_and_the_one_that_was_asked_for(
    weight, monkeypatch
):
    monkeypatch.setattr(
        Effects, "rates_and_ridge", lambda *_, **__: (np.asarray([0.5, 0.5]), weight)
    )
    tables = [records(600, (0.7, 0.3), 0.2)]
    ((_, without, step),) = runs_with_fixed_answers(monkeypatch, tables)
    ((_, found, _),) = runs_with_fixed_answers(monkeypatch, tables, ridge=0.25)
    assert found == pytest.approx(without + 0.25)
    # About 3.73 for epsilon 1, replace-one and what is left of the budget.
    noise = 2 / 600 * 3.9
    assert 0.6 < without / (weight * noise**2) < 1.7  # a power of 2
    assert step <= 1 / (1 / 8 + 2 * without) + 1e-6


def noise_of_release(monkeypatch, share):
    """Return the noise of a release over that of the ledger, scaled by a share."""
    released, seen = usability._released, []

    def spy(query, mechanism, rows, *, key):
        seen.append(np.asarray(released(query, mechanism.scaled(share), rows, key=key)))
        return seen[-1]

    features, labels = records(600, (0.5, 0.5), 0.2)
    found = planned(600, 2)
    with monkeypatch.context() as patch:
        patch.setattr(usability, "_released", spy)
        for key in jax.random.split(jax.random.key(0), 600):
            found.rates_and_ridge(
                {"features": features, "label": labels}, key=key, owner="fit"
            )
    assert found.release is not None
    return np.std(seen, axis=0).mean() / found.release.noise_std


@pytest.mark.slow
def test_the_noise_of_effects_is_that_of_the_ledger(monkeypatch):
    assert noise_of_release(monkeypatch, 1.0) == pytest.approx(1, abs=0.06)
    assert noise_of_release(monkeypatch, 0.9) < 0.94  # the control


@pytest.mark.slow
def test_a_rare_class_of_few_records_is_about_as_good_as_the_constant_answer():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (5000, 5))
    chances = 1 / (1 + np.exp(3.7 - X @ [2, -1, 1, 0, 0.5]))
    y = (rng.random(5000) < chances).astype(int)
    constant = log_loss(y[1200:], np.full(3800, y[1200:].mean()))
    model, losses = DPLogisticRegression(0.3, classes=[0, 1], bounds=(-1, 1)), []
    for key in range(5):
        model.fit(X[:1200], y[:1200], key=jax.random.key(key))
        losses.append(log_loss(y[1200:], model.predict_proba(X[1200:])))
    assert np.median(losses) < constant + 0.015


@pytest.mark.slow
def test_strong_effects_of_few_records_are_not_hidden_by_a_ridge(monkeypatch):
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(3000, 3)) @ rng.normal(size=(3, 20))
    X = np.clip((factors + 0.5 * rng.normal(size=factors.shape)) / 6, -1, 1)
    scores = X @ rng.normal(size=20)
    scores *= 6 / scores.std()
    y = (rng.random(3000) < 1 / (1 + np.exp(-scores))).astype(int)

    def loss():
        model = DPLogisticRegression(2.0, classes=[0, 1], bounds=(-1, 1))
        model.fit(X[:500], y[:500], key=jax.random.key(0))
        return log_loss(y[500:], model.predict_proba(X[500:]))

    found = loss()
    monkeypatch.setattr(logistic, "_expected_square", lambda limits, *noisy: limits[0])
    assert found < loss() - 0.05  # the control: a ridge for weak effects
