"""Losses of models on test records, and of the best answer that reads no feature."""

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
from .synthetic import example_for


def model_of(problem: AbstractProblem, w0: PyTree) -> PyTree:
    """Return the model among the variables: y of two levels, else all of them."""
    return w0[1] if isinstance(problem, BilevelProblem) else w0


def constant_feature(owner: str, model: PyTree, intercept: int | None) -> int | None:
    """Return the place of the constant feature, `None` if the model is not linear.

    Raises:
        ValueError: The model has no feature at this place.
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


def trivial_loss(
    problem: Any, w0: PyTree, test: PyTree, intercept: int | None
) -> float:
    """Return the loss of the best constant answer, or of the initial point if less.

    Args:
        problem: The problem.
        w0: The initial point.
        test: Synthetic test records.
        intercept: The place of the constant feature, or `None`.

    Raises:
        ValueError: The loss cannot read the records.
    """
    start = _start_loss(problem, w0, test)
    if intercept is None:
        return start
    found = float(_constant_loss(problem, w0, test, intercept))
    return min(start, found) if np.isfinite(found) else start


# Jitted, because the constant answer of every draw is looked for.
@functools.partial(jax.jit, static_argnames="intercept")
def _constant_loss(
    problem: Any, w0: PyTree, test: PyTree, intercept: int
) -> Float[Array, ""]:
    zero = jnp.zeros_like(model_of(problem, w0))

    def loss(constant):
        y = zero.at[intercept].set(constant.reshape(zero.shape[1:]))
        two = isinstance(problem, BilevelProblem)
        return mean_loss(problem, (w0[0], y) if two else y, test)

    initial = jnp.zeros(zero[intercept].size, zero.dtype)
    return minimize(loss, initial, method="BFGS").fun


def _start_loss(problem: Any, w0: PyTree, test: PyTree) -> float:
    try:
        return float(mean_loss(problem, w0, test))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        shapes = jax.tree.map(lambda v: (v.shape[1:], str(v.dtype)), test)
        raise ValueError(
            "auto: pass synthetic=, a function that draws records like yours, or "
            "records=, what they look like. The loss cannot read the default ones, of "
            f"shapes {shapes} ({type(error).__name__}: {error}).{example_for(problem)}"
        ) from error
