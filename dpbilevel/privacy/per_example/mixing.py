"""A test of whether a backend mixes records that a program computes together.

The library keeps records apart in the programs that it gives to the compiler
(`rowwise`). That the compiled program keeps them apart as well is an assumption about
the compiler and the device. Here it is tested: one record of NaN, infinity or numbers
near the largest one must leave the last bit of every other record's values unchanged.
The test is finite: it can refute the assumption and does not prove it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import get_default_device
from jaxtyping import Array, Float, PyTree

from ..exact.matmul_check import apart
from ..records.rows import BLOCK
from .structure import rowwise

WIDTH = 32  # the numbers of a record
Function = Callable[[Float[Array, " 32"]], PyTree]
_BAD = np.nan, np.inf, 3e38
_PLACE = 3  # the row that holds them


def _grouped(record: Array) -> PyTree:
    """Return the gradients of a layer of grouped convolutions."""
    layout = ("NHC", "HIO", "NHC")

    def loss(kernel, image):
        result = jax.lax.conv_general_dilated(
            image, kernel, (1,), "SAME", None, None, layout, feature_group_count=2
        )
        return jnp.mean(jnp.tanh(result) ** 2)

    kernel = np.linspace(-1, 1, 3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)
    return jax.grad(loss, (0, 1))(kernel, record.reshape(1, 8, 4))


def _pooled(record: Array) -> Array:
    """Return the gradient of a maximum over windows."""

    def loss(image):
        window = (1, 2, 1)
        largest = jax.lax.reduce_window(
            image, -jnp.inf, jax.lax.max, window, window, "VALID"
        )
        return jnp.sum(largest**2)

    return jax.grad(loss)(record.reshape(1, 8, 4))


def _solved(record: Array) -> Array:
    """Return the solution of a small linear system.

    Its decomposition and substitutions follow each other: batched decompositions that
    run at the same time can wait for each other's threads for ever in jaxlib 0.10.
    """
    matrix = record[:16].reshape(4, 4)
    square = matrix @ matrix.T + jnp.eye(4)
    return jax.scipy.linalg.solve(square, record[16:20], assume_a="pos")


# Operations whose compiled forms combine rows of a batch most freely.
FUNCTIONS: Mapping[str, Function] = {
    "a product with a matrix": lambda v: v @ np.eye(WIDTH, 8, dtype=np.float32),
    "a product of two records' values": lambda v: v.reshape(4, 8) @ v.reshape(8, 4),
    "grouped convolutions": _grouped,
    "maxima over windows": _pooled,
    "a linear system": _solved,
    "a loop": lambda v: jax.lax.while_loop(  # its length depends on the record
        lambda state: (jnp.abs(state) < 2).any(), lambda state: 2 * state + 1, v
    ),
    "running sums": jnp.cumsum,
    "a sort": jnp.sort,
    "a Fourier transform": jnp.fft.rfft,
    "lookups": lambda v: jnp.zeros(8).at[jnp.arange(WIDTH) % 8].add(v)[v.astype(int)],
}


def mixed_rows(
    functions: Mapping[str, Function] = FUNCTIONS,
    compiled: Callable[[Callable], Callable] = jax.jit,
) -> tuple[str, ...]:
    """Return a tuple of names of functions that mix records on the default device.

    Args:
        functions: Maps names to functions of a record, an array of `WIDTH` numbers.
        compiled: Makes the program, from a function of many records in an array of
            shape (64, `WIDTH`).

    Returns:
        The names of the functions of which the values of some record changed with what
        another one holds. None of them is correct; it is not proved that none will.
    """

    def values(record):
        return {name: fun(record) for name, fun in functions.items()}

    compute = compiled(jax.vmap(rowwise("mixed_rows", values)))
    rows = np.random.default_rng(0).normal(size=(BLOCK, WIDTH)).astype(np.float32)
    # The bytes of all other rows: first beside a good one, then beside each bad one.
    found: dict[str, list[list[bytes]]] = {name: [] for name in functions}
    for bad in (rows[_PLACE], *_BAD):
        rows[_PLACE] = bad
        for name, value in jax.device_get(compute(rows)).items():
            kept = [np.delete(v, _PLACE, axis=0) for v in jax.tree.leaves(value)]
            found[name].append([v.tobytes() for v in kept])
    return tuple(name for name, seen in found.items() if seen != seen[:1] * len(seen))


def check_rows(owner: str) -> None:
    """Raise `ValueError` if `mixed_rows` finds that the default device mixes records.

    It runs once for each device of a process, takes about a second, and may be called
    where a program is traced.

    Raises:
        ValueError: A record's value changed with what another holds; names `owner`.
    """
    device = get_default_device()
    if mixed := _mixed(device):
        raise ValueError(
            f"{owner}: on {device.device_kind} ({device.platform}, JAX "
            f"{jax.__version__}), one record changes results of others: "
            f"{', '.join(mixed)}. Use another release of JAX, or JAX_PLATFORMS=cpu."
        )


@functools.cache
def _mixed(device: Any) -> tuple[str, ...]:
    """Return `mixed_rows` of a device, computed once and outside all contexts."""
    return apart(device, mixed_rows)
