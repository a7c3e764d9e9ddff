"""Initial points that are Equinox modules, and those of the wrong length."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from tests.zoo.networks import mlp

MODEL = mlp(2, 1, 2, 1)
ARRAYS, STATIC = eqx.partition(MODEL, eqx.is_inexact_array)
BUDGET = dpb.PrivacyBudget(2.0, 1e-3)
OPTIONS = {"budget": BUDGET, "precision": "float"}  # which compiles sooner
ADAM = optax.adam(0.1)
SOLVER = dpb.NoisyGD(3, clip_norm=1.0, step_size=ADAM)
ROWS = {
    "x": np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32),
    "y": np.ones(20, np.float32),
}


def error(model, row):
    return (model(row["x"])[0] - row["y"]) ** 2


def error_of_arrays(arrays, row):
    return error(eqx.combine(arrays, STATIC), row)


def error_with_x(x, model, row):
    return error(model, row) + 0 * x


def decay(x, model):
    return jnp.exp(x) * optax.tree.norm(eqx.filter(model, eqx.is_array), squared=True)


def test_a_module_is_fitted_as_its_arrays_are():
    def fitted(loss, w0):
        key = jax.random.key(1)
        return dpb.fit(
            dpb.FiniteSum(loss), SOLVER, ROWS, w0, key=key, trajectory=True, **OPTIONS
        )

    got, want = fitted(error, MODEL), fitted(error_of_arrays, ARRAYS)
    assert got.value(jnp.ones(2)).shape == (1,)
    assert got.value.activation is MODEL.activation
    for found, expected in ((got.value, want.value), (got.trajectory, want.trajectory)):
        found = eqx.filter(found, eqx.is_array)
        for v, w in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_array_equal(v, w)
    assert got.report == want.report


@pytest.mark.slow
def test_plans_and_runs_take_modules():
    problem = dpb.FiniteSum(error)
    options = {"sizes": 20, "precision": "float"}
    plan = dpb.calibrate(problem, SOLVER, BUDGET, w0=MODEL, **options)
    run = dpb.start(problem, plan, ROWS, MODEL, key=jax.random.key(1))
    value = dpb.advance(run, 1).value
    assert value(jnp.ones(2)).shape == (1,)
    assert jax.tree.structure(value) == jax.tree.structure(MODEL)


@pytest.mark.slow
def test_a_module_may_be_the_lower_variable():
    problem = dpb.BilevelProblem(error_with_x, error_with_x, lower_public=decay)
    solver = dpb.SingleLoopBilevel(
        1, clip_norm=1.0, step_size=0.1, lower_step_size=0.1, linear_step_size=0.1
    )
    data = dpb.Levels(ROWS, jax.tree.map(np.copy, ROWS))
    key = jax.random.key(2)
    found = dpb.fit(
        problem, solver, data, (jnp.zeros(()), MODEL), budget=BUDGET, key=key
    )
    assert found.y(jnp.ones(2)).shape == (1,)


def test_a_problem_that_cannot_keep_leaves_says_how_to_split_them():
    class Own(dpb.FiniteSum):
        pass

    with pytest.raises(TypeError, match="Own takes no w0"):
        dpb.calibrate(Own(error), SOLVER, BUDGET, sizes=20, w0=MODEL)


def test_initial_points_of_the_wrong_length_name_all_shapes():
    options = OPTIONS | {"key": jax.random.key(3)}
    rows = {"features": np.ones((20, 3)), "label": np.ones(20)}
    linear = dpb.FiniteSum(dpb.logistic_loss)
    shapes = r"loss fails for w0 float32\[4\], record\['features'\] float32\[3\], rec"
    with pytest.raises(ValueError, match=shapes):
        dpb.fit(linear, SOLVER, rows, jnp.zeros(4), **options)
    wide = ROWS | {"x": np.ones((20, 5), np.float32)}
    shapes = r"w0.layers\[0\].weight float32\[2, 2\].* record\['x'\] float32\[5\]"
    with pytest.raises(TypeError, match=rf"{shapes}.*without a batch axis"):
        dpb.fit(dpb.FiniteSum(error), SOLVER, wide, MODEL, **options)


def test_a_loss_with_batch_normalization_is_refused():
    def loss(w, row):
        return jnp.sum((w - jax.lax.pmean(row["x"], "batch")) ** 2)

    with pytest.raises(ValueError, match=r"loss uses a named axis.* w0 .*Use layer or"):
        dpb.fit(
            dpb.FiniteSum(loss),
            SOLVER,
            ROWS,
            jnp.zeros(2),
            key=jax.random.key(4),
            **OPTIONS,
        )


def test_the_lower_solution_names_the_shapes_of_a_wrong_start():
    def lower(x, y, row):
        return (row["x"] @ y - row["y"]) ** 2 + 0 * x

    problem = dpb.BilevelProblem(lower, lower)
    data = dpb.Levels(ROWS, jax.tree.map(np.copy, ROWS))
    shapes = r"lower_solution: problem.lower fails for x float32\[\], y float32\[3\]"
    with pytest.raises(TypeError, match=shapes):
        dpb.oracles.lower_solution(problem, jnp.zeros(()), data, y0=jnp.zeros(3))


def _branching(w, record):
    return jnp.sum(w) if record["label"] > 0 else 0.0 * jnp.sum(w)


def _dropping(w, record):
    raise RuntimeError("Dropout requires a key.")


@pytest.mark.parametrize(
    ("loss", "hint"),
    [
        (lambda w, record, key: jnp.sum(w), "a function of w0, record; a key comes"),
        (_branching, r"Use jnp\.where in place of `if`"),
        (_dropping, r"in dpb\.Randomized: it gets a key"),
    ],
)
def test_the_hint_fits_what_is_wrong_with_a_loss(loss, hint):
    rows = {"features": np.ones((4, 2)), "label": np.ones(4)}
    options = OPTIONS | {"key": jax.random.key(0)}
    with pytest.raises((TypeError, RuntimeError)) as caught:
        dpb.fit(dpb.FiniteSum(loss), SOLVER, rows, jnp.zeros(2), **options)
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert re.search(hint, "\n".join(said))
