"""Rows of a public number, so that no shape shows how many records there are."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

# Rows come in multiples of this many. A compiled program treats the rows of such blocks
# alike, wherever they stand; the last ones of another number may be rounded otherwise.
BLOCK = 64


class Padded(eqx.Module):
    """Records in a public number of rows, so that no shape shows how many there are.

    Attributes:
        records: A pytree with a leading axis of fixed length.
        present: Which rows are records. The others hold NaN, and zero where they are
            not floating point.
    """

    records: PyTree
    present: Bool[Array, " n"]


def padded_rows(size: int) -> int:
    """Return the number of rows that a plan for `size` records pads them to.

    The next larger multiple of 64, so that one record more always fits.
    """
    return (size // BLOCK + 1) * BLOCK


def padded(records: PyTree, rows: int) -> Padded:
    """Return the records, filled up to `rows` rows that count for nothing."""
    n = jax.tree.leaves(records)[0].shape[0]

    def pad(v):
        widths = [(0, rows - n)] + [(0, 0)] * (v.ndim - 1)
        return jnp.pad(v, widths, constant_values=filler(v.dtype))

    # The barrier compiles readers of the rows apart from the padding.
    filled = jax.lax.optimization_barrier(jax.tree.map(pad, records))
    return Padded(filled, jnp.arange(rows) < n)


def filler(dtype: jnp.dtype) -> float | int | bool:
    """Return the entry of a row that is no record: NaN, or zero without NaN."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return math.nan
    return False if jnp.issubdtype(dtype, jnp.bool_) else 0


def unpacked(records: PyTree) -> tuple[PyTree, Bool[Array, " n"] | None]:
    """Return rows, and the mask of those that are records: `None` means all."""
    if isinstance(records, Padded):
        return records.records, records.present
    return records, None
