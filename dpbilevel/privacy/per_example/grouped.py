"""Sums over groups of records: of products of factors, and of multiples of rows."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..exact.floats import nearest_integer
from ..exact.int61 import split
from .factored import Factored

# Rows that are summed plainly. In floating point, one record changes the rounding of
# such a sum by at most GROUP**2 * 2**-24 of the clip norm, which the margin of the
# mechanisms covers; on the grid, that many counts of 25 bits fit in 32.
GROUP = 64
# Products with rows of one number are added one by one, where more rows would meet in
# the same lines of a cache; large products are written to memory less often.
_NARROW_GROUP, _LARGE_GROUP = 8, 256
_LARGE = 2**16  # entries
COARSE = 4  # steps of the grid of multiples of rows: at most 2**22 of them
HIGHEST = jax.lax.Precision.HIGHEST


def relative_error(size: int, value: Factored) -> float:
    r"""At least $\gamma_m$ of $m = k T + 4$ roundings in float32, for groups of $k$."""
    return 1.001 * (size * value.places + 4) * 2.0**-24


def largest_group(value: Factored) -> int:
    """The group size where all other records keep their rows."""
    if value.places > 1:
        return 2 ** int(math.log2(2**11 / value.places) / 2)
    return GROUP if math.prod(value.shape) <= _LARGE else _LARGE_GROUP


def products(
    weights: Float[Array, " n"], value: Factored, size: int
) -> Float[Array, "groups q p"]:
    """The weighted sums of products of factors over groups of `size` records.

    To be folded as products of `value.turned()`. Where a weight is zero, factors may
    hold anything.
    """
    used, weights = (v[:, None, None] for v in (weights > 0, weights))
    left = split(jnp.where(used, value.left, 0), size)
    right = split(jnp.where(used, weights * value.right, 0), size)
    # The shorter rows first: those of the first factor are transposed in memory.
    product = jnp.einsum("gktq,gktp->gqp", right, left, precision=HIGHEST)
    # Computed once for all who read it.
    return jax.lax.optimization_barrier(jax.lax.stop_gradient(product))


def multiples(
    weights: Float[Array, " n"], value: Factored, largest: Int[Array, ""]
) -> Int[Array, "groups p 1"]:
    """Sums of the rounded multiples of rows, of which no copy is made."""
    rows = jax.lax.stop_gradient(value.left[:, 0])
    numbers = weights / COARSE * jax.lax.stop_gradient(value.right[:, 0, 0])
    used, numbers = (weights > 0)[:, None], numbers[:, None]
    whole = len(rows) // _NARROW_GROUP * _NARROW_GROUP

    def sums(start: int, stop: int, size: int) -> Int[Array, "..."]:
        """Over groups of rows: all rows of one place of a group at a time."""

        def nth(k: int) -> Int[Array, "groups p"]:
            place = slice(start + k, stop, size)
            part = (numbers[place] * rows[place]).astype(jnp.float32)
            counts = nearest_integer(part, largest // COARSE)
            return jnp.where(used[place], counts, 0)  # others may hold anything

        return functools.reduce(jnp.add, map(nth, range(size)))

    parts = [(0, whole, _NARROW_GROUP)] if whole else []
    if whole < len(rows):
        parts.append((whole, len(rows), len(rows) - whole))
    counts = jnp.concatenate([sums(*part) for part in parts])
    groups = split(jax.lax.optimization_barrier(counts), GROUP // _NARROW_GROUP)
    return COARSE * jnp.sum(groups, axis=1, dtype=jnp.int32)[..., None]
