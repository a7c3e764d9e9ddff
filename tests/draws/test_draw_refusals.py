"""Refusals of exponential mechanisms and grids, with their remedies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.draws.hyper import GradientNorm
from dpbilevel.draws.mean_loss import MeanLoss
from tests.problems import CERTIFIED, EXACT

GRID = dpb.draws.Grid.product(jnp.linspace(0.0, 1.0, 11))
UNIT = dpb.sets.Box(jnp.zeros(1), jnp.ones(1))
PURE = dpb.PrivacyBudget(1.0, 0.0)
RECORDS = jnp.asarray(np.random.default_rng(0).uniform(size=50), jnp.float32)
SIZES = dpb.Sizes(30, 60, "disjoint")


def distance(w, record):
    return jnp.abs(w[0] - record)


MEDIAN = dpb.FiniteSum(distance, w_set=UNIT)


def test_grids_hold_every_combination():
    grid = dpb.draws.Grid.product(jnp.asarray([0.0, 1.0]), jnp.asarray([2.0, 3.0, 4.0]))
    assert grid.candidates.shape == (6, 2)
    assert grid.dimension == 2
    assert len({tuple(map(float, row)) for row in grid.candidates}) == 6


def test_candidates_outside_the_set_are_refused():
    grid = dpb.draws.Grid.product(jnp.asarray([0.5, 1.5]))
    solver = dpb.draws.ExponentialMechanism(grid, clip_range=1.0)
    with pytest.raises(ValueError, match="candidate 1 is outside the set"):
        dpb.calibrate(MEDIAN, solver, PURE, sizes=50)


REFUSALS = {
    "no constants": (
        lambda: dpb.calibrate(
            MEDIAN, dpb.draws.ExponentialMechanism(GRID), PURE, sizes=50
        ),
        r"lipschitz=G.*clip_range=B",
    ),
    "clip range of a gradient": (
        lambda: dpb.draws.ExponentialMechanism(GRID, "gradient_norm", clip_range=1.0),
        "excludes gradient_norm",
    ),
    "gradient norm of one level": (
        lambda: dpb.calibrate(
            MEDIAN,
            dpb.draws.ExponentialMechanism(GRID, "gradient_norm"),
            PURE,
            sizes=50,
        ),
        "needs two levels",
    ),
    "add or remove with two levels": (
        lambda: dpb.calibrate(
            CERTIFIED,
            dpb.draws.ExponentialMechanism(
                GRID,
                mechanism=dpb.draws.Exponential(
                    neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE
                ),
            ),
            PURE,
            sizes=SIZES,
        ),
        "replace-one only",
    ),
    "float32 and many records": (
        lambda: dpb.calibrate(
            MEDIAN,
            dpb.draws.ExponentialMechanism(GRID, clip_range=1.0),
            PURE,
            sizes=10**7,
        ),
        "Enable 64-bit",
    ),
    "unbounded set": (
        lambda: dpb.calibrate(
            dpb.FiniteSum(distance, lipschitz=1.0),
            dpb.draws.ExponentialMechanism(GRID),
            PURE,
            sizes=50,
        ),
        "needs a bounded set",
    ),
    "pure budget and Gaussian noise": (
        lambda: dpb.calibrate(MEDIAN, dpb.NoisyGD(1, 1.0, 0.1), PURE, sizes=50),
        "has no noise for delta = 0. Use a delta",
    ),
    "not convex": (
        lambda: dpb.draws.RegularizedExponentialMechanism(
            dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-9), convex=False
        ),
        "convex on every possible dataset",
    ),
    "a regularized draw from single points": (
        lambda: dpb.draws.RegularizedExponentialMechanism(GRID, convex=True),
        "takes no convex set",
    ),
    "no candidates": (
        lambda: dpb.draws.Grid(jnp.zeros((0, 1))),
        "at least one candidate",
    ),
    "integer candidates": (
        lambda: dpb.draws.Grid(jnp.zeros((2, 1), jnp.int32)),
        "candidates must be floats",
    ),
    "candidates of another structure": (
        lambda: dpb.solve(
            MEDIAN,
            dpb.draws.ExponentialMechanism(
                dpb.draws.Grid({"w": jnp.zeros((2, 1))}), clip_range=1.0
            ).with_noise(1.0),
            RECORDS,
            jnp.zeros(1),
            key=jax.random.key(0),
        ),
        r"a candidate is \{'w': \(1,\)\}, the start \(1,\)",
    ),
    "a gradient mapping on an unbounded set": (
        lambda: GradientNorm(
            dataclasses.replace(EXACT.problem, x_set=dpb.sets.NonNegative()),
            "spread",
            SIZES,
        ).contributions(jnp.float64),
        "needs a bounded set",
    ),
    "start of another size": (
        lambda: dpb.solve(
            MEDIAN,
            dpb.draws.ExponentialMechanism(GRID, clip_range=1.0).with_noise(1.0),
            RECORDS,
            jnp.zeros(2),
            key=jax.random.key(0),
        ),
        "bounds must be shaped like the points",
    ),
    "not calibrated": (
        lambda: dpb.solve(
            MEDIAN,
            dpb.draws.ExponentialMechanism(GRID, clip_range=1.0),
            RECORDS,
            jnp.zeros(1),
            key=jax.random.key(0),
        ),
        "not calibrated",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_input_is_refused_with_the_remedy(name):
    call, match = REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=match):
        call()


def test_an_unsealed_score_cannot_be_drawn_by():
    score = MeanLoss(MEDIAN, "spread", 50, 1.0)
    mechanism = dpb.draws.Exponential(1.0)
    raw = score.potential(RECORDS, jnp.zeros(1))
    with pytest.raises(TypeError, match="BoundedScore"):
        mechanism.draw(raw, GRID, UNIT, jnp.zeros(1), key=jax.random.key(0))
    other = dpb.draws.RegularizedExponential(1.0)
    sealed = score.bounded(RECORDS, jnp.zeros(1))
    with pytest.raises(TypeError, match="needs a score sealed with its slope"):
        other.draw(
            sealed, GRID, UNIT, jnp.zeros(1), regularizer=1.0, key=jax.random.key(0)
        )
