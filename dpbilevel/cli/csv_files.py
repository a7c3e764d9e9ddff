"""Comma-separated files of records, read line by line."""

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

from .columns import Table

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
MALFORMED = "<malformed row>"  # every cell of such a row: no number and no listed value
_GZIP = b"\x1f\x8b"
# First bytes of files that are no text.
_NOT_TEXT = {
    b"\xff\xfe": "in UTF-16",
    b"\xfe\xff": "in UTF-16",
    b"PK\x03\x04": "a spreadsheet (xlsx, ods) or a zip archive",
    b"\xd0\xcf\x11\xe0": "an Excel workbook (xls)",
    b"ARROW1\0": "an Arrow file",
    b"BZh91AY": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"7z\xbc\xaf": "a 7z archive",
}


def existing(path: Path, what: str, remedy: str) -> Path:
    """Return the path of a file, checked to exist.

    Args:
        path: The file.
        what: Content of the file, in a few words.
        remedy: Advice on how to name another file.

    Raises:
        ValueError: The file does not exist.
    """
    if not path.is_file():
        raise ValueError(f"no file of {what} at {path}. Put it there, or {remedy}.")
    return path


@contextlib.contextmanager
def opened(path: Path) -> Generator[TextIO]:
    """Open a text file in UTF-8, compressed by gzip if its first bytes say so.

    Raises:
        ValueError: The file is no text, or its compression is damaged.

    Privacy:
        Bytes that are no text become the replacement character; none raises.
    """
    with path.open("rb") as raw:
        packed = raw.peek(2).startswith(_GZIP)
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        try:
            first = file.peek(8)
            for mark, what in _NOT_TEXT.items():
                if first.startswith(mark):
                    raise ValueError(f"{path} is {what}; save it as CSV in UTF-8.")
            yield io.TextIOWrapper(file, "utf-8-sig", errors="replace")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path} is compressed by gzip, and damaged or cut off; copy it again."
            ) from error


def _rows(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file that are not empty, the header first."""
    return (line.removesuffix("\n") for line in file if line != "\n")


def read_header(path: Path, separator: str) -> list[str]:
    """Return the names of the columns of a file; read no cell of a record.

    Raises:
        ValueError: There is no header, the file is no text in UTF-8, it has another
            separator, or a name twice.
    """
    with opened(path) as file:
        first = next(_rows(file), None)
    if first is None:
        raise ValueError(f"{path} is empty; it needs a header and one row per record.")
    try:
        cells = next(csv.reader([first], delimiter=separator, strict=True))
    except csv.Error as error:
        what = "a quote does not end in its first row, or a name is too long"
        raise ValueError(f"{path} has no header: {what}.") from error
    names = [cell.strip() for cell in cells]
    other = next((s for s in SEPARATORS if len(names) == 1 and s in names[0]), None)
    if other is not None:
        raise ValueError(
            f"{path} has one column only in its header, and {SEPARATORS[other]} in "
            f"its name; set separator = {json.dumps(other)} in [data]."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{path} names a column twice in its header, the first row.")
    return names


def read_csv(path: Path, separator: str = ",") -> Table:
    """Return the table in a comma-separated file; cells are stripped of spaces.

    Every line below the header that is not empty is a record. All its cells are
    unreadable if it has another number of cells than the header, or an open quote.

    Args:
        path: An existing file, in UTF-8; it may be compressed by gzip.
        separator: Separator of the cells of a row.

    Raises:
        ValueError: As `read_header`.

    Privacy:
        Line by line: a line changes neither the cells of another one nor the number of
        records. No line raises.
    """
    names = read_header(path, separator)
    with opened(path) as file:
        _, *lines = _rows(file)
    rows = [_cells(line, separator, len(names)) for line in lines]
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    table = {name: list(cells) for name, cells in zip(names, columns, strict=True)}
    return Table(str(path), table, len(rows))


def _cells(line: str, separator: str, width: int) -> list[str]:
    """Return the cells of one line; only `MALFORMED` ones if the line is malformed."""
    try:
        (cells,) = csv.reader([line], delimiter=separator, strict=True)
    except csv.Error:
        return [MALFORMED] * width
    if len(cells) != width:
        return [MALFORMED] * width
    return [cell.strip() for cell in cells]
