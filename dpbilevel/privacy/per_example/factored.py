r"""Arrays of one record kept unformed: as products of factors or as sparse rows.

The gradient of one record's loss with respect to a matrix that the loss multiplies with
inputs at $T$ places is $\sum_t l_t r_t^\top$, with the inputs $l_t$ and the derivatives
$r_t$ with respect to the outputs. Its norm and weighted sums over records follow from
these factors at the cost of a plain gradient. The gradient with respect to the rows of
a table that a record looks up is treated in the same way.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..exact.floats import accumulation_dtype, nearest_integer
from ..exact.int61 import split

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
# More places than this are summed into an array: if they do not cancel, they are longer
# together than their sum by the root of their number.
_MOST_PLACES = 256


class Factored(eqx.Module):
    r"""The array $\sum_t l_t r_t^\top$ of one record, by its factors.

    Attributes:
        left: $l$, one place a row; not shorter than those of `right`.
        right: $r$, one place a row.
        shape: Of the array. Static.
        left_axes: Its axes that a row of `left` runs over. Static.
        right_axes: Those of `right`: all others. Static.
        given: Whether `left` is an array of the record, which takes no memory. Static.
    """

    left: Float[Array, "*n places p"]
    right: Float[Array, "*n places q"]
    shape: tuple[int, ...] = eqx.field(static=True)
    left_axes: tuple[int, ...] = eqx.field(static=True)
    right_axes: tuple[int, ...] = eqx.field(static=True)
    given: bool = eqx.field(static=True, default=False)

    @property
    def dtype(self) -> Any:
        """Dtype of the factor with more bits."""
        dtypes = self.left.dtype, self.right.dtype
        return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)

    @property
    def places(self) -> int:
        """Number $T$ of terms in the sum: rows of each factor, called places."""
        return self.left.shape[-2]

    @property
    def widths(self) -> tuple[int, int]:
        """Pair of the lengths of a row of `left` and of `right`."""
        return self.left.shape[-1], self.right.shape[-1]

    @property
    def narrow(self) -> bool:
        """Whether the array is one row times a number."""
        return self.places == 1 and self.widths[1] == 1

    def folded(self, product: Float[Array, "*n p q"]) -> Array:
        """Reshape products of the factors' rows, (*n, p, q), to arrays of `shape`."""
        order = self.left_axes + self.right_axes
        lead = product.shape[:-2]
        array = product.reshape([*lead, *(self.shape[axis] for axis in order)])
        axes = [len(lead) + order.index(axis) for axis in range(len(order))]
        return jnp.transpose(array, [*range(len(lead)), *axes])

    def dense(self) -> Array:
        """Return the dense array of these factors, for one record."""
        # The sum is in float32 at least, and is not rounded to fewer bits.
        dtype = accumulation_dtype(self.dtype)
        left, right = self.left.astype(dtype), self.right.astype(dtype)
        return self.folded(jnp.einsum("tp,tq->pq", left, right))

    def turned(self) -> "Factored":
        """Return the same array as `Factored`, with its factors exchanged."""
        axes = self.right_axes, self.left_axes
        return Factored(self.right, self.left, self.shape, *axes)

    def times(self, change: Callable[[Array], Array]) -> "Factored":
        """Return a copy with `change`, a scaling or conversion, applied to `right`."""
        return dataclasses.replace(self, right=change(_widened(self.right)))

    def moved(self, shape: Sequence[int], place: Callable[[int], int]) -> "Factored":
        """Return the `Factored` array with axes moved: axis `i` becomes `place(i)`."""
        left, right = (tuple(map(place, v)) for v in (self.left_axes, self.right_axes))
        return Factored(self.left, self.right, tuple(shape), left, right, self.given)

    def multiplied(
        self, matrix: Array, axes: Sequence[Sequence[int]], first: bool, precision: Any
    ) -> "Factored":
        """Return the `Factored` tensor product with `matrix`, over some axes of `left`.

        Args:
            matrix: The other array.
            axes: The contracted axes, all of them of `left`, and those of the other.
            first: Whether axes of this array come first in the result.
            precision: As for `jnp.tensordot`.
        """
        ours, theirs = axes
        left = _widened(self.left)
        left = left.reshape(-1, *(self.shape[axis] for axis in self.left_axes))
        pairs = [self.left_axes.index(axis) + 1 for axis in ours], theirs
        left = jnp.tensordot(left, _widened(matrix), pairs, precision=precision)
        rest = [axis for axis in range(len(self.shape)) if axis not in ours]
        others = [axis for axis in range(matrix.ndim) if axis not in theirs]
        shape = [self.shape[axis] for axis in rest]
        added = [matrix.shape[axis] for axis in others]
        shape, shift = (shape + added, 0) if first else (added + shape, len(others))
        ahead = len(rest) if first else 0
        kept = [axis for axis in self.left_axes if axis in rest]
        kept, right = (
            [rest.index(axis) + shift for axis in side]
            for side in (kept, self.right_axes)
        )
        sides = (*kept, *range(ahead, ahead + len(others))), tuple(right)
        return Factored(left.reshape(len(left), -1), self.right, tuple(shape), *sides)

    def plus(self, other: "Factored | SparseRows") -> "Factored | None":
        """Return the sum as `Factored`; `None` if axes are split differently."""
        if not isinstance(other, Factored):
            return None
        if other.left_axes != self.left_axes:
            other = other.turned()
        if (other.left_axes, other.right_axes) != (self.left_axes, self.right_axes):
            return None
        pairs = (self.left, other.left), (self.right, other.right)
        left, right = (_joined(*pair) for pair in pairs)
        return dataclasses.replace(self, left=left, right=right, given=False)

    def cheapest(self, products: bool) -> "Factored | Array":
        """Return the smaller form: `Factored`, longer factors left, or the dense array.

        Without `products`, of one row times a number alone.
        """
        (p, q), places = self.widths, self.places
        turned = self if p >= q else self.turned()
        if turned.narrow and p * q > 1:
            return turned
        smaller = places * (p + q) < p * q or (places == 1 and q * p > 1)
        few = places <= _MOST_PLACES
        return turned if products and smaller and few else self.dense()


class SparseRows(eqx.Module):
    """An array of one record that is zero but in some rows, like a table's gradient.

    Attributes:
        indices: Of the rows. Those out of range are no rows.
        rows: The rows; those of equal indices add up.
        count: The number of rows of the array. Static.
    """

    indices: Int[Array, "*n places"]
    rows: Float[Array, "..."]
    count: int = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        """Dtype of the dense array."""
        return self.rows.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of one record."""
        return self.count, *self.rows.shape[self.indices.ndim :]

    def times(self, change: Callable[[Array], Array]) -> "SparseRows":
        """Return a copy with `change`, a scaling or conversion, applied to `rows`."""
        return dataclasses.replace(self, rows=change(_widened(self.rows)))

    def plus(self, other: "Factored | SparseRows") -> "SparseRows | None":
        """Return the sum as `SparseRows`; `None` unless the other is sparse too."""
        if not isinstance(other, SparseRows):
            return None
        indices = jnp.concatenate((self.indices, other.indices))
        rows = _joined(self.rows, other.rows)
        return SparseRows(indices, rows, self.count)

    def dense(self) -> Array:
        """Return the dense array of these sparse rows: one record's, zero elsewhere."""
        inside = jnp.where(self.indices < 0, self.count, self.indices)
        rows = _widened(self.rows)
        zeros = jnp.zeros(self.shape, rows.dtype)
        return zeros.at[inside].add(rows, mode="drop")

    def cheapest(self, products: bool) -> "SparseRows | Array":
        """Return `SparseRows` with each index once if short, else the dense array."""
        if len(self.indices) >= self.count:
            return self.dense()
        kept = (self.indices >= 0) & (self.indices < self.count)
        same = (self.indices[:, None] == self.indices[None]) & kept[None]
        first = ~jnp.any(jnp.tril(same, -1), axis=1)
        rows = _widened(self.rows)
        merge = (same & first[:, None]).astype(rows.dtype)
        spread = jnp.expand_dims(kept, range(1, rows.ndim))
        rows = jnp.where(spread, rows, 0)  # dropped entries may hold anything
        rows = jnp.tensordot(merge, rows, 1, precision="highest")
        return dataclasses.replace(self, rows=rows)


Structured = Factored | SparseRows


def _widened(factor: Array) -> Array:
    """Return a factor in float32 at least.

    In half precision each operation would round every factor. Their errors add up
    where places cancel, and a gradient that is formed has only one of them.
    """
    return factor.astype(accumulation_dtype(factor.dtype))


def _joined(first: Array, second: Array) -> Array:
    if first.dtype != second.dtype:
        widest = max(first.dtype, second.dtype, key=lambda kind: jnp.finfo(kind).bits)
        dtype = accumulation_dtype(widest)
        first, second = first.astype(dtype), second.astype(dtype)
    return jnp.concatenate((first, second))


def is_structured(leaf: Any) -> bool:
    """Return whether a leaf is `Factored` or `SparseRows` and not an array."""
    return isinstance(leaf, Structured)


def relative_error(size: int, value: Factored) -> float:
    """Return a bound on the relative rounding error of sums over `size` records."""
    return 1.001 * (size * value.places + 4) * 2.0**-24


def largest_group(value: Factored) -> int:
    """Return how many records a group sums at most, if all others keep their rows."""
    if value.places > 1:
        return 2 ** int(math.log2(2**12 / value.places) / 2)
    return GROUP if math.prod(value.shape) <= _LARGE else _LARGE_GROUP


def products(
    weights: Float[Array, " n"], value: Factored, size: int
) -> Float[Array, "groups q p"]:
    """Return an array (groups, q, p): weighted sums of products over `size` records.

    To be folded as products of `value.turned()`. If a weight is zero, factors may
    hold anything.
    """
    used, weights = (v[:, None, None] for v in (weights > 0, weights))
    left = split(jnp.where(used, value.left, 0), size)
    right = split(jnp.where(used, weights * value.right, 0), size)
    # The shorter rows first: those of the first factor are transposed in memory.
    product = jnp.einsum("gktq,gktp->gqp", right, left, precision=HIGHEST)
    # The barrier makes it computed once, however often it is read.
    return jax.lax.optimization_barrier(jax.lax.stop_gradient(product))


def multiples(
    weights: Float[Array, " n"], value: Factored, largest: Int[Array, ""]
) -> Int[Array, "groups p 1"]:
    """Return sums (groups, p, 1) of weighted rows, each rounded to multiples of 4."""
    rows = jax.lax.stop_gradient(value.left[:, 0])
    numbers = weights / COARSE * jax.lax.stop_gradient(value.right[:, 0, 0])
    used, numbers = (weights > 0)[:, None], numbers[:, None]
    whole = len(rows) // _NARROW_GROUP * _NARROW_GROUP

    def sums(start: int, stop: int, size: int) -> Int[Array, "..."]:
        """Return sums over groups of rows, one place of all groups at a time."""

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
