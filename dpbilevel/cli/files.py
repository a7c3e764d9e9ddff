"""Comma-separated files of records."""

import abc
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import sys
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import ClassVar, Literal, TextIO

import numpy as np
from typing_extensions import override

from ..core.usability import Columns
from .columns import AbstractRecords, Cells, Table
from .sources import Groups, Sources

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_GZIP = b"\x1f\x8b"
_TEXT = "export it as comma-separated text in UTF-8"
_UNPACK = "unpack it, or compress it by gzip"
# First bytes of files that are no text, with the kind of file and advice.
_NOT_TEXT = {
    b"\xff\xfe": ("is in UTF-16", "save it as UTF-8 (in Excel: CSV UTF-8)"),
    b"\xfe\xff": ("is in UTF-16", "save it as UTF-8 (in Excel: CSV UTF-8)"),
    b"PK\x03\x04": ("is a spreadsheet (xlsx, ods) or a zip archive", _TEXT),
    b"\xd0\xcf\x11\xe0": ("is an Excel workbook (xls)", _TEXT),
    b"PAR1\x15": ("is a Parquet file", _TEXT),
    b"ARROW1\0": ("is an Arrow file", _TEXT),
    b"BZh91AY": ("is compressed by bzip2", _UNPACK),
    b"\xfd7zXZ": ("is compressed by xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("is compressed by zstd", _UNPACK),
    b"7z\xbc\xaf": ("is a 7z archive", _UNPACK),
}


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A file of records on which the released model is tested.

    Args:
        path: The file, relative to the config; it has the columns of the features and
            the label.
        accuracy: What protects its people: `"public"`, nothing has to; `"counted"`,
            noise, within the budget of the config, which they spend on nothing else,
            because they are in no other file; `"non_private"`, nothing does, and every
            report says so.
        records: How many records of the file are read; all where it is 0, which
            `"counted"` does not take.
    """

    path: str
    accuracy: Literal["public", "counted", "non_private"]
    records: int = 0

    def __post_init__(self):
        least = 1 if self.accuracy == "counted" else 0
        if self.records < least:
            raise ValueError(
                f'records must be at least {least} where accuracy = "{self.accuracy}", '
                f"got {self.records}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractData(abc.ABC):
    """Source of the records of a run: the table `[data]` of a config.

    Args:
        training: The number of training records.

    Attributes:
        source: Name of the source in a config.
        instead: Name of a source that reads a file.
        validation: The number of validation records; none for one level.
        sources: The sources of the training records.
        groups: The groups of the records.
        test: The file on which the released model is tested.
        split_seed: The public seed of the split. Not a privacy seed.
        checked_columns: The columns and classes that a run checks first; `None` if
            the records are generated.
    """

    source: ClassVar[str]
    instead: ClassVar[str] = '"csv"'
    training: int
    # Fields of the classes whose records have them.
    validation: ClassVar[int] = 0
    sources: ClassVar[Sources | None] = None
    groups: ClassVar[Groups | None] = None
    test: ClassVar[HeldOut | None] = None
    split_seed: ClassVar[int]
    checked_columns: ClassVar[Columns | None] = None

    @property
    @abc.abstractmethod
    def blocks(self) -> tuple[tuple[str, int], ...]:
        """Name and number of features of each block, the constant last."""

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each feature, the constant last; none where there are none."""
        return ()

    @abc.abstractmethod
    def load(self, file: Path | None) -> AbstractRecords:
        """Reads `file`, downloads or generates the records, and encodes them.

        Returns:
            The records. NON-PRIVATE: this is the data.

        Raises:
            ValueError: A column is missing.
            OSError: A file cannot be read or downloaded.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """

    def file(self, base: Path, override: Path | None) -> Path | None:
        """The file to read: one relative to `base`, or what `--data` names; or `None`.

        Raises:
            ValueError: There is none, or one is named for a source that reads none.
        """
        if override is not None:
            raise ValueError(
                f'--data names a file, but the config has source = "{self.source}", '
                f"which reads none. Leave out --data, or use source = {self.instead}."
            )
        return None

    def checked(self, file: Path | None) -> int | None:
        """Checks the header of a file of records; returns its number of rows.

        Returns:
            `None` where the records are in no file.

        Raises:
            ValueError: There is no header, or it lacks a column.

        Privacy:
            Reads no cell. The number of rows may be shown under replace-one only.
        """
        del file
        return None

    def validation_file(self, base: Path, override: Path | None) -> Path | None:
        """The file of validation records, where these have one of their own.

        Raises:
            ValueError: `--validation` names one for a source that reads none.
        """
        if override is not None:
            raise ValueError(
                f"--validation names a file, but the config has source = "
                f'"{self.source}", which takes validation records from the others. '
                'Leave it out, or use source = "csv".'
            )
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvFile(AbstractData):
    """A comma-separated file with a header.

    Args:
        path: The file, relative to the config.
        separator: What is between two cells of a row.
    """

    path: str = ""
    separator: Literal[",", ";", "\t"] = ","

    @override
    def file(self, base: Path, override: Path | None) -> Path:
        if override is None and not self.path:
            raise ValueError(
                "no file of records: set path in [data], or name one with --data PATH."
            )
        file = override or base / self.path
        return existing(file, "records", "name another with --data PATH")

    @override
    def load(self, file: Path | None) -> AbstractRecords:
        assert file is not None
        return self.encode(read_csv(file, self.separator))

    @override
    def checked(self, file: Path | None) -> int:
        assert file is not None
        names = read_header(file, self.separator)
        self.encode(Table(str(file), dict.fromkeys(names, ()), 0))  # of no row
        with contextlib.closing(_rows(file, self.separator)) as rows:
            return sum(1 for _ in rows) - 1

    @abc.abstractmethod
    def encode(self, table: Table) -> AbstractRecords:
        """The rows of a table as records; raises `ValueError` without a column."""

    @abc.abstractmethod
    def cell_marks(self, table: Table) -> dict[str, np.ndarray]:
        """Return the marks of the cells of each checked column.

        Privacy:
            NON-PRIVATE, row by row.
        """


def existing(path: Path, what: str, remedy: str) -> Path:
    """The path of a file that is there.

    Args:
        path: The file.
        what: What it holds, in a few words.
        remedy: How to name another.

    Raises:
        ValueError: It is not there.
    """
    if not path.is_file():
        raise ValueError(f"no file of {what} at {path}. Put it there, or {remedy}.")
    return path


def read_header(path: Path, separator: str) -> list[str]:
    """Return the names of the columns of a file; read no cell of a record.

    Raises:
        ValueError: There is no header, the file is no text in UTF-8, it has another
            separator, or a name twice.
    """
    with contextlib.closing(_rows(path, separator)) as rows:
        header = [cell.strip() for cell in next(rows, [])]
    if not header:
        raise ValueError(f"{path} is empty; it needs a header and one row per record.")
    other = next((s for s in SEPARATORS if len(header) == 1 and s in header[0]), None)
    if other is not None:
        own = SEPARATORS.get(separator, repr(separator))
        raise ValueError(
            f"{path} has one column only in its header, which is the first row, and "
            f"{SEPARATORS[other]} in its name. If they are between the columns of all "
            f"files of the config, set separator = {json.dumps(other)} in [data]. If "
            f"other files have {own} there, save this one like them."
        )
    if len(set(header)) < len(header):
        raise ValueError(
            f"{path} names a column twice in its header, which must be the first row."
        )
    return header


def read_csv(path: Path, separator: str = ",") -> Table:
    """Return the table in a comma-separated file; cells are stripped of spaces.

    Args:
        path: An existing file, in UTF-8; it may be compressed by gzip.
        separator: What is between two cells of a row.

    Returns:
        The table. A row that is too short has empty cells at its end.

    Raises:
        ValueError: As `read_header`.
    """
    header = read_header(path, separator)
    body = list(_rows(path, separator))[1:]
    columns: dict[str, Cells] = {
        name: [row[j].strip() if j < len(row) else "" for row in body]
        for j, name in enumerate(header)
    }
    return Table(str(path), columns, len(body))


@contextlib.contextmanager
def opened(path: Path) -> Generator[TextIO]:
    """Open a text file, compressed by gzip or not, by its first bytes.

    Raises:
        ValueError: The file is no text, or its compression is damaged.
    """
    with path.open("rb") as raw:
        packed = raw.peek(2).startswith(_GZIP)
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        try:
            first = file.peek(8)
            for mark, (what, remedy) in _NOT_TEXT.items():
                if first.startswith(mark):
                    raise ValueError(f"{path} {what}; {remedy}.")
            # No byte may raise an error; spreadsheets begin with a byte-order mark.
            yield io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path} is compressed by gzip, and damaged or cut off; copy it again."
            ) from error


def _rows(path: Path, separator: str) -> Generator[list[str]]:
    """The rows of a file, the header first; blank lines are none."""
    limit = csv.field_size_limit(sys.maxsize)  # a long cell must not raise
    try:
        with opened(path) as file:
            yield from (row for row in csv.reader(file, delimiter=separator) if row)
    finally:
        csv.field_size_limit(limit)
