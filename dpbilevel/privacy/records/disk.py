"""Records on disk, which clipped means read in chunks of a public size."""

import concurrent.futures
import dataclasses
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree
from typing_extensions import override

from ... import _checks
from .people import PersonRows, PersonStore
from .rows import AbstractOnDisk, Reader, Shards, filler
from .rows import taken as taken_in_memory
from .stores import AbstractStore, ArrayStore, Columns, Fill, ParquetStore, Paths

Progress = Callable[[int, int], None]
Chunk = tuple[list[np.ndarray], np.ndarray]  # the same on the host
_MOST_PASSES = 4  # at a time, by one compiled program
_END = 2**16  # bytes at either end of files that are compared first


class OnDisk(AbstractOnDisk):
    """Records on disk; make them by `OnDisk.parquet(...)` or `OnDisk.arrays(...)`.

    Every pass reads them, for data larger than memory. Pass them in place of records:
    `fit(problem, solver, OnDisk.parquet(...), w0, ...)`, `Levels(upper=...,
    lower=OnDisk.parquet(...))`, `solve`, `clipped_mean`. Every sampling scheme draws
    from them: a random batch reads its own rows of arrays, and all of a Parquet file. A
    pass reads chunks of a public number of rows in their order, the next one
    while one is worked on; no more than a few chunks are in memory, of about 32 MiB on
    a CPU. `OnDisk.parquet` and `OnDisk.arrays` read shapes, and whether there are nulls
    or copies of a file.

    Attributes:
        guard: An array without axes, so that functions of rows of arrays fail.
        rows: The number of rows that a pass runs over. Public. Static.
        store: Storage of the records. Static.
        structure: Pytree structure of the records. Static.
        progress: Function that is called in every pass. Static.

    Privacy:
        The releases are those of the same records in memory, on the grid bit for bit
        with the exceptions of docs/out_of_core.md. Errors, and what `progress` is
        called with, depend on files and sizes, not on the values of records. It is not
        protected whether a column has nulls, or whether two Parquet files are copies:
        both are refused. The duration of a pass is covered by no guarantee.
    """

    guard: Bool[Array | np.ndarray, ""]
    rows: int = eqx.field(static=True)
    store: AbstractStore = eqx.field(static=True)
    structure: Any = eqx.field(static=True)
    progress: Progress | None = eqx.field(static=True, default=None)

    def __init__(self, *arguments: Any, **fields: Any):
        """Set the fields in their order; for `OnDisk.parquet` and `OnDisk.arrays`."""
        names = [field.name for field in dataclasses.fields(self)]
        found = dict(zip(names, arguments, strict=False)) | fields
        if not isinstance(found.get("store"), AbstractStore):
            raise TypeError("OnDisk: call OnDisk.parquet or OnDisk.arrays.")
        for name, value in found.items():
            setattr(self, name, value)

    @classmethod
    def arrays(cls, records: PyTree, *, progress: Progress | None = None) -> Self:
        """Make `OnDisk` records of NumPy arrays that are mapped from files.

        Args:
            records: A pytree of NumPy arrays that share their leading axis, such as
                those of `numpy.load(path, mmap_mode="r")`. They must not change.
            progress: Called with the rows read so far and all rows, in every pass.

        Raises:
            OSError: A file is missing.
            TypeError: A leaf is no NumPy array, or progress is no function.
            ValueError: Leading axes differ, or an array is not numeric.
        """
        found, structure = jax.tree_util.tree_flatten_with_path(records)
        for path, leaf in found:
            if not isinstance(leaf, np.ndarray):
                raise TypeError(
                    f"OnDisk.arrays: records{jax.tree_util.keystr(path)} must be a "
                    'NumPy array, such as numpy.load(path, mmap_mode="r").'
                )
        _checks.leading_axis("OnDisk.arrays: records", records)
        return cls._of(ArrayStore([leaf for _, leaf in found]), structure, progress)

    @classmethod
    def parquet(
        cls, paths: Paths, columns: Columns, *, progress: Progress | None = None
    ) -> Self:
        """Make `OnDisk` records of the rows of Parquet files; needs pyarrow.

        Args:
            paths: A file, or several whose rows follow each other.
            columns: The parts of a record: a column for a number, a list of columns for
                a vector, as in `{"features": ["age", "income"], "label": "paid"}`. They
                hold numbers or truth values; a vector has their common dtype.
            progress: Called with the rows read so far and all rows, in every pass.

        Returns:
            Records that are dictionaries with the keys of `columns`.

        Raises:
            ImportError: pyarrow is missing.
            OSError: A file is missing, or no Parquet file.
            TypeError: Columns are not given by names, or progress is no function.
            ValueError: A column is missing, is not numeric, has nulls, or has another
                type in another file; a file or a copy of it is given twice.
        """
        if not isinstance(columns, Mapping):
            got = _checks.shown(columns)
            such = '{"features": ["age", "income"], "label": "paid"}'
            raise TypeError(f"OnDisk.parquet: columns must be like {such}, got {got}.")
        store = ParquetStore(paths, dict(sorted(columns.items())))
        for first, second, *_ in copies(store.tables):
            raise ValueError(
                f"OnDisk: {first} and {second} have the same bytes; drop or merge them."
            )
        structure = jax.tree.structure(dict.fromkeys(columns, 0))
        return cls._of(store, structure, progress)

    @classmethod
    def _of(cls, store: AbstractStore, structure: Any, progress) -> Self:
        if progress is not None:
            _checks.function("OnDisk", progress=progress)
        return cls(np.asarray(True), store.count, store, structure, progress)

    def by_person(self, ids: Any, *, most_rows: int = 8) -> Self:
        """Return these rows grouped by person, each of at most `most_rows`.

        Args:
            ids: The id of the person of each row, in memory, as for `by_person`. The
                rows of a person must follow each other.
            most_rows: The number of rows of a person that count, at most.

        Raises:
            ValueError: The rows of a person do not follow each other, the number of ids
                is another one, or `most_rows` is below 1.

        Privacy:
            As `by_person`. Declared unprotected: that the rows of some person do not
            follow each other. A chunk takes memory for all rows of its people.
        """
        _checks.count("OnDisk.by_person", most_rows=most_rows)
        store = PersonStore(self.store, ids, most_rows)
        rows = jax.tree.unflatten(self.structure, [0] * len(self.store.kinds))
        structure = jax.tree.structure(PersonRows(rows, np.zeros((0, 0), bool)))
        return dataclasses.replace(
            self, rows=store.count, store=store, structure=structure
        )

    def __repr__(self) -> str:
        shapes = eqx.tree_pformat(self._shapes(self.store.count))
        files = ", ".join(map(str, self.store.files)) or "arrays in memory"
        return f"OnDisk({shapes}, in {files})"

    @property
    @override
    def shapes(self) -> PyTree:
        return self._shapes(self.rows)

    @override
    def chunks(self, n: int, rows: int) -> Reader:
        self.store.check()
        leaves = jax.tree.leaves(self._shapes(rows))
        chunks = _Chunks(self.store, leaves, n, self.progress)
        keep = jax.ShapeDtypeStruct((rows,), bool)

        def read(number):
            # The rows are a function of the number alone: the compiler may read a chunk
            # again or not at all, and nothing needs an order, which `vmap` would refuse
            # of an `io_callback`.
            values, fresh = jax.pure_callback(
                chunks, (leaves, keep), number, vmap_method="sequential"
            )
            return jax.tree.unflatten(self.structure, values), fresh

        return read

    def padded(self, rows: int) -> Self:
        """Return the `OnDisk` records followed by filler rows, `rows` in all."""
        return dataclasses.replace(self, rows=rows)

    def _shapes(self, rows: int) -> PyTree:
        shapes = [
            jax.ShapeDtypeStruct((rows, *shape), jax.dtypes.canonicalize_dtype(dtype))
            for shape, dtype in self.store.kinds
        ]
        return jax.tree.unflatten(self.structure, shapes)


def taken(
    records: PyTree, present: Bool[Array, " n"] | None, members: Int[Array, " rows"]
) -> tuple[PyTree, Int[Array, " rows"], Bool[Array, " rows"], Shards]:
    """Return (rows of these numbers, on disk or in memory; numbers; mask; `Shards`).

    Of arrays, `present` says which rows are records; all when omitted.

    Returns:
        The rows, their numbers, which of them are records, and their `Shards`.

    Privacy:
        The rows that are read from disk are a function of `members` alone.
    """
    if not isinstance(records, OnDisk):
        n = len(jax.tree.leaves(records)[0])
        batch, members, shards = taken_in_memory(records, members)
        mask = members < n
        if present is not None:
            mask &= present.at[members].get(mode="fill", fill_value=False)
        return batch, members, mask, shards
    store = records.store
    store.check()
    leaves = jax.tree.leaves(records._shapes(len(members)))
    keep = jax.ShapeDtypeStruct(members.shape, bool)

    def read(numbers: Any) -> Chunk:
        store.check()
        numbers = np.asarray(numbers)
        known = numbers < store.count
        order = np.argsort(numbers, kind="stable")[: np.count_nonzero(known)]
        rows = [np.empty((len(order), *v.shape[1:]), v.dtype) for v in leaves]
        store.take(numbers[order], rows)
        found = [np.full(v.shape, filler(v.dtype), v.dtype) for v in leaves]
        for leaf, values in zip(found, rows, strict=True):
            leaf[order] = values
        return found, known

    # The rows are a function of the argument alone, like those of chunks.
    values, mask = jax.pure_callback(
        read, (leaves, keep), members, vmap_method="sequential"
    )
    return jax.tree.unflatten(records.structure, values), members, mask, Shards()


class _Chunks:
    """A reader of chunks by number, which reads the next chunk in the background.

    Any order gives the same rows; a pass in order reads every row once.
    """

    def __init__(
        self,
        store: AbstractStore,
        shapes: list[jax.ShapeDtypeStruct],
        total: int,
        progress: Progress | None,
    ):
        self._store, self._shapes, self._progress = store, shapes, progress
        self._total, self._rows = total, shapes[0].shape[0]
        self._count = -(-total // self._rows)
        self._lock = threading.Lock()
        # The number of the next chunk of each pass, the chunk, and what reads on.
        self._ahead: list[tuple[int, concurrent.futures.Future, Fill]] = []

    def __call__(self, number: Any) -> Chunk:
        number = int(number)
        if number == 0:
            self._store.check()
        chunk, fill = self._begun(number)
        try:
            result = chunk.result()
        except Exception as error:  # JAX shows the traceback: where it began is enough
            raise error.with_traceback(None) from None
        if number + 1 < self._count:
            with self._lock:
                later = _soon(self._read, number + 1, fill)
                self._ahead.append((number + 1, later, fill))
                del self._ahead[:-_MOST_PASSES]  # left by passes that were stopped
        if self._progress is not None:
            self._progress(min((number + 1) * self._rows, self._total), self._total)
        return result

    def _begun(self, number: int) -> tuple[concurrent.futures.Future, Fill]:
        with self._lock:
            for i, (ahead, chunk, fill) in enumerate(self._ahead):
                if ahead == number:
                    del self._ahead[i]
                    return chunk, fill
        fill = self._store.reader(number * self._rows)
        return _soon(self._read, number, fill), fill

    def _read(self, number: int, fill: Fill) -> Chunk:
        begin = number * self._rows
        # Index in the chunk at which its new rows begin, and number of its records.
        place = begin - min(begin, self._total - self._rows)
        records = min(self._rows - place, max(0, self._store.count - begin))
        stop = place + records
        leaves = [np.empty(v.shape, v.dtype, self._store.order) for v in self._shapes]
        for leaf in leaves:
            leaf[:place] = leaf[stop:] = filler(leaf.dtype)
        if records:
            fill([leaf[place:stop] for leaf in leaves])
        numbers = np.arange(self._rows)
        return leaves, (numbers >= place) & (numbers < stop)


def _soon(fun: Callable[..., Chunk], *arguments: Any) -> concurrent.futures.Future:
    """Run a function in a new thread; return its `Future`."""
    pool = concurrent.futures.ThreadPoolExecutor(1, "dpbilevel-disk")
    try:
        return pool.submit(fun, *arguments)
    finally:
        pool.shutdown(wait=False)


def copies(files: Iterable[Path]) -> list[list[Path]]:
    """Return a list of groups of two or more files that have the same bytes.

    A file is read to its end only if another one has the same size and the same bytes
    at both ends.

    Privacy:
        Reads the records, so an error that tells of a copy is not protected.
    """
    groups = [[file for file in files if file.is_file()]]  # pipes are left out
    for read in (os.path.getsize, _ends, _digest):
        found = defaultdict(list)
        for i, group in enumerate(groups):
            for file in group:
                found[i, read(file)].append(file)
        groups = [group for group in found.values() if len(group) > 1]
    return groups


def _ends(file: Path) -> bytes:
    with file.open("rb") as opened:
        first = opened.read(_END)
        opened.seek(-min(_END, os.fstat(opened.fileno()).st_size), os.SEEK_END)
        return hashlib.sha256(first + opened.read(_END)).digest()


def _digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()
