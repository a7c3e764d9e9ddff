"""Every term of the sensitivity and of the error of a score is needed.

Each bound here is compared with integers, with an adversary's rounding, or with its own
value where all but one of its terms vanish.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel.certificates import sensitivities
from dpbilevel.bilevel.certificates.fixed_count import Metric, Spectrum
from dpbilevel.draws.hyper import GradientNorm, HyperObjective, _steps
from dpbilevel.draws.mean_loss import MeanLoss, public_part, spread_of
from dpbilevel.draws.mechanisms import BoundedScore, Draw
from dpbilevel.draws.samplers.base import (
    AbstractPotential,
    AbstractSampler,
    SamplerGuarantee,
)
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.accounting.closed_forms import pure_epsilon, pure_event
from dpbilevel.privacy.mechanisms import ROUNDING_MARGIN
from dpbilevel.privacy.queries import Query
from tests.attacks.terms import CONSTANTS


def test_errors_of_a_mean_loss_are_part_of_its_share():
    n, reach, unit = 7, 3.0, 2.0**-24
    for public in (False, True):
        # Mean, multiple, sum with a public term of eight ranges, and the draw.
        own = 4 * unit * (9 if public else 1) * reach
        share, error = spread_of(reach, n, jnp.float32, public)
        assert share >= reach / n * (1 + 2.0**-20) + 4 * own - 1e-12
        assert error == pytest.approx(own + 2.0**-24 * reach)
    problem = dpb.FiniteSum(
        lambda w, record: record * w[0], w_set=dpb.sets.Ball(0.5), lipschitz=2.0
    )
    known = MeanLoss(problem, "slope", n).regularity(jnp.float32, 1)
    # Two losses within the range, and n terms in any order.
    assert known.rounding == pytest.approx((2 * 32 + n) * unit * 2.0)


def test_a_public_term_is_no_longer_than_rounding_is_counted_for():
    half = jnp.asarray(0.5)
    for value in (1e6, -1e6, jnp.inf):
        found = public_part(lambda x, v=value: v * x, jnp.ones(()), jnp.zeros(()), half)
        assert abs(float(found)) <= 8 * 0.5


BOX = dpb.sets.Box(jnp.zeros(1), jnp.full(1, 2.0))


def two_levels(public=False, **fields):
    constants = dataclasses.replace(CONSTANTS, per_record=True, **fields)
    return dpb.BilevelProblem(
        lambda x, y, z: z * y[0],
        lambda x, y, z: (y[0] - x[0]) ** 2 + z,
        upper_public=(lambda x, y: 0.0 * y[0]) if public else None,
        x_set=dpb.sets.Ball(1.0),
        constants=constants,
    )


def parts_of(score):
    """The errors of a hyper-objective by their cause: solves, values."""
    bounds, sizes = score._bounds(), score.sizes
    rounding = sensitivities.solution_rounding(bounds, sizes, jnp.float64)
    return bounds, rounding


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("clip_range", [None, 0.9])
def test_errors_of_a_hyper_objective_are_part_of_both_shares(public, clip_range, x64):
    c, sizes = CONSTANTS, dpb.Sizes(30, 50)
    score = HyperObjective(two_levels(public), "spread", sizes, clip_range)
    bounds, rounding = parts_of(score)
    # Beside a public term records cancel less: three times as steep.
    slope = 3 * c.upper_y if public else c.upper_y
    reach = 2 * c.upper_y * c.solution_radius + c.upper_x * 2.0
    losses = reach if clip_range is None else clip_range
    # A solution is off by one percent of a record's shift over four, and by rounding.
    target = max(rounding, 0.01 / 4 * bounds.solution_shift)
    largest = 2 * (losses if clip_range is None else losses / 2)
    largest += 2 * reach if public else 0.0
    error = slope * (target + rounding) + 32 * 2.0**-52 * largest
    known, shares = score.regularity(jnp.float64, 1), score.contributions(jnp.float64)
    assert known.error == pytest.approx(error, rel=1e-9, abs=0)
    values = 32 * 2.0**-52 * largest
    found = known.error - slope * (target + rounding)
    assert found == pytest.approx(values, rel=1e-2, abs=0)
    upper, lower = 2 * losses / 30, 2 * slope * bounds.solution_shift
    if clip_range is None:
        upper, lower = min(upper, 2 * bounds.upper), min(lower, 2 * bounds.lower)
    assert score.spreads() == pytest.approx((upper, lower))
    assert 2 * shares["upper"] == pytest.approx(upper + 4 * error)
    assert 2 * shares["lower"] == pytest.approx(lower + 4 * error)
    steep = 3 if public and clip_range is not None else 1
    assert known.lipschitz == pytest.approx(steep * c.upper_total)


def test_slopes_of_a_hyper_objective_know_every_error_of_their_gradient(x64):
    sizes = dpb.Sizes(300, 500)
    score = HyperObjective(two_levels(), "slope", sizes)
    bounds, rounding = parts_of(score)
    steps = sensitivities.step_counts(CONSTANTS, sizes)
    solves = sensitivities.solve_error(bounds, steps)
    rounds = sensitivities.rounding_error(bounds, sizes, jnp.float64)
    known = score.regularity(jnp.float64, 1)
    assert known.gradient_error - solves == pytest.approx(rounds, rel=1e-3)
    assert known.gradient_error - rounds == pytest.approx(solves)
    # Solved to its rounding, and rounded.
    least = CONSTANTS.upper_y * 2 * rounding
    assert known.error >= least
    largest = 2 * score._change()
    values = 32 * 2.0**-52 * largest
    assert known.error - least == pytest.approx(values, rel=1e-3, abs=0)


def test_the_largest_loss_of_a_model_is_part_of_the_error_of_its_values(x64):
    problem = dpb.linear_tuning(
        dpb.Logistic(), jnp.zeros(2, int), bounds=(0.0, 1.0), row_norm=1e-3
    )
    score = HyperObjective(problem, "spread", dpb.Sizes(30, 30))
    _, rounding = parts_of(score)
    target = score._target(jnp.float64)
    error = score.regularity(jnp.float64, 1).error
    values = error - score._slope() * (target + rounding)
    # Losses of rows near zero are all about log 2.
    assert values >= 32 * 2.0**-52 * math.log(2) * (1 - 1e-3)


def test_the_metric_of_a_lower_level_is_charged_where_it_is_flattest():
    spectrum = Spectrum(1.0, 4.0)
    metric = Metric(jnp.full(1, 1e-4), 1e-4, spectrum, 3.0)
    in_metric = spectrum.accelerated_steps(3.0, 1e-3 * 1e-2)
    assert _steps(metric, 1e-3) >= in_metric


def test_errors_of_a_gradient_norm_are_part_of_both_shares():
    sizes = dpb.Sizes(300, 500)
    with jax.enable_x64(True):
        score = GradientNorm(two_levels(), "spread", sizes)
        known, found = (
            score.regularity(jnp.float64, 1),
            score.contributions(jnp.float64),
        )
        shares = sensitivities.hypergradient_sensitivity(CONSTANTS, sizes, jnp.float64)
        bounds = CONSTANTS.bounds(sizes)
        steps = sensitivities.step_counts(CONSTANTS, sizes)
    solves = sensitivities.solve_error(bounds, steps)
    rounds = sensitivities.rounding_error(bounds, sizes, jnp.float64)
    projected = 8 * 2.0**-52 * (1.0 + CONSTANTS.upper_total)
    more = known.error - (solves + rounds)
    assert more == pytest.approx(projected, rel=0.1, abs=0)
    for role in ("upper", "lower"):
        more = found[role] - getattr(shares, role)
        assert more == pytest.approx(projected, rel=0.1, abs=0)
    assert known.lipschitz == pytest.approx(CONSTANTS.smoothness + 2)


def draw_release(mechanism, people_roles=("records",), **fields):
    queries = tuple(Query(role, 10, 1.0) for role in people_roles)
    fields = {"guarantee": SamplerGuarantee(1, 1.0)} | fields
    return Draw("x", fields.pop("count", 1), queries, mechanism, 1.0, **fields)


def test_both_laws_of_a_draw_may_be_off_by_the_log_ratio():
    event = dpb.draws.Exponential(0.5).event(0.25, log_ratio=0.1)
    assert pure_epsilon(event) == pytest.approx(0.25 * 0.5 + 2 * 0.1)


def test_people_in_both_levels_are_charged_the_whole_draw_and_others_their_share():
    roles = ("upper", "lower")
    part = draw_release(dpb.draws.RegularizedExponential(2.0), roles)
    for people, multiplier in (("OVERLAPPING", 2.0), ("DISJOINT", 4.0)):
        charged = dict(part.charges(dpb.People[people]))
        for event in charged.values():
            assert profiles.gaussian_mu(event) == pytest.approx(1 / multiplier)
    part = draw_release(dpb.draws.Exponential(0.5), roles)
    for people, epsilon in (("OVERLAPPING", 0.5), ("DISJOINT", 0.25)):
        for _, event in part.charges(dpb.People[people]):
            assert profiles.pure_epsilons(event) == pytest.approx([epsilon])


def alternating_draw():
    """A regularized draw on a line, at multiplier 2."""
    return dpb.draws.RegularizedExponentialMechanism(
        dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-6),
        convex=True,
        regularizer=0.3,
        dimension=1,
        mechanism=dpb.draws.RegularizedExponential(2.0),
    )


def test_draws_of_two_levels_are_planned_for_both_shares_and_their_errors(x64):
    sizes, problem = dpb.Sizes(300, 500), two_levels()
    grid = dpb.draws.Grid(jnp.zeros((2, 1)))
    solver = dpb.draws.ExponentialMechanism(grid, mechanism=dpb.draws.Exponential(1.0))
    plan = solver.plan(problem, sizes)
    assert plan.rate <= 1 / (2 * sum(plan.contributions.values()))
    solver = alternating_draw()
    plan = solver.plan(problem, sizes)
    (release,) = solver.ledger(problem, sizes).releases
    expected = math.tanh(plan.rate * plan.regularity.error)
    assert release.inexact == pytest.approx(expected, rel=1e-6, abs=0)
    assert expected > 0


def test_every_distance_of_every_draw_is_counted():
    mechanism = dpb.draws.Exponential(0.5)
    guarantee = SamplerGuarantee(1, 1.0, distance=1e-3)
    part = draw_release(mechanism, guarantee=guarantee, inexact=1e-4, count=3)
    assert part.failure == pytest.approx(3 * 1.1e-3)
    ((_, event),) = part.charges(dpb.People.OVERLAPPING)
    assert profiles.pure_epsilons(event) == pytest.approx([0.5] * 3)


def test_the_coin_of_a_pure_release_costs_no_less_than_it_was_made_from():
    for total in np.geomspace(1e-3, 30, 500):
        assert pure_epsilon(pure_event(total)) >= total


def test_a_rate_has_room_for_rounding():
    """What draws and what is planned, for both mechanisms."""
    margin = 1 + ROUNDING_MARGIN
    assert ROUNDING_MARGIN >= 2.0**-11
    problem = dpb.FiniteSum(
        lambda w, record: record * w[0], w_set=BOX, lipschitz=1.0, smoothness=0.0
    )
    grid = dpb.draws.Grid(jnp.zeros((2, 1)))
    solver = dpb.draws.ExponentialMechanism(grid, mechanism=dpb.draws.Exponential(1.0))
    share = MeanLoss(problem, "spread", 50).contributions(jnp.float32)["records"]
    rate = solver.plan(problem, 50).rate
    assert rate <= 1.0 / (2 * share * margin) * (1 + 1e-9)
    search = dpb.search.RandomSearch(2, 1.0, mechanism=dpb.draws.Exponential(1.0))
    (release,) = search.ledger(problem, 50).releases
    share, _ = spread_of(1.0, 50, jnp.float32, False)
    assert release.rate <= 1.0 / (2 * share * margin) * (1 + 1e-9)
    assert release.queries[0].contribution == pytest.approx(share)
    slope = MeanLoss(problem, "slope", 50)
    solver = alternating_draw()
    rate = solver.plan(problem, 50).rate
    sensitivity = 2 * slope.contributions(jnp.float32)["records"]
    assert rate <= 0.3 / (2.0 * sensitivity * margin) ** 2 * (1 + 1e-6)
    # A computed law is within tanh of the error of its logarithm.
    (release,) = solver.ledger(problem, 50).releases
    assert release.inexact == pytest.approx(
        math.tanh(rate * slope.regularity(jnp.float32, 1).rounding)
    )


class Taken(AbstractSampler):
    """Returns the potential that it is given, at the start."""

    def with_counts(self, regularity, feasible):
        return self

    def guarantee(self, regularity, feasible):
        return SamplerGuarantee(1, 1.0)

    def draw(self, potential, feasible, start, *, key):
        return potential(start)


class Constant(AbstractPotential):
    def __call__(self, x):
        return jnp.ones(())


@pytest.mark.parametrize("relation", list(dpb.Neighbours))
def test_what_a_draw_opens_has_the_planned_temperature(relation):
    """The potential of a score of one is the rate: no more than sensitivity allows."""
    options = {"key": jax.random.key(0)}
    most = relation.contributions * 0.25 * (1 + ROUNDING_MARGIN)
    score = BoundedScore(Constant(), 0.25, "spread", dpb.privacy.Basis.CONSTANTS)
    mechanism = dpb.draws.Exponential(0.5, relation)
    rate = mechanism.draw(score, Taken(), BOX, jnp.zeros(1), **options)
    assert float(rate) <= 0.5 / most * (1 + 1e-6)
    score = BoundedScore(Constant(), 0.25, "slope", dpb.privacy.Basis.CONSTANTS)
    mechanism = dpb.draws.RegularizedExponential(2.0, relation)
    rate = mechanism.draw(
        score, Taken(), BOX, jnp.zeros(1), regularizer=0.2, convexity=0.1, **options
    )
    assert float(rate) <= (0.2 + 0.1) / (2.0 * most) ** 2 * (1 + 1e-6)


def test_scores_that_vary_less_than_their_losses_round_are_refused():
    """Logistic losses of short rows are all about log 2, in steps of 2**-24."""
    problem = dpb.linear_tuning(
        dpb.Logistic(), jnp.zeros(1, int), bounds=(0.0, 1.0), row_norm=0.005
    )
    score = HyperObjective(problem, "spread", dpb.Sizes(100, 100))
    with pytest.raises(ValueError, match="errors of computed scores"):
        score.contributions(jnp.float32)
    with jax.enable_x64(True):
        assert score.contributions(jnp.float64)["lower"] < 2.0**-23


def test_proved_bounds_of_a_linear_model_have_every_term_of_the_proof():
    model, row_norm, low, high = dpb.onelevel.PseudoHuber(0.5), 1.3, -0.4, 0.7
    problem = dpb.linear_tuning(
        model, jnp.zeros(2, int), bounds=(low, high), row_norm=row_norm
    )
    sizes = dpb.Sizes(300, 200)
    found = problem.constants.bounds(sizes)
    mu, top, n_f, n_g = math.exp(low), math.exp(high), 300, 200
    # The width bounds the slope, and at margins that are not bounded nothing is less.
    p1, p2 = 0.5 * row_norm, model.curvature * row_norm**2
    p3, s = model.third * row_norm**3, model.concordance * row_norm
    r, energy = p1 / mu, p1 / math.sqrt(mu)
    d = 2 * p1 / (n_g * mu)
    t = min(p3 * d / mu, s * d * math.exp(s * d))
    turned = (p2 * d + (t + p2 / (n_g * mu)) * p1) / math.sqrt(mu)
    moved = 2 * p1 / (n_g * math.sqrt(mu))
    far = math.sqrt(top) * r
    expected = {
        "solution_shift": d,
        "smoothness": p2 + top,
        "solution_radius": r,
        "upper": energy * 2 * p1 / (n_f * math.sqrt(mu)),
        "lower": moved * p1 / math.sqrt(mu) + energy * turned,
        # Of s^ and of v^, each times the other.
        "lower_error": math.sqrt(top) * p1 / math.sqrt(mu)
        + far * (p2 + p1 * p3 / mu) / math.sqrt(mu),
        "linear_error": far / math.sqrt(mu),
        "gradient": energy * p1 / math.sqrt(mu),
        "upper_gradient": p1,
        "lower_gradient": p1 + 2 * p2 * r + 3 * top * r,
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    metric = problem.constants.metric(problem, sizes, None, None)
    assert metric.spectrum.largest == pytest.approx(1 + p2 / mu)
    assert metric.radius == pytest.approx(energy)
