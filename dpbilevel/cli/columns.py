"""Cells of columns as features, labels and marks, by public constants of the config."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import PyTree

from ..privacy.records.people import PersonUnit, by_person
from .tables import Cells, Table, check_unit, date_reader, number, reader

Value = str | float  # a cell's text, or the number that the cell reads as
Marks = dict[str, np.ndarray]  # by column

# How a cell fits the config: as declared, empty, cut to the bounds (or not listed in a
# categorical column), or unusable. A record with an unusable cell has no influence.
FITS, MISSING, CUT, UNUSABLE = range(4)
_ROUNDING = 1e-5  # relative rounding of constants with six digits
_ORIGIN = "2000-01-01"


@dataclasses.dataclass(frozen=True)
class Records:
    """Records as arrays, one row each. NON-PRIVATE: this is the data."""

    features: np.ndarray
    label: np.ndarray
    marks: np.ndarray  # of the checked cells, one column each
    source: np.ndarray | None = None  # -1 for one that is not listed
    group: np.ndarray | None = None  # as the source
    ids: np.ndarray | None = None  # of persons; `None` if every row is a record

    def __repr__(self) -> str:
        """Return the class name; never a value."""
        return "Records(...)"

    def take(self, rows: np.ndarray) -> Self:
        """Return the records at these indices, or those that a mask selects."""
        parts = {k: v[rows] for k, v in vars(self).items() if v is not None}
        return dataclasses.replace(self, **parts)

    def tree(self, unit: PersonUnit | None = None) -> PyTree:
        """Return a dict of arrays, as `PersonRows` if records have ids and a unit."""
        parts = {k: v for k, v in vars(self).items() if v is not None}
        rows = {k: v for k, v in parts.items() if k not in ("marks", "ids")}
        if unit is None or self.ids is None:
            return rows
        return by_person(rows, self.ids, most_rows=unit.most_rows)

    def as_bytes(self) -> Iterator[bytes]:
        """Yield the bytes of each record that decide its part of a split."""
        for row, label in zip(self.features, self.label, strict=True):
            yield row.tobytes() + label.tobytes()


@dataclasses.dataclass(frozen=True)
class Standardized:
    r"""Numbers $v$ mapped to $\mathrm{clip}((t(v) - m) / s) / c$ by public constants.

    Args:
        transform: $t$: `"none"`, `"log1p"`, or `"date"`, the days since `origin`.
        clip: $c > 0$; values are clipped to $[-c, c]$.
        unit: Text that may stand before or after a number, such as `"€"` or `"%"`.
        decimal: Decimal sign. If it or the unit is declared, thousands may be separated
            by the other sign, spaces or apostrophes.
        origin: Day 0 of dates, in ISO 8601.
        date_format: Format of dates, as of `strptime`; empty for ISO 8601.
    """

    _: dataclasses.KW_ONLY
    transform: Literal["none", "log1p", "date"] = "none"
    clip: float = 3.0
    unit: str = ""
    decimal: Literal["", ".", ","] = ""
    origin: str = _ORIGIN
    date_format: str = ""

    def standardized(
        self, cells: Cells, mean: float, scale: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers in [-1, 1], and each cell's mark: fits, cut, empty, unusable.

        The number of a cell that is empty or unreadable is NaN.

        Privacy:
            Works cell by cell, and never raises or warns because of a cell.
        """
        read = number
        if self.transform == "date":
            read = date_reader(self.origin, self.date_format)
        elif self.unit or self.decimal:
            read = reader(self.unit, self.decimal)
        values = np.asarray([read(cell) for cell in cells], float)
        with np.errstate(all="ignore"):
            if self.transform == "log1p":
                values = np.log1p(values)
            values = (values - mean) / scale
        cut = np.abs(values) > self.clip * (1 + _ROUNDING)
        marks = np.where(np.isnan(values), UNUSABLE, np.where(cut, CUT, FITS))
        marks[[i for i, cell in enumerate(cells) if cell == ""]] = MISSING
        return np.clip(values, -self.clip, self.clip) / self.clip, marks

    def check_constants(self, mean: Any, scale: Any) -> None:
        """Raise `ValueError` for unusable unit, date format, mean, scale or clip."""
        if self.unit:
            check_unit(self.unit)
        if (self.origin, self.date_format) != (_ORIGIN, ""):
            date_reader(self.origin, self.date_format)
        if not np.isfinite(mean).all():
            raise ValueError(f"mean must be finite, got {mean}.")
        for name, values in {"scale": scale, "clip": self.clip}.items():
            if not all(0 < value < np.inf for value in np.ravel(values)):
                raise ValueError(f"{name} must be positive, got {values}.")


@dataclasses.dataclass(frozen=True)
class Numeric(Standardized):
    """A block of numeric columns.

    Args:
        name: Name of the block.
        columns: The columns.
        mean: $m$, one public constant per column.
        scale: $s > 0$, one public constant per column.
    """

    name: str
    columns: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]

    def __post_init__(self):
        if not len(self.columns) == len(self.mean) == len(self.scale):
            raise ValueError("columns, mean and scale need one entry per column each.")
        self.check_constants(self.mean, self.scale)

    def encode(self, table: Table) -> tuple[np.ndarray, Marks]:
        """Return the block's features and the marks of its cells, row by row.

        An empty cell counts as 0, the middle of the declared range. Text that is no
        number becomes NaN, which leaves the record without influence.
        """
        features, marks = [], {}
        for name, m, s in zip(self.columns, self.mean, self.scale, strict=True):
            values, marks[name] = self.standardized(table.column(name), m, s)
            features.append(np.where(marks[name] == MISSING, 0.0, values))
        return np.stack(features, 1), marks


@dataclasses.dataclass(frozen=True)
class Places:
    """A column that says where a record belongs: its source or its group.

    Args:
        column: The column.
        values: Public list of the values; a record of another one has no influence.
    """

    column: str
    values: tuple[Value, ...]

    def __post_init__(self):
        check_values("values", self.values)

    def encode(self, table: Table) -> tuple[np.ndarray, Marks]:
        """Return each cell's position in `values`, -1 for others, and the marks."""
        found = positions(table.column(self.column), self.values)
        return found, {self.column: np.where(found < 0, UNUSABLE, FITS)}


@dataclasses.dataclass(frozen=True)
class Categorical(Places):
    """A column with a public list of values, as one indicator per value.

    Args:
        column: The column; also the name of the block.
        values: The list. The indicators of any other value, or of an empty cell, are 0.
    """

    def encode(self, table: Table) -> tuple[np.ndarray, Marks]:
        """Return the block's features and the marks of its cells, row by row."""
        cells = table.column(self.column)
        found = positions(cells, self.values)
        marks = np.where(found < 0, CUT, FITS)
        marks[[i for i, cell in enumerate(cells) if cell == ""]] = MISSING
        return found[:, None] == np.arange(len(self.values)), {self.column: marks}


@dataclasses.dataclass(frozen=True)
class Label(Standardized):
    r"""The label: a class by lists of values, or a standardized number.

    Args:
        column: The column.
        positive: Values of the label +1, for two classes.
        negative: Values of the label -1.
        classes: Values of each class, the labels 0, 1, ..., for two classes or more.
        mean: $m$, for regression.
        scale: $s > 0$, for regression.
    """

    column: str
    positive: tuple[Value, ...] = ()
    negative: tuple[Value, ...] = ()
    classes: tuple[tuple[Value, ...], ...] = ()
    mean: float | None = None
    scale: float | None = None

    def __post_init__(self):
        two = bool(self.positive) and bool(self.negative)
        several = len(self.classes) > 1 and all(self.classes)
        number = self.mean is not None and self.scale is not None
        if two + several + number != 1:
            raise ValueError(
                "give positive and negative, or classes, a list of values for each of "
                "two or more, or else mean and scale."
            )
        if self.transform == "date":
            raise ValueError("a label is no date; give days, as numbers.")
        if not number and (self.unit or self.decimal):
            raise ValueError("unit and decimal are for a numeric label; remove them.")
        if not number:
            name = "classes" if self.classes else "positive and negative"
            check_values(name, tuple(v for vs in self.of_classes.values() for v in vs))
        constants = (self.mean, self.scale) if number else (0.0, 1.0)
        self.check_constants(*constants)

    @property
    def of_classes(self) -> dict[float, tuple[Value, ...]]:
        """Values of each class by its label; empty if the label is a number."""
        if self.classes:
            return {float(i): values for i, values in enumerate(self.classes)}
        return {-1.0: self.negative, 1.0: self.positive} if self.positive else {}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Tuple of each class's name; empty if the label is a number."""
        return tuple(" or ".join(map(named, v)) for v in self.of_classes.values())

    def encode(self, table: Table) -> tuple[np.ndarray, Marks]:
        """Return the labels and the marks of their cells, row by row.

        A missing or unlisted label is NaN, which leaves the record without influence.
        """
        cells = table.column(self.column)
        if self.mean is not None and self.scale is not None:
            labels, marks = self.standardized(cells, self.mean, self.scale)
            return labels, {self.column: np.where(marks == MISSING, UNUSABLE, marks)}
        pairs = [(v, label) for label, vs in self.of_classes.items() for v in vs]
        found = positions(cells, tuple(value for value, _ in pairs))
        labels = np.asarray([*(label for _, label in pairs), np.nan])[found]
        return labels, {self.column: np.where(found < 0, UNUSABLE, FITS)}


def named(value: Value) -> str:
    """Return the text of a listed value, whole numbers without a point."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return str(int(value) if whole else value)


def positions(cells: Cells, values: tuple[Value, ...]) -> np.ndarray:
    """Return the position of each cell in the public list `values`, or -1.

    A text matches cells of the same text, a number every cell that reads as that
    number: 1 matches `1` and `1.0`.
    """
    index = {value: i for i, value in enumerate(values)}
    found = (index.get(cell, index.get(number(cell), -1)) for cell in cells)
    return np.fromiter(found, np.int32, len(cells))


def check_values(name: str, values: tuple[Value, ...]) -> None:
    """Raise `ValueError` unless values are given, finite and different as cells."""
    if not values:
        raise ValueError(f"{name} must be a list of different values, got none.")
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if not isinstance(value, str)]
    read = [number for number in map(number, texts) if number in numbers]
    listed = [*texts, *numbers, *read]  # the text "1" is the number 1, too
    if len(set(listed)) < len(listed) or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be lists of distinct, finite values.")
