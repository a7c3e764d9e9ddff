"""Files of records as tables of texts, and such texts read as numbers or dates."""

import contextlib
import csv
import dataclasses
import datetime
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .._checks import did_you_mean
from .._extras import check_installed

Cells = Sequence[str]
_DAY = datetime.timedelta(days=1)
_DATE_FORMATS = "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d"


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as text, by column."""

    name: str  # for error messages
    columns: Mapping[str, Cells]  # all of the same length
    rows: int

    def __repr__(self) -> str:
        """Return the table's name; never its cells."""
        return f"Table({self.name!r})"

    def column(self, name: str) -> Cells:
        """Return the cells of one column; raise `ValueError` if there is none."""
        if name not in self.columns:
            # The message lists no columns: if the header is missing, they are a record.
            raise ValueError(
                f"{self.name} has no column {name!r}. Correct [data] or the header "
                "row; dpbilevel check shows names that are close."
            )
        return self.columns[name]


def check_unit(unit: str) -> None:
    """Raise `ValueError` for a unit with digits before its end, or of signs alone."""
    if unit and not re.fullmatch(r"\D*[^\d\s+.,'’_-](\D*|\d)", unit):
        raise ValueError(
            f'unit must be a text without digits, such as "€" or "kg", or with one at '
            f'its end, such as "m2", got {unit!r}.'
        )


def reader(unit: str, decimal: str) -> Callable[[str], float]:
    """Return a function that reads a cell as a number, or as NaN if it is no number.

    If unit and decimal sign are empty, the form is that which programs write.
    """
    if not unit and not decimal:
        return number
    point, comma = (",", ".") if decimal == "," else (".", ",")
    name = rf"(?:{re.escape(unit.strip())})?"
    before = "" if unit[-1:].isdigit() else name  # else it is a part of the number
    groups = rf"[0-9]{{1,3}}(?:(?P<gap>[{comma}\s'’])[0-9]{{3}})(?:(?P=gap)[0-9]{{3}})*"
    pattern = re.compile(
        rf"([+-]?)\s*{before}\s*([+-]?)(?P<whole>{groups}|[0-9]*)"
        rf"(?:[{point}](?P<part>[0-9]*))?\s*{name}"
    )

    def read(cell: str) -> float:
        found = pattern.fullmatch(cell)
        if found is None or (found[1] and found[2]):
            return np.nan
        whole = re.sub("[^0-9]", "", found["whole"])
        return number(f"{found[1]}{found[2]}{whole}.{found['part'] or ''}")

    return read


def number(cell: str) -> float:
    """Return the number that a cell holds in the form that programs write, or NaN."""
    try:
        return float(cell)
    except ValueError:
        return np.nan


def date_reader(origin: str, form: str) -> Callable[[str], float]:
    """Return a function that reads a cell as a date: days since `origin`, or NaN.

    The format is as of `strptime`, empty for ISO 8601. A `ValueError` says that the
    origin is no date, or that the format cannot be read.
    """
    day = datetime.datetime
    first = day.fromisoformat(origin)
    if form and "%y" not in form.lower():
        raise ValueError(f"date_format = {form!r} has no year, %Y.")

    def read(cell: str) -> float:
        try:
            found = day.strptime(cell, form) if form else day.fromisoformat(cell)
            return (found.replace(tzinfo=None) - first) / _DAY
        except (ValueError, OverflowError):
            return np.nan

    if np.isnan(read(first.strftime(form) if form else origin)):
        raise ValueError(f"cannot read dates by date_format = {form!r}.")
    return read


def declaration_for(cell: str) -> str:
    """Return keys of a config by which a cell would be a number or a date, or "".

    Privacy:
        NON-PRIVATE: for the curator, who sees the cell.
    """
    for form in ("", *_DATE_FORMATS):
        if not np.isnan(date_reader("2000-01-01", form)(cell)):
            shown = f" and date_format = {form!r}" if form else ""
            return f'transform = "date"{shown}'
    found = re.fullmatch(r"[+-]?\s*(\D*?)\s*[+-]?([0-9][0-9.,'’\s]*)(\D*\d?)", cell)
    if found is None:
        return ""
    unit = found[1].strip(" +-") or found[3].strip()
    decimal = "," if re.search(r",\d{1,2}$|,\d{4,}$|\..*,", found[2].strip()) else ""
    keys = {"unit": unit, "decimal": decimal or ("" if unit else ".")}
    with contextlib.suppress(ValueError):
        check_unit(unit)
        if not np.isnan(reader(unit, keys["decimal"])(cell)):
            return " and ".join(f'{k} = "{v}"' for k, v in keys.items() if v)
    return ""


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
    """Return the path of a file; raise `ValueError` if it does not exist."""
    if not path.is_file():
        raise ValueError(f"no file of {what} at {path}. Put it there, or {remedy}.")
    return path


def similar(path: Path, kind: Callable[[Path], bool]) -> str:
    """Return a hint at a path of this kind with a similar name in the same folder.

    Privacy:
        For configs and results; the name of a file of records may name a person.
    """
    found = [] if path.exists() else filter(kind, path.parent.glob("*"))
    return did_you_mean(path.name, [other.name for other in found])


@contextlib.contextmanager
def opened(path: Path) -> Generator[TextIO]:
    """Open a text file in UTF-8, compressed by gzip if its first bytes say so.

    A `ValueError` says that the file is no text, or that its compression is damaged.

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


def read_header(path: Path, separator: str) -> list[str]:
    """Return a list of the names of a file's columns; read no cell of a record.

    A `ValueError` says that there is no header, that the file is no text in UTF-8, or
    that it has another separator, or a name twice.
    """
    with opened(path) as file:
        first = next((line for line in file if line != "\n"), None)
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
            f"its name; set separator = {json.dumps(other)} in [data], or save it with "
            f"{SEPARATORS[separator]}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{path} names a column twice in its header, the first row.")
    return names


def read_csv(path: Path, separator: str = ",") -> Table:
    """Return the table in a comma-separated file; cells are stripped of spaces.

    Every line below the header that is not empty is a record. All its cells are
    unreadable if it has another number of cells than the header, or an open quote.
    Errors are those of `read_header`.

    Privacy:
        Line by line: a line changes neither the cells of another one nor the number of
        records. No line raises.
    """
    names = read_header(path, separator)
    with opened(path) as file:
        _, *lines = (line.removesuffix("\n") for line in file if line != "\n")
    rows, malformed = [], [MALFORMED] * len(names)
    for line in lines:
        try:
            (cells,) = csv.reader([line], delimiter=separator, strict=True)
        except csv.Error:
            cells = ()
        is_whole = len(cells) == len(names)
        rows.append([cell.strip() for cell in cells] if is_whole else malformed)
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    table = {name: list(cells) for name, cells in zip(names, columns, strict=True)}
    return Table(str(path), table, len(rows))


_PARQUET = b"PAR1"
# Types of columns whose cells are texts or numbers.
_KINDS = "string", "large_string", "boolean", "integer", "floating", "decimal"
_KINDS += "date", "time", "timestamp", "null"


def is_parquet(path: Path) -> bool:
    """Return whether the first bytes of a file are those of Parquet."""
    with path.open("rb") as file:
        return file.read(4) == _PARQUET


def read_names(path: Path, separator: str) -> list[str]:
    """Return a list of the names of the columns of a file, CSV or Parquet."""
    if is_parquet(path):
        return list(_opened(path).schema_arrow.names)
    return read_header(path, separator)


def read_table(
    path: Path, separator: str = ",", missing: tuple[str, ...] = ()
) -> Table:
    """Return the table in a file; cells are text, those without a value are empty.

    The file is Parquet, or text in UTF-8, which may be compressed. `missing` lists
    texts of cells that have no value either. Errors are those of `read_csv`, or a
    Parquet file cannot be read, or has a column of lists, tables or bytes.

    Privacy:
        Cell by cell, by the types of the columns, which are public. No cell raises.
    """
    table = _parquet(path) if is_parquet(path) else read_csv(path, separator)
    columns = {
        name: ["" if cell in missing else cell for cell in cells]
        for name, cells in table.columns.items()
    }
    return dataclasses.replace(table, columns=columns) if missing else table


def _parquet(path: Path) -> Table:
    """Return the table in a Parquet file."""
    found = _opened(path).read()
    import pyarrow as pa

    columns = {}
    for name, column in zip(found.column_names, found.columns, strict=True):
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not any(getattr(pa.types, f"is_{kind}")(column.type) for kind in _KINDS):
            raise ValueError(
                f"{path}: the column {name!r} holds {column.type}, no texts or "
                "numbers; leave it out of the file."
            )
        # Cells are read as bytes: for a text that is not in UTF-8 pyarrow would raise
        # an error that quotes it.
        cells = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        texts = [
            "" if cell in (None, b"nan") else cell.decode("utf-8", "replace").strip()
            for cell in cells
        ]
        if pa.types.is_boolean(column.type):  # as programs write it into text
            texts = [text.capitalize() for text in texts]
        columns[name] = texts
    return Table(str(path), columns, found.num_rows)


def _opened(path: Path) -> Any:
    check_installed(f"{path}, a Parquet file,", "pyarrow", extra="parquet")
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except pa.ArrowInvalid as error:
        text = f"{path} is no whole Parquet file; copy it again."
        raise ValueError(text) from error
