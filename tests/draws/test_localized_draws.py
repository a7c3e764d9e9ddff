"""Draws in rounds, each about the last one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.audit.worst_cases import _LIPSCHITZ
from dpbilevel.draws import LocalizedDraws, RegularizedExponentialMechanism
from dpbilevel.privacy.accounting import profiles
from tests.cases import Audited, Case, planned
from tests.draws.test_regularized import ALTERNATING, LEANING, smooth
from tests.draws.test_untimed import UNTIMED
from tests.problems import LOWER

DRAW = RegularizedExponentialMechanism(ALTERNATING, convex=True, dimension=1)
CONTRACT = {
    "localized_draws": Case(
        LEANING, LocalizedDraws(DRAW, (4.0, 2.0)), LOWER, jnp.zeros(1)
    ),
}


def planned_localized(kind=LocalizedDraws):
    """The set is so wide that the law is that of Gaussian releases."""
    draw = RegularizedExponentialMechanism(
        ALTERNATING, convex=True, regularizer=1.0, dimension=1
    )
    return planned(kind(draw, (1.0, 0.5), (1.0, 2.0))).with_counts(_LIPSCHITZ)


AUDITS = {
    # Rounding of single precision is part of the claim.
    "LocalizedDraws": Audited(planned_localized(), tolerance=2e-2),
}


def localized(radii, split=None, sampler=ALTERNATING, dimension=1):
    draw = RegularizedExponentialMechanism(sampler, convex=True, dimension=dimension)
    return LocalizedDraws(draw, radii, split)


def test_rounds_cost_together_what_one_gaussian_release_costs():
    with jax.enable_x64(True):
        budget = dpb.PrivacyBudget(1.0, 1e-6)
        solver = localized((1.0, 0.3, 0.1), (1.0, 2.0, 5.0))
        plan = dpb.calibrate(smooth(), solver, budget, sizes=40)
        ledger = plan.solver.ledger(smooth(), 40)
    (event,) = ledger.events().values()
    whole = 1 / float(plan.solver.draw.mechanism.calibrated())
    assert profiles.gaussian_mu(event) == pytest.approx(whole, rel=1e-6)
    found = [float(part.mechanism.calibrated()) for part in plan.solver.rounds]
    assert 1 / np.square(found) == pytest.approx(whole**2 * np.array([1, 2, 5]) / 8)
    assert plan.report.accountant == "exact Gaussian composition"
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL


def test_narrower_rounds_bend_more_and_draw_at_a_higher_rate():
    with jax.enable_x64(True):
        solver = localized((1.0, 0.25)).with_noise(4.0).with_sizes(40)
        first, last = (part.plan(smooth(), 40) for part in solver.rounds)
    # mu = m S sqrt(2 d) / R and k = mu / (m S)^2.
    assert last.rate / first.rate == pytest.approx(4.0)
    bends = [p.potential.quadratic / p.rate for p in (first, last)]
    assert bends[1] / bends[0] == pytest.approx(4.0)


def test_the_promised_excess_holds_and_is_the_sum_over_rounds():
    """Linear losses, by quadrature on the interval: there a draw is worst."""
    problem = dataclasses.replace(LEANING, smoothness=1e-9)
    with jax.enable_x64(True):
        one = RegularizedExponentialMechanism(UNTIMED, convex=True, dimension=1)
        budget = dpb.PrivacyBudget(1.0, 1e-6)
        solver = dpb.calibrate(problem, one, budget, sizes=10_000).solver
        noise, bend, slip = solver.bound_terms(problem)
        promised = solver.bound(problem)
        near = solver.bound(problem, distance=0.5)
        rounds = localized((1.0, 0.3), (1.0, 1.0), UNTIMED)
        rounds = dpb.calibrate(problem, rounds, budget, sizes=10_000).solver
        parts = [part.bound_terms(problem) for part in rounds.rounds]
        whole = rounds.bound(problem)
    points = np.linspace(-1, 1, 200_001)
    worst = 0.0
    for slope in (0.01, 0.1, 0.3, 1.0):
        energy = (slope * points + bend / 2 * points**2) / noise
        weights = np.exp(energy.min() - energy)
        excess = slope * (np.average(points, weights=weights) + 1)
        worst = max(worst, excess)
        assert excess <= promised
    assert worst >= 0.2 * promised
    assert near == pytest.approx(noise + bend / 8 + slip)
    (first, w0, t0), (last, w1, t1) = parts
    before = first + w0 / 2 * 4 + t0
    assert whole == pytest.approx(last + t1 + min(w1 / 2 * 4, before))


def test_tuned_radii_end_where_the_quadratic_term_bends_as_the_loss_may():
    with jax.enable_x64(True):
        budget = dpb.PrivacyBudget(1.0, 1e-6)
        solver = LocalizedDraws.tuned(localized((1.0,)).draw, smooth(), budget, 400)
        plan = dpb.calibrate(smooth(), solver, budget, sizes=400)
        last = plan.solver.rounds[-1].plan(smooth(), 400)
    radii, shares = np.asarray(solver.radii), np.asarray(solver.budget_split)
    assert radii[0] == 1.0
    assert radii[1:-1] ** 2 == pytest.approx(radii[:-2] * radii[2:])
    assert shares[1:] == pytest.approx(2 * shares[:-1])
    # 3 G / (D sqrt(d)) in one dimension
    assert last.potential.quadratic / last.rate == pytest.approx(0.75, rel=1e-2)


def test_what_is_no_radius_or_no_split_is_refused():
    with pytest.raises(ValueError, match="radii must be one per round"):
        localized(())
    with pytest.raises(ValueError, match="radii"):
        localized((1.0, -1.0))
    with pytest.raises(ValueError, match="budget_split"):
        localized((1.0, 0.5), (1.0,))
    with pytest.raises(ValueError, match="not calibrated"):
        _ = localized((1.0,)).rounds


@pytest.mark.slow
def test_localized_draws_end_nearer_to_the_minimum_than_one_draw():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        rows = rng.normal(size=(500, 5))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        labels = rows @ np.full(5, 0.3) + 0.3 * rng.laplace(size=500)
        records = {"features": jnp.asarray(rows), "label": jnp.asarray(labels)}
        problem = dpb.onelevel.linear_risk("absolute", radius=1.0)
        budget = dpb.PrivacyBudget(1.0, 1e-6)

        def loss(w):
            return float(jnp.mean(jax.vmap(lambda r: problem.loss(w, r))(records)))

        def mean_loss(solver):
            solver = dpb.calibrate(problem, solver, budget, sizes=500).solver
            run = jax.jit(
                lambda key: dpb.solve(problem, solver, records, jnp.zeros(5), key=key)
            )
            return np.mean([loss(run(jax.random.key(i)).value) for i in range(20)])

        one = mean_loss(localized((2.0,), None, UNTIMED, 5))
        draw = localized((1.0,), None, UNTIMED, 5).draw
        rounds = mean_loss(LocalizedDraws.tuned(draw, problem, budget, 500))
        noiseless = loss(jnp.full(5, 0.3))
    assert rounds - noiseless < 0.25 * (one - noiseless)
