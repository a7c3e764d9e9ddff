import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpbilevel.draws import GridWalk
from dpbilevel.draws.samplers import _lattice
from dpbilevel.draws.samplers.base import AbstractPotential, Regularity
from dpbilevel.sets import Ball, Box, Simplex
from tests.draws.lattice_zoo import CASES, Peak, peak

ALPHA = 1e-4


def draws(sampler, potential, feasible, start, count, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    draw = jax.jit(
        jax.vmap(lambda key: sampler.draw(potential, feasible, start, key=key))
    )
    return jax.tree.map(np.asarray, draw(keys))


def pvalue_on_interval(xs, potential, mesh=20_000):
    """Kolmogorov and Smirnov against the law on [-1, 1], by quadrature."""
    grid = np.linspace(-1, 1, mesh + 1)
    density = np.exp(-np.asarray(jax.vmap(potential)(jnp.asarray(grid)[:, None])))
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return scipy.stats.kstest(
        xs, lambda x: np.interp(x, grid, below / below[-1])
    ).pvalue


def pvalue_in_plane(points, potential, gauge, low, high, bins=12, fine=40):
    """A chi-square test of how many points each square of the plane holds."""
    ticks = [
        a + (b - a) * (np.arange(bins * fine) + 0.5) / bins / fine
        for a, b in zip(low, high, strict=True)
    ]
    mesh = np.stack(np.meshgrid(*ticks, indexing="ij"), -1)
    values = np.asarray(jax.vmap(jax.vmap(potential))(jnp.asarray(mesh)))
    density = np.exp(-values) * (gauge(mesh) <= 1)
    expected = density.reshape(bins, fine, bins, fine).sum((1, 3))
    expected *= len(points) / expected.sum()
    seen = np.histogram2d(*points.T, bins=bins, range=[*zip(low, high, strict=True)])[0]
    often = expected > 20
    rest = np.array([max(expected[~often].sum(), 1e-9)]), np.array([seen[~often].sum()])
    chi = (((seen - expected) ** 2)[often] / expected[often]).sum()
    chi += ((rest[1] - rest[0]) ** 2 / rest[0]).sum()
    return scipy.stats.chi2.sf(chi, often.sum())


@pytest.mark.parametrize(
    "tabulate", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_drawn_values_have_the_law_on_an_interval_and_no_other_temperature(tabulate):
    feasible, potential = CASES["interval"][0], Peak(np.array([[4.0]]))
    # 128 steps are many mixing times of 6 cells; tabulated, the plan is the certified.
    options = {"tabulate": True}
    if not tabulate:
        options = {"num_steps": 128, "cells": (6,), "num_tries": 10}
    sampler = GridWalk(**options).with_counts(Regularity(1, 4.0, 0.0), feasible)
    xs = draws(sampler, potential, feasible, jnp.zeros(1), 15_000)[:, 0]
    assert pvalue_on_interval(xs, potential) > ALPHA
    for wrong in (0.9, 1.1):
        other = Peak(wrong * potential.slopes)
        assert pvalue_on_interval(xs, other) < ALPHA


def disc_points(count=12_000):
    feasible = Ball(0.5, np.array([1.0, 0.0]))
    potential = peak(2, 3.0)
    sampler = GridWalk(tabulate=True, cells=(7, 7), num_tries=40)
    sampler = sampler.with_counts(Regularity(2, 3.0, 0.0), feasible)
    return draws(sampler, potential, feasible, jnp.zeros(2), count)


def pvalue_in_disc(points, scale=1.0):
    gauge = lambda z: np.linalg.norm(z - np.array([1.0, 0.0]), axis=-1) / 0.5  # noqa: E731
    potential = Peak(scale * peak(2, 3.0).slopes)
    return pvalue_in_plane(points, potential, gauge, (0.5, -0.5), (1.5, 0.5))


@pytest.mark.slow
def test_drawn_points_have_the_law_on_a_disc_and_no_other_temperature():
    points = disc_points()
    assert pvalue_in_disc(points) > ALPHA
    assert pvalue_in_disc(points, 0.8) < ALPHA
    assert pvalue_in_disc(points, 1.2) < ALPHA


@pytest.mark.slow
def test_a_wall_in_place_of_the_extension_is_noticed(monkeypatch):
    many = _lattice.Extended.many

    def walled(self, zs, reference):
        outside = jax.vmap(self.frame.gauge)(zs) > 1
        return many(self, zs, reference) + jnp.where(outside, 1e3, 0.0)

    monkeypatch.setattr(_lattice.Extended, "many", walled)
    assert pvalue_in_disc(disc_points()) < ALPHA


@pytest.mark.slow
def test_drawn_points_have_the_law_on_a_simplex():
    potential, regularity = peak(3, 1.5), Regularity(3, 1.5, 0.0)
    options = {"cells": (16, 16), "penalty": 2.5, "num_tries": 20}
    sampler = GridWalk(tabulate=True, **options).with_counts(regularity, Simplex(1.0))
    points = draws(sampler, potential, Simplex(1.0), jnp.zeros(3), 8_000)
    np.testing.assert_allclose(points.sum(1), 1.0, atol=1e-6)
    assert points.min() >= 0

    def on_simplex(z):
        return potential(jnp.append(z, 1 - z.sum()))

    gauge = lambda z: 1 - 3 * np.minimum(z.min(-1), 1 - z.sum(-1))  # noqa: E731
    ends = (0.0, 0.0), (1.0, 1.0)
    assert pvalue_in_plane(points[:, :2], on_simplex, gauge, *ends) > ALPHA
    flat = lambda z: 0.0 * z.sum()  # noqa: E731
    assert pvalue_in_plane(points[:, :2], flat, gauge, *ends) < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feasible", "dtype", "options"),
    [
        (Ball(1.0), jnp.float32, {"num_steps": 300, "cells": (8, 8, 8)}),
        pytest.param(
            *(Box(-1.0, 1.0), jnp.float64, {"tabulate": True, "cells": (8, 8, 8)}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(Simplex(2.0), jnp.float64, {"num_steps": 300, "cells": (8, 8)}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pytrees_keep_their_shape_and_dtype_and_stay_in_the_set(
    feasible, dtype, options
):
    with jax.enable_x64(dtype == jnp.float64):
        start = {"a": jnp.zeros((2,), dtype), "b": jnp.zeros((), dtype)}
        sampler = GridWalk(num_tries=9, **options)
        sampler = sampler.with_counts(Regularity(3, 2**0.5, 0.0), feasible)
        potential = Peak(np.array([[1.0, 0.0, -1.0]]))
        out = draws(sampler, potential, feasible, start, 20)
        shapes = {name: (v.shape, v.dtype) for name, v in out.items()}
        assert shapes == {"a": ((20, 2), dtype), "b": ((20,), dtype)}
        assert jax.vmap(feasible.contains)(out).all()
        assert len(np.unique(out["b"])) == 20


class Broken(AbstractPotential):
    """Not a number where the first entry is above the threshold."""

    above: float

    def __call__(self, x):
        return jnp.where(x[0] > self.above, jnp.nan, 2.0 * x[0])


@pytest.mark.parametrize(("above", "tabulate"), [(-2.0, False), (0.0, True)])
@pytest.mark.slow
def test_where_the_potential_is_not_a_number_it_counts_as_zero(above, tabulate):
    feasible, regularity = CASES["interval"][0], Regularity(1, 4.0, 0.0)
    options = {"tabulate": True} if tabulate else {"num_steps": 100, "cells": (6,)}
    sampler = GridWalk(num_tries=8, **options).with_counts(regularity, feasible)
    xs = draws(sampler, Broken(above), feasible, jnp.zeros(1), 2000)[:, 0]
    zeroed = lambda x: jnp.where(x[0] > above, 0.0, 2.0 * x[0])  # noqa: E731
    assert pvalue_on_interval(xs, zeroed) > ALPHA
