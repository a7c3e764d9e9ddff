"""NON-PRIVATE lower solutions in float64, as a reference for other code."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import PyTree

from ..bilevel.problem import BilevelProblem, Levels
from ..oracles import objectives


def lower_solution(
    problem: BilevelProblem, x: PyTree, y0: PyTree, data: Levels
) -> PyTree:
    r"""Return $y^*(x)$ without a set, in float64, by L-BFGS on the host. NON-PRIVATE.

    It checks `dpbilevel.oracles.lower_solution`: another implementation, in float64
    for every setting of JAX, without derivatives and not inside `jax.jit`.

    Args:
        problem: The problem; `y_set` is not used.
        x: The upper variable.
        y0: An initial point.
        data: The records.

    Returns:
        A float64 pytree like `y0`, with a gradient norm of about 1e-8 where losses are
        about 1; smaller changes are lost in rounding.
    """
    with jax.enable_x64(True):
        x, y0, data = (as_float64(tree) for tree in (x, y0, data))
        flat0, unravel = jax.flatten_util.ravel_pytree(y0)

        @jax.jit
        def objective(flat, x, data):
            return objectives.lower_objective(problem, data).value(x, unravel(flat))

        value_and_gradient = jax.jit(jax.value_and_grad(objective))
        result = scipy.optimize.minimize(
            lambda flat: tuple(
                np.asarray(v, np.float64) for v in value_and_gradient(flat, x, data)
            ),
            np.asarray(flat0),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "gtol": 1e-9, "ftol": 1e-15},
        )
        return unravel(jnp.asarray(result.x))


def as_float64(tree: PyTree) -> PyTree:
    """Return a pytree with its floating-point leaves in float64."""

    def convert(leaf):
        host = np.asarray(leaf)
        wide = np.issubdtype(host.dtype, np.floating)
        return jnp.asarray(host.astype(np.float64) if wide else host)

    return jax.tree.map(convert, tree)
