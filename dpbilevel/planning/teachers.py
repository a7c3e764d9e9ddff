"""Synthetic records whose labels follow hidden linear models."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

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
from .records import Layout, of_linear_model, shapes_of

# Of several classes the scores vary more: by this factor times the 0.9th power of log2
# of the number of classes.
_MORE_CLASSES = 1.2
# A constant and a column of two categories.
_FEWEST_OF_BLOCKS = 3
# Share of the variance of skewed columns that all of them have in common.
_COMMON = 0.36

Columns = Literal["normal", "skewed", "categories"]


@dataclasses.dataclass(frozen=True)
class Twin:
    """Synthetic records of a problem.

    Attributes:
        data: As for `solve`: `Levels`, or records of one level.
        test: Further records of the population that the model is for: of the upper
            level, or of the only one.
    """

    data: PyTree
    test: PyTree


class AbstractTwin(eqx.Module):
    """A public distribution of records, for dry runs.

    A class of one's own has one method, `draw`. It must not follow records of people:
    a statistic of them would have to be released first.
    """

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return type(self).__name__

    @abc.abstractmethod
    def draw(
        self, problem: AbstractProblem, w0: PyTree, sizes: Sizes | int, key: Key
    ) -> Twin:
        """Records of these sizes.

        Args:
            problem: The problem.
            w0: Its starting point.
            sizes: The planned sizes.
            key: A typed key; it protects nothing.
        """


class AbstractTeacherTwin(AbstractTwin):
    """Records whose labels follow a hidden linear model of their features.

    What is fitted to them may be any model: a network, too, has something to learn.
    The last feature is a constant.

    Args:
        records: What a record looks like, as for `auto`; `None` for linear models.
        norm: That of the features of every record.
        margin: The standard deviation of the margins of two classes. With 2.5 the best
            accuracy is not far above .8, with 4 it is .87.
        columns: The law of the features: `"normal"` columns of decaying scale,
            `"skewed"` and correlated ones whose means are not 0, or `"categories"`,
            one-hot blocks of about the root of the number of features, with
            frequencies that fall like one over the rank.
        rate: The share of the second of two classes, or `None`: as it comes.
        test_size: The number of test records.
    """

    records: PyTree = eqx.field(static=True, default=None, converter=shapes_of)
    norm: Positive = eqx.field(static=True, default=1.0)
    margin: Positive = eqx.field(static=True, default=2.5)
    columns: Columns = eqx.field(static=True, default="normal")
    rate: Fraction | None = eqx.field(static=True, default=None)
    test_size: Count = eqx.field(static=True, default=4000)

    @abc.abstractmethod
    def models(
        self, problem: AbstractProblem, shape: tuple[int, ...], key: Key
    ) -> tuple[Array, Array]:
        """The model of the population, and those of the sources, stacked.

        Of features of norm 1.
        """

    def features(self, key: Key, rows: int, columns: int) -> Float[Array, "n d"]:
        """Return rows of norm 1 with a constant last: by default as `columns` says."""
        if self.columns == "categories" and columns >= _FEWEST_OF_BLOCKS:
            return _categories(key, rows, self.blocks(columns))
        return _features(key, rows, columns, skewed=self.columns == "skewed")

    def blocks(self, columns: int) -> list[int]:
        """Return the widths of the blocks of features before a constant one."""
        if self.columns != "categories":
            return [1] * (columns - 1)
        count = max(1, round((columns - 1) ** 0.5))
        return [len(part) for part in np.array_split(np.arange(columns - 1), count)]

    def prototypes(self, shape: tuple[int, ...]) -> Float[Array, "c d"]:
        """What the records of each class are like: rows that follow the same law.

        The same for everybody; their key protects nothing.
        """
        return self.features(jax.random.key(0), shape[1], shape[0])

    def gathered(
        self, key: Key, rows: int, shape: tuple[int, ...]
    ) -> Float[Array, "n d"]:
        """Features, which of several classes gather around their prototypes.

        Each block of a record is, with a chance of one half, that of a prototype.

        Args:
            key: A typed key.
            rows: How many.
            shape: Of the hidden linear model, as `Layout.teacher`.
        """
        if len(shape) == 1:
            return self.features(key, rows, shape[0])
        first, then, last = jax.random.split(key, 3)
        free, prototypes = self.features(first, rows, shape[0]), self.prototypes(shape)
        widths = np.asarray([*self.blocks(shape[0]), 1])
        same = jax.random.bernoulli(last, shape=(rows, len(widths)))
        same = jnp.repeat(same, widths, axis=1, total_repeat_length=shape[0])
        own = prototypes[jax.random.randint(then, (rows,), 0, shape[1])]
        mixed = jnp.where(same, own, free)
        return mixed / jnp.linalg.norm(mixed, axis=1, keepdims=True)

    def teachers(
        self, key: Key, count: int, shape: tuple[int, ...], *, aligned: bool = False
    ) -> Array:
        """Random linear models; of several classes the prototypes in random order.

        Args:
            key: A typed key.
            count: How many.
            shape: Of the coefficients of one, with the features first.
            aligned: Of two classes, whether coefficients are as large as their features
                vary, and that of the constant is 0: few features decide most labels.
                Prototypes are aligned as they are.
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
            # With something to tell classes apart whose prototypes are the same.
            models = jnp.stack(orders) + 0.01 * models
            # Of more scores the largest one has to stand out among more.
            margin *= _MORE_CLASSES * math.log2(shape[-1]) ** 0.9
        rows = self.gathered(last, 1000, shape)
        if aligned and len(shape) == 1:
            sizes = jnp.std(rows, 0)
            models *= (sizes.at[-1].set(0.0) if len(sizes) > 1 else sizes)[None]
        scores = jnp.tensordot(rows, models, (1, 1))
        spread = jnp.std(jnp.moveaxis(scores, 1, 0).reshape(count, -1), 1)
        return models * margin / spread_over(spread, models[0])

    def _moved(self, key: Key, model: Array) -> Float[Array, ""]:
        """Return by how much the constant moves to give a model of labels its rate."""
        if self.rate is None or model.ndim > 1 or len(model) == 1:
            return jnp.zeros(())
        rows, rate = self.gathered(key, 1000, model.shape), self.rate

        def halved(_, ends):
            low, high = ends
            middle = (low + high) / 2
            share = jnp.mean(jax.nn.sigmoid(rows @ model.at[-1].add(middle)))
            above = share > rate
            return jnp.where(above, low, middle), jnp.where(above, middle, high)

        ends = jnp.asarray(-100.0), jnp.asarray(100.0)
        return jnp.mean(jnp.stack(jax.lax.fori_loop(0, 25, halved, ends)))

    def sources(self, key: Key, rows: int, num_sources: int) -> Int[Array, " n"]:
        """The source of each training record: by default all are as likely."""
        return jax.random.randint(key, (rows,), 0, num_sources)

    @override
    def draw(self, problem, w0, sizes, key):
        model = _model_of(problem, w0)
        layout = Layout(
            of_linear_model(model) if self.records is None else self.records
        )
        upper, lower = (
            (sizes.upper, sizes.lower) if isinstance(sizes, Sizes) else (0, sizes)
        )
        keys = jax.random.split(key, 5)
        held, total = upper + self.test_size, upper + self.test_size + lower
        target, sources = self.models(problem, layout.teacher, keys[0])
        moved = self._moved(keys[4], target)
        target, sources = target.at[-1].add(moved), sources.at[:, -1].add(moved)
        source = self.sources(keys[1], lower, len(sources))
        records = layout.labelled(
            self.norm * self.gathered(keys[2], total, layout.teacher),
            jnp.concatenate([target[None], sources]) / self.norm,
            jnp.concatenate([jnp.zeros(held, source.dtype), source + 1]),
            keys[3],
        )
        clean = jax.tree.map(lambda v: v[:held], records)
        training = jax.tree.map(lambda v: v[held:], records)
        if isinstance(problem, SourceWeighting):
            training = _with_source(training, source)
        test = jax.tree.map(lambda v: v[upper:], clean)
        if not isinstance(sizes, Sizes):
            return Twin(training, test)
        validation = jax.tree.map(lambda v: v[:upper], clean)
        return Twin(Levels(validation, training), test)


def spread_over(values: Float[Array, " k"], like: Array) -> Array:
    """With one trailing axis for each axis of an array."""
    return values.reshape(-1, *[1] * like.ndim)


def _model_of(problem: AbstractProblem, w0: PyTree) -> PyTree:
    if isinstance(problem, BilevelProblem):
        return w0[1]
    if isinstance(problem, FiniteSum):
        return w0
    raise TypeError(
        f"auto: no synthetic twin is known for {type(problem).__name__}; pass "
        "twins=[...], instances of a subclass of dpbilevel.planning.AbstractTwin."
    )


def _with_source(training: PyTree, source: Int[Array, " n"]) -> PyTree:
    if not isinstance(training, Mapping):
        raise ValueError(
            "auto: records of source_weighting must be a dict, to which the default "
            'twins add "source". Pass twins=[...], instances of a subclass of '
            "dpbilevel.planning.AbstractTwin."
        )
    return {**training, "source": source.astype(jnp.int32)}


def _features(key, rows: int, columns: int, *, skewed: bool) -> Float[Array, "n d"]:
    if columns == 1:
        return jax.random.rademacher(key, (rows, 1), jnp.result_type(float))
    spectrum = 1 / jnp.sqrt(jnp.arange(1, columns))
    key, other = jax.random.split(key)
    free = jax.random.normal(key, (rows, columns - 1))
    if skewed:
        shared = jax.random.normal(other, (rows, 1))
        free = math.sqrt(1 - _COMMON) * free + math.sqrt(_COMMON) * shared
        free = free.at[:, ::2].set(jnp.exp(free[:, ::2]) / 2)
    free = free * spectrum[None]
    constant = jnp.full((rows, 1), jnp.linalg.norm(spectrum))
    features = jnp.concatenate([free, constant], 1)
    return features / jnp.linalg.norm(features, axis=1, keepdims=True)


def _categories(key, rows: int, widths: list[int]) -> Float[Array, "n d"]:
    """Return one-hot blocks of these widths and a constant, rows of norm 1."""
    # All blocks at once, padded with categories that do not occur.
    count, rank = np.asarray(widths), np.arange(max(widths))
    rarity = np.where(rank < count[:, None], -np.log(rank + 1.0), -np.inf)
    drawn = jax.random.categorical(key, rarity, shape=(rows, len(count)))
    places = drawn + (np.cumsum(count) - count)[None]
    chosen = jnp.zeros((rows, sum(widths)))
    chosen = chosen.at[jnp.arange(rows)[:, None], places].set(1.0)
    features = jnp.concatenate([chosen, jnp.ones((rows, 1))], 1)
    return features / jnp.linalg.norm(features, axis=1, keepdims=True)
