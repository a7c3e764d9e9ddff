"""WarmStarted: one solver's released answer starts the other, both are paid for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from tests.bilevel.test_implicit import implicit, planned_implicit
from tests.bilevel.test_penalty import CANARY_INNER, planned_penalty
from tests.bilevel.test_penalty import small as penalty
from tests.cases import Audited, Case, planned
from tests.problems import EXACT, INNER, LEVELS, WEIGHTING, X0, Y0

SIZES = EXACT.problem.sizes_of(EXACT.data)
KEY = 0


SEARCH = planned_penalty("overlapping", num_steps=1)


def planned_refit_of_both(kind=dpb.Refitted):
    return planned(kind(SEARCH, CANARY_INNER, (0.3, 0.7), "both"), "disjoint")


CONTRACT = {
    "refitted": Case(
        WEIGHTING,
        dpb.Refitted(penalty(), INNER, (0.7, 0.3)),
        LEVELS,
        (X0, Y0),
        "disjoint",
    ),
    "refitted_both": Case(
        WEIGHTING,
        dpb.Refitted(penalty(), INNER, (0.7, 0.3), "both"),
        LEVELS,
        (X0, Y0),
        "disjoint",
    ),
    "warm_started": Case(
        EXACT.problem,
        dpb.applications.WarmStarted(implicit(num_steps=2), implicit(num_steps=2)),
        EXACT.data,
        EXACT.w0,
        "disjoint",
    ),
}
AUDITS = {
    "Refitted": Audited(
        planned(dpb.Refitted(SEARCH, CANARY_INNER, (0.7, 0.3)), "overlapping")
    ),
    "Refitted, both levels": Audited(planned_refit_of_both()),
    "WarmStarted": Audited(
        planned(
            dpb.applications.WarmStarted(
                planned_implicit("overlapping"),
                planned_implicit("overlapping", num_steps=2),
                (0.4, 0.6),
            ),
            "overlapping",
        )
    ),
}


def noiseless(solver):
    return solver.with_noise(0.0).with_precision("float").with_sizes(SIZES)


# One program for every start.
solve = jax.jit(functools.partial(dpb.solve, trajectory=True))


def run(solver, w0=EXACT.w0):
    return solve(EXACT.problem, solver, EXACT.data, w0, key=jax.random.key(KEY))


def long_penalty():
    inner = dataclasses.replace(INNER, clip_norm=1e6, num_steps=5, step_size=0.3)
    return penalty(
        num_steps=2, step_size=0.1, inner=inner, clip_norm=1e6, upper_clip_norm=1e6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(
            implicit(num_steps=3, output=dpb.outputs.Last()), marks=pytest.mark.slow
        ),
        long_penalty(),
    ],
    ids=["no y", "with y"],
)
def test_the_second_goes_on_where_the_first_ended(first):
    then = implicit(num_steps=2, output=dpb.outputs.Last())
    both = run(noiseless(dpb.applications.WarmStarted(first, then)))
    start = run(noiseless(first))
    y = EXACT.w0[1] if start.y is None else start.y
    alone = run(noiseless(then), (start.x, y))
    np.testing.assert_allclose(both.x, alone.x, rtol=1e-5)
    assert both.y is None
    assert len(both.trajectory[0]) == both.trajectory[0].shape[0] == first.num_steps + 2
    # The control: from the given start the second ends elsewhere.
    assert not np.allclose(both.x, run(noiseless(then)).x, rtol=1e-3)


@pytest.mark.slow
def test_a_second_one_that_releases_y_gives_it():
    both = run(
        noiseless(dpb.applications.WarmStarted(implicit(num_steps=2), long_penalty()))
    )
    assert both.y.shape == (4,)


def test_ledgers_add_and_the_budget_is_split():
    solver = dpb.applications.WarmStarted(
        implicit(num_steps=3), implicit(num_steps=5), budget_split=(0.3, 0.7)
    )
    ledger = solver.with_noise(2.0).ledger(EXACT.problem, SIZES)
    names = [release.name for release in ledger.releases]
    assert names == ["first: hypergradient", "then: hypergradient"]
    assert [r.count for r in ledger.releases] == [3, 5]
    (event,) = ledger.events().values()
    assert profiles.gaussian_mu(event) == pytest.approx(1 / 2.0)
    shares = [r.count / r.noise_multiplier**2 for r in ledger.releases]
    assert shares[0] / sum(shares) == pytest.approx(0.3)


def test_the_status_is_the_worse_of_the_two():
    mixed = dpb.applications.WarmStarted(penalty(num_steps=2), implicit())
    budget = dpb.PrivacyBudget(1.0, 1e-6)
    plan = dpb.calibrate(EXACT.problem, mixed, budget, sizes=SIZES)
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL
    assert "strong_convexity = 1.5" in str(plan.report)
    clipped = dpb.applications.WarmStarted(penalty(num_steps=2), penalty(num_steps=2))
    plan = dpb.calibrate(EXACT.problem, clipped, budget, sizes=SIZES)
    assert plan.report.status is dpb.privacy.Status.ENFORCED


@pytest.mark.slow
def test_a_private_y_is_bought_by_a_refit():
    solver = noiseless(dpb.Refitted(implicit(num_steps=2), INNER, (0.7, 0.3)))
    solution = run(solver)
    assert solution.y.shape == (4,)
    assert bool(jnp.any(solution.y != 0))
    releases = solver.ledger(EXACT.problem, SIZES).releases
    assert [r.name for r in releases] == ["hypergradient", "refit: gradient"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"budget_split": (1.0, 0.0)},
            ValueError,
            "budget_split must be from 1e-30 to 1e30",
        ),
        ({"first": INNER}, TypeError, "first must solve a SourceWeighting"),
        ({"then": "gd"}, TypeError, "then must be an instance of"),
        (
            {"first": penalty().with_neighbours(dpb.Neighbours.ADD_OR_REMOVE_ONE)},
            ValueError,
            "same relation",
        ),
    ],
)
def test_bad_field_is_named_in_the_error(fields, error, message):
    good = {"first": implicit(), "then": implicit()}
    with pytest.raises(error, match=message):
        dpb.applications.WarmStarted(**(good | fields))


def test_the_theorem_sets_the_second_runs_steps_by_the_gap_of_the_draw():
    known = EXACT.problem.constants
    n, draw = 10**7, dpb.draws.ExponentialMechanism(dpb.draws.Grid(jnp.zeros((2, 4))))
    made = dpb.applications.WarmStarted.from_theorem(
        EXACT.problem,
        dpb.PrivacyBudget(1.0, 1e-8),
        dpb.Sizes(n, 2 * n, "disjoint"),
        first=draw,
        dimension_x=4,
        budget_split=(0.3, 0.7),
    )
    # Psi = L_fx D_x + L_fy (D_y + L_gy / mu), and half of epsilon and delta each.
    psi = known.upper_x * 2 + known.upper_y * (2 * 2.0 + known.lower_y / 1.5)
    drop = (known.smoothness * psi * 4 / (0.5 * n)) ** 0.5
    steps = 0.5 * n / (4 * np.log(2e8)) ** 0.5 * drop / known.sensitivity_constant
    assert made.then.num_steps == np.ceil(steps)
    assert made.then.step_size == 1 / (2 * known.smoothness)
    assert made.first is draw
    assert made.budget_split == (0.3, 0.7)
    with pytest.raises(ValueError, match="hopeless"):
        dpb.applications.WarmStarted.from_theorem(
            EXACT.problem,
            dpb.PrivacyBudget(1.0, 1e-8),
            SIZES,
            first=draw,
            dimension_x=4,
        )


def test_errors_name_all_classes_of_problems_that_a_solver_takes():
    points = dpb.draws.Grid(jnp.zeros((2, 1)))
    draw = dpb.draws.ExponentialMechanism(points, score="value", dimension=1)
    solver = dpb.applications.WarmStarted(draw, implicit())
    with pytest.raises(TypeError, match="instance of BilevelProblem or FiniteSum"):
        solver.ledger(3, SIZES)
    with pytest.raises(TypeError, match="not a FiniteSum or BlackBox"):
        dpb.applications.WarmStarted(dpb.search.RandomSearch(4, 1.0), implicit())


TILT, REACH, SHIFT = 0.0385, 1.1, 0.05  # SHIFT: the longest lower record


def two_wells(_x, y, record):
    """A record of 1 makes the well at y = -1 the better one, by twice the tilt."""
    return jnp.sum((y**2 - 1) ** 2 / 4 + TILT * jnp.clip(record, -1, 1) * y)


def moved(x, y, record):
    return 0.5 * jnp.sum((y - x - jnp.clip(record, -SHIFT, SHIFT)) ** 2)


def two_basins():
    zeros = ["upper_x", "upper_xx", "upper_xy", "lower_xy_spread", "lower_yy_spread"]
    zeros += [f"lower_{h}_in_{v}" for h in ("xy", "yy") for v in ("x", "y")]
    radius = REACH + SHIFT
    constants = dpb.bilevel.SecondOrderConstants(
        strong_convexity=1.0,
        solution_radius=radius,
        upper_y=radius**3 - radius + TILT,
        upper_yy=3 * radius**2 - 1,
        lower_y=2 * radius,
        lower_y_spread=SHIFT,
        lower_xy=1.0,
        lower_yy=1.0,
        **dict.fromkeys(zeros, 0.0),
    )
    x_set = dpb.sets.Box(-jnp.full(1, REACH), jnp.full(1, REACH))
    return dpb.BilevelProblem(two_wells, moved, x_set=x_set, constants=constants)


@pytest.mark.slow
@jax.enable_x64(True)
def test_a_drawn_start_finds_the_better_of_two_basins_where_algorithm_1_stays():
    problem, n, budget = two_basins(), 20_000, dpb.PrivacyBudget(0.5, 1e-6)
    records = np.random.default_rng(0).uniform(-SHIFT, SHIFT, (n, 1))
    data = dpb.Levels(jnp.ones((n, 1)), jnp.asarray(records))
    sizes, w0 = problem.sizes_of(data, "disjoint"), (jnp.ones(1), jnp.ones(1))
    grid = dpb.draws.Grid.product(jnp.linspace(-REACH, REACH, 201))
    first = dpb.draws.ExponentialMechanism(grid)
    given = problem, budget, sizes

    def objective(x):
        y = x + records.mean()
        return (y**2 - 1) ** 2 / 4 + TILT * y

    def excesses(solver):
        plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
        run = jax.jit(lambda key: dpb.solve(problem, plan.solver, data, w0, key=key).x)
        found = [run(key)[0] for key in jax.random.split(jax.random.key(0), 5)]
        best = objective(np.linspace(-REACH, REACH, 100_001)).min()
        return objective(np.asarray(found)) - best

    # The start is at the bottom of the worse basin.
    stays = dpb.ImplicitBilevel.from_theorem(
        *given, dimension_x=1, initial_gap=2 * TILT
    )
    assert excesses(stays).min() > 0.07
    drawn = dpb.applications.WarmStarted.from_theorem(
        *given, first=first, dimension_x=1
    )
    assert excesses(drawn).max() < 0.002
