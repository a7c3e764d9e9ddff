"""Proximal public terms: their operators, sets, and descents of one level."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from tests.cases import fast_first, slow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that jaxopt is no longer developed
    from jaxopt import prox as peers

Y = jnp.asarray(np.random.default_rng(0).normal(size=6), jnp.float32)
GROUPS = np.asarray([0, 0, 1, 1, 2, 2])
TERMS = {
    "l1": dpb.proximal.l1(0.5),
    "elastic_net": dpb.proximal.elastic_net(0.5, 0.3),
    "l2_norm": dpb.proximal.l2_norm(0.5),
    "group_lasso": dpb.proximal.group_lasso(0.5, GROUPS),
}
STEP = 0.7
PEERS = {
    "l1": lambda y: peers.prox_lasso(y, 0.5, STEP),
    "elastic_net": lambda y: peers.prox_elastic_net(y, (0.5, 0.6), STEP),
    "l2_norm": lambda y: peers.prox_group_lasso(y, 0.5, STEP),
    "group_lasso": lambda y: jnp.ravel(
        jax.vmap(lambda v: peers.prox_group_lasso(v, 0.5, STEP))(y.reshape(3, 2))
    ),
}


@pytest.mark.parametrize("name", fast_first(TERMS))
def test_the_operator_is_that_of_jaxopt(name):
    np.testing.assert_allclose(TERMS[name].prox(STEP, Y), PEERS[name](Y), atol=1e-6)


@pytest.mark.parametrize("name", fast_first(TERMS))
def test_the_operator_minimizes_the_value_that_the_term_returns(name):
    term = TERMS[name]
    near = np.random.default_rng(1).normal(size=(200, 6)) * 0.1
    point = term.prox(STEP, Y)

    def value(u):
        return STEP * term(u) + 0.5 * jnp.sum((u - Y) ** 2)

    others = jax.vmap(value)(np.asarray(point) + near.astype(np.float32))
    assert float(value(point)) <= float(others.min())


def test_values_are_the_sums_of_the_docstrings():
    y = np.asarray(Y)
    expected = {
        "l1": 0.5 * np.abs(y).sum(),
        "elastic_net": 0.5 * np.abs(y).sum() + 0.15 * (y * y).sum(),
        "l2_norm": 0.5 * np.linalg.norm(y),
        "group_lasso": 0.5 * np.linalg.norm(y.reshape(3, 2), axis=1).sum(),
    }
    for name, term in TERMS.items():
        assert float(term(Y)) == pytest.approx(expected[name], rel=1e-6)


GROUPS_OF_PARTS = {"a": np.asarray([0, 1]), "b": np.asarray([[1], [1]])}


def test_weights_follow_x_and_a_negative_weight_counts_as_zero():
    term = dpb.proximal.group_lasso(lambda x: x, GROUPS_OF_PARTS)
    y = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray([[2.0], [1.0]])}
    x = jnp.asarray([0.5, -1.0])
    assert float(term(x, y)) == pytest.approx(0.5)
    slope = jax.jit(jax.grad(term))(jnp.zeros(2), y)  # from above, at zero
    np.testing.assert_allclose(slope, [1.0, 3.0], rtol=1e-6)
    found = term.prox(1.0, x, y)
    np.testing.assert_allclose(found["a"], [0.5, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(found["b"], y["b"])
    smooth = term.is_smooth(jnp.asarray([0.5, 0.0]), optax.tree.zeros_like(y))
    assert [bool(v) for v in smooth["a"]] == [False, True]


@pytest.mark.parametrize("wrong", [-0.1, np.nan, np.asarray([0.1, -0.1])])
def test_negative_numbers_are_refused_at_once(wrong):
    with pytest.raises(ValueError, match="must be at least 0"):
        dpb.proximal.l1(wrong)
    with pytest.raises(ValueError, match="must be at least 0"):
        dpb.proximal.elastic_net(0.1, wrong)


def test_derivatives_at_zero_are_finite():
    for term in TERMS.values():
        for fun in (term, lambda y, term=term: jnp.sum(term.prox(0.3, y))):
            assert np.isfinite(jax.jit(jax.grad(fun))(jnp.zeros(6))).all()


@pytest.mark.parametrize(
    ("name", "feasible"),
    [
        ("l1", dpb.sets.Box(0.1, 0.4)),
        ("elastic_net", dpb.sets.NonNegative()),
        ("l1", dpb.sets.Ball(0.5)),
        ("group_lasso", dpb.sets.Ball(0.5)),
    ],
)
def test_a_projection_after_the_proximal_step_is_the_step_of_both(name, feasible):
    term = TERMS[name]
    problem = dpb.FiniteSum(dpb.squared_loss, term, w_set=feasible)
    point = jax.jit(lambda y: problem.w_set.project(term.prox(STEP, y)))(Y)
    near = np.random.default_rng(2).normal(size=(500, 6)) * 0.2
    others = np.asarray(point) + near.astype(np.float32)
    others = jax.jit(jax.vmap(feasible.project))(others)

    def value(u):
        return STEP * term(u) + 0.5 * jnp.sum((u - Y) ** 2)

    values = jax.jit(jax.vmap(value))(jnp.concatenate([point[None], others]))
    assert float(values[0]) <= float(values[1:].min()) + 1e-6


@pytest.mark.parametrize(
    ("name", "feasible"),
    [
        ("l1", dpb.sets.Simplex()),
        ("group_lasso", dpb.sets.NonNegative()),
        ("l2_norm", dpb.sets.Box(-1.0, 1.0)),
        ("l1", dpb.sets.Ball(1.0, jnp.ones(6))),
    ],
)
def test_a_set_whose_projection_is_not_the_step_of_both_is_refused(name, feasible):
    with pytest.raises(ValueError, match=f"takes no set {type(feasible).__name__}"):
        dpb.FiniteSum(dpb.squared_loss, TERMS[name], w_set=feasible)
    with pytest.raises(ValueError, match="takes no set"):
        dpb.BilevelProblem(
            lambda x, y, z: 0.0,
            lambda x, y, z: 0.0,
            lower_public=TERMS[name],
            y_set=feasible,
        )


ROWS = np.random.default_rng(3).normal(size=(40, 6))
LABEL = ROWS @ [1.0, -1.0, 0.0, 0.0, 0.0, 0.0] + np.random.default_rng(4).normal(
    size=40
)
DATA = {
    "features": jnp.asarray(ROWS, jnp.float32),
    "label": jnp.asarray(LABEL, jnp.float32),
}
CURVATURE = float(np.linalg.eigvalsh(ROWS.T @ ROWS / 40)[-1])
LASSO = dpb.FiniteSum(dpb.squared_loss, dpb.proximal.l1(0.3))
run = jax.jit(dpb.solve)


def reference(weight=0.3, steps=3000):
    w, size = np.zeros(6), 1 / CURVATURE
    for _ in range(steps):
        w = w - size * ROWS.T @ (ROWS @ w - LABEL) / 40
        w = np.sign(w) * np.maximum(np.abs(w) - size * weight, 0)
    return w


def descent(step_size):
    noise = {"noise_multiplier": 0.0, "precision": "float"}
    return dpb.NoisyGD(150, 100.0, step_size=step_size, **noise)


@pytest.mark.parametrize("factor", [0.3, 1.0, 6.0])
def test_descent_finds_the_lasso_solution_with_steps_short_or_too_long(factor):
    found = run(
        LASSO, descent(factor / CURVATURE), DATA, jnp.ones(6), key=jax.random.key(0)
    ).value
    expected = reference()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert ((np.asarray(found) == 0) == (expected == 0)).all()
    assert (expected == 0).any()


def test_localized_descent_finds_the_lasso_solution():
    noise = {"noise_multiplier": 0.0, "precision": "float"}
    strong = float(np.linalg.eigvalsh(ROWS.T @ ROWS / 40)[0])
    radii = (4.0, 1.0, 0.1, 0.1)
    solver = dpb.onelevel.LocalizedGD(radii, 300, strong, 100.0, **noise)
    found = run(LASSO, solver, DATA, jnp.zeros(6), key=jax.random.key(0)).value
    np.testing.assert_allclose(found, reference(), atol=0.01)


def test_proximal_steps_cost_no_budget():
    free = dataclasses.replace(LASSO, public=None)
    solver = dpb.NoisyGD(3, 1.0, step_size=0.1).with_noise(1.0)
    assert solver.ledger(LASSO, 40) == solver.ledger(free, 40)


POINTS = jnp.zeros((2, 6))
DRAW = dpb.draws.ExponentialMechanism(dpb.draws.Grid(POINTS), clip_range=1.0)
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (
            dpb.NoisyGD(3, 1.0, step_size=optax.adam(0.1)),
            "NoisyGD needs steps of one size",
        ),
        (
            dpb.NoisyGD(3, 1.0, step_size=0.1, momentum=0.5),
            "NoisyGD needs steps of one size",
        ),
        (DRAW, "ExponentialMechanism makes no proximal"),
    ],
)
def test_solvers_that_make_no_proximal_step_of_one_size_say_so(solver, message):
    with pytest.raises(ValueError, match=message):
        dpb.calibrate(LASSO, solver, BUDGET, sizes=40)
    with pytest.raises(ValueError, match=message):
        dpb.solve(LASSO, solver, DATA, jnp.zeros(6), key=jax.random.key(0))


def test_auto_and_groups_that_do_not_count_from_zero_are_refused():
    with pytest.raises(ValueError, match="auto: proximal terms are not planned for"):
        dpb.auto(LASSO, BUDGET, sizes=40, w0=jnp.zeros(6))
    with pytest.raises(ValueError, match="group_lasso: groups must be counted from 0"):
        dpb.proximal.group_lasso(1.0, [-1, 0])


@pytest.mark.parametrize(("factor", "shortened"), [(0.5, False), *slow((3.0, True))])
def test_noise_that_moves_entries_off_zero_does_not_shorten_steps(factor, shortened):
    # As many entries as noise can push off zero and the term pulls back.
    problem = dpb.FiniteSum(
        lambda w, z: 0.5 * jnp.sum((w - z) ** 2), dpb.proximal.l1(0.4)
    )
    solver = dpb.NoisyGD(60, 1e3, step_size=factor).with_noise(1e-3).with_sizes(40)
    data = jnp.zeros((40, 1000), jnp.float32)
    state = solver.init(problem, jnp.zeros(1000, jnp.float32))
    step = jax.jit(solver.step)
    for key in jax.random.split(jax.random.key(0), 30):
        state = step(problem, data, state, key=key)
    assert (float(state.last.factor) < 1) == shortened
    assert 0 < int((state.w != 0).sum()) < 1000
