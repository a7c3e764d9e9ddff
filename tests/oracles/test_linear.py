"""Linear solvers of the oracles: fixed counts, tolerances, pytrees, tiny numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel.oracles import linear
from tests.cases import slow

SOLVERS = [
    linear.ConjugateGradient(),
    linear.ConjugateGradient(tolerance=None, num_steps=40),
    linear.Neumann(num_steps=2000, step_size=0.25),
    linear.Cholesky(),
]


def fixed(num_steps):
    return linear.ConjugateGradient(num_steps=num_steps, tolerance=None)


def system(dtype=np.float64, size=6):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(size, size))
    values = np.linspace(0.2, 4.0, size)
    basis = np.linalg.qr(root)[0]
    matrix = (basis * values) @ basis.T
    return matrix.astype(dtype), rng.normal(size=size).astype(dtype)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("warm", [False, True])
def test_solvers_agree_with_a_dense_solve(solver, warm):
    with jax.enable_x64(True):
        matrix, b = map(jnp.asarray, system())
        exact = jnp.linalg.solve(matrix, b)
        x0 = exact + 0.1 if warm else None
        found = jax.jit(lambda b: solver.solve(lambda v: matrix @ v, b, x0))(b)
        np.testing.assert_allclose(found.value, exact, rtol=1e-4)
        residual = jnp.linalg.norm(b - matrix @ found.value)
        np.testing.assert_allclose(found.residual_norm, residual, rtol=1e-3, atol=1e-14)
        assert found.num_products <= 2000


def test_pytrees_of_several_dtypes():
    b = {"a": jnp.ones(2, jnp.bfloat16), "b": (jnp.arange(3.0),)}

    def matvec(v):
        return jax.tree.map(lambda leaf: 2 * leaf, v)

    value, residual, _ = fixed(3).solve(matvec, b)
    assert jax.tree.map(lambda v: v.dtype, value) == jax.tree.map(lambda v: v.dtype, b)
    np.testing.assert_allclose(value["b"][0], [0, 0.5, 1.0])
    assert residual == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_fixed_count_past_convergence_is_finite_in_single_precision(scale):
    matrix, b = map(jnp.asarray, system(np.float32))
    value, residual, _ = fixed(500).solve(lambda v: matrix @ v, jnp.float32(scale) * b)
    exact = np.linalg.solve(np.float64(matrix), np.float64(b))
    np.testing.assert_allclose(np.float64(value) / scale, exact, rtol=1e-5)
    assert residual <= 1e-5 * scale


def test_zero_right_hand_side_has_the_zero_solution():
    matrix, b = map(jnp.asarray, system(np.float32))
    for x0 in (None, b):
        value, residual, _ = fixed(30).solve(lambda v: matrix @ v, 0 * b, x0)
        np.testing.assert_allclose(value, 0 * b, atol=1e-6)
        assert residual <= 1e-6


def test_a_truncated_solve_returns_its_residual_and_its_count():
    matrix, b = map(jnp.asarray, system(np.float32))
    solver = linear.ConjugateGradient(tolerance=1e-6, num_steps=2)
    found = solver.solve(lambda v: matrix @ v, b)
    assert found.num_products == 2
    assert found.residual_norm > 1e-3


def test_a_tolerance_stops_early_and_a_warm_start_earlier():
    matrix, b = map(jnp.asarray, system(np.float32))
    solver = linear.ConjugateGradient(tolerance=1e-3)
    cold = solver.solve(lambda v: matrix @ v, b)
    warm = solver.solve(lambda v: matrix @ v, b, cold.value)
    assert 1 < cold.num_products < 10
    assert warm.num_products == 1


INDEFINITE = {
    "negative": -np.ones(3),
    "saddle": np.asarray([1.0, 2.0, -0.5]),
    "late": np.asarray([1.0, 2.0, -1e-3]),
    "zero": np.zeros(3),
    "nan": np.asarray([1.0, np.nan, 1.0]),
    "infinite": np.asarray([1.0, np.inf, 1.0]),
}
FALLIBLE = {
    "tolerance": linear.ConjugateGradient(),
    "fixed": linear.ConjugateGradient(num_steps=20, tolerance=None),
    "cholesky": linear.Cholesky(),
}


@pytest.mark.parametrize("solver", FALLIBLE)
@pytest.mark.parametrize(
    "case", ["negative", "nan", *slow("saddle", "late", "zero", "infinite")]
)
def test_no_answer_where_the_matrix_is_not_positive_definite(case, solver):
    diagonal = jnp.asarray(INDEFINITE[case], jnp.float32)
    b = {"a": jnp.ones(2), "b": jnp.ones(1)}

    def matvec(v):
        return {"a": diagonal[:2] * v["a"], "b": diagonal[2:] * v["b"]}

    found = jax.jit(lambda b: FALLIBLE[solver].solve(matvec, b))(b)
    for leaf in (*jax.tree.leaves(found.value), found.residual_norm):
        assert np.all(np.isnan(leaf))

    def solution(b):
        v = linear.differentiable_solve(FALLIBLE[solver], matvec, b).value
        return jnp.sum(v["a"]) + jnp.sum(v["b"])

    for leaf in jax.tree.leaves(jax.jit(jax.grad(solution))(b)):
        assert np.all(np.isnan(leaf))


def test_no_answer_where_curvatures_overflow():
    diagonal = jnp.asarray([1.0, 3e38, 3e38])
    for solver in (linear.ConjugateGradient(), fixed(1)):
        found = solver.solve(lambda v: diagonal * v, jnp.ones(3))
        assert np.all(np.isnan(found.value))


def test_a_truncated_direction_is_there_for_newton_steps():
    diagonal, b = jnp.asarray(INDEFINITE["late"]), jnp.ones(3)
    solver = FALLIBLE["tolerance"]
    assert np.all(np.isnan(solver.solve(lambda v: diagonal * v, b).value))
    direction = solver.truncated(lambda v: diagonal * v, b / jnp.sqrt(3.0))
    assert np.all(np.isfinite(direction))
    assert direction @ b > 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("warm", [False, True])
def test_no_answer_where_the_right_hand_side_is_not_finite(wrong, warm):
    b = jnp.asarray([1.0, wrong, 2.0])
    x0 = jnp.ones(3) if warm else None
    for name in ("tolerance", "fixed"):
        found = FALLIBLE[name].solve(lambda v: 2 * v, b, x0)
        assert np.all(np.isnan(found.value))


def test_a_singular_matrix_has_an_answer_where_one_exists():
    diagonal = jnp.asarray([1.0, 2.0, 0.0, 0.0])
    b = jnp.asarray([1.0, 1.0, 0.0, 0.0])
    for name in ("tolerance", "fixed"):
        found = FALLIBLE[name].solve(lambda v: diagonal * v, b)
        np.testing.assert_allclose(found.value, [1, 0.5, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("condition", [1e4, 1e7])
def test_a_fixed_count_stays_finite_however_ill_conditioned(condition):
    rng = np.random.default_rng(4)
    basis = np.linalg.qr(rng.normal(size=(30, 30)))[0]
    matrix = (basis * np.geomspace(1 / condition, 1, 30)) @ basis.T
    matrix = jnp.asarray(matrix, jnp.float32)
    b = jnp.asarray(rng.normal(size=30), jnp.float32)
    found = fixed(1000).solve(lambda v: matrix @ v, matrix @ b)
    assert np.all(np.isfinite(found.value))


@pytest.mark.slow
def test_the_fixed_count_is_differentiable():
    matrix, b = map(jnp.asarray, system(np.float32))

    def total(b):
        return fixed(30).solve(lambda v: matrix @ v, b).value.sum()

    exact = np.linalg.solve(matrix, np.ones_like(b))
    np.testing.assert_allclose(jax.grad(total)(b), exact, rtol=2e-2)


@pytest.mark.parametrize("num_steps", [0, 2.5, True])
def test_a_count_that_is_none_is_refused(num_steps):
    with pytest.raises(ValueError, match="num_steps must be an integer"):
        fixed(num_steps)
