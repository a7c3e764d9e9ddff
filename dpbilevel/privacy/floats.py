"""Floating-point numbers by their bits.

A compiler that may assume that no value is NaN or infinite removes `jnp.isfinite`, but
not a comparison of integers that were read from memory.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _checks


def is_below(value: Float[Array, "..."], bound: float) -> Bool[Array, "..."]:
    """Whether each number is less than `bound` in absolute value, by its bits.

    Args:
        value: Of any floating-point dtype.
        bound: Above zero, infinity for all finite numbers. NaN is below nothing.
    """
    # Without the barrier the compiler could reason about how the value was computed.
    value = jax.lax.optimization_barrier(value)
    kind = np.dtype(f"int{jnp.finfo(value.dtype).bits}")
    return _magnitude_bits(value) < np.asarray(bound, value.dtype).view(kind)


def is_finite(value: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether each number is neither NaN nor infinite, by its bits.

    Args:
        value: Of any floating-point dtype.
    """
    return is_below(value, math.inf)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether every number of a pytree is finite, by its bits.

    Args:
        tree: Leaves of any dtype; those that are not floating point are finite.
    """
    leaves = [v for v in jax.tree.leaves(tree) if jnp.issubdtype(v.dtype, jnp.floating)]
    finite = (is_finite(v).all() for v in leaves)
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))


def floor_log2(value: Float[Array, "..."]) -> Int[Array, "..."]:
    """The exponent of the largest power of two that is at most `value`.

    Args:
        value: Positive, normal numbers of float32 or float64.
    """
    info = jnp.finfo(value.dtype)
    biased = _magnitude_bits(value) >> info.nmant
    return biased.astype(jnp.int32) - (info.maxexp - 1)


def power_of_two(exponent: Int[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    r"""$2^e$, exactly; zero below the normal numbers of the dtype.

    Args:
        exponent: $e$; beyond the largest exponent of the dtype it counts as that.
        dtype: float32 or float64.
    """
    info = jnp.finfo(dtype)
    kind = jnp.dtype(f"int{info.bits}")
    bias = info.maxexp - 1
    biased = jnp.clip(exponent.astype(kind), -bias, bias) + bias
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
    """Refuses a dtype in which errors are too large a part of what they add to.

    Args:
        owner: What to name in the message.
        what: What adds the errors, in the plural.
        added: How much they add.
        share: To what.
        dtype: What is computed in.
        allowed: The largest allowed `added / share`.
        remedy: What to do besides enabling 64-bit.
        of: What `share` is.

    Raises:
        ValueError: The errors are larger. Not inside a program, where numbers are not
            known; plans are made on the host.
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
    """The bits of the absolute value: integers ordered as the values are, NaN last."""
    kind = jnp.dtype(f"int{jnp.finfo(value.dtype).bits}")
    bits = jax.lax.bitcast_convert_type(value, kind)
    return bits & jnp.asarray(jnp.iinfo(kind).max, kind)
