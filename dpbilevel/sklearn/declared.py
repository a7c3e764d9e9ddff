"""Public facts that estimators are given, and records in units of them.

Everything here works on one record at a time, and raises by shapes, types and declared
facts alone: a row with an entry that is no finite number becomes a row of NaN, a label
that is not declared has the index -1. Such records have no influence.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from .. import _checks
from ..core.columns import Column, elements, kind_of, table_of

_ROUNDED = 1.001  # times the norm: rows that were divided by their length are not long
# Entries of a feature that is uniform in its bounds have this mean square.
_UNIFORM = 1 / 3


@dataclasses.dataclass(frozen=True)
class Frame:
    r"""Rows in units in which their length is about 1, and coefficients back from them.

    With bounds an entry is cut to them, and $z = (x - c) / h \cdot \sqrt{3 / d}$ with
    $c = 0$ where the bounds hold it, else their middle, and $h$ the distance of the
    farther one from $c$. With a norm $z = x / R$, and longer rows are
    shortened to 1. Models without a constant have $c = 0$.

    Attributes:
        lower: Lower bounds of the features, or `None`.
        upper: Upper bounds of the features, or `None`.
        center: $c$.
        scale: What a feature is divided by.
        norm: $R$, or `None`.
    """

    lower: Float[np.ndarray, " d"] | None
    upper: Float[np.ndarray, " d"] | None
    center: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]
    norm: float | None

    @property
    def longest(self) -> float:
        """The length of the longest row."""
        return 1.0 if self.norm is not None else _UNIFORM**-0.5

    @property
    def numbers(self) -> float:
        """Share of columns that are not indicators, whose bounds are 0 and 1.

        Most indicators of a row are 0, whatever else is declared.
        """
        if self.lower is None or self.upper is None:
            return 1.0
        return float(np.mean((self.lower != 0) | (self.upper != 1)))

    def rows(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Return rows in these units; NaN if an entry is not finite."""
        finite = np.isfinite(X).all(axis=1, keepdims=True)
        rows = (self.cut(np.where(finite, X, 0)) - self.center) / self.scale
        return np.where(finite, rows, np.nan)

    def cut(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Return rows of finite entries, cut to the bounds or shortened to the norm."""
        if self.norm is None:
            return np.clip(X, self.lower, self.upper)
        # Squares of huge entries would overflow.
        largest = np.maximum(np.abs(X).max(axis=1, keepdims=True), self.norm)
        unit = X / largest
        length = np.linalg.norm(unit, axis=1, keepdims=True)
        with np.errstate(all="ignore"):  # a warning would tell of a record
            rows = unit * np.minimum(largest, self.norm / length)
        return np.where(length > 0, rows, 0)

    def outside(self, X: Float[np.ndarray, "n d"]) -> Bool[np.ndarray, "n d"]:
        """Return which entries `rows` changes; with a norm, all of rows too long."""
        if self.norm is not None:
            with np.errstate(all="ignore"):  # a warning would tell of a record
                length = np.linalg.norm(X, axis=1, keepdims=True)
            return np.broadcast_to(length > _ROUNDED * self.norm, X.shape)
        return (X < self.lower) | (X > self.upper)

    def coefficients(
        self, weights: Float[np.ndarray, "k d"], intercept: Float[np.ndarray, " k"]
    ) -> tuple[Float[np.ndarray, "k d"], Float[np.ndarray, " k"]]:
        """Coefficients of features as they came, from those of `rows`."""
        weights = weights / self.scale
        return weights, intercept - weights @ self.center


def frame(
    owner: str, width: int, bounds: Any, data_norm: Any, *, centered: bool = True
) -> Frame:
    """The units of records with declared bounds or a declared norm.

    Args:
        owner: Whose parameters they are.
        width: The number of features.
        bounds: `(lower, upper)`, each a number or one for each feature.
        data_norm: The largest length of a row.
        centered: Whether entries may be moved, for models with a constant.

    Raises:
        ValueError: Both or none are given, or one is out of range.
    """
    if (bounds is None) == (data_norm is None):
        raise ValueError(
            f"{owner}: declare bounds=(lower, upper), numbers or one for each feature, "
            "or data_norm=, the largest length of a row, and not both. They must come "
            "from public knowledge: the smallest and largest value in the records "
            "would be a release that is not in the ledger."
        )
    if bounds is None:
        _checks.positive(owner, data_norm=data_norm)
        norm = float(data_norm)
        return Frame(None, None, np.zeros(width), np.full(width, norm), norm)
    lower, upper = interval(owner, "bounds", bounds, width)
    inside = (lower <= 0) & (upper >= 0)
    center = np.where(inside | (not centered), 0.0, lower + (upper - lower) / 2)
    reach = np.maximum(upper - center, center - lower)
    return Frame(lower, upper, center, reach * np.sqrt(width * _UNIFORM), None)


def interval(
    owner: str, name: str, bounds: Any, width: int
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Lower and upper bounds of so many numbers.

    Raises:
        ValueError: They are not finite and increasing, of another number, or may as
            well be pairs of the two features.
    """
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(
            f"{owner}: {name} must be a pair (lower, upper), got "
            f"{_checks.shown(bounds)}."
        )
    try:
        lower, upper = (np.asarray(v, float) for v in bounds)
        lower, upper = (np.broadcast_to(v, (width,)).copy() for v in (lower, upper))
    except (TypeError, ValueError):
        raise ValueError(
            f"{owner}: {name} must be two numbers or two lists of {width} numbers, one "
            "for each feature."
        ) from None
    with np.errstate(over="ignore"):
        widths = upper - lower
    wrong = np.flatnonzero(~(np.isfinite(widths) & (widths > 0)))
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"{owner}: the lower end of {name} must be below the upper one, and both "
            f"finite; number {first} has {lower[first]:g} and {upper[first]:g}."
        )
    pairs = isinstance(bounds, list) or isinstance(bounds[0], tuple)
    square = all(np.shape(v) == (2,) for v in bounds)
    if pairs and square and np.all(np.diff((lower, upper)) > 0):
        (a, b), (c, d) = bounds
        raise ValueError(
            f"{owner}: {name}={bounds} may be a pair (lower, upper) of "
            "each feature, or the lower ends and then the upper ones. Write it as a "
            f"tuple of two lists, the lower ends first: pairs as ([{a}, {c}], "
            f"[{b}, {d}])."
        )
    return lower, upper


def declared(owner: str, name: str, values: Any, example: str) -> np.ndarray:
    """The declared values of a column, sorted.

    Args:
        owner: Whose parameter it is.
        name: The parameter.
        values: What was given.
        example: How it may be given.

    Raises:
        ValueError: They are missing, fewer than two, not of one kind, or not distinct.
    """
    if values is None or isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(
            f"{owner}: declare {name}=, every value that a record may have, from "
            f"public knowledge, such as {example}. The values that the records have "
            "would be a release that is not in the ledger: a value that only one "
            "person has would reveal that person."
        )
    listed = [v.item() if isinstance(v, np.generic) else v for v in values]
    texts = [isinstance(v, str) for v in listed]
    if any(texts) and not all(texts):
        raise ValueError(f"{owner}: {name} must be all texts or all numbers.")
    array = np.asarray(listed)
    if array.ndim != 1 or len(set(listed)) != len(listed) or len(listed) < 2:
        why = ": with one class there is nothing to learn" if name == "classes" else ""
        raise ValueError(
            f"{owner}: {name} must be distinct values, at least two{why}; got "
            f"{_checks.shown(values)}."
        )
    return np.sort(array)


def index_of(
    owner: str, name: str, declared: np.ndarray, column: Column
) -> Int[np.ndarray, " n"]:
    """Where each entry of a column is among the declared values; -1 where it is not.

    Raises:
        ValueError: One are texts and the others numbers, by their types.
    """
    own = "texts" if declared.dtype.kind == "U" else "numbers"
    if column.kind not in (own, "objects"):
        raise ValueError(
            f"{owner}: {name} was declared with {own}, but the records have "
            f"{column.kind}. Declare the values as they are in the records."
        )
    places = {value: place for place, value in enumerate(declared.tolist())}

    def place(value: Any) -> int:
        try:
            return places.get(value, -1)
        except Exception:  # another object may raise anything
            return -1

    entries = column.entries
    return np.fromiter(map(place, entries.tolist()), np.int32, len(entries))


def numbers(table: Any) -> Any:
    """A table as an array of numbers; NaN where an object is none.

    Sparse matrices are passed on.

    Raises:
        ValueError: The entries are of a type that stands for no number, the array or a
            column of a data frame is one of texts by its type, or it is no table.
            scikit-learn says the same with the records in its message.
    """
    if hasattr(table, "tocsr"):
        return table
    if not _has_rows(table):
        raise ValueError(
            f"Expected 2D array, got {type(table).__name__} instead: give a table with "
            "a row for each record."
        )
    _refuse_types(table)
    rows = elements(table)
    if rows is not None:
        found = table_of(rows)
        column = Column(
            np.empty(len(rows), object) if found is None else found, "objects"
        )
    elif isinstance(table, np.ma.MaskedArray):
        column = Column.of(table)
    else:
        # Floating-point numbers of 64 bits hold what NumPy makes of an entry beside
        # others, or are it.
        array = np.asarray(table)
        column = Column(array, kind_of(array.dtype))
    array = column.entries
    if array.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {array.ndim}D array instead. Reshape your data by "
            "array.reshape(-1, 1) if it has one feature, by array.reshape(1, -1) if it "
            "is one record."
        )
    return _as_numbers("X", column)


def targets(column: Column) -> Float[np.ndarray, " n"]:
    """A column as numbers; NaN where an object is none.

    Raises:
        ValueError: The entries are texts, by their type.
    """
    return _as_numbers("y", column)


def _as_numbers(name: str, column: Column) -> Float[np.ndarray, "..."]:
    if column.kind == "texts":
        raise ValueError(
            f"{name} is an array of texts, by its type, and records with texts in the "
            "place of numbers are ignored. Encode columns of texts with declared "
            "categories, or read each entry as a number, such as by "
            "pandas.to_numeric(column, errors='coerce')."
        )
    return column.numbers()


def _refuse_types(table: Any) -> None:
    """Refuses columns that stand for no numbers, by their types."""
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
            raise ValueError(f"column {str(name)!r} of X: {error}") from None
        # Categories are refused where they are numbers, too: these have no order.
        if found == "texts" or str(kind).lower().startswith("categor"):
            texts.append(str(name))
    if texts:
        raise ValueError(
            f"the columns {texts} of X hold texts, by their types, and rows with texts "
            "are ignored. Encode them with declared categories, such as "
            "OneHotEncoder(categories=[[...]], handle_unknown='ignore'), or read each "
            "entry as a number, such as pandas.to_numeric(column, errors='coerce')."
        )


def _has_rows(table: Any) -> bool:
    return hasattr(table, "__len__") or hasattr(table, "__array__")
