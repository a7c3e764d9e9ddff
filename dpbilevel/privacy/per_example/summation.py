"""Sums of clipped values over records: in floating point, or exact."""

import abc
import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from ..exact import int61
from ..exact.floats import floor_log2, folded, power_of_two, two_sum
from ..exact.grid import Grid
from ..exact.int61 import split
from ..records.rows import Axes
from . import factored
from .factored import COARSE, GROUP, Factored, SparseRows, is_structured

# Sums of so many counts of 25 bits, which need no cut, stay within 60 bits.
_MOST_RECORDS = 2**34
# Largest ratio of the norm of a record's places together to that of its value; beyond
# it the record counts for less.
STRETCH = 16.0
# C / m in steps of the grid.
_BITS = 23
# The most of the clip norm that is given up for the rounding of sums in any order.
MOST_ROUNDING = 2.0**-4
_ROOM = 30  # bits between a contribution and what of it is flushed to zero
# Below these a contribution, or the step of a grid for it, may not be a normal number.
_LEAST_CONTRIBUTION = {jnp.dtype("float32"): 2.0**-126, jnp.dtype("float64"): 2.0**-900}


@dataclasses.dataclass(frozen=True)
class AbstractSum(abc.ABC):
    """A rule for sums of clipped rows, in clip norms, each up to `clip_fraction` long.

    Attributes:
        value: One record's value, as shapes in the dtypes of norms and sums; leaves may
            be `Factored` or `SparseRows`.
        clip_norm: The clip norm $C$.
        denominator: $m$, what the sum is divided by.
        n: The number of rows that may be records: the first ones of all parts.
        rows: How many of them are added at once: a chunk.
        rows_fixed: Whether neighbouring data have all other records in the same rows.
        joins: Whether a record then joins the others and does not replace one.
        rows_per_shard: Number of rows of each shard, if there are several.
    """

    value: PyTree
    clip_norm: Float[Array, ""]
    denominator: Float[Array, ""]
    n: int
    rows: int
    rows_fixed: bool = True
    rows_per_shard: int | None = None
    joins: bool = False

    def __post_init__(self) -> None:
        if self.n > _MOST_RECORDS:
            raise ValueError(f"clipped_mean: at most {_MOST_RECORDS} records.")

    @property
    def part(self) -> int:
        """Number of rows in each shard; all rows if there is one shard."""
        return self.n if self.rows_per_shard is None else self.rows_per_shard

    @property
    def leaves(self) -> list[Any]:
        """List of the leaves of `value`; factored values count as one leaf."""
        return jax.tree.leaves(self.value, is_leaf=is_structured)

    @property
    def _kinds(self) -> list[tuple[float, list[Factored]]]:
        """List of pairs (stretch, leaves summed in groups): of one place, of many."""
        grouped = [v for v in self.leaves if is_grouped(v)]
        one = [v for v in grouped if v.places == 1]
        return [(1.0, one), (STRETCH, [v for v in grouped if v.places > 1])]

    @property
    def rounding(self) -> float:
        r"""Fraction of the clip norm reserved for the rounding of groups' sums.

        Let leaf $l$ have $T_l$ places and groups of $k_l$ records, $m_l = k_l T_l + 4$,
        $\gamma_l = m_l u / (1 - m_l u)$ with $u = 2^{-24}$. Leaves of one place have
        $\Lambda = 1$, others `STRETCH`. If all others keep their rows it is $R$, the
        root of the sum, over both kinds, of the squares of
        $\Lambda \sqrt K \max_l \gamma_l \sqrt{k_l}$ with $K = \max_l k_l$; where a
        record joins them, $2 R + \sqrt d \, 2^{-24}$ with $d$ numbers in these leaves;
        else $2 n (\sum \Lambda^2 \max_l \gamma_l^2)^{1/2} + \sqrt{\sum_l g_l^2 d_l}
        2^{-23}$ with $g_l$ groups in all. The derivation is in docs/mathematics.md.
        """
        if not self.rows_fixed:
            return self._margin(self._group_places)
        parts, size = [], 0
        for stretch, leaves in self._kinds:
            size += sum(math.prod(v.shape) for v in leaves)
            pairs = [(self.group_size(v), v) for v in leaves]
            roots = [factored.relative_error(k, v) * math.sqrt(k) for k, v in pairs]
            largest = max((k for k, _ in pairs), default=0)
            parts.append(stretch * math.sqrt(largest) * max(roots, default=0.0))
        replaced = math.hypot(*parts)
        joined = 2 * replaced + math.sqrt(size) * 2.0 ** -(_BITS + 1)
        return joined if self.joins else replaced

    def group_size(self, value: Factored) -> int:
        """Return the number of records whose products are added before rounding."""
        if self.rows_fixed:
            return min(factored.largest_group(value), self.rows)
        return min(max(1, self._group_places // value.places), self.rows)

    @property
    def _group_places(self) -> int:
        """Largest number of places of a group that keeps `_margin` small."""
        most = (GROUP >> k for k in range(4))
        return next((k for k in most if self._margin(k) <= MOST_ROUNDING), GROUP)

    def _margin(self, places: int) -> float:
        """Return a bound on the rounding of groups of places, in clip norms."""
        parts, steps = [], 0
        for stretch, leaves in self._kinds:
            pairs = [(min(max(1, places // v.places), self.rows), v) for v in leaves]
            errors = [factored.relative_error(k, v) for k, v in pairs]
            parts.append(stretch * max(errors, default=0.0))
            steps += sum(self.groups(k) ** 2 * math.prod(v.shape) for k, v in pairs)
        return 2 * self.n * math.hypot(*parts) + math.sqrt(steps) * 2.0**-_BITS

    def groups(self, size: int) -> int:
        """Return how many groups of `size` rows, in all shards, may hold a record."""
        if math.gcd(self.part, self.rows) % size == 0:  # groups follow each other
            return math.ceil(self.n / size)
        whole = math.ceil(self.rows / size)
        if self.part % self.rows:  # the last chunk of a part reaches back
            chunks = math.ceil(self.part / self.rows)
            return math.ceil(self.n / self.part) * chunks * whole
        chunks, rest = divmod(self.n, self.rows)
        return chunks * whole + math.ceil(rest / size)

    @property
    @abc.abstractmethod
    def clip_fraction(self) -> float:
        """Largest norm of a value before it is added, in units of the clip norm."""

    @abc.abstractmethod
    def empty(self) -> PyTree:
        """Return the running sums before any row is added: zeros."""

    @abc.abstractmethod
    def add(self, sums: PyTree, weights: Float[Array, " n"], values: PyTree) -> PyTree:
        """Return the sums plus the rows of `values`, each times its weight."""

    @abc.abstractmethod
    def joined(self, sums: PyTree, axes: Axes) -> PyTree:
        """Return the sum over all shards, along axes of a mesh or of a `jax.vmap`."""

    @abc.abstractmethod
    def mean(self, sums: PyTree) -> PyTree:
        """Return the mean: the sums times the clip norm, over the denominator."""

    @property
    def contribution(self) -> Float[Array, ""]:
        """Clip norm over denominator, a record's largest effect; 0 if out of range."""
        double = any(v.dtype == jnp.float64 for v in self.leaves)
        wide = jnp.dtype("float64" if double else "float32")
        clip_norm, denominator = (
            jax.lax.stop_gradient(v).astype(wide)
            for v in (self.clip_norm, self.denominator)
        )
        contribution = clip_norm / denominator
        in_range = contribution >= _LEAST_CONTRIBUTION[wide]
        in_range &= contribution <= jnp.finfo(wide).max
        return jnp.where(in_range, contribution, 0)


class GridSum(AbstractSum):
    r"""A rule for exact sums of integers, whatever the order of the records.

    The step is the power of two $2^e \in (2^{-24}, 2^{-23}] \, C / m$; every record's
    scaled value is rounded to whole steps. The clip norm is tightened by the largest
    rounding, $\sqrt d / 2$ steps, so that the rounded value keeps within $C / m$; the
    entries of a row times a number are rounded to 4 steps, which counts four times.
    Products of factors are added in floating point first, in groups of few records,
    and every group's sum is rounded; the clip norm is tightened by what one record may
    move it by, where the other records keep their places.
    """

    @property
    @override
    def clip_fraction(self) -> float:
        """Clip norm left after the worst-case rounding, in units of the clip norm."""
        # Both neighbours count: values of their records, or sums of their groups.
        size = 0
        for v in self.leaves:
            rows = v.rows if isinstance(v, SparseRows) else v
            narrow = isinstance(v, Factored) and v.narrow  # in multiples of some steps
            size += math.prod(rows.shape) * (COARSE if narrow else 1) ** 2
        rounded = math.sqrt(size) * 2.0 ** -(_BITS + 1)
        return 1 - rounded - self.rounding - 2.0**-20

    @override
    def empty(self) -> PyTree:
        return jax.tree.map(
            lambda v: int61.zeros(v.shape), self.value, is_leaf=is_structured
        )

    def add(self, sums: PyTree, weights: Float[Array, " n"], values: PyTree) -> PyTree:
        """Return the sums plus the weighted rows, each rounded to whole steps."""
        # C / m in steps, between 2**23 and 2**24; the step itself may underflow.
        contribution = self.contribution
        scale = power_of_two(-floor_log2(contribution), contribution.dtype)
        steps = contribution * scale * 2.0**_BITS
        # No entry of a clipped value has more steps, whatever arithmetic made it.
        largest = jnp.floor(steps).astype(jnp.int32)
        weights = weights * steps.astype(weights.dtype)

        def rounded(v):
            counts = jnp.round(jax.lax.stop_gradient(v)).astype(jnp.int32)
            return jnp.clip(counts, -largest, largest)

        def add(v, total):
            if is_grouped(v):
                size = self.group_size(v)
                sums_of = factored.products(weights, v, size)
                # A sum of k such rows is at most k times as long.
                sums_of = jnp.clip(sums_of, -size * steps, size * steps)
                counts = int61.sum_floats(sums_of)
                return total.plus(jax.tree.map(v.turned().folded, counts))
            if isinstance(v, Factored):
                counts = int61.sum_rows(factored.multiples(weights, v, largest))
                return total.plus(jax.tree.map(v.folded, counts))
            rows = v.rows if isinstance(v, SparseRows) else v
            weight = jnp.expand_dims(weights.astype(rows.dtype), range(1, rows.ndim))
            # A compiler that takes NaN for impossible may leave anything in other rows.
            counts = jnp.where(weight > 0, rounded(rows * weight), 0)
            if isinstance(v, SparseRows):
                return total.plus(int61.sum_at(total.shape, v.indices, counts))
            groups = split(counts, GROUP)
            return total.plus(int61.sum_rows(jnp.sum(groups, axis=1, dtype=jnp.int32)))

        return jax.tree.map(add, values, sums, is_leaf=is_structured)

    @override
    def joined(self, sums: PyTree, axes: Axes) -> PyTree:
        return jax.tree.map(
            lambda v: int61.sum_over(v, axes), sums, is_leaf=int61.is_limbs
        )

    @override
    def mean(self, sums: PyTree) -> Grid:
        dtypes = tuple(v.dtype for v in self.leaves)
        exponent = floor_log2(self.contribution) - _BITS
        return Grid(sums, exponent, self.contribution, dtypes)


class FloatSum(AbstractSum):
    """A rule for compensated sums in floating point.

    Plain sums of groups of rows are added to one running sum each, and what an
    addition rounds away is kept. Without that correction one record could decide how
    many later additions round away, and move the sum by many times its clipped norm.
    Values that are not formed are summed as in a `GridSum`.
    """

    @property
    @override
    def clip_fraction(self) -> float:
        counted = self._counted
        return counted.clip_fraction if counted.leaves else 1.0

    @property
    def contribution(self) -> Float[Array, ""]:
        """Clip norm over denominator; 0 if such a mean is out of some leaf's range.

        Coordinates down to $2^{-30} C / m$ must be normal numbers, and $4 n C / m$
        finite.
        """
        contribution = super().contribution
        infos = [jnp.finfo(v.dtype) for v in self.leaves]
        least = max((float(info.tiny) for info in infos), default=0.0) * 2.0**_ROOM
        most = min((float(info.max) for info in infos), default=math.inf)
        most /= 4 * max(self.n, 1)
        in_range = (contribution >= least) & (contribution <= most)
        return jnp.where(in_range, contribution, 0)

    @property
    def _counted(self) -> GridSum:
        """`GridSum` of the leaves that are `Factored` or `SparseRows`."""
        _, counted = _split(self.value)
        return dataclasses.replace(GridSum(**vars(self)), value=counted)

    @override
    def empty(self) -> PyTree:
        groups = -(-self.rows // GROUP)
        arrays, _ = _split(self.value)
        zeros = jax.tree.map(lambda v: jnp.zeros((groups, *v.shape), v.dtype), arrays)
        # The totals, their rounding errors, and the integer counts.
        return zeros, zeros, self._counted.empty()

    def add(self, sums: PyTree, weights: Float[Array, " n"], values: PyTree) -> PyTree:
        """Return the sums plus the weighted rows: totals, rounding errors, counts."""
        arrays, counted = _split(values)
        totals, corrections, counts = sums
        added = jax.tree.map(lambda v: _group_sums(weights, v), arrays)
        counts = self._counted.add(counts, weights, counted)
        return *two_sum((totals, corrections), added), counts

    @override
    def joined(self, sums: PyTree, axes: Axes) -> PyTree:
        totals, corrections, counts = sums
        one = jax.tree.map(lambda v: v[None], folded(totals, corrections))
        every = jax.lax.all_gather(one, axes, tiled=True)
        return *every, self._counted.joined(counts, axes)

    @override
    def mean(self, sums: PyTree) -> PyTree:
        totals, corrections, counts = sums
        total = folded(totals, corrections)
        means = jax.tree.map(
            lambda a, b: (a + b) * self.contribution.astype(a.dtype), *total
        )
        counted = self._counted.mean(counts).values()
        in_range = self.contribution > 0
        counted = jax.tree.map(lambda v: jnp.where(in_range, v, 0), counted)
        return eqx.combine(means, counted)


def is_grouped(value: Any) -> bool:
    """Return whether values of several records are added before they are rounded."""
    return isinstance(value, Factored) and not value.narrow


def _split(values: PyTree) -> tuple[PyTree, PyTree]:
    """Return two pytrees: a value's arrays, and its factored or sparse leaves."""
    return eqx.partition(values, lambda v: not is_structured(v), is_leaf=is_structured)


def _group_sums(weights: Float[Array, " n"], values: Array) -> Array:
    weights = weights.astype(values.dtype)
    used = jnp.expand_dims(weights > 0, range(1, values.ndim))
    # Products run in reduced precision on accelerators by default.
    groups = (split(v, GROUP) for v in (weights, jnp.where(used, values, 0)))
    return jnp.einsum("gr,gr...->g...", *groups, precision=factored.HIGHEST)
