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
    read_in_pieces(monkeypatch)


def read_in_pieces(patch):
    patch.setattr(objectives, "_BYTES", {})
    patch.setattr(objectives, "_BYTES_ACCELERATOR", (0, 32000))


@pytest.fixture(scope="module")
def hypergradient():
    """One compiled function of x and data for all kinds of records."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        read_in_pieces(patch)
        problem, data, x, y0 = logistic("alike")
        assert objectives.lower_objective(problem, data).subsample() is not None
        newton = dpb.oracles.NewtonCG(tolerance=1e-10)

        def value(x, data):
            y, info = dpb.oracles.lower_solve(problem, x, data, y0=y0, solver=newton)
            return objectives.upper_objective(problem, data).value(x, y), (y, info)

        return jax.jit(jax.grad(value, has_aux=True)).lower(x, data).compile()


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
def test_solution_and_hypergradient_are_of_all_records_whatever_the_thinned_ones_are(
    kind, hypergradient, x64
):
    _, data, x, _ = logistic(kind)
    found, (y, info) = hypergradient(x, data)
    features, label, x, y = map(np.asarray, (*data.lower.values(), x, y))
    share = 1 / (1 + np.exp(label * (features @ y)))
    slope = -features.T @ (label * share) / len(label)
    np.testing.assert_allclose(slope + np.exp(x) * y, 0, atol=1e-10)
    assert info.converged
    assert info.num_steps < 30
    weight = share * (1 - share) / len(label)
    hessian = features.T @ (weight[:, None] * features) + np.diag(np.exp(x))
    exact = -np.exp(x) * y * np.linalg.solve(hessian, slope)
    np.testing.assert_allclose(found, exact, rtol=1e-4)


@pytest.mark.parametrize("place", [16, 17])
def test_a_nan_in_any_record_has_no_solution(place, hypergradient, x64):
    _, data, x, _ = logistic("alike")
    rows = data.lower | {"label": data.lower["label"].at[place].set(jnp.nan)}
    found, (y, info) = hypergradient(x, dataclasses.replace(data, lower=rows))
    assert np.all(np.isnan(y))
    assert np.all(np.isnan(found))
    assert not info.converged


def test_products_read_all_records_only_where_the_thinned_ones_mislead(
    pieces, monkeypatch
):
    problem, _, _, y0 = logistic("alike")
    counts = []
    linearization = objectives.Objective.linearize

    def counted(self, x, y):
        value, slope, product = linearization(self, x, y)

        def read(v):
            jax.debug.callback(lambda: counts.append(1))
            return product(v)

        return value, slope, read

    monkeypatch.setattr(objectives.Objective, "linearize", counted)
    solve = jax.jit(lambda x, data: dpb.oracles.lower_solve(problem, x, data, y0=y0)[1])
    for kind, whole in (("alike", False), ("none", True)):
        _, data, x, _ = logistic(kind)
        counts.clear()
        info = solve(x, data)
        jax.effects_barrier()
        assert info.converged
        assert (len(counts) > 0) == whole


def test_short_records_are_not_thinned():
    problem, data, *_ = logistic("alike")
    assert objectives.lower_objective(problem, data).subsample() is None
