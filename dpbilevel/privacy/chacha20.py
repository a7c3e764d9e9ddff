"""ChaCha20 as a generator of JAX: keys of 256 bits and cryptographic random bits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jaxtyping import Array, Int, UInt, UInt32

_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
# The third word of a block's input says what the block is for, so that random
# bits, children by `split` and children by `fold_in` of one key share no block.
_BITS, _SPLIT, _FOLD_IN = range(3)
# Blocks that a CPU computes together: they stay in its first cache.
_TOGETHER = 2**8
_MOST_BLOCKS = 2**32 - 1


def blocks(
    key: UInt32[Array, "8"], inputs: UInt32[Array, "n 4"]
) -> UInt32[Array, "n 16"]:
    """Return 16-word blocks of a ChaCha20 key stream, one for each row of `inputs`.

    Args:
        key: The key, in words.
        inputs: The counter and the three words of the nonce of each block.

    Returns:
        The words of the blocks; as little-endian bytes they are those of the RFC.

    References:
        Nir and Langley, "ChaCha20 and Poly1305 for IETF protocols", RFC 8439, section
        2.3.
    """
    shape = (4, len(inputs))
    rows = [jnp.broadcast_to(v[:, None], shape) for v in (_CONSTANTS, key[:4], key[4:])]
    start = *rows, inputs.T

    def two_rounds(_, state):
        return _turned(_round(_turned(_round(state), 1)), -1)

    final = jax.lax.fori_loop(0, 10, two_rounds, start)
    return jnp.concatenate([a + b for a, b in zip(final, start, strict=True)]).T


def _round(state: tuple) -> tuple:
    """Return the state after a quarter round of each column (RFC 8439, section 2.1)."""
    a, b, c, d = state
    for first, second in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(d ^ a, first)
        c = c + d
        b = _rotated(b ^ c, second)
    return a, b, c, d


def _rotated(words: UInt32[Array, "..."], bits: int) -> UInt32[Array, "..."]:
    return words << np.uint32(bits) | words >> np.uint32(32 - bits)


def _turned(state: tuple, sign: int) -> tuple:
    """Return the state with row i rotated left by i columns, right if `sign` is -1."""
    return tuple(jnp.roll(row, -sign * i, 0) for i, row in enumerate(state))


def _stream(key: UInt32[Array, "8"], count: int, use: int) -> UInt32[Array, "n 16"]:
    """Return the first `count` blocks of a key's stream for one `use`, as rows."""
    if count > _MOST_BLOCKS:
        raise ValueError(f"chacha20: one key gives at most {_MOST_BLOCKS} blocks.")

    def some(first, number):
        counters = first + jnp.arange(number, dtype=jnp.uint32)
        rest = np.broadcast_to(np.asarray([0, use, 0], np.uint32), (number, 3))
        return blocks(key, jnp.concatenate([counters[:, None], rest], axis=1))

    at_once = functools.partial(some, jnp.uint32(0), count)

    def in_parts():
        parts = -(-count // _TOGETHER)
        firsts = jnp.arange(parts, dtype=jnp.uint32) * np.uint32(_TOGETHER)
        found = jax.lax.map(lambda first: some(first, _TOGETHER), firsts)
        return found.reshape(-1, 16)[:count]

    if count <= _TOGETHER:
        return at_once()
    return jax.lax.platform_dependent(cpu=in_parts, default=at_once)


def _random_bits(
    key: UInt32[Array, "8"], bit_width: int, shape: tuple[int, ...]
) -> UInt[Array, "..."]:
    size, words = math.prod(shape), 2 if bit_width == 64 else 1
    bits = _stream(key, -(-size * words // 16), _BITS).reshape(-1)[: size * words]
    if bit_width == 64:
        low, high = bits.reshape(-1, 2).T.astype(jnp.uint64)
        bits = high << np.uint64(32) | low
    return bits.astype(f"uint{bit_width}").reshape(shape)


def _split(key: UInt32[Array, "8"], shape: tuple[int, ...]) -> UInt32[Array, "... 8"]:
    return _stream(key, math.prod(shape), _SPLIT)[:, :8].reshape(*shape, 8)


def _fold_in(key: UInt32[Array, "8"], data: int | Array) -> UInt32[Array, "8"]:
    zero = jnp.uint32(0)
    inputs = jnp.stack(
        [zero, zero, zero + _FOLD_IN, jnp.asarray(data).astype(jnp.uint32)]
    )
    return blocks(key, inputs[None])[0, :8]


def _seed(seed: Int[Array, ""]) -> UInt32[Array, "8"]:
    return jnp.pad(threefry_prng_impl.seed(seed), (0, 6))


CHACHA20 = define_prng_impl(
    key_shape=(8,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="chacha20",
    tag="chacha20",
)
