"""Comma-separated files of records."""

import abc
import csv
import dataclasses
import sys
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from .columns import AbstractRecords, Table
from .sources import Groups, Sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractData(abc.ABC):
    """Where the records of a run come from: the table `[data]` of a config.

    Args:
        training: The number of training records.

    Attributes:
        source: Its name in a config.
        instead: A source that reads a file.
        validation: The number of validation records; none for one level.
        sources: The sources of the training records.
        groups: The groups of the records.
        split_seed: The public seed of the split. Not a privacy seed.
    """

    source: ClassVar[str]
    instead: ClassVar[str] = '"csv"'
    training: int
    # Fields of the classes whose records have them.
    validation: ClassVar[int] = 0
    sources: ClassVar[Sources | None] = None
    groups: ClassVar[Groups | None] = None
    split_seed: ClassVar[int]

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
    """

    path: str = ""

    @override
    def file(self, base: Path, override: Path | None) -> Path:
        if override is None and not self.path:
            raise ValueError(
                "no file of records: set path in [data], or name one with --data PATH."
            )
        return existing(override or base / self.path, "records", "--data")

    @override
    def load(self, file: Path | None) -> AbstractRecords:
        assert file is not None
        return self.encode(read_csv(file))

    @abc.abstractmethod
    def encode(self, table: Table) -> AbstractRecords:
        """The rows of a table as records; raises `ValueError` without a column."""


def existing(path: Path, what: str, flag: str) -> Path:
    """The path of a file that is there.

    Args:
        path: The file.
        what: What it holds, in a few words.
        flag: The option that names another.

    Raises:
        ValueError: It is not there.
    """
    if not path.is_file():
        raise ValueError(
            f"no file of {what} at {path}. Put it there, or name another with "
            f"{flag} PATH."
        )
    return path


def read_csv(path: Path) -> Table:
    """Reads a comma-separated file with a header; cells are stripped of spaces.

    Args:
        path: An existing file, in UTF-8.

    Returns:
        The table. A row that is too short has empty cells at its end.

    Raises:
        ValueError: It has no header.
    """
    limit = csv.field_size_limit(sys.maxsize)  # a long cell must not raise
    try:
        # No byte may raise; spreadsheets begin with a mark of the encoding.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = [row for row in csv.reader(file) if row]  # blank lines are none
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise ValueError(f"{path} is empty; it needs a header and one row per record.")
    header, body = [cell.strip() for cell in rows[0]], rows[1:]
    if len(set(header)) < len(header):
        raise ValueError(
            f"{path} names a column twice in its header, which must be the first row."
        )
    columns = {
        name: [row[j].strip() if j < len(row) else "" for row in body]
        for j, name in enumerate(header)
    }
    return Table(str(path), columns, len(body))
