"""The door to the records: clipped means, sealed with their sensitivity."""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from .. import _checks
from .budget import Neighbours
from .factored import Factored, is_factored
from .floats import floor_log2, is_below, is_finite, power_of_two
from .grid import Grid
from .sampling import Batch
from .summation import GROUP, AbstractSum, FloatSum, GridSum

# What one micro-batch of per-record values may occupy. On a CPU it should stay in
# the caches of its cores, an accelerator wants it large; see benchmarks/clipping.py.
_MICROBATCH_BYTES = {"cpu": 16 * 2**20}
_MICROBATCH_BYTES_ACCELERATOR = 256 * 2**20
# What an entry counts for at most, in clip norms: norms of finite values are below the
# 1.5th power, that of a value with an entry of the largest number is not.
_LONGEST = 2.0**40
Precision = Literal["float", "grid"]
SUMS: dict[str, type[AbstractSum]] = {"float": FloatSum, "grid": GridSum}


class Basis(enum.Enum):
    """What a sensitivity rests on."""

    CLIPPED = "clipped"  # enforced record by record, whatever the functions are
    CONSTANTS = "constants"  # declared Lipschitz and convexity constants
    UNPROVED = "unproved"  # that a sampler cut short is near its target

    def worse(self, other: "Basis") -> "Basis":
        """The weaker of two: what both together rest on."""
        order = list(Basis)
        return max(self, other, key=order.index)


class Bounded(eqx.Module):
    r"""A value computed from records, sealed with the bound on one record's share.

    Only a mechanism may open it; everywhere else it can only be added to another.

    Attributes:
        raw: The value: floating-point leaves, or a `Grid`. NON-PRIVATE: reading it
            outside a mechanism breaks the guarantee.
        contribution: $c$, the largest $\ell_2$ norm by which the presence of one
            record moves the value.
        basis: What $c$ rests on.
        public_denominator: Whether the mean was divided by a given public number
            rather than by the number of its own rows.
    """

    raw: PyTree
    contribution: Float[Array, ""] | float
    basis: Basis = eqx.field(static=True, default=Basis.CLIPPED)
    public_denominator: bool = eqx.field(static=True, default=True)

    @property
    def precision(self) -> Precision:
        """Whether the value is a float or lies on a grid."""
        return "grid" if isinstance(self.raw, Grid) else "float"

    @property
    def _values(self) -> PyTree:
        return self.raw.counts if isinstance(self.raw, Grid) else self.raw

    def sensitivity(
        self, neighbours: Neighbours = Neighbours.REPLACE_ONE
    ) -> Float[Array, ""] | float:
        r"""The $\ell_2$ sensitivity: $2c$ under replace-one, $c$ under add-or-remove.

        Args:
            neighbours: Which datasets count as neighbours.

        Raises:
            ValueError: Under add-or-remove-one, where the number of records is private,
                the value was divided by that number.
        """
        if neighbours is Neighbours.ADD_OR_REMOVE_ONE and not self.public_denominator:
            raise ValueError(
                "Bounded: under add-or-remove-one the number of records is private, "
                "but this mean was divided by it; give clipped_mean a public "
                "denominator=."
            )
        return neighbours.contributions * _checks.at_least_single(self.contribution)

    def __add__(self, other: "Bounded") -> "Bounded":
        """The sum; one person may stand behind a record of either, so shares add.

        Raises:
            ValueError: The values differ in structure, shape or precision.
        """
        if self.precision != other.precision:
            raise ValueError(
                f"Bounded: cannot add a value of precision {self.precision!r} and one "
                f"of {other.precision!r}."
            )
        shapes = [jax.tree.map(jnp.shape, v._values) for v in (self, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"Bounded: cannot add values of shapes {shapes[0]} and {shapes[1]}."
            )
        add = Grid.__add__ if self.precision == "grid" else optax.tree.add
        return Bounded(
            add(self.raw, other.raw),
            self.contribution + other.contribution,
            self.basis.worse(other.basis),
            self.public_denominator and other.public_denominator,
        )


def unsealed(bounded: Bounded) -> PyTree:
    """The value in floating point, without its seal. NON-PRIVATE.

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
    precision: Precision = "float",
) -> Bounded:
    r"""The clipped mean of a per-record function, sealed with its sensitivity.

    $$
    \frac{1}{m} \sum_{i=1}^{n} \mathrm{mask}_i \,
    v_i \min\Bigl(1, \frac{C}{\|v_i\|_2}\Bigr), \qquad v_i = \mathrm{fun}(z_i),
    $$

    where $\|v_i\|_2$ runs over the whole returned pytree. A record whose $v_i$ is not
    finite contributes zero; so does every record where $C$ is outside (1e-25, 1e30) or
    $m$ below 1e-25. Entries beyond $\pm 2^{40} C$ count as that, so that no norm
    overflows. Norm and sum are taken in float32 at least. Memory does not grow with
    $n$: a `lax.scan` walks over micro-batches.

    Args:
        fun: Maps one record to a pytree of floating-point arrays. It must not see
            other records: no closure over private data.
        records: A pytree whose leaves share the leading axis of length $n \ge 0$, or a
            `Batch` as a sampling scheme draws it, whose mask and denominator are used.
        clip_norm: $C > 0$.
        mask: Which rows are records; `False` rows contribute zero. All when omitted.
        denominator: $m > 0$, fixed and public. Defaults to $n$, the length of the
            leading axis, never to the number of unmasked rows; that is public under
            replace-one only.
        microbatch: The most records of a micro-batch, or `"auto"`: chosen from the size
            of one record's value and the backend. Rounded down to a power of two, so
            that a record's rounding does not depend on its place among the others.
        precision: `"float"` sums in floating point; `"grid"` rounds every record's
            scaled value to a public grid and sums integers, exactly.

    Returns:
        A `Bounded` with the shape of `fun`'s value.

    Raises:
        ValueError: `clip_norm`, `denominator` or `microbatch` out of range, leading
            axes that differ, a mask or denominator besides that of a `Batch`, or fast
            floating-point math in `XLA_FLAGS`.
        TypeError: `fun` returns values that are not floating point.

    Privacy:
        One query of $\ell_2$ sensitivity $2C/m$ under replace-one and $C/m$ under
        add-or-remove-one, enforced by clipping for every `fun`, NaN and infinity
        included. The clipped norm stays below $C$ after rounding: the norm is taken
        with a margin of its worst-case rounding error, and values that are not finite
        are recognized by their bits: on the grid, options of the compiler that take
        NaN for impossible let no record count for more.

        On the grid the sum of rounded values is exact, whatever their order. What one
        record contributes is computed by a program that depends on the number of rows;
        it does not depend on the values of other rows, nor, in micro-batches of a power
        of two, on its place (tested on CPU and GPU, but a property of the compiler).
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
    if isinstance(records, Batch):
        if mask is not None or denominator is not None:
            raise ValueError(
                "clipped_mean: a Batch brings its own mask and denominator; leave "
                "mask= and denominator= out."
            )
        records, mask, denominator = records.records, records.mask, records.denominator
    n = _checks.leading_axis("records", records)
    records = _checks.on_device(records)
    public = denominator is not None
    denominator = max(n, 1) if denominator is None else denominator
    _checks.positive("clipped_mean", denominator=denominator)
    clip_norm, denominator = map(_checks.at_least_single, (clip_norm, denominator))
    if mask is not None and (mask.shape != (n,) or mask.dtype != bool):
        raise ValueError(
            f"clipped_mean: mask must be of booleans and have shape ({n},) like the "
            f"records, got {mask.dtype} of shape {mask.shape}."
        )
    value = _value_of(fun, records)
    rows = _rows(microbatch, value, records)
    wide = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, _wide(v.dtype)), value)
    rule = SUMS[precision](wide, jnp.asarray(clip_norm), jnp.asarray(denominator), n)
    mean = _clipped_mean(fun, records, mask, rows, rule)
    return Bounded(mean, clip_norm / denominator, public_denominator=public)


def microbatch_rows(value: PyTree, record: PyTree, backend: str) -> int:
    """How many records like this one, with such values, one micro-batch holds.

    A power of two of at least 1, so that both fit the budget of the backend.
    """
    budget = _MICROBATCH_BYTES.get(backend, _MICROBATCH_BYTES_ACCELERATOR)
    size = sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves((value, record))
    )
    return 2 ** max(0, int(math.log2(budget / max(size, 1))))


def _clipped_mean(fun, records, mask, rows: int, rule: AbstractSum) -> PyTree:
    """Adds clipped values chunk by chunk."""
    if rule.n == 0:
        return rule.mean(rule.empty(1))
    chunks, rows = _chunks(rule.n, rows)
    # Nothing passes a clip norm so large that sums overflow, or so small that the noise
    # made for it underflows; nor a denominator that may count as zero.
    valid = (rule.clip_norm > 1e-25) & (rule.clip_norm < 1e30)
    valid &= rule.denominator > 1e-25
    clip_norm = jnp.where(valid, rule.clip_norm, 1)

    def add(sums, index):
        start = jnp.minimum(index * rows, rule.n - rows)
        # Slicing inside the loop reads the records in place; reshaping copies them.
        chunk, keep = jax.tree.map(
            lambda v: jax.lax.dynamic_slice_in_dim(v, start, rows), (records, mask)
        )
        # The last chunk reaches back to rows that were added already.
        fresh = start + jnp.arange(rows, dtype=index.dtype) >= index * rows
        keep = fresh & valid if keep is None else fresh & valid & keep
        values = jax.vmap(fun)(chunk)
        values = jax.tree.map(
            lambda v: _scaled(v, clip_norm), values, is_leaf=is_factored
        )
        norms, lengths = jax.vmap(_norms)(values)
        # Read from the bits, so that no option of the compiler skips it.
        keep &= is_below(norms, _LONGEST**1.5)
        # The places of a record that cancel count for rounding, not for its norm.
        norms = jnp.maximum(norms, lengths / rule.stretch)
        weights = jnp.where(keep, rule.share / jnp.maximum(norms, rule.share), 0)
        return rule.add(sums, weights, values), None

    indices = jnp.arange(chunks, dtype=jnp.int32)
    sums, _ = jax.lax.scan(add, rule.empty(rows), indices)
    return rule.mean(sums)


def _chunks(n: int, rows: int) -> tuple[int, int]:
    """How many chunks of how many rows, at most `rows`: equal ones of whole groups."""
    chunks = -(-n // rows)
    if rows < GROUP:
        return chunks, min(n, rows)
    even = -(-n // chunks)
    return chunks, min(n, even + -even % GROUP)


def _scaled(value: Array | Factored, clip_norm: Float[Array, ""]) -> Array | Factored:
    """The value in units of the clip norm, or a huge number where it is not finite.

    Its norm is then too long, and its weight of zero makes zero of all of it, which it
    would not of NaN. Cutting long entries and then the norm is nonexpansive, as is
    cutting the norm alone.
    """
    if is_factored(value):
        return _scaled_factors(value, clip_norm)
    dtype = _wide(value.dtype)
    # What is tested and what is counted are read from one place: a compiler that takes
    # NaN for impossible may compute such a value differently for either.
    value = jax.lax.optimization_barrier(value.astype(dtype))
    units = jnp.clip(value * (1 / clip_norm).astype(dtype), -_LONGEST, _LONGEST)
    return jnp.where(is_finite(value), units, jnp.finfo(dtype).max)


def _scaled_factors(value: Factored, clip_norm: Float[Array, ""]) -> Factored:
    """The same by factors, the left ones with entries of at most 2.

    A power of two goes from the left factors of a record to its right ones, so that no
    product of theirs overflows.
    """
    dtype = _wide(value.dtype)
    left, right = jax.lax.optimization_barrier(
        (value.left.astype(dtype), value.right.astype(dtype))
    )
    finite = is_finite(left).all((1, 2)) & is_finite(right).all((1, 2))
    finite = finite[:, None, None]
    left = jnp.where(finite, left, 0)
    largest = jnp.max(jnp.abs(left), axis=(1, 2), keepdims=True)
    normal = largest >= jnp.finfo(dtype).tiny
    scale = jnp.where(normal, power_of_two(floor_log2(largest), dtype), 1)
    units = right * (1 / clip_norm).astype(dtype) * scale
    units = jnp.clip(units, -_LONGEST, _LONGEST)
    right = jnp.where(finite, units, jnp.finfo(dtype).max)
    return dataclasses.replace(value, left=left / scale, right=right)


def _norms(value: PyTree) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Bounds on the norm of one record's value, above all rounding.

    The second one is of the factored leaves, without what their places cancel.
    """
    leaves = jax.tree.leaves(value, is_leaf=is_factored)
    dtype = max((v.dtype for v in leaves), key=lambda kind: jnp.finfo(kind).bits)
    epsilon = max(float(jnp.finfo(v.dtype).eps) for v in leaves)
    parts = [
        _squares(v) if is_factored(v) else (jnp.sum(v * v), jnp.zeros((), v.dtype))
        for v in leaves
    ]
    squares, lengths = (
        jnp.sqrt(jnp.sum(jnp.stack([v.astype(dtype) for v in column])))
        for column in zip(*parts, strict=True)
    )
    size = sum(v.left.size + v.right.size if is_factored(v) else v.size for v in leaves)
    # Worst-case relative rounding of a sum of `size` squares, halved by the root.
    margin = 1 + (size + 32) * epsilon / 4
    return squares * margin, lengths * margin


def _squares(value: Factored) -> tuple[Float[Array, ""], Float[Array, ""]]:
    r"""$\|\sum_t l_t r_t^\top\|^2$, at least, and $(\sum_t |l_t| |r_t|)^2$."""
    left, right = value.left, value.right
    lefts, rights = (jnp.sum(v * v, axis=1) for v in (left, right))
    if len(left) == 1:
        square = (lefts * rights)[0]
        return square, square
    products = (jnp.matmul(v, v.T, precision="highest") for v in (left, right))
    square = jnp.sum(jnp.multiply(*products))
    length = jnp.sum(jnp.sqrt(lefts) * jnp.sqrt(rights)) ** 2
    # Each of the products is off by at most its number of terms.
    terms = left.shape[1] + right.shape[1] + len(left) ** 2 + 32
    error = terms * float(jnp.finfo(left.dtype).eps)
    return jnp.maximum(square, 0) + error * length, length


def _value_of(fun, records) -> PyTree:
    record = one_record(records)
    value = jax.eval_shape(fun, record)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(value)]
    others = [kind for kind in kinds if not jnp.issubdtype(kind, jnp.floating)]
    if others or not kinds:
        raise TypeError(
            "clipped_mean: fun must return floating-point arrays, got "
            f"{others[0] if others else 'none'}."
        )
    return value


def one_record(records: PyTree) -> PyTree:
    """The shapes and dtypes of one record of `records`."""
    return jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(jnp.shape(v)[1:], jnp.result_type(v)), records
    )


def _rows(microbatch, value, records) -> int:
    if microbatch == "auto":
        record = one_record(records)
        return microbatch_rows(value, record, jax.default_backend())
    _checks.count("clipped_mean", microbatch=microbatch)
    return 2 ** (int(microbatch).bit_length() - 1)


def _wide(dtype) -> jnp.dtype:
    """The dtype for norms and sums: never half precision."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)
