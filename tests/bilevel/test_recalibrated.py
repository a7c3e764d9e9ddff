"""BaseRate, Recalibrated: a few numbers of a model from the upper records."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import dpbilevel as dpb
from dpbilevel.bilevel import (
    BaseRate,
    OneLevel,
    Recalibrated,
    ScaledGroups,
    SelectedSources,
)
from dpbilevel.bilevel.recalibrated import constants_of
from tests.cases import Audited, Case, planned

D, RIDGE = 8, 0.05
GD = dpb.NoisyGD(4, clip_norm=1.0, step_size=0.5)
TWO = dataclasses.replace(GD, num_steps=2)
LONG = dpb.NoisyGD(400, clip_norm=10.0, step_size=2.0, momentum=0.8)
WEIGHTING = dpb.source_weighting(dpb.logistic_loss, 2, ridge=RIDGE)
W0 = jnp.zeros(2), jnp.zeros(D)


def records(n, seed, offset):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D)) / 2
    x[:, -1] = 1.0
    model = np.append(np.linspace(1.0, -2.0, D - 1), offset)
    label = np.sign(x @ model + rng.logistic(size=n))
    tree = {"features": jnp.asarray(x, "f4"), "label": jnp.asarray(label, "f4")}
    return tree | {"source": jnp.asarray(np.arange(n) % 2, jnp.int32)}


DATA = dpb.Levels(
    {k: v for k, v in records(50, 0, 2.5).items() if k != "source"},
    records(90, 1, -1.0),
)
SIZES = WEIGHTING.sizes_of(DATA, "disjoint")
RECALIBRATED = Recalibrated(OneLevel(GD, "lower"), TWO, -1)
CONTRACT = {
    "base_rate": Case(WEIGHTING, BaseRate(GD), DATA, W0, "disjoint", keeps_x=True),
    "recalibrated": Case(WEIGHTING, RECALIBRATED, DATA, W0, "disjoint", keeps_x=True),
    "recalibrated_both": Case(
        WEIGHTING,
        Recalibrated(OneLevel(GD, "both"), TWO, 0, budget_split=(0.6, 0.4)),
        DATA,
        W0,
        "overlapping",
        keeps_x=True,
    ),
}


def planned_recalibrated(kind=Recalibrated):
    """For canary records of people of both levels."""
    return planned(kind(OneLevel(TWO, "both"), TWO), "overlapping")


AUDITS = {
    "BaseRate": Audited(planned(BaseRate(TWO, 0), "disjoint")),
    "Recalibrated": Audited(planned_recalibrated()),
    "Recalibrated, sources": Audited(
        planned(
            Recalibrated(SelectedSources(TWO, TWO), TWO, budget_split=(0.1, 0.9)),
            "overlapping",
        )
    ),
}


def noiseless(solver, w0=W0):
    solver = solver.with_noise(0.0).with_precision("float").with_sizes(SIZES)
    run = jax.jit(lambda key: dpb.solve(WEIGHTING, solver, DATA, w0, key=key).value[1])
    return np.asarray(run(jax.random.key(0)), float)


def mean_loss(y, level="upper"):
    rows = getattr(DATA, level)
    x, label = (np.asarray(rows[k], float) for k in ("features", "label"))
    return np.mean(np.logaddexp(0, -label * (x @ y)))


def test_the_base_rate_is_the_logarithm_of_the_odds_of_the_upper_labels():
    y = noiseless(BaseRate(LONG))
    positive = float(np.mean(np.asarray(DATA.upper["label"]) > 0))
    assert np.all(y[:-1] == 0)
    assert y[-1] == pytest.approx(math.log(positive / (1 - positive)), abs=1e-3)


@pytest.mark.parametrize("intercept", [-1, None])
def test_without_noise_slope_and_constant_are_the_best_ones_of_the_upper_records(
    intercept,
):
    model = noiseless(OneLevel(LONG, "lower"))
    y = noiseless(Recalibrated(OneLevel(LONG, "lower"), LONG, intercept))
    constant = np.eye(D)[-1] if intercept else np.zeros(D)

    def loss(u):
        return mean_loss(u[0] * model + u[1] * constant)

    best = minimize(loss, [1.0, 0.0], method="Nelder-Mead", options={"fatol": 1e-10})
    assert mean_loss(y) == pytest.approx(best.fun, abs=1e-5)
    assert best.fun < mean_loss(model) - 0.05  # a model of the lower records is worse


def test_the_ridge_is_twelve_times_the_squared_noise_of_one_release_of_the_whole_run():
    solver = RECALIBRATED.with_noise(3.0).with_sizes(SIZES)
    pair = W0[0], jnp.ones(D)
    level = solver.level(WEIGHTING, pair, SIZES)
    u = jnp.asarray([1.0, 2.0])
    bare = solver.level(WEIGHTING, (None, None), SIZES)
    noise = solver.calibration.release(bare, SIZES).noise_std
    expected = 12 * noise**2 / TWO.num_steps * u
    np.testing.assert_allclose(level.public_gradient(u), expected, rtol=1e-5)


def test_the_ridge_of_a_base_rate_is_that_of_a_recalibration():
    solver = BaseRate(TWO).with_noise(3.0).with_sizes(SIZES)
    level = solver.level("rate", WEIGHTING, (W0[0], jnp.ones(D)), {})
    noise = solver.rate.release(level, SIZES).noise_std
    expected = 12 * noise**2 / TWO.num_steps * 2.0
    found = level.public_gradient(jnp.asarray([2.0]))
    np.testing.assert_allclose(found, [expected], rtol=1e-5)


def test_a_search_for_another_problem_is_refused():
    plain = dpb.BilevelProblem(WEIGHTING.upper, WEIGHTING.lower)
    solver = Recalibrated(SelectedSources(GD, GD), TWO).with_noise(1.0)
    with pytest.raises(TypeError, match="problem must be"):
        solver.ledger(plain, SIZES)
    with pytest.raises(TypeError, match="search must solve a SourceWeighting"):
        Recalibrated(ScaledGroups(GD), TWO)


@pytest.mark.parametrize(
    ("y", "intercept", "said"),
    [
        (jnp.zeros(3), 3, "place of a feature"),
        (jnp.zeros(3), "last", "place of a feature"),
        ({"w": jnp.zeros(3), "b": jnp.zeros(2)}, -1, "y must be one array"),
        (jnp.zeros((2, 2, 2)), -1, "y must be one array"),
    ],
)
def test_models_without_such_a_feature_are_refused(y, intercept, said):
    with pytest.raises(ValueError, match=said):
        constants_of("BaseRate", y, intercept)


def test_of_several_scores_each_has_a_constant():
    found = constants_of("BaseRate", jnp.zeros((4, 3)), -1)
    np.testing.assert_array_equal(found[:, -1], np.eye(3))
    assert found.shape == (3, 4, 3)
    assert np.sum(found) == 3


@pytest.mark.parametrize(
    "solver", [BaseRate(LONG), Recalibrated(OneLevel(LONG, "lower"), LONG, -1)]
)
def test_released_models_are_in_the_set(solver):
    inside = dataclasses.replace(WEIGHTING, y_set=dpb.sets.Ball(0.5))
    exact = solver.with_noise(0.0).with_precision("float").with_sizes(SIZES)
    run = jax.jit(lambda key: dpb.solve(inside, exact, DATA, W0, key=key).value[1])
    assert np.linalg.norm(run(jax.random.key(0))) <= 0.5 + 1e-6
    assert np.linalg.norm(noiseless(solver)) > 0.6  # the control: without the set
