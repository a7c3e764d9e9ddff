"""Exact integers of 61 bits in two of 32, for devices without 64-bit integers."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32

from .floats import power_of_two

# The denominator of fractions is two to this: half the bits of the low limb, so that
# parts of this size have products of 32 bits.
FRACTION_BITS = _HALF = 15
# The bits of the low limb, and the most places of a shift.
_BITS = MOST_PLACES = 30
_MASK, _HALF_MASK = 2**_BITS - 1, 2**_HALF - 1
# So many 16-bit halves of counts add up to less than 32 bits.
_GROUP = 2**15
# So many parts of 18 bits add up to less than 32 bits.
_FEW = 2**13
# Sums of so many counts of 32 bits are in range.
_MOST_ROWS = 2**29
# XLA splits longer sums into two steps, which take long to compile. It does not split
# the reduction of a pair, which is slower than two sums if there are few rows.
_SHORT = 32
# Fewer parts of 20 bits, or of 20 and a sign, add up to less than 32 bits.
_PART, _MANY = 20, 2**11


class Limbs(eqx.Module):
    r"""Integers $h \cdot 2^{30} + l \in [-2^{60}, 2^{60})$ with $0 \le l < 2^{30}$.

    What leaves the range is cut there: a sum that wrapped around would set neighbours
    apart by the whole range, a cut one never moves them apart.

    Attributes:
        high: $h$, from $-2^{30}$ to $2^{30} - 1$.
        low: $l$.
    """

    high: Int32[Array, "..."]
    low: Int32[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of integers."""
        return self.high.shape

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """Return the integers as a NumPy array, by default in int64."""
        high, low = (np.asarray(v, np.int64) for v in (self.high, self.low))
        return np.asarray(high * 2**_BITS + low, dtype or np.int64)

    def __add__(self, other: "Limbs") -> "Limbs":
        """Return the sum as `Limbs`, cut to $[-2^{60}, 2^{60})$."""
        return _cut(self.plus(other))

    def plus(self, other: "Limbs") -> "Limbs":
        """Return the sum as `Limbs`; it must be in range, which is not checked."""
        low = self.low + other.low
        return Limbs(self.high + other.high + (low >> _BITS), low & _MASK)

    def shifted(self, places: Int[Array, ""]) -> "Limbs":
        """Return the `Limbs` times 2**places, rounded and cut; |places| <= 30."""
        places = places.astype(jnp.int32)
        behind = jnp.maximum(-places, 0)
        low = self.low + ((1 << behind) >> 1)  # half a step
        high = self.high + (low >> _BITS)
        low = ((low & _MASK) >> behind) | ((high << (_BITS - behind)) & _MASK)
        return Limbs(high >> behind, low).finer(jnp.maximum(places, 0))

    def finer(self, places: Int[Array, ""]) -> "Limbs":
        """Return the `Limbs` times 2**places, cut to the range; 0 <= places <= 30."""
        places = places.astype(jnp.int32)
        sign = self.high >> 31
        extreme = Limbs(sign ^ _MASK, ~sign & _MASK)
        fits = self.high >> (_BITS - places) == sign
        return where(fits, self.doubled(places), extreme)

    def doubled(self, times: Int32[Array, ""]) -> "Limbs":
        """Return the `Limbs` times 2**times (0 to 30); the range is not checked."""
        high = (self.high << times) + (self.low >> (_BITS - times))
        return Limbs(high, (self.low << times) & _MASK)

    def times_fraction(self, numerator: Int32[Array, ""]) -> "Limbs":
        """Return the `Limbs` times numerator / 2**15, at most 1, rounded half up."""
        # Every part has 15 bits, the last one 16 and a sign: products fit in 32.
        first = (self.low & _HALF_MASK) * numerator + 2 ** (_HALF - 1)
        second = (self.low >> _HALF) * numerator + (first >> _HALF)
        third = (self.high & _HALF_MASK) * numerator + (second >> _HALF)
        high = (self.high >> _HALF) * numerator + (third >> _HALF)
        return Limbs(high, (second & _HALF_MASK) + ((third & _HALF_MASK) << _HALF))

    def astype(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Convert to the nearest float32 or float64 numbers, ties to even."""
        if jnp.dtype(dtype) == jnp.float64:
            return self.high.astype(dtype) * 2.0**_BITS + self.low.astype(dtype)
        negative = self.high < 0
        magnitude = where(negative, negated(self), self)
        high, low = magnitude.high, magnitude.low
        # The 31 leading bits, the last of them set where anything follows: rounding
        # them is rounding the whole.
        behind = jnp.maximum(31 - jax.lax.clz(high), 0)
        leading = (high << (_BITS - behind)) | (low >> behind)
        leading |= ((low & ((1 << behind) - 1)) != 0).astype(jnp.int32)
        value = leading.astype(dtype) * power_of_two(behind, dtype)
        return jnp.where(negative, -value, value)


def is_limbs(leaf: Any) -> bool:
    """Return whether a leaf of a pytree is `Limbs`."""
    return isinstance(leaf, Limbs)


def split(values: Array, size: int, fill: int = 0) -> Array:
    """Return an array (groups, rows, ...), at most `size` rows each; `fill` pads."""
    size = min(size, max(len(values), 1))
    padding = [(0, -len(values) % size)] + [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, padding, constant_values=fill)
    return padded.reshape(-1, size, *values.shape[1:])


def zeros(shape: tuple[int, ...]) -> Limbs:
    """Return `Limbs` of this shape that are all zero."""
    return Limbs(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32))


def where(condition: Bool[Array, "..."], yes: Limbs, no: Limbs) -> Limbs:
    """Return `Limbs`: entries of `yes` where the condition holds, else of `no`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def from_int32(value: Int32[Array, "..."]) -> Limbs:
    """Convert int32 integers to `Limbs`, exactly."""
    return Limbs(value >> _BITS, value & _MASK)


def from_float(value: Float[Array, "..."]) -> Limbs:
    """Round floats to the nearest `Limbs`, ties to even; cut those out of range."""
    magnitude = jnp.minimum(jnp.abs(jnp.round(value)), 2.0 ** (2 * _BITS))
    # Both parts are exact: they are made of the bits of one number.
    high = jnp.floor(magnitude * 2.0**-_BITS)
    low = magnitude - high * 2.0**_BITS
    result = Limbs(high.astype(jnp.int32), low.astype(jnp.int32))
    return _cut(where(value < 0, negated(result), result))


def sum_rows(counts: Int32[Array, "n ..."]) -> Limbs:
    """Sum at most 2^29 rows of int32 counts into `Limbs`, exactly."""
    if (rows := len(counts)) > _MOST_ROWS:
        raise ValueError(f"sum_rows: at most {_MOST_ROWS} rows, got {rows}; sum parts.")
    in_groups = rows > _GROUP
    counts, axis = (split(counts, _GROUP), 1) if in_groups else (counts, 0)
    halves = counts & 0xFFFF, counts >> 16
    if counts.shape[axis] <= _SHORT:
        low, high = (jnp.sum(v, axis=axis, dtype=jnp.int32) for v in halves)
    else:
        zero = np.int32(0), np.int32(0)
        add = functools.partial(jax.tree.map, jax.lax.add)
        low, high = jax.lax.reduce(halves, zero, add, (axis,))
    ahead = ((high & (2 ** (_BITS - 16) - 1)) << 16) + (low & _MASK)
    high = (high >> (_BITS - 16)) + (low >> _BITS)
    total = Limbs(high + (ahead >> _BITS), ahead & _MASK)
    return _sum(total) if in_groups else total


def sum_floats(values: Float[Array, "n ..."]) -> Limbs:
    """Round at most 2^28 rows of floats of at most 2^32 and sum them into `Limbs`."""
    if (rows := len(values)) > (most := _FEW * _GROUP):
        raise ValueError(f"sum_floats: at most {most} rows, got {rows}; sum parts.")
    if rows > _FEW:
        return _sum(jax.vmap(sum_floats)(split(values, _FEW)))
    rounded = jnp.round(values)
    high = jnp.floor(rounded * 2.0**-_HALF)
    low = rounded - high * 2.0**_HALF  # exact: both are made of bits of one number
    high, low = (
        jnp.sum(v.astype(jnp.int32), axis=0, dtype=jnp.int32) for v in (high, low)
    )
    high += low >> _HALF
    return Limbs(high >> _HALF, ((high & _HALF_MASK) << _HALF) | (low & _HALF_MASK))


def sum_at(
    shape: tuple[int, ...],
    indices: Int[Array, "n places"],
    counts: Int32[Array, "n places ..."],
) -> Limbs:
    """Scatter-add counts by index into zero `Limbs` of `shape`; drop indices beyond.

    Counts are of at most 2^31 in absolute value, indices from 0 on.
    """
    indices = jnp.where(indices < 0, shape[0], indices).reshape(-1)
    counts = counts.reshape(-1, *shape[1:])
    parts = split(indices, _FEW, fill=shape[0]), split(counts, _FEW)

    def add(total, part):
        index, count = part
        empty = jnp.zeros(shape, jnp.int32)
        high, low = (
            from_int32(empty.at[index].add(v, mode="drop"))
            for v in (count >> _HALF, count & _HALF_MASK)
        )
        return total.plus(high.doubled(jnp.int32(_HALF))).plus(low), None

    return jax.lax.scan(add, zeros(shape), parts)[0]


def sum_over(value: Limbs, axes: str | tuple[str, ...]) -> Limbs:
    """Sum `Limbs` along axes of a mesh or of a `jax.vmap`, exactly before the cut.

    One all-reduce of three integers of 32 bits for each of fewer than 2^11 summands.
    """
    if jax.lax.axis_size(axes) >= _MANY:
        raise ValueError(f"sum_over: give fewer than {_MANY} devices.")
    mask, rest = 2**_PART - 1, _BITS - _PART
    middle = (value.low >> _PART) | ((value.high << rest) & mask)
    parts = value.low & mask, middle, value.high >> rest
    low, middle, high = jax.lax.psum(parts, axes)
    middle += low >> _PART
    high = jnp.clip(high + (middle >> _PART), -(2**_PART) - 1, 2**_PART)
    middle &= mask
    low = (low & mask) | ((middle << _PART) & _MASK)
    return _cut(Limbs((high << rest) | (middle >> rest), low))


def _sum(value: Limbs) -> Limbs:
    """Sum `Limbs` over a leading axis of at most 2^15; the range is not checked."""
    first = jnp.sum(value.low & _HALF_MASK, axis=0, dtype=jnp.int32)
    second = jnp.sum(value.low >> _HALF, axis=0, dtype=jnp.int32)
    high = jnp.sum(value.high, axis=0, dtype=jnp.int32) + (second >> _HALF)
    low = ((second & _HALF_MASK) << _HALF) + first  # below 2**31
    return Limbs(high + (low >> _BITS), low & _MASK)


def _cut(value: Limbs) -> Limbs:
    limit = 2**_BITS
    too_low, too_high = value.high < -limit, value.high >= limit
    low = jnp.where(too_low, 0, jnp.where(too_high, _MASK, value.low))
    return Limbs(jnp.clip(value.high, -limit, limit - 1), low)


def negated(value: Limbs) -> Limbs:
    """Return `Limbs` of the opposite sign."""
    return Limbs(-value.high - jnp.minimum(value.low, 1), -value.low & _MASK)
