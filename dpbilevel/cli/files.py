"""Comma-separated files of records."""

import csv
import dataclasses
import sys
from pathlib import Path

from .columns import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvFile:
    """A comma-separated file with a header.

    Args:
        path: The file, relative to the config.
    """

    path: str = ""

    def file(self, base: Path, override: Path | None) -> Path:
        """The file that is read.

        Args:
            base: The folder of the config.
            override: A file to read instead.

        Raises:
            ValueError: There is none.
        """
        if override is None and not self.path:
            raise ValueError(
                "no file of records: set path in [data], or name one with --data PATH."
            )
        path = override or base / self.path
        if not path.is_file():
            raise ValueError(
                f"no file of records at {path}. Put it there, or name another with "
                "--data PATH."
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
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
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


def refuse_file(override: Path | None, source: str, instead: str = '"csv"') -> None:
    """Raises `ValueError` where a file is named for a source that reads none.

    Args:
        override: The file that `--data` names, if any.
        source: The source's name in a config.
        instead: One that reads a file.
    """
    if override is not None:
        raise ValueError(
            f'--data names a file, but the config has source = "{source}", which reads '
            f"none. Leave out --data, or use source = {instead}."
        )
