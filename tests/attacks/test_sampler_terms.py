"""Every term of what a sampler, a batch or a selection may be off by is needed.

Each bound here is compared with integers, with an adversary's rounding, or with its own
value where all but one of its terms vanish.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.draws.samplers import restricted
from dpbilevel.draws.samplers._lattice import WalkBounds, frame_of
from dpbilevel.draws.samplers.base import (
    Regularity,
)
from dpbilevel.draws.samplers.proximal import ProximalPlan
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.accounting.repetitions import Repetitions, renyi_profile
from dpbilevel.privacy.mechanisms import ROUNDING_MARGIN
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.records.rows import padded_rows
from dpbilevel.search.repeat_and_select import Selection

WALKED = Regularity(2, 1.5, 0.0, error=0.03)


def walked(convex=True, slack=0.7):
    """A lattice about a disc: no numbers but those of the proof."""
    known = WALKED if convex else dataclasses.replace(WALKED, strong_convexity=None)
    frame = frame_of("GridWalk", dpb.sets.Ball(0.5), 2)
    return WalkBounds(known, frame, (9, 7), penalty=4.5, slack=slack)


@pytest.mark.parametrize("convex", [True, False])
def test_every_term_of_a_grid_walks_proof_counts(convex):
    found = walked(convex)
    reach, radius, n = found.frame.reach, float(found.frame.radius), 2
    inward = float(found.frame.inverse_inradius)
    assert (reach, radius, inward) == pytest.approx((math.sqrt(2), 0.5, 2.0))
    error = (2 * reach - 1) * 0.03
    assert found.error == pytest.approx(error)
    rise = 1.5 * 0.5
    slope = 1.5 + (4.5 + (0 if convex else 2 * rise)) * inward
    assert found.lipschitz == pytest.approx(slope)
    change = slope * math.hypot(1 / 9, 1 / 7)
    assert found.change == pytest.approx(change)
    assert found.needed_slack == pytest.approx(change / 2 + 2 * error)
    oscillation = (1 + reach) * rise + 4.5 * (reach - 1) + 2 * error
    assert found.oscillation == pytest.approx(oscillation)
    compared = math.exp(-oscillation) * (1 - math.cos(math.pi / 9)) / (2 * n)
    spread = change * (1 / 2 + 1 / math.sqrt(12)) + 2 * error
    conductance = math.exp(-spread) / (2 * n * 9)
    gap = max(compared, conductance**2 / 2) if convex else compared
    assert found.gap == pytest.approx(gap)
    rarity = oscillation + math.log(9 * 7)
    assert found.rarity == pytest.approx(rarity)
    assert found.mixing(10**6) == pytest.approx(math.exp(rarity - gap * 10**6))
    decay = 4.5 - rise - n + 1
    shells = min(reach**n / n, 1 / decay)
    odds = (n + rise) * shells * math.exp(2 * error)
    success = math.exp(-0.7 - change / math.sqrt(12) - 2 * error) / (1 + odds)
    last = math.exp(2 * 0.7) * (1 + reach ** (2 * n) * math.exp(2 * error))
    tries = 1 + math.ceil((math.log(last) + 5) / success)
    left = (1 - 0.9 * success) ** (tries - 1) * last
    assert 1e-6 < left < 1
    assert found.exhausted(0.1, tries) == pytest.approx(left, rel=1e-9)


def test_the_conductance_of_a_fine_lattice_is_the_one_of_the_proof():
    """There the comparison with a constant potential is the weaker one."""
    steep = Regularity(1, 60.0, 0.0, error=0.01)
    frame = frame_of("GridWalk", dpb.sets.Box(jnp.zeros(1), jnp.ones(1)), 1)
    found = WalkBounds(steep, frame, (90,), penalty=0.0, slack=0.0)
    spread = 60.0 / 90 * (1 / 2 + 1 / math.sqrt(12)) + 2 * 0.01
    assert found.gap == pytest.approx((math.exp(-spread) / (2 * 90)) ** 2 / 2)


def test_a_grid_walk_is_charged_for_cells_and_for_tries():
    known, feasible = Regularity(1, 4.0, 0.0), dpb.sets.Box(-jnp.ones(1), jnp.ones(1))
    plan = dpb.draws.GridWalk(tabulate=False).with_counts(known, feasible)
    bounds = plan._bounds(known, feasible)
    mixing = bounds.mixing(plan.num_steps)
    exhausted = bounds.exhausted(mixing, plan.num_tries)
    ratio = math.log((1 + mixing) / (1 - mixing)) - math.log(1 - exhausted)
    assert plan.guarantee(known, feasible).log_ratio == pytest.approx(ratio, rel=1e-9)
    low = dataclasses.replace(plan, slack=0.9 * bounds.needed_slack)
    low = dataclasses.replace(low, num_tries=10 * plan.num_tries)
    assert not low.guarantee(known, feasible).proved


def test_every_distance_of_an_alternating_sampler_counts():
    known = Regularity(3, 2.0, 1.2, smoothness=5.0, error=0.02, rounding=0.01)
    feasible, eta, steps = dpb.sets.Ball(1.0), 0.05, 60
    oracle = dpb.draws.ConvexEnvelope(gradient_steps=2, draw_tries=5)
    chance = oracle.acceptance(ProximalPlan(known, feasible, eta))
    tries = math.ceil(1.2 * steps / chance)
    plan = ProximalPlan(known, feasible, eta, steps, tries, failure=1e-4)
    oracle = oracle.with_counts(plan)
    sampler = dpb.draws.AlternatingSampler(oracle, 0.5, steps, eta, tries)
    found = sampler.guarantee(known, feasible)
    width, alpha = 2.0, 1.2 * math.exp(-2 * 0.03)
    mixing = width / (2 * math.sqrt(eta)) * (1 + alpha * eta) ** -(steps - 1)
    late = scipy.stats.binom.cdf(steps - 1, tries, chance)
    draws = oracle.draw_failure(dataclasses.replace(plan, failure=0.5 / 8))
    assert min(mixing, late, draws) > 1e-4
    assert found.distance == pytest.approx(mixing + late + draws) != 1


class Proposing(dpb.draws.ConvexEnvelope):
    """With a bias, and proposals of which the proof knows all."""

    def bias(self, plan):
        return 1e-3


def test_the_bias_of_every_step_counts():
    known, feasible = Regularity(1, 2.0, 1.0, smoothness=2.0), dpb.sets.Box(-1.0, 1.0)
    plan = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 0.2).with_counts(
        known, feasible
    )
    fields = {"curvature": plan.oracle.curvature, "slack": plan.oracle.slack}
    oracle = Proposing(plan.oracle.gradient_steps, plan.oracle.draw_tries, **fields)
    biased = dataclasses.replace(plan, oracle=oracle)
    more = biased.guarantee(known, feasible).distance
    less = plan.guarantee(known, feasible).distance
    assert more - less == pytest.approx(1e-3 * plan.num_steps)


@pytest.mark.parametrize("draws", [1, 2])
def test_draws_fail_where_a_point_is_far_or_where_all_tries_are_rejected(draws):
    known = Regularity(3, 2.0, 1.2, num_terms=4, term_lipschitz=1.0, quadratic=0.5)
    feasible = dpb.sets.Ball(1.0, jnp.full(3, 2.0))
    oracle = {1: dpb.draws.ConvexEnvelope(), 2: dpb.draws.StochasticRejection()}[draws]
    oracle = dataclasses.replace(oracle, draw_tries=3)
    eta, steps, tries, share = 0.5, 10, 30, 1e-2
    found = oracle.draw_failure(ProximalPlan(known, feasible, eta, steps, tries, share))
    far = share / (2 * steps)
    reach = restricted.reach(feasible, 3, math.sqrt(eta), far)
    curvature = {1: 1.2, 2: 0.5}[draws]
    weight = 1 / (1 + curvature * eta)
    # Towards the slope, or towards zero, which is off the ball.
    away = math.sqrt(12) - 1
    shift = {1: weight * eta * 2.0, 2: (1 - weight) * away}[draws]
    deviation = math.sqrt(eta * weight)
    chance = restricted.acceptance(feasible, 3, deviation, weight * reach + shift)
    rejected = (1 - chance) ** 3
    assert rejected > 0
    assert found == pytest.approx(share / 2 + draws * tries * rejected)


@pytest.mark.parametrize("smoothness", [5.0, math.inf])
def test_every_error_lowers_the_acceptance_of_an_envelope(smoothness):
    known = Regularity(
        3, 2.0, 1.2, smoothness, error=0.02, gradient_error=0.03, rounding=0.01
    )
    feasible, eta, width = dpb.sets.Ball(1.0), 0.05, 2.0
    epsilon = 0.03 + 0.01 / width
    slack = 2 * (0.02 + 0.01) + epsilon * width
    steps = 0 if math.isinf(smoothness) else 2
    oracle = dpb.draws.ConvexEnvelope(gradient_steps=steps)
    rho = 2.0 + epsilon
    for _ in range(steps):
        rho = smoothness * eta * rho + 2 * epsilon
    p = 1.2 + 1 / eta
    e = min(width, (rho + math.sqrt(rho**2 + 4 * p * 3)) / (2 * p))
    loss = min((smoothness - 1.2) / 2 * e**2, 2 * 2.0 * e)
    plan = ProximalPlan(known, feasible, eta, num_steps=9, tries=20, failure=0.1)
    found = oracle.acceptance(plan)
    assert -math.log(found) == pytest.approx(loss + 2 * slack)
    assert oracle.with_counts(plan).slack == pytest.approx(slack)
    weight = 1 / (1 + 1.2 * eta)
    shift = oracle.gaussian(plan)[2]
    assert shift == pytest.approx(weight * eta * (2.0 + epsilon))


def test_cut_stages_are_part_of_the_bias_of_a_stochastic_try():
    known = Regularity(1, 1.0, num_terms=1, term_lipschitz=1.0)
    plan = ProximalPlan(known, dpb.sets.Ball(1.0), 1 / 64)
    whole = dpb.draws.StochasticRejection().bias(plan)
    cut = dpb.draws.StochasticRejection(stages=3).bias(plan)
    missing = sum(0.5**a / math.factorial(a) for a in range(4, 40))
    assert missing <= cut - whole <= 1.1 * missing


def test_errors_grow_with_the_rate_of_a_potential():
    known = Regularity(
        2, 1.0, 0.5, 3.0, error=0.1, gradient_error=0.2, rounding=0.3
    ).of_potential(10.0, 0.7, 1.5)
    assert (known.error, known.gradient_error, known.rounding) == (1.0, 2.0, 3.0)
    assert known.lipschitz == pytest.approx(10 * 1.0 + 7 * 1.5)
    assert (known.smoothness, known.strong_convexity) == (30 + 7, 5 + 7)


@pytest.mark.slow
def test_rows_that_only_pad_the_records_fit_a_poisson_batch():
    """Their bits are drawn as well, and must not push records out."""
    for rate, size in ((0.3, 65), (0.9, 127)):
        sampling, rows = dpb.Poisson(rate), padded_rows(size)
        assert rows > size
        capacity = sampling.rows(size)
        chance = scipy.stats.binom.sf(capacity, rows, sampling.realised_rate)
        assert chance <= sampling.failure(dpb.Neighbours.REPLACE_ONE, size) <= 1e-12
        batch = sampling.draw(jnp.ones(size), size, key=jax.random.key(0))
        assert len(batch.mask) == capacity
    # One record more always fits.
    assert padded_rows(64) > 64


def test_a_pass_that_has_begun_is_charged():
    sampling = dpb.privacy.SinglePass(10)
    charged = [sampling.charged(count, 100) for count in (1, 10, 11, 20, 21)]
    assert charged == [1, 1, 2, 2, 3]


@pytest.mark.slow
def test_a_grid_release_rounds_by_less_than_its_share_of_the_margin():
    """Neighbours move apart by the noise's grid: half a step in each coordinate."""
    size = 4096
    row = jnp.full((1, size), 0.3 / math.sqrt(size), jnp.float32)
    bounded = dpb.privacy.clipped_mean(
        lambda z: z, row, clip_norm=1.0, precision="grid"
    )
    released = dpb.privacy.Gaussian(0.0, precision="grid").release(
        bounded, key=jax.random.key(0)
    )
    steps = np.asarray(released, np.float64)
    exact = np.asarray(bounded.raw.values(), np.float64)
    assert np.linalg.norm(steps - exact) <= 2.0**-13
    # Twice that, of a sensitivity of one contribution, is within the margin.
    assert 2 * 2.0**-13 + 8 * 2.0**-24 <= ROUNDING_MARGIN


def test_every_selection_is_charged_and_may_run_out_of_runs():
    queries = (Query("records", 10, 1.0),)
    one, three = (
        Selection("s", count, queries, dpb.privacy.Gaussian(2.0), Repetitions(3.0), 4)
        for count in (1, 3)
    )
    assert one.failure > 0
    assert three.failure == pytest.approx(3 * one.failure)
    charged = [
        renyi_profile(profiles._flatten(event))(3.0)
        for part in (one, three)
        for _, event in part.charges(dpb.People.OVERLAPPING)
    ]
    assert charged[1] > 1.5 * charged[0]


def test_every_batch_of_every_release_may_overflow():
    sampling = dpb.Poisson(0.1, capacity=20)
    chance = sampling.failure(dpb.Neighbours.REPLACE_ONE, 100)
    queries = tuple(Query(role, 100, 1.0, sampling) for role in ("upper", "lower"))
    apart, joint = (
        dpb.privacy.Release("a", 3, queries, dpb.privacy.Gaussian(2.0), joint=joint)
        for joint in (False, True)
    )
    assert apart.failure == pytest.approx(2 * 3 * chance)
    assert joint.failure == pytest.approx(3 * chance)
    assert dpb.privacy.Ledger((apart, joint)).failure == pytest.approx(9 * chance)


def test_runs_on_numbered_batches_are_charged_one_by_one():
    queries = (Query("records", 100, 1.0, dpb.privacy.SinglePass(10)),)
    part = dpb.privacy.Release("a", 5, queries, dpb.privacy.Gaussian(2.0))
    charged = [
        profiles.gaussian_mu(event)
        for run in part.repeated(2)
        for _, event in run.charges(dpb.People.OVERLAPPING)
    ]
    assert math.hypot(*charged) == pytest.approx(math.sqrt(2) / 2)
