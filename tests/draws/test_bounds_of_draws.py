"""Bounds of draws against the exact laws that they are about."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb

BUDGET = dpb.PrivacyBudget(1.0, 0.0)
LINE = dpb.sets.Box(-jnp.ones(1), jnp.ones(1))


def one_below_the_others(w, record):
    """A loss that is small at the candidate 0 alone."""
    return jnp.where(w[0] < 0.5, 0.0, 1.0) * record


@pytest.mark.parametrize("count", [10, 1_000])
def test_the_excess_of_candidates_is_within_its_bound(count):
    """The worst scores: one candidate is better than all others by log(N) / k."""
    grid = dpb.draws.Grid(jnp.arange(count, dtype=jnp.float32)[:, None])
    problem = dpb.FiniteSum(one_below_the_others)
    solver = dpb.draws.ExponentialMechanism(grid, clip_range=1.0)
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=40)
    bound, rate = plan.solver.bound(problem), 1.0 * 40 / 2
    assert bound == pytest.approx(math.log(count) / rate, rel=1e-3)
    gaps = np.linspace(0, 1, 200)  # of the scores
    excess = gaps / (1 + np.exp(rate * gaps) / (count - 1))
    assert excess.max() <= bound
    assert excess.max() > 0.4 * bound  # the control: a third of it would be broken


def walk(problem, convex=False, sizes=10):
    sampler = dpb.draws.GridWalk()
    solver = dpb.draws.ExponentialMechanism(sampler, convex=convex, dimension=1)
    return dpb.calibrate(problem, solver, BUDGET, sizes=sizes).solver


def slope(w, record):
    return w[0] * record


@pytest.mark.parametrize("convex", [False, True])
def test_the_excess_on_a_set_is_within_its_bound(convex):
    """A slope, whose law is an exponential one that ends."""
    problem = dpb.FiniteSum(slope, w_set=LINE, lipschitz=1.0)
    for sizes in (10, 200):
        solver = walk(problem, convex, sizes)
        rate = solver.plan(problem, sizes).rate
        excess = 1 / rate - 2 / math.expm1(2 * rate)
        bound = solver.bound(problem)
        assert excess <= bound
    assert excess > 0.9 / rate  # the control: less than d / k is broken
    if convex:
        assert bound == pytest.approx(1 / rate, rel=0.05)


def test_a_public_term_of_one_level_has_no_bound():
    """It is cut relative to the start, so a far start leaves no order of points."""
    problem = dpb.FiniteSum(slope, lambda w: w[0], w_set=LINE, lipschitz=1.0)
    solver = dpb.draws.ExponentialMechanism(
        dpb.draws.Grid(jnp.asarray([[-1.0], [1.0]])), clip_range=1.0
    )
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=10)
    with pytest.raises(ValueError, match="does not cover a public term"):
        plan.solver.bound(problem)


def test_a_sampler_that_is_cut_short_has_no_bound():
    problem = dpb.FiniteSum(slope, w_set=LINE, lipschitz=1.0)
    solver = dpb.draws.ExponentialMechanism(
        dpb.draws.GridWalk(num_steps=50), convex=True, dimension=1
    )
    with pytest.raises(ValueError, match="calibrate the solver first"):
        solver.bound(problem)
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=10)
    with pytest.raises(ValueError, match="cut short"):
        plan.solver.bound(problem)
