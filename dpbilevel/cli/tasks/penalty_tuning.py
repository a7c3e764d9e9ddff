"""The task `penalty_tuning`: penalties of features, by validation records."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from ...applications.penalties import PenaltyTuning, penalty_tuning
from ...bilevel.problem import BilevelProblem
from ..data import AbstractData
from ..task import TWO_LEVEL_TERMS, AbstractModel, Blocks, Start, Task, dimension
from .training import LOSSES


@dataclasses.dataclass(frozen=True)
class Penalties(AbstractModel):
    """Table `[model]` of `penalty_tuning`.

    Args:
        loss: The model's loss, `"logistic"` or `"squared"`.
        groups: The coefficients that share a penalty: `"single"` (all of them),
            `"per_block"` (those of one block of features) or `"per_feature"`.
        bounds: The smallest and the largest log-penalty.
        start_at: The initial log-penalties, `"middle"` or `"low"` of the bounds. Low
            ones are better for solvers that penalize little or nothing by themselves:
            `OneLevel`, `ScaledGroups`.
    """

    loss: Literal["logistic", "squared"]
    groups: Literal["single", "per_block", "per_feature"] = "per_block"
    bounds: tuple[float, float] = (-8.0, 2.0)
    start_at: Literal["middle", "low"] = "middle"

    def __post_init__(self):
        low, high = self.bounds
        if not low < high:
            raise ValueError(
                f"bounds must be increasing, got [{low:g}, {high:g}]; put the smallest "
                "log-penalty first."
            )

    @property
    @override
    def axis(self) -> tuple[float, float]:
        return self.bounds

    @override
    def problem(self, blocks: Blocks) -> BilevelProblem:
        groups = self._groups(blocks)
        return penalty_tuning(LOSSES[self.loss], groups, bounds=self.bounds)

    def _groups(self, blocks: Blocks) -> np.ndarray:
        """Return the number of the penalty of each coefficient."""
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


PENALTY_TUNING = Task(
    name="penalty_tuning",
    summary="Some features may be noise: tune their penalties.",
    model=Penalties,
    problem_type=PenaltyTuning,
    label="log-penalty",
    of="group of coefficients",
    terms=TWO_LEVEL_TERMS | {"screen": "how much each group of features matters"},
    template="""\
loss = "{{ loss }}"  # "logistic" for two classes, "squared" for a number
# groups = "per_block"  # coefficients with one penalty; "single" or "per_feature\"""",
    planned={"start_at": "low"},
)
