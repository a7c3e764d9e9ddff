"""Whether steps are too long for the public terms, before anything runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .descent import Rule

_ITERATIONS = 32


def overshooting_row(
    step_size: Any, public_gradient: Callable[[PyTree], PyTree], w0: PyTree
) -> tuple[dict[str, Any], ...]:
    r"""The row of a forecast on steps that overshoot the public terms.

    Descent on a function of curvature $h$ diverges along steps longer than $2 / h$.
    `Descent.shortened` prevents that while a solver runs, at the cost of shorter steps
    in all coordinates.

    Args:
        step_size: A number, or a `Rule`, about whose steps nothing is known.
        public_gradient: The gradient of the public terms.
        w0: Where they are evaluated, or its shapes, for zeros.

    Returns:
        No row where step size times curvature is at most 2.
    """
    if isinstance(step_size, Rule):
        return ()
    w0 = jax.tree.map(concrete_array, w0)
    curvature, step_size = largest_curvature(public_gradient, w0), float(step_size)
    if not step_size * curvature > 2:
        return ()
    row = {"step_size": step_size, "public_curvature": curvature}
    return ({"release": "steps", **row, "from_start": True},)


def largest_curvature(gradient: Callable[[PyTree], PyTree], w: PyTree) -> float:
    """The largest eigenvalue of a Hessian, in absolute value, by power iteration.

    Args:
        gradient: The gradient of a function without data.
        w: Where.
    """

    def product(v: PyTree) -> PyTree:
        return jax.jvp(gradient, (w,), (v,))[1]

    def normalized(v: PyTree) -> PyTree:
        norm = optax.tree.norm(v)
        norm = jnp.where(norm > 0, norm, jnp.ones_like(norm))
        return jax.tree.map(lambda leaf: leaf / norm.astype(leaf.dtype), v)

    # Entries of several sizes and signs, along no axis of symmetry.
    start = jax.tree.map(
        lambda v: jnp.cos(jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape), w
    )
    v = jax.lax.fori_loop(0, _ITERATIONS, lambda _, v: normalized(product(v)), start)
    return float(optax.tree.norm(product(normalized(v))))


def concrete_array(value: Any) -> jax.Array:
    """An array of floats: zeros for a shape."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jnp.zeros(value.shape, value.dtype)
    value = jnp.asarray(value)
    floating = jnp.issubdtype(value.dtype, jnp.inexact)
    return value if floating else value.astype(jnp.result_type(float))
