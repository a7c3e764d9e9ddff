"""Hessian products with a transposed copy of the features: the same, only faster."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.oracles.objectives import lay_out, lower_objective, upper_objective
from tests.cases import slow

RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(7, 4))
MAPS = {
    "left": lambda a, v: a.T @ (jnp.arange(7.0)[:, None] * (a @ v)),
    "right": lambda a, v: ((a @ v).T @ a).T,
    "both": lambda a, v: a.T @ (a @ v) + ((a @ v).T @ a).T,
    "inside": lambda a, v: jax.jit(lambda v: 2 * v)(a.T @ (a @ v)),
}


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def softmax(n=30, d=4, classes=3):
    """Penalties per feature of a softmax regression: y is a matrix."""
    rows = {"a": RNG.normal(size=(n, d)), "b": RNG.normal(size=(n, classes))}
    rows = jax.tree.map(jnp.asarray, rows)

    def loss(_, y, record):
        return -jax.nn.softmax(record["b"]) @ jax.nn.log_softmax(record["a"] @ y)

    def public(x, y):
        return jnp.sum(jnp.exp(x)[:, None] * y**2)

    problem = dpb.BilevelProblem(loss, loss, lower_public=public)
    half = n // 2
    data = dpb.Levels(
        jax.tree.map(lambda v: v[:half], rows), jax.tree.map(lambda v: v[half:], rows)
    )
    return problem, data, jnp.linspace(-3, 0, d), jnp.zeros((d, 3))


def products_of_rows(fun, *arguments):
    """How many products of matrices contract the rows of both."""
    found = jax.make_jaxpr(fun)(*arguments).jaxpr.eqns
    names = [eqn.params.get("dimension_numbers") for eqn in found]
    return names.count((((0,), (0,)), ((), ())))


@pytest.mark.parametrize("name", ["right", "inside", *slow("left", "both")])
def test_a_map_laid_out_has_the_same_values_and_derivatives(name, double):
    fun, v, matrix = MAPS[name], jnp.ones((4, 2)), jnp.asarray(MATRIX)

    def new(a, v):
        return lay_out(functools.partial(fun, a), v)(v)

    np.testing.assert_allclose(jax.jit(new)(matrix, v), fun(matrix, v), rtol=1e-12)
    batches = jnp.stack([v, 2 * v]), jnp.stack([matrix, 3 * matrix])
    for axes in ((None, 0), (0, 0)):
        arguments = (matrix if axes[0] is None else batches[1], batches[0])
        mapped = (jax.jit(jax.vmap(f, axes)) for f in (new, fun))
        found, expected = (f(*arguments) for f in mapped)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    for derivative in (jax.jacrev, jax.jacfwd):
        for place in (0, 1):
            derived = (jax.jit(derivative(f, place)) for f in (new, fun))
            found, expected = (f(matrix, v) for f in derived)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_map_without_products_of_matrices_comes_back_as_it_is():
    def scale(v):
        return 2 * v

    assert lay_out(scale, jnp.ones(3)) is scale


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU alone gains by it")
def test_no_hessian_product_contracts_the_rows_of_the_features():
    problem, data, x, y = softmax()
    objective = lower_objective(problem, data)
    *_, product = objective.linearize(x, y)
    assert products_of_rows(product, y) == 0
    plain = jax.linearize(lambda y: objective.gradient(x, y), y)[1]
    assert products_of_rows(plain, y) == 1


@pytest.mark.slow
def test_derivatives_of_a_matrix_agree_with_central_differences(double):
    problem, data, x, y0 = softmax()
    exact = {
        "solver": dpb.oracles.NewtonCG(tolerance=1e-12),
        "linear_solver": dpb.oracles.ConjugateGradient(tolerance=1e-13),
    }

    @jax.jit
    def objective(x):
        y = dpb.oracles.lower_solution(problem, x, data, y0=y0, **exact)
        return upper_objective(problem, data).value(x, y)

    gradient = jax.jit(jax.grad(objective))

    def differences(fun, step=1e-5):
        rows = step * np.eye(x.size)
        return np.stack([(fun(x + row) - fun(x - row)) / (2 * step) for row in rows])

    np.testing.assert_allclose(gradient(x), differences(objective), rtol=1e-6)
    direction = jnp.ones_like(x)
    found = jax.jit(lambda x: jax.jvp(gradient, (x,), (direction,))[1])(x)
    expected = differences(gradient).sum(0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)

    @jax.jit
    def implicit(x):
        y = dpb.oracles.lower_solution(problem, x, data, y0=y0, **exact)
        cholesky = dpb.oracles.Cholesky()
        return dpb.oracles.implicit_hypergradient(
            problem, x, y, data, linear_solver=cholesky
        )[0]

    found = implicit(x)
    np.testing.assert_allclose(found, gradient(x), rtol=1e-8)
