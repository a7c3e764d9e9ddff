"""Sizes of micro-batches, from the memory of records and values and the backend."""

import contextlib
import functools
import math
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import _checks
from ..records.rows import BLOCK
from .factored import GROUP, Factored, is_structured, largest_group

# Bytes that one micro-batch of per-record values may occupy. On a CPU it should stay in
# the caches of its cores, an accelerator wants it large.
_MICROBATCH_BYTES = {"cpu": 64 * 2**20}
_MICROBATCH_BYTES_ACCELERATOR = 256 * 2**20
# On a CPU more records than caches hold are read in parts that stay there while norms
# and sums are taken of them.
_PART_BYTES = 4 * 2**20
_SCALARS = 24  # bytes of a record's norm, weight and mask


def pass_rows(
    n: int,
    microbatch: int | Literal["auto"],
    value: PyTree,
    record: PyTree,
    *,
    on_disk: bool,
) -> tuple[int, int]:
    """Return a pair: rows of a pass over `n` records, and rows of each of its chunks.

    Args:
        n: The number of records.
        microbatch: The most records of a chunk, or `"auto"`.
        value: What is computed for one record, as shapes.
        record: One record, as shapes.
        on_disk: Whether records are read from disk. The rows of a chunk are then whole
            groups, and the last chunk is padded.
    """
    if microbatch != "auto":
        _checks.count("clipped_mean", **{'microbatch, unless "auto",': microbatch})
        return n, _chunk_rows(n, 2 ** (int(microbatch).bit_length() - 1))
    fit = microbatch_rows(value, record, jax.default_backend())
    size = _memory(record)
    if 2 * (_memory(value) + _SCALARS) > size:
        return n, _chunk_rows(n, fit)
    if not on_disk and jax.default_backend() == "cpu" and n * size > cached_bytes():
        return n, _chunk_rows(n, max(GROUP, _PART_BYTES // size))
    # All at once takes less memory than the records do.
    leaves = jax.tree.leaves(value, is_leaf=is_structured)
    groups = [largest_group(v) for v in leaves if isinstance(v, Factored)]
    most = max(fit, GROUP, *groups) if on_disk else n
    return (n, _chunk_rows(n, n)) if n <= most else (-(-n // most) * most, most)


@functools.cache
def cached_bytes() -> int:
    """Return how many bytes of records the CPU's last cache keeps: half of its size.

    Of 32 MiB where the system does not say how large it is, and in programs of several
    processes, which must compile the same whatever their machines have.
    """
    sizes = [32 * 2**20]
    if jax.process_count() > 1:
        return sizes[0] // 2
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) * 2**10)
    return max(sizes[1:] or sizes) // 2


def microbatch_rows(value: PyTree, record: PyTree, backend: str) -> int:
    """Return how many records fit in a micro-batch together with their values.

    A power of two of at least 1, so that both fit the budget of the backend.
    """
    budget = _MICROBATCH_BYTES.get(backend, _MICROBATCH_BYTES_ACCELERATOR)
    size = _memory(value) + _memory(record)
    return 2 ** max(0, int(math.log2(budget / max(size, 1))))


def whole_blocks(n: int, rows: int) -> int:
    """Return the number of rows of a chunk: `rows`, or fewer so that no block is cut.

    Rows in blocks of 64 may be cut into parts of `n` rows that are no whole blocks. A
    row is rounded alike in every place of a chunk of 64 k rows or of a power of two.
    """
    if rows < n or n % BLOCK == 0:
        return rows
    if n < BLOCK:
        return 2 ** (n.bit_length() - 1)
    return _chunk_rows(n, max(BLOCK, n // 2))


def _chunk_rows(n: int, rows: int) -> int:
    """Return the number of rows of equal chunks of at most `rows`, in whole groups."""
    if rows < GROUP:
        return max(1, min(n, rows))
    even = -(-n // max(1, -(-n // rows)))
    return max(1, min(n, even + -even % GROUP))


def _memory(value: PyTree) -> int:
    """Return the bytes of a record, or of its value and its part of a group's sum."""
    arrays: list[Any] = []
    for leaf in jax.tree.leaves(value, is_leaf=is_structured):
        arrays += jax.tree.leaves(leaf)
        if isinstance(leaf, Factored):
            if leaf.given:
                arrays.remove(leaf.left)
            size = -(-math.prod(leaf.shape) // largest_group(leaf)) + leaf.places**2
            arrays.append(jax.ShapeDtypeStruct((size,), leaf.dtype))
    return sum(math.prod(v.shape) * jnp.dtype(v.dtype).itemsize for v in arrays)
