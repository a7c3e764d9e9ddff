"""Base classes of populations, and descriptions of the records that they draw."""

import abc
import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, PyTree
from typing_extensions import override

from .. import _checks
from ..applications.selected_sources import ScoringModel
from ..core.levels import Levels, People, Sizes
from ..core.problem import AbstractProblem

_HOW = (
    'Pass records={"features": jax.ShapeDtypeStruct((784,), "float32"), "label": '
    "dpbilevel.planning.Classes(10)} with your shapes and classes, or synthetic= if "
    "targets are no classes (docs/auto.md)."
)


@dataclasses.dataclass(frozen=True)
class SyntheticData:
    """Synthetic records for a run, and further ones for a test.

    Attributes:
        data: Records as for `solve`: `Levels`, or records of one level.
        test: Further records of the population that the model is for: of the upper
            level, or of the only one.
    """

    data: PyTree
    test: PyTree


class AbstractPopulation(eqx.Module):
    """A public distribution of records, for dry runs.

    A subclass has one method, `draw`. It must not follow records of people: a statistic
    of them would have to be released first.
    """

    @property
    def name(self) -> str:
        """Name of the population in tables."""
        return type(self).__name__

    @abc.abstractmethod
    def draw(
        self, problem: AbstractProblem, w0: PyTree, sizes: Sizes | int, key: Key
    ) -> SyntheticData:
        """Draw `SyntheticData`: records of these sizes, and test records.

        Args:
            problem: The problem.
            w0: The initial point.
            sizes: The planned sizes.
            key: A typed key; it protects nothing.
        """


def generator(key: Key) -> np.random.Generator:
    """Return a NumPy generator seeded by a key: its draws need no compilation."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())


class FunctionPopulation(AbstractPopulation):
    """Records that a function of the user draws, test records in the same call."""

    fun: Callable[[Key, Any], PyTree] = eqx.field(static=True)

    @property
    @override
    def name(self) -> str:
        return "synthetic"

    @override
    def draw(self, problem, w0, sizes, key):
        draw, order = jax.random.split(key)
        # Twice the records of the level that a model is tested on.
        size = sizes.upper if isinstance(sizes, Sizes) else sizes
        request: Any = 2 * size
        if isinstance(sizes, Sizes):
            lower = sizes.lower * (2 if sizes.people is People.SHARED else 1)
            request = Sizes(2 * size, lower, sizes.people)
        try:
            data = jax.tree.map(jnp.asarray, self.fun(draw, request))
        except Exception as error:
            raise ValueError(
                f"auto: synthetic failed for {_in_words(request)}, test records "
                f"included. {type(error).__name__}: {error}"
            ) from error
        try:
            problem.check(w0, data)
            people = () if isinstance(sizes, int) else (sizes.people,)
            returned = problem.sizes_of(data, *people)
        except Exception as error:
            raise ValueError(
                "auto: w0, a loss and the records of synthetic do not fit. "
                f"{type(error).__name__}: {error}"
            ) from error
        if returned != request:
            raise ValueError(
                f"auto: synthetic returned {_in_words(returned)}, not "
                f"{_in_words(request)}, which includes the test records."
            )
        upper = data.upper if isinstance(data, Levels) else data
        rows = jax.random.permutation(order, 2 * size)  # they may be sorted
        upper, test = (
            jax.tree.map(operator.itemgetter(part), upper)
            for part in (rows[:size], rows[size:])
        )
        if isinstance(data, Levels):
            shared = data.is_shared
            upper = Levels.shared(upper) if shared else Levels(upper, data.lower)
        return SyntheticData(upper, test)


def _in_words(sizes: Sizes | int) -> str:
    """Return the text of sizes, with `people` as callers write it."""
    if isinstance(sizes, int):
        return f"{sizes} records"
    people = f'people="{sizes.people.value}"'
    return f"Sizes(upper={sizes.upper}, lower={sizes.lower}, {people})"


@dataclasses.dataclass(frozen=True)
class Classes:
    """Place of the label in the description of a record, with the label's values.

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
        """Tuple of the possible values of the label."""
        assert not isinstance(self.values, int)
        return self.values

    def labels(self, numbers: Int[Array, " n"]) -> Array:
        """Return the labels of class numbers; an integer array if all labels are."""
        integers = all(isinstance(v, int) for v in self.listed)
        dtype = jnp.int32 if integers else jnp.result_type(float)
        return jnp.asarray(self.listed, dtype)[numbers]


def shapes_of(record: PyTree) -> PyTree:
    """Return a record with each array replaced by its shape and dtype."""

    def shape(leaf):
        if isinstance(leaf, Classes) or not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(shape, record)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Description of a record that has one label and otherwise features.

    The record is a pytree of shapes, `jax.ShapeDtypeStruct` or arrays, with `Classes`
    in the place of the label.
    """

    record: PyTree

    def __post_init__(self):
        leaves = jax.tree.leaves(self.record)
        features = [leaf for leaf in leaves if not isinstance(leaf, Classes)]
        if len(leaves) - len(features) != 1 or not features:
            raise ValueError(
                f"auto: records must have one leaf of Classes, and features. {_HOW}"
            )
        for leaf in features:
            if not jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating):
                raise ValueError(
                    f"auto: features must be floats, got {_checks.shown(leaf)}. {_HOW}"
                )

    @property
    def classes(self) -> Classes:
        """`Classes` that describe the label of a record."""
        leaves = jax.tree.leaves(self.record)
        return next(leaf for leaf in leaves if isinstance(leaf, Classes))

    @property
    def width(self) -> int:
        """Number of features."""
        leaves = jax.tree.leaves(self.record)
        return sum(math.prod(v.shape) for v in leaves if not isinstance(v, Classes))

    @property
    def teacher(self) -> tuple[int, ...]:
        """Shape of a linear model: (d,) for two classes, (d, k) for more."""
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

        In the logistic or softmax distribution of the scores. Features have a row for
        each record, and there is a model of the shape `teacher` for each source.
        """
        every = np.tensordot(np.asarray(features), np.asarray(models), (1, 1))
        scores = every[np.arange(len(source)), np.asarray(source)]
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], 1)
        drawn = np.argmax(scores + generator(key).gumbel(size=scores.shape), 1)
        label = self.classes.labels(jnp.asarray(drawn))

        def filled(leaf):
            nonlocal features
            if isinstance(leaf, Classes):
                return label
            size = math.prod(leaf.shape)
            part, features = features[:, :size], features[:, size:]
            return jnp.asarray(part.reshape(-1, *leaf.shape), leaf.dtype)

        return jax.tree.map(filled, self.record)

    def linear(self) -> ScoringModel:
        """Return a `ScoringModel`: softmax on features of norm 1 and a constant 0.5.

        A constant of 1 would have half of every clipped gradient, for the frequencies
        of the classes alone.
        """
        values = self.classes.labels(jnp.arange(len(self.classes.listed)))

        def linear_loss(y: Float[Array, "d k"], record: PyTree) -> Float[Array, ""]:
            # Records of two levels have further leaves, such as their source.
            own = {name: record[name] for name in self.record}
            pairs = [*zip(*map(jax.tree.leaves, (self.record, own)), strict=True)]
            (label,) = (value for leaf, value in pairs if isinstance(leaf, Classes))
            parts = [jnp.ravel(v) for k, v in pairs if not isinstance(k, Classes)]
            features = jnp.concatenate(parts).astype(y.dtype)
            features /= jnp.maximum(jnp.linalg.norm(features), 1e-6)
            scores, place = features @ y[:-1] + 0.5 * y[-1], jnp.argmax(values == label)
            loss = optax.losses.softmax_cross_entropy_with_integer_labels
            return loss(scores, place)

        return ScoringModel(linear_loss, jnp.zeros((self.width + 1, len(values))))


def of_linear_model(model: PyTree) -> PyTree:
    """Return a dict that describes the records of a linear model, by shapes.

    A vector has labels -1 and 1, a matrix has a column for each class.
    """
    leaves = jax.tree.leaves(model)
    if len(leaves) != 1 or leaves[0].ndim not in (1, 2):
        raise ValueError(
            f"auto: only a model of one vector or matrix tells record shapes. {_HOW}"
        )
    (start,) = leaves
    features = jax.ShapeDtypeStruct(start.shape[:1], jnp.result_type(float))
    classes = Classes((-1.0, 1.0) if start.ndim == 1 else start.shape[1])
    return {"features": features, "label": classes}
