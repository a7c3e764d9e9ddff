"""Attacks on draws that succeed without the line written against them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.draws.hyper import HyperObjective
from dpbilevel.draws.mean_loss import MeanLoss
from tests.cases import slow
from tests.problems import CERTIFIED, LEVELS

LINE = dpb.sets.Box(-jnp.ones(1), jnp.ones(1))
POINTS = jnp.linspace(-1.0, 1.0, 9)[:, None]
SIZES = dpb.Sizes(30, 60, "disjoint")


def distance(w, record):
    return jnp.abs(w[0] - record)


def spread(first, second):
    return np.ptp(np.asarray(first, np.float64) - np.asarray(second, np.float64))


def one_level(problem, data, clip_range=None, measure="spread"):
    score = MeanLoss(problem, measure, 100, clip_range)
    start = jnp.zeros(1, data["features"].dtype) if isinstance(data, dict) else None
    start = jnp.zeros(1, data.dtype) if start is None else start

    @jax.jit
    def scores(data):
        return score.bounded(data, start).raw.many(POINTS.astype(start.dtype))

    return scores(data), 2 * score.contributions(start.dtype)["records"]


@pytest.mark.parametrize("measure", ["slope", *slow("spread")])
@pytest.mark.parametrize("label", [1e20, -1e30, 2.0**24 + 2])
def test_a_hostile_label_moves_scores_no_further_than_charged(label, measure):
    problem = dpb.onelevel.linear_risk("absolute", radius=1.0)
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.choice([-1.0, 1.0], (100, 1)), jnp.float32)
    data = {"features": rows, "label": jnp.full(100, 0.3, jnp.float32)}
    hostile = data | {"label": data["label"].at[0].set(label)}
    first, _ = one_level(problem, data, measure=measure)
    second, _ = one_level(problem, hostile, measure=measure)
    # 2 G D / n, with rounding of single precision.
    assert 0 < spread(first, second) <= 2 * 1.0 * 2.0 / 100 * (1 + 1e-4) + 1e-6


def test_a_large_public_term_does_not_amplify_a_record():
    problem = dpb.FiniteSum(distance, lambda w: 1e5 * (1 + w[0] ** 2), w_set=LINE)
    data = jnp.asarray(np.random.default_rng(1).uniform(size=100), jnp.float32)
    first, charged = one_level(problem, data, clip_range=1.0)
    second, _ = one_level(problem, data.at[0].set(-1.0), clip_range=1.0)
    assert 0 < spread(first, second) <= charged


def test_a_coarse_loss_is_refused_where_fine_scores_are_planned():
    with jax.enable_x64(True):
        problem = dpb.FiniteSum(
            lambda w, z: distance(w, z).astype(jnp.float32), w_set=LINE
        )
        data = jnp.zeros(100, jnp.float64)
        with pytest.raises(ValueError, match="coarser than the planned"):
            one_level(problem, data, clip_range=1.0)


def test_a_start_coarser_than_the_plan_is_refused():
    problem = dpb.FiniteSum(distance, w_set=LINE)
    solver = dpb.draws.ExponentialMechanism(dpb.draws.Grid(POINTS), clip_range=1.0)
    with jax.enable_x64(True):
        budget = dpb.PrivacyBudget(1.0, 0.0)
        plan = dpb.calibrate(problem, solver, budget, sizes=100)
    with pytest.raises(ValueError, match="planned for float64"):
        dpb.solve(
            problem,
            plan.solver,
            jnp.zeros(100),
            jnp.zeros(1, jnp.float32),
            key=jax.random.key(0),
        )


@pytest.mark.parametrize("kind", ["regularized", "walk", "two levels"])
def test_add_or_remove_is_refused_where_the_number_of_rows_moves_constants(kind):
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE
    problem = dpb.FiniteSum(distance, w_set=LINE, lipschitz=1.0)
    sampler = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-9)
    solver = dpb.draws.ExponentialMechanism(
        dpb.draws.GridWalk(),
        dimension=1,
        mechanism=dpb.draws.Exponential(neighbours=added),
    )
    sizes = 100
    if kind == "regularized":
        solver = dpb.draws.RegularizedExponentialMechanism(
            sampler,
            convex=True,
            dimension=1,
            mechanism=dpb.draws.RegularizedExponential(neighbours=added),
        )
    if kind == "two levels":
        problem, sizes = CERTIFIED, SIZES
        solver = dataclasses.replace(solver, sampler=dpb.draws.Grid(jnp.zeros((1, 2))))
    with pytest.raises(ValueError, match="replace-one only"):
        dpb.calibrate(problem, solver, dpb.PrivacyBudget(1.0, 1e-6), sizes=sizes)


def test_a_clipped_range_on_a_continuous_set_is_no_more_than_conditional():
    problem = dpb.FiniteSum(distance, w_set=LINE, lipschitz=1.0)
    solver = dpb.draws.ExponentialMechanism(
        dpb.draws.GridWalk(tabulate=True), clip_range=2.0, dimension=1
    )
    plan = dpb.calibrate(problem, solver, dpb.PrivacyBudget(1.0, 0.0), sizes=100)
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL
    assert any("-Lipschitz on the set" in text for text in plan.report.assumptions)
    with pytest.raises(ValueError, match=r"excludes .*convex"):
        dataclasses.replace(solver, convex=True)


def wide(tree):
    return jax.tree.map(
        lambda v: v.astype(jnp.float64) if v.dtype == jnp.float32 else v, tree
    )


def hyper(problem, data, start):
    axis = jnp.linspace(0.0, 1.0, 4)
    score = HyperObjective(problem, "spread", SIZES)
    raw = score.bounded(data, start).raw
    points = dpb.draws.Grid.product(axis, axis).candidates
    return jax.jit(lambda xs: raw.many(xs))(points), score.contributions(jnp.float64)


@pytest.mark.slow
def test_hostile_targets_of_validation_records_stay_within_their_share():
    groups = jnp.asarray([0, 0, 1, 1])
    problem = dpb.linear_tuning(dpb.onelevel.PseudoHuber(), groups, bounds=(0.0, 1.0))
    with jax.enable_x64(True):
        data, start = wide(LEVELS), (jnp.zeros(2), jnp.zeros(4))
        scores = []
        for label in (1e15, -1e15, 3e5, 0.0):
            upper = data.upper | {"label": data.upper["label"].at[0].set(label)}
            found, shares = hyper(problem, dpb.Levels(upper, data.lower), start)
            scores.append(found)
        worst = max(spread(a, b) for a in scores for b in scores)
    assert 0 < worst <= 2 * float(shares["upper"])


@pytest.mark.slow
def test_a_start_far_out_centers_scores_no_further_out():
    with jax.enable_x64(True):
        data, starts = wide(LEVELS), (jnp.zeros(4), 1e6 * jnp.ones(4))
        near, far = (hyper(CERTIFIED, data, (jnp.zeros(2), y))[0] for y in starts)
    # Up to a constant the same scores: nothing was cut.
    assert spread(near, far) < 1e-5 * np.ptp(np.asarray(near))


def test_constants_that_do_not_bound_a_record_are_refused_with_a_public_term():
    declared = CERTIFIED.constants.second_order
    constants = dataclasses.replace(declared, upper_y_spread=0.1, per_record=False)
    problem = dataclasses.replace(
        CERTIFIED, upper_public=lambda x, y: -jnp.sum(y), constants=constants
    )
    score = HyperObjective(problem, "spread", SIZES)
    with jax.enable_x64(True), pytest.raises(ValueError, match="with upper_public"):
        score.contributions(jnp.float64)
