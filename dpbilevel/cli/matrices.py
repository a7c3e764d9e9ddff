"""Records that are payoff matrices, for games."""

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from typing_extensions import override

from .columns import check_standardizing, standardized
from .files import CsvFile, read_csv, refuse_file


@dataclasses.dataclass(frozen=True)
class Matrices:
    """One payoff matrix per record. NON-PRIVATE: this is the data.

    Attributes:
        entries: Of shape `(n, rows, columns)`.
    """

    entries: np.ndarray

    def __repr__(self) -> str:
        """The class name; never a value."""
        return "Matrices(...)"

    def __len__(self) -> int:
        """The number of records."""
        return len(self.entries)

    def take(self, rows: np.ndarray) -> "Matrices":
        """The records at `rows`.

        Args:
            rows: Indices.
        """
        return Matrices(self.entries[rows])

    def tree(self) -> np.ndarray:
        """The records as a matrix game reads them."""
        return self.entries

    def as_bytes(self) -> Iterator[bytes]:
        """The bytes of each record."""
        return (matrix.tobytes() for matrix in self.entries)


class MatrixData(abc.ABC):
    """Where matrices come from. They have no labels, features, sources or groups."""

    validation = 0
    sources = None
    groups = None
    blocks = ()

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns of a matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvMatrices(CsvFile, MatrixData):
    r"""Payoff matrices from the columns of a file: entries are mapped as features are.

    An entry is $\mathrm{clip}((t(v) - m) / s) / c$ with one $m$ and one $s$ for all, so
    that payoffs stay comparable; a missing cell, or text that is no number, counts as
    0.

    Args:
        training: The number of records.
        columns: The columns, row of the matrix by row.
        mean: $m$, public.
        scale: $s > 0$, public.
        transform: $t$: `"none"` or `"log1p"`.
        clip: $c > 0$; values are clipped to $[-c, c]$.
        split_seed: The public seed of the choice of records, where the file has more.
            Not a privacy seed.
    """

    training: int
    columns: tuple[tuple[str, ...], ...]
    mean: float
    scale: float
    transform: Literal["none", "log1p"] = "none"
    clip: float = 3.0
    split_seed: int = 0

    def __post_init__(self):
        _check_rectangle("columns", self.columns)
        check_standardizing(self)

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return len(self.columns), len(self.columns[0])

    def records(self, base: Path, override: Path | None) -> Matrices:
        """Reads and encodes the file.

        Args:
            base: The folder of the config.
            override: A file to read instead.

        Raises:
            ValueError: The file is missing, or a column is.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """
        table = read_csv(self.file(base, override))
        cells = [
            standardized(table.column(name), self.mean, self.scale, self)
            for row in self.columns
            for name in row
        ]
        entries = np.stack(cells, 1).reshape(-1, *self.shape)
        return Matrices(entries.astype(np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedMatrices(MatrixData):
    """Synthetic matrices with entries of -1 or 1 around a mean matrix.

    Args:
        training: The number of records.
        mean: The mean matrix, row by row, of entries in [-1, 1].
        data_seed: The public seed of the records. Not a privacy seed.
    """

    training: int
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
    def split_seed(self) -> int:
        """The seed of the split, that of the records."""
        return self.data_seed

    def records(self, base: Path, override: Path | None) -> Matrices:
        """Generates the records.

        Args:
            base: Not used.
            override: Must be `None`.

        Raises:
            ValueError: A file was given.
        """
        del base
        refuse_file(override, "generated_matrices", '"csv_matrices"')
        rng = np.random.default_rng(self.data_seed)
        uniform = rng.random((self.training, *self.shape))
        signs = np.where(uniform < (1 + np.asarray(self.mean)) / 2, 1.0, -1.0)
        return Matrices(signs.astype(np.float32))


def _check_rectangle(name: str, rows: tuple[tuple, ...]) -> None:
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{name} must be a list of rows of one length, at least one of each."
        )
