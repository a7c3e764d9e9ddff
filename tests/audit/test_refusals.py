"""Audits that could find nothing are refused or say so; they never pass quietly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import audit

ONE, ZERO = jnp.asarray(1.0), jnp.asarray(0.0)


def noisy(data, *, key):
    return data + jax.random.normal(key)


def tried(run=noisy, data=ONE, neighbour=ZERO, claim=None, **options):
    claim = audit.gaussian_claim(1.0) if claim is None else claim
    options = {"runs": 1000} | options
    return audit.trade_off(
        run, data, neighbour, claim, key=jax.random.key(1), **options
    )


def returns(value):
    return lambda data, *, key: value


def where_positive(value):
    return lambda data, *, key: jnp.where(data > 0, value, noisy(data, key=key))


@pytest.mark.parametrize("same", [ONE, {"a": jnp.asarray([1.0, jnp.nan])}])
def test_a_pair_that_is_equal_is_refused(same):
    with pytest.raises(ValueError, match="change a record"):
        tried(data=same, neighbour=jax.tree.map(np.array, same))


@pytest.mark.parametrize(
    ("data", "neighbour", "message"),
    [
        (jnp.zeros(3), jnp.zeros(2), r"same shape, got \(3,\) and \(2,\)"),
        ({"a": ONE}, {"a": jnp.zeros(1)}, r"data\['a'\].* the same shape"),
        ({"a": ONE}, {"b": ZERO}, "different structures"),
        ({"a": ONE}, ONE, "different structures"),
    ],
)
def test_a_pair_of_another_structure_or_shape_is_refused(data, neighbour, message):
    with pytest.raises(ValueError, match=message):
        tried(data=data, neighbour=neighbour)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_observations_that_are_finite_on_neither_side_are_refused(value):
    with pytest.raises(ValueError, match="1 observed numbers are never finite"):
        tried(returns(value))
    with pytest.raises(ValueError, match="1 observed numbers are never finite"):
        tried(lambda data, *, key: (noisy(data, key=key), value))


def test_observations_that_are_the_same_in_every_run_are_refused():
    with pytest.raises(ValueError, match="all runs agree"):
        tried(returns(jnp.arange(3.0)))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_value_that_is_not_finite_on_one_side_only_is_a_violation(value):
    assert not tried(where_positive(value)).passed
    assert not tried(where_positive(value), data=ZERO, neighbour=ONE).passed


def test_infinities_and_constants_that_differ_between_the_sides_are_violations():
    assert not tried(lambda data, *, key: jnp.where(data > 0, 1, -1) * jnp.inf).passed
    assert not tried(lambda data, *, key: data).passed


def test_a_constant_beside_noise_is_accepted():
    assert tried(lambda data, *, key: (1.0, noisy(data, key=key))).passed


def test_a_claim_or_statistic_that_is_nan_is_refused():
    with pytest.raises(ValueError, match="claim is NaN"):
        tried(claim=lambda epsilons: epsilons * np.nan)
    with pytest.raises(ValueError, match="statistic returned NaN"):
        tried(statistic=lambda rows: rows[:, 0] * np.nan)
    with pytest.raises(ValueError, match="one number a run"):
        tried(statistic=lambda rows: rows)


def test_a_statistic_may_be_infinite():
    def ratio(rows):
        return np.where(rows[:, 0] > 0.5, np.inf, -np.inf)

    assert not tried(statistic=ratio, claim=audit.gaussian_claim(0.1)).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"claim": 1.0},
            "claim must be a function, such as audit",
        ),
        ({"runs": 2e3}, "runs must be an integer, got 2000.0"),
        ({"runs": True}, "runs must be an integer"),
        ({"run": 3}, r"run must be a function, got 3"),
        ({"run": returns(None)}, "run returned no numbers"),
        ({"run": returns(np.zeros(0))}, "run returned no numbers"),
        ({"run": returns({"a": "text"})}, "arrays of real numbers, got str"),
        ({"run": returns(np.ones(2) * 1j)}, "arrays of real numbers, got complex"),
        ({"run": lambda data, *, key: key}, "arrays of real numbers, got key"),
    ],
)
def test_arguments_of_another_type_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        tried(**options)


def test_too_few_runs_are_refused():
    with pytest.raises(ValueError, match="runs must be at least 1000"):
        tried(runs=10)


@pytest.mark.parametrize("audited", [audit.audit_solver, audit.noise_reuse])
def test_a_plan_is_refused_in_favour_of_its_solver(audited):
    budget = dpb.PrivacyBudget(1.0, 1e-5)
    problem = dpb.FiniteSum(lambda w, z: w * z)
    solver = dpb.NoisyGD(1, 1.0, step_size=1.0)
    plan = dpb.calibrate(problem, solver, budget, sizes=10, w0=ZERO)
    with pytest.raises(TypeError, match=f"{audited.__name__}: .*; pass plan.solver"):
        audited(plan, key=jax.random.key(0))
    with pytest.raises(TypeError, match="must be an instance of AbstractSolver"):
        audited(NotImplemented, key=jax.random.key(0))


def test_runs_that_show_less_than_a_quarter_of_the_claim_are_inconclusive():
    outcome = tried(claim=audit.gaussian_claim(9.0), runs=2000)
    assert 0 < outcome.measured_mu < outcome.claimed_mu / 4
    assert outcome.passed
    assert not outcome.conclusive
    assert "inconclusive: no violation found at 1600 of 2000 runs" in str(outcome)
    assert "can hide; give more runs" in str(outcome)


def test_runs_that_show_nothing_are_inconclusive():
    outcome = tried(data=0.01 * ONE, claim=audit.gaussian_claim(0.01))
    assert outcome.measured_mu == 0
    assert "inconclusive: " in str(outcome)
    assert "nothing of the claimed mu is seen either" in str(outcome)
    assert "800 of 1000 runs a side (200 for the pilot)" in str(outcome)


def test_runs_that_show_most_of_the_claim_are_conclusive():
    outcome = tried(runs=5000)
    assert outcome.conclusive
    assert "inconclusive" not in str(outcome)


def test_the_worst_case_of_a_class_of_ones_own_can_be_registered():
    class Own(dpb.NoisyGD):
        """Solves problems of which another canary leaks most."""

    problem = dpb.FiniteSum(lambda w, z: 2 * z * w)
    audit.worst_case.register(Own, lambda solver, reads, zeros: (problem, zeros))
    solvers = (
        kind(2, 1.0, step_size=0.1).with_noise(1.0).with_sizes(10)
        for kind in (Own, dpb.NoisyGD)
    )
    own, usual = (audit.canaries(solver)["records"].problem for solver in solvers)
    assert own is problem
    assert usual is not problem
