"""A network's scores get a slope and constants, which are charged for."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy import Ledger
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.sklearn import DPMLPClassifier
from dpbilevel.sklearn.beforehand import PublicSize
from dpbilevel.sklearn.network import PART, Recalibration
from tests.cases import slow

N = 20_000
BUDGET = dpb.PrivacyBudget(3.0, 1e-6)


def drawn(slope, shift):
    """Scores of three classes, and labels whose chances have other scores."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(N, 3)).astype(np.float32)
    exact = slope * scores + np.asarray(shift)
    labels = np.argmax(exact + rng.gumbel(size=exact.shape), axis=1)
    return scores, labels.astype(np.int32)


def planned(size=N, neighbours=Neighbours.REPLACE_ONE):
    return Recalibration.plan(BUDGET, PublicSize(neighbours, size), 3)


@pytest.mark.parametrize("slope", [0.4, *slow(0.8)])
def test_slope_and_constants_are_found(slope, getkey):
    scores, labels = drawn(slope, [1.0, 0.0, -1.0])
    found, constants = planned().fit({"scores": scores, "label": labels}, key=getkey())
    assert found == pytest.approx(slope, abs=0.12)
    np.testing.assert_allclose(constants - constants.mean(), [1, 0, -1], atol=0.2)


def test_scores_are_never_made_surer(getkey):
    scores, labels = drawn(3.0, [0.0, 0.0, 0.0])
    found, _ = planned().fit({"scores": scores, "label": labels}, key=getkey())
    assert found == 1.0


def test_records_without_scores_have_no_influence(getkey):
    scores, labels = drawn(0.5, [0.0, 0.0, 0.0])
    labels[::2] = 1 - labels[::2]
    scores[::2] = np.nan
    found, constants = planned().fit({"scores": scores, "label": labels}, key=getkey())
    assert found == pytest.approx(0.5, abs=0.2)
    assert np.isfinite(constants).all()


def test_scores_that_overflow_raise_no_warning(getkey):
    scores, labels = drawn(0.5, [0.0, 0.0, 0.0])
    scores[0], scores[1], scores[2] = 3e38, np.inf, [3e38, -3e38, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = planned().fit({"scores": scores, "label": labels}, key=getkey())
    assert found == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("relation", Neighbours)
def test_the_run_is_what_is_charged_and_a_fifth_of_the_squared_budget(relation):
    found = planned(neighbours=relation)
    ran = found.solver.ledger(found.problem, N)
    charged = Ledger(found.releases)
    assert charged.epsilon(1e-6) == pytest.approx(ran.epsilon(1e-6), rel=1e-9)
    one = dataclasses.replace(found.releases[0], count=1)  # a broken copy
    assert Ledger((one,)).epsilon(1e-6) < 0.5 * ran.epsilon(1e-6)
    whole = found.releases[0].mechanism.scaled((PART / 50) ** 0.5)
    all_of_it = dataclasses.replace(found.releases[0], count=1, mechanism=whole)
    assert Ledger((all_of_it,)).epsilon(1e-6) == pytest.approx(3, rel=1e-4)


@pytest.mark.slow
def test_the_report_of_a_network_lists_the_recalibration():
    X = np.random.default_rng(0).uniform(-1, 1, (500, 2))
    y = (X[:, 0] > 0).astype(int)
    model = DPMLPClassifier(
        classes=[0, 1], bounds=(-1, 1), max_iter=2, hidden_layer_sizes=3
    ).fit(X, y, key=jax.random.key(0))
    rows = {row.release: row for row in model.privacy_report_.ledger}
    assert rows["recalibration"].count == 50
    assert model.privacy_report_.epsilon <= 1


@pytest.mark.slow
def test_scores_of_noise_leave_an_answer_that_is_nearly_constant():
    rng = np.random.default_rng(0)
    scores = 8 * rng.normal(size=(600, 3)).astype(np.float32)
    labels = rng.integers(0, 3, 600).astype(np.int32)
    found = Recalibration.plan(BUDGET, PublicSize(Neighbours.REPLACE_ONE, 600), 3)
    slope, constants = found.fit(
        {"scores": scores, "label": labels}, key=jax.random.key(2)
    )
    assert slope < 0.1
    assert np.abs(constants - constants.mean()).max() < 0.5
