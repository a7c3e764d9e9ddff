"""Floating-point numbers by their bits.

A compiler that may assume that no value is NaN or infinite removes `jnp.isfinite`, but
not a comparison of integers that were read from memory.
"""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, PyTree

from ... import _checks


def double_precision() -> contextlib.AbstractContextManager:
    """Return a context with 64-bit types, whatever `jax_enable_x64` says outside."""
    return jax.enable_x64(True)


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return float32, or `dtype` if it has more bits: for norms, sums and factors."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)


def unit_roundoff(dtype: DTypeLike) -> float:
    """Return the largest relative error of rounding to a dtype."""
    return float(jnp.finfo(dtype).eps) / 2


def is_below(value: Float[Array, "..."], bound: float) -> Bool[Array, "..."]:
    """Return whether each absolute value is less than `bound` > 0, by its bits.

    All finite numbers are below infinity, and NaN is below nothing.
    """
    # Without the barrier the compiler could reason about how the value was computed.
    value = jax.lax.optimization_barrier(value)
    kind = np.dtype(f"int{jnp.finfo(value.dtype).bits}")
    return _magnitude_bits(value) < np.asarray(bound, value.dtype).view(kind)


def is_finite(value: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Return whether each number is neither NaN nor infinite, by its bits."""
    return is_below(value, math.inf)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return whether all floats of a pytree are finite, by their bits."""
    leaves = [v for v in jax.tree.leaves(tree) if jnp.issubdtype(v.dtype, jnp.floating)]
    finite = (is_finite(v).all() for v in leaves)
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))


def floor_log2(value: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return floor(log2(value)) as int32, by the bits of normal numbers above zero."""
    info = jnp.finfo(value.dtype)
    biased = _magnitude_bits(value) >> info.nmant  # the exponent alone
    return biased.astype(jnp.int32) - (info.maxexp - 1)


def nearest_integer(
    value: Float[Array, "..."], most: Int[Array, ""]
) -> Int32[Array, "..."]:
    r"""Return the nearest int32 to each float32 number, cut to at most `most` in size.

    In fewer operations than a conversion: $v + 1.5 \cdot 2^{23}$ is an integer by its
    rounding, and its bits are those of $1.5 \cdot 2^{23}$ plus that integer. NaN is cut
    like a number below all others.
    """
    bound = most.astype(value.dtype)
    # One operation each; `jnp.clip` takes more, to keep NaN. Without them some programs
    # would round a product and this sum once, and others twice.
    value = jnp.where(value > -bound, value, -bound)
    value = jnp.where(value < bound, value, bound)
    zero = np.float32(1.5 * 2.0**23)
    bits = jax.lax.bitcast_convert_type(value + zero, jnp.int32)
    return bits - zero.view(np.int32)


def upper_mantissa(value: Float[Array, "..."], bits: int) -> Int32[Array, "..."]:
    r"""Return $\lceil 2^{b - e} v \rceil$: $b$ is `bits`, $2^e \le v$ the power below.

    From $2^b$ to $2^{b + 1}$, whatever `value` is.
    """
    info = jnp.finfo(value.dtype)
    behind = info.nmant - bits
    stored = _magnitude_bits(value) & (2**info.nmant - 1)
    return (((stored + 2**behind - 1) >> behind) + 2**bits).astype(jnp.int32)


def power_of_two(exponent: Int[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Return $2^e$ for exponents $e$, exactly; zero below the dtype's normal numbers.

    An exponent beyond the largest one of the dtype counts as that.
    """
    info = jnp.finfo(dtype)
    kind = jnp.dtype(f"int{info.bits}")
    bias = info.maxexp - 1
    biased = jnp.clip(exponent.astype(kind), -bias, bias) + bias  # 0 stands for zero
    return jax.lax.bitcast_convert_type(biased << info.nmant, dtype)


def check_rounding(
    owner: str,
    what: str,
    added: Any,
    share: Any,
    dtype: DTypeLike,
    *,
    allowed: float,
    remedy: str,
    of: str = "what a record may change",
) -> None:
    """Raise `ValueError` if rounding errors `added` exceed a part `allowed` of `share`.

    `what` are the errors, in the plural, `of` what they are a `share` of, and `remedy`
    what to do besides enabling 64-bit. Numbers inside a program are not refused.

    Raises:
        ValueError: `added / share` is larger than `allowed`.
    """
    known = _checks.concrete(added) and _checks.concrete(share)
    if not known or added <= allowed * share:
        return
    name = jnp.dtype(dtype).name
    enable = (
        'Enable 64-bit, jax.config.update("jax_enable_x64", True), with float64 '
        "records and starting point; or "
    )
    raise ValueError(
        f"{owner}: in {name}, {what} may add {added / share:.2g} of {of}, and "
        f"{allowed:.2g} is allowed. {'' if name == 'float64' else enable}{remedy}."
    )


def _magnitude_bits(value: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return the bits of the absolute value: integers in the same order, NaN last."""
    kind = jnp.dtype(f"int{jnp.finfo(value.dtype).bits}")
    bits = jax.lax.bitcast_convert_type(value, kind)
    return bits & jnp.asarray(jnp.iinfo(kind).max, kind)


def two_sum(sums: tuple[PyTree, PyTree], value: PyTree) -> tuple[PyTree, PyTree]:
    """Return the pair (total, rounding errors) after `value` is added to the total.

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


def folded(totals: PyTree, corrections: PyTree) -> tuple[PyTree, PyTree]:
    """Return one pair (total, correction): the sum of all their rows."""
    zero = jax.tree.map(lambda v: jnp.zeros_like(v[0]), totals)
    total = zero, jax.tree.map(lambda v: jnp.sum(v, axis=0), corrections)
    if jax.tree.leaves(totals):
        total, _ = jax.lax.scan(lambda sums, v: (two_sum(sums, v), None), total, totals)
    return total
