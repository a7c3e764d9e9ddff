"""Rows of records: their public number, and their parts on several devices."""

import abc
import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, PyTree

from ... import _checks
from ..jaxprs import bound, evaluated, retraced, traced

_PARTS = "parts"  # of a vmap over them
_NO_MESH = AbstractMesh((), ())
# Jaxpr parameters that only describe sharding, primitives that only move data, and
# calls with the parameter that holds their jaxpr. No derivative is taken through them.
_PLACES = "sharding", "out_sharding"
_MOVES = "reshard", "sharding_constraint"
_CALLS = dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
_CALLS |= {"closed_call": "call_jaxpr", "jit": "jaxpr"}

# Rows come in multiples of this many. A compiled program treats the rows of such blocks
# alike, wherever they stand; the last ones of another number may be rounded otherwise.
BLOCK = 64


class Padded(eqx.Module):
    """Records in a public number of rows, so that no shape shows how many there are.

    Attributes:
        records: A pytree with a leading axis of fixed length.
        present: Which rows are records. The others hold NaN, and zero where they are
            not floating point.
    """

    records: PyTree
    present: Bool[Array, " n"]


def padded_rows(size: int) -> int:
    """Return the number of rows that a plan for `size` records pads them to.

    The next larger multiple of 64, so that one record more always fits.
    """
    return (size // BLOCK + 1) * BLOCK


def padded(records: PyTree, rows: int) -> Padded:
    """Return records as `Padded`: filler rows follow them, `rows` rows in all."""
    n = jax.tree.leaves(records)[0].shape[0]

    def pad(v):
        widths = [(0, rows - n)] + [(0, 0)] * (v.ndim - 1)
        return jnp.pad(v, widths, constant_values=filler(v.dtype))

    # The barrier compiles readers of the rows apart from the padding.
    filled = jax.lax.optimization_barrier(jax.tree.map(pad, records))
    return Padded(filled, jnp.arange(rows) < n)


def filler(dtype: jnp.dtype) -> float | int | bool:
    """Return the entry of a row that is no record: NaN, or zero without NaN."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return math.nan
    return False if jnp.issubdtype(dtype, jnp.bool_) else 0


def unpacked(records: PyTree) -> tuple[PyTree, Bool[Array, " n"] | None]:
    """Return the rows of records, and a mask of real records, `None` if all are."""
    if isinstance(records, Padded):
        return records.records, records.present
    return records, None


# Maps the number of a chunk to its rows, and to which of them are to be added.
Reader = Callable[[Int[Array, ""]], tuple[PyTree, Bool[Array, " rows"]]]


class AbstractOnDisk(_checks.AbstractStored):
    """Base class of records on disk, which `reader` reads in chunks."""

    @property
    @abc.abstractmethod
    def shapes(self) -> PyTree:
        """The records as shapes, in the dtypes that JAX gives arrays in memory."""

    @abc.abstractmethod
    def chunks(self, n: int, rows: int) -> Reader:
        """Return a function from a chunk's number to its `rows` rows and their mask."""


def shapes_of(records: PyTree) -> PyTree:
    """Return the shapes of records on disk; other records as they are."""
    return records.shapes if isinstance(records, AbstractOnDisk) else records


def reader(
    records: PyTree, mask: Bool[Array, " n"] | None, n: int, rows: int
) -> Reader:
    """Return a function from a chunk's number to its `rows` rows and their mask.

    Args:
        records: Arrays, or `OnDisk`, which is padded to `n` rows.
        mask: Which rows of arrays are records. All when omitted.
        n: The number of rows of a pass.
        rows: The number of rows of a chunk; the last one reaches back to rows that were
            added already, which are marked as such and not read again from disk.
    """
    if isinstance(records, AbstractOnDisk):
        return records.chunks(n, rows)

    def read(number):
        start = jnp.minimum(number * rows, n - rows)
        # Slicing inside the loop reads the records in place; reshaping copies them.
        chunk, keep = jax.tree.map(
            lambda v: jax.lax.dynamic_slice_in_dim(v, start, rows), (records, mask)
        )
        fresh = start + jnp.arange(rows, dtype=number.dtype) >= number * rows
        return chunk, fresh if keep is None else fresh & keep

    return read


Axes = str | tuple[str, ...]  # of a mesh, or of a `jax.vmap`


@dataclasses.dataclass(frozen=True)
class Shards:
    """Division of the records' leading axis into equal parts on devices.

    Attributes:
        count: The number of parts.
        mesh: The mesh of devices that they are spread over; `None` where only the
            compiler will find out, or where there is one part.
        axes: Those of its axes that the rows are spread over, in order.
    """

    count: int = 1
    mesh: Any = None
    axes: tuple[str, ...] = ()

    @property
    def known(self) -> int:
        """Number of parts if a mesh tells it, else 1."""
        return self.count if self.mesh is not None else 1

    @property
    def is_typed(self) -> bool:
        """Whether array types tell the distribution: a mesh has explicit axes."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def traced(self, fun: Callable, record: PyTree) -> tuple[Any, list[Any], PyTree]:
        """Return (jaxpr, closure, value's shapes) of `fun` as each device computes it.

        The variables of the jaxpr are those of the closure, then those of the record.
        """
        context = contextlib.nullcontext()
        mesh = self.mesh
        # Functions of arrays of a mesh are traced in it.
        if self.is_typed:
            abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
            context = jax.sharding.use_abstract_mesh(abstract)
        with context:
            closed, shapes = jax.make_jaxpr(fun, return_shape=True)(record)
        if self.mesh is None:
            return closed.jaxpr, closed.consts, shapes
        variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            local = traced(
                lambda *args: evaluated(closed.jaxpr, args, _local), variables
            )
        return local.jaxpr, [*local.consts, *closed.consts], shapes

    def summed(
        self,
        part: Callable[[PyTree, PyTree, Axes | None], PyTree],
        numbers: PyTree,
        rows: PyTree,
    ) -> PyTree:
        """Return a sum over rows; each device adds up the rows that it has.

        `part` maps numbers, some rows and the axes that other rows are spread over to
        the sum over all of them; no axes if there are no others.
        """
        if self.mesh is not None:

            def on_device(numbers, rows):
                return part(numbers, rows, self.axes or None)

            return self.mapped(on_device, numbers, rows, rows=(False, True), out=P())
        if self.count == 1:
            return part(numbers, rows, None)
        # The compiler leaves every part where it is.
        parts = jax.tree.map(lambda v: v.reshape(self.count, -1, *v.shape[1:]), rows)
        return jax.vmap(
            lambda rows: part(numbers, rows, _PARTS), axis_name=_PARTS, out_axes=None
        )(parts)

    def mapped(self, fun: Callable, *args: PyTree, rows: Sequence[bool], out: P) -> Any:
        """Return `fun` called on each device's part of arguments that `rows` marks."""
        specs = tuple(P(self.axes) if cut else P() for cut in rows)
        if self.is_typed:  # types tell the distribution
            places = [NamedSharding(self.mesh, spec) for spec in specs]
            args = tuple(map(jax.sharding.reshard, args, places))
        mapped = jax.shard_map(
            fun, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False
        )
        return mapped(*args)


def shards_of(records: PyTree) -> Shards:
    """Return the `Shards` of records: number of parts, 1 if not spread; mesh if known.

    The distribution is known from the types of arrays in a mesh of explicit axes, and
    outside of `jax.jit` from the arrays themselves. Elsewhere there are as many parts
    as there may be devices: the number of devices that rows are spread over divides
    both that of the rows and, in a mesh of all devices, that of the devices, so that
    every part of consecutive rows is on one device.
    """
    leaves = jax.tree.leaves(records)
    spread, compiled = Shards(), False  # whether only the compiler knows of some leaf
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            continue
        traced = isinstance(leaf, Tracer)
        sharding: Any = jax.typeof(leaf).sharding if traced else leaf.sharding
        if traced and AxisType.Explicit not in sharding.mesh.axis_types:
            compiled = True
        elif isinstance(sharding, NamedSharding) and sharding.spec:
            mesh, first = sharding.mesh, sharding.spec[0]
            axes = first if isinstance(first, tuple) else (first,)
            axes = tuple(name for name in axes if isinstance(name, str))
            found = Shards(math.prod(mesh.shape[name] for name in axes), mesh, axes)
            larger = spread.mesh is None or found.count > spread.count
            if larger and (found.is_typed or found.count > 1):
                spread = found
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if spread.mesh is None and compiled and not manual:
        return Shards(math.gcd(len(leaves[0]), jax.device_count()))
    return spread


def taken(
    records: PyTree, members: Int[Array, " rows"]
) -> tuple[PyTree, Int[Array, " rows"], Shards]:
    """Return the rows of these numbers, fillers beyond; padded numbers; their `Shards`.

    Spread records give a batch that is spread evenly over the same devices, in the same
    order and filled up with nothing, so that every device has a multiple of 64 rows.
    """
    n = len(jax.tree.leaves(records)[0])
    shards = shards_of(records)
    if shards.mesh is None:  # each device takes all of them where it is not known
        return jax.tree.map(lambda v: _at(v, members), records), members, Shards()
    rows_per_shard = n // shards.count
    rows = -(-len(members) // shards.count)
    rows += -rows % BLOCK
    padding = rows * shards.count - len(members)
    members = jnp.pad(members, (0, padding), constant_values=n)

    def exchange(members, records):
        """Return this device's part of the batch: all devices add up their rows."""
        device = jax.lax.axis_index(shards.axes) if shards.axes else 0
        local = members - device * rows_per_shard
        is_here = (local >= 0) & (local < rows_per_shard)
        local = jnp.where(is_here, local, rows_per_shard)
        present = jax.lax.dynamic_slice_in_dim(members, device * rows, rows) < n

        def move(v):
            found = _bits(v.at[local].get(mode="fill", fill_value=0))
            if shards.axes:
                found = jax.lax.psum_scatter(found, shards.axes, tiled=True)
            column = jnp.expand_dims(present, range(1, v.ndim))
            return jnp.where(column, _from_bits(found, v.dtype), filler(v.dtype))

        return jax.tree.map(move, records)

    batch = shards.mapped(
        exchange, members, records, rows=(False, True), out=P(shards.axes)
    )
    return batch, members, shards


def _local(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return an equation's results as on one device: its sharding is left out."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        inner = params[_CALLS[name]]
        return evaluated(inner.jaxpr, [*inner.consts, *operands], _local)
    if name in _MOVES:
        return operands
    params = {
        k: None if k in _PLACES else retraced(v, _local) for k, v in params.items()
    }
    return bound(eqn, operands, params)


def _at(v: Array, members: Int[Array, " rows"]) -> Array:
    if len(v) == 0:  # an empty axis cannot be indexed
        return jnp.full((len(members), *v.shape[1:]), filler(v.dtype), v.dtype)
    return jnp.asarray(v).at[members].get(mode="fill", fill_value=filler(v.dtype))


def _bits(v: Array) -> Array:
    """Return the bits of entries as integers, whose sums with zero are exact."""
    if v.dtype == jnp.bool_:
        return v.astype(jnp.uint8)
    if jnp.issubdtype(v.dtype, jnp.integer):
        return v
    kind = np.dtype(f"uint{8 * v.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(v, kind)


def _from_bits(bits: Array, dtype: Any) -> Array:
    integers = dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)
    return bits.astype(dtype) if integers else jax.lax.bitcast_convert_type(bits, dtype)
