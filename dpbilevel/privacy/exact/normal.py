r"""Normal noise from random bits alone, in integers without floating point.

A value starts as a cell of width $1/t$ of a normal number, $t = 2^{10}$, which a table
draws with probabilities exact to $2^{-97}$. Then the scale is doubled as often as asked
for:

$$ N_0 = \mathrm{round}(t Z), \qquad N_b = 2 N_{b-1} + B_b, $$

where $B_b$ counts the ones among $k_b$ random bits. docs/mathematics.md proves that
$N_h$ has the law of $\lfloor 2^h t Z \rfloor$ plus noise that does not depend on it, up
to a factor of $1 \pm 2^{-55}$ and events of probability $2^{-81}$.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, PyTree, UInt32

from ..chacha20 import CHACHA20
from ..keys import PRNGKey, check_key, computed_once
from .int61 import Limbs, from_int32

# The standard deviation before doubling.
LOG2_STD = 10
# The cells reach to sixteen standard deviations; their number is a power of two.
_REACH = 2 ** (LOG2_STD + 4)
# The bits of a probability.
_PROBABILITY_BITS = 96
# (word, offset, width) of bit fields. Doubling b takes bit b of every field as wide:
# 7, 6, 6, 5, 5, 5 bits for b = 1 to 6, then 4 up to b = 11, 3 up to 21, and 2.
_FIELDS = (3, 18, 14), (3, 4, 14), (4, 18, 14), (4, 7, 11), (4, 1, 6), (3, 1, 3)
_FIELDS += ((3, 0, 1),)
# The same for the doublings beyond the first 14.
_LATE_FIELDS = ((5, 0, 28), (6, 0, 28), (7, 0, 7))
_DOUBLINGS, _LATE_DOUBLINGS = 14, 28
MOST_DOUBLINGS = _DOUBLINGS + _LATE_DOUBLINGS
# Up to this many numbers, the words are drawn one by one.
_FEW = 2**12
_FIXED_POINT = 192  # bits of the arithmetic that makes the table


def normal_integers(
    shapes: Sequence[tuple[int, ...]], doublings: Int32[Array, ""], *, key: PRNGKey
) -> list[Limbs]:
    r"""Draw a list of `Limbs`: normal integers of deviation 2^(10 + `doublings`).

    Args:
        shapes: The shapes of the arrays, which are parts of one flat draw.
        doublings: $h$ from 0 to 42; public. The mean is 0 or -1/2.
        key: A typed key for this draw alone; `check_key` refuses others.

    Privacy:
        Added to an integer of bounded sensitivity it is the Gaussian mechanism of
        standard deviation $2^{10 + h}$, post-processed, up to at most $2^{-54}$ of
        epsilon and $2^{-81} (1 + e^\varepsilon)$ of delta a value.

    References:
        Micciancio and Walter, "Gaussian sampling over the integers: efficient, generic,
        constant-time", 2017, who widen a base sampler by sums as well; the doublings
        and their proof are ours.
    """
    check_key(key)
    sizes = [math.prod(shape) for shape in shapes]
    drawn = _from_words(_words(sum(sizes), key), doublings)
    parts = (jnp.split(v, np.cumsum(sizes)[:-1]) for v in (drawn.high, drawn.low))
    return [
        Limbs(high.reshape(shape), low.reshape(shape))
        for shape, high, low in zip(shapes, *parts, strict=True)
    ]


def standard_normal(
    tree: PyTree, *, key: PRNGKey, draw: Callable[..., list[Limbs]] = normal_integers
) -> PyTree:
    r"""Draw independent standard normal noise shaped like `tree`, in one flat draw.

    Every value is the nearest floating-point number of a normal integer of standard
    deviation $2^{52}$, divided by that. Tails reach 10.8 standard deviations, where
    `jax.random.normal` in float32 stops at 5.4; in float64 values are multiples of
    $2^{-52}$. One draw for the whole pytree compiles one generator instead of one per
    leaf.

    Args:
        tree: Floating-point leaves; only shapes and dtypes are read.
        key: A typed key for this draw alone.
        draw: What draws the integers, as `normal_integers` does.

    Returns:
        A pytree of the same structure, in float32, or float64 if a leaf has it.
    """
    check_key(key)
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    shapes = [jnp.shape(v) for v in leaves]
    dtype: DTypeLike = jnp.float32
    for kind in map(jnp.result_type, leaves):
        if not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(f"noise needs floating-point values, got {kind}.")
        if kind == jnp.float64:
            dtype = jnp.float64
    draws = draw(shapes, jnp.int32(MOST_DOUBLINGS), key=key)
    unit = 2.0 ** -(LOG2_STD + MOST_DOUBLINGS)
    return treedef.unflatten([v.astype(dtype) * unit for v in draws])


def _from_words(
    words: Sequence[UInt32[Array, " n"]], doublings: Int32[Array, ""]
) -> Limbs:
    """Return normal integers as `Limbs`, from eight words of random bits for each."""
    early = jnp.minimum(doublings, _DOUBLINGS)
    late = doublings - early
    ones, mean = _leading_bits(words, _FIELDS, _DOUBLINGS - early)
    rest, late_mean = _leading_bits(words, _LATE_FIELDS, _LATE_DOUBLINGS - late)
    # If the mean of the first sum is not an integer, 1/2 too much is subtracted from
    # it; the second sum makes up for that.
    late_mean -= (mean & 1) << late
    # Because of these barriers each sum is one loop that stores no random words.
    value = (_cell(words) << early) + ones - ((mean + 1) >> 1)
    added = rest - ((late_mean + 1) >> 1)
    value, added = jax.lax.optimization_barrier((value, added))
    return from_int32(value).doubled(late).plus(from_int32(added))


def _words(size: int, key: PRNGKey) -> list[UInt32[Array, " size"]]:
    """Draw eight arrays of random 32-bit words, with a word for each number.

    For many numbers they are three blocks of a generator with long ones: a split of a
    key shows all four words of every block, and `jax.random.bits` one only. The first
    word has a block of its own because it is read before the others. For few numbers
    `jax.random.bits` is as fast, and compiles faster. ChaCha20 shows whole blocks.
    """
    if size <= _FEW or jax.random.key_impl(key) == CHACHA20:
        words = jax.random.bits(key, (8, size), jnp.uint32)
        return [*jax.lax.optimization_barrier(words)]
    if str(jax.random.key_impl(key)) != "threefry4x32":
        words = jax.random.bits(key, (4,), jnp.uint32)
        key = computed_once(jax.random.wrap_key_data(words, impl="threefry4x32"))
    # A key for each block: XLA of JAX 0.10 computes one split of shape (3, size) again
    # for every value that reads it.
    keys = computed_once(jax.random.split(key, 3))
    blocks = [jax.random.key_data(jax.random.split(k, size)) for k in keys]
    places = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2)]
    return [blocks[block][:, word] for block, word in places]


def _cell(words: Sequence[UInt32[Array, " n"]]) -> Int32[Array, " n"]:
    """Return rounded normal integers of deviation 2^10, one for each entry of words."""
    # An index that is not stored is computed again for every read of the table.
    first = jax.lax.optimization_barrier(words[0])
    bits = 32 - _REACH.bit_length()
    column = first >> bits
    table = map(jnp.asarray, _alias_table().T)
    row = [v.at[column].get(mode="promise_in_bounds") for v in table]
    mask = np.uint32(2**bits - 1)
    below = words[2] < row[2]
    for word, bound in ((words[1], row[1]), (first & mask, row[0] & mask)):
        below = (word < bound) | ((word == bound) & below)
    index = jnp.where(below, column, row[0] >> bits)
    return index.astype(jnp.int32) - _REACH


def _leading_bits(
    words: Sequence[UInt32[Array, " n"]],
    fields: tuple[tuple[int, int, int], ...],
    unread: Int32[Array, ""],
) -> tuple[Int32[Array, " n"], Int32[Array, ""]]:
    """Return the sum of bit fields but their last `unread` bits, and twice its mean."""
    longest = max(length for _, _, length in fields)
    total, most = jnp.int32(0), np.zeros(longest + 1, np.int32)
    for word, start, length in fields:
        mask, place = 2**length - 1, longest - length
        bits = (words[word] >> start).astype(jnp.int32) & mask
        total += (bits << place) >> unread
        most += (mask << place) >> np.arange(longest + 1)
    return total, jnp.asarray(most)[unread]


@functools.cache
def probabilities() -> tuple[int, ...]:
    r"""Return a tuple of integers: $2^{96}$ times the chance of each cell of a normal.

    The cells are $\mathrm{round}(t Z) = a$ for $a = -2^{14}, \ldots, 2^{14} - 1$. The
    integers add up to $2^{96}$.
    """
    one = 1 << _FIXED_POINT
    half, value = [], one
    # exp(-2**-p) of p = 2 log2(t) + 1 and 2 log2(t), by its series.
    ratio, change = (
        sum(
            (-1) ** n * (one >> n * p) // math.factorial(n)
            for n in range(_FIXED_POINT // p + 1)
        )
        for p in (1 + 2 * LOG2_STD, 2 * LOG2_STD)
    )
    for a in range(_REACH):
        # The mean density over a's cell, over that at a: the even terms of its Taylor
        # series, in Hermite polynomials over powers of t.
        before, hermite, mean = 0, one, one
        for n in range(0, 10, 2):
            here = (a * a - ((2 * n + 1) << 2 * LOG2_STD)) * hermite
            before, hermite = hermite, (here - n * (n - 1) * before) >> 4 * LOG2_STD
            mean += hermite // (math.factorial(n + 3) << (n + 2))
        half.append(value * mean >> _FIXED_POINT)
        # exp(-(a + 1)**2 / 2 t**2) from exp(-a**2 / 2 t**2).
        value, ratio = (v >> _FIXED_POINT for v in (value * ratio, ratio * change))
    total = 2 * sum(half) - half[0]
    unit = 1 << _PROBABILITY_BITS
    half = [(2 * v * unit + total) // (2 * total) for v in half]
    half[0] += unit - (2 * sum(half) - half[0])
    return (0, *half[:0:-1], *half)


@functools.cache
def _alias_table() -> UInt32[np.ndarray, "columns 3"]:
    """Return an array of words: each column's alias and the 81 bits of its bound.

    Every column stands for one value with at most its probability, and for one other,
    its alias, with the rest.

    References:
        Walker, "An efficient method for generating discrete random variables with
        general distributions", ACM Transactions on Mathematical Software, 1977.
    """
    left = list(probabilities())
    full = (1 << _PROBABILITY_BITS) // len(left)
    bounds, aliases = [full - 1] * len(left), [*range(len(left))]
    small = [i for i, v in enumerate(left) if v < full]
    large = [i for i, v in enumerate(left) if v >= full]
    while small:
        i, j = small.pop(), large[-1]
        bounds[i], aliases[i] = left[i], j
        left[j] -= full - left[i]
        if left[j] < full:
            small.append(large.pop())
    places, mask = 32 - _REACH.bit_length(), 0xFFFFFFFF
    words = [
        (alias << places | bound >> 64, bound >> 32 & mask, bound & mask)
        for alias, bound in zip(aliases, bounds, strict=True)
    ]
    table = np.asarray(words, np.uint32)
    table.setflags(write=False)
    return table
