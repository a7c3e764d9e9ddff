"""The task `matrix_game`: a mixture of rows against the best reply among columns."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from ...games.problem import AbstractVariationalInequality, SaddleProblem, matrix_game
from ..data import MATRICES
from ..tables import Location
from ..task import AbstractModel, Blocks, Start, Task


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
                f"but [model] has rows = {self.rows} and columns = {self.columns}. "
                "Correct one of them."
            )

    @override
    def problem(self, blocks: Blocks) -> SaddleProblem:
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
    problem_type=AbstractVariationalInequality,
    label="weight",
    of="row and column",
    terms={
        "operator": "a step of both players",
        "resolvent": "a step of both players",
    },
    has_model=False,
    data_types=MATRICES,
)
