"""What records look like, and synthetic records that look like that."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from .. import _checks
from ..applications.selected_sources import ScoringModel


@dataclasses.dataclass(frozen=True)
class Classes:
    """Stands for the label in the description of a record.

    Attributes:
        values: What a label may be, or the number of classes, whose labels are then
            0, 1, and so on. Public.

    Raises:
        ValueError: There are fewer than two values.
    """

    values: tuple[float, ...] | int

    def __post_init__(self):
        if isinstance(self.values, int):
            object.__setattr__(self, "values", tuple(range(self.values)))
        if len(self.of) < 2:
            raise ValueError(f"Classes: a label needs two values, got {self.values}.")

    @property
    def of(self) -> tuple[float, ...]:
        """The values."""
        assert not isinstance(self.values, int)
        return self.values

    def labels(self, drawn: Int[Array, " n"]) -> Array:
        """Labels, integers where all values are."""
        whole = all(isinstance(v, int) for v in self.of)
        return jnp.asarray(self.of, jnp.int32 if whole else jnp.result_type(float))[
            drawn
        ]


def shapes_of(record: PyTree) -> PyTree:
    """The shapes of a record that may be given by arrays, which are not kept."""

    def shape(leaf):
        if isinstance(leaf, Classes) or not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(shape, record)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The leaves of a record: one label, and features.

    Args:
        record: A pytree of the shapes of one record, `jax.ShapeDtypeStruct` or arrays,
            with `Classes` in the place of the label.

    Raises:
        ValueError: There is not one label, or a feature is no floating-point number.
    """

    record: PyTree

    def __post_init__(self):
        leaves = jax.tree.leaves(self.record)
        if sum(isinstance(leaf, Classes) for leaf in leaves) != 1 or len(leaves) < 2:
            raise ValueError(
                "auto: records must have one leaf of Classes for the label, such as "
                '{"features": jax.ShapeDtypeStruct((784,), "float32"), "label": '
                "dpbilevel.planning.Classes(10)}, and one of features at least. Where "
                "what is learnt is no class, pass twins=[...] instead: instances of a "
                "subclass of dpbilevel.planning.AbstractTwin (docs/auto.md)."
            )
        for leaf in leaves:
            floating = isinstance(leaf, Classes) or jnp.issubdtype(
                getattr(leaf, "dtype", object), jnp.floating
            )
            if not floating:
                raise ValueError(
                    "auto: every leaf of records but the label must be the shape of "
                    f"floating-point features, got {_checks.shown(leaf)}. Pass "
                    "twins=[...], instances of a subclass of "
                    "dpbilevel.planning.AbstractTwin."
                )

    @property
    def classes(self) -> Classes:
        """The label."""
        leaves = jax.tree.leaves(self.record)
        return next(leaf for leaf in leaves if isinstance(leaf, Classes))

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(
            int(np.prod(leaf.shape))
            for leaf in jax.tree.leaves(self.record)
            if not isinstance(leaf, Classes)
        )

    @property
    def teacher(self) -> tuple[int, ...]:
        """The shape of a linear model: from three classes on a column for each."""
        count = len(self.classes.of)
        return (self.width,) if count == 2 else (self.width, count)

    def labelled(
        self,
        features: Float[Array, "n d"],
        models: Float[Array, "k ..."],
        source: Int[Array, " n"],
        key,
    ) -> PyTree:
        """Records whose labels follow the linear models of their sources.

        Args:
            features: A row for each record, for all of its features.
            models: Of the shape `teacher`, one for each source. Labels follow the
                logistic or softmax law of their scores.
            source: The source of each record.
            key: A typed key; it protects nothing.
        """
        scores = jnp.einsum("nd,kd...->nk...", features, models)
        scores = jax.vmap(lambda row, index: row[index])(scores, source)
        if scores.ndim == 1:
            scores = jnp.stack([jnp.zeros_like(scores), scores], 1)
        label = self.classes.labels(jax.random.categorical(key, scores))
        return self._filled(features, label)

    def linear(self) -> ScoringModel:
        """A softmax regression of the label, on features of norm 1 and a constant 0.5.

        A constant of 1 would have half of every clipped gradient, for the frequencies
        of the classes alone.
        """
        values = self.classes.labels(jnp.arange(len(self.classes.of)))

        def linear_loss(y: Float[Array, "d k"], record: PyTree) -> Float[Array, ""]:
            # Records of two levels have further leaves, such as their source.
            own = {name: record[name] for name in self.record}
            described = zip(
                jax.tree.leaves(self.record), jax.tree.leaves(own), strict=True
            )
            leaves = [(isinstance(leaf, Classes), value) for leaf, value in described]
            (label,) = (value for is_label, value in leaves if is_label)
            parts = [jnp.ravel(value) for is_label, value in leaves if not is_label]
            features = jnp.concatenate(parts).astype(y.dtype)
            features /= jnp.maximum(jnp.linalg.norm(features), 1e-6)
            scores = features @ y[:-1] + 0.5 * y[-1]
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                scores, jnp.argmax(values == label)
            )

        return ScoringModel(linear_loss, jnp.zeros((self.width + 1, len(values))))

    def _filled(self, features: Float[Array, "n d"], label: Array) -> PyTree:
        leaves, tree = jax.tree.flatten(self.record)
        made: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Classes):
                made.append(label)
                continue
            size = int(np.prod(leaf.shape))
            part, features = features[:, :size], features[:, size:]
            made.append(part.reshape(-1, *leaf.shape).astype(leaf.dtype))
        return tree.unflatten(made)


def of_linear_model(model: PyTree) -> PyTree:
    """Records of a linear model: a vector with labels -1 and 1, or a matrix of classes.

    Raises:
        ValueError: The model is something else.
    """
    leaves = jax.tree.leaves(model)
    if len(leaves) != 1 or leaves[0].ndim not in (1, 2):
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(
            "auto: what records look like follows from linear models alone, one vector "
            f"or one matrix, but the model has leaves of shapes {shapes}. Pass "
            'records={"features": jax.ShapeDtypeStruct((784,), "float32"), "label": '
            "dpbilevel.planning.Classes(10)}, with the shapes and the classes of your "
            "records, or twins=[...]."
        )
    (start,) = leaves
    features = jax.ShapeDtypeStruct(start.shape[:1], jnp.result_type(float))
    classes = Classes((-1.0, 1.0) if start.ndim == 1 else start.shape[1])
    return {"features": features, "label": classes}
