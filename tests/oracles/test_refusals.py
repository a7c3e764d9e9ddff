"""Oracles refuse what they cannot use, and answer NaN where there is no answer."""

import dataclasses
import functools
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from tests.cases import fast_first, slow

LOWER_SOLVERS = {
    "newton": dpb.oracles.NewtonCG(),
    "lbfgs": dpb.oracles.LBFGS(),
    "accelerated": dpb.oracles.AcceleratedGradient(200),
    "fixed": dpb.oracles.AcceleratedGradient(20, 0.3, 0.5, tolerance=None),
}
LINEAR_SOLVERS = {
    "conjugate": dpb.oracles.ConjugateGradient(),
    "fixed": dpb.oracles.ConjugateGradient(10, tolerance=None),
    "cholesky": dpb.oracles.Cholesky(),
    "neumann": dpb.oracles.Neumann(20, 0.3),
}


def quadratic(place=None):
    """Records of a least squares fit whose Hessian does not depend on y."""
    rng = np.random.default_rng(0)
    rows = {"a": rng.normal(size=(20, 2)), "b": rng.normal(size=20)}
    if place is not None:
        rows[place][3] = np.nan
    rows = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), rows)
    problem = dpb.BilevelProblem(
        lambda x, y, record: record["a"] @ y,
        lambda x, y, record: 0.5 * (record["a"] @ y - record["b"]) ** 2,
        lower_public=lambda x, y: 0.5 * jnp.sum(jnp.exp(x) * y**2),
    )
    clean = {"a": jnp.ones((5, 2)), "b": jnp.zeros(5)}
    return problem, dpb.Levels(clean, rows), jnp.zeros(2), jnp.zeros(2)


places = pytest.mark.parametrize(
    "place", ["a", pytest.param("b", marks=pytest.mark.slow)]
)


@places
@pytest.mark.parametrize("name", ["newton", "fixed", *slow("lbfgs", "accelerated")])
def test_a_record_with_nan_has_no_lower_solution(place, name):
    problem, data, x, y0 = quadratic(place)
    solver = LOWER_SOLVERS[name]
    solve = eqx.filter_jit(dpb.oracles.lower_solve)
    y, info = solve(problem, x, data, solver=solver, y0=y0)
    assert np.all(np.isnan(y))
    assert np.isnan(info.gradient_norm)
    assert not info.converged
    hypergradient = eqx.filter_jit(dpb.oracles.penalty_hypergradient)
    penalized = hypergradient(problem, x, data, penalty=10.0, solver=solver, y0=y0)
    assert np.all(np.isnan(penalized))


@places
@pytest.mark.parametrize("name", fast_first(LINEAR_SOLVERS))
def test_a_record_with_nan_has_no_derivative(place, name):
    problem, data, x, y0 = quadratic(place)
    solver = LINEAR_SOLVERS[name]

    def total(x):
        return dpb.oracles.lower_solution(
            problem, x, data, y0=y0, linear_solver=solver, solver=LOWER_SOLVERS["fixed"]
        ).sum()

    @jax.jit
    def derivatives(x):
        return jax.grad(total)(x), jax.jvp(total, (x,), (jnp.ones(2),))[1]

    for derivative in derivatives(x):
        assert np.all(np.isnan(derivative))
    y = jnp.full(2, jnp.nan)
    hypergradient = eqx.filter_jit(dpb.oracles.implicit_hypergradient)
    gradient, v = hypergradient(problem, x, y, data, linear_solver=solver)
    assert np.all(np.isnan(gradient))
    assert np.all(np.isnan(v.value))
    if place == "a":
        gradient, _ = hypergradient(problem, x, y0, data, linear_solver=solver)
        assert np.all(np.isnan(gradient))


@pytest.mark.slow
def test_a_derivative_that_does_not_depend_on_the_solution_is_nan_as_well():
    problem, data, x, y0 = quadratic("b")
    problem = dataclasses.replace(
        problem, lower_public=lambda x, y: 0.5 * jnp.sum(y**2) - x @ y
    )
    solver = LOWER_SOLVERS["fixed"]
    found = dpb.oracles.unrolled_hypergradient(problem, x, data, solver=solver, y0=y0)
    assert np.all(np.isnan(found))
    for linear_solver in LINEAR_SOLVERS.values():
        solution = functools.partial(
            dpb.oracles.lower_solution,
            problem,
            data=data,
            y0=y0,
            linear_solver=linear_solver,
        )
        assert np.all(np.isnan(jax.jit(jax.jacrev(solution))(x)))
        assert np.all(np.isnan(jax.jit(jax.jacfwd(solution))(x)))


def test_a_projected_solve_of_a_record_with_nan_has_no_answer():
    problem, data, x, y0 = quadratic("b")
    problem = dataclasses.replace(problem, y_set=dpb.sets.Box(-1.0, 1.0))
    solver = LOWER_SOLVERS["accelerated"]
    assert np.all(
        np.isnan(dpb.oracles.lower_solution(problem, x, data, solver=solver, y0=y0))
    )


@pytest.mark.parametrize("name", ["conjugate", "cholesky", *slow("fixed")])
def test_an_indefinite_hessian_has_no_derivative(name):
    problem, data, x, y0 = quadratic()
    problem = dataclasses.replace(
        problem, lower_public=lambda x, y: -5.0 * jnp.sum(jnp.exp(x) * y**2)
    )
    gradient, v = dpb.oracles.implicit_hypergradient(
        problem, x, y0, data, linear_solver=LINEAR_SOLVERS[name], tolerance=None
    )
    assert np.all(np.isnan(v.value))
    assert np.all(np.isnan(gradient))


@pytest.mark.slow
def test_a_derivative_where_the_lower_level_is_not_solved_is_refused():
    problem, data, x, y0 = quadratic()
    early = dpb.oracles.AcceleratedGradient(2, 0.1, 0.0, None)
    options = {"data": data, "y0": y0, "solver": early}
    solution = functools.partial(dpb.oracles.lower_solution, problem, **options)
    exact = dpb.oracles.lower_solution(problem, x, data, y0=y0)
    with pytest.raises(ValueError, match=r"lower_solution: .* has not converged"):
        solution(x)
    assert np.all(np.isnan(jax.jit(solution)(x)))
    assert np.all(np.isnan(jax.jit(jax.jacrev(solution))(x)))
    near = solution(x, tolerance=None)
    assert np.isfinite(near).all()

    def gradient(y, **options):
        oracle = dpb.oracles.implicit_hypergradient
        return oracle(problem, x, y, data, **options)[0]

    with pytest.raises(ValueError, match=r"implicit_hypergradient: .* not converged"):
        gradient(near)
    assert np.all(np.isnan(jax.jit(gradient)(near)))
    assert np.isfinite(gradient(near, tolerance=None)).all()
    assert np.isfinite(jax.jit(gradient)(exact)).all()
    with pytest.raises(ValueError, match="tolerance must be positive"):
        gradient(exact, tolerance=-1.0)


def test_newton_steps_go_through_a_region_without_convexity():
    problem, data, x, _ = quadratic()
    problem = dataclasses.replace(
        problem,
        lower=lambda x, y, record: jnp.sum(y**4) / 4 - jnp.sum(y**2) / 2,
        lower_public=None,
    )
    y, info = dpb.oracles.lower_solve(problem, x, data, y0=jnp.asarray([0.1, -0.2]))
    assert info.converged
    np.testing.assert_allclose(y, [1, -1], rtol=1e-4)


def calls(**changes):
    """Every oracle with the arguments of the example, some of them changed."""
    problem, data, x, y0 = quadratic()
    given = {"problem": problem, "x": x, "data": data, "y0": y0} | changes
    problem, x, data, y0 = (given.pop(k) for k in ("problem", "x", "data", "y0"))
    fixed = {"solver": LOWER_SOLVERS["fixed"]}
    lower = functools.partial(dpb.oracles.lower_solution, problem, x, data, y0=y0)
    solve = functools.partial(dpb.oracles.lower_solve, problem, x, data, y0=y0)
    implicit = functools.partial(
        dpb.oracles.implicit_hypergradient, problem, x, y0, data
    )
    penalty = functools.partial(
        dpb.oracles.penalty_hypergradient, problem, x, data, penalty=9.0, y0=y0
    )
    unrolled = functools.partial(
        dpb.oracles.unrolled_hypergradient, problem, x, data, y0=y0
    )
    return {
        "lower_solution": lambda: lower(**fixed | given),
        "lower_solve": lambda: solve(**fixed | given),
        "implicit_hypergradient": lambda: implicit(**given),
        "penalty_hypergradient": lambda: penalty(**fixed | given),
        "unrolled_hypergradient": lambda: unrolled(**fixed | given),
    }


EVERY = list(calls())
PROBLEM = quadratic()[0]


def changed(name, term):
    return {"problem": dataclasses.replace(PROBLEM, **{name: term})}


REFUSED = {
    "problem": ({"problem": None}, TypeError, "problem must be an instance of Bilev"),
    "pair": ({"data": ({}, {})}, TypeError, "data must be an instance of Levels"),
    "axes": (
        {"data": dpb.Levels(quadratic()[1].upper, (jnp.ones(2), jnp.ones(3)))},
        ValueError,
        "share their leading axis",
    ),
    "integer x": ({"x": jnp.arange(2)}, ValueError, r"x must be .* got int32\[2\]"),
    "number x": ({"x": {"a": 1}}, ValueError, r"x\['a'\] must be a floating-point"),
    "vector": (
        changed("lower", lambda x, y, record: record["a"] * y),
        ValueError,
        "problem.lower must return one floating-point scalar",
    ),
    "public vector": (
        changed("lower_public", lambda x, y: y),
        ValueError,
        "problem.lower_public must return one floating-point scalar",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("owner", EVERY)
def test_every_oracle_names_the_argument_that_does_not_fit(case, owner):
    changes, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message) as caught:
        calls(**changes)[owner]()
    assert owner in str(caught.value)


@pytest.mark.parametrize("owner", EVERY)
def test_a_lower_variable_of_integers_is_named_with_its_dtype(owner):
    name = "y" if owner == "implicit_hypergradient" else "y0"
    words = rf"{owner}: {name} must be .* arrays of floats, got int32\[2\]"
    with pytest.raises(ValueError, match=words):
        calls(y0=jnp.arange(2))[owner]()
    with pytest.raises(ValueError, match=f"{owner}: .* Pass {name}="):
        calls(y0=None)[owner]()


@pytest.mark.parametrize("wrong", [dpb.oracles.NewtonCG, dpb.oracles.Cholesky(), None])
@pytest.mark.parametrize(
    "owner", ["lower_solution", "lower_solve", "penalty_hypergradient"]
)
def test_a_class_or_a_linear_solver_is_no_lower_solver(owner, wrong):
    with pytest.raises(TypeError, match=f"{owner}: solver must be an instance of"):
        calls(solver=wrong)[owner]()


@pytest.mark.parametrize("wrong", [dpb.oracles.Cholesky, dpb.oracles.NewtonCG(), None])
@pytest.mark.parametrize("owner", EVERY[:3])
def test_a_class_or_a_lower_solver_is_no_linear_solver(owner, wrong):
    with pytest.raises(TypeError, match=f"{owner}: linear_solver must be an instance"):
        calls(linear_solver=wrong)[owner]()


def test_only_an_accelerated_gradient_is_unrolled():
    for wrong in (dpb.oracles.NewtonCG(), dpb.oracles.AcceleratedGradient, None):
        with pytest.raises(TypeError, match="instance of AcceleratedGradient"):
            calls(solver=wrong)["unrolled_hypergradient"]()


def test_the_upper_terms_are_checked_where_they_are_read():
    changes = changed("upper", lambda x, y, record: record["a"] * y)
    for owner in EVERY[2:]:
        with pytest.raises(ValueError, match=f"{owner}: problem.upper must return"):
            calls(**changes)[owner]()
    assert calls(**changes)["lower_solution"]().shape == (2,)


def test_a_start_of_the_linear_solve_must_be_like_y():
    problem, data, x, y = quadratic()
    anywhere = functools.partial(dpb.oracles.implicit_hypergradient, tolerance=None)
    _, solution = anywhere(problem, x, y, data)
    anywhere(problem, x, y, data, v0=np.zeros(2))
    starts = (solution, jnp.zeros(3), {"a": y}, jnp.arange(2), "v")
    for v0 in starts:
        with pytest.raises(ValueError, match=r"v0 must be like .* solution\.value"):
            dpb.oracles.implicit_hypergradient(problem, x, y, data, v0=v0)


def test_a_module_is_checked_as_a_whole():
    problem, data, x, _ = quadratic()
    model = eqx.nn.MLP(2, 2, 3, 1, jnp.tanh, key=jax.random.key(0))
    vector = dataclasses.replace(
        problem, lower=lambda x, model, record: model(record["a"]), lower_public=None
    )
    with pytest.raises(ValueError, match=r"must return one .* got \['float32\[2\]'\]"):
        dpb.oracles.lower_solution(vector, x, data, y0=model)


@pytest.mark.parametrize(
    "kind", [dpb.oracles.NewtonCG, dpb.oracles.LBFGS, dpb.oracles.ConjugateGradient]
)
def test_the_number_of_steps_comes_first(kind):
    assert kind(7).num_steps == 7
    with pytest.raises(ValueError, match="num_steps must be an integer"):
        kind(1e-6)


@pytest.mark.parametrize("momentum", [1.0, 1.5, -0.1])
def test_a_momentum_that_cannot_settle_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1"):
        dpb.oracles.AcceleratedGradient(10, 0.1, momentum)


@pytest.mark.slow
def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "oracles.md").read_text()
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/oracles.md", "exec"), names)
    F, x = names["F"], names["x"]
    steps = 1e-2 * np.eye(2, dtype=np.float32)
    slopes = [(F(x + step) - F(x - step)) / 2e-2 for step in steps]
    np.testing.assert_allclose(names["gradient"], slopes, rtol=1e-2, atol=1e-5)
    curves = [(jax.grad(F)(x + step) - jax.grad(F)(x - step)) / 2e-2 for step in steps]
    np.testing.assert_allclose(names["hessian"], curves, rtol=1e-2, atol=1e-4)


def test_the_names_are_in_one_place():
    names = """lower_solution lower_solve implicit_hypergradient penalty_hypergradient
    unrolled_hypergradient NewtonCG LBFGS AcceleratedGradient ConjugateGradient Neumann
    Cholesky LowerInfo LinearSolution AbstractLowerSolver AbstractLinearSolver
    extrapolate"""
    for name in names.split():
        assert callable(getattr(dpb.oracles, name))
        assert getattr(dpb, name, getattr(dpb.oracles, name)) is getattr(
            dpb.oracles, name
        )
