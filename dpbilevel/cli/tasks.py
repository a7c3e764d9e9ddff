"""What the command line can solve: one class per application, one field per key."""

import abc
import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from ..applications.base import (
    PenaltyTuning,
    SourceWeighting,
    penalty_tuning,
    source_weighting,
    source_weights,
)
from ..bilevel.problem import BilevelProblem
from ..games.groups import (
    GroupGame,
    group_fair,
    group_robust,
    group_start,
    group_weights,
)
from ..games.problem import (
    AbstractSaddleProblem,
    AbstractVariationalInequality,
    SaddleProblem,
    matrix_game,
)
from ..onelevel.linear_models import Logistic
from ..onelevel.losses import logistic_loss, squared_loss
from ..onelevel.problem import FiniteSum
from .files import AbstractData
from .matrices import MATRICES
from .tables import Location
from .task import AbstractTask, Blocks, Start, dimension, listed_names

_LOSSES = {"logistic": logistic_loss, "squared": squared_loss}


@dataclasses.dataclass(frozen=True)
class TrainingTask(AbstractTask):
    """Trains a linear model on all records: one level.

    Args:
        loss: The model's loss, `"logistic"` or `"squared"`.
        ridge: The public ridge penalty of the model.
    """

    loss: Literal["logistic", "squared"]
    ridge: float = 0.0

    label = "coefficient"
    of = "feature"
    problem_type = FiniteSum
    shows_model = True

    def __post_init__(self):
        _checks.non_negative("training", ridge=self.ridge)

    @override
    def problem(self, blocks: Blocks) -> FiniteSum:
        ridge = self.ridge

        def public(w: PyTree):
            return ridge * optax.tree.norm(w, squared=True)

        return FiniteSum(_LOSSES[self.loss], public=public if ridge else None)

    @override
    def start(self, blocks: Blocks) -> Float[Array, " d"]:
        return jnp.zeros(dimension(blocks), jnp.float32)

    @override
    def names(self, data: AbstractData) -> tuple[str, ...]:
        return data.features

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        return np.asarray(w)


@dataclasses.dataclass(frozen=True)
class SourceWeightingTask(AbstractTask):
    """Weights the sources of the training records by the validation records.

    Args:
        loss: The model's loss, `"logistic"` or `"squared"`.
        num_sources: The number of sources.
        ridge: The public ridge penalty of the model.
        weight_penalty: The public penalty of unequal weights.
        parametrization: `"logits"` or `"simplex"`.
    """

    loss: Literal["logistic", "squared"]
    num_sources: int
    ridge: float = 0.0
    weight_penalty: float = 0.0
    parametrization: Literal["logits", "simplex"] = "logits"

    label = "weight"
    of = "source"
    remark = (
        "  (of one record of the source; 0 if the source was dropped; the weight of a "
        "source without records says nothing: compare the config with the file)"
    )
    problem_type = SourceWeighting
    places = "sources"
    declared = "num_sources = {}"

    @property
    @override
    def count(self) -> int:
        return self.num_sources

    def __post_init__(self):
        _checks.count("source_weighting", num_sources=self.num_sources)
        _checks.non_negative(
            "source_weighting", ridge=self.ridge, weight_penalty=self.weight_penalty
        )

    @override
    def problem(self, blocks: Blocks) -> BilevelProblem:
        return source_weighting(
            _LOSSES[self.loss],
            self.num_sources,
            ridge=self.ridge,
            weight_penalty=self.weight_penalty,
            parametrization=self.parametrization,
        )

    @override
    def start(self, blocks: Blocks) -> Start:
        k = self.num_sources
        x = jnp.full(k, 0.0 if self.parametrization == "logits" else 1 / k)
        return x.astype(jnp.float32), jnp.zeros(dimension(blocks), jnp.float32)

    @override
    def names(self, data: AbstractData) -> tuple[str, ...]:
        return listed_names(data.sources, "source", self.num_sources)

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        x = w[0]
        # A map along the last axis, whatever axes are before it.
        rows = jnp.reshape(jnp.asarray(x), (-1, self.num_sources))
        weights = jax.vmap(lambda row: source_weights(row, self.parametrization))(rows)
        return np.asarray(weights).reshape(np.shape(x))


@dataclasses.dataclass(frozen=True)
class PenaltyTuningTask(AbstractTask):
    """Tunes quadratic penalties of a linear model by the validation records.

    Args:
        loss: The model's loss, `"logistic"` or `"squared"`.
        groups: What shares one penalty: `"single"` (all coefficients), `"per_block"`
            (those of one block of features) or `"per_feature"`.
        bounds: The smallest and the largest log-penalty.
        start_at: Where log-penalties start, `"middle"` or `"low"` of the bounds. Least
            penalties are better for what penalizes little or nothing of itself:
            `OneLevel`, `ScaledGroups`.
    """

    loss: Literal["logistic", "squared"]
    groups: Literal["single", "per_block", "per_feature"] = "per_block"
    bounds: tuple[float, float] = (-8.0, 2.0)
    start_at: Literal["middle", "low"] = "middle"

    planned: ClassVar[dict[str, Any]] = {"start_at": "low"}
    label = "log-penalty"
    of = "group of coefficients"
    problem_type = PenaltyTuning

    def __post_init__(self):
        low, high = self.bounds
        if not low < high:
            raise ValueError(
                f"bounds must be increasing, got [{low:g}, {high:g}]; put the smallest "
                "log-penalty first."
            )

    @override
    def problem(self, blocks: Blocks) -> BilevelProblem:
        groups = self._groups(blocks)
        return penalty_tuning(_LOSSES[self.loss], groups, bounds=self.bounds)

    def _groups(self, blocks: Blocks) -> np.ndarray:
        """The number of the penalty of each coefficient."""
        return {
            "single": np.zeros(dimension(blocks), int),
            "per_block": np.repeat(np.arange(len(blocks)), [n for _, n in blocks]),
            "per_feature": np.arange(dimension(blocks)),
        }[self.groups]

    @override
    def start(self, blocks: Blocks) -> Start:
        count = 1 + int(np.max(self._groups(blocks)))
        low, high = self.bounds
        first = low if self.start_at == "low" else (low + high) / 2
        x = jnp.full(count, first, jnp.float32)
        return x, jnp.zeros(dimension(blocks), jnp.float32)

    @override
    def names(self, data: AbstractData) -> tuple[str, ...]:
        if self.groups == "single":
            return ("all features",)
        if self.groups == "per_block":
            return tuple(name for name, _ in data.blocks)
        return data.features

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        return np.asarray(w[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupTask(AbstractTask):
    """Fits a logistic model to groups whose weights a second player chooses.

    Args:
        shares: The declared share of each group; public, not taken from the records.
        radius: The ball of models.
        scale: Units of the weights; by default those that balance the bound.
        ridge: The public ridge penalty of the model.
    """

    shares: tuple[float, ...]
    radius: float
    scale: float | None = None
    ridge: float = 0.0

    label = "weight"
    of = "group"
    problem_type = GroupGame
    places = "groups"
    declared = "{} shares"

    @property
    @override
    def count(self) -> int:
        return len(self.shares)

    def __post_init__(self):
        self.problem(())

    @property
    def fields(self) -> dict[str, Any]:
        """What every game of groups is built from, beside loss and shares."""
        return {"radius": self.radius, "scale": self.scale, "ridge": self.ridge}

    @override
    @abc.abstractmethod
    def problem(self, blocks: Blocks) -> AbstractSaddleProblem: ...

    @override
    def start(self, blocks: Blocks) -> Start:
        zeros = jnp.zeros(dimension(blocks), jnp.float32)
        return group_start(self.problem(blocks), zeros, self.shares)

    @override
    def names(self, data: AbstractData) -> tuple[str, ...]:
        return listed_names(data.groups, "group", len(self.shares))

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        return np.asarray(group_weights(self.problem(()), jnp.asarray(w[1])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFairTask(GroupTask):
    """Fits a logistic model to the group that is worst off."""

    @override
    def problem(self, blocks: Blocks) -> GroupGame:
        return group_fair(Logistic(), self.shares, **self.fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRobustTask(GroupTask):
    """Fits a logistic model to the mixtures of groups near to the declared one.

    Args:
        strength: The weight of the public chi-square penalty that keeps the mixture
            near to the shares.
    """

    strength: float

    @override
    def problem(self, blocks: Blocks) -> GroupGame:
        return group_robust(Logistic(), self.shares, self.strength, **self.fields)


@dataclasses.dataclass(frozen=True)
class MatrixGameTask(AbstractTask):
    """Mixes rows so that the mean payoff of the best reply among columns is least.

    Args:
        rows: The number of rows of every record's matrix.
        columns: The number of its columns.
    """

    rows: int
    columns: int

    label = "weight"
    of = "row and column"
    problem_type = AbstractVariationalInequality
    has_model = False
    data_types = MATRICES

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
    def problem(self, blocks: Blocks) -> SaddleProblem:
        return matrix_game(self.rows, self.columns)

    @override
    def start(self, blocks: Blocks) -> Start:
        shape = self.rows, self.columns
        x, y = (jnp.full(count, 1 / count, jnp.float32) for count in shape)
        return x, y

    @override
    def names(self, data: AbstractData) -> tuple[str, ...]:
        rows = (f"row {i}" for i in range(self.rows))
        return (*rows, *(f"column {j}" for j in range(self.columns)))

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        return np.concatenate([np.asarray(v) for v in w], axis=-1)


TASKS: dict[str, type[AbstractTask]] = {
    "training": TrainingTask,
    "source_weighting": SourceWeightingTask,
    "penalty_tuning": PenaltyTuningTask,
    "group_fair": GroupFairTask,
    "group_robust": GroupRobustTask,
    "matrix_game": MatrixGameTask,
}
