"""Base rates are released, charged for, and keep a fit near the constant answer."""

import jax
import numpy as np
import pytest
from sklearn.metrics import log_loss

import dpbilevel as dpb
from dpbilevel.core import usability
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.sklearn import DPLogisticRegression
from dpbilevel.sklearn.base_rates import BaseRates
from dpbilevel.sklearn.planned import Planned

BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


def planned(labels, count, budget=BUDGET):
    public = Planned(Neighbours.REPLACE_ONE, len(labels))
    return BaseRates.planned(budget, public, labels, count)


@pytest.mark.parametrize("shares", [(0.98, 0.02), (0.55, 0.43, 0.02)])
def test_rates_are_found_and_one_record_moves_them_by_what_is_charged(shares, getkey):
    rng = np.random.default_rng(0)
    labels = rng.choice(len(shares), 1000, p=shares)
    rates = planned(labels, len(shares))
    found = rates.found(key=getkey(), owner="fit")
    assert found == pytest.approx(shares, abs=0.06)
    assert found.sum() == pytest.approx(1)
    assert rates.release is not None
    rows = planned(np.arange(-1, len(shares)), len(shares)).rows
    moves = [np.linalg.norm(a - b) for a in rows for b in rows]
    assert max(moves) <= 2 * rates.release.queries[0].clip_norm + 1e-6


def test_rates_are_equal_if_every_class_has_many_records(getkey):
    rates = planned(np.arange(2000) % 10 // 9, 2)
    assert rates.releases
    assert rates.found(key=getkey(), owner="fit").tolist() == [0.5, 0.5]


def test_rates_are_equal_without_records_enough(getkey):
    for budget in (dpb.PrivacyBudget(0.1, 1e-5), dpb.PrivacyBudget(1.0, 0.0)):
        rates = planned(np.zeros(50, int), 2, budget)
        assert not rates.releases
        assert rates.found(key=getkey(), owner="fit").tolist() == [0.5, 0.5]


def noise_of_rates(monkeypatch, share):
    """Return the noise of released rates over that of the ledger, scaled by a share."""
    released, seen = usability._released, []

    def spy(query, mechanism, rows, *, key):
        seen.append(np.asarray(released(query, mechanism.scaled(share), rows, key=key)))
        return seen[-1]

    rates = planned(np.zeros(600, int), 2)
    with monkeypatch.context() as patch:
        patch.setattr(usability, "_released", spy)
        for key in jax.random.split(jax.random.key(0), 600):
            rates.found(key=key, owner="fit")
    assert rates.release is not None
    return np.std(seen, axis=0).mean() / rates.release.noise_std


def test_the_noise_of_rates_is_that_of_the_ledger(monkeypatch):
    assert noise_of_rates(monkeypatch, 1.0) == pytest.approx(1, abs=0.06)
    assert noise_of_rates(monkeypatch, 0.9) < 0.94  # the control


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
