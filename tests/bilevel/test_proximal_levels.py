"""Proximal lower terms: tuned lasso penalties, hypergradients, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.oracles import AcceleratedGradient, ConjugateGradient
from tests.problems import CERTIFIED, LASSO, LEVELS, TUNING, Y0

EXACT = {
    "solver": AcceleratedGradient(20_000, tolerance=1e-12),
    "linear_solver": ConjugateGradient(tolerance=1e-13),
}


def at_once(names, name):
    """The names, of which all but one are for the slow suite."""
    slow = pytest.mark.slow
    return [n if n == name else pytest.param(n, marks=slow) for n in names]


BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
SIZES = dpb.Sizes(30, 60, "disjoint")


def levels(n, d, useful, seed=0):
    """Validation and training rows of a regression, in this order."""
    rng = np.random.default_rng(seed)
    w = np.r_[rng.normal(size=useful), np.zeros(d - useful)]
    features = rng.normal(size=(2 * n, d))
    label = features @ w + rng.normal(size=2 * n)
    parts = [
        {"features": jnp.asarray(features[s]), "label": jnp.asarray(label[s])}
        for s in (slice(n, None), slice(n))
    ]
    return dpb.Levels(*parts)


def arrays(part):
    return np.asarray(part["features"], float), np.asarray(part["label"], float)


def lasso(data, weight, steps=400):
    features, label = arrays(data.lower)
    n = len(label)
    size = n / np.linalg.norm(features, 2) ** 2
    y = np.zeros(features.shape[1])
    for _ in range(steps):
        z = y - size * features.T @ (features @ y - label) / n
        y = np.sign(z) * np.maximum(np.abs(z) - size * weight, 0)
    return y


def validation(data, y):
    features, label = arrays(data.upper)
    return np.mean((features @ np.asarray(y) - label) ** 2) / 2


def tuned(data, d, factors, outer, inner, step_size):
    """The weight that noiseless penalty descent finds, for each inner step."""
    problem = dpb.penalty_tuning(dpb.squared_loss, np.zeros(d, int), penalty="l1")
    features, label = arrays(data.lower)
    longest = 2 * len(label) / np.linalg.norm(features, 2) ** 2
    run = jax.jit(dpb.solve)
    for factor in factors:
        solver = dpb.PenaltyBilevel(
            num_steps=outer,
            penalty=20.0,
            inner=dpb.NoisyGD(inner, 200.0, step_size=factor * longest),
            clip_norm=200.0,
            upper_clip_norm=200.0,
            step_size=step_size,
        )
        solver = solver.with_noise(0.0).with_precision("float")
        start = (jnp.asarray([0.3], jnp.float32), jnp.zeros(d, jnp.float32))
        data32 = jax.tree.map(lambda v: v.astype(jnp.float32), data)
        yield run(problem, solver, data32, start, key=jax.random.key(0))


@pytest.mark.slow
def test_the_penalty_method_tunes_a_lasso_as_well_as_a_grid():
    data = levels(60, 6, 2, seed=1)
    best = min(validation(data, lasso(data, w)) for w in np.linspace(0, 0.5, 26))
    for solution in tuned(data, 6, (0.1, 0.5), outer=40, inner=60, step_size=0.2):
        found = validation(data, lasso(data, float(solution.x[0])))
        assert found <= best + 0.002


@pytest.mark.slow
def test_the_example_of_section_7_is_as_good_as_a_grid_for_short_and_long_steps():
    data = levels(400, 20, 4)
    grid = 0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0
    best = min(validation(data, lasso(data, w)) for w in grid)
    for solution in tuned(
        data, 20, (0.02, 0.1, 0.5), outer=60, inner=300, step_size=0.05
    ):
        assert validation(data, lasso(data, float(solution.x[0]))) <= best + 0.002
        assert validation(data, solution.y) <= best + 0.002
        assert (np.asarray(solution.y) == 0).any()


def closed_form(data, x, groups):
    """The lasso solution, its Jacobian in the weights, and the hypergradient."""
    y = lasso(data, x[groups], 20_000)
    (features, label), (above, target) = map(arrays, (data.lower, data.upper))
    active = y != 0
    part = features[:, active]
    signs = np.sign(y[active])[:, None] * (groups[active][:, None] == np.arange(len(x)))
    jacobian = np.zeros((len(y), len(x)))
    jacobian[active] = -np.linalg.solve(part.T @ part / len(label), signs)
    slope = above.T @ (above @ y - target) / len(target)
    return y, jacobian, jacobian.T @ slope


GROUPS = np.asarray([0, 0, 0, 1, 1, 1, 1, 1])
TUNED = dpb.penalty_tuning(dpb.squared_loss, GROUPS, penalty="l1")


def solution_of(problem, data, **settings):
    options = EXACT | settings
    return functools.partial(
        dpb.oracles.lower_solution, problem, data=data, y0=jnp.zeros(8), **options
    )


X = np.asarray([0.15, 0.25])


@pytest.mark.parametrize(
    "transform", [jax.jacrev, pytest.param(jax.jacfwd, marks=pytest.mark.slow)]
)
def test_derivatives_of_lasso_solutions_are_those_of_the_closed_form(transform, x64):
    data = levels(40, 8, 3)
    y, jacobian, _ = closed_form(data, X, GROUPS)
    assert 0 < (y == 0).sum() < 8
    derivative = jax.jit(transform(solution_of(TUNED, data)))(jnp.asarray(X))
    np.testing.assert_allclose(derivative, jacobian, atol=1e-6)


def implicit(y, x, data):
    return dpb.oracles.implicit_hypergradient(
        TUNED, x, y, data, linear_solver=EXACT["linear_solver"]
    )


compiled = jax.jit(implicit)


def test_lasso_hypergradients_are_those_of_the_closed_form(x64):
    data = levels(40, 8, 3)
    y, _, expected = closed_form(data, X, GROUPS)
    gradient, v = compiled(jnp.asarray(y), jnp.asarray(X), data)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert (np.asarray(v.value)[y == 0] == 0).all()


WEIGHTS = {
    "group_lasso": dpb.proximal.group_lasso(
        lambda x: jnp.asarray([4.0, 1.0]) * x, GROUPS
    ),
    "elastic_net": dpb.proximal.elastic_net(lambda x: x[0], lambda x: x[1]),
}


@pytest.mark.parametrize(
    "name", at_once(["group_lasso", "elastic_net", "box"], "elastic_net")
)
def test_derivatives_on_the_active_set_are_central_differences(name, x64):
    data, x = levels(40, 8, 3), jnp.asarray([0.3, 0.2])
    if name == "box":
        problem = dpb.BilevelProblem(
            lambda x, y, z: dpb.squared_loss(y, z),
            lambda x, y, z: dpb.squared_loss(y, z),
            lower_public=lambda x, y: x[0] * jnp.sum(y * y) + x[1] * jnp.sum(y),
            y_set=dpb.sets.Box(-0.2, 0.2),
        )
    else:
        problem = dataclasses.replace(TUNED, lower_public=WEIGHTS[name])
    solution = jax.jit(solution_of(problem, data))
    rows = 1e-5 * jnp.eye(2)
    steps = [(solution(x + r) - solution(x - r)) / 2e-5 for r in rows]
    found = jax.jit(jax.jacrev(solution_of(problem, data)))(x)
    np.testing.assert_allclose(found, np.stack(steps, 1), atol=1e-6)
    held = np.abs(np.stack(steps, 1)).max(1) == 0
    assert held.any()
    assert not held.all()


def with_wrong_entry(data, zero):
    """The solution, but with a small entry for a zero, or a zero for an entry."""
    y, _, _ = closed_form(data, X, GROUPS)
    place = int(np.argmin(np.where((y == 0) == zero, np.abs(y), np.inf)))
    y[place] = 1e-6 if zero else 0.0
    return jnp.asarray(y)


@pytest.mark.parametrize("zero", [True, False])
def test_a_wrong_active_set_has_no_derivative_however_near_the_solution(zero, x64):
    data = levels(40, 8, 3)
    gradient, _ = compiled(with_wrong_entry(data, zero), jnp.asarray(X), data)
    assert np.isnan(gradient).all()


@pytest.mark.slow
def test_a_wrong_active_set_is_an_error_outside_of_compiled_programs(x64):
    data = levels(40, 8, 3)
    with pytest.raises(ValueError, match="at a kink or a bound is uncertain"):
        implicit(with_wrong_entry(data, True), jnp.asarray(X), data)


@pytest.mark.slow
def test_a_solve_that_stops_early_has_no_derivative(x64):
    data, x = levels(40, 8, 3), jnp.asarray([0.15, 0.25])
    early = AcceleratedGradient(3, 0.1, tolerance=None)
    solution = solution_of(TUNED, data, solver=early)
    assert np.isnan(jax.jit(jax.jacrev(solution))(x)).all()
    with pytest.raises(ValueError, match="has not converged"):
        solution(x)


@pytest.mark.slow
def test_first_order_hypergradients_go_through_proximal_steps(x64):
    data, x = levels(40, 8, 3), jnp.asarray([0.15, 0.25])
    _, _, expected = closed_form(data, np.asarray(x), GROUPS)
    steps = AcceleratedGradient(400, 0.3, 0.5, tolerance=None)
    unrolled = dpb.oracles.unrolled_hypergradient(
        TUNED, x, data, solver=steps, y0=jnp.zeros(8)
    )
    np.testing.assert_allclose(unrolled, expected, atol=1e-6)
    penalized = dpb.oracles.penalty_hypergradient(
        TUNED, x, data, penalty=1e4, solver=EXACT["solver"], y0=jnp.zeros(8)
    )
    np.testing.assert_allclose(penalized, expected, atol=1e-3)


LOOPS = {
    "F2SA": dpb.bilevel.F2SA(401, 1e3, step_size=1e-9, lower_step_size=0.3),
    "SingleLoopBilevel": dpb.SingleLoopBilevel(
        401, step_size=1e-9, lower_step_size=0.3, linear_step_size=0.3
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", at_once(LOOPS, "SingleLoopBilevel"))
def test_single_loops_settle_at_the_direction_of_the_hypergradient(name, x64):
    data, x = levels(40, 8, 3), np.asarray([0.15, 0.25])
    y, _, expected = closed_form(data, x, GROUPS)
    wide = dict.fromkeys(("clip_norm", "cross_clip_norm", "upper_clip_norm"), 1e6)
    if name == "SingleLoopBilevel":
        wide["hessian_clip_norm"] = 1e6
    solver = dataclasses.replace(LOOPS[name], **wide)
    solver = solver.with_noise(0.0).with_precision("float")
    run = jax.jit(dpb.solve, static_argnames="trajectory")
    start = jnp.asarray(x), jnp.zeros(8)
    found = run(TUNED, solver, data, start, key=jax.random.key(0), trajectory=True)
    before, after = found.trajectory[0][-2:]
    np.testing.assert_allclose((before - after) / 1e-9, expected, atol=2e-3)
    np.testing.assert_allclose(found.y, y, atol=1e-4)
    assert ((np.asarray(found.y) == 0) == (y == 0)).all()


ADAM = optax.adam(0.1)
INNER = dpb.NoisyGD(3, 1.0, step_size=0.1, momentum=0.5)
SEARCH = dpb.bilevel.F2SA(3, 5.0, step_size=0.1, lower_step_size=0.1)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (dpb.ImplicitBilevel(3, step_size=0.1), "ImplicitBilevel makes no proximal"),
        (
            dpb.bilevel.FiniteDifferenceBilevel(3, step_size=0.1, lower_step_size=0.1),
            "FiniteDifferenceBilevel makes no proximal",
        ),
        (
            dpb.bilevel.F2SA(3, 5.0, step_size=0.1, lower_step_size=ADAM),
            "F2SA needs steps of one size",
        ),
        (
            dpb.PenaltyBilevel(3, 5.0, INNER, step_size=0.1),
            "NoisyGD needs steps of one size",
        ),
        (
            dpb.Refitted(
                dpb.bilevel.F2SA(3, 5.0, step_size=0.1, lower_step_size=0.1), INNER
            ),
            "NoisyGD needs steps of one size",
        ),
    ],
)
def test_solvers_of_two_levels_that_make_no_proximal_step_say_so(solver, message):
    with pytest.raises(ValueError, match=message):
        dpb.calibrate(LASSO, solver, BUDGET, sizes=SIZES)


def test_other_refusals_say_what_to_do():
    with pytest.raises(ValueError, match="only lower_public may be proximal"):
        dataclasses.replace(LASSO, upper_public=dpb.proximal.l1(1.0))
    with pytest.raises(ValueError, match="Pass AcceleratedGradient"):
        dpb.oracles.lower_solution(LASSO, jnp.zeros(2), LEVELS, y0=Y0)
    certified = dataclasses.replace(CERTIFIED, lower_public=dpb.proximal.l1(1.0))
    fields = {"dimension_x": 1, "dimension_y": 1, "initial_gap": 1.0}
    inner = dpb.NoisyGD(3, 1.0, step_size=0.1)
    constants = dpb.bilevel.Constants(
        upper_lipschitz=1.0,
        lower_lipschitz=1.0,
        lower_smoothness=1.0,
        strong_convexity=1.0,
        upper_smoothness=1.0,
        lower_hessian_lipschitz=1.0,
    )
    certified = dataclasses.replace(certified, constants=constants)
    with pytest.raises(ValueError, match="proximal terms are not planned for"):
        dpb.PenaltyBilevel.tuned(certified, BUDGET, SIZES, inner=inner, **fields)


def test_penalties_are_the_terms_of_the_docstring():
    y, x = jnp.asarray([1.0, -2.0, 2.0]), jnp.asarray([0.5, 0.25])
    kinds = {"l1": 0.5 + 1.0, "group_l1": 0.5 + 0.25 * 8**0.5, jnp.cosh: None}
    kinds[jnp.cosh] = 0.5 * np.cosh(1.0) + 0.5 * np.cosh(2.0)
    for penalty, expected in kinds.items():
        problem = dpb.penalty_tuning(dpb.squared_loss, [0, 1, 1], penalty=penalty)
        assert float(problem.lower_public(x, y)) == pytest.approx(expected, rel=1e-6)
        start, _ = dpb.applications.penalty_start(problem, y)
        np.testing.assert_array_equal(start, [0.0, 0.0])
    quadratic = dpb.penalty_tuning(dpb.squared_loss, [0, 1, 1])
    np.testing.assert_allclose(
        quadratic.lower_public(jnp.log(x), y), 0.25 + 1.0, rtol=1e-6
    )


def test_penalties_out_of_range_are_named():
    groups = [0, 1]
    with pytest.raises(ValueError, match="of penalties: bounds must be non-negative"):
        dpb.penalty_tuning(dpb.squared_loss, groups, penalty="l1", bounds=(-1.0, 1.0))
    with pytest.raises(ValueError, match="penalty"):
        dpb.penalty_tuning(dpb.squared_loss, groups, penalty="lasso")


def test_a_proximal_term_changes_no_release():
    ledgers = [SEARCH.with_noise(1.0).ledger(p, SIZES) for p in (LASSO, TUNING)]
    assert ledgers[0] == ledgers[1]
