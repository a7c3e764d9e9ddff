"""Clipped means of records, sealed with their sensitivity."""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from ... import _checks
from ..budget import Neighbours
from ..exact.floats import accumulation_dtype, is_below
from ..exact.grid import Grid
from ..exact.matmul_check import check_products
from ..keys import PRNGKey, check_key
from ..records.disk import OnDisk
from ..records.rows import BLOCK, Shards, reader, shapes_of, shards_of, taken
from ..sampling.base import Batch
from .factored import is_structured
from .microbatches import pass_rows, whole_blocks
from .norms import TOO_LONG, scale_and_norm
from .structure import opened
from .summation import (
    MOST_ROUNDING,
    STRETCH,
    AbstractSum,
    FloatSum,
    GridSum,
    is_grouped,
)

Precision = Literal["float", "grid"]
_WORDS = 4  # 32 random bits each; two of n rows have the same with n^2 2^-129
SUMS: dict[str, type[AbstractSum]] = {"float": FloatSum, "grid": GridSum}


class Basis(enum.Enum):
    """Grounds of a sensitivity: clipping, declared constants, or no proof."""

    CLIPPED = "clipped"  # enforced record by record, whatever the functions are
    CONSTANTS = "constants"  # declared Lipschitz and convexity constants
    UNPROVED = "unproved"  # that a sampler cut short is near its target

    def worse(self, other: "Basis") -> "Basis":
        """Return the weaker of two `Basis` values, which holds for both together."""
        order = list(Basis)
        return max(self, other, key=order.index)


class Bounded(eqx.Module):
    r"""A value computed from records, sealed with a bound on one record's effect.

    Only a mechanism may open it; everywhere else it can only be added to another.

    Attributes:
        raw: The value: floating-point leaves, or a `Grid`. NON-PRIVATE: reading it
            outside a mechanism breaks the guarantee.
        contribution: $c$, the largest $\ell_2$ norm by which the presence of one
            record moves the value.
        basis: What $c$ rests on.
        public_denominator: Whether the mean was divided by a given public number
            rather than by the number of its own rows.
        neighbours: Under which relation it may be released: `REPLACE_ONE` where the
            bound rests on every other record keeping its place, else `None`: any.
    """

    raw: PyTree
    contribution: Float[Array, ""] | float
    basis: Basis = eqx.field(static=True, default=Basis.CLIPPED)
    public_denominator: bool = eqx.field(static=True, default=True)
    neighbours: Neighbours | None = eqx.field(static=True, default=None)

    @property
    def precision(self) -> Precision:
        """Name of the arithmetic of the value: `"float"` or `"grid"`."""
        return "grid" if isinstance(self.raw, Grid) else "float"

    def sensitivity(
        self, neighbours: Neighbours = Neighbours.REPLACE_ONE
    ) -> Float[Array, ""] | float:
        r"""Return the $\ell_2$ sensitivity: `contribution`, doubled under replace-one.

        Args:
            neighbours: Which datasets count as neighbours.

        Raises:
            ValueError: Under add-or-remove-one, where the number of records is private,
                the value was divided by that number, or was summed for replace-one.
        """
        if self.neighbours not in (None, neighbours):
            raise ValueError(f"Bounded: give clipped_mean neighbours={neighbours}.")
        if neighbours is Neighbours.ADD_OR_REMOVE_ONE and not self.public_denominator:
            raise ValueError(
                "Bounded: divided by a private number; give clipped_mean denominator=."
            )
        return neighbours.contributions * _checks.at_least_single(self.contribution)

    def __add__(self, other: "Bounded") -> "Bounded":
        """Return the sum of two sealed values, sealed with the sum of their bounds.

        Raises:
            ValueError: The values differ in structure, shape or precision.
        """
        if self.precision != other.precision:
            raise ValueError("Bounded: cannot add values of different precision.")
        values = [v.counts if isinstance(v, Grid) else v for v in (self.raw, other.raw)]
        shapes = [jax.tree.map(jnp.shape, v) for v in values]
        if shapes[0] != shapes[1]:
            raise ValueError(f"Bounded: cannot add shapes {shapes[0]} and {shapes[1]}.")
        add = Grid.__add__ if self.precision == "grid" else optax.tree.add
        return Bounded(
            add(self.raw, other.raw),
            self.contribution + other.contribution,
            self.basis.worse(other.basis),
            self.public_denominator and other.public_denominator,
            self.neighbours or other.neighbours,
        )


def unsealed(bounded: Bounded) -> PyTree:
    """Return the floating-point value of a `Bounded`, without its seal. NON-PRIVATE.

    For a value that is computed from it and sealed with a bound of its own; the places
    that do so are listed in docs/architecture.md.
    """
    raw = bounded.raw
    return raw.values() if isinstance(raw, Grid) else raw


def clipped_mean(
    fun: Callable[[PyTree], PyTree],
    records: PyTree | Batch,
    *,
    clip_norm: float | Float[Array, ""],
    mask: Bool[Array, " n"] | None = None,
    denominator: float | Float[Array, ""] | None = None,
    microbatch: int | Literal["auto"] = "auto",
    precision: Precision = "grid",
    neighbours: Neighbours = Neighbours.REPLACE_ONE,
    key: PRNGKey | None = None,
) -> Bounded:
    r"""Return the clipped mean of a per-record function, sealed in a `Bounded`.

    $$
    \frac{1}{m} \sum_{i=1}^{n} \mathrm{mask}_i \,
    v_i \min\Bigl(1, \frac{C}{\|v_i\|_2}\Bigr), \qquad v_i = \mathrm{fun}(z_i),
    $$

    where $\|v_i\|_2$ runs over the whole returned pytree. A record whose $v_i$ is not
    finite contributes zero; so does every record where $C$ is outside (1e-25, 1e30) or
    $m$ below 1e-25. Entries beyond $\pm 2^{40} C$ are cut to that, so that no norm
    overflows; a factor of a product longer than 1.8e19 in float32, whose square
    overflows, makes its record contribute zero. Norm and sum are taken in float32 at
    least. Memory does not grow with $n$: a `lax.scan` walks over micro-batches. Where
    values take less than half of the memory of the records, an accelerator takes all
    records at once, and a CPU those that its caches hold.

    Gradients of layers and of tables are not formed for every record: they are found as
    products of factors and as sparse rows in the jaxpr of `fun`; see
    docs/precision.md#values-that-are-not-formed.

    Args:
        fun: Maps one record to a pytree of floating-point arrays. It must not see
            other records: no closure over private data.
        records: A pytree whose leaves share the leading axis of length $n \ge 0$, or a
            `Batch` as a sampling scheme draws it, whose mask and denominator are used;
            or `OnDisk`. Rows may be spread over devices; see docs/devices.md.
        clip_norm: $C > 0$.
        mask: Which rows are records; `False` rows contribute zero. All when omitted.
        denominator: $m > 0$, fixed and public. Defaults to $n$, the length of the
            leading axis, never to the number of unmasked rows; that is public under
            replace-one only.
        microbatch: The most records of a micro-batch on a device, or `"auto"`: chosen
            from the size of one record's value and the backend. Rounded down to a power
            of two, so that a record's rounding does not depend on its place.
        precision: `"grid"` rounds every record's scaled value to a public grid and sums
            integers, exactly; `"float"` sums in floating point, for research.
        neighbours: The relation that the mean is released under. Under replace-one all
            other records keep their rows, which makes sums of products cheaper and
            their margin for rounding smaller.
        key: A typed key for this call alone, as secret as the noise's. Where a record
            that comes or goes moves others to other rows, records are then put in rows
            at random, which makes sums of products as cheap as under replace-one.

    Returns:
        A `Bounded` with the shape of `fun`'s value.

    Raises:
        ValueError: `clip_norm`, `denominator` or `microbatch` out of range, leading
            axes that differ, a mask or denominator besides that of a `Batch`, fast
            floating-point math in `XLA_FLAGS`, or sums of products on a device that
            computes them too coarsely.
        TypeError: `fun` returns values that are not floating point.

    Privacy:
        One query of $\ell_2$ sensitivity $2C/m$ under replace-one and $C/m$ under
        add-or-remove-one, enforced by clipping for every `fun`, NaN and infinity
        included. The clipped norm stays below $C$ after rounding: the norm is taken
        with a margin of its worst-case rounding error, and values that are not finite
        are recognized by their bits: on the grid, options of the compiler that assume
        that NaN does not occur give no record a larger contribution.

        On the grid the sum of rounded values is exact, whatever their order. Products
        of factors are added in groups and rounded group by group, with a margin for
        what one record moves: its group if the others keep their rows or rows are drawn
        by `key`, else all groups. What one record contributes is computed by a program
        that depends on the number of rows; it does not depend on the values of other
        rows, nor, in micro-batches of a power of two, on its place (tested on CPU and
        GPU, but a property of the compiler).
        Under add-or-remove-one the number of rows must therefore be public: pad the
        records and mask the padding, as `solve` does for a plan.

        In floating point the sum is compensated, so that its rounding stays within the
        margin that mechanisms add to their noise; not covered is rounding the mean
        itself to its dtype, at most $n 2^{-24}$ of the sensitivity in float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpbilevel.privacy import clipped_mean
        >>> ages = jnp.asarray([20.0, 30.0, 90.0, jnp.nan])
        >>> bounded = clipped_mean(lambda age: age, ages, clip_norm=50.0)
        >>> float(bounded.sensitivity())  # replacing one of four records
        25.0
    """
    _checks.strict_floats("clipped_mean")
    _checks.positive("clipped_mean", clip_norm=clip_norm)
    _checks.one_of("clipped_mean", "precision", precision, tuple(SUMS))
    rows_fixed = replaced = neighbours is Neighbours.REPLACE_ONE
    size = shards = None
    if isinstance(records, Batch):
        if mask is not None or denominator is not None:
            raise ValueError("clipped_mean: a Batch has its mask= and denominator=.")
        rows_fixed = replaced = records.rows_fixed and rows_fixed
        size, shards, key = records.size, records.shards, records.key
        records, mask, denominator = records.records, records.mask, records.denominator
    n = _checks.leading_axis("records", shapes_of(records))
    records = _checks.on_device(records)
    public = denominator is not None
    denominator = max(n, 1) if denominator is None else denominator
    _checks.positive("clipped_mean", denominator=denominator)
    clip_norm, denominator = map(_checks.at_least_single, (clip_norm, denominator))
    on_disk = isinstance(records, OnDisk)
    if mask is not None:
        _check_mask(mask, n, on_disk=on_disk)
    numbers = jnp.asarray(clip_norm), jnp.asarray(denominator)
    shards = Shards() if on_disk else shards or shards_of((records, mask))
    record = one_record(records)
    plain, constants = opened(fun, record, shards)
    size = n if size is None else size
    # Rows stay where they are if only the compiler knows on which devices that is.
    may_move = not (rows_fixed or on_disk) and shards.known == shards.count
    if key is not None and may_move:
        _, value = _cheapest(plain, constants, record, products=True)
        if any(map(is_grouped, jax.tree.leaves(value, is_leaf=is_structured))):
            records, mask, shards = _in_random_rows(records, mask, n, size, key=key)
            n, rows_fixed = len(mask), True
    part = n // shards.count
    for products in (True, False):
        cheap, value = _cheapest(plain, constants, record, products=products)
        per_shard, rows = pass_rows(part, microbatch, value, record, on_disk=on_disk)
        rows = rows if n % BLOCK else whole_blocks(per_shard, rows)
        given = _widened(value), *numbers, size, rows, rows_fixed, per_shard
        rule = SUMS[precision](*given, joins=not replaced)
        if rows_fixed or rule.rounding <= MOST_ROUNDING:
            break
    if rule.rounding:
        check_products("clipped_mean")

    def summed(given, masked, axes):
        """Return the sum over the rows of one part or, given `axes`, over all parts."""
        constants, clip_norm, denominator = given
        here = dataclasses.replace(rule, clip_norm=clip_norm, denominator=denominator)
        records, mask = masked
        sums = _clipped_sum(functools.partial(cheap, constants), records, mask, here)
        return sums if axes is None else here.joined(sums, axes)

    mean = rule.mean(shards.summed(summed, (constants, *numbers), (records, mask)))
    relation = Neighbours.REPLACE_ONE if rule.rounding and replaced else None
    return Bounded(mean, clip_norm / denominator, Basis.CLIPPED, public, relation)


def _check_mask(mask: Any, n: int, *, on_disk: bool) -> None:
    if on_disk:
        raise ValueError("clipped_mean: OnDisk records take no mask=; write NaN.")
    if mask.shape != (n,) or mask.dtype != bool:
        raise ValueError(
            f"clipped_mean: mask must be ({n},) booleans, got {mask.dtype}{mask.shape}."
        )


def _in_random_rows(
    records: PyTree, mask, n: int, size: int, *, key: PRNGKey
) -> tuple[PyTree, Bool[Array, " rows"], Shards]:
    """Return n rows, the first `size` in secret random order; their mask; `Shards`.

    Whoever joins them takes a row of its own: the rows of all others have the same
    distribution with and without it.
    """
    words = jax.random.bits(check_key(key), (_WORDS, size), jnp.uint32)
    *_, order = jax.lax.sort((*words, jnp.arange(size)), num_keys=_WORDS)
    order = jnp.pad(order, (0, n - size), constant_values=n)
    records, order, shards = taken(records, order)
    mask = jnp.ones(n, bool) if mask is None else mask
    return records, mask.at[order].get(mode="fill", fill_value=False), shards


def _clipped_sum(fun, records: PyTree, mask, rule: AbstractSum) -> PyTree:
    """Return the running sums of all clipped values, read chunk by chunk."""
    if rule.part == 0:
        return rule.empty()
    # Nothing passes a clip norm so large that sums overflow, or so small that the noise
    # made for it underflows; nor a denominator that may count as zero.
    valid = (rule.clip_norm > 1e-25) & (rule.clip_norm < 1e30)
    valid &= rule.denominator > 1e-25
    clip_norm = jnp.where(valid, rule.clip_norm, 1)
    read = reader(records, mask, rule.part, rule.rows)

    def add(sums, index):
        chunk, keep = read(index)
        keep &= valid
        scaled = jax.vmap(lambda z: scale_and_norm(fun(z), clip_norm))
        values, norms, lengths = scaled(chunk)
        # Read from the bits, so that no option of the compiler skips it.
        keep &= is_below(norms, TOO_LONG)
        # Places that cancel count for the rounding of their sum, if not for its norm.
        norms = jnp.maximum(norms, lengths / STRETCH)
        fraction = rule.clip_fraction
        weights = jnp.where(keep, fraction / jnp.maximum(norms, fraction), 0)
        return rule.add(sums, weights, values), None

    chunks = -(-rule.part // rule.rows)  # the last one may add fewer rows
    if chunks == 1:  # convolutions take twice the time in a loop of one turn
        return add(rule.empty(), jnp.int32(0))[0]
    indices = jnp.arange(chunks, dtype=jnp.int32)
    return jax.lax.scan(add, rule.empty(), indices)[0]


def _cheapest(plain, constants, record: PyTree, *, products: bool) -> tuple[Any, Any]:
    """Return the function, its value factored if cheaper, and the value's shapes."""
    shapes = [jax.ShapeDtypeStruct(jnp.shape(v), jnp.result_type(v)) for v in constants]
    arguments = shapes, record
    cheap = functools.partial(plain, products=products)
    value = jax.eval_shape(cheap, *arguments)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(value, is_leaf=is_structured)]
    others = [kind for kind in kinds if not jnp.issubdtype(kind, jnp.floating)]
    if others or not kinds:
        got = others[0] if others else "none"
        raise TypeError(f"clipped_mean: fun must return float arrays, got {got}.")
    if all(jnp.finfo(kind).bits <= 32 for kind in kinds):
        return cheap, value
    # Counted sums would resolve less than the values.
    return plain, jax.eval_shape(plain, *arguments)


def one_record(records: PyTree) -> PyTree:
    """Return one record as `jax.ShapeDtypeStruct` leaves, without values."""
    return jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(jnp.shape(v)[1:], jnp.result_type(v)),
        shapes_of(records),
    )


def _widened(value: PyTree) -> PyTree:
    """Return the shapes with dtypes widened to those of norms and sums."""

    def widened(v):
        floating = jnp.issubdtype(v.dtype, jnp.floating)
        dtype = accumulation_dtype(v.dtype) if floating else v.dtype
        return jax.ShapeDtypeStruct(v.shape, dtype)

    return jax.tree.map(widened, value)
