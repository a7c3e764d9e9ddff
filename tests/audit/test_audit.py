import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.audit import claims
from dpbilevel.audit.claims import TradeOffCurve
from dpbilevel.privacy.accounting import profiles
from tests.audit.runs import LONG, SHORT, audited, audited_once, claim_of, outcomes
from tests.bilevel.test_penalty import planned_penalty
from tests.bilevel.test_single_loop import planned_single_loop
from tests.cases import found, slow, with_mechanism
from tests.onelevel.test_inner_solvers import planned_noisy_gd, sampled

SOLVERS, CONTRACT = found("AUDITS"), found("CONTRACT")
ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE


# In short some of each family, which the contract of all solvers does not measure:
# one level, correlated noise, declared constants, a game and a draw. The mutants of
# two levels come with a sound copy.
AT_ONCE = {"NoisyGD", "CorrelatedGD", "ImplicitBilevel, clipped, disjoint"}
AT_ONCE |= {"InexactProximalPoint", "ExponentialMechanism"}
CASES = [
    pytest.param(
        name,
        runs,
        marks=() if runs == SHORT and name in AT_ONCE else pytest.mark.slow,
    )
    for name in SOLVERS
    for runs in (SHORT, LONG)
]


@pytest.mark.parametrize(("name", "runs"), CASES)
def test_no_solver_leaks_more_than_its_ledger_claims(name, runs):
    for outcome in outcomes(name, runs):
        assert outcome.passed, str(outcome)


@pytest.mark.parametrize(
    ("name", "runs"), [case for case in CASES if SOLVERS[case.values[0]].exact]
)
def test_gaussian_solvers_leak_most_of_what_their_ledger_claims(name, runs):
    case = SOLVERS[name]
    # A lower bound at 1e-4: from few runs it is lower by a tenth, give or take.
    least = {SHORT: 0.85, LONG: 0.9}[runs]
    canaries = audit.canaries(case.solver, x_in_records=case.x_in_records)
    for outcome, canary in zip(outcomes(name, runs), canaries.values(), strict=True):
        events = canary.solver.ledger(canary.problem, canary.solver.sizes).events()
        person = outcome.name.split(", ")[1]
        assert outcome.claimed_mu == pytest.approx(
            profiles.gaussian_mu(events[person]), rel=case.tolerance
        )
        assert outcome.measured_mu >= least * outcome.claimed_mu


def test_every_solver_of_the_package_is_audited():
    audited_classes = {type(case.solver) for case in SOLVERS.values()}
    assert audited_classes == {type(case.solver) for case in CONTRACT.values()}


@pytest.mark.parametrize("name", CONTRACT)
def test_an_adversary_sees_at_least_what_is_released(name):
    case = CONTRACT[name]

    def compare(w0):
        solver, state = case.solver, case.solver.init(case.problem, w0)
        seen = {id(leaf) for leaf in jax.tree.leaves(solver.adversary_view(state))}
        assert seen >= {id(leaf) for leaf in jax.tree.leaves(solver.released(state))}

    jax.eval_shape(compare, case.w0)  # traced: nothing is computed


@pytest.mark.parametrize(
    ("solver", "smaller"),
    [
        (sampled(dpb.Poisson(0.2), ADD_OR_REMOVE), dpb.Poisson(0.17)),
        *slow((sampled(dpb.FixedSize(2)), dpb.FixedSize(1))),
    ],
)
def test_the_claim_of_a_smaller_batch_is_rejected(solver, smaller, monkeypatch):
    # A tenth of those below 8: each claim is computed at every one.
    some = claims._EPSILONS[claims._EPSILONS < 8][::10]
    monkeypatch.setattr(claims, "_EPSILONS", some)
    claim = claim_of(dataclasses.replace(solver, sampling=smaller))
    broken, sound = audited_once(solver, claim, None)
    assert not broken.passed
    assert sound.passed


@pytest.mark.parametrize("others", [-1.0, 0.0])
def test_disjoint_people_are_audited_one_level_at_a_time(others):
    found = audit.canaries(planned_penalty("disjoint"), others=others)
    assert set(found) == {"upper", "lower"}
    upper = found["upper"]
    same = jax.tree.map(jnp.array_equal, upper.data, upper.neighbour)
    assert bool(same.lower)
    assert not bool(same.upper)


def test_overlapping_and_shared_people_change_both_levels():
    for people in ("overlapping", "shared"):
        canary = audit.canaries(planned_penalty(people))["person"]
        assert canary.data.is_shared == (people == "shared")
        for role in ("upper", "lower"):
            assert getattr(canary.data, role)[0] == -getattr(canary.neighbour, role)[0]


def test_canaries_respect_which_levels_meet_x():
    for reads in (True, False, ("upper",), ("lower",)):
        canary = audit.canaries(planned_penalty("disjoint"), x_in_records=reads)[
            "lower"
        ]
        traced = canary.problem.traced(canary.w0, canary.data)
        assert traced.x_in_records == canary.problem.x_in_records


def test_under_add_or_remove_the_neighbour_contributes_nothing():
    solver = planned_noisy_gd(neighbours=ADD_OR_REMOVE)
    np.testing.assert_array_equal(audit.canaries(solver)["records"].neighbour, 0)


def test_smaller_canary_sizes_keep_the_claim():
    solver = dpb.NoisyGD(2, 1.0, step_size=0.1, sampling=dpb.FixedSize(200))
    solver = solver.with_noise(1.0).with_sizes(20_000)
    canary = audit.canaries(solver)["records"]
    assert canary.solver.sizes == 200
    assert canary.solver.sampling.size == 2
    assert canary.data.shape == (200,)
    epsilons = np.asarray([0.5, 2.0])
    np.testing.assert_allclose(canary.claim(epsilons), claim_of(solver)(epsilons))


def test_curve_of_a_gaussian_claim_is_the_gaussian_trade_off():
    rates = np.asarray([1e-3, 0.1, 0.5, 0.9])
    curve = TradeOffCurve(audit.gaussian_claim(1.3))
    normal = scipy.stats.norm
    np.testing.assert_allclose(
        curve(rates), normal.cdf(normal.ppf(rates) + 1.3), rtol=1e-3
    )


def test_pure_claim_is_that_of_randomized_response():
    claim = audit.pure_claim(1.0)
    right = math.e / (1 + math.e)
    for epsilon in (0.0, 0.4, 1.0, 2.0):
        expected = max(0.0, right - math.exp(epsilon) * (1 - right))
        assert claim(np.asarray(epsilon)) == pytest.approx(expected)


def randomized_response(data, *, key):
    truth = jax.random.bernoulli(key, math.e / (1 + math.e))
    return jnp.where(truth, data, 1 - data)


def responses(claim, statistic=None):
    return audit.trade_off(
        randomized_response,
        jnp.asarray(1.0),
        jnp.asarray(0.0),
        claim,
        key=jax.random.key(3),
        runs=20_000,
        statistic=statistic,
    )


def test_a_mechanism_of_the_user_is_audited_against_a_pure_claim():
    assert responses(audit.pure_claim(1.0)).passed
    assert not responses(audit.pure_claim(0.9)).passed


def test_a_statistic_of_the_user_replaces_the_fitted_one():
    assert not responses(audit.pure_claim(0.9), lambda rows: rows[:, 0]).passed
    # One that looks away sees nothing.
    assert responses(audit.pure_claim(0.9), lambda rows: 0 * rows[:, 0]).passed


@pytest.mark.slow
def test_a_problem_of_the_user_is_audited_on_neighbours_of_its_own():
    case = CONTRACT["noisy_gd"]
    problem, data, w0 = case.problem, case.data, case.w0
    solver = case.solver.with_noise(1.0).with_sizes(case.sizes)
    neighbour = data | {"label": data["label"].at[0].multiply(-1)}
    outcome = audit.trade_off(
        audit.SolverRun(problem, solver, w0),
        data,
        neighbour,
        audit.ledger_claims(solver.ledger(problem, solver.sizes))["records"],
        key=jax.random.key(4),
        runs=2000,
    )
    assert outcome.passed


def test_outcome_promises_nothing_and_is_plain_json():
    passed, failed = responses(audit.pure_claim(1.0)), responses(audit.pure_claim(0.5))
    runs = "16000 of 20000 runs a side (4000 for the pilot)"
    assert f"  no violation found at {runs}" in str(passed)
    assert f"VIOLATION at {runs}" in str(failed)
    assert "can hide" in str(passed)
    assert "if the two datasets differ in one person's records only" in str(failed)
    for outcome in (passed, failed):
        assert "verified" not in str(outcome).lower()


def test_outcome_has_at_most_six_cuts_and_keeps_its_pilot_apart():
    outcome = outcomes("NoisyGD")[0]
    assert len(outcome.cuts) <= 6
    assert outcome.runs == 0.8 * SHORT
    assert outcome.runs + outcome.pilot == SHORT


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda: audit.canaries(dpb.NoisyGD(1, 1.0, step_size=1.0)),
            "give the solver sizes",
        ),
        (lambda: audit.pure_claim(-1.0), "non-negative"),
        (lambda: audit.refutes(3, 2, 5, 0.1, audit.pure_claim(1.0)), "needs 0 <="),
    ],
)
def test_misuse_is_refused_with_the_remedy(broken, message):
    with pytest.raises(ValueError, match=message):
        broken()


@pytest.mark.parametrize(
    "name", ["NoisyGD", *slow("PenaltyBilevel, x in lower", "Refitted")]
)
def test_solvers_draw_every_noise_afresh(name):
    case = SOLVERS[name]
    # Sums on the grid take longer to compile.
    precision = "float" if name == "NoisyGD" else "grid"
    found = audit.noise_reuse(
        case.solver.with_precision(precision),
        key=jax.random.key(0),
        x_in_records=case.x_in_records,
    )
    canaries = audit.canaries(case.solver, x_in_records=case.x_in_records)
    canary = next(iter(canaries.values()))
    releases = canary.solver.ledger(canary.problem, canary.solver.sizes).releases
    assert found.streams == 2 * sum(release.count for release in releases)
    assert found.passed, str(found)
    # Of levels whose lower variable has a third leaf, one number, in all fits of it.
    assert found.left_out == {"PenaltyBilevel, x in lower": 4 + 4}.get(name, 0)


@pytest.mark.slow
def test_noises_of_other_lengths_are_counted_where_they_are_not_compared():
    found = audit.noise_reuse(SOLVERS["SelectedSources"].solver, key=jax.random.key(0))
    # Two fits of two steps: two long leaves and a short one each. And the scores.
    assert (found.streams, found.left_out) == (8, 4 + 1)
    assert str(found).endswith("; 5 of other lengths were not compared")


@pytest.mark.slow
def test_a_defect_that_depends_on_the_planned_size_is_rejected():
    class RoundsItsShare(dpb.privacy.Gaussian):
        """Takes the sensitivity in half precision, where C / 70 000 000 is zero."""

        def release(self, bounded, *, key):
            # Unlike a conversion to float16 and back, no compiler leaves this out.
            share = jnp.asarray(bounded.contribution, jnp.float32)
            share = jax.lax.reduce_precision(share, 5, 10)
            broken = dpb.privacy.Bounded(
                bounded.raw, 0.01 * bounded.contribution + share
            )
            return dpb.privacy.Gaussian.release(self, broken, key=key)

    solver = with_mechanism(planned_noisy_gd(), RoundsItsShare)
    assert audited(solver.with_sizes(2), runs=SHORT // 5).passed
    assert not audited(solver.with_sizes(70_000_000), runs=SHORT // 5).passed


@pytest.mark.slow
def test_single_loop_leaks_nine_tenths_where_both_records_move_one_block():
    # y stays at zero and a public push keeps v negative, so the lower record shows in
    # its Hessian-vector product alone: on the side where the upper record pushes v.
    problem = dpb.BilevelProblem(
        lambda x, y, z: z * jnp.sum(y),
        lambda x, y, z: 0.5 * z * jnp.sum(y) ** 2,
        upper_public=lambda x, y: -100.0 * jnp.sum(y),
        y_set=dpb.sets.Box(0.0, 0.0),
        x_in_records=False,
    )
    solver = planned_single_loop("overlapping", num_steps=12)
    first, second = (
        dpb.Levels(*(jnp.zeros(n).at[0].set(z) for n in (10, 20))) for z in (1e6, -1e6)
    )
    (event,) = solver.ledger(problem, solver.sizes).events().values()
    outcome = audit.trade_off(
        audit.SolverRun(problem, solver, (jnp.zeros(1), jnp.zeros(1))),
        first,
        second,
        audit.event_claim(event, dpb.Neighbours.REPLACE_ONE),
        key=jax.random.key(9),
        runs=SHORT,
    )
    assert outcome.passed, str(outcome)
    assert outcome.measured_mu >= 0.9 * outcome.claimed_mu, str(outcome)
