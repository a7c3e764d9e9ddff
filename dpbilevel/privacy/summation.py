"""How clipped values of many records are summed: in floating point, or exactly."""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from . import limbs
from .floats import floor_log2, power_of_two
from .grid import Grid

# Rows that are summed plainly. In floating point, one record changes the rounding of
# such a sum by at most GROUP**2 * 2**-24 of the clip norm, which the margin of the
# mechanisms covers; on the grid, that many counts of 25 bits fit in 32.
GROUP = 64
# C / m in steps of the grid.
_BITS = 23
_ROOM = 30  # bits between a contribution and what of it is flushed to zero
# Below these a contribution, or the step of a grid for it, may not be a normal number.
_LEAST_CONTRIBUTION = {jnp.dtype("float32"): 2.0**-126, jnp.dtype("float64"): 2.0**-900}


@dataclasses.dataclass(frozen=True)
class AbstractSum(abc.ABC):
    """Adds up rows of values in units of the clip norm, each at most `share` long.

    Attributes:
        value: One record's value, as shapes in the dtypes of norms and sums.
        clip_norm: The clip norm $C$.
        denominator: $m$, what the sum is divided by.
        n: The number of rows.
    """

    value: PyTree
    clip_norm: Float[Array, ""]
    denominator: Float[Array, ""]
    n: int

    @property
    @abc.abstractmethod
    def share(self) -> float:
        """The share of the clip norm that a value may fill before it is added."""

    @abc.abstractmethod
    def empty(self, rows: int) -> PyTree:
        """The running sum of nothing, for chunks of `rows` rows."""

    @abc.abstractmethod
    def add(self, sums: PyTree, weights: Float[Array, " n"], values: PyTree) -> PyTree:
        """Adds the rows of `values`, each times its weight."""

    @abc.abstractmethod
    def mean(self, sums: PyTree) -> PyTree:
        """The sum times the clip norm, over the denominator."""

    @property
    def contribution(self) -> Float[Array, ""]:
        """$C / m$ in the widest dtype of the values, or 0 where it is out of range."""
        double = any(v.dtype == jnp.float64 for v in jax.tree.leaves(self.value))
        wide = jnp.dtype("float64" if double else "float32")
        clip_norm, denominator = (
            jax.lax.stop_gradient(v).astype(wide)
            for v in (self.clip_norm, self.denominator)
        )
        contribution = clip_norm / denominator
        in_range = contribution >= _LEAST_CONTRIBUTION[wide]
        in_range &= contribution <= jnp.finfo(wide).max
        return jnp.where(in_range, contribution, 0)


class FloatSum(AbstractSum):
    """A compensated floating-point sum.

    Plain sums of groups of rows are added to one running sum each, and what an
    addition rounds away is kept. Without that correction one record could decide how
    many later additions round away, and move the sum by many times its clipped norm.
    """

    @property
    @override
    def share(self) -> float:
        return 1.0

    @property
    def contribution(self) -> Float[Array, ""]:
        """$C / m$, or 0 where a mean of values this long is out of some leaf's range.

        Coordinates down to $2^{-30} C / m$ must be normal numbers, and $4 n C / m$
        finite.
        """
        contribution = super().contribution
        infos = [jnp.finfo(v.dtype) for v in jax.tree.leaves(self.value)]
        least = max((float(info.tiny) for info in infos), default=0.0) * 2.0**_ROOM
        most = min((float(info.max) for info in infos), default=math.inf)
        most /= 4 * max(self.n, 1)
        in_range = (contribution >= least) & (contribution <= most)
        return jnp.where(in_range, contribution, 0)

    @override
    def empty(self, rows: int) -> PyTree:
        groups = -(-rows // GROUP)
        zeros = jax.tree.map(
            lambda v: jnp.zeros((groups, *v.shape), v.dtype), self.value
        )
        return zeros, zeros  # the totals and what they round away

    def add(self, sums: PyTree, weights: Float[Array, " n"], values: PyTree) -> PyTree:
        """One batched product, one compensated addition."""
        return _two_sum(sums, jax.tree.map(lambda v: _group_sums(weights, v), values))

    @override
    def mean(self, sums: PyTree) -> PyTree:
        totals, corrections = sums
        zero = jax.tree.map(lambda v: jnp.zeros_like(v[0]), totals)
        correction = jax.tree.map(lambda v: jnp.sum(v, axis=0), corrections)
        (total, correction), _ = jax.lax.scan(
            lambda sums, v: (_two_sum(sums, v), None), (zero, correction), totals
        )
        return jax.tree.map(
            lambda a, b: (a + b) * self.contribution.astype(a.dtype), total, correction
        )


class GridSum(AbstractSum):
    r"""An exact sum of integers, whatever the order of the records.

    The step is the power of two $2^e \in (2^{-24}, 2^{-23}] \, C / m$; every record's
    scaled value is rounded to whole steps. The clip norm is tightened by the largest
    rounding, $\sqrt d / 2$ steps, so that the rounded value keeps within $C / m$.
    """

    @property
    def share(self) -> float:
        """One less the norm of half a step in every coordinate, and a rounding."""
        size = sum(v.size for v in jax.tree.leaves(self.value))
        return 1 - math.sqrt(size) * 2.0 ** -(_BITS + 1) - 2.0**-20

    @override
    def empty(self, rows: int) -> PyTree:
        return jax.tree.map(lambda v: limbs.zeros(v.shape), self.value)

    def add(self, sums: PyTree, weights: Float[Array, " n"], values: PyTree) -> PyTree:
        """Rounds to whole steps and adds."""
        # C / m in steps, between 2**23 and 2**24; the step itself may underflow.
        contribution = self.contribution
        scale = power_of_two(-floor_log2(contribution), contribution.dtype)
        steps = contribution * scale * 2.0**_BITS
        # No entry of a clipped value has more steps, whatever arithmetic made it.
        largest = jnp.floor(steps).astype(jnp.int32)
        weights = weights * steps.astype(weights.dtype)

        def count(v, total):
            weight = jnp.expand_dims(weights.astype(v.dtype), range(1, v.ndim))
            v = jax.lax.stop_gradient(v * weight)
            counts = jnp.round(v).astype(jnp.int32)
            counts = jnp.clip(counts, -largest, largest)
            groups = split(counts, min(GROUP, len(v)))
            return total + limbs.sum_rows(jnp.sum(groups, axis=1, dtype=jnp.int32))

        return jax.tree.map(count, values, sums)

    @override
    def mean(self, sums: PyTree) -> Grid:
        dtypes = tuple(v.dtype for v in jax.tree.leaves(self.value))
        exponent = floor_log2(self.contribution) - _BITS
        return Grid(sums, exponent, self.contribution, dtypes)


def split(values: Array, size: int) -> Array:
    """The rows in groups of `size`, the last one filled with zeros."""
    padding = [(0, -len(values) % size)] + [(0, 0)] * (values.ndim - 1)
    return jnp.pad(values, padding).reshape(-1, size, *values.shape[1:])


def _group_sums(weights: Float[Array, " n"], values: Array) -> Array:
    group = min(GROUP, len(weights))
    # Products run in reduced precision on accelerators unless told otherwise.
    return jnp.einsum(
        "gr,gr...->g...",
        split(weights.astype(values.dtype), group),
        split(values, group),
        precision=jax.lax.Precision.HIGHEST,
    )


def _two_sum(sums: tuple[PyTree, PyTree], value: PyTree) -> tuple[PyTree, PyTree]:
    """Adds `value` to a total and what that rounds away to its correction.

    References:
        Knuth, "The art of computer programming", volume 2, section 4.2.2, theorem B.
    """
    total, correction = sums
    # The barriers keep the compiler from simplifying (a + b) - a to b.
    barrier = jax.lax.optimization_barrier
    added = barrier(jax.tree.map(jnp.add, total, value))
    part = barrier(jax.tree.map(jnp.subtract, added, total))
    lost = jax.tree.map(
        lambda a, b, new, p: (a - (new - p)) + (b - p), total, value, added, part
    )
    return added, jax.tree.map(jnp.add, correction, lost)
