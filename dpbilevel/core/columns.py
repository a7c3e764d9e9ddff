"""Columns of tables, converted entry by entry: no entry changes another one.

NumPy gives all entries one type, which depends on all of them. A missing integer turns
all into floating-point numbers, whose last digits are lost above 2^53, and a long text
makes all as long. Here each entry is converted alone, and errors depend on types only.
"""

import collections
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

# Beginnings of the names of types in data frames and Arrow tables, in lower case.
_TEXTS = "string", "large_string", "utf8", "large_utf8", "categor", "enum"
_NUMBERS = "int", "uint", "float", "double", "half", "decimal", "bool", "sparse"
_OBJECTS = "object", "null", "unknown"
# Every array and data frame has one of these methods.
_ARRAYS = "__array__", "__array_interface__", "__array_struct__"
_ARRAYS += "to_pylist", "to_list", "tocsr"
# Meanings of NumPy's kinds of types.
_OF_NUMPY = dict.fromkeys("biuf", "numbers") | {"U": "texts", "S": "texts"}
_OF_NUMPY |= {"O": "objects"}


@dataclasses.dataclass(frozen=True)
class Column:
    """Entries of one column as an array, and their kind: numbers, texts or objects.

    Attributes:
        entries: The array as given if NumPy has its type, else an array of objects.
        kind: Meaning of the column's type: "numbers", "texts", or "objects", which may
            be both.
    """

    entries: Shaped[np.ndarray, "..."]
    kind: str

    @classmethod
    def of(cls, column: Any) -> "Column":
        """Make a `Column` of a list, an array, a data frame column or an Arrow column.

        A sequence has one entry for each of its elements. An element in a list or
        array of its own stands for itself; any longer one is no number and no text.
        Errors are those of `kind_of` and `elements`.
        """
        column = _only_column(column)
        own = getattr(column, "dtype", getattr(column, "type", None))
        if isinstance(column, np.ma.MaskedArray):
            entries = np.array(column.data, object)
            entries[np.ma.getmaskarray(column)] = None
            return cls(entries, kind_of(column.dtype))
        found = elements(column)
        if found is not None:
            return cls(separate(map(_entry, found), len(found)), "objects")
        values = _listed(column, own)
        if values is None:
            array = np.asarray(column)
            return cls(array, kind_of(array.dtype))
        return cls(separate(values, len(values)), kind_of(own))

    def numbers(self) -> Float[np.ndarray, "..."]:
        """Return a float64 array of the entries; NaN for objects without a number."""
        array = self.entries
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # a warning would reveal an entry
            if array.dtype.kind in "biuf":
                return array.astype(np.float64, copy=False)
            flat = [_number(value) for value in array.ravel().tolist()]
        return np.asarray(flat, np.float64).reshape(array.shape)


def elements(values: Any) -> list[Any] | None:
    """Return a sequence's elements as a list; `None` for arrays, tables and texts.

    NumPy would read all of them together, and raise an error if one has another shape.
    `None` stands for data frames and single values, too.

    Raises:
        ValueError: It is a set, a mapping, a generator or another iterable that is no
            sequence, by its type.
    """
    if isinstance(values, str | bytes | bytearray | memoryview):
        return None
    if any(hasattr(values, name) for name in _ARRAYS):
        return None
    if not hasattr(values, "__iter__") and not hasattr(values, "__getitem__"):
        return None
    sized = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    if not sized or isinstance(values, Mapping | type):
        raise ValueError(f"give a list or an array, not {type(values).__name__}.")
    # A loop would not find the end of some sequences.
    return list(itertools.islice(values, len(values)))


def separate(values: Iterable[Any], count: int) -> Shaped[np.ndarray, " n"]:
    """Return a 1-D object array of `count` values, even if they are sequences."""
    return np.fromiter(values, object, count)


def table_of(rows: Sequence[Any]) -> Shaped[np.ndarray, "n d"] | None:
    """Return rows as a 2-D object array, or `None`; rows of rare width are `None`s.

    Each row is read alone. The width is the most frequent one. A row of another width
    is a row of `None`, which is no number. Privacy: the width counts as public, like
    the columns of a table.
    """
    cells = [_cells(row) for row in rows]
    widths = collections.Counter(None if row is None else len(row) for row in cells)
    width = max(widths, key=lambda w: (widths[w], w or 0), default=None)
    if width is None:
        return None
    table = np.full((len(cells), width), None, object)
    for place, row in enumerate(cells):
        if row is not None and len(row) == width:
            table[place] = separate(map(_entry, row), width)
    return table


def numbers(table: Any, name: str = "X") -> Any:
    """Return a table as a 2-D float64 array, NaN for non-numbers; refuse texts.

    Sparse matrices are returned as they are.

    Raises:
        ValueError: The type of the entries stands for no number, the array or a column
            of a data frame has texts by its type, or it is no table. Messages of
            scikit-learn would contain the records.
    """
    if hasattr(table, "tocsr"):
        return table
    if not (hasattr(table, "__len__") or hasattr(table, "__array__")):
        kind = type(table).__name__
        raise ValueError(f"Expected 2D array, got {kind} instead. Give a table.")
    _refuse_types(table, name)
    rows = elements(table)
    if rows is not None:
        found = table_of(rows)
        found = np.empty(len(rows), object) if found is None else found
        column = Column(found, "objects")
    elif isinstance(table, np.ma.MaskedArray):
        column = Column.of(table)
    else:
        array = np.asarray(table)
        column = Column(array, kind_of(array.dtype))
    count = column.entries.ndim
    if count != 2:
        raise ValueError(
            f"Expected 2D array, got {count}D array instead. Reshape your data."
        )
    return as_numbers(name, column)


def as_numbers(name: str, column: Column) -> Float[np.ndarray, "..."]:
    """Return the numbers of a `Column`; raise `ValueError` for texts, by their type."""
    if column.kind == "texts":
        raise ValueError(f"{name} has texts, by its type; encode declared categories.")
    return column.numbers()


def _refuse_types(table: Any, of: str) -> None:
    """Raise `ValueError` if a column's type is text, category, date or not known."""
    schema = getattr(table, "schema", None)
    types = getattr(table, "dtypes", getattr(schema, "types", ()))
    names = getattr(table, "column_names", getattr(table, "columns", ()))
    if not isinstance(types, Iterable):
        return
    texts = []
    for name, kind in zip(names, types, strict=False):
        try:
            found = kind_of(kind)
        except ValueError as error:
            raise ValueError(f"column {str(name)!r} of {of}: {error}") from None
        # Categories are refused even if they are numbers, which have no order.
        if found == "texts" or str(kind).lower().startswith("categor"):
            texts.append(str(name))
    if texts:
        raise ValueError(
            f"the columns {texts} of {of} hold texts, by their types. Encode them by "
            "OneHotEncoder(categories=[[...]], handle_unknown='ignore')."
        )


def _cells(row: Any) -> list[Any] | None:
    """Return the entries of a row as a list; `None` for text, dict, set, scalar."""
    try:
        if isinstance(row, str | bytes | dict | set | frozenset) or len(row) < 0:
            return None
        return list(row)
    except Exception:  # objects may raise anything
        return None


def _entry(value: Any) -> Any:
    """Return a value, or the one element of a list or array of one; masked: `None`."""
    try:
        if value is np.ma.masked:
            return None
        if isinstance(value, list | tuple) and len(value) == 1:
            return value[0]
        return value[0] if getattr(value, "shape", None) == (1,) else value
    except Exception:  # objects may raise anything
        return None


def kind_of(dtype: Any) -> str:
    """Return the kind of a dtype, "numbers", "texts" or "objects"; refuse others.

    The type is one of NumPy, pandas, polars or pyarrow. Others, such as dates, raise a
    `ValueError`.
    """
    if isinstance(dtype, np.dtype):
        kind = _OF_NUMPY.get(dtype.kind)
    else:
        # The values decide for categories of pandas and Arrow tables.
        categories = getattr(getattr(dtype, "categories", None), "dtype", None)
        if categories is not None:
            return kind_of(categories)
        name = str(dtype).lower()
        if name.startswith("dictionary"):
            return kind_of(dtype.value_type)
        if name == "str":  # not a struct
            return "texts"
        begins = {"texts": _TEXTS, "numbers": _NUMBERS, "objects": _OBJECTS}
        found = (k for k, words in begins.items() if name.startswith(words))
        kind = None if name.startswith("interval") else next(found, None)
    if kind is None:
        if str(dtype).startswith("complex"):
            raise ValueError("Complex data not supported: give real numbers.")
        raise ValueError(f"{dtype} has no numbers or texts; convert each entry alone.")
    return kind


def _only_column(table: Any) -> Any:
    """Return the column of a data frame of one column; anything else as it is."""
    shape = getattr(table, "shape", ())
    if len(shape) != 2 or shape[1] != 1:
        return table
    if hasattr(table, "iloc"):  # pandas
        return table.iloc[:, 0]
    if hasattr(table, "to_series"):  # polars
        return table.to_series(0)
    return table.column(0) if hasattr(table, "column") else table  # pyarrow


def _listed(column: Any, dtype: Any) -> list[Any] | None:
    """Return the entries of a column as a list; `None` if its type is one of NumPy."""
    if hasattr(column, "to_pylist"):  # pyarrow
        return column.to_pylist()
    if isinstance(dtype, np.dtype):
        return None
    if hasattr(dtype, "na_value"):  # types of pandas
        return list(column)
    return column.to_list() if hasattr(column, "to_list") else None  # polars


def _number(value: Any) -> float:
    try:
        return float(value)
    except Exception:  # objects may raise anything
        return np.nan
