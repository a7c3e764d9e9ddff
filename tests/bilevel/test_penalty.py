import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from tests.cases import Audited, Case, planned
from tests.problems import (
    INNER,
    LASSO,
    LEVELS,
    POISSON,
    QUADRATIC,
    SHARED,
    SHARED_QUADRATIC,
    TUNING,
    WEIGHTING,
    X0,
    Y0,
    ridge_tuning,
)
from tests.zoo import two_levels as zoo

HUGE = 1e9  # a clip norm that never clips


def small(**fields):
    defaults = {"num_steps": 4, "penalty": 5.0, "inner": INNER, "step_size": 1.0}
    return dpb.PenaltyBilevel(**(defaults | fields))


POISSON_STEPS = {
    "inner": dpb.NoisyGD(3, 1.0, step_size=0.5, sampling=POISSON),
    "sampling": POISSON,
    "step_size": optax.adam(0.1),
    "output": dpb.outputs.Last(),
}
LOCALIZED = dpb.onelevel.LocalizedGD((4.0,), 3, 0.1, 1.0, first_radii=(8.0,))
OTHER_INNER = dpb.onelevel.LocalizedGD((2.0, 1.0), 2, 0.05, 0.7)
CONTRACT = {
    "penalty_both_levels": Case(
        QUADRATIC.problem,
        small(step_size=0.1),
        QUADRATIC.data,
        QUADRATIC.w0,
        "overlapping",
        fitted=True,
    ),
    "penalty": Case(WEIGHTING, small(), LEVELS, (X0, Y0), "disjoint"),
    "penalty_overlapping": Case(WEIGHTING, small(), LEVELS, (X0, Y0), "overlapping"),
    "penalty_shared": Case(WEIGHTING, small(), SHARED, (X0, Y0), "shared"),
    "penalty_poisson": Case(
        WEIGHTING, small(**POISSON_STEPS), LEVELS, (X0, Y0), "disjoint"
    ),
    "penalty_shared_poisson": Case(
        QUADRATIC.problem,
        small(step_size=0.1, sampling=POISSON),
        SHARED_QUADRATIC,
        QUADRATIC.w0,
        "shared",
    ),
    "penalty_localized": Case(
        WEIGHTING,
        small(inner=LOCALIZED, penalized_inner=OTHER_INNER),
        LEVELS,
        (X0, Y0),
        "disjoint",
    ),
    "penalty_proximal": Case(
        LASSO, small(step_size=0.1), LEVELS, (jnp.full(2, 0.1), Y0), "disjoint"
    ),
    "penalty_free_outer": Case(TUNING, small(), LEVELS, (jnp.zeros(2), Y0), "disjoint"),
}
CANARY_INNER = dpb.NoisyGD(2, 0.5, step_size=0.1)


def planned_penalty(people, scale=1.0, kind=dpb.PenaltyBilevel, **fields):
    defaults = {"num_steps": 2, "penalty": 4.0, "inner": CANARY_INNER}
    defaults |= {"upper_clip_norm": 1.5, "step_size": 0.1}
    return planned(kind(**(defaults | fields)), people, scale)


AUDITS = {
    # Half the noise: each level alone leaks less than both.
    "PenaltyBilevel, disjoint": Audited(planned_penalty("disjoint", 0.5)),
    "PenaltyBilevel, overlapping": Audited(planned_penalty("overlapping")),
    "PenaltyBilevel, shared": Audited(planned_penalty("shared"), True),
    "PenaltyBilevel, x in lower": Audited(planned_penalty("overlapping"), ("lower",)),
    "PenaltyBilevel, free outer step": Audited(planned_penalty("overlapping"), False),
}


def rows(n, d, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, d)))


def examples():
    features, w = rows(40, 3, 2), jnp.asarray([1.0, -2.0, 0.5])
    batch = {"features": features, "label": features @ w + 0.3 * rows(40, 1, 3)[:, 0]}
    upper = jax.tree.map(lambda v: v[:15], batch)
    lower = jax.tree.map(lambda v: v[15:], batch)
    return {
        "quadratic": zoo.quadratic_bilevel(rows(12, 3, 0), rows(20, 3, 1)),
        "ridge": ridge_tuning(upper, lower),
    }


def noiseless(penalty, **fields):
    inner = dpb.NoisyGD(2000, HUGE, step_size=0.15)
    solver = dpb.PenaltyBilevel(
        **(
            {
                "num_steps": 1,
                "penalty": penalty,
                "inner": inner,
                "clip_norm": HUGE,
                "upper_clip_norm": HUGE,
                "step_size": 1e-3,
                "run_noise": dpb.privacy.Gaussian(0.0, precision="float"),
                "output": dpb.outputs.Last(),
            }
            | fields
        )
    )
    return solver.with_noise(0.0).with_precision("float")


def outer_gradient(example, x, solver):
    problem = dataclasses.replace(example.problem, x_set=dpb.sets.Euclidean())
    w0 = (x, example.w0[1])
    # Compiled once for all penalties.
    solve = jax.jit(dpb.solve)
    moved = solve(problem, solver, example.data, w0, key=jax.random.key(0)).x
    return (x - moved) / solver.step_size


@pytest.mark.parametrize(
    "name", ["quadratic", pytest.param("ridge", marks=pytest.mark.slow)]
)
def test_penalty_hypergradient_converges_at_rate_one_over_penalty(name, x64):
    example = examples()[name]
    x = 0.3 * jnp.ones_like(example.w0[0])
    exact = example.hypergradient(x)
    penalties = np.asarray([100.0, 300.0, 1000.0, 3000.0])
    errors = [
        float(jnp.linalg.norm(outer_gradient(example, x, noiseless(p)) - exact))
        for p in penalties
    ]
    slope = np.polyfit(np.log(penalties), np.log(errors), 1)[0]
    assert -1.05 < slope < -0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quadratic", "ridge"])
def test_outer_gradient_equals_the_formula_at_the_exact_solutions(name, x64):
    example, penalty = examples()[name], 7.0
    x = 0.2 * jnp.ones_like(example.w0[0])
    y, z = example.lower_solution(x), example.penalized_solution(x, penalty)

    def lagrangian(x):
        upper = dpb.debug.upper_objective(example.problem, x, z, example.data)
        gap = [
            dpb.debug.lower_objective(example.problem, x, w, example.data)
            for w in (z, y)
        ]
        return upper + penalty * (gap[0] - gap[1])

    found = outer_gradient(example, x, noiseless(penalty))
    np.testing.assert_allclose(found, jax.grad(lagrangian)(x), rtol=1e-6, atol=1e-9)


def test_one_step_equals_the_pseudocode_in_numpy(x64):
    example, lam, eta = examples()["quadratic"], 4.0, 0.05
    inner = dpb.NoisyGD(2, HUGE, step_size=0.1)
    solver = noiseless(lam, num_steps=3, inner=inner, step_size=eta)
    found = dpb.solve(
        example.problem, solver, example.data, example.w0, key=jax.random.key(0)
    )
    a, b = np.mean(example.data.upper, 0), np.mean(example.data.lower, 0)
    x = y = z = np.zeros(3)
    for _ in range(3):
        for _ in range(2):
            y = y - 0.1 * (y - 2 * x - b + y / 2)
            z = z - 0.1 * (z - 2 * x - b + z / 2 + (z - a) / lam)
        x = x - eta * lam * (-2 * (z - 2 * x - b) + 2 * (y - 2 * x - b))
    np.testing.assert_allclose(found.x, x, rtol=1e-10)
    np.testing.assert_allclose(found.y, y, rtol=1e-10)


@pytest.mark.slow
def test_tuning_descends_to_the_known_penalty(x64):
    example = examples()["ridge"]
    solver = noiseless(300.0, num_steps=200, step_size=20.0)
    solver = dataclasses.replace(
        solver, inner=dataclasses.replace(solver.inner, num_steps=150)
    )
    run = jax.jit(dpb.solve, static_argnames="trajectory")
    solution = run(
        example.problem,
        solver,
        example.data,
        example.w0,
        key=jax.random.key(0),
        trajectory=True,
    )
    values = jax.vmap(example.hyper_objective)(solution.trajectory[0])
    grid = jnp.linspace(-8, 2, 2001)[:, None]
    assert jnp.all(jnp.diff(values) < 1e-8)
    assert values[-1] - jax.vmap(example.hyper_objective)(grid).min() < 1e-3


def test_ascent_would_be_noticed(x64):
    example = examples()["ridge"]
    x = jnp.zeros(1)
    gradient = outer_gradient(example, x, noiseless(300.0))
    better = example.hyper_objective(x - 0.5 * gradient / jnp.abs(gradient))
    worse = example.hyper_objective(x + 0.5 * gradient / jnp.abs(gradient))
    assert better < example.hyper_objective(x) < worse


@pytest.mark.slow
def test_answer_is_the_iterate_before_the_smallest_step():
    example = examples()["quadratic"]
    inner = dpb.NoisyGD(3, 1.0, step_size=0.2)
    solver = dpb.PenaltyBilevel(
        8, 5.0, inner, step_size=0.1, output=dpb.outputs.SmallestStep()
    ).with_noise(0.3)
    solution = dpb.solve(
        example.problem,
        solver,
        example.data,
        example.w0,
        key=jax.random.key(1),
        trajectory=True,
    )
    xs = np.concatenate([np.zeros((1, 3)), solution.trajectory[0]])
    chosen = np.argmin(np.linalg.norm(np.diff(xs, axis=0), axis=1))
    np.testing.assert_allclose(solution.x, xs[chosen], rtol=1e-6)
    np.testing.assert_allclose(solution.y, solution.trajectory[1][chosen], rtol=1e-6)


def test_outer_release_is_free_exactly_where_no_record_meets_x():
    inner = dpb.NoisyGD(3, 1.0, step_size=0.2)
    solver = dpb.PenaltyBilevel(8, 5.0, inner, step_size=0.1).with_noise(1.0)
    sizes = dpb.Sizes(10, 20, "disjoint")
    tuning = dpb.penalty_tuning(dpb.logistic_loss, jnp.asarray([0, 1]))
    weighting = dpb.source_weighting(dpb.logistic_loss, 2)
    outer = [
        [r for r in solver.ledger(problem, sizes).releases if "outer" in r.name]
        for problem in (tuning, weighting)
    ]
    assert outer[0] == []
    assert [r.count for r in outer[1]] == [8]


def test_shares_split_the_squared_budget():
    inner = dpb.NoisyGD(5, 1.0, step_size=0.2)
    split = (0.5, 0.3, 0.2)
    solver = dpb.PenaltyBilevel(7, 5.0, inner, step_size=0.1, budget_split=split)
    problem = examples()["quadratic"].problem
    ledger = solver.with_noise(2.0).ledger(problem, dpb.Sizes(10, 20))
    spent = [r.count / r.noise_multiplier**2 for r in ledger.releases]
    np.testing.assert_allclose(np.asarray(spent) * 2.0**2, split, rtol=1e-12)


class ChargesOneInner(dpb.PenaltyBilevel):
    """Makes the penalized runs of one solver and charges for those of the other."""

    def ledger(self, problem, sizes):
        one = dataclasses.replace(self, penalized_inner=None)
        return dpb.PenaltyBilevel.ledger(one, problem, sizes)


@pytest.mark.parametrize("kind", [dpb.PenaltyBilevel, ChargesOneInner])
def test_each_inner_solver_is_charged_for_its_own_steps_and_clip_norm(kind):
    given = {"step_size": 0.1, "penalized_inner": OTHER_INNER}
    solver = kind(7, 5.0, LOCALIZED, **given).with_noise(2.0)
    problem = examples()["quadratic"].problem
    releases = solver.ledger(problem, dpb.Sizes(10, 20)).releases
    found = [(r.count, max(q.clip_norm for q in r.queries)) for r in releases[:2]]
    exact = found == [(7 * 3, 1.0), (7 * 4, 0.7)]
    assert exact == (kind is dpb.PenaltyBilevel)


@pytest.mark.slow
def test_optax_optimizer_replaces_the_step_size():
    example = examples()["quadratic"]
    inner = dpb.NoisyGD(3, 1.0, step_size=0.2)
    rule = {"num_steps": 4, "penalty": 5.0, "inner": inner}
    plain = dpb.PenaltyBilevel(**rule, step_size=0.1).with_noise(0.1)
    same = dpb.PenaltyBilevel(**rule, step_size=optax.sgd(0.1)).with_noise(0.1)
    runs = [
        dpb.solve(example.problem, s, example.data, example.w0, key=jax.random.key(0))
        for s in (plain, same)
    ]
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-6)


CONSTANTS = dpb.bilevel.Constants(
    strong_convexity=0.5,
    upper_lipschitz=1.0,
    upper_smoothness=0.25,
    lower_lipschitz=2.0,
    lower_smoothness=0.75,
    lower_hessian_lipschitz=0.1,
)


def paper_multiplier(epsilon, delta, num_steps):
    """Noise of one outer query over its sensitivity, by the theorem's constants."""
    epsilon_0 = epsilon / math.sqrt(18 * num_steps)
    return math.sqrt(2 * math.log(1.25 * 3 * (num_steps + 1) / delta)) / epsilon_0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("num_records", [10**3, 10**6])
def test_calibrated_noise_is_well_below_the_papers(epsilon, num_records):
    problem = examples()["quadratic"].problem
    equal = (1.0, 1.0, 1.0)  # the paper gives each of the three queries the same
    inner = dpb.NoisyGD(1, 1.0, step_size=0.1)
    solver = dpb.PenaltyBilevel(20, 5.0, inner, step_size=0.1, budget_split=equal)
    budget = dpb.PrivacyBudget(epsilon, 1 / num_records**1.1)
    sizes = dpb.Sizes(num_records, num_records, "overlapping")
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
    found = plan.solver.ledger(problem, sizes).releases[-1].noise_multiplier
    assert found / paper_multiplier(epsilon, budget.delta, 20) < 0.6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"penalty": -1.0}, "penalty must be positive"),
        ({"num_steps": 2.5}, "num_steps must be an integer"),
        ({"clip_norm": math.nan}, "clip_norm must be positive"),
        ({"step_size": None}, "give step_size="),
        ({"step_size": optax.constant_schedule(1.0)}, "optax.sgd"),
        ({"output": dpb.outputs.UniformIterate()}, "draws at random"),
        ({"budget_split": (0.5, 0.5)}, "3 positive numbers, for lower solves, pena"),
    ],
)
def test_bad_field_is_named_in_the_error(fields, message):
    inner = dpb.NoisyGD(1, 1.0, step_size=0.1)
    good = {"num_steps": 3, "penalty": 1.0, "inner": inner, "step_size": 0.1}
    with pytest.raises(ValueError, match=message):
        dpb.PenaltyBilevel(**(good | fields))


def test_inner_solver_of_another_relation_is_refused():
    other = dpb.Neighbours.ADD_OR_REMOVE_ONE
    inner = dpb.NoisyGD(1, 1.0, step_size=0.1, neighbours=other)
    with pytest.raises(ValueError, match="same relation"):
        dpb.PenaltyBilevel(3, 1.0, inner, step_size=0.1)


def test_anything_but_a_solver_as_inner_is_refused():
    with pytest.raises(TypeError, match="such as NoisyGD"):
        dpb.PenaltyBilevel(3, 1.0, "gd", step_size=0.1)


def test_integers_in_a_split_do_not_overflow_inside_a_program():
    inner = dpb.NoisyGD(2, 1.0, step_size=0.1)
    most = 2**31 - 1
    solver = dpb.PenaltyBilevel(
        2, 5.0, inner, step_size=0.1, budget_split=(most, most, 3)
    ).with_noise(1.0)
    problem = dpb.source_weighting(dpb.logistic_loss, 3, ridge=0.05)

    def multiplier(solver):
        return solver._parts(problem)[0].run_noise.noise_multiplier

    inside = jax.jit(multiplier)(solver)
    np.testing.assert_allclose(inside, multiplier(solver), rtol=1e-6)


def test_an_error_about_the_split_shows_no_numbers():
    inner = dpb.NoisyGD(2, 1.0, step_size=0.1)
    with pytest.raises(ValueError, match="a tuple of 1") as error:
        dpb.PenaltyBilevel(2, 5.0, inner, step_size=0.1, budget_split=[0.123])
    assert "0.123" not in str(error.value)


@pytest.mark.slow
def test_the_forecast_is_the_noise_between_both_solutions_over_the_largest_signal():
    def no_signal(x, y, record):
        return 0 * jnp.sum(y) * record

    problem = dpb.BilevelProblem(no_signal, no_signal, x_in_records=False)
    data = dpb.Levels(jnp.ones(200), jnp.ones(300))
    w0 = jnp.zeros(1), jnp.zeros(400)
    inner = dpb.NoisyGD(5, 1.0, 0.3)
    solver = dpb.PenaltyBilevel(1, 10.0, inner, upper_clip_norm=0.5, step_size=1.0)
    sizes = dpb.Sizes(200, 300, "disjoint")
    plan = dpb.calibrate(
        problem, solver, dpb.PrivacyBudget(2.0, 1e-5), sizes=sizes, w0=w0
    )
    state = plan.solver.init(problem, w0)
    state = plan.solver.step(problem, data, state, key=jax.random.key(0))
    found = jnp.linalg.norm(state.z - state.y)
    largest = 0.3 * 5 * 0.5 / 10  # eta K C_f / lambda
    forecast = plan.report.forecast[-1].multiplied_noise_over_signal
    assert found / largest == pytest.approx(forecast, rel=0.15)


@pytest.mark.slow
def test_a_run_whose_inner_noise_hides_the_hypergradient_is_not_called_safe():
    problem = dpb.penalty_tuning(dpb.logistic_loss, np.arange(30))
    solver = dpb.PenaltyBilevel(20, 10.0, dpb.NoisyGD(10, 1.0, 1.0), step_size=20.0)

    def report(factor):
        return dpb.calibrate(
            problem,
            dpb.bilevel.Refitted(solver, INNER),
            dpb.PrivacyBudget(1.0, 1e-5),
            sizes=dpb.Sizes(155 * factor, 300 * factor, "disjoint"),
            w0=(jnp.zeros(30), jnp.zeros(30)),
        ).report

    (ratio,) = (
        row.multiplied_noise_over_signal
        for row in report(1).forecast
        if row.multiplied_noise_over_signal is not None
    )
    assert ratio > 10
    assert "every hypergradient is mostly noise" in str(report(1))
    assert "every hypergradient is mostly noise" not in str(report(100))
