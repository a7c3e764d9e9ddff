"""Bounds of draws against the exact laws that they are about."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from tests.problems import EXACT

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


def from_mean(w, record):
    return 0.5 * (w[0] - record) ** 2


def population_excess(rate, regularizer, n):
    """Exact, for fair signs: the law is a normal one in [-1, 1], given the mean."""
    convexity, heads = 1 + regularizer, np.arange(n + 1)
    means = (2 * heads - n) / n / convexity
    scale = 1 / math.sqrt(rate * convexity)
    law = scipy.stats.truncnorm((-1 - means) / scale, (1 - means) / scale, means, scale)
    # The loss on the population is (w^2 + 1) / 2, least at 0.
    squares = law.var() + law.mean() ** 2
    return 0.5 * np.sum(scipy.stats.binom.pmf(heads, n, 0.5) * squares)


def test_the_excess_on_the_population_is_within_its_bound():
    n = 200
    problem = dpb.FiniteSum(
        from_mean, w_set=LINE, lipschitz=2.0, lipschitz_spread=1.0, smoothness=1.0
    )
    sampler = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-12)
    solver = dpb.draws.RegularizedExponentialMechanism(
        sampler, convex=True, dimension=1, regularizer=1e-3, strong_convexity=1.0
    )
    with jax.enable_x64(True):
        budget = dpb.PrivacyBudget(1.0, 1e-6)
        solver = dpb.calibrate(problem, solver, budget, sizes=n).solver
        rate = solver.plan(problem, n).rate
        found = population_excess(rate, 1e-3, n)
        bound = solver.bound(problem, distance=1.0, population=True)
        without = solver.bound(problem, distance=1.0)
        assert bound - without == pytest.approx(4 / n / 1.001, rel=1e-3)
        assert without < found <= bound  # the control is the bound on the records
        two = dataclasses.replace(solver, sizes=dpb.Sizes(20, 40, "disjoint"))
        with pytest.raises(ValueError, match="one level"):
            two.bound(EXACT.problem, population=True)
