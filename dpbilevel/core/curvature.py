"""Forecasts of steps that are too long for the curvature of the objective."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ..privacy.rows import ForecastRow
from .descent import Rule

_ITERATIONS, _ACCURACY = 100, 1e-4


def overshooting_row(
    step_size: Any, public_gradient: Callable[[PyTree], PyTree], w0: PyTree
) -> tuple[ForecastRow, ...]:
    """Return a tuple: a `ForecastRow` if steps overshoot the public terms, or empty.

    Descent on a function of curvature $h$ diverges along steps longer than $2 / h$.
    `Descent.curvature_limited` prevents that while a solver runs, at the cost of
    shorter steps in all coordinates.

    Args:
        step_size: A number, or a `Rule`, about whose steps nothing is known.
        public_gradient: The gradient of the public terms.
        w0: The point at which they are evaluated.

    Returns:
        No row if step size times curvature is at most 2.
    """
    if isinstance(step_size, Rule):
        return ()
    w0 = jax.tree.map(float_array, w0)
    curvature, step_size = largest_curvature(public_gradient, w0), float(step_size)
    if step_size * curvature <= 2:
        return ()
    return _row(step_size, public_curvature=curvature)


def unstable_row(
    step_size: Any, smoothness: float | None, momentum: float | None = None
) -> tuple[ForecastRow, ...]:
    r"""Return a tuple: a `ForecastRow` if steps are too long for the losses, or empty.

    Args:
        step_size: A number, or a `Rule`, about whose steps nothing is known.
        smoothness: $\beta$, a bound on the curvature of every record's loss, such as
            $R^2 / 4$ for a logistic, $R^2$ for a squared and $R^2 / 2$ for a softmax
            loss of rows of norm at most $R$; `None` if none is declared.
        momentum: $\mu$ of Nesterov's steps, or `None` for plain ones.

    Returns:
        No row if step size times $\beta$ is at most 2, or $(2 + 2 \mu) / (1 + 2 \mu)$
        with momentum.
    """
    if isinstance(step_size, Rule) or smoothness is None:
        return ()
    most = 2 if momentum is None else (2 + 2 * momentum) / (1 + 2 * momentum)
    if step_size * smoothness <= most:
        return ()
    product = float(most)
    return _row(step_size, record_curvature=float(smoothness), stable_product=product)


def _row(step_size: Any, **numbers: Any) -> tuple[ForecastRow, ...]:
    size = float(step_size)
    return (ForecastRow("steps", step_size=size, from_start=True, **numbers),)


def largest_curvature(gradient: Callable[[PyTree], PyTree], w: PyTree) -> float:
    """Estimate the largest eigenvalue of a Hessian from below, by power iteration.

    Args:
        gradient: The gradient of a function without data.
        w: The point, of floats.

    Returns:
        Infinity if the Hessian is not finite, or too large for the floats.
    """
    if not jax.tree.leaves(w):
        return 0.0
    found = _eigenvalue(gradient, w, 0.0)
    if found < 0:  # the largest in absolute value; a shift finds the largest one
        found = _eigenvalue(gradient, w, -found)
    return found if math.isfinite(found) else math.inf


def _eigenvalue(gradient, w: PyTree, shift: float) -> float:
    """Return the eigenvalue of a Hessian that is farthest from `-shift`."""

    # Compiled, as the steps of the solver are.
    @jax.jit
    def iterated(w: PyTree, shift: Float[Array, ""]) -> Float[Array, ""]:
        flat, unravel = ravel_pytree(w)

        def product(v):
            return ravel_pytree(jax.jvp(gradient, (w,), (unravel(v),))[1])[0]

        def unit(v):
            # The largest entry divides first: squares would overflow.
            largest = jnp.max(jnp.abs(v))
            v = v / jnp.where(largest > 0, largest, 1)
            return v / jnp.where(largest > 0, jnp.linalg.norm(v), 1)

        def moves(state):
            count, _, before, found = state
            moved = jnp.abs(found - before) > _ACCURACY * jnp.abs(found)
            return (count < 2) | ((count < _ITERATIONS) & moved)  # stops at NaN

        def iterate(state):
            count, v, _, before = state
            along = product(v)
            v_next = unit(along + shift.astype(v.dtype) * v)
            return count + 1, v_next, before, v @ along

        # Entries of different sizes and signs in every leaf.
        start = unit(jnp.cos(jnp.arange(flat.size, dtype=flat.dtype)))
        zero = jnp.zeros((), flat.dtype)
        return jax.lax.while_loop(moves, iterate, (0, start, zero, zero))[-1]

    with jax.numpy_dtype_promotion("standard"):  # leaves may be of several dtypes
        return float(iterated(w, jnp.asarray(shift)))


def float_array(value: Any) -> jax.Array:
    """Convert a value to a JAX array of floats, so that derivatives exist."""
    value = jnp.asarray(value)
    floating = jnp.issubdtype(value.dtype, jnp.inexact)
    return value if floating else value.astype(jnp.result_type(float))
