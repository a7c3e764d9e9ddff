"""Upper bounds on the norm of one record's value, whatever the rounding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..exact.floats import accumulation_dtype, is_finite
from .factored import Factored, SparseRows, is_structured

# Largest value of an entry, in clip norms. Norms of finite values are below
# its 1.5th power, but not the norm of a value with the largest number as an entry.
_LONGEST = 2.0**40
TOO_LONG = _LONGEST**1.5
Scalar = Float[Array, ""]


def scale_and_norm(value: PyTree, clip_norm: Scalar) -> tuple[PyTree, Scalar, Scalar]:
    r"""Return a value in clip norms, a bound on its norm, and one on its places' norms.

    Leaves may be `Factored` or `SparseRows`.

    Returns:
        The value; at least its norm, which is above `TOO_LONG` where the value is not
        finite; and at least $(\sum_l (\sum_t |l_t| |r_t|)^2)^{1/2}$ over its factored
        leaves of several places, which may cancel in the norm.
    """
    leaves, tree = jax.tree.flatten(value, is_leaf=is_structured)
    parts = []
    for leaf in leaves:
        if isinstance(leaf, Factored):
            parts.append(_factored(leaf, clip_norm))
            continue
        sparse = isinstance(leaf, SparseRows)
        units = _scaled(leaf.rows if sparse else leaf, clip_norm)
        made = dataclasses.replace(leaf, rows=units) if sparse else units
        parts.append(_Part(made, jnp.sum(units * units), units.size))
    dtype = max((p.squares.dtype for p in parts), key=lambda k: jnp.finfo(k).bits)
    # Worst-case relative rounding of a sum of `size` squares, halved by the root.
    epsilon = max(float(jnp.finfo(p.squares.dtype).eps) for p in parts)
    margin = 1 + (sum(p.size for p in parts) + 32) * epsilon / 4

    def root(squares):
        total = jnp.sum(jnp.stack([v.astype(dtype) for v in squares]))
        return jnp.sqrt(total) * margin

    lengths = [p.squared_length for p in parts if p.squared_length is not None]
    length = root(lengths) if lengths else jnp.zeros((), dtype)
    value = tree.unflatten([p.value for p in parts])
    return value, root([p.squares for p in parts]), length


@dataclasses.dataclass(frozen=True)
class _Part:
    """A leaf in units of the clip norm, with an upper bound on its sum of squares."""

    value: Any
    squares: Scalar  # at least their sum, but for the rounding of `size` additions
    size: int
    squared_length: Scalar | None = None  # of several places together


def _factored(leaf: Factored, clip_norm: Scalar) -> _Part:
    """Return a `_Part`: a factored leaf in clip norms and bounds on its squared norm.

    What is added later are the products of these factors, whatever function they came
    from, so that the norm is of what is added.
    """
    dtype = accumulation_dtype(leaf.dtype)
    epsilon = float(jnp.finfo(dtype).eps)
    (p, q), places = leaf.widths, leaf.places
    left, right = leaf.left.astype(dtype), leaf.right.astype(dtype)
    if places == 1:  # loops over axes of length one are slow
        left, right = left[0], right[0, 0] if leaf.narrow else right[0]
    left, right = jax.lax.optimization_barrier((left, right))
    # Squares below the normal numbers may count as zero.
    squares = jnp.sum(left * left, axis=-1) + p * jnp.finfo(dtype).tiny
    lengths = jnp.sqrt(squares) * (1 + (p + 32) * epsilon / 4)
    if places > 1:
        lengths = lengths[:, None]
    finite = is_finite(lengths) & is_finite(right)
    units = _in_units(lengths * right, finite, clip_norm)
    if places == 1:
        # No pass over the left factor: its length is taken from the right one.
        right = jax.lax.optimization_barrier(units / lengths)
        right = right.reshape(leaf.right.shape)
        value = dataclasses.replace(leaf, left=left[None], right=right)
        return _Part(value, jnp.sum(units * units), q)
    value = dataclasses.replace(leaf, left=left / lengths, right=units)
    squared_length = jnp.sum(jnp.sqrt(jnp.sum(units * units, axis=1))) ** 2
    products = [jnp.matmul(v, v.T, precision="highest") for v in (value.left, units)]
    rows = jax.lax.optimization_barrier(jnp.sum(jnp.multiply(*products), axis=1))
    # Each product is off by as many roundings as it has terms.
    error = (p + q + 2 * places + 32) * epsilon
    return _Part(value, jnp.sum(rows) + error * squared_length, q, squared_length)


def _scaled(value: Array, clip_norm: Scalar) -> Array:
    """Return the value in units of the clip norm, or a huge number if it is not finite.

    Its norm is then too long, and its weight of zero makes zero of all of it, which it
    would not of NaN.
    """
    # The test and the sum read one value: a compiler that takes
    # NaN for impossible may compute such a value differently for either.
    value = jax.lax.optimization_barrier(value.astype(accumulation_dtype(value.dtype)))
    return _in_units(value, is_finite(value), clip_norm)


def _in_units(value: Array, finite: Array, clip_norm: Scalar) -> Array:
    """Return the value in clip norms: long entries cut, infinite or NaN ones huge."""
    dtype = value.dtype
    units = jnp.clip(value * (1 / clip_norm).astype(dtype), -_LONGEST, _LONGEST)
    return jnp.where(finite, units, jnp.finfo(dtype).max)
