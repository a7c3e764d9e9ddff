"""The task `training`: one linear model of all records; losses of all tasks."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from ... import _checks
from ...onelevel.losses import (
    Record,
    example,
    logistic_loss,
    score,
    squared_loss,
)
from ...onelevel.problem import FiniteSum
from ..data import CsvData
from ..task import AbstractModel, Blocks, Task, dimension
from ..toml_tables import Location

Loss = Literal["logistic", "squared", "softmax"]


def softmax_loss(weights: Float[Array, "d k"], record: Record) -> Float[Array, ""]:
    r"""Return $-\log \mathrm{softmax}(W^\top a)_b$; NaN if the class $b$ is NaN.

    Args:
        weights: $W$, a column for each class.
        record: `{"features": a, "label": b}`.
    """
    row, label = example(record)
    known = jnp.isfinite(label)
    index = jnp.where(known, label, 0).astype(jnp.int32)
    loss = optax.losses.softmax_cross_entropy_with_integer_labels
    return loss(score(weights, row), index) * jnp.where(known, 1, jnp.nan)


LOSSES = {
    "logistic": logistic_loss,
    "squared": squared_loss,
    "softmax": softmax_loss,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractLinear(AbstractModel):
    """A linear model of a label.

    Args:
        loss: The model's loss, `"logistic"`, `"squared"` or `"softmax"`.
        num_classes: The number of classes of the label, for `"softmax"`.
    """

    loss: Loss
    num_classes: int = 0

    def __post_init__(self):
        several = self.loss == "softmax"
        if several == (self.num_classes < 2):
            need = "needs num_classes, two or more" if several else "has no num_classes"
            raise ValueError(f'loss = "{self.loss}" {need}.')

    @override
    def check(self, data: CsvData, place: Location) -> None:
        super().check(data, place)
        count = len(data.label.classes)
        kind, known = "two classes", ("logistic", "squared")
        if count:
            kind, known = f"{count} classes", ("softmax",)
        elif not data.label.numbers:
            kind, known = "a number", ("squared",)
        if self.loss not in known or self.num_classes != count:
            asked = f'loss = "{known[0]}"'
            asked += f" and num_classes = {count}" if count else ""
            raise place.child("label").error(
                f"describes {kind}; give {asked} in [model]."
            )

    def zeros(self, blocks: Blocks) -> Array:
        """Return the coefficients of no model: a column for each of several classes."""
        columns = (self.num_classes,) if self.num_classes else ()
        return jnp.zeros((dimension(blocks), *columns), jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(AbstractLinear):
    """Table `[model]` of `training`.

    Args:
        ridge: The public ridge penalty of the model.
    """

    ridge: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        _checks.non_negative("training", ridge=self.ridge)

    @override
    def problem(self, blocks: Blocks) -> FiniteSum:
        ridge = self.ridge

        def public(w: PyTree):
            return ridge * optax.tree.norm(w, squared=True)

        return FiniteSum(LOSSES[self.loss], public=public if ridge else None)

    @override
    def start(self, blocks: Blocks) -> Array:
        return self.zeros(blocks)

    @override
    def names(self, data: CsvData) -> tuple[str, ...]:
        return data.coefficients

    @override
    def shown(self, w: PyTree) -> np.ndarray:
        w = np.asarray(w)
        return w.reshape(*w.shape[:-2], -1) if self.num_classes else w


TRAINING = Task(
    name="training",
    summary="One linear model of all records.",
    model=Training,
    problem_type=FiniteSum,
    label="coefficient",
    of="feature",
    terms={"gradient": "a step of the model"},
    template="""\
{{ loss }}
# ridge = 0.0  # public ridge penalty of the model""",
    shows_model=True,
)
