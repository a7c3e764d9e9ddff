"""Where rounding could exceed what is charged: cancelling terms, clips, stale plans."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel.certificates import sensitivities
from dpbilevel.draws import (
    AlternatingSampler,
    ConvexEnvelope,
    StochasticRejection,
    mean_loss,
)
from dpbilevel.draws.hyper import HyperObjective
from dpbilevel.draws.mean_loss import MeanLoss
from dpbilevel.draws.samplers.base import Regularity
from dpbilevel.draws.samplers.proximal import ProximalPlan
from tests.problems import CERTIFIED
from tests.zoo import two_levels as zoo

LARGE = 1e7
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
INTERVAL = dpb.sets.Box(jnp.zeros(1), jnp.ones(1))


def declared(**changed):
    """Constants of f = s y and g = (y - x)^2 / 2 for records s in [-8, 8]."""
    names = ["upper_x", "upper_xx", "upper_xy", "upper_yy", "lower_xy_in_x"]
    names += ["lower_yy_in_x", "lower_xy_in_y", "lower_yy_in_y"]
    values = dict.fromkeys(names, 0.0) | {
        "strong_convexity": 1.0,
        "solution_radius": 1.0,
        "upper_y": 8.1,
        "lower_y": 2.0,
        "lower_xy": 1.0,
        "lower_yy": 1.0,
    }
    return dpb.bilevel.SecondOrderConstants(**(values | changed))


# Lower records move nothing.
BESIDE = dict.fromkeys(["lower_y", "lower_xy", "lower_yy"], 0.0)
BESIDE = {f"{k}_spread": v for k, v in (BESIDE | {"upper_y": 8.0}).items()}


def cancelling(**changed):
    return dpb.BilevelProblem(
        lambda x, y, z: (LARGE + z) * y[0],
        lambda x, y, z: 0.5 * (y[0] - x[0]) ** 2 + 0 * z,
        upper_public=lambda x, y: -LARGE * y[0],
        x_set=INTERVAL,
        constants=declared(**(BESIDE | changed)),
    )


def test_a_public_term_that_cancels_records_hides_no_rounding():
    solver = dpb.ImplicitBilevel(1, step_size=0.1)
    sizes = dpb.Sizes(100, 100)
    with pytest.raises(ValueError, match="with upper_public, upper_y bounds no record"):
        dpb.calibrate(cancelling(), solver, BUDGET, sizes=sizes)
    # What holds for a record as well is too large for single precision.
    true = cancelling(upper_y=LARGE + 8.0, per_record=True)
    with pytest.raises(ValueError, match="Enable 64-bit"):
        sensitivities.check_dtype(true.constants, sizes, jnp.float32)


@pytest.mark.parametrize("name", ["lower_xy", "lower_yy"])
def test_a_spread_beside_a_public_term_needs_bounds_of_single_records(name):
    problem = dataclasses.replace(
        cancelling(),
        upper_public=None,
        lower_public=lambda x, y: 0.0 * jnp.sum(y),
        constants=declared(**{f"{name}_spread": 0.5}),
    )
    with pytest.raises(ValueError, match=f"with lower_public, {name} bounds no record"):
        problem.constants.check(problem)
    constants = dataclasses.replace(problem.constants, per_record=True)
    constants.check(problem)
    problem.constants.check(dataclasses.replace(problem, lower_public=None))
    assert "of single records too" in constants.assumptions[0]


def test_bounds_that_a_public_term_makes_true_are_refuted_for_single_records():
    problem = cancelling(upper_y_spread=None)
    records = dpb.Levels(*[jnp.linspace(-8.0, 8.0, 5)] * 2)
    w0, key = (jnp.zeros(1), jnp.zeros(1)), jax.random.key(0)
    found = dpb.debug.refute_constants(problem, w0, records, key=key, tries=20)
    assert found.violated == ("upper_y",)


def test_parts_of_sums_are_counted_where_they_may_cancel_and_only_there():
    sizes = dpb.Sizes(40, 40)
    example = zoo.quadratic_bilevel(jnp.zeros((8, 2)), jnp.zeros((8, 2)), radius=1.0)
    bounds = example.problem.constants.bounds(sizes)
    whole = dataclasses.replace(bounds, parts=1.0, lower_gradient=0.0)
    alone = sensitivities.rounding_error(
        dataclasses.replace(bounds, lower_gradient=0.0), sizes, jnp.float32
    )
    solution = bounds.lower_error * sensitivities.solution_rounding(
        whole, sizes, jnp.float32
    )
    once = sensitivities.rounding_error(whole, sizes, jnp.float32)
    assert alone - solution == pytest.approx(3 * (once - solution))
    assert CERTIFIED.constants.bounds(sizes).parts == 1


@pytest.mark.parametrize("distance", [1.0, 3.0])
def test_gradients_where_accelerated_steps_look_are_within_their_bound(distance):
    """A record at three times the radius, where G is as curved as it may be."""
    sizes = dpb.Sizes(40, 40)
    example = zoo.quadratic_bilevel(jnp.zeros((8, 2)), jnp.zeros((8, 2)), radius=1.0)
    problems = {
        "declared": (example.problem, jnp.asarray([1.0, 0.0])),
        "proved": (
            dpb.linear_tuning(
                dpb.onelevel.PseudoHuber(1.0), jnp.zeros(2, int), bounds=(0, 1)
            ),
            {"features": jnp.asarray([-1.0, 0.0]), "label": jnp.asarray(1e3)},
        ),
    }
    for problem, record in problems.values():
        bounds = problem.constants.bounds(sizes)
        y = jnp.asarray([distance * bounds.solution_radius, 0.0])
        x = -jnp.ones(2) if problem is example.problem else jnp.ones(1)

        @jax.jit
        def length(x, y, record, problem=problem):
            parts = (
                jax.grad(problem.lower, 1)(x, y, record),
                jax.grad(problem.lower_public, 1)(x, y),
            )
            return sum(jnp.linalg.norm(part) for part in parts)

        found = float(length(x, y, record))
        assert 0.1 * bounds.lower_gradient < found <= bounds.lower_gradient


CORNERS = dpb.sets.Box(-jnp.ones(1), jnp.ones(1))


def linear(w, record):
    return record * w[0]


def test_a_loss_that_reaches_its_declared_range_keeps_its_derivative():
    problem = dpb.FiniteSum(linear, w_set=CORNERS, lipschitz=1.0, smoothness=0.0)
    records = jnp.asarray([1.0, 1.0, -0.98, -0.98])
    for corner in (-1.0, 1.0):
        score = MeanLoss(problem, "slope", 4).potential(records, jnp.asarray([corner]))
        for end in (-1.0, 1.0):
            _, slope = score.value_and_gradient(jnp.asarray([end]))
            assert float(slope[0]) == pytest.approx(float(records.mean()), abs=1e-6)


def known(**changed):
    return Regularity(2, 3.0, 1.0, 4.0, **changed)


def test_rounding_is_part_of_the_slack_of_an_envelope():
    sampler, feasible = AlternatingSampler(ConvexEnvelope(), 0.01), dpb.sets.Ball(1.0)
    rounded = known(rounding=0.01)
    oracle = sampler.with_counts(rounded, feasible).oracle
    # Two values, and a gradient times the diameter.
    assert oracle.slack == pytest.approx(3 * 0.01)
    assert sampler.with_counts(known(), feasible).oracle.slack == 0
    score = MeanLoss(dpb.FiniteSum(linear, w_set=CORNERS, lipschitz=1.0), "slope", 1000)
    potential = score.regularity(jnp.float64, 1).of_potential(10.0, 0.0, 0.0)
    # More than a gradient rounds that adds up a thousand records in any order, and than
    # a value does that adds them up in groups.
    assert potential.gradient_error >= 10 * 1000 * 2.0**-53 * 1.0
    assert potential.rounding >= 10 * mean_loss._roundings(1000) * 2.0**-53 * 2.0


@pytest.mark.parametrize("n", [1, 64, 65, 5_000, 300_000])
def test_a_sum_in_groups_rounds_no_more_than_is_charged(n):
    values = np.full(n, 0.1, np.float32)
    exact = math.fsum(map(float, values))
    found = float(mean_loss._sum(jnp.asarray(values)))
    charged = mean_loss._roundings(n) * 2.0**-24 * exact
    assert abs(found - exact) <= charged
    assert mean_loss._roundings(n) <= n + 1
    if n == 300_000:  # one after the other they round more than that
        assert abs(float(np.cumsum(values)[-1]) - exact) > charged


@pytest.mark.parametrize("change", ["strong_convexity", "rounding"])
def test_an_oracle_that_was_planned_for_another_law_proves_nothing(change):
    sampler, feasible = (
        AlternatingSampler(ConvexEnvelope(), 0.01),
        dpb.sets.Box(-1.0, 1.0),
    )
    plan = sampler.with_counts(known(rounding=1e-3), feasible)
    plan = dataclasses.replace(plan, num_steps=2 * plan.num_steps, tries=9 * plan.tries)
    assert plan.guarantee(known(rounding=1e-3), feasible).proved
    value = {"strong_convexity": 0.9, "rounding": 2e-3}[change]
    other = dataclasses.replace(known(rounding=1e-3), **{change: value})
    certificate = plan.guarantee(other, feasible)
    assert not certificate.proved
    assert "planned for another potential or set" in certificate.notes[0]


def test_a_stochastic_oracle_serves_exact_terms_alone():
    oracle, feasible = StochasticRejection(), dpb.sets.Ball(1.0)
    terms = known(num_terms=4, term_lipschitz=1.0)
    inexact = dataclasses.replace(terms, error=0.1)
    assert oracle.serves(ProximalPlan(terms, feasible, 0.1))
    assert not oracle.serves(ProximalPlan(known(), feasible, 0.1))
    assert not oracle.serves(ProximalPlan(inexact, feasible, 0.1))


def test_a_solver_changed_after_planning_claims_no_epsilon():
    problem = dpb.FiniteSum(
        lambda w, z: 0.125 * (w[0] - z) ** 2,
        w_set=CORNERS,
        lipschitz=0.5,
        smoothness=0.25,
    )
    sampler = AlternatingSampler(ConvexEnvelope(), 1e-9)
    solver = dpb.draws.RegularizedExponentialMechanism(
        sampler, convex=True, dimension=1, regularizer=0.05
    )
    with jax.enable_x64(True):
        plan = dpb.calibrate(problem, solver, BUDGET, sizes=40)
        ledger = plan.solver.ledger(problem, 40)
        assert ledger.epsilon(1e-5) <= 1.001
        # As good as a new plan for the budget, or nothing.
        again = dpb.calibrate(problem, plan.solver, BUDGET, sizes=40).report.epsilon
        assert again <= 1.001 or math.isinf(again)
        changed = dataclasses.replace(plan.solver, regularizer=0.01)
        ledger = changed.ledger(problem, 40)
    assert math.isinf(ledger.epsilon(1e-5))
    assert ledger.delta(1.0) == 1.0
    assert ledger.delta_if_proved(1.0) < 1


def test_a_plan_in_single_precision_holds_for_a_run_in_double():
    problem = dpb.linear_tuning(dpb.Logistic(), jnp.zeros(2, int), bounds=(-1.0, 1.0))
    sizes, pure = dpb.Sizes(20, 20), dpb.PrivacyBudget(1.0, 0.0)
    solver = dpb.draws.ExponentialMechanism(dpb.draws.GridWalk(), dimension=1)
    plan = dpb.calibrate(problem, solver, pure, sizes=sizes)
    rate = plan.solver.plan(problem, sizes).rate
    with jax.enable_x64(True):
        assert plan.solver.plan(problem, sizes).rate == rate
        (release,) = plan.solver.ledger(problem, sizes).releases
        assert release.guarantee.proved
        start = jnp.zeros(1), jnp.zeros(2)
        records = {"features": jnp.ones((20, 2)), "label": jnp.ones(20)}
        score = plan.solver.score_of(problem, sizes)
        dtype = plan.solver.scored_dtype(start)
        sealed = score.bounded(dpb.Levels(records, records), start, dtype)
        fine = score.bounded(dpb.Levels(records, records), start)
        assert sealed.contribution > fine.contribution
        again = dpb.calibrate(problem, plan.solver, pure, sizes=sizes).solver
        assert again.dtype == "float64"


def clipped(**changed):
    """Clipping leaves the slope -2 of a public term alone, which records cancelled."""
    return dpb.BilevelProblem(
        lambda x, y, z: jnp.clip(z, 0.9, 1.0) * y[0],
        lambda x, y, z: 0.5 * (y[0] - x[0] - 0 * z) ** 2,
        upper_public=lambda x, y: 1e4 - 2 * y[0],
        x_set=INTERVAL,
        constants=declared(**({"upper_y": 1.1} | changed)),
    )


def values(problem, points, clip_range=None, sizes=None):
    n, sizes = 200, sizes or dpb.Sizes(200, 200)
    score = HyperObjective(problem, "spread", sizes, clip_range)
    data = dpb.Levels(jnp.ones(n), jnp.zeros(n))

    @jax.jit
    def scores(data):
        return score.potential(data, (jnp.zeros(1), jnp.zeros(1))).many(points)

    return scores(data), score.regularity(jnp.float64, 1)


def test_clipped_scores_beside_a_public_term_are_no_steeper_than_declared():
    with jax.enable_x64(True):
        found, known = values(clipped(), jnp.asarray([[0.4], [0.9]]), 0.05)
    assert 1.9 < abs(float(found[1] - found[0])) / 0.5 <= known.lipschitz


@pytest.mark.slow
@pytest.mark.parametrize("clip_range", [None, 0.05])
def test_an_offset_of_a_public_term_is_not_part_of_a_score(clip_range):
    with jax.enable_x64(True):
        found, _ = values(clipped(), jnp.asarray([[0.0]]), clip_range)
    assert abs(float(found[0])) < 0.1


def test_lower_records_that_move_nothing_ask_for_finitely_many_steps():
    problem = dataclasses.replace(clipped(**BESIDE), upper_public=None)
    with jax.enable_x64(True):
        score = HyperObjective(problem, "spread", dpb.Sizes(200, 200))
        assert 0 < score._target(jnp.float64) < 1e-6
        assert 0 < score._most_steps(jnp.float64) < 100
    stiff = declared(upper_y=1.1, lower_yy=1e12)
    stiff = HyperObjective(
        dataclasses.replace(problem, constants=stiff), "spread", dpb.Sizes(200, 200)
    )
    with pytest.raises(ValueError, match="the lower level needs"):
        stiff.contributions(jnp.float64)


def test_trip_counts_do_not_depend_on_points_that_are_not_released():
    sizes, start = dpb.Sizes(30, 60), (jnp.zeros(2), jnp.zeros(4))

    def counts(sampler, **fields):
        solver = dpb.draws.ExponentialMechanism(sampler, **fields)
        with jax.enable_x64(True):
            score = solver.score_of(CERTIFIED, sizes)
            wide = jax.tree.map(lambda v: v.astype(jnp.float64), start)
            raw = score.potential(UNREAD, wide)
            ends = jnp.zeros(2), jnp.ones(2)
            most = score._most_steps(jnp.float64)
            return [int(raw._steps(x)) for x in ends], most

    (first, second), most = counts(dpb.draws.GridWalk(), dimension=2)
    assert first == second == most
    # The control: public candidates take what they need, at most that many.
    (first, second), most = counts(dpb.draws.Grid(jnp.zeros((1, 2))))
    assert second < first <= most


UNREAD = dpb.Levels({"features": jnp.ones((2, 4)), "label": jnp.ones(2)}, None)


def test_rounding_counts_in_full_where_a_record_less_moves_a_spread_by_one_share():
    problem = dpb.FiniteSum(linear, w_set=CORNERS)
    score = MeanLoss(problem, "spread", 1000, 1.0)
    error = score.regularity(jnp.float32, 1).error - 2.0**-24
    # B / n for the record and four errors of scores, at a factor of one.
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE.contributions
    found = added * score.contributions(jnp.float32)["records"] - 1 / 1000
    assert found >= 4 * error
