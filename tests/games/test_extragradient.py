import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from tests.cases import Audited, Case, planned, slow
from tests.games.saddle_zoo import N, example, normal, point
from tests.problems import LOWER, SADDLE, SADDLE_START
from tests.zoo import games as zoo

BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


CONTRACT = {
    "extragradient": Case(
        SADDLE,
        dpb.games.NoisyExtragradient(
            4, clip_norm=1.0, step_size=0.2, sampling=dpb.privacy.SinglePass(7)
        ),
        LOWER,
        SADDLE_START,
    ),
    "extragradient_adam": Case(
        SADDLE,
        dpb.games.NoisyExtragradient(3, clip_norm=1.0, step_size=optax.adam(0.1)),
        LOWER,
        SADDLE_START,
    ),
    "extragradient_entropy": Case(
        dataclasses.replace(SADDLE, y_set=dpb.sets.Simplex(entropy=True)),
        dpb.games.NoisyExtragradient(2, clip_norm=1.0, step_size=0.2),
        LOWER,
        SADDLE_START,
    ),
}


def planned_extragradient(scale=1.0, kind=dpb.games.NoisyExtragradient, **fields):
    defaults = {"num_steps": 2, "clip_norm": 0.7, "step_size": 0.1}
    return planned(kind(**(defaults | fields)), scale=scale)


def planned_once(kind=dpb.privacy.SinglePass, **fields):
    """Two steps on four disjoint batches, with the noise of one release."""
    return planned_extragradient(0.5, sampling=kind(2), **fields)


AUDITS = {
    "NoisyExtragradient": Audited(planned_extragradient()),
    "NoisyExtragradient, single pass": Audited(planned_once()),
}


@functools.partial(jax.jit, static_argnames="trajectory")
def solve(problem, solver, data, w0, key, trajectory=False):
    return dpb.solve(problem, solver, data, w0, key=key, trajectory=trajectory)


def extragradient(steps=300, step_size=0.3, multiplier=0.0, **fields):
    if multiplier is not None:
        fields["noise_multiplier"] = multiplier * (2 * steps) ** 0.5
    fields = {"precision": "float"} | fields
    return dpb.games.NoisyExtragradient(steps, 1e3, step_size, **fields)


def noiseless_gap(name, steps):
    made = example(name)
    step_size = min(0.57 / max(made.problem.lipschitz, 0.1), 2.0)
    solver = extragradient(steps, step_size)
    w = solve(made.problem, solver, made.data, point(name), jax.random.key(0)).value
    assert bool(made.problem.w_set.contains(w))
    bound = made.problem.w_set.diameter**2 / (step_size * steps)
    return float(made.gap(w)), bound


@pytest.mark.parametrize("name", ["rotation", *slow("bilinear", "strong")])
def test_without_noise_the_gap_vanishes_within_its_bound(name):
    start = float(example(name).gap(point(name)))
    gap, bound = noiseless_gap(name, 300)
    assert gap <= bound
    assert gap < 0.1 * start


def test_descent_and_ascent_at_once_circle_where_extragradient_converges():
    made, start = example("rotation"), jnp.asarray([0.6, 0.0])
    solver = extragradient(300, 0.3)
    path = solve(
        made.problem, solver, made.data, start, jax.random.key(0), trajectory=True
    )
    w = start
    for _ in range(300):
        operator = made.problem.record_operator(
            w, jax.tree.map(lambda v: v[0], made.data)
        )
        w = made.problem.w_set.project(w - 0.3 * operator)
    assert float(made.gap(w)) > 0.99  # on the boundary, going round
    assert float(made.gap(path.trajectory[-1])) < 1e-4


@functools.cache
def private_gaps(name="bilinear", keys=40):
    """The gap on fresh data of single-pass runs, and what was promised."""
    n = 2000
    parts = normal(n, 2, 3, scale=0.3), normal(n, 2, seed=1), normal(n, 3, seed=2)
    made = zoo.bilinear_saddle(*(v / 3 for v in parts))
    budget = dpb.PrivacyBudget(4.0, 1e-5)
    solver = dpb.games.NoisyExtragradient.tuned(
        made.problem, budget, n, dimension=5, passes="single"
    )
    plan = dpb.calibrate(made.problem, solver, budget, sizes=n, precision="float")
    run = jax.jit(
        jax.vmap(
            lambda key: made.gap(
                dpb.solve(made.problem, plan.solver, made.data, made.w0, key=key).value
            )
        )
    )
    found = run(jax.random.split(jax.random.key(1), keys))
    return float(jnp.mean(found)), plan.solver.bound(made.problem, dimension=5)


@pytest.mark.slow
def test_the_mean_gap_of_private_runs_is_below_the_promised_bound():
    gap, bound = private_gaps()
    assert gap < bound
    assert gap > 0.01 * bound  # not by an empty promise


def test_two_releases_a_step_are_counted_and_half_of_them_are_not_enough():
    made = example("bilinear")
    solver = extragradient(50, multiplier=None, sampling=dpb.FixedSize(4))
    plan = dpb.calibrate(made.problem, solver, BUDGET, sizes=N)
    (release,) = plan.solver.ledger(made.problem, N).releases
    assert release.count == 100
    half = dpb.privacy.Ledger((dataclasses.replace(release, count=50),))
    assert half.epsilon(1e-5) < 0.8  # what would be claimed for the same noise
    assert 0.99 < plan.report.epsilon <= 1.0


def test_a_single_pass_is_calibrated_for_one_release():
    made = example("bilinear")
    solver = extragradient(4, multiplier=None, sampling=dpb.privacy.SinglePass(5))
    plan = dpb.calibrate(made.problem, solver, BUDGET, sizes=N)
    assert plan.solver.release_noise.noise_multiplier == pytest.approx(3.7306, abs=1e-4)
    assert "charged for 1 of 8 releases" in str(plan.report)
    # One step more begins a second pass.
    longer = dataclasses.replace(solver, num_steps=5)
    again = dpb.calibrate(made.problem, longer, BUDGET, sizes=N)
    assert again.solver.release_noise.noise_multiplier > 1.4 * 3.7306


def test_every_query_of_a_single_pass_reads_a_batch_of_its_own():
    records = jnp.arange(8.0)
    problem = dpb.games.VariationalInequality(lambda w, z: z * jnp.ones_like(w))
    solver = dpb.games.NoisyExtragradient(
        2,
        1e3,
        1.0,
        sampling=dpb.privacy.SinglePass(2),
        noise_multiplier=0.0,
        precision="float",
        sizes=8,
    )
    path = solve(problem, solver, records, jnp.zeros(1), jax.random.key(0), True)
    means = [2.0, 3.0, 4.0, 5.0]  # of records t and t + 4
    midpoints = [-means[0], -means[1] - means[2]]
    np.testing.assert_allclose(path.trajectory[:, 0], midpoints)
    assert float(path.value[0]) == pytest.approx(np.mean(midpoints))


@pytest.mark.slow
def test_the_mirrored_game_is_played_by_mirrored_steps():
    made, (x, y) = example("bilinear"), point("bilinear")
    game = made.problem
    mirrored = dpb.games.SaddleProblem(
        lambda y, x, z: -game.fun(x, y, z), x_set=game.y_set, y_set=game.x_set
    )
    solver = extragradient(5)
    here = solve(game, solver, made.data, (x, y), jax.random.key(0))
    there = solve(mirrored, solver, made.data, (y, x), jax.random.key(0))
    np.testing.assert_allclose(here.x, there.y, rtol=1e-5)
    np.testing.assert_allclose(here.y, there.x, rtol=1e-5)


@pytest.mark.slow
def test_the_second_half_of_the_path_is_averaged_where_asked():
    made, start = example("bilinear"), point("bilinear")
    for rule, first in ((dpb.outputs.Mean(), 0), (dpb.outputs.TailMean(0.5), 3)):
        solver, key = extragradient(7, output=rule), jax.random.key(first)
        found = solve(made.problem, solver, made.data, start, key, trajectory=True)
        path = found.trajectory
        expected = jax.tree.map(lambda v, first=first: v[first:].mean(0), path)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            found.value,
            expected,
        )
    with pytest.raises(ValueError, match="no theorem covers output=TailMean"):
        solver.with_sizes(N).bound(made.problem, dimension=5)


@pytest.mark.slow
def test_an_optimizer_sees_both_operators_of_a_step_in_turn():
    made, start, adam = example("rotation"), jnp.asarray([0.6, 0.0]), optax.adam(0.1)
    game = made.problem

    def path_of(step_size):
        solver, key = extragradient(4, step_size), jax.random.key(0)
        return solve(game, solver, made.data, start, key, trajectory=True).trajectory

    def moved(u, along, state):
        first = jax.tree.map(lambda v: v[0], made.data)
        operator = game.record_operator(along, first)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = adam.update(operator, state, u)
        return game.w_set.project(u + updates), state

    u, state, expected = start, adam.init(start), []
    for _ in range(4):  # ExtraAdam of Gidel et al., Algorithm 4
        w, state = moved(u, u, state)
        u, state = moved(u, w, state)
        expected.append(w)
    np.testing.assert_allclose(path_of(adam), np.stack(expected), rtol=1e-5)
    np.testing.assert_array_equal(path_of(0.2), path_of(optax.sgd(0.2)))
    with pytest.raises(ValueError, match="no theorem covers an optax optimizer"):
        extragradient(4, adam).with_sizes(N).bound(game, dimension=2)
    for wrong in (-1.0, "adam", optax.constant_schedule(0.1), None):
        with pytest.raises(ValueError, match="step_size"):
            extragradient(4, wrong)


@pytest.mark.slow
def test_steps_of_the_entropy_are_those_of_the_mirror_prox_method():
    game = dpb.games.matrix_game(3, 2, entropy=True)
    matrix = np.asarray([[0.5, -0.2], [-0.3, 0.4], [0.1, 0.9]])
    start, data = (jnp.ones(3) / 3, jnp.ones(2) / 2), jnp.asarray(matrix[None])
    solver, key = extragradient(5, 0.7), jax.random.key(0)
    path = solve(game, solver, data, start, key, trajectory=True).trajectory

    def moved(v, slope):
        v = v * np.exp(-0.7 * slope)
        return v / v.sum()

    x, y = (np.asarray(v, float) for v in start)
    for t in range(5):  # Nemirovski's mirror prox on two simplices
        u, v = moved(x, matrix @ y), moved(y, -matrix.T @ x)
        x, y = moved(x, matrix @ v), moved(y, -matrix.T @ u)
        np.testing.assert_allclose(path[0][t], u, atol=1e-4)
        np.testing.assert_allclose(path[1][t], v, atol=1e-4)
    with pytest.raises(ValueError, match="no theorem covers steps of the entropy"):
        extragradient(5, 0.1).with_sizes(9).bound(game, dimension=3)
    proximal = dpb.games.InexactProximalPoint(2, 1.0, 4.0, 1)
    with pytest.raises(ValueError, match="without entropy=True"):
        dpb.calibrate(game, proximal, BUDGET, sizes=9)


@pytest.mark.slow
def test_public_terms_are_free_and_count_in_the_operator():
    made = example("strong")
    game = made.problem
    plain = dataclasses.replace(game, public=None)
    solver = extragradient(3, multiplier=1.0)
    ledgers = [solver.ledger(p, N) for p in (game, plain)]
    assert ledgers[0] == ledgers[1]
    runs = [
        solve(p, extragradient(3), made.data, point("strong"), jax.random.key(0)).x
        for p in (game, plain)
    ]
    assert float(optax.tree.norm(optax.tree.sub(*runs))) > 1e-3


GAME = dpb.games.matrix_game(5, 5)


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("NoisyExtragradient", "single"),
        *slow(("InexactProximalPoint", "single")),
        pytest.param("InexactProximalPoint", "multi", marks=pytest.mark.slow),
    ],
)
def test_a_bound_above_the_largest_gap_is_refused_with_the_records_it_takes(
    name, passes
):
    """Payoffs are in [-1, 1], so that no pair has a gap above 2."""
    planner = getattr(dpb.games, name).tuned
    budget, known = dpb.PrivacyBudget(1.0, 1e-6), {"dimension": 8, "passes": passes}
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=r"hopeless: .* worse than 2\.") as caught:
            planner(GAME, budget, 1_000, **known)
        records = int(re.search(r"Use (\d+) records", str(caught.value))[1])
        solver = planner(GAME, budget, int(1.05 * records), **known)
        plan = dpb.calibrate(GAME, solver, budget, sizes=int(1.05 * records))
        assert 1.7 < plan.solver.bound(GAME, dimension=8) < 2
        with pytest.raises(ValueError, match="hopeless"):
            planner(GAME, budget, int(0.9 * records), **known)


def test_without_a_declared_one_the_largest_gap_is_the_bound_times_the_diameter():
    undeclared = dataclasses.replace(GAME, largest_gap=None)
    budget, known = dpb.PrivacyBudget(1.0, 1e-6), {"dimension": 8, "passes": "single"}
    with pytest.raises(ValueError, match=r"worse than 6\.325"):  # 2 sqrt(10)
        dpb.games.NoisyExtragradient.tuned(undeclared, budget, 500, **known)


def test_tuned_parameters_promise_a_small_gap():
    problem = dataclasses.replace(
        example("bilinear").problem,
        lipschitz=1.0,
        bound=1.0,
        x_set=dpb.sets.Ball(0.5**1.5),
        y_set=dpb.sets.Ball(0.5**1.5),
    )
    budget, tuned = dpb.PrivacyBudget(1.0, 1e-6), dpb.games.NoisyExtragradient.tuned
    solver = tuned(problem, budget, 10_000, dimension=10, passes="single")
    plan = dpb.calibrate(problem, solver, budget, sizes=10_000)
    promised = plan.solver.bound(problem, dimension=10)
    assert promised == pytest.approx(0.115, abs=0.01)


def test_bounds_are_refused_where_no_theorem_holds():
    problem = example("bilinear").problem
    with pytest.raises(ValueError, match="no planned sizes"):
        extragradient(4).bound(problem, dimension=5)
    with pytest.raises(ValueError, match="covers step_size=10"):
        extragradient(4, 10.0).with_sizes(N).bound(problem, dimension=5)
    small = dataclasses.replace(extragradient(4, 0.01), clip_norm=0.1).with_sizes(N)
    with pytest.raises(ValueError, match=r"clip_norm=0\.1 below"):
        small.bound(problem, dimension=5)
    passes = extragradient(4, 0.01, sampling=dpb.privacy.SinglePass(20)).with_sizes(N)
    with pytest.raises(ValueError, match="4 passes"):
        passes.bound(problem, dimension=5)
    with pytest.raises(ValueError, match="at least two records"):
        dpb.games.NoisyExtragradient.tuned(
            problem, BUDGET, 1, dimension=5, passes="single"
        )
    with pytest.raises(ValueError, match="bounded set"):
        dpb.games.NoisyExtragradient.tuned(
            dataclasses.replace(problem, x_set=dpb.sets.Euclidean()),
            BUDGET,
            100,
            dimension=5,
            passes="single",
        )
