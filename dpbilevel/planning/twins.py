"""Synthetic twins: records of a public law in the place of those of people."""

import abc
import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree
from typing_extensions import override

from .._checks import Count, Positive
from ..bilevel.applications import SourceWeighting
from ..bilevel.problem import BilevelProblem, Levels, Sizes
from ..core.problem import AbstractProblem
from ..onelevel.problem import FiniteSum

# Margins of the hidden model have this standard deviation: an accuracy of about .85.
_MARGIN = 2.5


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


class _AbstractLinearTwin(AbstractTwin):
    r"""Records `{"features": ..., "label": ...}` of linear models.

    Features have norm 1 and a constant entry, their spectrum decays. The model is a
    vector with labels -1 and 1, or a matrix with a column per class. A label follows
    the law $p(c) \propto e^{-\ell(y, (a, c))}$ of a random model $y$, so that the
    loss is that of a well-specified model.

    Args:
        test_size: The number of test records.
    """

    test_size: Count = eqx.field(static=True, default=4000)

    @abc.abstractmethod
    def models(
        self, model: PyTree, num_sources: int, key: Key
    ) -> tuple[PyTree, PyTree]:
        """The model of the population, and those of the sources, stacked."""

    def features(self, key: Key, rows: int, columns: int) -> Float[Array, "n d"]:
        """Rows of norm 1: by default normal entries of decaying scale, a constant."""
        return _features(key, rows, columns)

    def shares(self, num_sources: int) -> Float[Array, " k"]:
        """The expected share of each source: by default the same."""
        return jnp.full(num_sources, 1 / num_sources)

    @override
    def draw(self, problem, w0, sizes, key):
        loss, model, num_sources = _parts(problem, w0)
        upper, lower = (
            (sizes.upper, sizes.lower) if isinstance(sizes, Sizes) else (0, sizes)
        )
        keys = jax.random.split(key, 6)
        total = upper + self.test_size
        target, sources = self.models(model, num_sources, keys[0])
        shares = jnp.log(self.shares(num_sources))
        source = jax.random.categorical(keys[1], shares, shape=(lower,))
        labelled = functools.partial(_labelled, loss, model)
        clean = labelled(
            self.features(keys[2], total, len(model)),
            jnp.zeros(total, int),
            target[None],
            keys[3],
        )
        training = labelled(
            self.features(keys[4], lower, len(model)), source, sources, keys[5]
        )
        if isinstance(problem, SourceWeighting):
            training["source"] = source.astype(jnp.int32)
        test = jax.tree.map(lambda v: v[upper:], clean)
        if not isinstance(sizes, Sizes):
            return Twin(training, test)
        validation = jax.tree.map(lambda v: v[:upper], clean)
        return Twin(Levels(validation, training), test)


class GoodOrBad(_AbstractLinearTwin):
    """Of five sources two follow the population, two are random, one is opposite."""

    @override
    def models(self, model, num_sources, key):
        target = _model(model, key)
        kinds = jnp.asarray([1.0, 1.0, 0.0, 0.0, -1.0])[jnp.arange(num_sources) % 5]
        return target, kinds.reshape(-1, *[1] * target.ndim) * target[None]


class Shifted(_AbstractLinearTwin):
    """Every source differs from the population, one more than the other.

    Args:
        shift: The largest distance of a source's model, in norms of the population's.
    """

    shift: Positive = 1.5

    @override
    def models(self, model, num_sources, key):
        first, then = jax.random.split(key)
        target = _model(model, first)
        others = jax.vmap(lambda k: _model(model, k))(
            jax.random.split(then, num_sources)
        )
        far = self.shift * jnp.arange(1.0, num_sources + 1) / num_sources
        far = far.reshape(-1, *[1] * target.ndim)
        return target, target[None] + far * others


class Tables(_AbstractLinearTwin):
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
        parts = []
        blocks = _blocks(columns)
        for k, width in zip(jax.random.split(key, len(blocks)), blocks, strict=True):
            rarity = -jnp.log(jnp.arange(1.0, width + 1))
            drawn = jax.random.categorical(k, rarity, shape=(rows,))
            parts.append(jax.nn.one_hot(drawn, width))
        features = jnp.concatenate([*parts, jnp.ones((rows, 1))], 1)
        return features / jnp.linalg.norm(features, axis=1, keepdims=True)

    @override
    def shares(self, num_sources):
        shares = 1 / jnp.arange(1.0, num_sources + 1)
        return shares / jnp.sum(shares)

    @override
    def models(self, model, num_sources, key):
        first, then, last = jax.random.split(key, 3)
        draw = functools.partial(_model, model, features=self.features)
        target = draw(first)
        others = jax.vmap(draw)(jax.random.split(then, num_sources))
        blocks = np.asarray([*_blocks(len(model)), 1])
        differs = jax.random.bernoulli(last, 0.5, (num_sources, len(blocks)))
        differs = jnp.repeat(differs, blocks, axis=1, total_repeat_length=len(model))
        differs = differs.reshape(*differs.shape, *[1] * (target.ndim - 1))
        return target, target[None] + self.shift * differs * others


class Alike(_AbstractLinearTwin):
    """All records follow one model: one level is enough."""

    @override
    def models(self, model, num_sources, key):
        target = _model(model, key)
        return target, jnp.stack([target] * num_sources)


def twins(problem: AbstractProblem) -> tuple[AbstractTwin, ...]:
    """The default twins of a problem.

    For sources `GoodOrBad`, `Shifted` and `Alike`; for other problems `Alike`.
    """
    if isinstance(problem, SourceWeighting):
        return GoodOrBad(), Shifted(), Alike()
    return (Alike(),)


def _parts(problem: AbstractProblem, w0: PyTree):
    """The loss of a record in the model, the model's start, the number of sources."""
    loss: Callable[..., Array]
    if isinstance(problem, BilevelProblem):
        x, model = w0
        loss = functools.partial(problem.upper, x)
    elif isinstance(problem, FiniteSum):
        model, loss = w0, problem.loss
    else:
        raise TypeError(
            f"auto: no synthetic twin is known for {type(problem).__name__}; pass "
            "twins=[...], instances of a subclass of dpbilevel.planning.AbstractTwin."
        )
    leaves = jax.tree.leaves(model)
    if len(leaves) != 1 or leaves[0].ndim not in (1, 2):
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(
            "auto: the default twins are of linear models, one vector or one matrix, "
            f"but the model has leaves of shapes {shapes}. Pass twins=[...], instances "
            "of a subclass of dpbilevel.planning.AbstractTwin that draws records like "
            "yours from a public law."
        )
    count = problem.num_sources if isinstance(problem, SourceWeighting) else 1
    return loss, leaves[0], count


def _blocks(columns: int) -> list[int]:
    """Widths of the blocks of categories before a constant column."""
    count = max(1, round((columns - 1) ** 0.5))
    return [len(part) for part in np.array_split(np.arange(columns - 1), count)]


def _features(key, rows: int, columns: int) -> Float[Array, "n d"]:
    spectrum = 1 / jnp.sqrt(jnp.arange(1, columns))
    free = jax.random.normal(key, (rows, columns - 1)) * spectrum[None]
    constant = jnp.full((rows, 1), jnp.linalg.norm(spectrum))
    features = jnp.concatenate([free, constant], 1)
    return features / jnp.linalg.norm(features, axis=1, keepdims=True)


def _model(start: Array, key, *, features: Callable = _features) -> Array:
    """A random model whose margins have the standard deviation `_MARGIN`."""
    first, then = jax.random.split(key)
    model = jax.random.normal(first, start.shape)
    margins = features(then, 1000, len(start)) @ model
    return model * _MARGIN / jnp.std(margins)


def _labelled(
    loss, start, features, source: Int[Array, " n"], models, key
) -> dict[str, Array]:
    """Records with labels drawn from the models of their sources."""
    classes = [-1.0, 1.0] if start.ndim == 1 else np.arange(start.shape[1])
    kind = features.dtype if start.ndim == 1 else jnp.int32
    classes = jnp.asarray(classes, kind)

    def energies(row, index):
        return jax.vmap(lambda c: -loss(models[index], {"features": row, "label": c}))(
            classes
        )

    try:
        logits = jax.vmap(energies)(features, source)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(
            'auto: the default twins have records {"features": vector, "label": -1 or '
            "1, or the number of a class}, which the loss cannot read "
            f"({type(error).__name__}: {error}). Pass twins=[...], instances of a "
            "subclass of dpbilevel.planning.AbstractTwin."
        ) from error
    drawn = jax.random.categorical(key, logits)
    return {"features": features, "label": classes[drawn]}
