"""The task `training`: one linear model of all records."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from ... import _checks
from ...onelevel.losses import logistic_loss, squared_loss
from ...onelevel.problem import FiniteSum
from ..data import AbstractData
from ..task import AbstractModel, Blocks, Task, dimension

LOSSES = {"logistic": logistic_loss, "squared": squared_loss}


@dataclasses.dataclass(frozen=True)
class Training(AbstractModel):
    """Table `[model]` of `training`.

    Args:
        loss: The model's loss, `"logistic"` or `"squared"`.
        ridge: The public ridge penalty of the model.
    """

    loss: Literal["logistic", "squared"]
    ridge: float = 0.0

    def __post_init__(self):
        _checks.non_negative("training", ridge=self.ridge)

    @override
    def problem(self, blocks: Blocks) -> FiniteSum:
        ridge = self.ridge

        def public(w: PyTree):
            return ridge * optax.tree.norm(w, squared=True)

        return FiniteSum(LOSSES[self.loss], public=public if ridge else None)

    @override
    def start(self, blocks: Blocks) -> Float[Array, " d"]:
        return jnp.zeros(dimension(blocks), jnp.float32)

    @override
    def names(self, data: AbstractData) -> tuple[str, ...]:
        return data.features

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        return np.asarray(w)


TRAINING = Task(
    name="training",
    summary="One linear model of all records.",
    model=Training,
    problem_type=FiniteSum,
    label="coefficient",
    of="feature",
    terms={"gradient": "a step of the model"},
    template="""\
loss = "{{ loss }}"  # "logistic" for two classes, "squared" for a number
# ridge = 0.0  # public ridge penalty of the model""",
    shows_model=True,
)
