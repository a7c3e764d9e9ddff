"""The start that is drawn from a portfolio: its points, its law and its price."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from dpbilevel.search.base import Proposal
from dpbilevel.search.random_search import relative
from tests.cases import slow

pytestmark = pytest.mark.usefixtures("x64")
BOX = dpb.sets.Box(np.asarray([-4.0, 0.0]), np.asarray([2.5, 1.0]))
# More than six away from zero nothing tells a slope.
PLATEAU = dpb.FiniteSum(
    lambda w, z: jnp.minimum(jnp.sum((w - z) ** 2), 6.0), w_set=dpb.sets.Box(-9.0, 4.0)
)
NEAR_ZERO = 0.1 * np.random.default_rng(0).normal(size=(400, 6))


def points(portfolio, w0=None, box=BOX, seed=0):
    w0 = jnp.asarray([2.0, 0.9]) if w0 is None else w0
    return portfolio.points(box, w0, 1.0, key=jax.random.key(seed))


@pytest.mark.slow
def test_the_start_the_middle_ones_own_and_the_diagonals_are_points():
    own = np.asarray([[-3.0, 0.25]])
    found = np.asarray(points(dpb.search.Portfolio(60, own)))
    np.testing.assert_allclose(found[0], [2.0, 0.9])
    np.testing.assert_allclose(found[1], [-0.75, 0.5])
    np.testing.assert_allclose(found[2], own[0])
    shares = (found[3:22] - BOX.lower) / (BOX.upper - BOX.lower)
    np.testing.assert_allclose(shares[:, 0], np.arange(1, 20) / 20)
    np.testing.assert_allclose(shares[:, 0], shares[:, 1])
    assert found.shape == (60, 2)
    assert ((BOX.lower <= found) & (found <= BOX.upper)).all()
    # Normal points are cut to the box, so that a few may meet in a corner.
    assert len(np.unique(found[22:], axis=0)) > 34
    other = points(dpb.search.Portfolio(60, own), seed=1)
    np.testing.assert_array_equal(found[:22], other[:22])
    assert not np.array_equal(found[22:], other[22:])


@pytest.mark.slow
@pytest.mark.parametrize("feasible", [dpb.sets.Euclidean(), *slow(dpb.sets.Ball(1.5))])
def test_of_an_unbounded_set_the_part_near_the_start_counts(feasible):
    start = jnp.asarray([1.0, -1.0])
    found = points(dpb.search.Portfolio(), start, feasible)
    assert float(jnp.max(jnp.abs(found - start[None]))) <= 2
    assert bool(jax.vmap(feasible.contains)(found).all())
    assert float(jnp.ptp(found[:, 0])) > 1


def drawn(solver, losses, runs=20_000):
    """How often each of five points is the start."""
    line = jnp.stack([jnp.linspace(-1, 1, 5), jnp.zeros(5)], axis=1)
    told = Proposal(line, jnp.asarray(5, jnp.int32))

    @jax.jit
    @jax.vmap
    def one(key):
        state = solver.init(dpb.FiniteSum(len, w_set=BOX), jnp.zeros(2))
        return solver._draw_step(
            dpb.FiniteSum(len, w_set=BOX), state, told, losses, key
        ).w

    found = one(jax.random.split(jax.random.key(2), runs))
    return np.asarray([np.sum(found[:, 0] == p) for p in line[:, 0]])


@pytest.mark.slow
def test_the_start_is_drawn_by_the_exponential_law_of_relative_losses():
    losses = np.random.default_rng(1).uniform(-0.5, 2.5, size=(10, 5))
    losses += 50 * np.arange(10)[:, None]  # what a record's losses have in common
    losses[3, 1], losses[4, 2], losses[5] = np.nan, np.inf, np.nan
    own = np.where(np.isfinite(losses), losses, np.inf)
    own -= np.where(np.isfinite(own), own, np.inf).min(1, keepdims=True, initial=1e9)
    scores = np.clip(np.nan_to_num(own, nan=np.inf), 0, 2.0).mean(axis=0)
    weights = np.exp(-6.0 * 10 / (2 * 2.0) * (scores - scores.min()))

    def p_value(epsilon):
        solver = dpb.search.GradientInformativeBO(
            2,
            1.0,
            step_size=1.0,
            kernel=dpb.search.RBF(2.0),  # the clip range is the norm times the reach
            portfolio=dpb.search.Portfolio(5, mechanism=dpb.draws.Exponential(epsilon)),
            sizes=10,
        )
        counts = drawn(solver, jnp.asarray(losses))
        expected = weights / weights.sum() * counts.sum()
        return scipy.stats.chisquare(counts, expected).pvalue

    assert p_value(6.0) > 1e-3
    assert p_value(1.2 * 6.0) < 1e-6  # the control


def test_losses_that_are_not_finite_are_the_worst_of_their_record():
    losses = jnp.asarray([[3.0, jnp.nan, 2.0, -jnp.inf], [jnp.nan] * 4])
    expected = [[1, np.inf, 0, np.inf], [np.inf] * 4]
    np.testing.assert_array_equal(relative(losses), expected)


def gibo(**fields):
    return dpb.search.GradientInformativeBO(
        15, 2.0, step_size=0.2, polish=0, keep=32, max_batch=14, **fields
    )


@pytest.mark.slow
def test_from_a_plateau_only_the_portfolio_descends():
    budget, start = dpb.PrivacyBudget(2.0, 1e-5), np.full(6, -8.0)
    found = {}
    for name, solver in (("drawn", gibo()), ("w0", gibo(portfolio=None))):
        plan = dpb.calibrate(PLATEAU, solver, budget, sizes=400)
        assert 1.99 < plan.report.epsilon <= 2.0
        solution = jax.jit(dpb.solve)(
            PLATEAU, plan.solver, NEAR_ZERO, start, key=jax.random.key(0)
        )
        found[name] = float(np.sum(np.square(solution.value)))
    assert found["w0"] > 300
    assert found["drawn"] < 0.3


@pytest.mark.parametrize(("size", "most"), [(1_000, True), (10**7, False)])
def test_a_plan_takes_for_the_draw_what_it_needs(size, most):
    solver = gibo().with_sizes(size).with_noise(2.0)
    draw, gradients = solver.ledger(PLATEAU, size).releases
    epsilon = draw.mechanism.epsilon
    assert gradients.count == 14
    # Both have the zero-concentrated privacy of one Gaussian.
    mu = gradients.count**0.5 / gradients.noise_multiplier
    assert epsilon**2 / 4 + mu**2 == pytest.approx(0.25)
    assert (epsilon**2 / 4 == pytest.approx(0.3 * 0.25)) is most
    if not most:  # 400 log(60) / n tells a 200th of the range apart
        assert epsilon == pytest.approx(400 * np.log(60) / 10**7)


@pytest.mark.slow
def test_without_noise_the_best_start_is_drawn_and_nothing_is_added():
    solver = gibo().with_sizes(400).with_noise(0.0).with_precision("float")
    assert solver.run_noise.noise_multiplier == 0
    paths = [
        dpb.solve(
            PLATEAU,
            solver,
            NEAR_ZERO,
            np.full(6, -8.0),
            key=jax.random.key(seed),
            trajectory=True,
        ).trajectory[0]
        for seed in (0, 1)
    ]
    assert max(float(np.sum(p**2)) for p in paths) < 2


def test_a_draw_and_gaussian_releases_are_accounted_for_exactly():
    ledger = gibo().with_sizes(400).with_noise(2.0).ledger(PLATEAU, 400)
    (event,) = ledger.events().values()
    relation = dpb.Neighbours.REPLACE_ONE
    (composed,) = profiles.compositions(event, relation)
    for epsilon in (0.0, 0.5, 1.5):
        found = profiles.delta(event, relation, epsilon)
        above = composed.delta(epsilon)
        assert found <= above <= found * (1 + 1e-3) + 1e-12
        if epsilon:
            back = profiles.epsilon(event, relation, found)
            assert back == pytest.approx(epsilon, rel=1e-9)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="too few for w0, the middle and 3 starts"):
        dpb.search.Portfolio(4, np.zeros((3, 2)))
    with pytest.raises(ValueError, match="the first step draws"):
        dataclasses.replace(gibo(), num_steps=1)
