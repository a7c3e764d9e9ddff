"""Steps that are too long for the public terms: rows of the report, and a warning."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.core.descent import largest_curvature, overshooting_row
from tests.cases import slow

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


def one_level(size):
    return dpb.bilevel.OneLevel(dpb.NoisyGD(5, 1.0, size), "lower")


def rows(solver, x, problem=PROBLEM):
    """The rows on steps, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = dpb.calibrate(problem, solver, BUDGET, sizes=SIZES, w0=(x, Y0))
    found = [row for row in plan.report.forecast if row.public_curvature is not None]
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


def curvature(fun, w):
    return largest_curvature(jax.grad(fun), w)


def test_no_public_term_has_no_curvature():
    assert largest_curvature(lambda w: 0.0 * w, jnp.ones(3)) == 0.0
    assert largest_curvature(lambda w: w, {}) == 0.0


def test_leaves_of_the_same_shape_are_told_apart():
    w = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    found = curvature(lambda w: 5.0 * jnp.sum((w["a"] - w["b"]) ** 2), w)
    assert found == pytest.approx(20.0, rel=1e-4)


@pytest.mark.parametrize(
    ("diagonal", "largest"),
    [
        ([-5.0, -1.0], -1.0),
        ([-5.0, 1.0], 1.0),
        ([1e25, 1.0], 1e25),
        ([1e-25, 0.0], 1e-25),
    ],
)
def test_curvature_has_a_sign_and_any_size(diagonal, largest):
    d = jnp.asarray(diagonal, jnp.float32)
    found = largest_curvature(lambda w: d * w, jnp.zeros(2))
    assert found == pytest.approx(largest, rel=1e-3)


def test_a_concave_term_is_not_overshot():
    assert overshooting_row(1.0, lambda w: -5.0 * w, jnp.zeros(2)) == ()


def test_what_is_not_finite_is_infinite():
    found = curvature(lambda w: jnp.exp(1000.0) * jnp.sum(w**2), jnp.zeros(2))
    assert found == np.inf
    assert len(overshooting_row(1e-9, lambda w: jnp.exp(1000.0) * w, jnp.zeros(2))) == 1


def test_terms_that_only_compiled_code_can_differentiate_are_read():
    @jax.custom_vjp
    def term(w):
        return jnp.sum(w**2)

    term.defvjp(lambda w: (term(w), w), lambda w, g: (2 * g * w,))
    assert curvature(term, jnp.zeros(2)) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize(("size", "found"), [(0.49, 0), (0.51, 1)])
def test_a_row_is_there_beyond_two_over_the_curvature(size, found):
    gradient = jax.grad(lambda w: 2.0 * jnp.sum(w * w))  # curvature 4
    row = overshooting_row(size, gradient, jnp.zeros(3))
    assert len(row) == found
    for entry in row:
        assert entry.public_curvature == pytest.approx(4.0, rel=1e-5)


@pytest.mark.parametrize("make", [penalty, *slow(single_loop, refitted)])
def test_the_box_of_x_decides_the_row_and_its_start_the_warning(make):
    found, warned, text = rows(make(1.0), LEAST)
    (row,) = found
    assert (row.step_size, row.from_start) == (1.0, False)
    assert row.public_curvature == pytest.approx(np.exp(2), rel=1e-4)
    assert not warned
    name = {penalty: "inner", single_loop: "v", refitted: "refit"}[make]
    assert (
        f"  steps of {name}, of size 1, overshoot the public terms, whose curvature is "
        "7.39 at the ends of the set of x:"
    ) in text

    found, warned, _ = rows(make(1.0), LARGEST)
    assert [row.from_start for row in found] == [True]

    # Above the threshold at the start, and more so at an end.
    between, above, _ = rows(make(1.0), jnp.full(2, 1.0))
    assert [row.from_start for row in between] == [True, False]
    assert [row.public_curvature for row in between] == pytest.approx(
        [np.exp(1), np.exp(2)], rel=1e-4
    )
    assert "curvature is 2.72: such steps" in above[0]
    (message,) = warned
    assert message.startswith(f"calibrate: steps of {name}, of size 1, overshoot")
    assert "Use a step size of at most 0.14, or smaller public terms" in message

    assert rows(make(0.25), LARGEST)[:2] == ([], [])


def test_steps_at_an_x_that_stays_are_judged_there():
    solver = dpb.bilevel.OneLevel(dpb.NoisyGD(5, 1.0, 1.0), "lower")
    assert rows(solver, LEAST)[:2] == ([], [])
    assert len(rows(solver, LARGEST)[1]) == 1


@pytest.mark.parametrize(
    ("x_set", "largest"),
    [
        (dpb.sets.Box(-8.0, 2.0), 2.0),
        (dpb.sets.Box(-np.inf, 2.0), 2.0),
        (dpb.sets.Box(jnp.asarray([-8.0, -8.0]), jnp.asarray([2.0, 1.0])), 2.0),
        (dpb.sets.Box(-8.0, np.inf), None),
        (dpb.sets.Euclidean(), None),
        (dpb.sets.Simplex(), None),
    ],
)
def test_ends_are_those_of_a_box(x_set, largest):
    problem = dataclasses.replace(PROBLEM, x_set=x_set)
    found, _, _ = rows(penalty(1.0), LEAST, problem)
    expected = [] if largest is None else [np.exp(largest)]
    assert [row.public_curvature for row in found] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("make", [penalty, single_loop, refitted, one_level])
def test_shapes_are_enough(make):
    shapes = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (LARGEST, Y0)
    )
    dpb.calibrate(PROBLEM, make(0.1), BUDGET, sizes=SIZES, w0=shapes)


def test_a_refit_of_both_levels_is_judged_with_the_upper_term():
    problem = dpb.BilevelProblem(
        lambda x, y, z: dpb.logistic_loss(y, z),
        lambda x, y, z: dpb.logistic_loss(y, z),
        upper_public=lambda x, y: jnp.sum(y**2),
        x_in_records=False,
    )
    fit = dpb.NoisyGD(5, 1.0, 2.0)

    def curvatures(reads):
        solver = dpb.Refitted(single_loop(0.1), fit, (0.5, 0.5), reads)
        found, _, text = rows(solver, LEAST, problem)
        assert ("steps of refit, of size 2, overshoot" in text) == bool(found)
        return [row.public_curvature for row in found]

    assert curvatures("lower") == []
    # 2 n_f / n_g.
    assert curvatures("both") == pytest.approx([3.0], rel=1e-4)


def test_steps_in_x_are_judged_by_the_upper_term():
    problem = dpb.source_weighting(
        dpb.logistic_loss, 2, weight_penalty=50.0, parametrization="simplex"
    )
    equal = jnp.full(2, 0.5)
    for solver in (penalty(0.1), single_loop(0.1)):
        found, warned, _ = rows(solver, equal, problem)
        assert [row.release for row in found] == ["steps of x"]
        assert found[0].public_curvature == pytest.approx(100.0, rel=1e-4)
        assert len(warned) == 1


def test_runs_are_judged_by_the_fit_that_meets_the_public_terms():
    fit = dpb.NoisyGD(5, 1.0, 1.0)
    problem = dpb.source_weighting(dpb.logistic_loss, 2, ridge=5.0)
    for solver in (
        dpb.applications.SelectedSources(fit, fit),
        dpb.applications.MixedSources(fit, fit, fit, fit),
    ):
        found, _, _ = rows(solver, jnp.zeros(2), problem)
        assert [row.release for row in found] == ["steps of fit"]
    mixing = dataclasses.replace(
        dpb.applications.source_mixing(dpb.logistic_loss, 2),
        lower_public=lambda _, y: 5.0 * jnp.sum(y**2),
    )
    w0 = dpb.applications.mixing_start(jnp.zeros(6), 2)
    with pytest.warns(UserWarning, match="steps of lower, of size 1, overshoot"):
        dpb.calibrate(
            mixing, dpb.bilevel.LowerFirst(fit, fit), BUDGET, sizes=SIZES, w0=w0
        )


def test_a_start_that_is_no_pair_is_refused():
    with pytest.raises(ValueError, match=r"calibrate: w0 must be a pair \(x, y\)"):
        dpb.calibrate(PROBLEM, penalty(0.1), BUDGET, sizes=SIZES, w0=Y0)


def test_training_warns_of_a_ridge_that_steps_overshoot():
    problem = dpb.FiniteSum(dpb.logistic_loss, public=lambda w: 2.0 * jnp.sum(w * w))
    for solver in (dpb.NoisyGD(5, 1.0, 1.0), dpb.onelevel.AllocatedGD(2, 3, 1.0, 1.0)):
        with pytest.warns(
            UserWarning, match="steps, of size 1, overshoot .* at most 0.25"
        ):
            dpb.calibrate(problem, solver, BUDGET, sizes=200, w0=Y0)


# Rows of norm 2: logistic, squared, softmax, by the largest eigenvalue of a Hessian.
ROW = jnp.asarray([0.0, 2.0])
LOSSES = {
    1.0: lambda w: jnp.logaddexp(0.0, ROW @ w[:, 0]),
    4.0: lambda w: 0.5 * (ROW @ w[:, 0]) ** 2,
    2.0: lambda w: jax.nn.logsumexp(ROW @ w),
}


@pytest.mark.parametrize("smoothness", list(LOSSES))
def test_steps_above_two_over_a_declared_smoothness_are_warned_of(smoothness):
    loss = LOSSES[smoothness]
    assert curvature(loss, jnp.zeros((2, 2))) == pytest.approx(smoothness, rel=1e-3)
    problem = dpb.FiniteSum(dpb.logistic_loss, smoothness=smoothness)
    stable = 2 / smoothness
    options = {"sizes": 200, "w0": Y0}
    dpb.calibrate(problem, dpb.NoisyGD(5, 1.0, stable), BUDGET, **options)
    for solver in (
        dpb.NoisyGD(5, 1.0, 1.1 * stable),
        dpb.onelevel.AllocatedGD(2, 3, 1.0, 1.1 * stable),
    ):
        said = f"smoothness is {smoothness:g}: the product, 2.2, .* at most {stable:g}"
        with pytest.warns(UserWarning, match=said):
            plan = dpb.calibrate(problem, solver, BUDGET, **options)
        assert "may be too long for the records" in str(plan.report)


def test_accelerated_steps_are_stable_up_to_a_shorter_one():
    problem = dpb.FiniteSum(dpb.logistic_loss, smoothness=0.5)
    options = {"sizes": 200, "w0": Y0}
    stable = (2 + 2 * 0.8) / (1 + 2 * 0.8) / 0.5
    accelerated = dpb.NoisyGD(5, 1.0, stable, momentum=0.8)
    dpb.calibrate(problem, accelerated, BUDGET, **options)
    longer = dpb.NoisyGD(5, 1.0, 1.01 * stable, momentum=0.8)
    with pytest.warns(UserWarning, match=r"the product, 1\.4, is above 1\.4"):
        dpb.calibrate(problem, longer, BUDGET, **options)
    # At the limit the iterates of a quadratic function neither grow nor vanish.
    radii = []
    for size in (0.99 * stable, 1.01 * stable):
        kept = 1 - 0.5 * size
        matrix = [[kept * 1.8, -kept * 0.8], [1.0, 0.0]]
        radii.append(max(abs(np.linalg.eigvals(matrix))))
    assert radii[0] < 1 < radii[1]


def test_without_a_declared_smoothness_nothing_is_known_of_the_records():
    problem = dpb.FiniteSum(dpb.logistic_loss)
    plan = dpb.calibrate(problem, dpb.NoisyGD(5, 1.0, 1e3), BUDGET, sizes=200, w0=Y0)
    assert "too long" not in str(plan.report)


def test_nothing_is_said_of_optax_rules():
    assert rows(penalty(optax.sgd(1.0)), LARGEST)[:2] == ([], [])


def test_rows_survive_json():
    with pytest.warns(UserWarning, match="overshoot"):
        plan = dpb.calibrate(
            PROBLEM, penalty(1.0), BUDGET, sizes=SIZES, w0=(LARGEST, Y0)
        )
    read = dpb.privacy.PrivacyReport.from_json(plan.report.to_json())
    assert str(read) == str(plan.report)
