"""Accountants in one line, against dp-accounting, and the records that a plan needs."""

import math

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

import dpbilevel as dpb
from dpbilevel.core import plan
from tests.cases import fast_first, slow
from tests.problems import QUADRATIC

BOTH = pytest.mark.parametrize("relation", fast_first(dpb.Neighbours))
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
PROBLEM = dpb.FiniteSum(dpb.logistic_loss)
W0 = jax.ShapeDtypeStruct((50,), np.float32)


def grid(count, seed=0):
    """Settings of DP-SGD at random, from a few noisy steps to many quiet ones."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        rate = float(10 ** draw.uniform(-3, -0.3)) if number % 5 else 1.0
        steps = int(10 ** draw.uniform(0, 2 if rate == 1 else 3.5))
        # Epsilons from about .1 to 10.
        noise = max(0.6, rate * math.sqrt(steps) * 10 ** draw.uniform(-0.3, 1))
        delta = float(10 ** draw.uniform(-8, -4))
        yield {"noise_multiplier": noise, "rate": rate, "steps": steps, "delta": delta}


def theirs(relation, *, noise_multiplier, rate, steps, delta):
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    relation = dp_accounting.NeighboringRelation[relation.name]
    return PLDAccountant(relation).compose(event, steps).get_epsilon(delta)


def differs(case, relation, factor=1.0):
    """How far the epsilon of `factor` times the noise is from dp-accounting's."""
    noise = factor * case["noise_multiplier"]
    ours = dpb.epsilon(**case | {"noise_multiplier": noise}, neighbours=relation)
    return abs(ours - theirs(relation, **case)) / max(ours, 1e-9)


QUIET = {"noise_multiplier": 4.0, "rate": 0.1, "steps": 100, "delta": 1e-6}


@BOTH
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_epsilons_are_those_of_dp_accounting(relation, rate):
    steps = 2 if rate == 1 else 100
    assert differs(QUIET | {"rate": rate, "steps": steps}, relation) < 1e-5


@pytest.mark.slow
@BOTH
def test_epsilons_of_100_settings_are_those_of_dp_accounting(relation):
    assert max(differs(case, relation) for case in grid(100)) < 1e-3


def test_other_noise_would_be_noticed():  # the control of the tests above
    assert differs(QUIET, dpb.Neighbours.REPLACE_ONE, 1.002) > 1e-3
    assert differs(QUIET, dpb.Neighbours.REPLACE_ONE, 2.0) > 0.5


@BOTH
def test_the_three_accountants_invert_each_other(relation):
    for case in grid(5, seed=1):
        run = {name: case[name] for name in ("rate", "steps")} | {
            "neighbours": relation
        }
        epsilon = dpb.epsilon(**case, neighbours=relation)
        found = dpb.delta(
            noise_multiplier=case["noise_multiplier"], epsilon=epsilon, **run
        )
        assert 0.99 * case["delta"] <= found <= 1.0001 * case["delta"]
        budget = {"epsilon": epsilon, "delta": case["delta"]}
        noise = dpb.noise_multiplier(**budget, **run)
        assert noise == pytest.approx(case["noise_multiplier"], rel=2e-3)
        assert dpb.epsilon(
            **case | {"noise_multiplier": noise}, neighbours=relation
        ) <= (epsilon * 1.000001)


@BOTH
@pytest.mark.parametrize("rate", [1.0, 0.02])
def test_the_multiplier_of_a_solver_is_in_units_of_the_sensitivity(relation, rate):
    sampling = dpb.FullBatch() if rate == 1 else dpb.Poisson(rate)
    noise = 3.0 / relation.contributions  # 2 C under replace-one, else C
    solver = dpb.NoisyGD(
        20, 1.0, 0.1, sampling=sampling, noise_multiplier=noise, neighbours=relation
    )
    expected = solver.ledger(PROBLEM, 10_000).epsilon(1e-6)
    found = dpb.epsilon(
        noise_multiplier=3.0, rate=rate, steps=20, delta=1e-6, neighbours=relation
    )
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_relation_is_replace_one_unless_another_is_named():
    case = {"noise_multiplier": 2.0, "rate": 0.1, "steps": 10, "delta": 1e-5}
    assert dpb.epsilon(**case) == dpb.epsilon(**case, neighbours="replace_one")
    assert dpb.epsilon(**case) > dpb.epsilon(**case, neighbours="add_or_remove_one")


GOOD = {"noise_multiplier": 1.0, "rate": 0.1, "steps": 10, "delta": 1e-5}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rate": 0}, r"rate must be in \(0, 1\], the batch size over"),
        (
            {"rate": 256},
            r"rate must be in \(0, 1\], the batch size over .*, got 256",
        ),
        ({"rate": math.nan}, r"rate must be in \(0, 1\]"),
        ({"rate": "a"}, "rate must be a number"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"steps": 2.5}, "steps must be an integer of at least 1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be positive"),
        ({"noise_multiplier": 0}, "noise_multiplier must be positive"),
        ({"delta": 0}, "delta must be above 0 and well below one over"),
        ({"delta": 1}, "delta must be .* well below one over the number of records"),
        ({"neighbours": "swap"}, "neighbours must be one of"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(wrong, said):
    with pytest.raises(ValueError, match=f"^epsilon: {said}"):
        dpb.epsilon(**GOOD | wrong)


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf])
def test_an_impossible_epsilon_is_refused(epsilon):
    run = {"rate": 0.1, "steps": 10}
    with pytest.raises(
        ValueError, match=r"^noise_multiplier: epsilon must be positive"
    ):
        dpb.noise_multiplier(epsilon=epsilon, delta=1e-5, **run)
    if epsilon != 0:  # the total variation
        with pytest.raises(ValueError, match=r"^delta: epsilon must be non-negative"):
            dpb.delta(noise_multiplier=1.0, epsilon=epsilon, **run)


def test_a_budget_that_no_noise_meets_is_refused():
    with pytest.raises(ValueError, match=r"no noise meets the budget\. Raise epsilon"):
        dpb.noise_multiplier(epsilon=1e-25, delta=1e-30, rate=1, steps=1)


def largest_noise(solver, sizes, w0, problem=PROBLEM):
    report = plan.calibrated(problem, solver, BUDGET, sizes=sizes, w0=w0).report
    return max(row.noise_norm_over_clip_norm for row in report.forecast)


@pytest.mark.parametrize("ratio", [0.3, *slow(0.05)])
@pytest.mark.parametrize(
    "sampling",
    [
        dpb.FullBatch(),
        pytest.param(dpb.Poisson(0.05), marks=pytest.mark.slow),
        pytest.param(dpb.FixedSize(512), marks=pytest.mark.slow),
    ],
)
def test_with_the_records_needed_the_noise_is_at_most_the_ratio(sampling, ratio):
    solver = dpb.NoisyGD(50, 1.0, 1.0, sampling=sampling)
    count = dpb.records_needed(PROBLEM, solver, BUDGET, ratio, w0=W0)
    assert largest_noise(solver, count, W0) <= ratio
    assert largest_noise(solver, int(0.997 * count), W0) > ratio


@pytest.mark.slow
def test_records_of_two_levels_keep_their_proportion():
    problem, w0 = QUADRATIC.problem, QUADRATIC.w0
    solver = dpb.bilevel.F2SA(5, 4.0, step_size=0.1, lower_step_size=0.1)
    given = dpb.Sizes(1, 5, "disjoint")
    found = dpb.records_needed(problem, solver, BUDGET, w0=w0, sizes=given)
    assert found.people is dpb.People.DISJOINT
    assert found.lower == pytest.approx(5 * found.upper, abs=5)
    assert largest_noise(solver, found, w0, problem) <= 0.3
    equal = dpb.records_needed(problem, solver, BUDGET, w0=w0)
    assert equal == dpb.Sizes(equal.upper, equal.upper, "overlapping")


@pytest.mark.parametrize(
    ("solver", "budget", "ratio", "said"),
    [
        (
            dpb.NoisyGD(5, 1.0, 1.0),
            dpb.PrivacyBudget(1.0, 0),
            0.3,
            "no noise for delta",
        ),
        (dpb.NoisyGD(5, 1.0, 1.0), BUDGET, 1e-14, "Use a larger epsilon, fewer steps"),
        (dpb.search.RandomSearch(5, 1.0), BUDGET, 0.3, "adds no noise to means"),
    ],
)
def test_where_no_number_is_enough_the_reason_is_given(solver, budget, ratio, said):
    with pytest.raises(ValueError, match=f"^records_needed: .*{said}"):
        dpb.records_needed(PROBLEM, solver, budget, ratio, w0=W0)
