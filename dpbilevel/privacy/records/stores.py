"""Storage of records on disk: NumPy arrays, Parquet files."""

import abc
import contextlib
import functools
import hashlib
import importlib
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from ... import _checks
from ..._extras import missing

_PART = 2048  # rows that are converted at once, so that they stay in a cache
_BATCH = 2**15  # rows of Parquet files that are decoded at once
_BUFFER = 2**18  # bytes of a column that are read at once
# Fills rows of the leaves of records with the records that come next.
Fill = Callable[[list[np.ndarray]], None]
Paths = str | os.PathLike | Sequence[str | os.PathLike]
Columns = Mapping[str, str | Sequence[str]]


class AbstractStore(abc.ABC):
    """Storage of records; every read returns the same records.

    Attributes:
        count: Number of records.
        kinds: For each leaf of the records, the shape of one record and the dtype.
        files: Files that hold the records.
        tables: The files that hold whole records, at least one in each.
        arrays: Arrays that hold the records, if any.
        order: The order of the entries of arrays that are fast to fill, `"C"` or `"F"`.
    """

    count: int
    kinds: list[tuple[tuple[int, ...], np.dtype]]
    files: list[Path]
    tables: Sequence[Path] = ()
    arrays: Sequence[np.ndarray] = ()
    order: Literal["C", "F"]

    def __init__(self, files: list[Path]):
        self.files = [path.resolve() for path in files]
        self._states = {path: _state(path) for path in self.files}

    @property
    def identities(self) -> list[tuple[int, ...]]:
        """List of (device, inode) of each file, the same under all its names."""
        return [state[:2] for state in self._states.values()]

    @abc.abstractmethod
    def reader(self, start: int) -> Fill:
        """Return a function that fills arrays with the next records from `start` on."""

    def take(self, numbers: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Fill arrays `leaves` with records of these numbers, which do not decrease.

        Blocks of rows that hold none of them are not read.
        """
        fill = None
        for first in range(0, self.count, _BATCH):
            rows = min(_BATCH, self.count - first)
            begin, end = np.searchsorted(numbers, (first, first + rows))
            if begin == end:
                fill = None
                continue
            fill = fill or self.reader(first)
            part = [np.empty((rows, *v), kind, self.order) for v, kind in self.kinds]
            fill(part)
            for leaf, values in zip(leaves, part, strict=True):
                _converted(values[numbers[begin:end] - first], leaf[begin:end])

    @functools.cached_property
    def digest(self) -> bytes:
        """SECRET hash of all records, by SHA-256; raises `OSError` as `check` does."""
        found, fill = hashlib.sha256(), self.reader(0)
        for first in range(0, self.count, _PART):
            rows = min(_PART, self.count - first)
            part = [np.empty((rows, *v), kind, self.order) for v, kind in self.kinds]
            fill(part)
            for leaf in part:
                found.update(leaf.tobytes())
        self.check()
        return found.digest()

    def check(self) -> None:
        """Raise `OSError` if a file is missing or has changed."""
        for path, state in self._states.items():
            if _state(path) != state:
                raise OSError(f"OnDisk: {path} has changed; make a new OnDisk.")


class ArrayStore(AbstractStore):
    """Records in NumPy arrays that share their leading axis."""

    order = "C"

    def __init__(self, leaves: list[np.ndarray]):
        maps = [leaf for leaf in leaves if isinstance(leaf, np.memmap)]
        super().__init__([Path(v.filename) for v in maps if v.filename is not None])
        self.count = len(leaves[0])
        self.kinds = [(v.shape[1:], v.dtype.newbyteorder("=")) for v in leaves]
        self.arrays = leaves

    @override
    def reader(self, start: int) -> Fill:
        place = start

        def fill(leaves: list[np.ndarray]) -> None:
            nonlocal place
            for array, rows in zip(self.arrays, leaves, strict=True):
                _read(array, place, rows)
            place += len(leaves[0])

        return fill

    @override
    def take(self, numbers, leaves):
        """Fill arrays `leaves` with records of these numbers; no other row is read."""
        for array, rows in zip(self.arrays, leaves, strict=True):
            found = _file_of(array)
            if found is None:
                _converted(array[numbers], rows)
                continue
            with _opening(found[0]), open(found[0], "rb", buffering=0) as file:
                part = np.empty(rows.shape, array.dtype)
                for i, number in enumerate(numbers.tolist()):
                    file.seek(found[1] + number * math.prod(array.strides[:1]))
                    _filled(file, part[i : i + 1])
            _converted(part, rows)


def _read(array: np.ndarray, first: int, rows: np.ndarray) -> None:
    """Fill `rows` with an array's rows from `first` on; if mapped, from its file.

    Pages of a mapping stay in the memory of the process, and one of a file that was cut
    short ends it.
    """
    found = _file_of(array)
    if found is None:
        return _converted(array[first : first + len(rows)], rows)
    path, offset = found
    with _opening(path), open(path, "rb", buffering=0) as file:
        file.seek(offset + first * math.prod(array.shape[1:]) * array.itemsize)
        if array.dtype == rows.dtype:
            return _filled(file, rows)
        for begin in range(0, len(rows), _PART):
            some = rows[begin : begin + _PART]
            part = np.empty(some.shape, array.dtype)
            _filled(file, part)
            _converted(part, some)


def _file_of(array: np.ndarray) -> tuple[str, int] | None:
    """Return file and offset of an array that is a whole mapped file; `None` if not."""
    if not isinstance(array, np.memmap) or not isinstance(array.base, mmap.mmap):
        return None  # an array in memory, or a part of a mapped one
    written = array.mode != "c"  # which keeps changes to itself
    if array.filename is None or not array.flags.c_contiguous or not written:
        return None
    return array.filename, array.offset


def _filled(file: Any, rows: np.ndarray) -> None:
    """Fill an array with bytes of a file; raise `OSError` if the file is too short."""
    left = rows.reshape(-1).view(np.uint8).data
    while len(left):
        count = file.readinto(left)
        if not count:
            raise OSError(f"OnDisk: {file.name} ends before its last record.")
        left = left[count:]


def _converted(values: np.ndarray, rows: np.ndarray) -> None:
    with np.errstate(all="ignore"):  # a warning would tell something about a value
        np.copyto(rows, values, casting="unsafe")


class ParquetStore(AbstractStore):
    """Records in the rows of Parquet files, one file after the other.

    The arguments, and what is refused, are those of `OnDisk.parquet`; `columns` are
    those of each leaf.
    """

    order = "F"  # as columns are stored

    def __init__(self, paths: Paths, columns: Columns):
        parquet = _arrow("parquet")
        one = isinstance(paths, str | os.PathLike)
        files = [Path(path) for path in ([paths] if one else paths)]
        if not files or not columns:
            raise ValueError("OnDisk.parquet: give at least one file and one column.")
        for key, names in columns.items():
            listed = _listed(names)
            known = isinstance(listed, list | tuple) and len(listed) > 0
            if not known or not all(isinstance(name, str) for name in listed):
                raise TypeError(
                    f"OnDisk.parquet: columns[{key!r}] must be a name or a list of "
                    f"names, got {_checks.shown(names)}."
                )
        super().__init__(files)
        if len(set(self.identities)) < len(files):
            given = ", ".join(map(str, files))
            raise ValueError(f"OnDisk.parquet: a file is given twice: {given}.")
        self._columns = [_listed(names) for names in columns.values()]
        self._groups: list[list[int]] = []  # rows of each row group of each file
        for path in files:
            with _reading(path), parquet.ParquetFile(path) as file:
                about, schema = file.metadata, file.schema_arrow
                groups = range(about.num_row_groups)
                self._groups.append([about.row_group(i).num_rows for i in groups])
            kinds = [_kind(path, schema, names) for names in columns.values()]
            if path is files[0]:
                self.kinds = kinds
            if kinds != self.kinds:
                raise ValueError(f"OnDisk: {path} has other types than {files[0]}.")
            _check_nulls(path, about, self._wanted)
        sizes = [sum(groups) for groups in self._groups]
        self.count = sum(sizes)
        pairs = zip(self.files, sizes, strict=True)
        self.tables = [path for path, rows in pairs if rows]

    @override
    def reader(self, start: int) -> Fill:
        batches, rest = self._batches(start), None

        def fill(leaves: list[np.ndarray]) -> None:
            nonlocal rest
            place, stop = 0, len(leaves[0])
            while place < stop:
                batch = next(batches, None) if rest is None else rest
                if batch is None:
                    raise OSError(f"OnDisk: {self.files[-1]} ends before its records.")
                used = batch.slice(0, stop - place)
                rest = None if len(used) == len(batch) else batch.slice(len(used))
                self._copy(used, leaves, slice(place, place + len(used)))
                place += len(used)

        return fill

    def _batches(self, start: int) -> Iterator[Any]:
        for path, sizes in zip(self.files, self._groups, strict=True):
            if start >= sum(sizes):
                start -= sum(sizes)
                continue
            first = 0
            while start >= sizes[first]:
                start -= sizes[first]
                first += 1
            for batch in _decoded(path, range(first, len(sizes)), self._wanted):
                if start < len(batch):
                    yield batch.slice(start)
                start = max(0, start - len(batch))

    @property
    def _wanted(self) -> list[str]:
        """List of the names of all Parquet columns that are read, each once."""
        return list(dict.fromkeys(name for names in self._columns for name in names))

    def _copy(self, batch: Any, leaves: list[np.ndarray], rows: slice) -> None:
        for names, leaf in zip(self._columns, leaves, strict=True):
            table = leaf.reshape(len(leaf), len(names), order="F")
            for j, name in enumerate(names):
                values = batch.column(name).to_numpy(zero_copy_only=False)
                _converted(values, table[rows, j])


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _kind(path: Path, schema: Any, names: str | Sequence[str]):
    """Return the shape and dtype of one leaf of a record, by its Parquet columns."""
    types, dtypes = _arrow("types"), []
    for name in _listed(names):
        place = schema.get_field_index(name)
        if place < 0:
            found = "has several columns" if name in schema.names else "has no column"
            raise ValueError(
                f"OnDisk: {path} {found} {name!r}; it has {schema.names[:20]}."
            )
        kind = schema.field(place).type
        tests = types.is_integer, types.is_floating, types.is_boolean
        if not any(test(kind) for test in tests):
            raise ValueError(f"OnDisk: column {name!r} of {path} is {kind}, no number.")
        dtypes.append(np.dtype(kind.to_pandas_dtype()))
    shape = () if isinstance(names, str) else (len(names),)
    return shape, np.result_type(*dtypes)


def _check_nulls(path: Path, about: Any, columns: list[str]) -> None:
    """Raise `ValueError` if a column has nulls, by file statistics or by reading it."""
    places = {about.schema.column(j).path: j for j in range(about.num_columns)}
    for name in columns:
        parts = [about.row_group(i) for i in range(about.num_row_groups)]
        known = [part.column(places[name]).statistics for part in parts]
        if all(v is not None and v.has_null_count for v in known):
            found = any(v.null_count for v in known)
        else:
            batches = _decoded(path, range(len(parts)), [name])
            found = any(batch.column(0).null_count for batch in batches)
        if found:
            raise ValueError(f"OnDisk: column {name!r} of {path} has nulls; write NaN.")


def _decoded(path: Path, groups: range, columns: list[str]) -> Iterator[Any]:
    """Yield pyarrow batches of the rows of some row groups."""
    parquet = _arrow("parquet")
    with contextlib.ExitStack() as end:
        with _reading(path):
            file = parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            batches = end.enter_context(file).iter_batches(
                _BATCH, row_groups=list(groups), columns=columns
            )
        while True:
            with _reading(path):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def _arrow(name: str) -> Any:
    """Import a module of pyarrow, which is an optional dependency."""
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        what = missing("OnDisk.parquet", "pyarrow", extra="parquet")
        raise ImportError(what) from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Replace errors in the context by an `OSError` that names the file alone."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"OnDisk: {path} is damaged or no Parquet file ({type(error).__name__})."
        ) from None


@contextlib.contextmanager
def _opening(path: str | os.PathLike) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # one of ours
            raise
        raise OSError(f"OnDisk: cannot read {path}: {error.strerror}.") from None


def _state(path: Path) -> tuple[int, ...]:
    """Return a tuple of integers that changes with a file: identity, size and times.

    Only the inode change time cannot be set back by a program: after a rewrite
    `os.utime` can restore the modification time.
    """
    with _opening(path):
        about = path.stat()
    times = about.st_mtime_ns, about.st_ctime_ns
    return about.st_dev, about.st_ino, about.st_size, *times
