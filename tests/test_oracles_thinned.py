"""Newton's method with the Hessian of few records: the same answers, fewer passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.oracles import objectives

KINDS = ("alike", "sorted", "misleading", "none")


@pytest.fixture
def pieces(monkeypatch):
    monkeypatch.setattr(objectives, "_BYTES", {})
    monkeypatch.setattr(objectives, "_BYTES_ACCELERATOR", (0, 32000))


def logistic(kind, n=4000, d=3):
    """Where every 16th record is like the others, or says nothing of them."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, d))
    label = np.sign(features @ rng.normal(size=d) + rng.normal(size=n))
    if kind == "sorted":
        order = np.argsort(label)
        features, label = features[order], label[order]
    if kind == "misleading":
        features[::16] *= 0.1
    if kind == "none":
        features[::16] = 0
    rows = jax.tree.map(jnp.asarray, {"features": features, "label": label})
    problem = dpb.penalty_tuning(dpb.logistic_loss, jnp.arange(d))
    return problem, dpb.Levels(rows, rows), jnp.full(d, -4.0), jnp.zeros(d)


@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_is_that_of_all_records_whatever_the_thinned_ones_are(
    kind, pieces
):
    with jax.enable_x64(True):
        problem, data, x, y0 = logistic(kind)
        assert objectives.lower_objective(problem, data).thinned() is not None
        y, info = jax.jit(
            lambda x: dpb.lower_solve(
                problem, x, data, y0=y0, solver=dpb.NewtonCG(tolerance=1e-10)
            )
        )(x)
        assert info.converged
        gradient = objectives.lower_objective(problem, data).gradient(x, y)
        np.testing.assert_allclose(np.linalg.norm(gradient), info.gradient_norm)
        assert info.gradient_norm <= 1e-10
        assert info.num_steps < 30


def test_a_hypergradient_with_a_thinned_hessian_agrees_with_a_dense_one(pieces):
    with jax.enable_x64(True):
        problem, data, x, y0 = logistic("alike")

        @jax.jit
        @jax.grad
        def slope(x):
            y = dpb.lower_solution(
                problem, x, data, y0=y0, solver=dpb.NewtonCG(tolerance=1e-9)
            )
            return objectives.upper_objective(problem, data).value(x, y)

        y = dpb.lower_solution(
            problem, x, data, y0=y0, solver=dpb.NewtonCG(tolerance=1e-9)
        )
        exact, _ = dpb.implicit_hypergradient(
            problem, x, y, data, linear_solver=dpb.Cholesky()
        )
        np.testing.assert_allclose(slope(x), exact, rtol=1e-4)


@pytest.mark.parametrize("thinned", [True, False])
def test_a_nan_in_any_record_has_no_solution(thinned, pieces):
    problem, data, x, y0 = logistic("alike")
    place = 16 if thinned else 17
    rows = data.lower | {"label": data.lower["label"].at[place].set(jnp.nan)}
    data = dataclasses.replace(data, lower=rows)
    y, info = dpb.lower_solve(problem, x, data, y0=y0)
    assert np.all(np.isnan(y))
    assert not info.converged


@pytest.mark.parametrize(("kind", "whole"), [("alike", False), ("none", True)])
def test_products_read_all_records_only_where_the_thinned_ones_mislead(
    kind, whole, pieces, monkeypatch
):
    problem, data, x, y0 = logistic(kind)
    counts = []
    linearized = objectives.Objective.linearized

    def counted(self, x, y):
        value, slope, product = linearized(self, x, y)

        def read(v):
            jax.debug.callback(lambda: counts.append(1))
            return product(v)

        return value, slope, read

    monkeypatch.setattr(objectives.Objective, "linearized", counted)
    _, info = dpb.lower_solve(problem, x, data, y0=y0)
    jax.effects_barrier()
    assert info.converged
    assert (len(counts) > 0) == whole


def test_short_records_are_not_thinned():
    problem, data, *_ = logistic("alike")
    assert objectives.lower_objective(problem, data).thinned() is None
