import dataclasses
import functools
import math
import warnings

import dp_accounting
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core import plan
from dpbilevel.sklearn import DPRidge
from tests.cases import slow

N = 1000
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
PROBLEM = dpb.FiniteSum(lambda w, z: w * z)
BILEVEL = dpb.BilevelProblem(
    lambda x, y, z: x * y * z, lambda x, y, z: (y - x * z) ** 2
)
SAMPLINGS = {
    "full": dpb.FullBatch(),
    "poisson": dpb.Poisson(0.1),
    "tight_poisson": dpb.Poisson(0.1, capacity=150),
    "subset": dpb.FixedSize(100),
}


def noisy_gd(name="full", num_steps=5, **noise):
    return dpb.NoisyGD(
        num_steps,
        1.0,
        step_size=0.1,
        sampling=SAMPLINGS[name],
        **noise,
    )


@functools.cache
def calibrated(name="full", budget=BUDGET, **fields):
    return dpb.calibrate(PROBLEM, noisy_gd(name, **fields), budget, sizes=N)


def delta_at(solver, budget=BUDGET):
    return solver.ledger(PROBLEM, N).delta(budget.epsilon)


def with_less_noise(solver, factor):
    return dataclasses.replace(
        solver, noise_multiplier=factor * solver.noise_multiplier
    )


@pytest.mark.parametrize(
    ("name", "slack"),
    [
        pytest.param(k, 2e-3, marks=pytest.mark.slow if k.startswith("tight") else ())
        for k in SAMPLINGS
    ],
)
def test_the_noise_is_safe_and_a_little_less_is_not(name, slack):
    plan = calibrated(name)
    assert delta_at(plan.solver) <= BUDGET.delta
    assert delta_at(with_less_noise(plan.solver, 1 - slack)) > BUDGET.delta
    assert plan.report.epsilon <= BUDGET.epsilon
    assert plan.report.epsilon >= 0.99 * BUDGET.epsilon


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.9e-3])
def test_full_batches_get_the_closed_form_noise(epsilon, delta):
    budget = dpb.PrivacyBudget(epsilon, delta)
    plan = calibrated(budget=budget, num_steps=7)
    expected = dp_accounting.get_sigma_gaussian(epsilon, delta)
    assert plan.solver.run_noise.noise_multiplier == pytest.approx(expected, rel=2e-6)
    assert delta_at(plan.solver, budget) <= delta
    assert delta_at(with_less_noise(plan.solver, 0.999), budget) > delta
    assert plan.report.epsilon <= epsilon


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 10), *slow((0.01, 1000))])
def test_the_noise_multiplier_of_a_solver_is_that_of_dp_sgd(rate, steps):
    sampling = dpb.Poisson(rate) if rate < 1 else dpb.FullBatch()
    solver = dpb.NoisyGD(
        steps,
        1.0,
        0.1,
        sampling=sampling,
        noise_multiplier=1.1,
        neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE,
    )
    event = dp_accounting.GaussianDpEvent(1.1)
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    peer = dp_accounting.pld.PLDAccountant().compose(event, steps)
    found = solver.ledger(PROBLEM, 10_000).epsilon(delta=1e-5)
    assert found == pytest.approx(peer.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "remedy"), [("noise", "Use noise_multiplier"), ("sigma", "It has")]
)
def test_the_noise_of_a_whole_run_is_no_argument_of_a_solver(name, remedy):
    with pytest.raises(TypeError, match=remedy):
        dpb.NoisyGD(3, 1.0, 0.1, **{name: dpb.privacy.Gaussian(1.1, precision="float")})
    inner = dpb.NoisyGD(3, 1.0, 0.1)
    with pytest.raises(TypeError, match="Use run_noise"):
        dpb.PenaltyBilevel(3, 1.0, inner, step_size=0.1, noise_multiplier=1.1)
    with pytest.raises(ValueError, match="inner has a noise_multiplier"):
        dpb.PenaltyBilevel(3, 1.0, inner.with_noise(1.0), step_size=0.1)


@pytest.mark.parametrize(
    "name", ["full", pytest.param("subset", marks=pytest.mark.slow)]
)
def test_a_larger_budget_needs_less_noise_and_more_steps_need_more(name):
    def multiplier(epsilon=1.0, **fields):
        budget = dpb.PrivacyBudget(epsilon, 1e-5)
        return calibrated(name, budget, **fields).solver.release_noise.noise_multiplier

    assert multiplier(2.0) < multiplier() < multiplier(num_steps=20)


def test_noise_in_physical_units_is_twice_as_large_when_replacing():
    stds = [
        calibrated(neighbours=relation).report.ledger[0].noise_std
        for relation in (dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE)
    ]
    assert stds[0] == pytest.approx(2 * stds[1])


def test_what_the_solver_had_before_does_not_matter():
    fresh = calibrated().solver
    again = dpb.calibrate(PROBLEM, fresh.with_noise(77.0), BUDGET, sizes=N).solver
    assert again == fresh
    assert fresh.sizes == N


@pytest.mark.parametrize("people", ["disjoint", "overlapping"])
def test_disjoint_people_get_less_noise(people):
    inner = dpb.NoisyGD(4, 1.0, step_size=0.1)
    solver = dpb.PenaltyBilevel(3, 5.0, inner, step_size=0.1)
    sizes = dpb.Sizes(500, 800, people)
    plan = dpb.calibrate(BILEVEL, solver, BUDGET, sizes=sizes)
    ledger = plan.solver.ledger(BILEVEL, sizes)
    assert ledger.delta(1.0) <= BUDGET.delta
    whole = dp_accounting.get_sigma_gaussian(1.0, 1e-5)
    if people == "overlapping":
        assert plan.solver.run_noise.noise_multiplier == pytest.approx(whole, rel=2e-6)
    else:
        assert plan.solver.run_noise.noise_multiplier < whole


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf, None, True])
def test_budgets_need_a_positive_finite_epsilon(epsilon):
    with pytest.raises(ValueError, match=r"epsilon must be .*positive and finite"):
        dpb.PrivacyBudget(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [-1e-9, math.nan, 1.0, 2.0, None])
def test_budgets_need_a_delta_from_zero_to_below_one(delta):
    with pytest.raises(ValueError, match="PrivacyBudget: delta must be"):
        dpb.PrivacyBudget(1.0, delta)


def test_pure_privacy_is_refused_for_gaussian_noise():
    with pytest.raises(ValueError, match=r"NoisyGD has no noise for delta = 0"):
        calibrated(budget=dpb.PrivacyBudget(1.0, 0.0))


def test_a_large_epsilon_is_reached_with_poisson_batches():
    # At epsilon 12 a thousand overflows of 1e-12 would cost more than delta.
    budget = dpb.PrivacyBudget(12.0, 1e-5)
    plan = calibrated("poisson", budget, num_steps=1000)
    assert delta_at(plan.solver, budget) <= 1e-5
    assert 5 < plan.report.epsilon <= 12


def test_a_delta_of_one_over_the_number_of_records_is_warned_of():
    with pytest.warns(UserWarning, match=r"delta = 0\.5 is not below one over"):
        calibrated(budget=dpb.PrivacyBudget(1.0, 0.5))


def test_batches_that_overflow_are_planned_like_full_ones():
    def noise(sampling):
        solver = dpb.NoisyGD(5, 1.0, step_size=0.1, sampling=sampling)
        plan = dpb.calibrate(PROBLEM, solver, BUDGET, sizes=N)
        return float(plan.solver.noise_multiplier)

    overflowing = dpb.Poisson(0.1, capacity=110)
    assert overflowing.failure(dpb.Neighbours.REPLACE_ONE, N) > BUDGET.delta
    assert noise(overflowing) == pytest.approx(noise(dpb.FullBatch()), rel=2e-3)
    assert noise(dpb.Poisson(0.1)) < noise(overflowing) / 2


def test_subsets_are_refused_under_add_or_remove_before_any_data():
    with pytest.raises(ValueError, match="REPLACE_ONE only"):
        calibrated("subset", neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE)


def test_calibration_is_deterministic_and_touches_no_arrays():
    first, second = calibrated("subset"), calibrated.__wrapped__("subset")
    assert first.solver == second.solver
    assert isinstance(first.solver.run_noise.noise_multiplier, float)
    assert not isinstance(first.report.epsilon, jnp.ndarray)


@pytest.mark.parametrize("tolerance", [1e-12, 5e-4])
@pytest.mark.parametrize("least", [1.0, 0.37, 1.005, 1 / 3, 2.0**20, 1e-7])
@pytest.mark.parametrize("start", [1.0, 1 / 3])
@pytest.mark.parametrize("step", [2.0, 1.005])
def test_the_least_scale_is_safe_and_hardly_above_the_least(
    least, start, tolerance, step
):
    def delta(scale):
        return 1e-5 * (least / scale) ** 3  # at the allowed one where they are equal

    scale = plan.least_safe(delta, 1e-5, start, tolerance, step)
    assert delta(scale) <= 1e-5
    assert scale <= least * (1 + 2 * tolerance)
    # A second search from the answer, as the fine accountant makes, keeps it.
    again = plan.least_safe(delta, 1e-5, scale, tolerance, 1.005)
    assert delta(again) <= 1e-5
    assert again <= least * (1 + 2 * tolerance)


def test_no_more_noise_is_taken_where_less_has_the_same_delta():
    scale = plan.least_safe(lambda s: 1e-5 if s > 0.3 else 1.0, 1e-5, 1.0, 1e-12, 1.005)
    assert 0.3 < scale < 0.3 * (1 + 1e-11)


def test_each_delta_is_computed_once():
    asked = []

    def delta(scale):
        asked.append(scale)
        return 1e-5 * (0.7 / scale) ** 3

    plan.least_safe(delta, 1e-5, 1.0, 2e-3)
    assert len(asked) == len(set(asked)) < 12


@pytest.mark.parametrize("above", [0.0, 1.0])
def test_a_delta_that_jumps_is_left_on_the_safe_side(above):
    def delta(scale):
        return (0.5 if above else math.nan) if scale < 3.0 else 0.0

    for allowed in (0.0, 1e-6):
        scale = plan.least_safe(delta, allowed, 1.0, 1e-9)
        assert 3.0 <= scale <= 3.0 * (1 + 1e-8)


@pytest.mark.slow
def test_a_large_delta_is_warned_of_once_by_the_name_and_at_the_line_of_the_call():
    ridge = DPRidge(1.0, 0.5, bounds=(-1.0, 1.0), target_bounds=(-1.0, 1.0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ridge.fit(np.ones((9, 2)), np.ones(9))
    (found,) = [w for w in said if "not below one over" in str(w.message)]
    assert str(found.message).startswith("DPRidge.fit: delta = 0.5")
    assert found.filename == __file__
