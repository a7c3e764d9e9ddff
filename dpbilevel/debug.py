"""NON-PRIVATE views of a problem, for a developer's eyes only.

Nothing here is released, counted or noisy. Do not publish what these functions return
on sensitive records.
"""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jaxtyping import PyTree

from .oracles import objectives
from .problems.bilevel import BilevelProblem, Levels


def upper_objective(
    problem: BilevelProblem, x: PyTree, y: PyTree, data: Levels
) -> jax.Array:
    r"""NON-PRIVATE. $f(x, y)$: the mean upper loss plus its public term.

    Args:
        problem: The problem.
        x: The upper variable.
        y: The lower variable.
        data: The records.
    """
    return objectives.upper_objective(problem, data).value(x, y)


def lower_objective(
    problem: BilevelProblem, x: PyTree, y: PyTree, data: Levels
) -> jax.Array:
    r"""NON-PRIVATE. $g(x, y)$: the mean lower loss plus its public term.

    Args:
        problem: The problem.
        x: The upper variable.
        y: The lower variable.
        data: The records.
    """
    return objectives.lower_objective(problem, data).value(x, y)


def lower_solution(
    problem: BilevelProblem, x: PyTree, y0: PyTree, data: Levels
) -> PyTree:
    r"""NON-PRIVATE. $y^*(x)$ without a set, in float64, by L-BFGS on the host.

    The check of `dpbilevel.lower_solution`: another implementation, in float64 whatever
    the setting of JAX, and without derivatives or `jax.jit`.

    Args:
        problem: The problem; `y_set` is not used.
        x: The upper variable.
        y0: A starting point.
        data: The records.

    Returns:
        A float64 pytree like `y0`, with a gradient norm of about 1e-9.
    """
    with jax.enable_x64(True):
        x, y0, data = (_as_float64(tree) for tree in (x, y0, data))
        flat0, unravel = jax.flatten_util.ravel_pytree(y0)

        @jax.jit
        def objective(flat, x, data):
            return lower_objective(problem, x, unravel(flat), data)

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


def hyper_objective(
    problem: BilevelProblem, x: PyTree, y0: PyTree, data: Levels
) -> float:
    r"""NON-PRIVATE. $F(x) = f(x, y^*(x))$ in float64.

    Args:
        problem: The problem.
        x: The upper variable.
        y0: A starting point for the lower solution.
        data: The records.
    """
    with jax.enable_x64(True):
        y = lower_solution(problem, x, y0, data)
        x, data = _as_float64(x), _as_float64(data)
        return float(upper_objective(problem, x, y, data))


def _as_float64(tree: PyTree) -> PyTree:
    def convert(leaf):
        host = np.asarray(leaf)
        wide = np.issubdtype(host.dtype, np.floating)
        return jnp.asarray(host.astype(np.float64) if wide else host)

    return jax.tree.map(convert, tree)
