"""Recalibration: a few numbers of a model from the upper records."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import dpbilevel as dpb
from dpbilevel import NoisyGD
from dpbilevel.applications import (
    Recalibration,
    ScaledGroups,
    SelectedSources,
    WarmStarted,
)
from dpbilevel.applications.recalibration import constants_of
from dpbilevel.bilevel import OneLevel
from dpbilevel.bilevel.levels import Level
from tests.cases import Audited, Case, planned, slow

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
RECALIBRATION = Recalibration(TWO, intercept=-1)
EXACT = Recalibration(dataclasses.replace(LONG, step_size=0.2), intercept=-1)


def after(first, then=RECALIBRATION, split=(1.0, 1.0)):
    return WarmStarted(first, then, split)


CONTRACT = {
    "base_rate": Case(WEIGHTING, RECALIBRATION, DATA, W0, "disjoint", keeps_x=True),
    "recalibrated": Case(
        WEIGHTING, after(OneLevel(GD, "lower")), DATA, W0, "disjoint", keeps_x=True
    ),
    "recalibrated_both": Case(
        WEIGHTING,
        after(OneLevel(GD, "both"), Recalibration(TWO, intercept=0), (0.6, 0.4)),
        DATA,
        W0,
        "overlapping",
        keeps_x=True,
    ),
}


def planned_recalibration(kind=Recalibration, people="disjoint"):
    return planned(kind(TWO, intercept=0, budget_split=(0.5, 0.5)), people)


AUDITS = {
    "Recalibration": Audited(planned_recalibration(), x_in_records=False),
    "Recalibration, add or remove": Audited(
        planned_recalibration().with_neighbours(dpb.Neighbours.ADD_OR_REMOVE_ONE),
        x_in_records=False,
    ),
    "WarmStarted, recalibrated": Audited(
        planned(after(OneLevel(TWO, "both"), Recalibration(TWO)), "overlapping")
    ),
    "WarmStarted, sources recalibrated": Audited(
        planned(
            after(SelectedSources(TWO, TWO), Recalibration(TWO), (0.1, 0.9)),
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


@pytest.mark.slow
def test_from_a_model_of_zeros_the_answer_is_the_base_rate_of_the_upper_labels():
    y = noiseless(EXACT)
    positive = float(np.mean(np.asarray(DATA.upper["label"]) > 0))
    assert np.all(y[:-1] == 0)
    assert y[-1] == pytest.approx(math.log(positive / (1 - positive)), abs=1e-3)


@pytest.mark.parametrize("intercept", [-1, *slow(None)])
def test_without_noise_slope_and_constant_are_the_best_ones_of_the_upper_records(
    intercept,
):
    model = noiseless(OneLevel(LONG, "lower"))
    then = dataclasses.replace(EXACT, intercept=intercept)
    y = noiseless(after(OneLevel(LONG, "lower"), then))
    constant = np.eye(D)[-1] if intercept else np.zeros(D)

    def loss(u):
        return mean_loss(u[0] * model + u[1] * constant)

    best = minimize(loss, [1.0, 0.0], method="Nelder-Mead", options={"fatol": 1e-10})
    assert mean_loss(y) == pytest.approx(best.fun, abs=1e-5)
    assert best.fun < mean_loss(model) - 0.05  # a model of the lower records is worse


def curvature(solver, y, data=DATA, x=W0[0]):
    solver = solver.with_noise(0.0).with_precision("float").with_sizes(SIZES)
    state = solver.init(WEIGHTING, (x, y))
    state = solver.step(WEIGHTING, data, state, key=jax.random.key(0))
    return np.asarray(state.outputs["curvature"], float)


@pytest.mark.slow
def test_the_curvature_is_the_mean_hessian_of_the_lower_losses_at_zero():
    y = jnp.arange(1.0, D + 1)
    wide = dataclasses.replace(EXACT, curvature=NoisyGD(1, 10.0, 1.0))
    x = np.asarray(DATA.lower["features"], float)
    slope = np.arange(1.0, D)  # without the coefficient of the constant
    along = np.stack([x[:, :-1] @ slope / np.linalg.norm(slope), x[:, -1]])
    expected = along @ along.T / 4 / len(x)
    np.testing.assert_allclose(curvature(wide, y), expected, rtol=1e-5)
    narrow = dataclasses.replace(EXACT, curvature=NoisyGD(1, 0.2, 1.0))
    middle = np.asarray(narrow.start("curvature", (W0[0], y), {}))
    apart = np.einsum("in,jn->nij", along, along) / 4 - middle
    lengths = np.linalg.norm(apart, axis=(1, 2), keepdims=True)
    assert np.mean(lengths > 0.2) > 0.3
    clipped = middle + np.mean(apart * np.minimum(1, 0.2 / lengths), 0)
    np.testing.assert_allclose(curvature(narrow, y), clipped, rtol=1e-5)


@pytest.mark.slow
def test_records_of_no_known_source_and_unequal_weights_do_not_change_curvatures():
    y = jnp.ones(D)
    unknown = DATA.lower | {"source": jnp.full(90, 7)}
    data = dpb.Levels(DATA.upper, unknown)
    start = EXACT.start("curvature", (W0[0], y), {})
    np.testing.assert_allclose(curvature(EXACT, y, data), start, rtol=1e-6)
    unequal = curvature(EXACT, y, x=jnp.asarray([9.0, -9.0]))
    np.testing.assert_allclose(unequal, curvature(EXACT, y), rtol=1e-5)


@pytest.mark.slow
def test_the_answer_does_not_depend_on_the_scale_of_the_features(getkey):
    key = getkey()

    def score(factor):
        data = dpb.Levels(
            *(
                level | {"features": factor * level["features"]}
                for level in (DATA.upper, DATA.lower)
            )
        )
        of_scale = NoisyGD(1, 0.5 * factor**2, 1.0)
        solver = dataclasses.replace(RECALIBRATION, curvature=of_scale)
        solver = solver.with_noise(0.2).with_sizes(SIZES)
        w0 = W0[0], jnp.ones(D) / factor
        y = dpb.solve(WEIGHTING, solver, data, w0, key=jax.random.clone(key)).value[1]
        return factor * np.asarray(y)

    np.testing.assert_allclose(score(0.125), score(1.0), atol=1e-3)


def in_units(y, found, solver=RECALIBRATION):
    solver = solver.with_noise(3.0).with_sizes(SIZES)
    outputs, w0 = {"curvature": jnp.asarray(found)}, (W0[0], y)
    return solver, solver.scaled_span(w0, outputs), outputs


def test_the_ridge_is_24_times_the_squared_noise_of_one_release_of_the_whole_run():
    solver, _, outputs = in_units(jnp.ones(D), [[0.2, 0.1], [0.1, 0.3]])
    u = jnp.asarray([1.0, 2.0])
    level = Level(WEIGHTING, solver.queries("fit"))
    noise = solver.fit.release(level, SIZES).noise_std
    ridge = 24 * noise**2 / TWO.num_steps
    objective = solver.objective("fit", WEIGHTING, (W0[0], jnp.ones(D)), outputs)
    np.testing.assert_allclose(objective.public(u), ridge * u, rtol=1e-5)
    # Steps are shorter by the curvature of the ridge.
    step_size = solver.stage_solver("fit", outputs).step_size
    assert step_size == pytest.approx(TWO.step_size / (1 + ridge), rel=1e-5)


def test_along_the_released_directions_the_curvature_is_one_between_model_and_zero():
    y = jnp.arange(1.0, D + 1)
    hessian = np.asarray([[0.2, 0.1], [0.1, 0.3]])
    skew = np.asarray([[0.0, 0.05], [-0.05, 0.0]])  # noise that says nothing
    _, span, _ = in_units(y, hessian + skew)
    slope = np.append(np.arange(1.0, D), 0.0)
    bare = np.stack([slope / np.linalg.norm(slope), np.eye(D)[-1]])
    found = np.asarray(span.directions)
    root, *_ = np.linalg.lstsq(bare.T, found.T)
    np.testing.assert_allclose(root.T @ (0.7 * hessian) @ root, np.eye(2), atol=1e-5)


def test_curvatures_of_noise_are_a_small_part_of_their_range_and_answers_are_finite():
    for hessian in (np.zeros((2, 2)), -np.eye(2), np.full((2, 2), -0.1)):
        _, span, _ = in_units(jnp.ones(D), hessian)
        lengths = np.linalg.norm(span.directions, axis=1)
        least = 0.08 * RECALIBRATION.curvature.clip_norm / 2**0.5
        assert np.all(lengths <= 1.001 / math.sqrt(0.7 * least))
        assert np.all(np.isfinite(span.directions))


def test_without_a_change_the_answer_is_half_of_the_model_or_less_of_a_long_one():
    y = jnp.full(D, 3 / D**0.5)  # of norm 3
    for unit, share in ((0.25, 0.5), (0.6, 0.5), (2.4, 0.125)):
        found = {"curvature": unit**2 * jnp.eye(2), "fit": jnp.zeros(2)}
        pair = RECALIBRATION.current_solution("fit", WEIGHTING, (W0[0], y), found)
        np.testing.assert_allclose(pair[1], share * y, rtol=1e-5)


def test_a_search_for_another_problem_is_refused():
    plain = dpb.BilevelProblem(WEIGHTING.upper, WEIGHTING.lower)
    solver = after(SelectedSources(GD, GD)).with_noise(1.0)
    with pytest.raises(TypeError, match="problem must be"):
        solver.ledger(plain, SIZES)
    with pytest.raises(TypeError, match="first must solve a SourceWeighting"):
        after(ScaledGroups(GD))


@pytest.mark.parametrize(
    ("y", "intercept", "said"),
    [
        (jnp.zeros(3), 3, "intercept must be a place in y"),
        (jnp.zeros(3), "last", "intercept must be a place in y"),
        ({"w": jnp.zeros(3), "b": jnp.zeros(2)}, -1, "y must be one array"),
        (jnp.zeros((2, 2, 2)), -1, "y must be one array"),
    ],
)
def test_models_without_such_a_feature_are_refused(y, intercept, said):
    with pytest.raises(ValueError, match=said):
        constants_of("auto", y, intercept)


def test_of_several_scores_each_has_a_constant():
    found = constants_of("auto", jnp.zeros((4, 3)), -1)
    np.testing.assert_array_equal(found[:, -1], np.eye(3))
    assert found.shape == (3, 4, 3)
    assert np.sum(found) == 3


@pytest.mark.slow
@pytest.mark.parametrize("solver", [EXACT, after(OneLevel(LONG, "lower"), EXACT)])
def test_released_models_are_in_the_set(solver):
    inside = dataclasses.replace(WEIGHTING, y_set=dpb.sets.Ball(0.5))
    exact = solver.with_noise(0.0).with_precision("float").with_sizes(SIZES)
    run = jax.jit(lambda key: dpb.solve(inside, exact, DATA, W0, key=key).value[1])
    assert np.linalg.norm(run(jax.random.key(0))) <= 0.5 + 1e-6
    assert np.linalg.norm(noiseless(solver)) > 0.6  # the control: without the set
