"""Small lattices of the grid walk: dense transition matrices and exact densities."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dpbilevel.draws import GridWalk
from dpbilevel.draws.samplers import _lattice
from dpbilevel.draws.samplers.base import AbstractPotential, Regularity
from dpbilevel.sets import Ball, Box, Simplex


class Peak(AbstractPotential):
    """The largest of linear functions, and a bump that is not convex."""

    slopes: jax.Array
    bump: float = 0.0

    def __call__(self, x):
        flat = jax.flatten_util.ravel_pytree(x)[0]
        slopes = jnp.asarray(self.slopes, flat.dtype)
        return jnp.max(slopes @ flat) + self.bump * jnp.sin(3 * flat[0])

    def many(self, xs):
        return jax.vmap(self)(xs)


def peak(dimension, lipschitz, bump=0.0, seed=0):
    slopes = np.random.default_rng(seed).normal(size=(3, dimension))
    return Peak(lipschitz * slopes / np.linalg.norm(slopes, axis=1).max(), bump)


# The set, the dimension of a point, the Lipschitz constant and the size of the bump.
CASES = {
    "interval": (Box(np.array([-1.0]), np.array([1.0])), 1, 4.0, 0.0),
    "box": (Box(np.array([0.0, -1.0]), np.array([1.0, 1.0])), 2, 2.0, 0.0),
    "ball": (Ball(0.5, np.array([1.0, 0.0])), 2, 1.0, 0.0),
    "segment": (Simplex(2.0), 2, 3.0, 0.0),
    "simplex": (Simplex(1.0), 3, 0.6, 0.0),
    "bumpy": (Box(np.array([-1.0]), np.array([1.0])), 1, 1.0, 0.5),
}


class Setting:
    """A planned sampler on a set, with its lattice tabulated in float64."""

    def __init__(self, name, potential=None, **options):
        feasible, dimension, lipschitz, bump = CASES[name]
        convex = 0.0 if bump == 0 else None
        self.feasible, self.dimension = feasible, dimension
        self.regularity = Regularity(dimension, lipschitz + 3 * bump, convex)
        self.potential = potential or peak(dimension, lipschitz, bump)
        if name == "simplex":
            options = {"cells": (9, 9)} | options  # a small dense matrix
        sampler = GridWalk(**{"tabulate": False, "max_queries": 10**30} | options)
        self.sampler = sampler.with_counts(self.regularity, feasible)
        self.bounds = self.sampler._bounds(self.regularity, feasible)
        self.cells = self.sampler.cells
        frame = self.bounds.frame
        self.frame = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), frame)
        self.index = np.stack(
            np.unravel_index(np.arange(np.prod(self.cells)), self.cells), -1
        )
        self.table = self.energy(
            _lattice.middles(self.frame, self.cells, jnp.asarray(self.index))
        )
        self.q = np.exp(-self.table) / np.exp(-self.table).sum()

    def extended(self):
        return _lattice.Extended(
            self.potential, self.frame, lambda x: x, self.sampler.penalty
        )

    def energy(self, zs):
        extended = self.extended()
        run = jax.jit(lambda zs: extended.many(zs, extended.reference()))
        return np.asarray(run(zs))

    @functools.cached_property
    def transitions(self):
        return transition_matrix(self.table, self.cells, self.index)


def transition_matrix(table, cells, index):
    """From the step itself: where it goes for each word, and from which coin on."""
    n, count = len(cells), len(table)
    table = jnp.asarray(table)

    def energy(index):
        return table[jnp.ravel_multi_index(tuple(index.T), cells, mode="clip")]

    words = [
        m << 31 | s << 30 | a for m, s, a in itertools.product((0, 1), (0, 1), range(n))
    ]
    where = jnp.asarray(np.repeat(index, len(words), 0), jnp.int32)
    words = jnp.asarray(np.tile(words, count), jnp.uint32)
    proposed = jax.jit(functools.partial(_lattice._proposals, cells))(where, words)

    @jax.jit
    def threshold():
        def halve(_, ends):
            low, high = ends
            coins = (low + high) / 2
            moved, _ = _lattice._step(energy, cells, where, energy(where), words, coins)
            moves = jnp.all(moved == proposed, axis=1)
            return jnp.where(moves, low, coins), jnp.where(moves, coins, high)

        ends = jnp.zeros(len(words)), jnp.full(len(words), 100.0)
        return jax.lax.fori_loop(0, 60, halve, ends)[1]

    chance = np.exp(-np.asarray(threshold())) / (len(words) // count)
    source = np.repeat(np.arange(count), len(words) // count)
    target = np.ravel_multi_index(tuple(np.asarray(proposed).T), cells)
    matrix = np.zeros((count, count))
    np.add.at(matrix, (source, target), chance)
    return matrix + np.diag(1 - matrix.sum(1))


@functools.cache
def setting(name, **options):
    with jax.enable_x64(True):
        built = Setting(name, **options)
        built.transitions  # noqa: B018
        return built


def law(built, steps, tries, mesh):
    """The exact densities of the sampler and of its target at points of a fine mesh."""
    with jax.enable_x64(True):
        frame = built.frame
        corner, sides = np.asarray(frame.corner), np.asarray(frame.sides)
        ticks = [(np.arange(mesh) + 0.5) / mesh] * len(sides)
        zs = corner + sides * np.stack(np.meshgrid(*ticks, indexing="ij"), -1).reshape(
            -1, len(sides)
        )
        gauges = np.asarray(jax.vmap(frame.gauge)(jnp.asarray(zs)))
    power = np.linalg.matrix_power(built.transitions, steps)
    start = np.ravel_multi_index([c // 2 for c in built.cells], built.cells)
    volume = np.prod(sides / np.asarray(built.cells))

    def candidate(zs):
        """The density of a candidate, and whether it is then accepted."""
        cell = np.floor((zs - corner) / sides * built.cells).astype(int)
        inside = ((cell >= 0) & (cell < built.cells)).all(1)
        cell = np.ravel_multi_index(tuple(cell.T), built.cells, mode="clip")
        with jax.enable_x64(True):
            h = built.energy(jnp.asarray(zs))
        accept = np.exp(np.minimum(built.table[cell] - h - built.sampler.slack, 0.0))
        return inside * power[start, cell] / volume, accept, h

    density, accept, h = candidate(zs)
    within = gauges <= 1
    weight = np.prod(sides) / len(zs)
    p = (density * accept)[within].sum() * weight
    rest = (1 - p) ** (tries - 1)
    total = density * accept * (1 - (1 - p) ** tries) / p + rest * density * (
        1 - accept
    )
    if built.frame.reach > 1:
        center = np.asarray(frame.center)
        mirrored = center + (zs - center) / np.maximum(gauges, 1e-9)[:, None] ** 2
        outer, _, _ = candidate(np.where(np.isfinite(mirrored), mirrored, 1e9))
        total = total + rest * outer * np.maximum(gauges, 1e-9) ** (-2.0 * len(sides))
    target = np.exp(-h) * within
    return total[within], (target / (target.sum() * weight))[within], weight
