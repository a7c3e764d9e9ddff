"""The task `source_weighting`: weights of sources, by clean validation records."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from ... import _checks
from ...applications.sources import SourceWeighting, source_weighting, source_weights
from ...bilevel.problem import BilevelProblem
from ..data import AbstractData
from ..task import (
    TWO_LEVEL_TERMS,
    AbstractModel,
    Blocks,
    Start,
    Task,
    dimension,
    listed_names,
)
from .training import LOSSES


@dataclasses.dataclass(frozen=True)
class Weighting(AbstractModel):
    """Table `[model]` of `source_weighting`.

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

    def __post_init__(self):
        owner = "source_weighting"
        _checks.count(owner, num_sources=self.num_sources)
        _checks.non_negative(
            owner, ridge=self.ridge, weight_penalty=self.weight_penalty
        )

    @property
    @override
    def count(self) -> int:
        return self.num_sources

    @property
    @override
    def marks(self) -> tuple[float, ...]:
        return (1 / self.num_sources,) * self.num_sources

    @override
    def problem(self, blocks: Blocks) -> BilevelProblem:
        return source_weighting(
            LOSSES[self.loss],
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


SOURCE_WEIGHTING = Task(
    name="source_weighting",
    summary="Some sources may be bad: weigh them by clean records.",
    model=Weighting,
    problem_type=SourceWeighting,
    label="weight",
    of="source",
    terms=TWO_LEVEL_TERMS
    | {
        "models": "a model for each source, and one for all of them",
        "moments": "in which directions predictions of these models differ",
        "mixture": "how much each of these models counts",
        "score": "how well a model fits each source",
        "remoments": "the same, with the model of the kept sources",
        "remixture": "how much each model counts in the released one",
    },
    template="""\
loss = "{{ loss }}"  # "logistic" for two classes, "squared" for a number
{% if places %}
num_sources = {{ places|length }}  # number of sources
{% else %}
# num_sources = 2  # REQUIRED: number of sources
{% endif %}
ridge = 1e-4  # public ridge penalty of the model""",
    places="sources",
    remark="of one record of the source; 0 if the source was dropped; the weight of a "
    "source without records says nothing: compare the config with the file",
    marked="equal weights",
)
