"""The default populations: public distributions that dry runs draw records from."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from .._checks import NonNegative, Positive
from ..applications.penalties import PenaltyTuning
from ..applications.sources import SourceWeighting
from ..core.problem import AbstractProblem
from .linear_population import AbstractLinearPopulation, Columns, expand
from .synthetic import AbstractPopulation

# Margins of labels: decided by a few groups of features, as weak as on most tables, and
# those of sources that differ from the population.
_GROUP_MARGIN, _TABLE_MARGIN, _SOURCE_MARGIN = 4.0, 1.0, 1.5


class GoodOrBad(AbstractLinearPopulation):
    """Sources of which two in five are good, two opposite, and one random.

    All sources together carry no information about the model. Labels are balanced, so
    that a model of the more frequent label finds no source. They follow the features
    that vary most.
    """

    @override
    def models(self, problem, shape, key):
        (target,) = self.teachers(key, 1, shape, aligned=True)
        count = _num_sources(problem)
        # In this order, so that of two sources one is opposite.
        kinds = np.tile([1.0, -1.0, 0.0, 1.0, -1.0], count // 5 + 1)[:count]
        if count > 1:
            kinds[-2 if count % 5 == 4 else -1] -= kinds.sum()
        return target, expand(jnp.asarray(kinds), target) * target[None]


class Shifted(AbstractLinearPopulation):
    """Every source differs from the population, partly in the same way as all others.

    Args:
        shift: The largest distance of a source's model, in norms of the population's.
    """

    shift: Positive = 0.8

    @override
    def models(self, problem, shape, key):
        count = _num_sources(problem)
        target, common, *others = self.teachers(key, count + 2, shape)
        far = self.shift * (1 + jnp.arange(1.0, count + 1) / count) / 2
        own = (common[None] + jnp.stack(others)) / math.sqrt(2)
        return target, target[None] + expand(far, target) * own


class Tables(AbstractLinearPopulation):
    """Categorical features; the population mixes the sources and equals none of them.

    The sizes of the sources fall like one over the rank. Each source has the
    population's coefficients in half of the blocks and others in the rest.

    Args:
        shift: The distance of the other coefficients, in norms of the population's.
    """

    columns: Columns = eqx.field(static=True, default="categories")
    shift: Positive = 0.7

    @override
    def sources(self, key, rows, num_sources):
        rarity = -jnp.log(jnp.arange(1.0, num_sources + 1))
        return jax.random.categorical(key, rarity, shape=(rows,))

    @override
    def models(self, problem, shape, key):
        first, then = jax.random.split(key)
        count, blocks = _num_sources(problem), np.asarray([*self.blocks(shape[0]), 1])
        target, *others = self.teachers(first, count + 1, shape)
        differs = jax.random.bernoulli(then, 0.5, (count, len(blocks)))
        differs = jnp.repeat(differs, blocks, axis=1, total_repeat_length=shape[0])
        differs = differs.reshape(*differs.shape, *[1] * (target.ndim - 1))
        differs = differs.astype(target.dtype)
        return target, target[None] + self.shift * differs * jnp.stack(others)


class Alike(AbstractLinearPopulation):
    """All records follow one model: one level is enough."""

    @property
    @override
    def name(self) -> str:
        normal = self.columns == "normal"
        return "Alike" if normal else f"Alike ({self.columns})"

    @override
    def models(self, problem, shape, key):
        (target,) = self.teachers(key, 1, shape)
        return target, jnp.stack([target] * _num_sources(problem))


class MissingPositives(AbstractLinearPopulation):
    """Sources that lack some of the positive labels and have effects that are too weak.

    No source has the rate of the population. The models of sources and population
    differ by a factor and a constant, for which few records are enough.

    Args:
        drop: The largest difference of a source's log odds from the population's.
    """

    drop: Positive = 2.0

    @override
    def models(self, problem, shape, key):
        first, then = jax.random.split(key)
        (target,) = self.teachers(first, 1, shape)
        part = (1 + jnp.arange(1.0, _num_sources(problem) + 1)) / 2
        part = part / part[-1]
        sources = expand(1 - part / 2, target) * target[None]
        constant = self.clustered_features(then, 1000, shape)[:, -1]
        height = np.sqrt(np.mean(constant**2))
        lower = -self.drop / height
        if target.ndim > 1:  # the first of several classes is the one that is recorded
            lower = jnp.zeros(shape[1]).at[0].set(-lower)
        return target, sources.at[:, -1].add(jnp.multiply.outer(part, lower))


class NoiseGroups(AbstractLinearPopulation):
    """Groups of features, of which only some decide the labels.

    Args:
        useful: The fraction of these groups, at most 1; one group at least.
        decay: The decay of coefficients from group to group: those of group number $k$
            are smaller by $k^{-decay}$, in random order.
    """

    useful: Positive = 0.5
    decay: NonNegative = 1.0

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
        group = np.arange(shape[0])  # each feature its own, if groups are not of these
        if isinstance(problem, PenaltyTuning):
            leaves = jax.tree.leaves(problem.groups)
            if len(leaves) == 1 and len(leaves[0]) == shape[0]:
                group = np.asarray(leaves[0]).reshape(shape[0], -1)[:, 0]
        # Zero all other groups, and keep the scale of the margins.
        count = int(np.max(group)) + 1
        order = jax.random.permutation(then, count)
        matters = order < max(1, round(self.useful * count))
        sizes = jnp.where(matters, (1.0 + order.astype(float)) ** -self.decay, 0.0)
        useful = sizes[group].astype(target.dtype)
        useful = useful * jnp.sqrt(len(useful) / jnp.maximum(jnp.sum(useful**2), 1e-9))
        target = expand(useful, target[0]) * target
        return target, target[None]


def populations(
    problem: AbstractProblem, records: PyTree = None, norm: float = 1.0
) -> tuple[AbstractPopulation, ...]:
    """Return a tuple of the default populations of a problem.

    Sources have `GoodOrBad`, `Shifted`, `Tables`, `MissingPositives` and `Alike`.
    Penalties have `NoiseGroups` with half, an eighth and all of the groups useful,
    where coefficients fall like one over the rank, or over its root if all are. Other
    problems have `Alike` with each distribution of the features. Between a tenth and a
    half of the labels are positive.

    Args:
        problem: The problem.
        records: The description of a record, as for `auto`; `None` for linear models.
        norm: The norm of the features of every record.
    """
    shared: Any = {"records": records, "norm": norm}
    table: Any = shared | {"margin": _TABLE_MARGIN}
    skewed = Alike(**table, columns="skewed", rate=0.2)
    if isinstance(problem, SourceWeighting):
        return (
            GoodOrBad(**shared, margin=2.0),
            Shifted(**shared, margin=_SOURCE_MARGIN, rate=0.5),
            Tables(**shared, margin=_SOURCE_MARGIN, rate=0.5),
            MissingPositives(**table, columns="skewed", rate=0.4),
            skewed,
        )
    if isinstance(problem, PenaltyTuning):
        kinds = (0.5, 1.0, 0.5), (0.125, 1.0, 0.2), (1.0, 0.5, 0.3)
        shared["margin"] = _GROUP_MARGIN
        return tuple(
            NoiseGroups(**shared, rate=rate, useful=useful, decay=decay)
            for useful, decay, rate in kinds
        )
    categories = Alike(**table, columns="categories", rate=0.1)
    return Alike(**shared, rate=0.5), skewed, categories


def _num_sources(problem: AbstractProblem) -> int:
    return problem.num_sources if isinstance(problem, SourceWeighting) else 1
