"""Exponential mechanisms: laws, sensitivities, accounting, refusals."""

import collections
import dataclasses
import functools
import itertools
import math
import re

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.draws.hyper import GradientNorm, HyperObjective
from dpbilevel.draws.mean_loss import MeanLoss
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.accounting.closed_forms import pure_event
from dpbilevel.privacy.keys import step_keys
from tests.cases import Audited, Case, planned, slow
from tests.problems import CERTIFIED, EXACT, LEVELS, LOWER, ONE_LEVEL, Y0

ALPHA = 1e-4
POINTS = jnp.linspace(0.0, 1.0, 11)
GRID = dpb.draws.Grid.product(POINTS)
UNIT = dpb.sets.Box(jnp.zeros(1), jnp.ones(1))
PURE = dpb.PrivacyBudget(1.0, 0.0)


CANDIDATES = dpb.draws.Grid(jnp.asarray([[0.0] * 4, [0.1] * 4, [-0.1] * 4]))
ABSOLUTE = dpb.FiniteSum(
    lambda w, r: jnp.abs(w[0] - r["features"][0]),
    w_set=dpb.sets.Box(-jnp.ones(1), jnp.ones(1)),
    lipschitz=1.0,
)
CONTRACT = {
    "exponential": Case(
        dataclasses.replace(ONE_LEVEL, w_set=dpb.sets.Ball(2.0)),
        dpb.draws.ExponentialMechanism(CANDIDATES, clip_range=2.0),
        LOWER,
        Y0,
        fitted=True,
        few_answers=True,
    ),
    "exponential_gradient_norm": Case(
        EXACT.problem,
        dpb.draws.ExponentialMechanism(CANDIDATES, "gradient_norm"),
        EXACT.data,
        EXACT.w0,
        "disjoint",
        few_answers=True,
    ),
    "exponential_walk": Case(
        ABSOLUTE,
        dpb.draws.ExponentialMechanism(dpb.draws.GridWalk(tabulate=True), dimension=1),
        LOWER,
        jnp.zeros(1),
    ),
}


def planned_draw(people=None, kind=dpb.draws.ExponentialMechanism, **fields):
    """Two candidates at which one record makes all the difference there can be."""
    return planned(kind(dpb.draws.Grid(jnp.asarray([-1.0, 1.0])), **fields), people)


ADD_OR_REMOVE = dpb.draws.Exponential(neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE)
AUDITS = {
    "ExponentialMechanism": Audited(
        planned_draw(clip_range=1.0), others=-1.0, exact=False
    ),
    "ExponentialMechanism, add or remove": Audited(
        planned_draw(clip_range=1.0, mechanism=ADD_OR_REMOVE), others=-1.0, exact=False
    ),
    "ExponentialMechanism, overlapping": Audited(
        planned_draw("overlapping"), others=-0.1, exact=False
    ),
}


def distance(w, record):
    return jnp.abs(w[0] - record)


MEDIAN = dpb.FiniteSum(distance, w_set=UNIT)
DECLARED = dpb.FiniteSum(distance, w_set=UNIT, lipschitz=1.0)
RECORDS = jnp.asarray(np.random.default_rng(0).uniform(size=50), jnp.float32)
SIZES = dpb.Sizes(30, 60, "disjoint")


@functools.partial(jax.jit, static_argnames="count")
def draws(problem, solver, data, key, count):
    _, keys = step_keys(key, count)
    return jax.vmap(
        lambda key: dpb.solve(problem, solver, data, jnp.zeros(1), key=key).value
    )(keys)


def exact_law(rate, data):
    points, data = (np.asarray(v, np.float64) for v in (POINTS, data))
    scores = np.abs(points[:, None] - data).mean(1)
    weights = np.exp(-rate * (scores - scores.min()))
    return weights / weights.sum()


def drawn(solver, count=20_000):
    sample = draws(MEDIAN, solver, RECORDS, jax.random.key(3), count)
    index = np.rint(10 * np.asarray(sample)[:, 0]).astype(int)
    return np.bincount(index, minlength=11)


def chi_square(counts, law):
    """The p-value, with rare cells pooled."""
    order = np.argsort(law)
    rare = np.searchsorted(np.cumsum(law[order]) * counts.sum(), 5.0)
    cells = np.split(order, range(rare + 1, len(law)))
    observed, expected = (
        np.asarray([v[cell].sum() for cell in cells])
        for v in (counts, law / law.sum() * counts.sum())
    )
    return scipy.stats.chisquare(observed, expected).pvalue


def test_draws_from_a_grid_have_the_exact_law_and_a_wrong_temperature_is_seen():
    solver = dpb.draws.ExponentialMechanism(GRID, clip_range=1.0)
    plan = dpb.calibrate(MEDIAN, solver, PURE, sizes=50)
    rate = 1 / plan.report.ledger[0].temperature
    counts = drawn(plan.solver)
    assert chi_square(counts, exact_law(rate, RECORDS)) > ALPHA
    assert chi_square(counts, exact_law(1.1 * rate, RECORDS)) < ALPHA


def test_one_level_draws_have_the_rate_that_bounded_range_allows():
    solver = dpb.draws.ExponentialMechanism(GRID, clip_range=1.0)
    plan = dpb.calibrate(MEDIAN, solver, PURE, sizes=50)
    assert plan.report.status is dpb.privacy.Status.ENFORCED
    assert plan.report.epsilon == pytest.approx(1.0)
    # epsilon over 2 B / n; half of that is what twice the sensitivity would give.
    assert 1 / plan.report.ledger[0].temperature == pytest.approx(25, rel=1e-3)
    add = dataclasses.replace(
        solver,
        mechanism=dpb.draws.Exponential(neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE),
    )
    plan = dpb.calibrate(MEDIAN, add, PURE, sizes=50)
    assert 1 / plan.report.ledger[0].temperature == pytest.approx(50, rel=1e-3)


def test_log_probability_ratios_between_neighbours_never_exceed_epsilon():
    """All cells, for neighbours as far apart as can be, where one end is unlikely."""
    plan = dpb.calibrate(
        MEDIAN, dpb.draws.ExponentialMechanism(GRID, clip_range=1.0), PURE, sizes=50
    )
    rate = 1 / plan.report.ledger[0].temperature

    @jax.jit
    def scores(record):
        data = jnp.zeros(50).at[0].set(record)
        score = MeanLoss(MEDIAN, "spread", 50, 1.0).bounded(data, jnp.zeros(1))
        return score.raw.many(GRID.candidates)

    def ratio(factor):
        laws = []
        for record in (0.0, 1.0):
            values = np.asarray(scores(record), np.float64)
            law = np.exp(-factor * rate * values)
            laws.append(law / law.sum())
        return np.abs(np.log(laws[0] / laws[1])).max()

    assert 0.9 < ratio(1) <= 1.0
    assert ratio(1.2) > 1.0  # the control


def test_the_clipped_range_is_enforced_for_losses_of_any_size():
    def wild(w, record):
        return 1e6 * record * w[0] - 5e5

    problem = dpb.FiniteSum(wild, w_set=UNIT)

    @jax.jit
    def values(record):
        data = RECORDS.at[0].set(record)
        bounded = MeanLoss(problem, "spread", 50, 1.0).bounded(data, jnp.zeros(1))
        return bounded.raw.many(GRID.candidates)

    firsts = -jnp.inf, jnp.nan, 1e30, 0.3
    scores = [np.asarray(values(record), np.float64) for record in firsts]
    for first in scores:
        for second in scores:
            assert np.ptp(first - second) <= 2 / 50 * (1 + 1e-5)
    assert all(np.isfinite(values).all() for values in scores)


def test_declared_constants_bound_the_range_and_are_listed():
    solver = dpb.draws.ExponentialMechanism(GRID)
    plan = dpb.calibrate(DECLARED, solver, PURE, sizes=50)
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL
    assert any("1-Lipschitz" in text for text in plan.report.assumptions)
    assert 1 / plan.report.ledger[0].temperature == pytest.approx(25, rel=1e-3)


@pytest.mark.parametrize("total", [0.01, 0.5, 1.0, 3.0])
def test_pure_events_have_the_profile_of_randomized_response(total):
    event = pure_event(total)
    epsilon = np.linspace(0, 1.2 * total, 13)
    found = [profiles.delta(event, dpb.Neighbours.REPLACE_ONE, e) for e in epsilon]
    p = math.exp(total) / (1 + math.exp(total))
    expected = np.maximum(0, p - np.exp(epsilon) * (1 - p))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    relation = dpb.Neighbours.REPLACE_ONE
    assert profiles.epsilon(event, relation, 0.0) == pytest.approx(total, rel=1e-9)
    smaller = profiles.epsilon(event, relation, 1e-2)
    back = profiles.delta(event, relation, smaller)
    assert back == pytest.approx(1e-2, rel=1e-6) or smaller == 0


def test_pure_and_gaussian_events_compose_to_less_than_the_sum():
    relation = dpb.Neighbours.REPLACE_ONE
    gaussian = dp_accounting.GaussianDpEvent(4.0)
    both = dp_accounting.ComposedDpEvent([pure_event(0.5), gaussian])
    alone = profiles.epsilon(gaussian, relation, 1e-5)
    together = profiles.epsilon(both, relation, 1e-5)
    assert alone < together < alone + 0.5
    twice = dp_accounting.SelfComposedDpEvent(pure_event(0.5), 2)
    assert profiles.delta(twice, relation, 1.0 + 1e-12) == 0.0
    assert profiles.delta(twice, relation, 0.9) > 0.0
    assert profiles.epsilon(twice, relation, 0.0) == pytest.approx(1.0)


@functools.cache
def hyper_plan(score="value", clip_range=None):
    axis = jnp.linspace(0.0, 1.0, 3)
    solver = dpb.draws.ExponentialMechanism(
        dpb.draws.Grid.product(axis, axis), score=score, clip_range=clip_range
    )
    return dpb.calibrate(CERTIFIED, solver, PURE, sizes=SIZES)


def wide(tree):
    return jax.tree.map(
        lambda v: v.astype(jnp.float64) if v.dtype == jnp.float32 else v, tree
    )


@pytest.mark.slow
def test_hyper_objective_scores_agree_with_exact_solves():
    with jax.enable_x64(True):
        data, axis = wide(LEVELS), jnp.linspace(0.0, 1.0, 3)
        points = dpb.draws.Grid.product(axis, axis).candidates
        start = (jnp.zeros(2), jnp.zeros(4))
        score = HyperObjective(CERTIFIED, "spread", SIZES, 2.0)
        found = jax.jit(lambda xs: score.bounded(data, start).raw.many(xs))(points)

        def exact(x):
            y = dpb.oracles.lower_solution(CERTIFIED, x, data, y0=start[1])
            return dpb.debug.upper_objective(CERTIFIED, x, y, data)

        expected = jax.jit(jax.vmap(exact))(points)
        # Scores are the same up to a constant, to what the plan charges.
        allowed = 2 * score._slope() * score._target(jnp.float64)
        assert np.ptp(np.asarray(found - expected)) < allowed
        assert np.ptp(np.asarray(expected)) > 100 * allowed


@pytest.mark.parametrize("kind", ["value", *slow("clipped value", "gradient_norm")])
def test_no_neighbour_moves_bilevel_scores_further_apart_than_charged(kind):
    """Adversarial search: single records replaced by extreme ones, in either level."""
    with jax.enable_x64(True):
        data = wide(LEVELS)
        axis = jnp.linspace(0.0, 1.0, 4)
        points = dpb.draws.Grid.product(axis, axis).candidates
        start = (jnp.zeros(2), jnp.zeros(4))
        if kind == "gradient_norm":
            score = GradientNorm(CERTIFIED, "spread", SIZES)
        else:
            score = HyperObjective(
                CERTIFIED, "spread", SIZES, 1.0 if kind == "clipped value" else None
            )
        shares = score.contributions(jnp.float64)

        @jax.jit
        def values(data):
            return score.bounded(data, start).raw.many(points)

        base = np.asarray(values(data))
        rng = np.random.default_rng(7)
        for role in ("upper", "lower"):
            worst = 0.0
            for _ in range(12):
                row = rng.normal(size=4) * 10 ** rng.uniform(-1, 3)
                label = float(rng.choice([-1.0, 1.0, 30.0]))
                level = dict(getattr(data, role))
                level["features"] = level["features"].at[0].set(row)
                level["label"] = level["label"].at[0].set(label)
                moved = np.asarray(values(dataclasses.replace(data, **{role: level})))
                worst = max(worst, np.ptp(moved - base))
            charged = 2 * float(shares[role])
            assert 0 < worst <= charged


# A lower solution that is steep but short: losses z y reach as far as constants say.
STEEP = 20.0
SHORT = dpb.BilevelProblem(
    lambda x, y, z: z * y[0],
    lambda x, y, z: 0.5 * (y[0] - jnp.sin(STEEP * x[0]) - 0 * z) ** 2,
    x_set=dpb.sets.Box(-jnp.ones(1), jnp.ones(1)),
    constants=dpb.bilevel.SecondOrderConstants(
        strong_convexity=1.0,
        solution_radius=1.0,
        upper_x=0.0,
        upper_y=1.0,
        upper_xx=0.0,
        upper_xy=0.0,
        upper_yy=0.0,
        lower_y=2.0,
        lower_xy=STEEP,
        lower_yy=1.0,
        lower_xy_in_x=STEEP**2,
        lower_yy_in_x=0.0,
        lower_xy_in_y=0.0,
        lower_yy_in_y=0.0,
        lower_y_spread=0.0,
        lower_xy_spread=0.0,
        lower_yy_spread=0.0,
    ),
)


def log_laws(problem, candidates, sizes, epsilon):
    """A function from upper records to the exact law of a draw, and what is claimed."""
    solver = dpb.draws.ExponentialMechanism(dpb.draws.Grid(candidates))
    budget = dpb.PrivacyBudget(epsilon, 0.0)
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
    score, start = solver.score_of(problem, sizes), (jnp.zeros(1), jnp.zeros(1))

    @jax.jit
    def law(upper):
        data = dpb.Levels(upper, jnp.zeros(sizes.lower))
        values = score.bounded(data, start).raw.many(candidates)
        return jax.nn.log_softmax(-values / plan.report.ledger[0].temperature)

    return law, plan.report.epsilon


def test_two_levels_cost_what_the_worst_of_all_neighbours_shows():
    n, angles = 4, np.pi / STEEP * np.asarray([-0.5, 0.0, 0.25, 0.5])
    with jax.enable_x64(True):
        law, claimed = log_laws(
            SHORT, jnp.asarray(angles)[:, None], dpb.Sizes(n, 5), epsilon=4.0
        )
        # All datasets whose losses are as steep as declared, or not at all.
        datasets = list(itertools.combinations_with_replacement((-1.0, 0.0, 1.0), n))
        laws = {data: np.asarray(law(jnp.asarray(data))) for data in datasets}
    worst = max(
        np.abs(laws[one] - laws[other]).max()
        for one, other in itertools.combinations(datasets, 2)
        if (collections.Counter(one) - collections.Counter(other)).total() == 1
    )
    # And half of the claim would not hold.
    assert 0.95 * claimed < worst <= claimed


def test_disjoint_people_are_charged_their_own_level():
    with jax.enable_x64(True):
        report = hyper_plan(clip_range=1.0).report
    assert report.epsilon == pytest.approx(1.0)
    shares = report.ledger[0].roles
    ratio = shares["upper"].sensitivity / shares["lower"].sensitivity
    by_person = report.epsilon_by_person
    assert by_person["upper"] / by_person["lower"] == pytest.approx(ratio, rel=1e-6)


@pytest.mark.slow
def test_a_draw_that_starts_a_descent_is_composed_with_it():
    first = dpb.draws.ExponentialMechanism(
        dpb.draws.Grid(0.1 * jnp.eye(4, dtype=jnp.float32)), score="gradient_norm"
    )
    then = dpb.ImplicitBilevel(3, 0.05)
    both = dpb.applications.WarmStarted(first, then, (0.5, 0.5))
    budget = dpb.PrivacyBudget(1.0, 1e-5)
    sizes = EXACT.problem.sizes_of(EXACT.data, "disjoint")
    plan = dpb.calibrate(EXACT.problem, both, budget, sizes=sizes)
    assert plan.report.epsilon <= 1.0
    assert [row.mechanism for row in plan.report.ledger] == [
        "Exponential",
        "Gaussian",
    ]
    solution = jax.jit(dpb.solve)(
        EXACT.problem, plan.solver, EXACT.data, EXACT.w0, key=jax.random.key(0)
    )
    assert np.isfinite(np.asarray(solution.x)).all()


def test_every_product_under_a_draw_is_computed_in_full_precision():
    """Devices may otherwise round more than the errors that a plan counts."""
    problem = dpb.linear_tuning(dpb.Logistic(), jnp.zeros(2, int), bounds=(0.0, 1.0))
    rows = {"features": jnp.ones((4, 2)), "label": jnp.ones(4)}
    data, w0 = dpb.Levels(rows, rows), (jnp.zeros(1), jnp.zeros(2))
    solver = dpb.draws.ExponentialMechanism(GRID, clip_range=1.0).with_noise(1.0)

    def draw(data):
        return dpb.solve(problem, solver, data, w0, key=jax.random.key(0)).x

    def precisions(function):
        text = str(jax.make_jaxpr(function)(data))
        products = re.findall(r"dot_general\[.*?preferred", text, re.DOTALL)
        return {"precision=(Precision.HIGHEST" in product for product in products}

    assert precisions(draw) == {True}
    # The control: the same loss outside of a draw.
    losses = jax.vmap(lambda row: problem.lower(*w0, row))
    assert precisions(lambda data: losses(data.lower)) == {False}
