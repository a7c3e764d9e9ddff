"""The bound of ImplicitBilevel on an objective that is not convex, by many runs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import dpbilevel as dpb
from tests.problems import EXACT

STEPS, N = 8, 30


def upper(x, y, record):
    return 0.5 * jnp.sum((y - record) ** 2)


def lower(x, y, record):
    return 0.5 * jnp.sum((y - jnp.sin(x) - record) ** 2)


ZEROS = "upper_x upper_xx upper_xy lower_yy_in_x lower_xy_in_y lower_yy_in_y"
WAVE = dpb.BilevelProblem(
    upper,
    lower,
    constants=dpb.bilevel.SecondOrderConstants(
        strong_convexity=1.0,
        solution_radius=1.5,
        upper_y=2.0,
        upper_yy=1.0,
        lower_y=3.0,
        lower_xy=1.0,
        lower_yy=1.0,
        lower_xy_in_x=1.0,
        **dict.fromkeys(ZEROS.split(), 0.0),
    ),
)
DATA = dpb.Levels(jnp.full((N, 1), -0.5), jnp.full((N, 1), 0.5))
W0 = jnp.zeros(1), jnp.zeros(1)
GAP = 0.5  # F = (sin(x) + 1)^2 / 2


def gradient(x):
    return (jnp.sin(x) + 1) * jnp.cos(x)


@pytest.mark.parametrize("radius", [None, pytest.param(0.7, marks=pytest.mark.slow)])
def test_the_mean_square_of_hypergradients_is_within_the_bound(radius):
    with jax.enable_x64(True):
        x_set = dpb.sets.Euclidean() if radius is None else dpb.sets.Ball(radius)
        problem = dataclasses.replace(WAVE, x_set=x_set)
        eta, sizes = 1 / WAVE.constants.smoothness, dpb.Sizes(N, N, "disjoint")
        solver = dpb.ImplicitBilevel(STEPS, eta).with_noise(0.35)
        solver = solver.with_sizes(sizes).with_precision("float")
        data, w0 = jax.tree.map(lambda v: v.astype(float), (DATA, W0))

        def square(key):
            x = dpb.solve(problem, solver, data, w0, key=key).x
            return jnp.sum((x - x_set.project(x - eta * gradient(x))) ** 2) / eta**2

        keys = jax.random.split(jax.random.key(0), 1_000)
        found = float(jnp.mean(jax.jit(jax.vmap(square))(keys))) ** 0.5
        bound = solver.bound(problem, w0, initial_gap=GAP)
        (release,) = solver.ledger(problem, sizes).releases
    assert found <= bound
    if radius is None:
        parts = 2 * GAP / (eta * STEPS), release.noise_std**2
        assert bound == pytest.approx(math.sqrt(sum(parts)), rel=0.02)
        # The control: a bound with half of each part is broken.
        assert found > math.sqrt(sum(parts) / 4)


def test_a_bound_is_for_what_its_derivation_covers():
    sizes = EXACT.problem.sizes_of(EXACT.data, "disjoint")
    solver = dpb.ImplicitBilevel(3, 0.05).with_noise(1.0).with_sizes(sizes)
    changed = {"output": dpb.outputs.Last()}, {"step_size": 10.0}, {"sizes": None}
    for fields in changed:
        wrong = dataclasses.replace(solver, **fields)
        with pytest.raises(ValueError, match="covers calibrated solvers"):
            wrong.bound(EXACT.problem, EXACT.w0, initial_gap=1.0)
    mirrored = dpb.sets.Simplex(entropy=True)  # steps of the entropy are longer
    game = dataclasses.replace(EXACT.problem, x_set=mirrored)
    with pytest.raises(ValueError, match="projected steps"):
        solver.bound(game, EXACT.w0, initial_gap=1.0)
