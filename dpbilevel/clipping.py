"""The door to the records: clipped means, sealed with their sensitivity."""

import enum
import math
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from . import _checks
from .privacy.budget import Neighbours

# What one micro-batch of per-record values may occupy. On a CPU it should stay in
# the caches of its cores, an accelerator wants it large; see benchmarks/clipping.py.
_MICROBATCH_BYTES = {"cpu": 16 * 2**20}
_MICROBATCH_BYTES_ACCELERATOR = 256 * 2**20
# Rows that are summed plainly. One record changes the rounding of such a sum by at most
# _GROUP**2 * 2**-24 of the clip norm, which ROUNDING_MARGIN covers.
_GROUP = 64


class Basis(enum.Enum):
    """What a sensitivity rests on."""

    CLIPPED = "clipped"  # enforced record by record, whatever the functions are
    CONSTANTS = "constants"  # declared Lipschitz and convexity constants


class Bounded(eqx.Module):
    r"""A value computed from records, sealed with the bound on one record's share.

    Only a mechanism may open it; everywhere else it can only be added to another.

    Attributes:
        raw: The value. NON-PRIVATE: reading it outside a mechanism breaks the
            guarantee.
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
        return neighbours.contributions * self.contribution

    def __add__(self, other: "Bounded") -> "Bounded":
        """The sum; one person may stand behind a record of either, so shares add.

        Raises:
            ValueError: The values differ in structure or shape.
        """
        shapes = [jax.tree.map(jnp.shape, bounded.raw) for bounded in (self, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"Bounded: cannot add values of shapes {shapes[0]} and {shapes[1]}."
            )
        return Bounded(
            jax.tree.map(jnp.add, self.raw, other.raw),
            self.contribution + other.contribution,
            self.basis if self.basis is other.basis else Basis.CONSTANTS,
            self.public_denominator and other.public_denominator,
        )


def clipped_mean(
    fun: Callable[[PyTree], PyTree],
    records: PyTree,
    *,
    clip_norm: float | Float[Array, ""],
    mask: Bool[Array, " n"] | None = None,
    denominator: float | Float[Array, ""] | None = None,
    microbatch: int | Literal["auto"] = "auto",
) -> Bounded:
    r"""The clipped mean of a per-record function, sealed with its sensitivity.

    $$
    \frac{1}{m} \sum_{i=1}^{n} \mathrm{mask}_i \,
    v_i \min\Bigl(1, \frac{C}{\|v_i\|_2}\Bigr), \qquad v_i = \mathrm{fun}(z_i),
    $$

    where $\|v_i\|_2$ runs over the whole returned pytree. A record whose $v_i$ is not
    finite, or too long for its norm to be finite, contributes zero; so does every
    record where $C$ is outside (1e-25, 1e30). Norm and sum are taken in float32 at
    least. Memory does not grow with $n$: a `lax.scan` walks over micro-batches.

    Args:
        fun: Maps one record to a pytree of floating-point arrays. It must not see
            other records: no closure over private data.
        records: A pytree whose leaves share the leading axis of length $n \ge 0$.
        clip_norm: $C > 0$.
        mask: Which rows are records; `False` rows contribute zero. All when omitted.
        denominator: $m > 0$, fixed and public. Defaults to $n$, the length of the
            leading axis, never to the number of unmasked rows; that is public under
            replace-one only.
        microbatch: Records per micro-batch, or `"auto"`: chosen from the size of one
            record's value and the backend.

    Returns:
        A `Bounded` with the shape of `fun`'s value.

    Raises:
        ValueError: `clip_norm`, `denominator` or `microbatch` out of range, or leading
            axes that differ.
        TypeError: `fun` returns values that are not floating point.

    Privacy:
        One query of $\ell_2$ sensitivity $2C/m$ under replace-one and $C/m$ under
        add-or-remove-one, enforced by clipping for every `fun`, NaN and infinity
        included. The clipped norm stays below $C$ after rounding (the norm is taken
        with a margin of its worst-case rounding error) and the sum over records is
        compensated, so that its rounding stays within the margin that mechanisms add
        to their noise. Not covered: rounding the mean itself to its dtype, at most $n
        2^{-24}$ of the sensitivity in float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpbilevel import clipped_mean
        >>> ages = jnp.asarray([20.0, 30.0, 90.0, jnp.nan])
        >>> bounded = clipped_mean(lambda age: age, ages, clip_norm=50.0)
        >>> float(bounded.sensitivity())  # replacing one of four records
        25.0
    """
    _checks.positive("clipped_mean", clip_norm=clip_norm)
    n = _checks.leading_axis("records", records)
    records = _checks.on_device(records)
    public = denominator is not None
    denominator = max(n, 1) if denominator is None else denominator
    _checks.positive("clipped_mean", denominator=denominator)
    if mask is not None and mask.shape != (n,):
        raise ValueError(
            f"clipped_mean: mask must have shape ({n},) like the records, got "
            f"{mask.shape}."
        )
    value = _value_of(fun, records)
    total = _clipped_sum(
        fun, records, clip_norm, mask, value, _rows(microbatch, value, records, n)
    )
    mean = jax.tree.map(lambda v: v / denominator, total)
    return Bounded(mean, clip_norm / denominator, public_denominator=public)


def microbatch_rows(value: PyTree, record: PyTree, backend: str) -> int:
    """How many records one micro-batch holds.

    Args:
        value: One record's value, or its shapes.
        record: One record, or its shapes.
        backend: The name of the JAX backend, such as `"cpu"`.

    Returns:
        A power of two of at least 1, so that values and records fit the budget.
    """
    budget = _MICROBATCH_BYTES.get(backend, _MICROBATCH_BYTES_ACCELERATOR)
    size = sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves((value, record))
    )
    return 2 ** max(0, int(math.log2(budget / max(size, 1))))


def _clipped_sum(fun, records, clip_norm, mask, value, rows: int) -> PyTree:
    """Sums clipped values chunk by chunk; the last chunk reaches back and masks."""
    n = _checks.leading_axis("records", records)
    zero = jax.tree.map(lambda v: jnp.zeros(v.shape, _wide(v.dtype)), value)
    if n == 0:
        return zero
    chunks, rows = _chunks(n, rows)

    def step(sums, index):
        start = jnp.minimum(index * rows, n - rows)
        # Slicing inside the loop reads the records in place; reshaping copies them.
        chunk, keep = jax.tree.map(
            lambda v: jax.lax.dynamic_slice_in_dim(v, start, rows), (records, mask)
        )
        fresh = start + jnp.arange(rows, dtype=index.dtype) >= index * rows
        keep = fresh if keep is None else keep & fresh
        values = jax.tree.map(_finite, jax.vmap(fun)(chunk))
        weights = jax.vmap(_weight, in_axes=(0, 0, None))(values, keep, clip_norm)
        return _two_sum(sums, jax.tree.map(lambda v: _group_sums(weights, v), values))

    # A running sum for each group of rows of a chunk, added up at the end.
    groups = -(-rows // _GROUP)
    zeros = jax.tree.map(lambda v: jnp.zeros((groups, *v.shape), v.dtype), zero)
    (totals, corrections), _ = jax.lax.scan(
        lambda sums, index: (step(sums, index), None),
        (zeros, zeros),
        jnp.arange(chunks, dtype=jnp.int32),
    )
    correction = jax.tree.map(lambda v: jnp.sum(v, axis=0), corrections)
    (total, correction), _ = jax.lax.scan(
        lambda sums, value: (_two_sum(sums, value), None), (zero, correction), totals
    )
    return jax.tree.map(jnp.add, total, correction)


def _chunks(n: int, rows: int) -> tuple[int, int]:
    """How many chunks of how many rows, at most `rows`: equal ones of whole groups."""
    unit = _GROUP if rows >= _GROUP else 1
    chunks = -(-n // (rows - rows % unit))
    even = -(-n // chunks)
    return chunks, min(n, even + -even % unit)


def _finite(value: Array) -> Array:
    """The value, with a number whose square is infinite where it is not finite.

    Its norm then is not finite, and its weight of zero makes zero of all of it, which
    it would not of NaN.
    """
    value = value.astype(_wide(value.dtype))
    return jnp.where(jnp.isfinite(value), value, jnp.finfo(value.dtype).max)


def _group_sums(weights: Float[Array, " n"], values: Array) -> Array:
    """Plain weighted sums of at most `_GROUP` rows each: short ones round little."""
    group = min(_GROUP, len(weights))
    weights = weights.astype(values.dtype)
    # Products run in reduced precision on accelerators unless told otherwise.
    return jnp.einsum(
        "gr,gr...->g...",
        _split(weights, group),
        _split(values, group),
        precision=jax.lax.Precision.HIGHEST,
    )


def _split(values: Array, size: int) -> Array:
    """The rows in groups of `size`, the last one filled with zeros."""
    padding = [(0, -len(values) % size)] + [(0, 0)] * (values.ndim - 1)
    return jnp.pad(values, padding).reshape(-1, size, *values.shape[1:])


def _two_sum(carry: tuple[PyTree, PyTree], value: PyTree) -> tuple[PyTree, PyTree]:
    """Adds `value` to a running sum and keeps what the addition rounds away.

    Without the correction one record could decide how many later additions round
    away, and move the sum by many times its clipped norm.

    References:
        Knuth, "The art of computer programming", volume 2, section 4.2.2, theorem B.
    """
    total, correction = carry
    # The barriers keep the compiler from simplifying (a + b) - a to b.
    barrier = jax.lax.optimization_barrier
    added = barrier(jax.tree.map(jnp.add, total, value))
    part = barrier(jax.tree.map(jnp.subtract, added, total))
    lost = jax.tree.map(
        lambda a, b, new, p: (a - (new - p)) + (b - p), total, value, added, part
    )
    return added, jax.tree.map(jnp.add, correction, lost)


def _weight(value: PyTree, keep: Bool[Array, ""], clip_norm) -> Float[Array, ""]:
    """What makes one record's value at most `clip_norm` long, or zero of it."""
    leaves = jax.tree.leaves(value)
    dtype = max((v.dtype for v in leaves), key=lambda kind: jnp.finfo(kind).bits)
    size = sum(v.size for v in leaves)
    # In units of a clip norm below 1: the squares of tiny values underflow, and a norm
    # that lost them would let a value longer than a tiny clip norm through.
    limit = jnp.asarray(clip_norm).astype(dtype)
    unit = 1 / jnp.minimum(limit, 1)
    scaled = [v * unit.astype(v.dtype) for v in leaves]
    squares = jnp.stack([jnp.sum(v * v).astype(dtype) for v in scaled])
    # Worst-case relative rounding of a sum of `size` squares, halved by the root.
    epsilon = max(float(jnp.finfo(v.dtype).eps) for v in leaves)
    norm = jnp.sqrt(jnp.sum(squares)) * (1 + (size + 32) * epsilon / 4)
    limit = limit * unit
    # Nothing passes a clip norm so large that sums overflow, or so small that the noise
    # made for it underflows.
    keep = keep & jnp.isfinite(norm) & (limit < 1e30) & (jnp.abs(unit) < 1e25)
    return jnp.where(
        keep, jnp.minimum(1, limit / jnp.where(norm > limit, norm, limit)), 0
    )


def _value_of(fun, records) -> PyTree:
    record = one_record(records)
    value = jax.eval_shape(fun, record)
    for leaf in jax.tree.leaves(value):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                "clipped_mean: fun must return floating-point arrays, got "
                f"{leaf.dtype}."
            )
    return value


def one_record(records: PyTree) -> PyTree:
    """The shapes and dtypes of one record of `records`."""
    return jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(jnp.shape(v)[1:], jnp.result_type(v)), records
    )


def _rows(microbatch, value, records, n: int) -> int:
    if microbatch == "auto":
        record = one_record(records)
        return max(1, min(n, microbatch_rows(value, record, jax.default_backend())))
    _checks.count("clipped_mean", microbatch=microbatch)
    return microbatch


def _wide(dtype) -> jnp.dtype:
    """The dtype for norms and sums: never half precision."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)
