"""ImplicitBilevel: what it computes, what it hides, what it claims and refuses."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.bilevel.certificates import certified, sensitivities
from dpbilevel.bilevel.certificates.fixed_count import Spectrum
from dpbilevel.core.outputs import UniformIterate
from tests.cases import Audited, Case, planned, slow
from tests.problems import CERTIFIED, DECLARED, EXACT, LEVELS, Y0
from tests.zoo import two_levels as zoo

BOX = (-1.0, 1.0)
GROUPS = jnp.asarray([0, 0, 1, 1])
TUNING = dpb.linear_tuning(dpb.Logistic(), GROUPS, bounds=BOX)
SIZES = TUNING.sizes_of(LEVELS)
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
KEY = 0


def implicit(**fields):
    return dpb.ImplicitBilevel(**({"num_steps": 3, "step_size": 0.05} | fields))


CONTRACT = {
    "implicit_at_x": Case(
        CERTIFIED,
        implicit(step_size=optax.adam(0.1)),
        LEVELS,
        (jnp.zeros(2), Y0),
        "disjoint",
        adaptive=True,
    ),
    "implicit": Case(EXACT.problem, implicit(), EXACT.data, EXACT.w0, "disjoint"),
}


def planned_implicit(people, scale=1.0, kind=dpb.ImplicitBilevel, **fields):
    solver = kind(**({"num_steps": 3, "step_size": 0.1} | fields))
    return planned(solver, people, scale)


AUDITS = {
    # Half the noise: each level alone leaks less than both.
    "ImplicitBilevel, disjoint": Audited(planned_implicit("disjoint", 0.5)),
    "ImplicitBilevel, overlapping": Audited(planned_implicit("overlapping")),
    "ImplicitBilevel, shared": Audited(planned_implicit("shared")),
}


def wide(tree):
    return jax.tree.map(
        lambda v: jnp.asarray(np.asarray(v, np.float64)) if v.dtype == "f4" else v, tree
    )


def value_at(problem, x, data, people="overlapping"):
    sizes = problem.sizes_of(data, people)
    y0 = jnp.zeros(4, x.dtype)
    query = certified.HypergradientQuery(problem, sizes)
    key = jax.random.key(0)  # not used: no batch is drawn
    read = jax.jit(lambda w, data: query.read(w, data, precision="float", key=key))
    bounded = read((x, y0), data)
    return bounded.raw, bounded


def error_at(problem, x, sizes):
    @jax.jit
    def twice(x):
        claimed = sensitivities.hypergradient_sensitivity(
            problem.constants, sizes, jnp.float64, x
        )
        return claimed.upper - problem.constants.bounds(sizes, x).upper

    return float(twice(x)) / 2


@pytest.mark.slow
def test_hypergradient_is_that_of_the_closed_form_within_the_stated_error(x64):
    rows = wide(EXACT.data)
    example = zoo.quadratic_bilevel(rows.upper, rows.lower, radius=1.0)
    x = jnp.asarray([0.3, -0.2, 0.1, 0.4])
    found, _ = value_at(example.problem, x, rows)
    stated = error_at(example.problem, x, example.problem.sizes_of(rows))
    assert jnp.linalg.norm(found - example.hypergradient(x)) <= stated


@pytest.mark.slow
def test_hypergradient_of_a_linear_model_is_a_difference_of_objectives(x64):
    x, data = jnp.asarray([0.3, -0.2]), wide(LEVELS)
    found, _ = value_at(TUNING, x, data)
    stated = error_at(TUNING, x, SIZES)
    step = 1e-3

    def objective(x):
        return dpb.debug.hyper_objective(TUNING, x, wide(Y0), data)

    slopes = [
        (objective(x.at[j].add(step)) - objective(x.at[j].add(-step))) / (2 * step)
        for j in range(2)
    ]
    assert np.linalg.norm(found - np.asarray(slopes)) <= stated + 1e-6
    # The control: the stated error is no licence to be anywhere.
    assert stated < 0.1 * np.linalg.norm(slopes)


@pytest.mark.parametrize("kappa", [1.0, 4.0, 100.0])
@pytest.mark.parametrize("steps", [1, 3, 10, 40])
def test_both_inner_solves_keep_their_promise(kappa, steps, x64):
    eigenvalues = jnp.linspace(1.0, kappa, 30) if kappa > 1 else jnp.ones(30)
    goal = jnp.asarray(np.random.default_rng(steps).normal(size=30))
    spectrum = Spectrum(1.0, kappa)
    found = spectrum.accelerated_gradient(
        lambda y: eigenvalues * (y - goal), 0 * goal, steps
    )
    promised = spectrum.accelerated_error(jnp.linalg.norm(goal), steps)
    assert jnp.linalg.norm(found - goal) <= promised * (1 + 1e-9) + 1e-12

    right = eigenvalues * goal
    found = spectrum.chebyshev(lambda v: eigenvalues * v, right, steps)
    factor = spectrum.chebyshev_error(steps)
    for weight in (1.0, jnp.sqrt(eigenvalues)):
        off = jnp.linalg.norm(weight * (found - goal))
        assert off <= factor * jnp.linalg.norm(weight * goal) + 1e-12


def test_fewer_steps_would_break_a_promise(x64):
    eigenvalues = jnp.linspace(1.0, 100.0, 30)
    right, spectrum = jnp.ones(30), Spectrum(1.0, 100.0)
    found = spectrum.chebyshev(lambda v: eigenvalues * v, right, 10)
    off = jnp.linalg.norm(found - right / eigenvalues)
    sooner = spectrum.chebyshev_error(40)
    assert off > sooner * jnp.linalg.norm(right / eigenvalues)


@pytest.mark.parametrize("kappa", [4.0, *slow(100.0, 1e4)])
def test_the_least_curvature_attains_what_accelerated_steps_promise(kappa, x64):
    spectrum = Spectrum(1.0, kappa)
    for target in (0.5, 1e-2, 1e-4):
        steps = int(spectrum.accelerated_steps(1.0, target))
        assert spectrum.accelerated_error(1.0, steps) <= target
        found = [
            spectrum.accelerated_gradient(lambda y: y, jnp.ones(()), k)
            for k in (steps, int(0.75 * steps) - 2)
        ]
        assert found[0] <= target
        # The control: with a quarter fewer steps this function is not solved.
        assert steps < 8 or found[1] > target


@pytest.mark.slow
def test_accelerated_steps_keep_their_promise_where_curvature_changes(x64):
    rows = np.random.default_rng(0).normal(size=(40, 8)) * np.logspace(0, -2, 8)
    rows = jnp.asarray(rows)
    largest = float(jnp.linalg.norm(rows, 2) ** 2 / 4 / 40) + 1e-3
    spectrum = Spectrum(1e-3, largest)

    def gradient(y):
        return -jax.nn.sigmoid(-rows @ y) @ rows / 40 + 1e-3 * y

    def solve(start, steps):
        return spectrum.accelerated_gradient(gradient, start, steps)

    exact = solve(jnp.zeros(8), 2000)
    assert jnp.linalg.norm(gradient(exact)) < 1e-12
    for start in (jnp.zeros(8), exact + 1.0, exact - 30.0):
        away = jnp.linalg.norm(start - exact)
        for steps in (1, 5, 25, 100):
            off = jnp.linalg.norm(solve(start, steps) - exact)
            assert off <= spectrum.accelerated_error(away, steps)


@pytest.mark.parametrize("kappa", [4.0, *slow(100.0, 1e4)])
def test_inexact_gradients_add_at_most_twice_their_error_over_the_convexity(kappa, x64):
    counts = jnp.arange(1, 4 * int(kappa**0.5) + 10)
    adversaries = {
        "constant": lambda y: 1.0,
        "away": lambda y: jnp.where(y > 0, -1.0, 1.0),
        "across": lambda y: jnp.where(y > 0, 1.0, -1.0),
    }
    worst = 0.0
    for curvature in (1.0, kappa**0.5, kappa):
        for error in adversaries.values():

            @jax.vmap
            def drift(steps, curvature=curvature, error=error):
                return Spectrum(1.0, kappa).accelerated_gradient(
                    lambda y: curvature * y + error(y), jnp.zeros(()), steps
                )

            worst = max(worst, float(jnp.max(jnp.abs(drift(counts)))))
    # The control: without the factor of two the bound is broken.
    assert 1.2 < worst <= 2.0


@pytest.mark.parametrize("bounds", [(-3.0, 1.0), (0.0, 2.0)])
def test_inner_errors_add_at_most_one_percent_at_every_x(bounds):
    problem = dpb.linear_tuning(dpb.Logistic(), GROUPS, bounds=bounds)
    sizes = dpb.Sizes(500, 10_000)
    steps = sensitivities.step_counts(problem.constants, sizes)
    shares = []
    for low in np.linspace(*bounds, 9):
        for high in np.linspace(low, bounds[1], 5):
            here = problem.constants.bounds(sizes, jnp.asarray([low, high]))
            added = 4 * sensitivities.solve_error(here, steps)
            shares.append(float(added / (here.upper + here.lower)))
    assert max(shares) <= 0.01
    fewer = dataclasses.replace(steps, lower=steps.lower - 2)
    worst = problem.constants.bounds(sizes)
    added = 4 * sensitivities.solve_error(worst, fewer)
    assert added / (worst.upper + worst.lower) > 0.005


def test_noise_follows_the_sensitivity_at_the_current_x(x64):
    data = wide(LEVELS)
    _, low = value_at(TUNING, jnp.asarray([-1.0, -1.0]), data)
    _, high = value_at(TUNING, jnp.asarray([1.0, 1.0]), data)
    assert high.sensitivity() < 0.1 * low.sensitivity()
    ledger = implicit().with_noise(1.0).ledger(TUNING, SIZES)
    assert high.sensitivity() < 2 * ledger.releases[0].contribution


def test_disjoint_people_never_see_less_noise_than_their_ledger_says(x64):
    data, multiplier = wide(LEVELS), 3.0
    solver = implicit().with_noise(multiplier / math.sqrt(3))
    sizes = TUNING.sizes_of(data, "disjoint")
    events = solver.ledger(TUNING, sizes).events()
    for x in ([-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]):
        x = jnp.asarray(x)
        _, bounded = value_at(TUNING, x, data, "disjoint")
        std = multiplier * bounded.sensitivity()
        own = sensitivities.hypergradient_sensitivity(
            TUNING.constants, sizes, jnp.float64, x
        )
        seen = {role: float(std / getattr(own, role)) for role in events}
        for role, event in events.items():
            claimed = event.events[0].event.noise_multiplier
            assert seen[role] >= claimed * (1 - 1e-9)
        assert any(
            seen[role] == pytest.approx(event.events[0].event.noise_multiplier)
            for role, event in events.items()
        )


@pytest.mark.parametrize("people", ["overlapping", *slow("shared")])
def test_the_noise_for_people_in_both_levels_covers_both_shares(people, x64):
    rows = wide(LEVELS.lower)
    data = dpb.Levels.shared(rows) if people == "shared" else wide(LEVELS)
    x, sizes = jnp.asarray([-1.0, 0.5]), TUNING.sizes_of(data, people)
    _, bounded = value_at(TUNING, x, data, people)
    shares = sensitivities.hypergradient_sensitivity(
        TUNING.constants, sizes, jnp.float64, x
    )
    # One share alone, or half of both, would be too little.
    assert min(shares.upper, shares.lower) > 1e-3 * max(shares.upper, shares.lower)
    assert float(bounded.sensitivity()) == pytest.approx(
        float(shares.upper + shares.lower)
    )


@pytest.mark.slow
def test_neither_solution_nor_hypergradient_leaves_the_ball_of_its_bound(x64):
    # The lower solution is 10 e_1 and the hypergradient the solution itself.
    problem = dpb.BilevelProblem(
        lambda x, y, z: jnp.vdot(x, y) + 0 * jnp.sum(z),
        lambda x, y, z: 0 * jnp.vdot(y, z),
        lower_public=lambda x, y: 0.5 * jnp.sum(y * y) - 10 * y[0],
    )
    data, x = wide(EXACT.data), jnp.zeros(4)
    sizes = problem.sizes_of(data)
    certificate = EXACT.problem.constants
    steps = sensitivities.step_counts(certificate, sizes)

    def norm(**radii):
        bounds = dataclasses.replace(
            certificate.bounds(sizes, x), strong_convexity=1.0, smoothness=1.0, **radii
        )
        lower = certified.LowerLevel(problem, data, x, x, sizes, bounds, steps)
        found = lower.hypergradient()
        return float(jnp.linalg.norm(found))

    assert norm(solution_radius=20.0, gradient=30.0) == pytest.approx(10.0)
    assert norm(solution_radius=2.0, gradient=30.0) <= 2.0
    assert norm(solution_radius=20.0, gradient=3.0) <= 3.0


def test_nothing_but_released_values_is_kept(monkeypatch):
    def same_for_all(self, bounded, *, key):
        del key
        return jax.tree.map(jnp.ones_like, bounded.raw)

    monkeypatch.setattr(dpb.privacy.Gaussian, "release", same_for_all)
    sizes = EXACT.problem.sizes_of(EXACT.data)
    solver = implicit(noise_multiplier=1.0, precision="float", sizes=sizes)
    states, step = [], jax.jit(type(solver).step)
    for factor in (1.0, -0.5):
        data = jax.tree.map(lambda v, factor=factor: factor * v, EXACT.data)
        state, key = solver.init(EXACT.problem, EXACT.w0), jax.random.key(KEY)
        states.append(step(solver, EXACT.problem, data, state, key=key))
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_value_that_is_not_finite_is_released_as_zero():
    class Odd(dpb.bilevel.AbstractCertificate):
        second_order = EXACT.problem.constants
        assumptions = ()
        varies = False

        def check(self, problem):
            pass

        def bounds(self, sizes, x=None):
            return EXACT.problem.constants.bounds(sizes, x)

    broken = dpb.BilevelProblem(
        lambda x, y, z: jnp.sum(jnp.where(z > 0.5, jnp.inf, 1.0) * y),
        EXACT.problem.lower,
        lower_public=EXACT.problem.lower_public,
        constants=Odd(),
    )
    value, _ = value_at(broken, jnp.zeros(4), EXACT.data)
    assert np.all(np.asarray(value) == 0)


@pytest.mark.slow
def test_the_answer_is_x_alone_and_an_iterate():
    solver = implicit(num_steps=5).with_noise(1.0)
    solution = dpb.solve(
        EXACT.problem,
        solver,
        EXACT.data,
        EXACT.w0,
        key=jax.random.key(KEY),
        trajectory=True,
    )
    assert solution.y is None
    starts = [EXACT.w0[0], *solution.trajectory[0][:-1]]
    assert any(np.array_equal(solution.x, x) for x in starts)


def chosen_steps(count, runs, *, broken=False):
    rule = UniformIterate()

    def run(key):
        chosen = rule.init(jnp.asarray(-1, jnp.int32))
        for t, step_key in enumerate(jax.random.split(key, count)):
            value, seen = (jnp.asarray(v, jnp.int32) for v in (t, 0 if broken else t))
            after = value + 1
            chosen = rule.update(
                chosen, after, before=value, t=seen, num_steps=count, key=step_key
            )
        return chosen

    keys = jax.random.split(jax.random.key(KEY), runs)
    return np.bincount(jax.jit(jax.vmap(run))(keys), minlength=count)


def test_the_answer_is_one_of_the_points_that_steps_start_from_each_as_often():
    counts = chosen_steps(7, 20_000)
    assert len(counts) == 7  # not where the last step ends
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    last = chosen_steps(7, 20_000, broken=True)
    assert scipy.stats.chisquare(last + 1).pvalue < 1e-6


def test_the_report_is_conditional_and_lists_every_constant():
    plan = dpb.calibrate(EXACT.problem, implicit(), BUDGET, sizes=dpb.Sizes(20, 40))
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL
    listed = "\n".join(plan.report.assumptions)
    for name in DECLARED:
        assert f"{name} = " in listed
    assert "Chebyshev steps per release" in listed
    assert "every single release is mostly noise" in str(
        dpb.calibrate(
            EXACT.problem,
            implicit(num_steps=50),
            BUDGET,
            sizes=dpb.Sizes(20, 40),
            w0=EXACT.w0,
        ).report
    )


@pytest.mark.parametrize("num_steps", [1, 10, 100])
def test_noise_is_a_small_part_of_the_papers(num_steps, x64):
    sizes = dpb.Sizes(10_000, 10_000)
    plan = dpb.calibrate(TUNING, implicit(num_steps=num_steps), BUDGET, sizes=sizes)
    (row,) = plan.report.ledger
    paper = (
        32
        * TUNING.constants.second_order.sensitivity_constant
        * math.sqrt(num_steps * math.log(1 / BUDGET.delta))
        / (sizes.upper * BUDGET.epsilon)
    )
    assert row.noise_std < paper / 28


def test_the_theorems_parameters(x64):
    constants = TUNING.constants.second_order
    known = {"dimension_x": 2, "initial_gap": 0.5}
    budget, sizes = dpb.PrivacyBudget(1.0, 1e-8), dpb.Sizes(2 * 10**7, 10**7)
    solver = dpb.ImplicitBilevel.from_theorem(TUNING, budget, sizes, **known)
    assert solver.step_size == 1 / (2 * constants.smoothness)
    steps = 1e7 / math.sqrt(2 * math.log(1e8))
    steps *= math.sqrt(0.5 * constants.smoothness) / constants.sensitivity_constant
    assert solver.num_steps == math.ceil(steps)
    few = dpb.Sizes(30, 30)
    with pytest.raises(ValueError, match="hopeless: the bound") as caught:
        dpb.ImplicitBilevel.from_theorem(TUNING, budget, few, **known)
    records = int(re.search(r"Use (\d+) records", str(caught.value))[1])
    enough = dpb.Sizes(records, records)
    dpb.ImplicitBilevel.from_theorem(TUNING, budget, enough, **known)
    short = int(0.99 * records)
    with pytest.raises(ValueError, match="hopeless"):
        dpb.ImplicitBilevel.from_theorem(
            TUNING, budget, dpb.Sizes(short, short), **known
        )


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"constants": None}, SIZES, "SecondOrderConstants"),
        ({"y_set": dpb.sets.Ball(1.0)}, SIZES, "take no y_set"),
        ({"upper": dpb.logistic_loss}, SIZES, "public term was exchanged"),
        ({}, dpb.Sizes(10**6, 10**6), "Enable 64-bit"),
        (
            {"constants": dataclasses.replace(TUNING.constants, low=-25.0)},
            SIZES,
            "[Rr]aise the strong convexity",
        ),
    ],
)
def test_what_cannot_be_certified_is_refused_before_any_data(changes, sizes, message):
    problem = dataclasses.replace(TUNING, **changes)
    with pytest.raises(ValueError, match=message):
        dpb.calibrate(problem, implicit(), BUDGET, sizes=sizes)


def test_float64_reaches_what_float32_does_not(x64):
    sizes = dpb.Sizes(10**6, 10**6)
    budget = dpb.PrivacyBudget(1.0, 0.9e-6)
    plan = dpb.calibrate(TUNING, implicit(), budget, sizes=sizes)
    assert plan.report.epsilon <= 1
    # Planned for float64, records in float32: refused by shape, not by value.
    with pytest.raises(ValueError, match="in float32, rounding"):
        sensitivities.check_dtype(TUNING.constants, sizes, jnp.float32)


def test_add_or_remove_is_refused():
    with pytest.raises(ValueError, match=r"needs Neighbours\.REPLACE_ONE"):
        implicit(neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_steps": 0}, "num_steps must be an integer"),
        ({"step_size": None}, "give step_size="),
    ],
)
def test_bad_field_is_named_in_the_error(fields, message):
    with pytest.raises(ValueError, match=message):
        implicit(**fields)


@pytest.mark.slow
def test_descends_where_there_are_records_enough(x64):
    rng = np.random.default_rng(6)
    features = rng.normal(size=(20_000, 4)) / 2
    margin = features @ np.asarray([4.0, -3.0, 0.0, 0.0])
    label = np.sign(margin + 0.3 * rng.normal(size=len(margin)))
    rows = {"features": jnp.asarray(features), "label": jnp.asarray(label)}
    data = dpb.Levels(*(jax.tree.map(lambda v, k=k: v[k::2], rows) for k in (0, 1)))
    solver = implicit(num_steps=20, step_size=3.0, output=dpb.outputs.Last())
    given = {"budget": BUDGET, "people": "disjoint", "key": jax.random.key(KEY)}
    result = dpb.fit(TUNING, solver, data, (jnp.zeros(2), jnp.zeros(4)), **given)

    def objective(x):
        return dpb.debug.hyper_objective(TUNING, x, jnp.zeros(4), data)

    best = min(objective(jnp.asarray([a, b])) for a in BOX for b in BOX)
    start = objective(jnp.zeros(2))
    assert objective(result.x) < start - 0.5 * (start - best)
