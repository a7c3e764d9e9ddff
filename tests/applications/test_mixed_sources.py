"""MixedSources: mixtures of models, their coordinates and their scores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.applications import (
    MixedSources,
    source_weights,
)
from dpbilevel.applications.mixed_sources import Mixture, moments_objective
from dpbilevel.applications.selected_sources import score_objective
from tests.applications.sources import (
    DATA,
    LONG_MIXED,
    MIXED,
    RIDGE,
    TWO,
    W0,
    WEIGHTING,
    D,
    K,
    descend,
    levels,
    long,
    mean_loss,
    of_sources,
    runs,
    scores,
)
from tests.cases import Audited, Case, planned


def planned_moments(kind=MixedSources):
    """Nearly all of the budget in second moments, for canaries against nothing."""
    split = (0.03, 1.0, 0.03, 0.03, 0.03, 1.0, 0.03)
    solver = kind(TWO, TWO, TWO, TWO, budget_split=split)
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE
    return planned(solver.with_neighbours(added), "overlapping")


# Second moments of a canary are those of its opposite: they have a row of their own.
OF_MEANS = (0.2, 0.002, 0.2, 0.2, 0.2, 0.002, 0.2)

CONTRACT = {"mixed_sources": Case(WEIGHTING, MIXED, DATA, W0, "disjoint")}
AUDITS = {
    "MixedSources": Audited(
        planned(
            MixedSources(TWO, TWO, TWO, TWO, budget_split=OF_MEANS),
            "overlapping",
        )
    ),
    "MixedSources, add or remove": Audited(planned_moments(), exact=False),
}


@functools.cache
def mixed():
    return runs(LONG_MIXED)


def power(matrix, exponent, least=0.0):
    """Of a symmetric matrix plus a share of its norm."""
    values, vectors = np.linalg.eigh(matrix)
    values = values + least * np.linalg.norm(matrix)
    return vectors * values**exponent @ vectors.T


def coordinates(models, moments):
    """The directions that a mixture moves along, by their formula."""
    models, moments = (np.asarray(v, float) for v in (models, moments))
    basis = power(models @ models.T, -0.5, 0.01) @ models
    return power(moments @ moments, -0.25, 0.2**2) @ basis


def second_moments(models, start):
    """Of the directions of the training records' gradients, by differences."""
    models = np.asarray(models, float)
    basis = power(models @ models.T, -0.5, 0.01) @ models
    y = np.asarray(start) @ models
    features, label = (np.asarray(DATA.lower[k], float) for k in ("features", "label"))
    slope = -label / (1 + np.exp(label * (features @ y)))
    gradients = slope[:, None] * (features @ basis.T)
    gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients.T @ gradients / len(gradients)


@pytest.mark.slow
def test_the_fit_of_a_mixture_starts_at_the_mean_of_kept_models_by_their_sizes():
    sizes = np.array([30, 10, 20])
    data = levels(counts=sizes)
    found = runs(dataclasses.replace(LONG_MIXED, fit=long(15, 1e-7)), data)[1]
    kept = sizes * [1, 1, 0]
    expected = kept @ np.asarray(found["models"])[:K] / kept.sum()
    np.testing.assert_allclose(found["fit"], expected, rtol=1e-4)


@pytest.mark.slow
def test_mixtures_are_found_for_a_loss_with_a_derivative_of_its_own():
    @jax.custom_vjp
    def loss(y, record):
        return dpb.logistic_loss(y, record)

    def backward(saved, g):
        return g * jax.grad(dpb.logistic_loss)(*saved), None

    loss.defvjp(lambda *args: (dpb.logistic_loss(*args), args), backward)
    problem = dpb.source_weighting(loss, K)
    (_, y), _ = runs(MIXED, problem=problem)
    (_, expected), _ = runs(MIXED, problem=dpb.source_weighting(dpb.logistic_loss, K))
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_mixture_is_that_of_seven_problems_one_after_the_other():
    (x, y), found = mixed()
    by_source = [of_sources(DATA, [s]) for s in range(K)]

    def lower(models):  # equal numbers of records, and half the weight of the last
        own = sum(mean_loss(models[s], by_source[s]) for s in range(K)) / K
        return own + 0.5 * mean_loss(models[K], DATA.lower)

    def descent_along(start, basis, *options):
        def upper(u):
            return mean_loss(start + u @ basis, DATA.upper)

        u = descend(upper, jnp.zeros(len(basis)), *options)
        return u, start + u @ basis

    models = descend(lower, jnp.zeros((K + 1, D)), 30)
    moments = second_moments(models, jnp.eye(K + 1)[K])
    mixture, mixed_model = descent_along(models[K], coordinates(models, moments), 20)
    kept = of_sources(DATA, [0, 1])
    of_kept = jnp.mean(models[:2], 0)  # where the fit starts
    fit = descend(lambda y: mean_loss(y, kept) + RIDGE * jnp.sum(y * y), of_kept, 15)
    # One source is dropped.
    candidates = jnp.stack([*models[:2], jnp.zeros(D), mixed_model, fit])
    start = jnp.eye(K + 2)[K:].T @ jnp.array([1 / 6, 5 / 6])  # two thirds are kept
    remoments = second_moments(candidates, start)
    basis = coordinates(candidates, remoments)
    remixture, expected_y = descent_along(start @ candidates, basis, 10, 0.2)
    for name, expected in (
        ("models", models),
        ("moments", moments),
        ("mixture", mixture),
        ("fit", fit),
        ("remoments", remoments),
        ("remixture", remixture),
    ):
        np.testing.assert_allclose(
            found[name], expected, rtol=1e-3, atol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(y, expected_y, rtol=2e-4)
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)


def first_mixture(found):
    """The model of the mixture of line 3."""
    basis = coordinates(found["models"], found["moments"])
    return found["models"][-1] + jnp.asarray(found["mixture"] @ basis, jnp.float32)


@pytest.mark.slow
def test_a_mixture_is_scored_and_not_the_common_model():
    _, found = mixed()
    expected = scores(first_mixture(found))
    np.testing.assert_allclose(found["score"], expected, 1e-5, 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 1e-3, 1.0, 1e3])
def test_coordinates_of_a_mixture_are_finite_whatever_the_noise(noise):
    rng = np.random.default_rng(0)
    models = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)  # they span four numbers
    moments = jnp.asarray(np.eye(5) / 5 + noise * rng.normal(size=(5, 5)), jnp.float32)
    symmetric = np.asarray(moments + moments.T, float) / 2
    for scale in (0.0, 1e-30, 1.0, 1e30):
        mixture = Mixture(scale * models, jnp.zeros(5), moments)
        basis = jax.jacobian(mixture.model)(jnp.zeros(5)).T
        expected = 0 if scale == 0 else coordinates(models, symmetric)
        np.testing.assert_allclose(basis, expected, rtol=2e-3, atol=2e-4)


def test_differences_from_the_common_initial_point_are_mixed():
    rng = np.random.default_rng(0)
    origin, models = rng.normal(size=6), rng.normal(size=(3, 6))
    origin, models = jnp.asarray(origin, jnp.float32), jnp.asarray(models, jnp.float32)
    start, missed = jnp.eye(3)[2], {}
    for name, point in (("origin", origin), ("zero", None)):
        mixture = Mixture(models, start, None, point)
        np.testing.assert_allclose(mixture.model(jnp.zeros(3)), models[2], atol=1e-5)
        directions = np.asarray(jax.jacobian(mixture.model)(jnp.zeros(3)))
        differences = np.asarray(models - origin[None]).T
        fitted = differences @ np.linalg.lstsq(differences, directions, rcond=None)[0]
        missed[name] = np.max(np.abs(directions - fitted))
    assert missed["origin"] < 1e-4 < 1e-1 < missed["zero"]  # zero is the control


@pytest.mark.parametrize("kind", ["moments", "scores"])
def test_a_training_record_is_of_norm_1_in_moments_and_scores(kind):
    models = jnp.asarray(np.random.default_rng(0).normal(size=(K + 1, D)), jnp.float32)
    if kind == "moments":
        mixture = Mixture(models, jnp.eye(K + 1)[K])
        objective = moments_objective(WEIGHTING, mixture)
        w = jnp.zeros((K + 1, K + 1))
    else:
        objective = score_objective(WEIGHTING, models[0], W0[1])
        w = jnp.zeros((2, K))
    spoilt = {
        "known": DATA.lower,
        "unknown": {**DATA.lower, "source": jnp.full(60, K)},
        "not finite": {**DATA.lower, "label": jnp.full(60, jnp.nan)},
    }
    of_rows = jax.jit(jax.vmap(objective.records["lower"], (None, 0)))
    for name, rows in spoilt.items():
        values = of_rows(w, rows)
        norms = jnp.linalg.norm(values.reshape(60, -1), axis=1)
        expected = 1.0 if name == "known" else 0.0
        np.testing.assert_allclose(norms, expected, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_fewer_records_are_dropped_the_nearer_the_last_run_starts_to_the_mixture():
    still = dataclasses.replace(LONG_MIXED, remixture=long(1, 1e-9))
    for flipped, share in (((), 0.5), ((0,), 1 / 6), ((0, 1), 0.0)):
        (_, y), found = runs(still, levels(flipped=flipped))
        mixture = first_mixture(found)
        expected = share * mixture + (1 - share) * found["fit"]
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)
        assert not np.allclose(mixture, found["fit"], rtol=0.01)


@pytest.mark.slow
def test_a_mixture_is_projected_onto_the_models_of_the_problem():
    ball = dataclasses.replace(WEIGHTING, y_set=dpb.sets.Ball(0.1))
    (_, y), found = runs(MixedSources(*[long(5)] * 4), problem=ball)
    assert float(jnp.linalg.norm(found["fit"])) <= 0.1 + 1e-6
    assert float(jnp.linalg.norm(y)) == pytest.approx(0.1, rel=1e-5)
