"""Synthetic twins: records of a public law in the place of those of people."""

import abc
import dataclasses
import math
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree
from typing_extensions import override

from .._checks import Count, Fraction, Positive
from ..bilevel.applications import PenaltyTuning, SourceWeighting
from ..bilevel.problem import BilevelProblem, Levels, Sizes
from ..core.problem import AbstractProblem
from ..onelevel.problem import FiniteSum
from .records import Layout, of_linear_model, shapes_of

# The standard deviation of the margins of two classes: accuracies are not far above .8.
_MARGIN = 2.5
# That of the scores of two of several classes, over the 0.9th power of log2 of their
# number.
_MARGIN_OF_CLASSES = 3.0
# A column of two categories and a constant one.
_FEWEST_OF_TABLES = 3


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
    """A public law of records, for dry runs.

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
    Features have norm 1, the last one is a constant.

    Args:
        records: What a record looks like, as for `auto`; `None` for linear models.
        test_size: The number of test records.
    """

    records: PyTree = eqx.field(static=True, default=None, converter=shapes_of)
    test_size: Count = eqx.field(static=True, default=4000)

    @abc.abstractmethod
    def models(
        self, problem: AbstractProblem, shape: tuple[int, ...], key: Key
    ) -> tuple[Array, Array]:
        """The model of the population, and those of the sources, stacked."""

    def features(self, key: Key, rows: int, columns: int) -> Float[Array, "n d"]:
        """Rows of norm 1: by default normal entries of decaying scale, a constant."""
        return _features(key, rows, columns)

    def blocks(self, columns: int) -> list[int]:
        """Widths of the blocks of features before a constant one: by default 1."""
        return [1] * (columns - 1)

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
        models, margin = models.reshape(count, *shape), _MARGIN
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
            margin = _MARGIN_OF_CLASSES * math.log2(shape[-1]) ** 0.9
        rows = self.gathered(last, 1000, shape)
        if aligned and len(shape) == 1:
            sizes = jnp.std(rows, 0)
            models *= (sizes.at[-1].set(0.0) if len(sizes) > 1 else sizes)[None]
        scores = jnp.tensordot(rows, models, (1, 1))
        spread = jnp.std(jnp.moveaxis(scores, 1, 0).reshape(count, -1), 1)
        return models * margin / _spread(spread, models[0])

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
        keys = jax.random.split(key, 4)
        held, total = upper + self.test_size, upper + self.test_size + lower
        target, sources = self.models(problem, layout.teacher, keys[0])
        source = self.sources(keys[1], lower, len(sources))
        records = layout.labelled(
            self.gathered(keys[2], total, layout.teacher),
            jnp.concatenate([target[None], sources]),
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


class GoodOrBad(AbstractTeacherTwin):
    """Of five sources two follow the population, two are opposite, one is random.

    Pooled, the five carry no information about the model. Labels are balanced: a model
    that predicts the more frequent one finds no source. They follow the features that
    vary most.
    """

    @override
    def models(self, problem, shape, key):
        (target,) = self.teachers(key, 1, shape, aligned=True)
        # In this order, so that of two sources one is opposite.
        kinds = jnp.asarray([1.0, -1.0, 0.0, 1.0, -1.0])
        kinds = kinds[jnp.arange(_num_sources(problem)) % 5]
        return target, _spread(kinds, target) * target[None]


class Shifted(AbstractTeacherTwin):
    """Every source differs from the population, partly in the same way as all others.

    Args:
        shift: The largest distance of a source's model, in norms of the population's.
    """

    shift: Positive = 1.2

    @override
    def models(self, problem, shape, key):
        count = _num_sources(problem)
        target, common, *others = self.teachers(key, count + 2, shape)
        far = self.shift * (1 + jnp.arange(1.0, count + 1) / count) / 2
        own = (common[None] + jnp.stack(others)) / math.sqrt(2)
        return target, target[None] + _spread(far, target) * own


class Tables(AbstractTeacherTwin):
    """Columns of categories; the population is like no source, and like a mixture.

    Columns are one-hot blocks of about the root of the number of features, with
    frequencies and shares of sources that fall like one over the rank. Each source has
    the population's coefficients in half of the blocks and others in the rest.

    Args:
        shift: The distance of the other coefficients, in norms of the population's.
    """

    shift: Positive = 1.0

    @override
    def features(self, key, rows, columns):
        if columns < _FEWEST_OF_TABLES:
            return super().features(key, rows, columns)
        # All blocks at once, padded with categories that do not occur.
        widths = np.asarray(_blocks(columns))
        rank = np.arange(max(widths))
        rarity = np.where(rank < widths[:, None], -np.log(rank + 1.0), -np.inf)
        drawn = jax.random.categorical(key, rarity, shape=(rows, len(widths)))
        places = drawn + (np.cumsum(widths) - widths)[None]
        chosen = jnp.zeros((rows, columns - 1))
        chosen = chosen.at[jnp.arange(rows)[:, None], places].set(1.0)
        features = jnp.concatenate([chosen, jnp.ones((rows, 1))], 1)
        return features / jnp.linalg.norm(features, axis=1, keepdims=True)

    @override
    def blocks(self, columns):
        return _blocks(columns)

    @override
    def sources(self, key, rows, num_sources):
        rarity = -jnp.log(jnp.arange(1.0, num_sources + 1))
        return jax.random.categorical(key, rarity, shape=(rows,))

    @override
    def models(self, problem, shape, key):
        first, then = jax.random.split(key)
        count, blocks = _num_sources(problem), np.asarray([*_blocks(shape[0]), 1])
        target, *others = self.teachers(first, count + 1, shape)
        differs = jax.random.bernoulli(then, 0.5, (count, len(blocks)))
        differs = jnp.repeat(differs, blocks, axis=1, total_repeat_length=shape[0])
        differs = differs.reshape(*differs.shape, *[1] * (target.ndim - 1))
        differs = differs.astype(target.dtype)
        return target, target[None] + self.shift * differs * jnp.stack(others)


class Alike(AbstractTeacherTwin):
    """All records follow one model: one level is enough."""

    @override
    def models(self, problem, shape, key):
        (target,) = self.teachers(key, 1, shape)
        return target, jnp.stack([target] * _num_sources(problem))


class NoiseGroups(AbstractTeacherTwin):
    """Labels depend on the features of some groups of coefficients alone.

    Args:
        useful: The share of these groups, at least one.
    """

    useful: Fraction = 0.5

    @property
    @override
    def name(self) -> str:
        return f"{self.useful:.0%} useful"

    @override
    def features(self, key, rows, columns):
        features = jax.random.normal(key, (rows, columns))
        if columns > 1:
            features = features.at[:, -1].set(1.0)
        return features / jnp.linalg.norm(features, axis=1, keepdims=True)

    @override
    def models(self, problem, shape, key):
        first, then = jax.random.split(key)
        (target,) = self.teachers(first, 1, shape)
        group = _groups(problem, shape[0])
        # Some groups, and the scale of the margins as it was.
        count = int(np.max(group)) + 1
        order = jax.random.permutation(then, count)
        useful = (order < max(1, round(self.useful * count)))[group]
        useful = useful.astype(target.dtype)
        useful = useful * jnp.sqrt(len(useful) / jnp.maximum(jnp.sum(useful), 1))
        target = _spread(useful, target[0]) * target
        return target, target[None]


def twins(problem: AbstractProblem, records: PyTree = None) -> tuple[AbstractTwin, ...]:
    """The default twins of a problem.

    For sources `GoodOrBad`, `Shifted`, `Tables` and `Alike`; for penalties
    `NoiseGroups` with half and an eighth of the groups useful, and `Alike`; for other
    problems `Alike`.

    Args:
        problem: The problem.
        records: What a record looks like, as for `auto`; `None` for linear models.
    """
    alike = Alike(records)
    if isinstance(problem, SourceWeighting):
        return GoodOrBad(records), Shifted(records), Tables(records), alike
    if isinstance(problem, PenaltyTuning):
        few = NoiseGroups(records, useful=0.125)
        return NoiseGroups(records), few, alike
    return (alike,)


def _model_of(problem: AbstractProblem, w0: PyTree) -> PyTree:
    if isinstance(problem, BilevelProblem):
        return w0[1]
    if isinstance(problem, FiniteSum):
        return w0
    raise TypeError(
        f"auto: no synthetic twin is known for {type(problem).__name__}; pass "
        "twins=[...], instances of a subclass of dpbilevel.planning.AbstractTwin."
    )


def _num_sources(problem: AbstractProblem) -> int:
    return problem.num_sources if isinstance(problem, SourceWeighting) else 1


def _groups(problem: AbstractProblem, columns: int) -> Int[np.ndarray, " d"]:
    """The group of every feature; features alone where coefficients are none's."""
    if isinstance(problem, PenaltyTuning):
        leaves = jax.tree.leaves(problem.groups)
        if len(leaves) == 1 and len(leaves[0]) == columns:
            return np.asarray(leaves[0]).reshape(columns, -1)[:, 0]
    return np.arange(columns)


def _with_source(training: PyTree, source: Int[Array, " n"]) -> PyTree:
    if not isinstance(training, Mapping):
        raise ValueError(
            "auto: records of source_weighting must be a dict, to which the default "
            'twins add "source". Pass twins=[...], instances of a subclass of '
            "dpbilevel.planning.AbstractTwin."
        )
    return {**training, "source": source.astype(jnp.int32)}


def _spread(values: Float[Array, " k"], like: Array) -> Array:
    """With one trailing axis for each axis of an array."""
    return values.reshape(-1, *[1] * like.ndim)


def _blocks(columns: int) -> list[int]:
    """Widths of the blocks of categories before a constant column."""
    count = max(1, round((columns - 1) ** 0.5))
    return [len(part) for part in np.array_split(np.arange(columns - 1), count)]


def _features(key, rows: int, columns: int) -> Float[Array, "n d"]:
    if columns == 1:
        return jax.random.rademacher(key, (rows, 1), jnp.result_type(float))
    spectrum = 1 / jnp.sqrt(jnp.arange(1, columns))
    free = jax.random.normal(key, (rows, columns - 1)) * spectrum[None]
    constant = jnp.full((rows, 1), jnp.linalg.norm(spectrum))
    features = jnp.concatenate([free, constant], 1)
    return features / jnp.linalg.norm(features, axis=1, keepdims=True)
