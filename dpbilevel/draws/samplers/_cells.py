"""Draws of cells for the grid walk: from a table of all of them, or by walks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from ...privacy.noise import derive, standard_exponential, standard_gumbel, step_keys

_BLOCK = 128  # steps whose random numbers are drawn in one call


def from_table(energy, cells, tries, *, key):
    """Return exact draws of cells, and their energies."""
    index = np.stack(np.unravel_index(np.arange(math.prod(cells)), cells), axis=-1)
    table = energy(jnp.asarray(index, jnp.int32))

    def one(key):
        noise = standard_gumbel(table.shape, table.dtype, key=key)
        return jnp.argmax(noise - table)

    chosen = jax.lax.map(one, step_keys(key, tries)[1])
    return jnp.asarray(index, jnp.int32)[chosen], table[chosen]


def from_walks(energy, cells, tries, num_steps, dtype, *, key):
    """Return the last cells of independent walks, and their energies."""

    def block(state, drawn):
        start, key = drawn
        key_moves, key_coins = derive(key, "walk", "restart")
        words = jax.random.bits(key_moves, (length, tries), jnp.uint32)
        coins = standard_exponential((length, tries), dtype, key=key_coins)
        # What is left of the last block stays where it is.
        counts = start + jnp.arange(length, dtype=jnp.int32)
        words = jnp.where((counts < num_steps)[:, None], words, jnp.uint32(0))

        def one(state, drawn):
            return _step(energy, cells, *state, *drawn), None

        return jax.lax.scan(one, state, (words, coins))[0], None

    middle = jnp.asarray([[count // 2 for count in cells]], jnp.int32)
    index = jnp.broadcast_to(middle, (tries, len(cells)))
    state = (index, jnp.broadcast_to(energy(middle), (tries,)))
    length = min(num_steps, _BLOCK)
    starts = jnp.arange(0, num_steps, length, dtype=jnp.int32)
    _, keys = step_keys(key, len(starts))
    return jax.lax.scan(block, state, (starts, keys))[0]


def _step(energy, cells, index: Int[Array, "m n"], energies, words, coins):
    """Make one step of every walk; return its cell and the energy there.

    Lowy and Liu, Appendix B.3.1, 3(b): i to iii propose, iv accepts.
    """
    proposed = _proposals(cells, index, words)
    raised = energy(proposed)
    moves = coins >= raised - energies
    index = jnp.where(moves[:, None], proposed, index)
    return index, jnp.where(moves, raised, energies)


def _proposals(
    cells: tuple[int, ...], index: Int[Array, "m n"], words: UInt32[Array, " m"]
) -> Int[Array, "m n"]:
    """Return the neighbours that random words propose, or the cell itself.

    The top bit tells whether to move and the next one which way, so that a move and
    its reverse have exactly the same probability; the others choose the axis.
    """
    n = len(cells)
    axis = (words & jnp.uint32(2**30 - 1)) % jnp.uint32(n)
    sign = jnp.where(words >> 30 & 1 == 1, 1, -1)
    sign = jnp.where(words >> 31 == 1, sign, 0)
    along = jnp.arange(n, dtype=jnp.uint32)[None] == axis[:, None]
    beside = index + jnp.where(along, sign[:, None], 0).astype(index.dtype)
    beyond = (beside < 0) | (beside >= jnp.asarray(cells, index.dtype)[None])
    return jnp.where(jnp.any(beyond, axis=1, keepdims=True), index, beside)
