"""Exponential and Gumbel draws with exact tails; `exact/normal.py` draws normals."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from .keys import PRNGKey, check_key


def standard_exponential(
    shape: tuple[int, ...], dtype: DTypeLike, *, key: PRNGKey
) -> Float[Array, "..."]:
    r"""Draw independent standard exponential values, $-\log u$ with a uniform $u$.

    Both $u$ and $1 - u$ keep their relative precision however small they are: $P(E
    \ge t) = e^{-t}$ holds up to $t = 44$ in float32 and 66 in float64, and $P(E \le t)
    = 1 - e^{-t}$ down to such probabilities. The key is for this draw alone.
    """
    check_key(key)
    words = _words(key, math.prod(shape), dtype)
    # A coin, and a uniform number in (0, 1/2) of full relative precision.
    near_one = words[0] >> 31 == 1
    top = (words[0] & jnp.uint32(0x7FFFFFFF)).astype(dtype) * 2.0**-32
    # From the last word up, so that nothing is rounded away before it must be.
    rest = jnp.full(words.shape[1:], 0.5, dtype)
    for word in words[:0:-1]:
        rest = (word.astype(dtype) + rest) * 2.0**-32
    p = top + rest * 2.0**-32
    return jnp.where(near_one, -jnp.log1p(-p), -jnp.log(p)).reshape(shape)


def standard_gumbel(
    shape: tuple[int, ...], dtype: DTypeLike, *, key: PRNGKey
) -> Float[Array, "..."]:
    r"""Draw independent standard Gumbel values, $-\log E$ with an exponential $E$.

    The index of the largest of $\log p_i + $ Gumbel has the law $p$. As those of $E$,
    tails reach probabilities of $2^{-64}$ in float32 and $2^{-96}$ in float64;
    `jax.random.gumbel` in float32 stops at $2^{-23}$ by default.
    """
    return -jnp.log(standard_exponential(shape, dtype, key=key))


def _words(key: PRNGKey, size: int, dtype: DTypeLike) -> UInt32[Array, "words n"]:
    return jax.random.bits(key, (3 if dtype == jnp.float64 else 2, size), jnp.uint32)
