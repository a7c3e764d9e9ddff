"""The tasks of linear models: `training`, `penalty_tuning` and `source_weighting`."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from ... import _checks
from ...applications.penalties import PenaltyTuning, penalty_tuning
from ...applications.sources import SourceWeighting, source_weighting, source_weights
from ...bilevel.problem import BilevelProblem
from ...onelevel.losses import Record, example, logistic_loss, score, squared_loss
from ...onelevel.problem import FiniteSum
from ..data import CsvData
from ..task import AbstractModel, Blocks, Start, Task
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


LOSSES = {"logistic": logistic_loss, "squared": squared_loss, "softmax": softmax_loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractLinear(AbstractModel):
    """Base of the tables `[model]` whose model is linear in the features.

    Args:
        loss: The model's loss, `"logistic"`, `"squared"` or `"softmax"`.
        num_classes: The number of classes of the label, for `"softmax"`.
    """

    loss: Loss
    num_classes: int = 0

    @override
    def mistakes(self, data: CsvData, place: Location) -> Iterator[ValueError]:
        count = len(data.label.classes)
        kind, known = "two classes", ("logistic", "squared")
        if count:
            kind, known = f"{count} classes", ("softmax",)
        elif not data.label.of_classes:
            kind, known = "a number", ("squared",)
        if self.loss not in known or self.num_classes != count:
            asked = f'loss = "{self.loss if self.loss in known else known[0]}"'
            if count:
                asked += f" and num_classes = {count}"
            elif self.num_classes:
                asked += " without num_classes"
            where = place.child("label")
            yield where.error(f"describes {kind}; give {asked} in [model].")

    @override
    def start(self, blocks: Blocks) -> PyTree:
        # The coefficients of no model: a column for each of several classes.
        columns = (self.num_classes,) if self.num_classes else ()
        return jnp.zeros((sum(size for _, size in blocks), *columns), jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(AbstractLinear):
    """Table `[model]` of `training`.

    Args:
        ridge: The public ridge penalty of the model.
    """

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


# Meaning of the releases that both tasks of two levels may make.
_TERMS = {
    "gradient": "a step of the model",
    "directions of": "a step of all variables, each in the unit beside its name",
    "model": "a model: the released one, or a first one that scores the sources",
    "fit": "a model of the sources, or of the groups of features, that are kept",
    "lower solution": "the model of the training records at the current weights",
    "penalized solution": "the same, which fits the validation records as well",
    "outer gradient": "a step of the weights, or of the penalties",
    "hypergradient": "a step of the weights, or of the penalties",
    "first": "a run that finds the initial point of the next one",
    "then": "the run that begins there",
    "curvature": "how much each direction of the model matters",
    "refit": "the released model, at the weights or penalties that were found",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalties(AbstractLinear):
    """Table `[model]` of `penalty_tuning`.

    Args:
        groups: The coefficients that share a penalty: `"single"` (all of them),
            `"per_block"` (those of one block of features) or `"per_feature"`.
        bounds: The smallest and the largest log-penalty.
        start_at: The initial log-penalties, `"middle"` or `"low"` of the bounds. Low
            ones are better for solvers that penalize little or nothing by themselves:
            `OneLevel`, `ScaledGroups`.
    """

    groups: Literal["single", "per_block", "per_feature"] = "per_block"
    bounds: tuple[float, float] = (-8.0, 2.0)
    start_at: Literal["middle", "low"] = "middle"

    def __post_init__(self):
        low, high = self.bounds
        if not low < high:
            raise ValueError(f"bounds must be increasing, got [{low:g}, {high:g}].")

    @property
    @override
    def axis(self) -> tuple[float, float]:
        return self.bounds

    @override
    def problem(self, blocks: Blocks) -> BilevelProblem:
        groups = self._groups(blocks)
        if self.num_classes:  # those of a feature share a penalty
            groups = np.repeat(groups[:, None], self.num_classes, axis=1)
        return penalty_tuning(LOSSES[self.loss], groups, bounds=self.bounds)

    def _groups(self, blocks: Blocks) -> np.ndarray:
        """Return the index of the penalty of each feature's coefficients."""
        sizes = [size for _, size in blocks]
        return {
            "single": np.zeros(sum(sizes), int),
            "per_block": np.repeat(np.arange(len(blocks)), sizes),
            "per_feature": np.arange(sum(sizes)),
        }[self.groups]

    @override
    def start(self, blocks: Blocks) -> Start:
        count = 1 + int(np.max(self._groups(blocks)))
        low, high = self.bounds
        first = low if self.start_at == "low" else (low + high) / 2
        return jnp.full(count, first, jnp.float32), super().start(blocks)

    @override
    def names(self, data: CsvData) -> tuple[str, ...]:
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
    terms=_TERMS | {"screen": "how much each group of features matters"},
    template="""\
{{ loss }}
# groups = "per_block"  # coefficients with one penalty; "single" or "per_feature\"""",
    planned={"start_at": "low"},
    two_levels=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighting(AbstractLinear):
    """Table `[model]` of `source_weighting`.

    Args:
        num_sources: The number of sources.
        ridge: The public ridge penalty of the model.
        weight_penalty: The public penalty of unequal weights.
        parametrization: `"logits"` or `"simplex"`.
    """

    num_sources: int
    ridge: float = 0.0
    weight_penalty: float = 0.0
    parametrization: Literal["logits", "simplex"] = "logits"

    def __post_init__(self):
        owner, penalty = "source_weighting", self.weight_penalty
        _checks.count(owner, num_sources=self.num_sources)
        _checks.non_negative(owner, ridge=self.ridge, weight_penalty=penalty)

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
        return x.astype(jnp.float32), super().start(blocks)

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
    terms=_TERMS
    | {
        "models": "a model for each source, and one for all of them",
        "moments": "in which directions predictions of these models differ",
        "mixture": "how much each of these models counts",
        "score": "how well a model fits each source",
        "remoments": "the same, with the model of the kept sources",
        "remixture": "how much each model counts in the released one",
    },
    template="""\
{{ loss }}
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
    two_levels=True,
)
