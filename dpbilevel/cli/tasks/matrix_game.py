"""The task `matrix_game`: a mixture of rows against the best reply among columns.

Its records are matrices of payoffs, from the columns of a file or generated.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from ...core.usability import Columns
from ...games.bilinear import BilinearGame, matrix_game
from ..columns import Records, Standardized
from ..data import AbstractGenerated, CsvFile, stacked
from ..tables import Table
from ..task import AbstractModel, Blocks, Start, Task
from ..toml_tables import Location


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvMatrices(CsvFile, Standardized):
    """Payoff matrices from the columns of a file: entries are mapped as features are.

    All entries share one $m$ and one $s$, so that payoffs stay comparable. A missing
    cell, or text that is no number, counts as 0.

    Args:
        columns: The columns, row of the matrix by row.
        mean: $m$, public.
        scale: $s > 0$, public.
        split_seed: Public seed of the choice of records, if the file has more. Not a
            privacy seed.
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
    def shape(self) -> tuple[int, ...]:
        """Numbers of rows and columns of a matrix."""
        return np.shape(self.columns)

    @override
    def encode(self, table: Table) -> Records:
        found = {
            name: self.standardized(table.column(name), self.mean, self.scale)
            for name in self.checked_columns.names
        }
        cells = [found[name][0] for row in self.columns for name in row]
        entries = np.stack(cells, 1).reshape(-1, *self.shape).astype(np.float32)
        marks = {name: marks for name, (_, marks) in found.items()}
        marks = stacked(marks, self.checked_columns)
        return Records(entries, np.zeros(table.rows), marks=marks)

    @property
    @override
    def checked_columns(self) -> Columns:
        names = dict.fromkeys(name for row in self.columns for name in row)
        return Columns(tuple(names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedMatrices(AbstractGenerated):
    """Synthetic matrices with entries of -1 or 1 around a mean matrix.

    Args:
        mean: The mean matrix, row by row, of entries in [-1, 1].
    """

    source: ClassVar[str] = "generated_matrices"

    mean: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        _check_rectangle("mean", self.mean)
        if not all(-1 <= entry <= 1 for row in self.mean for entry in row):
            raise ValueError("mean must hold numbers in [-1, 1]: means of signs.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of rows and columns of a matrix."""
        return np.shape(self.mean)

    @override
    def load(self, file: Path | None, person: str = "") -> Records:
        rng = np.random.default_rng(self.data_seed)
        uniform = rng.random((self.training, *self.shape))
        signs = np.where(uniform < (1 + np.asarray(self.mean)) / 2, 1.0, -1.0)
        return Records(signs.astype(np.float32), np.zeros(self.training))


@dataclasses.dataclass(frozen=True)
class Matrix(AbstractModel):
    """Table `[model]` of `matrix_game`.

    Args:
        rows: The number of rows of every record's matrix.
        columns: The number of its columns.
    """

    rows: int
    columns: int

    def __post_init__(self):
        self.problem(())

    @override
    def check(self, data: Any, place: Location) -> None:
        if data.shape != (self.rows, self.columns):
            raise place.error(
                f"lists matrices of {data.shape[0]} rows and {data.shape[1]} columns, "
                f"but [model] has rows = {self.rows} and columns = {self.columns}."
            )

    @override
    def problem(self, blocks: Blocks) -> BilinearGame:
        return matrix_game(self.rows, self.columns)

    @override
    def start(self, blocks: Blocks) -> Start:
        shape = self.rows, self.columns
        x, y = (jnp.full(count, 1 / count, jnp.float32) for count in shape)
        return x, y

    @override
    def names(self, data: Any) -> tuple[str, ...]:
        rows = (f"row {i}" for i in range(self.rows))
        return (*rows, *(f"column {j}" for j in range(self.columns)))

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        return np.concatenate([np.asarray(v) for v in w], axis=-1)


MATRIX_GAME = Task(
    name="matrix_game",
    summary="A mixture of rows with the least payoff of the best reply among columns.",
    model=Matrix,
    problem_type=BilinearGame,
    label="weight",
    of="row and column",
    terms={
        "payoff": "the mean matrix",
        "operator": "a step of both players",
        "resolvent": "a step of both players",
    },
    has_model=False,
    data_types={kind.source: kind for kind in (CsvMatrices, GeneratedMatrices)},
)


def _check_rectangle(name: str, rows: tuple[tuple, ...]) -> None:
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError(f"{name} must be a list of rows of one length, at least one.")
