"""Private baselines of search by losses: laws, noise, sensitivities, answers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.search import losses as told
from dpbilevel.search.base import Proposal, uniform
from dpbilevel.search.losses import clipped_loss
from dpbilevel.search.noisy_ucb import posterior
from tests.audit.mutants_draws import Hotter
from tests.cases import Audited, Case, planned, slow
from tests.problems import LOWER, SEARCHED, Y0

RECORDS = 0.2 + 0.3 * np.random.default_rng(0).normal(size=(30, 2))
BOX = dpb.sets.Box(jnp.asarray([-1.0, 0.0]), jnp.asarray([1.0, 3.0]))
LOSSES = np.random.default_rng(1).uniform(-0.5, 2.5, size=(10, 5))
LOSSES[3, 1], LOSSES[4, 2], LOSSES[5, 3] = np.nan, np.inf, -np.inf
RANGE, EPSILON = 2.0, 8.0
ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE


CONTRACT = {
    "random_search": Case(SEARCHED, dpb.search.RandomSearch(20, 2.0), LOWER, Y0),
    "noisy_ucb": Case(
        SEARCHED, dpb.search.NoisyUCB(4, 2.0, num_candidates=20), LOWER, Y0
    ),
}


def planned_random_search(kind=dpb.search.RandomSearch, scale=1.0, **fields):
    return planned(kind(16, 1.0, **fields), scale=scale)


def planned_ucb(kind=dpb.search.NoisyUCB, scale=1.0, **fields):
    return planned(kind(3, 1.0, num_candidates=4, **fields), scale=scale)


AUDITS = {
    "RandomSearch": Audited(planned_random_search(), others=-1.0, exact=False),
    "NoisyUCB": Audited(planned_ucb()),
}


def box_problem(loss=None, public=None, box=BOX):
    if loss is None:

        def loss(w, z):
            return jnp.sum((w - z) ** 2)

    return dpb.FiniteSum(loss, public, w_set=box)


def five(mechanism):
    return dpb.search.RandomSearch(5, RANGE, mechanism, sizes=10)


def drawn(solver, problem, losses, runs=20_000):
    """How often each of five candidates is the answer."""
    points = jnp.stack([jnp.linspace(-1, 1, 5), jnp.zeros(5)], axis=1)
    asked = Proposal(points, jnp.asarray(5, jnp.int32))

    @jax.jit
    @jax.vmap
    def one(key):
        state = solver.init(problem, jnp.zeros(2))
        return solver.tell(problem, state, asked, losses, key=key).w[0]

    found = one(jax.random.split(jax.random.key(2), runs))
    return np.asarray([np.sum(found == p) for p in points[:, 0]])


def law(epsilon, extra=0.0):
    clipped = np.clip(np.nan_to_num(LOSSES, nan=np.inf), 0, RANGE)
    scores = clipped.mean(axis=0) + extra
    weights = np.exp(-epsilon * 10 / (2 * RANGE) * (scores - scores.min()))
    return weights / weights.sum()


@pytest.mark.parametrize("public", [None, *slow(lambda w: 0.3 * w[0])])
def test_a_random_search_draws_by_the_exponential_law_of_clipped_losses(public):
    problem, losses = box_problem(public=public), jnp.asarray(LOSSES, jnp.float32)
    extra = 0.0 if public is None else 0.3 * np.linspace(-1, 1, 5)

    def p_value(mechanism):
        counts = drawn(five(mechanism), problem, losses)
        return scipy.stats.chisquare(counts, law(EPSILON, extra) * counts.sum()).pvalue

    assert p_value(dpb.draws.Exponential(EPSILON)) > 1e-3
    assert p_value(dpb.draws.Exponential(1.1 * EPSILON)) < 1e-6  # the control
    assert p_value(Hotter(EPSILON)) < 1e-6


def test_a_random_search_is_pure_and_any_number_of_candidates_costs_the_same():
    for problem in (box_problem(), dpb.search.BlackBox(len, 100, BOX)):
        reports = [
            dpb.calibrate(
                problem,
                dpb.search.RandomSearch(count, 2.0),
                dpb.PrivacyBudget(1.0, 0.0),
                sizes=100,
            ).report
            for count in (2, 1000)
        ]
        for report in reports:
            assert 1 - 1e-9 < report.epsilon <= 1
            assert report.delta == 0
            assert report.accountant == "exact composition of draws without delta"
        assert {r.status for r in reports} == {dpb.privacy.Status.ENFORCED}
        temperatures = [r.ledger[0].temperature for r in reports]
        np.testing.assert_allclose(temperatures, 2 * 2.0 / 100, rtol=2e-3)


def test_points_of_ones_own_are_candidates_and_cost_nothing():
    own = np.asarray([[0.25, 0.0], [9.0, 0.0]])  # the second one is outside
    problem = box_problem()
    solvers = [dpb.search.RandomSearch(5, RANGE, starts=v) for v in (own, None)]
    state = solvers[0].init(problem, jnp.zeros(2))
    proposals = [s.ask(problem, state, key=jax.random.key(3)) for s in solvers]
    points = proposals[0].points
    np.testing.assert_allclose(points[:2], [own[0], problem.w_set.project(own[1])])
    assert points.shape == proposals[1].points.shape == (5, 2)
    assert len(np.unique(points, axis=0)) == 5
    budget = dpb.PrivacyBudget(1.0, 0.0)
    plans = [dpb.calibrate(problem, s, budget, sizes=10) for s in solvers]
    assert plans[0].report.epsilon == plans[1].report.epsilon
    rates = [p.solver.ledger(problem, 10).releases[0].rate for p in plans]
    assert rates[0] == rates[1]


def test_adding_or_removing_a_record_moves_scores_half_as_far():
    added = dpb.search.RandomSearch(5, 2.0, dpb.draws.Exponential(1.0, ADD_OR_REMOVE))
    replaced = dpb.search.RandomSearch(5, 2.0, dpb.draws.Exponential(1.0))
    rates = [s.ledger(box_problem(), 100).releases[0].rate for s in (added, replaced)]
    assert rates[0] == pytest.approx(2 * rates[1])


def moved_by_a_record():
    """How far a record moves scores that hold a large public term, and the claim."""

    def public(w):
        return 1e6 * (1 + w[0] ** 2)

    line = np.linspace(-1, 1, 9, dtype=np.float32)
    points = jnp.stack([jnp.asarray(line), jnp.zeros(9)], axis=1)
    data = np.random.default_rng(1).uniform(size=(100, 1)).astype(np.float32)
    found = []
    for first in (data[0, 0], -1.0):
        data[0] = first
        losses = jnp.asarray(np.abs(line - data))
        score = told.score_of_candidates(losses, points, public, jnp.zeros(2), 1.0, 100)
        found.append(np.asarray(score.raw.scores, np.float64))
    sensitivity = score.sensitivity(dpb.Neighbours.REPLACE_ONE)
    return np.ptp(found[0] - found[1]), float(sensitivity)


def test_a_large_public_term_does_not_amplify_a_record(monkeypatch):
    moved, charged = moved_by_a_record()
    assert 0 < moved <= charged

    def uncut(public, x, start, half):
        return (public(x) - public(start)).astype(half.dtype)

    monkeypatch.setattr(told, "public_part", uncut)
    moved, charged = moved_by_a_record()
    assert moved > charged  # the control


@pytest.mark.parametrize("precision", ["float", "grid"])
@pytest.mark.parametrize("bad", [1e30, -1e30, np.nan, np.inf, 0.7])
def test_one_record_moves_a_mean_loss_no_further_than_the_range(bad, precision):
    found = []

    @jax.jit
    def clipped(losses):
        mean = clipped_loss(losses, 1.0, 4, precision).raw
        return mean.values() if precision == "grid" else mean

    for value in (bad, 0.0, 5.0):
        losses = jnp.asarray([value, 0.3, 1.2, np.nan], jnp.float32)
        found.append(float(clipped(losses)))
    assert np.ptp(found) <= 1 / 4
    assert found[2] == pytest.approx((1 + 0.3 + 1 + 1) / 4 - 0.5, abs=1e-3)
    if not np.isfinite(bad):
        assert found[0] == found[2]  # as the worst there is


def test_noise_is_what_the_formulas_say():
    problem, n, mu, steps = box_problem(), 50, 0.8, 16
    ucb = dpb.search.NoisyUCB(steps, 3.0).with_noise(1 / mu).ledger(problem, n)
    (release,) = ucb.releases
    assert release.noise_std == pytest.approx(3.0 * math.sqrt(steps) / (n * mu))
    selection = dpb.search.RepeatAndSelect(200, 3.0, mean=5.0).with_noise(1 / mu)
    (release,) = selection.ledger(problem, n).releases
    assert release.noise_std == pytest.approx(3.0 / (n * mu))


class SameNoiseInPairs(dpb.search.NoisyUCB):
    """The noise of every odd step is that of the step before."""

    def tell(self, problem, state, asked, losses, *, key):
        after = dpb.search.NoisyUCB.tell(self, problem, state, asked, losses, key=key)
        before = after.values[jnp.maximum(state.t - 1, 0)]
        value = jnp.where(state.t % 2 == 1, before, after.values[state.t])
        values = after.values.at[state.t].set(value)
        return dataclasses.replace(after, values=values)


def worst_correlation(kind, runs=2000):
    """Between the noisy losses of a run."""
    problem = box_problem(lambda w, z: 0.0 * (w[0] + z))
    solver = kind(4, 1.0, exploration=0.0, num_candidates=4)
    run = audit.SolverRun(problem, solver.with_noise(1.0).with_sizes(3), jnp.zeros(2))

    @jax.jit
    def values(keys):
        return jax.lax.map(
            lambda key: run(jnp.zeros(3), key=key)[2][-1], keys, batch_size=200
        )

    found = values(jax.random.split(jax.random.key(4), runs))
    table = np.abs(np.corrcoef(np.asarray(found).T))
    return np.max(table - np.eye(4))


@pytest.mark.slow
def test_the_noises_of_a_run_are_uncorrelated():
    assert worst_correlation(dpb.search.NoisyUCB) < 4.9 / 2000**0.5
    assert worst_correlation(SameNoiseInPairs) > 0.9  # the control


def test_candidates_are_uniform_in_the_box_whatever_the_records():
    like = jnp.zeros(2)
    points = np.asarray(uniform(BOX, like, 4000, key=jax.random.key(0)))
    for column, (low, high) in zip(points.T, [(-1, 1), (0, 3)], strict=True):
        spread = scipy.stats.uniform(low, high - low)
        assert scipy.stats.kstest(column, spread.cdf).pvalue > 1e-3
        wider = scipy.stats.uniform(low, 1.1 * (high - low))
        assert scipy.stats.kstest(column, wider.cdf).pvalue < 1e-6  # the control


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_surrogate_is_that_of_a_peer_and_ignores_rows_without_values():
    rng = np.random.default_rng(3)
    points, values = rng.uniform(size=(8, 2)), rng.normal(size=8)
    at, noise = rng.uniform(size=(6, 2)), 0.05
    known = np.arange(8) < 5
    values[5:] = np.nan
    nugget = np.finfo(float).eps ** 0.5
    peer = GaussianProcessRegressor(RBF(1.0), alpha=noise + nugget, optimizer=None)
    center = values[:5].mean()
    expected, deviation = peer.fit(points[:5], values[:5] - center).predict(
        at, return_std=True
    )
    found = posterior(
        *map(jnp.asarray, (points, values, known, at)), jnp.asarray(noise)
    )
    np.testing.assert_allclose(found[0], expected + center, rtol=1e-9)
    np.testing.assert_allclose(found[1], deviation, rtol=1e-7)


def test_without_values_the_surrogate_is_its_prior():
    points = jnp.zeros((3, 2))
    none = jnp.zeros(3, bool)
    mean, deviation = posterior(points, points[:, 0], none, points, jnp.asarray(0.1))
    np.testing.assert_array_equal(mean, 0.0)
    np.testing.assert_array_equal(deviation, 1.0)


SOLVERS = {
    "random_search": dpb.search.RandomSearch(400, 4.0),
    "repeat_and_select": dpb.search.RepeatAndSelect(400, 4.0, mean=50.0),
    "noisy_ucb": dpb.search.NoisyUCB(25, 4.0, num_candidates=200),
}
BEST = RECORDS.mean(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_with_hardly_any_noise_the_best_point_is_found(name):
    problem = box_problem(box=dpb.sets.Box(-1.0, 1.0))
    solver = SOLVERS[name].with_noise(1e-3).with_precision("float").with_sizes(30)

    @jax.jit
    def run(keys):
        def one(key):
            data, start = jnp.asarray(RECORDS, jnp.float32), jnp.zeros(2)
            return dpb.solve(problem, solver, data, start, key=key).value

        return jax.lax.map(one, keys)

    found = run(jax.random.split(jax.random.key(0), 5))
    away = np.linalg.norm(np.asarray(found) - BEST, axis=1)
    assert np.median(away) < (0.05 if name == "noisy_ucb" else 0.25)


def test_starts_of_another_length_are_refused_with_their_shape():
    problem = dpb.search.BlackBox(lambda p: np.zeros(30), 30, dpb.sets.Box(-1.0, 1.0))
    solver = dpb.search.RandomSearch(5, 1.0, starts=np.zeros((1, 3)))
    budget = dpb.PrivacyBudget(1.0, 0.0)
    with pytest.raises(ValueError, match=r"shape \(k, 2\), got"):
        dpb.search.minimize(
            problem, solver, np.zeros(2), budget=budget, key=jax.random.key(0)
        )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dpb.search.RandomSearch(0, 1.0), "num_candidates"),
        (lambda: dpb.search.RandomSearch(5, 0.0), "clip_range"),
        (
            lambda: dpb.search.RandomSearch(2, 1.0, starts=np.zeros((3, 2))),
            "num_candidates=2 is below 3 starts",
        ),
        (lambda: dpb.search.NoisyUCB(5, 1.0, lengthscale=-1.0), "lengthscale"),
        (lambda: dpb.search.NoisyUCB(5, 1.0, exploration=-1.0), "exploration"),
        (lambda: dpb.search.NoisyUCB(5, 1.0, variance=0.0), "variance"),
        (lambda: dpb.search.RepeatAndSelect(50, -1.0, mean=2.0), "clip_range"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
