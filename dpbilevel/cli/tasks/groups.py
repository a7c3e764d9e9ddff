"""The tasks `group_fair` and `group_robust`: a model for groups, as a game."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from ...games.groups import (
    GroupGame,
    group_fair,
    group_robust,
    group_start,
    group_weights,
)
from ...onelevel.losses import Logistic
from ..data import CsvData
from ..task import AbstractModel, Blocks, Start, Task
from ..toml_tables import Location


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractGroups(AbstractModel):
    """Fits a logistic model to groups whose weights a second player chooses.

    Args:
        shares: The declared share of each group; public, not taken from the records.
        radius: The norm of the largest model.
        scale: Units of the weights; by default those that balance the bound.
        ridge: The public ridge penalty of the model.
    """

    shares: tuple[float, ...]
    radius: float
    scale: float | None = None
    ridge: float = 0.0

    def __post_init__(self):
        self.problem(())

    @override
    def mistakes(self, data: CsvData, place: Location) -> Iterator[ValueError]:
        if not data.label.positive:
            yield place.child("label").error(
                "the task has two classes: give positive and negative, each with the "
                "values of one class or several."
            )

    @property
    @override
    def marks(self) -> tuple[float, ...]:
        return self.shares

    @property
    def common(self) -> dict[str, Any]:
        """Arguments that all games of groups take, besides loss and shares, by name."""
        return {"radius": self.radius, "scale": self.scale, "ridge": self.ridge}

    @override
    @abc.abstractmethod
    def problem(self, blocks: Blocks) -> GroupGame: ...

    @override
    def start(self, blocks: Blocks) -> Start:
        zeros = jnp.zeros(sum(size for _, size in blocks), jnp.float32)
        return group_start(self.problem(blocks), zeros, self.shares)

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        return np.asarray(group_weights(self.problem(()), jnp.asarray(w[1])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fair(AbstractGroups):
    """Table `[model]` of `group_fair`; its fields are those of `AbstractGroups`."""

    @override
    def problem(self, blocks: Blocks) -> GroupGame:
        return group_fair(Logistic(), self.shares, **self.common)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Robust(AbstractGroups):
    """Table `[model]` of `group_robust`.

    Args:
        strength: The weight of the public chi-square penalty that keeps the mixture
            near to the shares.
    """

    strength: float

    @override
    def problem(self, blocks: Blocks) -> GroupGame:
        return group_robust(Logistic(), self.shares, self.strength, **self.common)


_SHARES = """\
{% if places %}
shares = {{ shares|toml }}  # shares of the groups, from public knowledge
{% else %}
# shares = [0.5, 0.5]  # REQUIRED: shares of the groups, from public knowledge
{% endif %}
radius = 5.0  # norm of the largest model"""
_SOLVER = """

[solver]
type = "GroupDescent"  # its settings follow from the sizes"""
_STRENGTH = """
strength = 0.1  # near 0: the group that is worst off; large: all records"""
_COMMON: dict[str, Any] = {
    "problem_type": GroupGame,
    "label": "weight",
    "of": "group",
    "terms": {
        "gradient and losses": "a step of the model, and the losses of the groups",
        "operator": "a step of both players",
        "resolvent": "a step of both players",
    },
    "places": "groups",
    "marked": "declared shares",
    "is_game": True,
}

GROUP_FAIR = Task(
    name="group_fair",
    summary="A model for the group that is worst off.",
    model=Fair,
    template=_SHARES + _SOLVER,
    **_COMMON,
)
GROUP_ROBUST = Task(
    name="group_robust",
    summary="A model for mixtures of groups other than that of the records.",
    model=Robust,
    template=_SHARES + _STRENGTH + _SOLVER,
    **_COMMON,
)
