"""Populations whose labels follow hidden linear models."""

import abc
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
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
    feature is a constant. `jax.jit` traces the methods.

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

    traceable: ClassVar[bool] = True

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
        """Return the model of the population, and the stacked models of the sources.

        They are for features of norm 1.
        """

    def features(self, key: Key, rows: int, columns: int) -> Float[Array, "n d"]:
        """Draw rows of norm 1 with a constant last: by default as `columns` says."""
        if self.columns == "categories" and columns >= _FEWEST_COLUMNS:
            return _categories(key, rows, self.blocks(columns))
        return _features(key, rows, columns, skewed=self.columns == "skewed")

    def blocks(self, columns: int) -> list[int]:
        """Return the widths of the blocks of features before a constant one."""
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
        first, then, last = jax.random.split(key, 3)
        free, prototypes = self.features(first, rows, shape[0]), self.prototypes(shape)
        widths = np.asarray([*self.blocks(shape[0]), 1])
        same = jax.random.bernoulli(last, shape=(rows, len(widths)))
        same = jnp.repeat(same, widths, axis=1, total_repeat_length=shape[0])
        own = prototypes[jax.random.randint(then, (rows,), 0, shape[1])]
        return _unit(jnp.where(same, own, free))

    def teachers(
        self, key: Key, count: int, shape: tuple[int, ...], *, aligned: bool = False
    ) -> Array:
        """Draw linear models; of several classes the prototypes in any order.

        Args:
            key: A typed key.
            count: The number of models.
            shape: The shape of the coefficients of one, with the features first.
            aligned: Whether coefficients are as large as their features vary and that
                of the constant is 0: few features decide most labels. For two classes
                only; prototypes are aligned as they are.
        """
        first, then, last = jax.random.split(key, 3)
        # Flat, because shapes of three axes take seconds to compile.
        models = jax.random.normal(first, (count, math.prod(shape)))
        models, margin = models.reshape(count, *shape), self.margin
        if len(shape) > 1:
            prototypes = self.prototypes(shape)
            centred = (prototypes - jnp.mean(prototypes, 0, keepdims=True)).T
            orders = [
                jax.random.permutation(order, centred, axis=1)
                for order in jax.random.split(then, count)
            ]
            # The last term tells classes apart whose prototypes are the same.
            models = jnp.stack(orders) + 0.01 * models
            # The largest of more scores has to stand out among more.
            margin *= _MORE_CLASSES * math.log2(shape[-1]) ** 0.9
        rows = self.clustered_features(last, 1000, shape)
        if aligned and len(shape) == 1:
            sizes = jnp.std(rows, 0)
            models *= (sizes.at[-1].set(0.0) if len(sizes) > 1 else sizes)[None]
        scores = jnp.tensordot(rows, models, (1, 1))
        spread = jnp.std(jnp.moveaxis(scores, 1, 0).reshape(count, -1), 1)
        return models * margin / expand(spread, models[0])

    def _intercept_shift(self, key: Key, model: Array) -> Float[Array, ""]:
        """Return the shift of the constant that gives a model of two classes its rate.

        It is found by bisection on 1000 rows.
        """
        if self.rate is None or model.ndim > 1 or len(model) == 1:
            return jnp.zeros(())
        rows, rate = self.clustered_features(key, 1000, model.shape), self.rate

        def halve(_, ends):
            low, high = ends
            middle = (low + high) / 2
            positive = jnp.mean(jax.nn.sigmoid(rows @ model.at[-1].add(middle)))
            above = positive > rate
            return jnp.where(above, low, middle), jnp.where(above, middle, high)

        ends = jnp.asarray(-100.0), jnp.asarray(100.0)
        return jnp.mean(jnp.stack(jax.lax.fori_loop(0, 25, halve, ends)))

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


def _unit(rows: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """Return rows divided by their norms."""
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def _features(key, rows: int, columns: int, *, skewed: bool) -> Float[Array, "n d"]:
    """Draw rows of norm 1: features of decaying scale, and a constant last."""
    if columns == 1:
        return jax.random.rademacher(key, (rows, 1), jnp.result_type(float))
    spectrum = 1 / jnp.sqrt(jnp.arange(1, columns))
    key, other = jax.random.split(key)
    free = jax.random.normal(key, (rows, columns - 1))
    if skewed:
        shared = jax.random.normal(other, (rows, 1))
        free = math.sqrt(1 - _COMMON) * free + math.sqrt(_COMMON) * shared
        free = free.at[:, ::2].set(jnp.exp(free[:, ::2]) / 2)
    constant = jnp.full((rows, 1), jnp.linalg.norm(spectrum))
    return _unit(jnp.concatenate([free * spectrum[None], constant], 1))


def _categories(key, rows: int, widths: list[int]) -> Float[Array, "n d"]:
    """Draw rows of norm 1: one-hot blocks of these widths, and a constant last."""
    # All blocks at once, padded with categories that do not occur.
    count, rank = np.asarray(widths), np.arange(max(widths))
    rarity = np.where(rank < count[:, None], -np.log(rank + 1.0), -np.inf)
    drawn = jax.random.categorical(key, rarity, shape=(rows, len(count)))
    places = drawn + (np.cumsum(count) - count)[None]
    chosen = jnp.zeros((rows, sum(widths)))
    chosen = chosen.at[jnp.arange(rows)[:, None], places].set(1.0)
    return _unit(jnp.concatenate([chosen, jnp.ones((rows, 1))], 1))
