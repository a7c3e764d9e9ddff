"""Columns to features by public constants: nothing is estimated from the records."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from .numbers import check_unit, number, reader

Cells = Sequence[str]
Value = str | float  # of a cell: its text, or the number that it reads as

# A mark says how a cell fits the config: as declared, empty, cut to the bounds (or a
# category that is not listed), or unusable. A record with an unusable cell (unreadable,
# or an unlisted label, source or group) has no influence.
FITS, MISSING, CUT, UNUSABLE = range(4)
_ROUNDING = 1e-5  # relative rounding of constants with six digits


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as text, by column."""

    name: str  # what to call the table in an error
    columns: Mapping[str, Cells]  # all of one length
    rows: int

    def __repr__(self) -> str:
        """The table's name; never its cells."""
        return f"Table({self.name!r})"

    def column(self, name: str) -> Cells:
        """The cells of one column.

        Raises:
            ValueError: There is no such column.
        """
        if name not in self.columns:
            # Without those that exist: where the header is missing, they are a record.
            raise ValueError(
                f"{self.name} has no column {name!r}. Correct the config's [data], or "
                "the header, which must be the first row."
            )
        return self.columns[name]


class AbstractRecords(abc.ABC):
    """Records as arrays. NON-PRIVATE: this is the data.

    Attributes:
        marks: Marks of the checked cells, one column each; `None` for records that are
            in no file.
    """

    def __repr__(self) -> str:
        """The class name; never a value."""
        return f"{type(self).__name__}(...)"

    marks: np.ndarray | None

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abc.abstractmethod
    def take(self, rows: np.ndarray) -> Self:
        """The records at these indices."""

    @abc.abstractmethod
    def tree(self) -> PyTree:
        """The records as the losses of the library read them."""

    @abc.abstractmethod
    def as_bytes(self) -> Iterator[bytes]:
        """The bytes of each record that decide to which part of a split it goes."""


@dataclasses.dataclass(frozen=True, repr=False)
class Records(AbstractRecords):
    """Features, labels, sources and groups of records.

    Attributes:
        features: One row per record.
        label: One label per record.
        source: The source of each record, -1 for one that is not listed, or `None`.
        group: The group of each record, -1 for an unknown one, or `None`.
        marks: As in `AbstractRecords`.
    """

    features: np.ndarray
    label: np.ndarray
    source: np.ndarray | None = None
    group: np.ndarray | None = None
    marks: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.label)

    @override
    def take(self, rows: np.ndarray) -> Self:
        places = (
            None if place is None else place[rows]
            for place in (self.source, self.group, self.marks)
        )
        return type(self)(self.features[rows], self.label[rows], *places)

    @override
    def tree(self) -> dict[str, np.ndarray]:
        tree = {"features": self.features, "label": self.label}
        places = {"source": self.source, "group": self.group}
        return tree | {k: v for k, v in places.items() if v is not None}

    @override
    def as_bytes(self) -> Iterator[bytes]:
        for row, label in zip(self.features, self.label, strict=True):
            yield row.tobytes() + label.tobytes()


@dataclasses.dataclass(frozen=True)
class Standardized:
    r"""Numbers $v$ mapped to $\mathrm{clip}((t(v) - m) / s) / c$ by public constants.

    Args:
        transform: $t$: `"none"` or `"log1p"`.
        clip: $c > 0$; values are clipped to $[-c, c]$.
        unit: Text that may stand before or after a number, such as `"€"` or `"%"`.
        decimal: The decimal sign. If it or the unit is declared, thousands may be
            separated by the other sign, spaces or apostrophes.
    """

    _: dataclasses.KW_ONLY
    transform: Literal["none", "log1p"] = "none"
    clip: float = 3.0
    unit: str = ""
    decimal: Literal["", ".", ","] = ""

    def deviations(self, cells: Cells, mean: float, scale: float) -> np.ndarray:
        r"""Return $(t(v) - m) / s$; NaN if a cell is empty or no number.

        Privacy:
            Works cell by cell, and never raises because of a cell.
        """
        read = reader(self.unit, self.decimal)
        values = np.asarray([read(cell) for cell in cells])
        with np.errstate(all="ignore"):  # a warning would tell something about a cell
            if self.transform == "log1p":
                values = np.log1p(values)
            return (values - mean) / scale

    def standardized(self, cells: Cells, mean: float, scale: float) -> np.ndarray:
        """Return numbers in $[-1, 1]$; NaN if a cell is empty or no number."""
        found = self.deviations(cells, mean, scale)
        return np.clip(found, -self.clip, self.clip) / self.clip

    def marks(self, cells: Cells, mean: float, scale: float) -> np.ndarray:
        """Return how each cell fits: `FITS`, `MISSING`, `CUT` or `UNUSABLE`."""
        found = self.deviations(cells, mean, scale)
        cut = np.abs(found) > self.clip * (1 + _ROUNDING)
        marks = np.where(np.isnan(found), UNUSABLE, np.where(cut, CUT, FITS))
        return np.where([cell == "" for cell in cells], MISSING, marks)

    def check_constants(self, mean: Any, scale: Any) -> None:
        """Check that scales and clip are positive, means finite, and the unit a unit.

        Raises:
            ValueError: One of them is not.
        """
        check_unit(self.unit)
        for value in np.ravel(mean):
            if value is not None and not np.isfinite(value):
                raise ValueError(f"mean must be finite, got {value:g}.")
        for name, values in {"scale": scale, "clip": self.clip}.items():
            for value in np.ravel(values):
                if value is not None and not (np.isfinite(value) and value > 0):
                    raise ValueError(f"{name} must be positive, got {value:g}.")


@dataclasses.dataclass(frozen=True)
class Numeric(Standardized):
    """A block of numeric columns.

    Args:
        name: The block's name.
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
            raise ValueError(
                f"columns, mean and scale need one entry per column, got "
                f"{len(self.columns)}, {len(self.mean)} and {len(self.scale)}."
            )
        self.check_constants(self.mean, self.scale)

    @property
    def size(self) -> int:
        """The number of features."""
        return len(self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each feature."""
        return self.columns

    def features(self, table: Table) -> np.ndarray:
        """The block's features.

        Privacy:
            Row by row. A missing cell is the public mean, that is 0; text that is no
            number makes a NaN, which leaves the record without influence later.
        """
        values = []
        for name, m, s in self.constants:
            cells = table.column(name)
            missing = [cell == "" for cell in cells]
            values.append(np.where(missing, 0.0, self.standardized(cells, m, s)))
        return np.stack(values, 1)

    @property
    def constants(self) -> Iterator[tuple[str, float, float]]:
        """Name, mean and scale of each column."""
        return zip(self.columns, self.mean, self.scale, strict=True)


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A column with a public list of values, as one indicator per value.

    Args:
        column: The column; also the block's name.
        values: The list; any other value, or a missing one, is all zeros.
    """

    column: str
    values: tuple[Value, ...]

    def __post_init__(self):
        check_values("values", self.values)
        if not self.values:
            raise ValueError("values must be a list of different values, got none.")

    @property
    def name(self) -> str:
        """The column."""
        return self.column

    @property
    def size(self) -> int:
        """The number of features."""
        return len(self.values)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each feature."""
        return tuple(f"{self.column} = {named(value)}" for value in self.values)

    def features(self, table: Table) -> np.ndarray:
        """The block's features, row by row."""
        found = positions(table.column(self.column), self.values)
        return found[:, None] == np.arange(self.size)

    def marks(self, table: Table) -> np.ndarray:
        """Return how each cell fits: `FITS`, `MISSING`, or `CUT` if not listed."""
        cells = table.column(self.column)
        marks = np.where(positions(cells, self.values) < 0, CUT, FITS)
        return np.where([cell == "" for cell in cells], MISSING, marks)


@dataclasses.dataclass(frozen=True)
class Label(Standardized):
    r"""The label: $\pm 1$ by lists of values, or a standardized number.

    Args:
        column: The column.
        positive: The values of the label +1, for classification.
        negative: The values of the label -1.
        mean: $m$, for regression.
        scale: $s > 0$, for regression.
    """

    column: str
    positive: tuple[Value, ...] = ()
    negative: tuple[Value, ...] = ()
    mean: float | None = None
    scale: float | None = None

    def __post_init__(self):
        classes = bool(self.positive) and bool(self.negative)
        number = self.mean is not None and self.scale is not None
        if classes == number:
            raise ValueError(
                "give either positive and negative, the lists of values of the two "
                "classes, or mean and scale, the public constants of a numeric label."
            )
        if classes and (self.unit or self.decimal):
            raise ValueError(
                "unit and decimal are for a numeric label, and this label has classes; "
                "remove them."
            )
        check_values("positive and negative", (*self.positive, *self.negative))
        self.check_constants(self.mean, self.scale)

    def values(self, table: Table) -> np.ndarray:
        """The labels.

        Privacy:
            Row by row. A missing or unknown label is NaN, which leaves the record
            without influence later.
        """
        cells = table.column(self.column)
        if self.mean is not None and self.scale is not None:
            return self.standardized(cells, self.mean, self.scale)
        positive = positions(cells, self.positive) >= 0
        negative = positions(cells, self.negative) >= 0  # neither: NaN
        return np.where(positive, 1.0, np.where(negative, -1.0, np.nan))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes -1 and +1; none if the label is a number."""
        both = (" or ".join(map(named, v)) for v in (self.negative, self.positive))
        return tuple(filter(None, both))

    def fits(self, table: Table) -> np.ndarray:
        """Return the mark of each label; a missing label is unusable."""
        cells = table.column(self.column)
        if self.mean is None or self.scale is None:
            return listed(cells, (*self.positive, *self.negative))
        marks = self.marks(cells, self.mean, self.scale)
        return np.where(marks == MISSING, UNUSABLE, marks)


def named(value: Value) -> str:
    """The text of a value of a list, whole numbers without a point."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return str(int(value) if whole else value)


def positions(cells: Cells, values: tuple[Value, ...]) -> np.ndarray:
    """The position of each cell in the list `values`; -1 where it is not there.

    Args:
        cells: The cells.
        values: The public list. A text is a cell of the same text, a number every cell
            that reads as that number: 1 is `1` and `1.0`.

    Privacy:
        Cell by cell.
    """
    index = {value: i for i, value in enumerate(values)}
    if all(isinstance(value, str) for value in values):
        return np.asarray([index.get(cell, -1) for cell in cells], np.int32)
    found = (index.get(cell, index.get(number(cell), -1)) for cell in cells)
    return np.asarray([*found], np.int32)


def listed(cells: Cells, values: tuple[Value, ...]) -> np.ndarray:
    """Return the mark of each cell of a column with listed values."""
    return np.where(positions(cells, values) < 0, UNUSABLE, FITS)


def check_values(name: str, values: tuple[Value, ...]) -> None:
    """Raises `ValueError` where a cell could be two of the values, or one is none.

    Args:
        name: What to call the list in an error.
        values: The public list.
    """
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if not isinstance(value, str)]
    read = [number for number in map(number, texts) if number in numbers]
    listed = [*texts, *numbers, *read]  # the text "1" is the cell 1 too
    if len(set(listed)) < len(listed) or not np.isfinite(numbers).all():
        raise ValueError(
            f"{name} must be lists of values that differ, finite where they are "
            f"numbers, got {list(values)}. The text '1' and the number 1 are one value."
        )


def stacked(marks: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the marks of several columns, one row per record."""
    return np.stack([*marks.values()], 1).astype(np.int8)


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Appends a constant 1 and scales rows to unit length; those with a NaN are NaN."""
    rows = np.concatenate([features, np.ones((len(features), 1))], 1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
