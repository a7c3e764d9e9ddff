"""Descent along gradients inferred from losses: releases, limits and refusals."""

import dataclasses
import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.core.loop import scan_steps
from dpbilevel.privacy.keys import derive, step_keys
from dpbilevel.search.gp import History, gradient_posterior, record_gradient
from tests.cases import Audited, Case, planned, slow
from tests.problems import IN_BOX, LOWER

pytestmark = pytest.mark.usefixtures("x64")
N, D = 40, 3
BOX = dpb.sets.Box(-2.0, 2.0)
ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE
SQUARES = dpb.FiniteSum(lambda w, z: 0.5 * jnp.sum((w - z) ** 2), w_set=BOX)
RECORDS = 0.5 * np.random.default_rng(0).normal(size=(N, D)) + 0.3
START = np.ones(D)
# Compiles once for all numbers.
solve = jax.jit(functools.partial(dpb.solve, trajectory=True))


CONTRACT = {
    "gradient_informative": Case(
        IN_BOX,
        dpb.search.GradientInformativeBO(
            3,
            1.0,
            step_size=0.5,
            keep=8,
            max_batch=8,
            polish=2,
            output=dpb.outputs.TailMean(0.2),
            portfolio=dpb.search.Portfolio(9, jnp.full((1, 4), 0.3)),
        ).with_sizes(len(LOWER["label"])),
        jax.tree.map(np.float64, {k: LOWER[k] for k in ("features", "label")}),
        np.zeros(4),
        double=True,
    ),
}


def planned_gibo(scale=1.0, kind=dpb.search.GradientInformativeBO, **fields):
    defaults = {"num_steps": 2, "clip_norm": 0.7, "step_size": 0.1}
    defaults |= {"batch": 2, "keep": 2, "polish": 0, "portfolio": None}
    return planned(kind(**(defaults | fields)), scale=scale)


def planned_portfolio(kind=dpb.search.GradientInformativeBO, share=0.3):
    return planned_gibo(kind=kind, portfolio=dpb.search.Portfolio(8, share=share))


AUDITS = {
    "GradientInformativeBO": Audited(planned_gibo(), double=True),
    "GradientInformativeBO, portfolio": Audited(
        planned_portfolio(), double=True, exact=False, others=-1.0
    ),
}


def gibo(scale=0.0, steps=20, **fields):
    defaults = {"clip_norm": 1e3, "step_size": 0.5, "keep": 12, "max_batch": 8}
    defaults |= {"kernel": dpb.search.RBF(2.0, 10.0), "polish": 0, "portfolio": None}
    solver = dpb.search.GradientInformativeBO(steps, **(defaults | fields))
    return solver.with_noise(scale).with_sizes(N)


def test_without_noise_it_finds_the_minimizer_of_a_quadratic():
    solver = gibo()
    found = solver.answer(SQUARES, states(solver, steps=18))
    np.testing.assert_allclose(found, RECORDS.mean(axis=0), atol=1e-3)


@pytest.mark.slow
def test_the_public_term_is_added_to_the_released_gradient():
    problem = dataclasses.replace(SQUARES, public=lambda w: 0.5 * jnp.sum(w * w))
    found = solve(problem, gibo(), RECORDS, START, key=jax.random.key(0))
    np.testing.assert_allclose(found.value, RECORDS.mean(axis=0) / 2, atol=1e-3)


def test_a_tail_average_is_that_of_the_last_fifth():
    solver = gibo(0.0, output=dpb.outputs.TailMean(0.2))
    state = solver.init(SQUARES, START)
    path = np.random.default_rng(4).normal(size=(20, D))
    for t, w in enumerate(path):
        w, t = jnp.asarray(w), jnp.asarray(t)
        output = solver.output.update(
            state.output, w, before=w, t=t, num_steps=20, key=None
        )
        state = dataclasses.replace(state, output=output)
    found = solver.answer(SQUARES, state)
    np.testing.assert_allclose(found, path[-4:].mean(axis=0))


def test_the_gap_is_at_most_that_of_inexact_gradient_descent():
    # F_T <= (1 - eta tau)^T F_0 + max_t |e_t|^2 / (2 tau) on every path; tau = L = 1.
    problem = dataclasses.replace(SQUARES, w_set=dpb.sets.Box(-50.0, 50.0))
    for seed in range(3):
        solver = gibo(0.05, clip_norm=5.0)
        found = solve(problem, solver, RECORDS, START, key=jax.random.key(seed))
        path = np.concatenate([START[None], found.trajectory])
        optimum = RECORDS.mean(axis=0)
        errors = (path[:-1] - path[1:]) / 0.5 - (path[:-1] - optimum)
        floor = (errors**2).sum(axis=1).max() / 2
        gaps = 0.5 * ((path - optimum) ** 2).sum(axis=1)
        assert gaps[-1] <= 0.5**20 * gaps[0] + floor
        # The inequality is not idle: without the floor it fails.
        assert gaps[-1] > 0.5**20 * gaps[0]


def robust(w, record):
    residual = record["y"] - record["x"] @ w
    size = jnp.abs(residual)
    huber = jnp.where(size <= 1, residual**2 / 2, size - 0.5)
    return huber * jnp.minimum(1, 2 / jnp.sum(record["x"] ** 2))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [40, 100])
def test_with_two_points_a_step_it_follows_clipped_gradient_descent(steps):
    random = np.random.default_rng(1)
    x = random.normal(size=(100, 4))
    records = {"x": x, "y": x.sum(axis=1) + random.normal(size=100)}
    problem = dpb.FiniteSum(robust, w_set=dpb.sets.Box(-5.0, 5.0))
    solver = dpb.search.GradientInformativeBO(
        steps,
        1.0,
        step_size=1.0,
        batch=2,
        keep=64,
        jitter=1e-6,
        polish=0,
        portfolio=None,
    )
    exact = dpb.NoisyGD(steps, 1.0, step_size=1.0)
    found, expected = (
        solve(
            problem,
            s.with_noise(0.0).with_precision("float"),
            records,
            np.zeros(4),
            key=jax.random.key(2),
        ).trajectory
        for s in (solver, exact)
    )
    # Too few points at first, as many as are needed later.
    assert np.linalg.norm(found[0] - expected[0]) > 0.05
    assert np.linalg.norm(found[-1] - expected[-1]) < 0.03


@pytest.mark.parametrize(
    ("clip_norm", "steps", "n", "mu", "std"),
    [
        (3.0, 25, 1000, 1.0, 0.03),
        (3.0, 25, 700, 1.0, 0.0429),
        (1.0, 45, 1000, 0.1, 0.134),
        (1.0, 150, 50, 0.5, 0.980),
        (1.0, 150, 50, 2.0, 0.245),
        (1.0, 100, 100, 1.0, 0.2),
    ],
)
def test_noise_is_that_of_the_papers_experiments(clip_norm, steps, n, mu, std):
    solver = dpb.search.GradientInformativeBO(
        steps, clip_norm, step_size=1.0, portfolio=None
    )
    (release,) = solver.with_noise(1 / mu).ledger(SQUARES, n).releases
    assert release.noise_std == pytest.approx(std, rel=5e-3)
    assert release.count == steps


@pytest.mark.parametrize(
    ("mu", "epsilons"),
    [
        (0.1, (0.1975, 0.3407, 0.3969)),
        (0.5, (1.3523, 1.9931, 2.2541)),
        (1.0, (3.1387, 4.3772, 4.8866)),
        (2.0, (7.5813, 9.9973, 10.9972)),
    ],
)
def test_the_run_is_exactly_mu_gaussian(mu, epsilons):
    ledger = gibo(1 / mu, 7).ledger(SQUARES, N)
    found = [ledger.epsilon(delta) for delta in (1e-3, 1e-5, 1e-6)]
    np.testing.assert_allclose(found, epsilons, atol=1e-3)


def history_of(values, d=D):
    points = np.random.default_rng(2).normal(size=(values.shape[1], d))
    mask = np.arange(values.shape[1]) < values.shape[1] - 1
    return History(jnp.asarray(points), jnp.asarray(values), jnp.asarray(mask))


@pytest.mark.parametrize("precision", ["grid", *slow("float")])
def test_no_losses_move_the_gradient_beyond_its_sensitivity(precision):
    solver = gibo(1.0, clip_norm=0.7).with_precision(precision).with_sizes(6)
    values = np.random.default_rng(3).normal(size=(6, 5))

    def query(values):
        history = history_of(values)
        posterior = gradient_posterior(
            solver.kernel, jnp.zeros(D), history.points, history.mask, nugget=1e-6
        )
        funs = {"records": record_gradient(posterior, history.mask)}
        release = solver.release(None, solver.sizes)
        return release.read(funs, history.losses, key=jax.random.key(0))

    found = audit.sensitivity_search(
        query, values, key=jax.random.key(3), tries=300, rounds=3
    )
    assert found.passed, str(found)
    assert found.ratio > 0.9


@pytest.mark.parametrize("hostile", [1e30, -1e30, np.nan, np.inf])
def test_one_hostile_row_moves_the_released_gradient_by_its_share(hostile):
    solver = gibo(0.0, clip_norm=0.7, step_size=1.0)
    sick = RECORDS.copy()
    sick[0] = hostile
    # Both runs ask for the same points at first.
    moved, same = (
        solve(SQUARES, solver, records, START, key=jax.random.key(4)).trajectory[0]
        for records in (sick, RECORDS)
    )
    assert np.linalg.norm(moved - same) <= 2 * 0.7 / N + 1e-12


def test_a_loss_that_is_not_finite_counts_as_the_largest_of_its_record():
    losses = jnp.asarray([1.0, jnp.nan, 3.0, -jnp.inf, 9.0])
    mask = jnp.asarray([True, True, True, True, False])
    weights = SimpleNamespace(weights=jnp.eye(5))
    usable = record_gradient(weights, mask)
    np.testing.assert_array_equal(usable(losses)[:4], [1, 3, 3, 3])
    assert not usable(jnp.full(5, jnp.nan)).any()


@pytest.mark.slow
def test_a_model_that_fails_at_some_points_does_not_stop_the_descent():
    def failing(w, z):
        loss = 0.5 * jnp.sum((w - z) ** 2)
        return jnp.where(w[0] > 1.2, jnp.nan, loss)

    problem = dataclasses.replace(SQUARES, loss=failing)
    found = solve(problem, gibo(), RECORDS, START, key=jax.random.key(5))
    np.testing.assert_allclose(found.value, RECORDS.mean(axis=0), atol=1e-2)


three_steps = jax.jit(scan_steps)


def states(solver, problem=SQUARES, steps=3):
    """After a multiple of three steps, which are one program."""
    state = solver.init(problem, START)
    _, keys = step_keys(jax.random.key(6), steps)
    for some in keys.reshape(-1, 3):
        state, _ = three_steps(problem, solver, jnp.asarray(RECORDS), state, some)
    return state


SLOW_NOISE = pytest.param("noise", marks=pytest.mark.slow)


@pytest.mark.parametrize("tolerance", [1 / 30, SLOW_NOISE])
def test_what_is_asked_never_depends_on_losses(tolerance):
    solver = gibo(1.0, tolerance=tolerance)
    state = states(solver)
    ask = jax.jit(
        lambda state, seed: solver.ask(SQUARES, state, key=jax.random.key(seed))
    )
    hidden = jnp.full_like(state.history.losses, jnp.nan)
    blind = dataclasses.replace(state, history=state.history._replace(losses=hidden))
    chex.assert_trees_all_equal(ask(state, 0), ask(blind, 0))
    assert bool(state.history.mask.any())


def test_what_is_shown_of_a_state_holds_no_losses():
    state = states(gibo(1.0))
    values = np.asarray(state.history.losses)
    values = values[:, np.asarray(state.history.mask)].ravel()
    for view in ("adversary_view", "released"):
        shown = jax.tree.leaves(getattr(gibo(1.0), view)(state))
        numbers = np.concatenate([np.ravel(leaf).astype(float) for leaf in shown])
        assert not np.isin(values, numbers).any()


@pytest.mark.slow
def test_nothing_is_compiled_again_as_points_grow_in_number():
    solver = gibo(1.0, tolerance=1e-9)
    chex.clear_trace_counter()
    counted = jax.jit(chex.assert_max_traces(solver.step, n=1))
    state = solver.init(SQUARES, START)
    _, keys = step_keys(jax.random.key(7), 3)
    found = []
    for index in range(3):
        state = counted(SQUARES, jnp.asarray(RECORDS), state, key=keys[index])
        found.append(int(state.history.mask.sum()))
    assert found == [8, 12, 12]


@pytest.mark.slow
def test_asked_by_hand_it_releases_what_solve_does():
    solver = gibo(0.1, 3, clip_norm=2.0)
    whole = solve(SQUARES, solver, RECORDS, START, key=jax.random.key(8)).trajectory
    problem = dpb.search.BlackBox(
        lambda w: 0.5 * ((w[None] - RECORDS) ** 2).sum(axis=1), N, BOX
    )
    public = dataclasses.replace(problem, losses=len)
    ask = jax.jit(lambda state, key: solver.ask(public, state, key=key))
    tell = jax.jit(
        lambda state, asked, losses, key: solver.tell(
            public, state, asked, losses, key=key
        )
    )
    state = solver.init(problem, START)
    _, keys = step_keys(jax.random.key(8), 3)
    for index in range(3):
        key_ask, key_tell = derive(keys[index], "ask", "tell")
        asked = ask(state, key_ask)
        losses = np.zeros((N, len(asked.points)))
        for number in range(int(asked.count)):
            losses[:, number] = problem.losses(np.asarray(asked.points[number]))
        state = tell(state, asked, losses, key_tell)
        np.testing.assert_allclose(state.w, whole[index], atol=1e-6)


@pytest.mark.slow
def test_every_step_draws_noise_of_its_own():
    solver = gibo(1.0, 3, batch=2, keep=2)
    flat = dpb.FiniteSum(lambda w, z: 0 * jnp.sum(w * z), w_set=dpb.sets.Euclidean())

    @jax.jit
    def paths(keys):
        def path(key):
            return dpb.solve(
                flat, solver, RECORDS, np.zeros(1), key=key, trajectory=True
            ).trajectory

        return jax.vmap(path)(keys)

    found = paths(jax.random.split(jax.random.key(10), 2000))[..., 0]
    noise = np.diff(np.asarray(found), axis=1, prepend=0.0)
    off = np.corrcoef(noise.T) - np.eye(3)
    assert np.abs(off).max() < 5 / 2000**0.5
    std = 0.5 * solver.ledger(flat, N).releases[0].noise_std
    np.testing.assert_allclose(noise.std(axis=0), std, rtol=0.08)


def test_steps_that_miss_the_tolerance_are_counted():
    met = states(gibo())
    assert met.unmet == 0
    assert gibo().remark(met) is None
    solver = gibo(tolerance=1e-9)
    unreachable = states(solver)
    assert unreachable.unmet == 3
    assert unreachable.evaluations == 3 * 8
    remark = solver.remark(unreachable)
    assert "in 3 of 20 steps" in remark
    assert "the tolerance of 1e-09" in remark


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_the_tolerance_noise_is_the_squared_noise_of_lemma_3_8(mu):
    solver = gibo(1 / mu, clip_norm=3.0, tolerance="noise")
    posterior = solver._posterior(START, solver.init(SQUARES, START).history)
    found = solver._tolerated(SQUARES, posterior)
    expected = (2 * 3.0 * (20 * D) ** 0.5 / (N * mu)) ** 2  # (2 B sqrt(T d) / (n mu))^2
    assert found == pytest.approx(expected, rel=2e-3)  # noise is rounded up
    plain = gibo(1 / mu, clip_norm=3.0)
    assert solver.ledger(SQUARES, N) == plain.ledger(SQUARES, N)
    state = dataclasses.replace(solver.init(SQUARES, START), unmet=jnp.asarray(2))
    assert "norm of the privacy noise" in solver.remark(state)


@pytest.mark.slow
def test_more_privacy_noise_asks_for_fewer_points():
    fields = {"clip_norm": 3.0, "tolerance": "noise", "max_batch": 16}
    loud, quiet = (gibo(scale, **fields) for scale in (0.3, 0.003))
    assert states(loud).evaluations < states(quiet).evaluations


def test_fewer_evaluations_are_made_at_a_larger_tolerance():
    counts = [states(gibo(tolerance=t)).evaluations for t in (1e-4, 1e-2, 0.5)]
    assert counts[0] > counts[1] > counts[2]


def test_the_latest_points_are_kept_and_near_ones_dropped():
    solver = gibo(keep=3, kernel=dpb.search.RBF())
    line = jnp.asarray([[2.0], [0.5], [0.5 + 1e-4], [0.3], [0.1], [0.0]])
    mask = jnp.asarray([True] * 5 + [False])
    values = jnp.arange(12.0).reshape(2, 6)
    latest = solver._latest(History(line, values, mask), jnp.zeros(1))
    chosen = jnp.asarray([0, 1, 3])
    np.testing.assert_allclose(latest.points, line[chosen])
    np.testing.assert_allclose(latest.losses, values[:, chosen])
    assert bool(latest.mask.all())


@pytest.mark.slow
def test_an_optimizer_takes_the_released_gradient():
    solver = gibo(0.1, 5, step_size=optax.adagrad(0.3))
    found = solve(SQUARES, solver, RECORDS, START, key=jax.random.key(9))
    assert bool(jnp.isfinite(found.trajectory).all())


def test_single_precision_is_refused_with_the_remedy():
    solver = gibo(1.0)
    with pytest.raises(ValueError, match=r"jax_enable_x64.*float64 w0"):
        dpb.solve(
            SQUARES,
            solver,
            RECORDS.astype(np.float32),
            START.astype(np.float32),
            key=jax.random.key(0),
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"tolerance": "bias"}, "tolerance must be"),
        ({"jitter": 0.0}, "jitter must be positive"),
        ({"evaluation_noise": -1.0}, "evaluation_noise must be non-negative"),
        ({"batch": 0}, "batch must be an integer"),
        ({"keep": 0}, "keep must be an integer"),
        ({"polish": -1}, "polish must be an integer"),
        ({"output": dpb.outputs.UniformIterate()}, "draws at random"),
        ({"step_size": None}, "give step_size="),
        # One record more would be a state of another shape, and an error.
        (
            {"neighbours": ADD_OR_REMOVE},
            "Use Neighbours.REPLACE_ONE",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        gibo(1.0, **fields)


def test_starts_and_plans_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="w0 must be one vector"):
        gibo(1.0).init(SQUARES, np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"solver\.with_sizes\(sizes\)"):
        gibo(1.0).with_sizes(None).init(SQUARES, START)
    with pytest.raises(TypeError, match="kernel must be an instance"):
        gibo(1.0, kernel="rbf")
