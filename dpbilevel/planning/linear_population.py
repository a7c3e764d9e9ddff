"""Populations whose labels follow hidden linear models."""

import abc
import math
from collections.abc import Mapping
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Array, Float, Int, Key, PyTree
from typing_extensions import override

from .._checks import Count, Fraction, Positive
from ..applications.sources import SourceWeighting
from ..bilevel.problem import BilevelProblem, Levels, Sizes
from ..core.problem import AbstractProblem
from ..onelevel.problem import FiniteSum
from . import synthetic
from .methods import model_of

# Scores of several classes vary more: by this factor times the 0.9th power of log2 of
# the number of classes.
_MORE_CLASSES = 1.2
# A constant and a column of two categories.
_FEWEST_COLUMNS = 3
# Fraction of the variance of skewed columns that all of them have in common.
_COMMON = 0.36

Columns = Literal["normal", "skewed", "categories"]


class AbstractLinearPopulation(synthetic.AbstractPopulation):
    """Records whose labels follow a hidden linear model of their features.

    Any model may be fitted to them: a network, too, has something to learn. The last
    feature is a constant.

    Args:
        records: The description of a record, as for `auto`; `None` for linear models.
        norm: The norm of the features of every record.
        margin: The standard deviation of the margins of two classes. With 2.5 the best
            accuracy is not far above .8, with 4 it is .87.
        columns: The distribution of the features: `"normal"` columns of decaying scale,
            `"skewed"` and correlated ones whose means are not 0, or `"categories"`,
            one-hot blocks of about the root of the number of features, with
            frequencies that fall like one over the rank.
        rate: The fraction of the second of two classes; `None` sets none.
        test_size: The number of test records.
    """

    records: PyTree = eqx.field(
        static=True, default=None, converter=synthetic.shapes_of
    )
    norm: Positive = eqx.field(static=True, default=1.0)
    margin: Positive = eqx.field(static=True, default=2.5)
    columns: Columns = eqx.field(static=True, default="normal")
    rate: Fraction | None = eqx.field(static=True, default=None)
    test_size: Count = eqx.field(static=True, default=4000)

    @abc.abstractmethod
    def models(
        self, problem: AbstractProblem, shape: tuple[int, ...], key: Key
    ) -> tuple[Array, Array]:
        """Draw the model of the population, and the stacked models of the sources.

        They are for features of norm 1.
        """

    def features(self, key: Key, rows: int, columns: int) -> Float[Array, "n d"]:
        """Draw feature rows of norm 1, of the kind `self.columns`, a constant last."""
        rng, ones = synthetic.generator(key), np.ones((rows, 1))
        if self.columns == "categories" and columns >= _FEWEST_COLUMNS:
            blocks = []  # one-hot
            for width in self.blocks(columns):
                chance = 1 / np.arange(1, width + 1)
                drawn = rng.choice(width, rows, p=chance / chance.sum())
                blocks.append(np.eye(width)[drawn])
            features = _unit(np.concatenate([*blocks, ones], 1))
        elif columns == 1:
            features = rng.choice([-1.0, 1.0], (rows, 1))
        else:
            spectrum = 1 / np.sqrt(np.arange(1, columns))  # of decaying scale
            free = rng.standard_normal((rows, columns - 1))
            if self.columns == "skewed":
                shared = rng.standard_normal((rows, 1))
                free = math.sqrt(1 - _COMMON) * free + math.sqrt(_COMMON) * shared
                free[:, ::2] = np.exp(free[:, ::2]) / 2
            constant = np.linalg.norm(spectrum) * ones
            features = _unit(np.concatenate([free * spectrum, constant], 1))
        return jnp.asarray(features.astype(jnp.result_type(float)))

    def blocks(self, columns: int) -> list[int]:
        """Return a list: the number of features in each block but the constant."""
        if self.columns != "categories":
            return [1] * (columns - 1)
        count = max(1, round((columns - 1) ** 0.5))
        return [len(part) for part in np.array_split(np.arange(columns - 1), count)]

    def prototypes(self, shape: tuple[int, ...]) -> Float[Array, "c d"]:
        """Return a typical row of features for each class.

        They are the same for everybody; their key protects nothing.
        """
        return self.features(jax.random.key(0), shape[1], shape[0])

    def clustered_features(
        self, key: Key, rows: int, shape: tuple[int, ...]
    ) -> Float[Array, "n d"]:
        """Draw features; those of several classes cluster around their prototypes.

        Each block of a record is, with a chance of one half, that of a prototype.

        Args:
            key: A typed key.
            rows: The number of rows.
            shape: The shape of the hidden linear model, as `Layout.teacher`.
        """
        if len(shape) == 1:
            return self.features(key, rows, shape[0])
        first, then = jax.random.split(key)
        rng, prototypes = synthetic.generator(then), self.prototypes(shape)
        widths = np.asarray([*self.blocks(shape[0]), 1], int)
        same = np.repeat(rng.random((rows, len(widths))) < 0.5, widths, axis=1)
        own = np.asarray(prototypes)[rng.integers(0, shape[1], rows)]
        free = np.asarray(self.features(first, rows, shape[0]))
        return jnp.asarray(_unit(np.where(same, own, free)))

    def teachers(
        self, key: Key, count: int, shape: tuple[int, ...], *, aligned: bool = False
    ) -> Array:
        """Draw an array of linear models; of several classes, permuted prototypes.

        Args:
            key: A typed key.
            count: The number of models.
            shape: The shape of the coefficients of one, with the features first.
            aligned: Whether coefficients are as large as their features vary and that
                of the constant is 0: few features decide most labels. For two classes
                only; prototypes are aligned as they are.
        """
        drawn, last = jax.random.split(key)
        rng, margin = synthetic.generator(drawn), self.margin
        models = rng.standard_normal((count, *shape))
        if len(shape) > 1:
            prototypes = np.asarray(self.prototypes(shape))
            centred = (prototypes - np.mean(prototypes, 0)).T
            orders = [rng.permutation(centred, axis=1) for _ in range(count)]
            # The last term tells classes apart whose prototypes are the same.
            models = np.stack(orders) + 0.01 * models
            # The largest of more scores has to stand out among more.
            margin *= _MORE_CLASSES * math.log2(shape[-1]) ** 0.9
        rows = np.asarray(self.clustered_features(last, 1000, shape))
        if aligned and len(shape) == 1:
            sizes = np.std(rows, 0)
            sizes[-1] = 0.0 if len(sizes) > 1 else sizes[-1]
            models *= sizes
        scores = np.moveaxis(np.tensordot(rows, models, (1, 1)), 1, 0)
        spread = np.std(scores.reshape(count, -1), 1)
        models = models * margin / spread.reshape(-1, *[1] * len(shape))
        return jnp.asarray(models, jnp.result_type(float))

    def _intercept_shift(self, key: Key, model: Array) -> Float[Array, ""]:
        """Return the intercept's shift for a fraction `rate` of positive labels, or 0.

        It is found by bisection on 1000 rows.
        """
        if self.rate is None or model.ndim > 1 or len(model) == 1:
            return jnp.zeros(())
        rows, low, high = self.clustered_features(key, 1000, model.shape), -100.0, 100.0
        scores, constant = np.asarray(rows @ model), np.asarray(rows[:, -1])
        for _ in range(25):
            middle = (low + high) / 2
            positive = np.mean(scipy.special.expit(scores + middle * constant))
            low, high = (low, middle) if positive > self.rate else (middle, high)
        return jnp.asarray((low + high) / 2)

    def sources(self, key: Key, rows: int, num_sources: int) -> Int[Array, " n"]:
        """Draw the index of each training record's source, uniformly by default."""
        return jax.random.randint(key, (rows,), 0, num_sources)

    @override
    def draw(self, problem, w0, sizes, key):
        if not isinstance(problem, BilevelProblem | FiniteSum):
            name = type(problem).__name__
            raise TypeError(f"auto: no population for {name}; pass synthetic=.")
        described = self.records is not None
        model = model_of(problem, w0)
        records = self.records if described else synthetic.of_linear_model(model)
        layout = synthetic.Layout(records)
        two = isinstance(sizes, Sizes)
        upper, lower = (sizes.upper, sizes.lower) if two else (0, sizes)
        keys = jax.random.split(key, 5)
        clean = upper + self.test_size
        target, sources = self.models(problem, layout.teacher, keys[0])
        shift = self._intercept_shift(keys[4], target)
        target, sources = target.at[-1].add(shift), sources.at[:, -1].add(shift)
        source = self.sources(keys[1], lower, len(sources))
        rows = self.clustered_features(keys[2], clean + lower, layout.teacher)
        models = jnp.concatenate([target[None], sources]) / self.norm
        origin = jnp.concatenate([jnp.zeros(clean, source.dtype), source + 1])
        records = layout.draw_labels(self.norm * rows, models, origin, keys[3])
        validation, test, training = (
            jax.tree.map(lambda v, a=a, b=b: v[a:b], records)
            for a, b in ((0, upper), (upper, clean), (clean, None))
        )
        if isinstance(problem, SourceWeighting):
            if not isinstance(training, Mapping):
                raise ValueError("auto: source records are no dict; pass synthetic=.")
            training = {**training, "source": source.astype(jnp.int32)}
        data = Levels(validation, training) if two else training
        return synthetic.SyntheticData(data, test)


def expand(values: Float[Array, " k"], like: Array) -> Array:
    """Return values with one trailing axis for each axis of an array."""
    return values.reshape(-1, *[1] * like.ndim)


def _unit(rows: np.ndarray) -> np.ndarray:
    """Return rows divided by their norms."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
