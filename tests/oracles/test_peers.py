"""The oracles against the implicit differentiation of JAXopt."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from tests.cases import slow

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "JAXopt is no longer maintained")
    jaxopt = pytest.importorskip("jaxopt")


def rows(n, d, seed):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, d))
    label = features @ np.linspace(-1, 1, d) + 0.3 * rng.normal(size=n)
    return {"features": jnp.asarray(features), "label": jnp.asarray(np.sign(label))}


@pytest.mark.parametrize("loss", [dpb.squared_loss, *slow(dpb.logistic_loss)])
def test_hypergradients_agree_with_jaxopt(loss):
    with jax.enable_x64(True):
        problem = dpb.penalty_tuning(loss, jnp.arange(3))
        data = dpb.Levels(rows(30, 3, 0), rows(40, 3, 1))
        x, y0 = jnp.asarray([-2.0, -1.0, -0.5]), jnp.zeros(3)

        def lower(y, x):
            return dpb.debug.lower_objective(problem, x, y, data)

        @jax.jit
        def solution(x):
            return dpb.oracles.lower_solution(
                problem,
                x,
                data,
                y0=y0,
                solver=dpb.oracles.NewtonCG(tolerance=1e-12),
                linear_solver=dpb.oracles.ConjugateGradient(tolerance=1e-12),
            )

        def solved(y, x):
            del x
            return y

        root = jaxopt.implicit_diff.custom_root(
            jax.grad(lower), solve=jaxopt.linear_solve.solve_cg
        )
        y = solution(x)

        def hypergradient(solve):
            def objective(x):
                return dpb.debug.upper_objective(problem, x, solve(x), data)

            return jax.jit(jax.grad(objective))(x)

        peer = hypergradient(lambda x: root(solved)(y, x))
        np.testing.assert_allclose(hypergradient(solution), peer, rtol=1e-6)
