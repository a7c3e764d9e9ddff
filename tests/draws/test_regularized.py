"""Regularized draws, walks cut short, and the planner."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.audit.worst_cases import _LIPSCHITZ
from dpbilevel.draws import mean_loss
from dpbilevel.draws.mean_loss import MeanLoss
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.keys import step_keys
from tests.cases import Audited, Case, planned
from tests.problems import LOWER
from tests.zoo import two_levels

ALPHA = 1e-4
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
LINE = dpb.sets.Box(-jnp.ones(1), jnp.ones(1))
RECORDS = jnp.asarray(np.random.default_rng(0).uniform(-1, 0.5, 40))


LEANING = dpb.FiniteSum(
    lambda w, r: -w[0] * r["features"][0],
    w_set=LINE,
    lipschitz=1.0,
    smoothness=0.0,
)
ALTERNATING = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-9)
UNTIMED = dataclasses.replace(ALTERNATING, running_time="unprotected")
CONTRACT = {
    "regularized": Case(
        LEANING,
        dpb.draws.RegularizedExponentialMechanism(
            ALTERNATING, convex=True, dimension=1
        ),
        LOWER,
        jnp.zeros(1),
    ),
    "regularized_untimed": Case(
        LEANING,
        dpb.draws.RegularizedExponentialMechanism(UNTIMED, convex=True, dimension=1),
        LOWER,
        jnp.zeros(1),
    ),
}


def planned_regularized(kind=dpb.draws.RegularizedExponentialMechanism, **fields):
    """The set is so wide that the law is that of a Gaussian release."""
    defaults = {"convex": True, "regularizer": 1.0, "dimension": 1}
    defaults["sampler"] = ALTERNATING
    return planned(kind(**(defaults | fields))).with_counts(_LIPSCHITZ)


AUDITS = {
    # Rounding of single precision is part of the claim.
    "RegularizedExponentialMechanism": Audited(planned_regularized(), tolerance=2e-2),
    "RegularizedExponentialMechanism, unprotected time": Audited(
        planned_regularized(sampler=UNTIMED), tolerance=2e-2
    ),
}


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


def sampler(oracle=None, distance=1e-9):
    return dpb.draws.AlternatingSampler(oracle or dpb.draws.ConvexEnvelope(), distance)


def regularized(**fields):
    defaults = {"convex": True, "dimension": 1}
    return dpb.draws.RegularizedExponentialMechanism(sampler(), **(defaults | fields))


def parabola(w, record):
    return 0.125 * (w[0] - record) ** 2


def distance(w, record):
    return jnp.abs(w[0] - record)


def smooth():
    return dpb.FiniteSum(parabola, w_set=LINE, lipschitz=0.5, smoothness=0.25)


@functools.partial(jax.jit, static_argnames="count")
def draws(problem, solver, data, w0, key, count):
    _, keys = step_keys(key, count)
    return jax.vmap(lambda key: dpb.solve(problem, solver, data, w0, key=key).value)(
        keys
    )


def law(score, rate, regularizer):
    """The distribution function of exp(-k (score + mu / 2 x^2)) on [-1, 1]."""
    points = np.linspace(-1, 1, 4001)
    energy = rate * (score(points) + regularizer / 2 * points**2)
    density = np.exp(energy.min() - energy)
    total = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return lambda x: np.interp(x, points, total / total[-1])


def temperature_and_regularizer(plan, problem, sizes):
    found = plan.solver.plan(problem, sizes)
    return found.rate, found.potential.quadratic / found.rate


@pytest.mark.slow
def test_one_level_draws_have_the_exact_law_and_a_wrong_temperature_is_seen():
    with jax.enable_x64(True):
        data = jnp.asarray(RECORDS, jnp.float64)
        plan = dpb.calibrate(smooth(), regularized(), BUDGET, sizes=40)
        rate, mu = temperature_and_regularizer(plan, smooth(), 40)
        found = draws(smooth(), plan.solver, data, jnp.zeros(1), getkey(1), 4_000)

    def score(x):
        return 0.125 * ((x[:, None] - np.asarray(RECORDS)) ** 2).mean(1)

    values = np.asarray(found)[:, 0]
    assert scipy.stats.kstest(values, law(score, rate, mu)).pvalue > ALPHA
    assert scipy.stats.kstest(values, law(score, 2 * rate, mu)).pvalue < ALPHA


@pytest.mark.slow
def test_bilevel_draws_have_the_law_of_the_closed_hyper_objective():
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        upper, lower = (jnp.asarray(rng.uniform(-0.5, 0.5, (60, 1))) for _ in range(2))
        example = two_levels.quadratic_bilevel(upper, lower, radius=1.0)
        sizes = example.problem.sizes_of(example.data, "disjoint")
        plan = dpb.calibrate(example.problem, regularized(), BUDGET, sizes=sizes)
        assert plan.report.status is dpb.privacy.Status.CONDITIONAL
        rate, mu = temperature_and_regularizer(plan, example.problem, sizes)
        found = draws(
            example.problem,
            plan.solver,
            example.data,
            example.w0,
            getkey(2),
            200,
        )[0]
        score = jax.vmap(lambda x: example.hyper_objective(x[None]))
        exact = law(lambda x: np.asarray(score(jnp.asarray(x))), rate, mu)
    assert scipy.stats.kstest(np.asarray(found)[:, 0], exact).pvalue > ALPHA


def getkey(seed):
    return jax.random.key(seed)


def test_float32_is_refused_where_its_rounding_would_take_delta():
    with pytest.raises(ValueError, match="Enable 64-bit"):
        dpb.calibrate(smooth(), regularized(), BUDGET, sizes=40)


@pytest.mark.usefixtures("wide")
def test_a_draw_costs_what_one_gaussian_release_costs():
    plan = dpb.calibrate(smooth(), regularized(), BUDGET, sizes=40)
    multiplier = float(plan.solver.mechanism.noise_multiplier)
    gaussian = profiles.gaussian_delta(1 / multiplier, 1.0)
    slack = (1 + math.e) * plan.solver.sampler.distance
    assert gaussian + slack >= BUDGET.delta * (1 - 1e-3) >= 0.9 * gaussian
    rate, mu = temperature_and_regularizer(plan, smooth(), 40)
    # m = sqrt(mu / k) / S with S = 2 G / n.
    found = math.sqrt(mu / rate) / (2 * 0.5 / 40)
    assert multiplier <= found <= multiplier * (1 + 2**-10)
    # The mu that makes d / k + mu D^2 / 2 least.
    best = multiplier * (2 * 0.5 / 40) * math.sqrt(2) / 2
    assert mu == pytest.approx(best, rel=1e-5)


@pytest.mark.usefixtures("wide")
def test_convexity_and_constants_are_listed_and_the_distance_counts():
    plan = dpb.calibrate(smooth(), regularized(), BUDGET, sizes=40)
    text = str(plan.report)
    assert text.startswith("CONDITIONAL")
    assert "the objective is convex" in text
    assert "0.5-Lipschitz" in text
    assert "counted in delta" in text
    assert plan.report.epsilon <= 1.0


@pytest.mark.usefixtures("wide")
def test_the_rate_for_the_population_is_capped():
    budget = dpb.PrivacyBudget(4.0, 1e-6)
    solver = dpb.draws.RegularizedExponentialMechanism.from_theorem(
        smooth(), budget, 40, sampler=sampler(), dimension=1, convex=True
    )
    plan = dpb.calibrate(smooth(), solver, budget, sizes=40)
    rate, mu = temperature_and_regularizer(plan, smooth(), 40)
    assert rate == pytest.approx(2 * 40 * mu / 0.5**2, rel=2e-3)
    # What is not used of the budget is not claimed.
    assert plan.report.epsilon < 3.9


@pytest.mark.usefixtures("wide")
def test_the_population_of_a_bilevel_problem_has_the_regularizer_of_the_theorem():
    example = two_levels.quadratic_bilevel(
        jnp.zeros((50, 1), jnp.float64), jnp.zeros((80, 1), jnp.float64), radius=1.0
    )
    sizes = dpb.Sizes(50, 80, "disjoint")
    settings = {"sampler": sampler(), "dimension": 1, "convex": True}
    population = dpb.draws.RegularizedExponentialMechanism.from_theorem(
        example.problem, dpb.PrivacyBudget(1.0, 1e-6), sizes, **settings
    )
    # n S / 2 = G, C = cross (1 + curvature / mu) and the four terms of the theorem.
    known = example.problem.constants.second_order
    bounds = known.bounds(sizes)
    slope = 50 * (bounds.upper + bounds.lower) / 2
    mu = known.strong_convexity
    steep = known.upper_y * known.lower_xy * (1 + known.lower_yy / mu) / mu
    square = slope * (
        steep / 50
        + slope * math.log(1e6) / 50**2
        + steep / math.sqrt(50)
        + known.upper_total / 50
    )
    assert population.regularizer == pytest.approx(math.sqrt(square) / 2, rel=1e-6)
    with pytest.raises(ValueError, match="1/10"):
        dpb.draws.RegularizedExponentialMechanism.from_theorem(
            example.problem, dpb.PrivacyBudget(1.0, 0.5), sizes, **settings
        )


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
def test_stochastic_rejection_serves_losses_with_a_kink():
    data = jnp.asarray([-1.0, 1.0])
    problem = dpb.FiniteSum(distance, w_set=LINE, lipschitz=1.0)
    solver = dpb.draws.RegularizedExponentialMechanism(
        sampler(dpb.draws.StochasticRejection(), 1e-3), convex=True, dimension=1
    )
    plan = dpb.calibrate(problem, solver, dpb.PrivacyBudget(0.5, 1e-2), sizes=2)
    found = dpb.solve(problem, plan.solver, data, jnp.zeros(1), key=getkey(4)).value
    assert abs(float(found[0])) <= 1


def steep(w, record):
    return jnp.abs(w[0] - record)


def test_a_walk_cut_short_is_heuristic_and_claims_no_epsilon():
    problem = dpb.FiniteSum(steep, w_set=LINE, lipschitz=1.0)
    solver = dpb.draws.ExponentialMechanism(
        dpb.draws.GridWalk(num_steps=50), convex=True, dimension=1
    )
    plan = dpb.calibrate(problem, solver, dpb.PrivacyBudget(1.0, 0.0), sizes=40)
    assert plan.report.status is dpb.privacy.Status.HEURISTIC
    assert math.isinf(plan.report.epsilon)
    assert str(plan.report).startswith("HEURISTIC: no epsilon is claimed")
    assert dpb.privacy.PrivacyReport.from_json(plan.report.to_json()) == plan.report


def test_a_certified_walk_is_pure_and_charged_for_its_error():
    problem = dpb.FiniteSum(steep, w_set=LINE, lipschitz=1.0)
    walk = dpb.draws.GridWalk(tabulate=False)
    solver = dpb.draws.ExponentialMechanism(walk, convex=True, dimension=1)
    plan = dpb.calibrate(problem, solver, dpb.PrivacyBudget(1.0, 0.0), sizes=10)
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL
    assert plan.report.delta == 0
    # epsilon of the density and twice the log ratio of the walk.
    assert float(plan.solver.mechanism.epsilon) == pytest.approx(0.98, rel=1e-6)
    # Left to itself the sampler takes the table, which is smaller.
    free = dpb.draws.ExponentialMechanism(
        dpb.draws.GridWalk(), convex=True, dimension=1
    )
    chosen = dpb.calibrate(problem, free, dpb.PrivacyBudget(1.0, 0.0), sizes=10)
    assert chosen.solver.sampler.tabulate
    too_far = dpb.draws.ExponentialMechanism(walk, convex=True, dimension=1)
    with pytest.raises(ValueError, match="certified steps"):
        dpb.calibrate(problem, too_far, dpb.PrivacyBudget(1e3, 0.0), sizes=10**4)


@pytest.mark.parametrize("loss", ["hinge", "absolute", "logistic"])
def test_linear_risks_are_convex_and_as_steep_as_declared(loss):
    problem = dpb.onelevel.linear_risk(loss, radius=2.0, row_norm=0.5)
    rng = np.random.default_rng(3)
    rows = jnp.asarray(rng.normal(size=(200, 3)) * 10 ** rng.uniform(-2, 4, (200, 1)))
    labels = jnp.asarray(rng.choice([-1.0, 1.0, 7.0], 200))
    records = {"features": rows, "label": labels}
    first, second = (jnp.asarray(rng.normal(size=(200, 3))) for _ in range(2))
    value = jax.jit(jax.vmap(problem.loss))
    ends = value(first, records), value(second, records)
    middle = value((first + second) / 2, records)
    assert (middle <= (ends[0] + ends[1]) / 2 + 1e-5).all()
    apart = jnp.linalg.norm(first - second, axis=1)
    steepness = jnp.abs(ends[0] - ends[1]) / apart
    assert 0.1 < steepness.max() <= 0.5 * (1 + 1e-4)


@pytest.mark.usefixtures("wide")
def test_losses_that_differ_less_than_they_slope_are_drawn_at_a_higher_rate():
    def loss(w, record):
        return 0.25 * w[0] ** 2 + 0.1 * record * w[0]

    whole = dpb.FiniteSum(loss, w_set=LINE, lipschitz=0.6, smoothness=0.5)
    fine = dataclasses.replace(whole, lipschitz_spread=0.1)
    plans = [dpb.calibrate(p, regularized(), BUDGET, sizes=40) for p in (whole, fine)]
    # The Lipschitz constant of the change is 2 * 0.1 / 40 as records are in [-1, 1].
    shares = [plan.report.ledger[0].roles["records"] for plan in plans]
    assert shares[0].sensitivity == pytest.approx(2 * 0.6 / 40)
    assert shares[1].sensitivity == pytest.approx(2 * 0.1 / 40)
    assert any("0.2-Lipschitz" in text for text in plans[1].report.assumptions)
    assert not any("difference" in text for text in plans[0].report.assumptions)
    with pytest.raises(ValueError, match="at most a given lipschitz"):
        dataclasses.replace(whole, lipschitz_spread=0.7)


def test_sums_in_groups_round_no_more_than_is_counted():
    values = jnp.full(2**18, 0.1, jnp.float32)  # roundings of equal numbers add up
    exact = np.sum(np.asarray(values, np.float64))

    def added_in_turn(values):
        return jax.lax.scan(lambda a, v: (a + v, None), jnp.float32(0), values)[0]

    def roundings(add):
        return abs(float(jax.jit(add)(values)) - exact) / (exact * 2.0**-24)

    counted = mean_loss._roundings(len(values))
    assert counted == 3 * 64
    assert roundings(mean_loss._sum) <= counted
    assert roundings(added_in_turn) > counted  # the control


def test_a_slope_is_no_spread():
    with pytest.raises(ValueError, match="lipschitz=G"):
        MeanLoss(dpb.FiniteSum(steep, w_set=LINE), "slope", 10).contributions(
            jnp.float32
        )
