"""Steps that are too long for the public terms: rows of the report, and a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.core.curvature import largest_curvature, overshooting_row

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
SIZES = dpb.Sizes(300, 200, "disjoint")
GROUPS = np.repeat([0, 1], 3)
# Curvatures of exp(-8) to exp(2) = 7.39.
PROBLEM = dpb.penalty_tuning(dpb.logistic_loss, GROUPS)
LEAST, LARGEST = jnp.full(2, -8.0), jnp.full(2, 2.0)
Y0 = jnp.zeros(6)
FIT = dpb.NoisyGD(5, 1.0, 0.1)


def penalty(size):
    return dpb.PenaltyBilevel(4, 10.0, dpb.NoisyGD(5, 1.0, size), step_size=1.0)


def single_loop(size):
    return dpb.SingleLoopBilevel(
        5, step_size=1.0, lower_step_size=0.1, linear_step_size=size
    )


def refitted(size):
    return dpb.Refitted(penalty(0.1), dpb.NoisyGD(5, 1.0, size))


def rows(solver, x, problem=PROBLEM):
    """The rows on steps, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = dpb.calibrate(problem, solver, BUDGET, sizes=SIZES, w0=(x, Y0))
    found = [row for row in plan.report.forecast if "public_curvature" in row]
    return found, [str(warning.message) for warning in caught], str(plan.report)


@pytest.mark.parametrize("seed", [0, 1])
def test_curvature_is_the_largest_eigenvalue(seed):
    root = np.random.default_rng(seed).normal(size=(7, 7))
    matrix = jnp.asarray(root @ root.T, jnp.float32)

    def gradient(w):
        flat = matrix @ jnp.concatenate([w["a"].ravel(), w["b"]])
        return {"a": flat[:6].reshape(2, 3), "b": flat[6:]}

    w = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(1)}
    exact = np.linalg.eigvalsh(np.asarray(matrix))[-1]
    assert largest_curvature(gradient, w) == pytest.approx(exact, rel=0.02)


def test_no_public_term_has_no_curvature():
    assert largest_curvature(lambda w: 0.0 * w, jnp.ones(3)) == 0.0


@pytest.mark.parametrize(("size", "found"), [(0.49, 0), (0.51, 1)])
def test_a_row_is_there_beyond_two_over_the_curvature(size, found):
    gradient = jax.grad(lambda w: 2.0 * jnp.sum(w * w))  # curvature 4
    row = overshooting_row(size, gradient, jnp.zeros(3))
    assert len(row) == found
    for entry in row:
        assert entry["public_curvature"] == pytest.approx(4.0, rel=1e-5)
    shapes = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert overshooting_row(size, gradient, shapes) == row


@pytest.mark.parametrize("make", [penalty, single_loop, refitted])
def test_the_box_of_x_decides_the_row_and_its_start_the_warning(make):
    found, warned, text = rows(make(1.0), LEAST)
    (row,) = found
    assert (row["step_size"], row["from_start"]) == (1.0, False)
    assert row["public_curvature"] == pytest.approx(np.exp(2), rel=1e-4)
    assert not warned
    assert "steps of 1 overshoot the public terms, whose curvature is 7.39 at the" in (
        text
    )

    found, warned, _ = rows(make(1.0), LARGEST)
    assert [row["from_start"] for row in found] == [True]
    (message,) = warned
    assert message.startswith("calibrate: steps of 1 overshoot")
    assert "Use steps of at most 0.27" in message

    assert rows(make(0.25), LARGEST)[:2] == ([], [])


def test_steps_at_an_x_that_stays_are_judged_there():
    solver = dpb.bilevel.OneLevel(dpb.NoisyGD(5, 1.0, 1.0), "lower")
    assert rows(solver, LEAST)[:2] == ([], [])
    assert len(rows(solver, LARGEST)[1]) == 1


def test_training_warns_of_a_ridge_that_steps_overshoot():
    problem = dpb.FiniteSum(dpb.logistic_loss, public=lambda w: 2.0 * jnp.sum(w * w))
    for solver in (dpb.NoisyGD(5, 1.0, 1.0), dpb.onelevel.AllocatedGD(2, 3, 1.0, 1.0)):
        with pytest.warns(UserWarning, match="steps of 1 overshoot .* at most 0.5"):
            dpb.calibrate(problem, solver, BUDGET, sizes=200, w0=Y0)


def test_nothing_is_said_of_optax_rules():
    assert rows(penalty(optax.sgd(1.0)), LARGEST)[:2] == ([], [])


def test_rows_survive_json():
    with pytest.warns(UserWarning, match="overshoot"):
        plan = dpb.calibrate(
            PROBLEM, penalty(1.0), BUDGET, sizes=SIZES, w0=(LARGEST, Y0)
        )
    read = dpb.privacy.PrivacyReport.from_json(plan.report.to_json())
    assert str(read) == str(plan.report)
