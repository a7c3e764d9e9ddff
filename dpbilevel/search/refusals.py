"""Numbers that an estimator may refuse to judge, and the rows that hold one."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
from jaxtyping import Float, Int

# Estimators that compute in single precision refuse what overflows in it.
_LARGEST = float(np.finfo(np.float32).max)
# By their place: NaN, infinite, and finite but too large.
_KINDS = ((math.nan,), (math.inf, -math.inf), (1e300, -1e300))
_TRIED = 64  # columns of a table

Table: TypeAlias = Any  # an array, a sparse matrix, a data frame or a list
_Indices: TypeAlias = Int[np.ndarray, " k"]


class Refusals:
    """In which columns an estimator refuses NaN, infinity and the largest numbers.

    Rows are judged each by itself, so that none decides about another, and before any
    prediction, so that none decides how many there are. Lists, and texts and objects in
    arrays and data frames, are not judged; nor are numbers below the largest of single
    precision that an estimator refuses for a reason of its own. A row with one of these
    is found by further predictions, whose number is not protected.

    Args:
        refused: For inputs and for targets, per kind of number, the columns; `None` for
            all of them.
    """

    def __init__(self, refused: list[list[_Indices | None]]):
        self._refused = refused

    @classmethod
    def untried(cls) -> Self:
        """NaN and infinity in every column."""
        nowhere = np.zeros(0, int)
        return cls([[None, None, nowhere], [None, None, nowhere]])

    @classmethod
    def tried(
        cls,
        public: Callable[[int], list[Table]],
        accepts: Callable[[list[Table]], bool],
    ) -> Self:
        """What is refused of public rows of which one number is replaced.

        Of many columns some are tried, and stand for all if they agree; if they do not,
        nothing is refused.

        Args:
            public: Makes copies of that many public rows, or more: inputs and targets.
            accepts: Whether no row of such inputs and targets is refused.
        """

        def refuses(place, kind, columns):
            tables = public(len(kind) * len(columns))
            values = np.repeat(kind, len(columns))
            columns = np.tile(columns, len(kind))
            tables[place] = _with_numbers(tables[place], columns, values)
            return not accepts(tables)

        def refused(place, kind):
            every = _numeric(public(1)[place])
            some = every[:: max(1, math.ceil(len(every) / _TRIED))]
            if not len(some) or not refuses(place, kind, some):
                return some[:0]
            found = np.asarray(
                [refuses(place, kind, some[[i]]) for i in range(len(some))], bool
            )
            if found.all():
                return None
            return some[found] if len(some) == len(every) else some[:0]

        return cls([[refused(place, kind) for kind in _KINDS] for place in range(2)])

    def rows(self, tables: Sequence[Table]) -> _Indices:
        """The rows of inputs and targets with a number refused in its column."""
        found = [np.zeros(0, int)]
        for table, refused in zip(tables, self._refused, strict=True):
            rows, columns, values = _unusual(table)
            kinds = np.where(np.isnan(values), 0, np.where(np.isinf(values), 1, 2))
            for kind, where in enumerate(refused):
                here = np.isin(columns, columns if where is None else where)
                found.append(rows[(kinds == kind) & here])
        return np.unique(np.concatenate(found))


def _numeric(table: Table) -> _Indices:
    """The columns of numbers."""
    if hasattr(table, "columns"):
        kinds = list(table.dtypes)
    else:
        width = math.prod(getattr(table, "shape", (0, 0))[1:])
        kinds = [getattr(table, "dtype", None)] * width
    numbers = [isinstance(kind, np.dtype) and kind.kind in "fiu" for kind in kinds]
    return np.flatnonzero(numbers)


def _unusual(table: Table) -> tuple[_Indices, _Indices, Float[np.ndarray, " k"]]:
    """Rows, columns and values of the numbers that are of one of the kinds."""
    columns = _numeric(table)
    if not len(columns):
        return columns, columns, columns.astype(float)
    if hasattr(table, "tocoo"):
        entries = table.tocoo()
        unusual = ~(np.abs(entries.data) <= _LARGEST)
        return entries.row[unusual], entries.col[unusual], entries.data[unusual]
    if hasattr(table, "columns"):
        parts = [table.iloc[:, column].to_numpy(np.float64) for column in columns]
        numbers = np.stack(parts, axis=1)
    else:
        numbers = np.asarray(table).reshape(len(table), -1)
    rows, places = np.nonzero(~(np.abs(numbers) <= _LARGEST))
    return rows, columns[places], numbers[rows, places]


def _with_numbers(
    table: Table, columns: _Indices, values: Float[np.ndarray, " k"]
) -> Table:
    """A table whose first rows have these values, one each, in these columns."""
    rows = np.arange(len(columns))
    if hasattr(table, "columns"):
        for column in np.unique(columns):
            numbers = table.iloc[:, column].to_numpy(np.float64, copy=True)
            numbers[rows[columns == column]] = values[columns == column]
            table.isetitem(column, numbers)
        return table
    if hasattr(table, "tolil"):
        entries = table.astype(np.float64).tolil()
        entries[rows, columns] = values
        return entries.tocsr()
    numbers = np.array(table, np.float64).reshape(len(table), -1)
    numbers[rows, columns] = values
    return numbers.reshape(np.shape(table))
