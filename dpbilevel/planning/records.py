"""Descriptions of records, and synthetic records that follow them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from .. import _checks
from ..applications.selected_sources import ScoringModel

_HOW = (
    'Pass records={"features": jax.ShapeDtypeStruct((784,), "float32"), "label": '
    "dpbilevel.planning.Classes(10)} with your shapes and classes, or synthetic= if "
    "targets are no classes (docs/auto.md)."
)


@dataclasses.dataclass(frozen=True)
class Classes:
    """Label in the description of a record.

    Attributes:
        values: Possible values of the label, public; or the number of classes, whose
            labels are then 0, 1, and so on.

    Raises:
        ValueError: There are fewer than two values.
    """

    values: tuple[float, ...] | int

    def __post_init__(self):
        if isinstance(self.values, int):
            object.__setattr__(self, "values", tuple(range(self.values)))
        if len(self.listed) < 2:
            raise ValueError(f"Classes: a label needs two values, got {self.values}.")

    @property
    def listed(self) -> tuple[float, ...]:
        """Possible values of the label."""
        assert not isinstance(self.values, int)
        return self.values

    def labels(self, numbers: Int[Array, " n"]) -> Array:
        """Return the labels of classes by their numbers; integers if all values are."""
        integers = all(isinstance(v, int) for v in self.listed)
        dtype = jnp.int32 if integers else jnp.result_type(float)
        return jnp.asarray(self.listed, dtype)[numbers]


def shapes_of(record: PyTree) -> PyTree:
    """Return the shapes of a record, without the arrays that may describe it."""

    def shape(leaf):
        if isinstance(leaf, Classes) or not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(shape, record)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One label and features, the leaves of a record.

    Args:
        record: A pytree of the shapes of one record, `jax.ShapeDtypeStruct` or arrays,
            with `Classes` in the place of the label.

    Raises:
        ValueError: There is not one label, or a feature is no floating-point number.
    """

    record: PyTree

    def __post_init__(self):
        leaves = jax.tree.leaves(self.record)
        features = [leaf for leaf in leaves if not isinstance(leaf, Classes)]
        if len(leaves) - len(features) != 1 or not features:
            raise ValueError(
                "auto: records must have one leaf of Classes for the label, and one of "
                f"features at least. {_HOW}"
            )
        for leaf in features:
            if not jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating):
                raise ValueError(
                    "auto: every leaf of records but the label must be the shape of "
                    f"floating-point features, got {_checks.shown(leaf)}. {_HOW}"
                )

    @property
    def classes(self) -> Classes:
        """Label of a record."""
        leaves = jax.tree.leaves(self.record)
        return next(leaf for leaf in leaves if isinstance(leaf, Classes))

    @property
    def width(self) -> int:
        """Number of features."""
        leaves = jax.tree.leaves(self.record)
        return sum(math.prod(v.shape) for v in leaves if not isinstance(v, Classes))

    @property
    def teacher(self) -> tuple[int, ...]:
        """Shape of a linear model: from three classes on a column for each."""
        count = len(self.classes.listed)
        return (self.width,) if count == 2 else (self.width, count)

    def draw_labels(
        self,
        features: Float[Array, "n d"],
        models: Float[Array, "k ..."],
        source: Int[Array, " n"],
        key,
    ) -> PyTree:
        """Draw records whose labels follow the linear models of their sources.

        Args:
            features: A row for each record, with all of its features.
            models: Models of the shape `teacher`, one for each source. Labels follow
                the logistic or softmax distribution of their scores.
            source: The source of each record.
            key: A typed key; it protects nothing.
        """
        scores = jnp.einsum("nd,kd...->nk...", features, models)
        scores = jax.vmap(lambda row, index: row[index])(scores, source)
        if scores.ndim == 1:
            scores = jnp.stack([jnp.zeros_like(scores), scores], 1)
        label = self.classes.labels(jax.random.categorical(key, scores))

        def filled(leaf):
            nonlocal features
            if isinstance(leaf, Classes):
                return label
            size = math.prod(leaf.shape)
            part, features = features[:, :size], features[:, size:]
            return part.reshape(-1, *leaf.shape).astype(leaf.dtype)

        return jax.tree.map(filled, self.record)

    def linear(self) -> ScoringModel:
        """Return a softmax regression on features of norm 1 and a constant of 0.5.

        A constant of 1 would have half of every clipped gradient, for the frequencies
        of the classes alone.
        """
        values = self.classes.labels(jnp.arange(len(self.classes.listed)))

        def linear_loss(y: Float[Array, "d k"], record: PyTree) -> Float[Array, ""]:
            # Records of two levels have further leaves, such as their source.
            own = {name: record[name] for name in self.record}
            pairs = [*zip(*map(jax.tree.leaves, (self.record, own)), strict=True)]
            (label,) = (value for leaf, value in pairs if isinstance(leaf, Classes))
            features = jnp.concatenate(
                [jnp.ravel(v) for leaf, v in pairs if not isinstance(leaf, Classes)]
            ).astype(y.dtype)
            features /= jnp.maximum(jnp.linalg.norm(features), 1e-6)
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                features @ y[:-1] + 0.5 * y[-1], jnp.argmax(values == label)
            )

        return ScoringModel(linear_loss, jnp.zeros((self.width + 1, len(values))))


def of_linear_model(model: PyTree) -> PyTree:
    """Return the description of records of a linear model.

    A vector has labels -1 and 1, a matrix has a column for each class.

    Raises:
        ValueError: The model is something else.
    """
    leaves = jax.tree.leaves(model)
    if len(leaves) != 1 or leaves[0].ndim not in (1, 2):
        raise ValueError(
            "auto: only a model of one vector or one matrix tells the shapes of records"
            f", and this one has leaves of shapes {[v.shape for v in leaves]}. {_HOW}"
        )
    (start,) = leaves
    features = jax.ShapeDtypeStruct(start.shape[:1], jnp.result_type(float))
    classes = Classes((-1.0, 1.0) if start.ndim == 1 else start.shape[1])
    return {"features": features, "label": classes}
