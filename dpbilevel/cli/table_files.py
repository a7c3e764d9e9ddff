"""Files of records: comma-separated text, or Parquet."""

import dataclasses
from pathlib import Path
from typing import Any

from .. import _extras
from .columns import Table
from .csv_files import read_csv, read_header

_PARQUET = b"PAR1"
# Types of columns whose cells are texts or numbers.
_KINDS = "string", "large_string", "boolean", "integer", "floating", "decimal"
_KINDS += "date", "time", "timestamp", "null"


def is_parquet(path: Path) -> bool:
    """Return whether the first bytes of a file are those of Parquet."""
    with path.open("rb") as file:
        return file.read(4) == _PARQUET


def read_names(path: Path, separator: str) -> list[str]:
    """Return the names of the columns of a file; read no cell of a record.

    Raises:
        ValueError: As `read_header`, or a Parquet file cannot be read.
    """
    if is_parquet(path):
        return list(_opened(path).schema_arrow.names)
    return read_header(path, separator)


def read_table(
    path: Path, separator: str = ",", missing: tuple[str, ...] = ()
) -> Table:
    """Return the table in a file; cells are text, those without a value are empty.

    Args:
        path: An existing file: Parquet, or text in UTF-8, which may be compressed.
        separator: Separator of the cells of a row of text.
        missing: Texts of cells that have no value either.

    Raises:
        ValueError: As `read_csv`, or a Parquet file cannot be read, or has a column of
            lists, tables or bytes.

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
    import pyarrow as pa

    found = _opened(path).read()
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
        texts = [_text(cell) for cell in cells]
        if pa.types.is_boolean(column.type):  # as programs write it into text
            texts = [text.capitalize() for text in texts]
        columns[name] = texts
    return Table(str(path), columns, found.num_rows)


def _opened(path: Path) -> Any:
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        text = _extras.missing(f"{path}, a Parquet file,", "pyarrow", extra="parquet")
        raise ValueError(text) from error
    try:
        return ParquetFile(path)
    except pa.ArrowInvalid as error:
        text = f"{path} is no whole Parquet file; copy it again."
        raise ValueError(text) from error


def _text(cell: bytes | None) -> str:
    """Return the text of a cell; no text for one without a value."""
    if cell is None or cell == b"nan":
        return ""
    return cell.decode("utf-8", "replace").strip()
