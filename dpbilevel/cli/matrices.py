"""Records that are payoff matrices, for games."""

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from jaxtyping import Float, Int
from typing_extensions import override

from ..core.usability import Columns
from .columns import AbstractRecords, Standardized, Table, stacked
from .files import AbstractData, CsvFile


@dataclasses.dataclass(frozen=True, repr=False)
class Matrices(AbstractRecords):
    """One payoff matrix per record."""

    entries: Float[np.ndarray, "n rows columns"]
    marks: Int[np.ndarray, "n k"] | None = None

    def __len__(self) -> int:
        return len(self.entries)

    @override
    def take(self, rows: np.ndarray) -> Self:
        marks = None if self.marks is None else self.marks[rows]
        return type(self)(self.entries[rows], marks)

    @override
    def tree(self) -> np.ndarray:
        return self.entries

    @override
    def as_bytes(self) -> Iterator[bytes]:
        return (matrix.tobytes() for matrix in self.entries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixData(AbstractData):
    """Where matrices come from. They have no labels, features, sources or groups."""

    instead = '"csv_matrices"'

    @property
    @override
    def blocks(self) -> tuple[tuple[str, int], ...]:
        return ()

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns of a matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvMatrices(MatrixData, CsvFile, Standardized):
    """Payoff matrices from the columns of a file: entries are mapped as features are.

    There is one $m$ and one $s$ for all, so that payoffs stay comparable; a missing
    cell, or text that is no number, counts as 0.

    Args:
        columns: The columns, row of the matrix by row.
        mean: $m$, public.
        scale: $s > 0$, public.
        split_seed: The public seed of the choice of records, where the file has more.
            Not a privacy seed.
    """

    source: ClassVar[str] = "csv_matrices"

    columns: tuple[tuple[str, ...], ...]
    mean: float
    scale: float
    split_seed: int = 0

    def __post_init__(self):
        _check_rectangle("columns", self.columns)
        self.check_constants(self.mean, self.scale)

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return len(self.columns), len(self.columns[0])

    @override
    def encode(self, table: Table) -> Matrices:
        cells = [
            self.standardized(table.column(name), self.mean, self.scale)
            for row in self.columns  # one column of the file an entry
            for name in row
        ]
        entries = np.stack(cells, 1).reshape(-1, *self.shape)
        return Matrices(entries.astype(np.float32), stacked(self.cell_marks(table)))

    @override
    def cell_marks(self, table: Table) -> dict[str, np.ndarray]:
        names = self.checked_columns.names
        return {n: self.marks(table.column(n), self.mean, self.scale) for n in names}

    @property
    @override
    def checked_columns(self) -> Columns:
        return Columns(
            tuple(dict.fromkeys(name for row in self.columns for name in row))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedMatrices(MatrixData):
    """Synthetic matrices with entries of -1 or 1 around a mean matrix.

    Args:
        mean: The mean matrix, row by row, of entries in [-1, 1].
        data_seed: The public seed of the records. Not a privacy seed.
    """

    source: ClassVar[str] = "generated_matrices"

    mean: tuple[tuple[float, ...], ...]
    data_seed: int = 0

    def __post_init__(self):
        _check_rectangle("mean", self.mean)
        if not all(-1 <= entry <= 1 for row in self.mean for entry in row):
            raise ValueError("mean must hold numbers in [-1, 1]: those of signs.")

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return len(self.mean), len(self.mean[0])

    @property
    @override
    def split_seed(self) -> int:
        return self.data_seed

    @override
    def load(self, file: Path | None) -> Matrices:
        rng = np.random.default_rng(self.data_seed)
        uniform = rng.random((self.training, *self.shape))
        signs = np.where(uniform < (1 + np.asarray(self.mean)) / 2, 1.0, -1.0)
        return Matrices(signs.astype(np.float32))


def _check_rectangle(name: str, rows: tuple[tuple, ...]) -> None:
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{name} must be a list of rows of one length, at least one of each."
        )


_KINDS = CsvMatrices, GeneratedMatrices
MATRICES: dict[str, type[AbstractData]] = {kind.source: kind for kind in _KINDS}
