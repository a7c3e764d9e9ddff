"""Cells of columns as features, labels and marks, by public constants of the config."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import PyTree

from .tables import Cells, Table, check_unit, date_reader, number, reader

Value = str | float  # a cell's text, or the number that the cell reads as
Marks = dict[str, np.ndarray]  # by column

# How a cell fits the config: as declared, empty, cut to the bounds (or not listed in a
# categorical column), or unusable. A record with an unusable cell has no influence.
FITS, MISSING, CUT, UNUSABLE = range(4)
_ROUNDING = 1e-5  # relative rounding of constants with six digits


@dataclasses.dataclass(frozen=True)
class Records:
    """Records as arrays. NON-PRIVATE: this is the data.

    Attributes:
        features: One row, or one payoff matrix, per record.
        label: Label of each record; zeros for matrices.
        marks: Marks of the checked cells, one column each.
        source: Source of each record, -1 for one that is not listed, or `None`.
        group: Group of each record, -1 for one that is not listed, or `None`.
        ids: The id of the person of each row; `None` if every row is a record.
    """

    features: np.ndarray
    label: np.ndarray
    marks: np.ndarray
    source: np.ndarray | None = None
    group: np.ndarray | None = None
    ids: np.ndarray | None = None

    def __repr__(self) -> str:
        """Return the class name; never a value."""
        return "Records(...)"

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: np.ndarray) -> Self:
        """Return the records at these indices, or those that a mask selects."""
        parts = {k: v[rows] for k, v in vars(self).items() if v is not None}
        return dataclasses.replace(self, **parts)

    def tree(self) -> PyTree:
        """Return a dict of arrays, for the losses of the library."""
        parts = {k: v for k, v in vars(self).items() if v is not None}
        return {k: v for k, v in parts.items() if k not in ("marks", "ids")}

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
    origin: str = "2000-01-01"
    date_format: str = ""

    def standardized(
        self, cells: Cells, mean: float, scale: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers in $[-1, 1]$ and the marks of their cells.

        The number of a cell that is empty or unreadable is NaN.

        Privacy:
            Works cell by cell, and never raises or warns because of a cell.
        """
        if self.transform == "date":
            read = date_reader(self.origin, self.date_format)
        else:
            read = reader(self.unit, self.decimal)
        values = np.asarray([read(cell) for cell in cells], float)
        with np.errstate(all="ignore"):
            if self.transform == "log1p":
                values = np.log1p(values)
            values = (values - mean) / scale
        cut = np.abs(values) > self.clip * (1 + _ROUNDING)
        marks = np.where(np.isnan(values), UNUSABLE, np.where(cut, CUT, FITS))
        clipped = np.clip(values, -self.clip, self.clip) / self.clip
        return clipped, np.where(_empty(cells), MISSING, marks)

    def check_constants(self, mean: Any, scale: Any) -> None:
        """Check unit and dates, that means are finite, scales and clip positive.

        Raises:
            ValueError: One of them is not.
        """
        check_unit(self.unit)
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

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each feature."""
        return self.columns

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

    @property
    def name(self) -> str:
        """Name of the block."""
        return self.column

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each feature."""
        return tuple(f"{self.column} = {named(value)}" for value in self.values)

    def encode(self, table: Table) -> tuple[np.ndarray, Marks]:
        """Return the block's features and the marks of its cells, row by row."""
        cells = table.column(self.column)
        found = positions(cells, self.values)
        marks = np.where(_empty(cells), MISSING, np.where(found < 0, CUT, FITS))
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
            check_values(name, self.values)
        constants = (self.mean, self.scale) if number else (0.0, 1.0)
        self.check_constants(*constants)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Label of each class; empty if the label is a number."""
        two = (-1.0, 1.0) if self.positive else ()
        return tuple(map(float, range(len(self.classes)))) or two

    @property
    def of_classes(self) -> tuple[tuple[Value, ...], ...]:
        """Values of each class; empty if the label is a number."""
        return self.classes or (self.negative, self.positive)[: len(self.numbers)]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; empty if the label is a number."""
        return tuple(" or ".join(map(named, v)) for v in self.of_classes)

    @property
    def values(self) -> tuple[Value, ...]:
        """Values of all classes."""
        return tuple(value for values in self.of_classes for value in values)

    def encode(self, table: Table) -> tuple[np.ndarray, Marks]:
        """Return the labels and the marks of their cells, row by row.

        A missing or unlisted label is NaN, which leaves the record without influence.
        """
        cells = table.column(self.column)
        if self.mean is not None and self.scale is not None:
            labels, marks = self.standardized(cells, self.mean, self.scale)
            return labels, {self.column: np.where(marks == MISSING, UNUSABLE, marks)}
        found = positions(cells, self.values)
        counts = [len(values) for values in self.of_classes]
        labels = np.asarray([*np.repeat(self.numbers, counts), np.nan])[found]
        return labels, {self.column: np.where(found < 0, UNUSABLE, FITS)}


def _empty(cells: Cells) -> np.ndarray:
    return np.asarray([cell == "" for cell in cells], bool)


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
    """Check that there are values, that no cell can be two, and that all are finite.

    Args:
        name: Name of the list, for the error message.
        values: The public list.

    Raises:
        ValueError: There is no value, or a value is there twice, or is not finite.
    """
    if not values:
        raise ValueError(f"{name} must be a list of different values, got none.")
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if not isinstance(value, str)]
    read = [number for number in map(number, texts) if number in numbers]
    listed = [*texts, *numbers, *read]  # the text "1" is the number 1, too
    if len(set(listed)) < len(listed) or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be lists of distinct, finite values.")
