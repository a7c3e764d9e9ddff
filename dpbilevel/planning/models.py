"""The model among the variables of a problem, and its losses on test records."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.optimize import minimize
from jaxtyping import Array, Float, PyTree

from ..applications.recalibration import constants_of, is_array
from ..bilevel.problem import BilevelProblem
from ..core.problem import AbstractProblem


def model_of(problem: AbstractProblem, w0: PyTree) -> PyTree:
    """Return the model among the variables: y of two levels, else all of them."""
    return w0[1] if isinstance(problem, BilevelProblem) else w0


def is_linear(model: PyTree) -> bool:
    """Return whether a model is one array, the coefficients of features."""
    return len(jax.tree.leaves(model)) == 1


def is_vector(model: PyTree) -> bool:
    """Return whether a model is one vector, and so has one score."""
    return is_array(model) and jnp.ndim(model) == 1


def constant_feature(owner: str, model: PyTree, intercept: int | None) -> int | None:
    """Return `intercept`, checked to be a feature; `None` if a model is not linear.

    Raises:
        ValueError: The model has no feature at this index.
    """
    if intercept is None or not is_array(model) or jnp.ndim(model) not in (1, 2):
        return None
    constants_of(owner, model, intercept)
    return intercept


@jax.jit
def mean_loss(problem: Any, value: PyTree, test: PyTree) -> Float[Array, ""]:
    """Return the mean loss of a released model on test records."""
    if isinstance(problem, BilevelProblem):
        x, y = value
        losses = jax.vmap(functools.partial(problem.upper, x), (None, 0))(y, test)
    else:
        losses = jax.vmap(problem.loss, (None, 0))(value, test)
    return jnp.mean(losses)


def constant_loss(
    problem: Any, w0: PyTree, test: PyTree, intercept: int | None
) -> float:
    """Return the loss of the best constant answer, or of the initial point if less.

    Args:
        problem: The problem.
        w0: The initial point.
        test: Synthetic test records.
        intercept: The index of the constant feature, or `None`.

    Raises:
        ValueError: The loss cannot read the records.
    """
    try:
        initial = float(mean_loss(problem, w0, test))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        shapes = jax.tree.map(lambda v: (v.shape[1:], str(v.dtype)), test)
        raise ValueError(
            f"auto: the loss cannot read synthetic records of shapes {shapes} "
            f"({type(error).__name__}: {error}). Pass records=, their description, or "
            "synthetic=, a function that draws some (docs/auto.md)."
        ) from error
    if intercept is None:
        return initial
    fitted = float(_fitted_constant_loss(problem, w0, test, intercept))
    return min(initial, fitted) if np.isfinite(fitted) else initial


# Jitted, because every draw of synthetic data has a constant answer of its own.
@functools.partial(jax.jit, static_argnames="intercept")
def _fitted_constant_loss(
    problem: Any, w0: PyTree, test: PyTree, intercept: int
) -> Float[Array, ""]:
    zero = jnp.zeros_like(model_of(problem, w0))

    def loss(constant):
        y = zero.at[intercept].set(constant.reshape(zero.shape[1:]))
        two = isinstance(problem, BilevelProblem)
        return mean_loss(problem, (w0[0], y) if two else y, test)

    initial = jnp.zeros(zero[intercept].size, zero.dtype)
    return minimize(loss, initial, method="BFGS").fun
