import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.core.descent import rejected_updates
from tests.cases import Audited, Case, planned
from tests.games.saddle_zoo import N, example
from tests.problems import LOWER, SADDLE, SADDLE_START

INNER = dpb.games.NoisyExtragradient(2, clip_norm=1.0, step_size=0.2)
CONTRACT = {
    "recursive": Case(
        SADDLE,
        dpb.games.RecursiveRegularization(INNER, rounds=2, strength=0.1),
        LOWER,
        SADDLE_START,
    ),
    "recursive_single_pass": Case(
        SADDLE,
        dpb.games.RecursiveRegularization(
            dataclasses.replace(INNER, sampling=dpb.privacy.SinglePass(7)), 2, 0.1
        ),
        LOWER,
        SADDLE_START,
    ),
}


def planned_recursive(kind=dpb.games.RecursiveRegularization):
    inner = dpb.games.NoisyExtragradient(1, clip_norm=0.7, step_size=0.1)
    return planned(kind(inner, rounds=2, strength=0.5))


AUDITS = {"RecursiveRegularization": Audited(planned_recursive())}


def quiet(inner, rounds, strength, sizes):
    solver = dpb.games.RecursiveRegularization(inner, rounds, strength)
    changes = {"noise_multiplier": 0.0, "precision": "float", "sizes": sizes}
    return dataclasses.replace(solver, **changes)


def test_noise_is_that_of_the_whole_run():
    with pytest.raises(ValueError, match="inner has a noise_multiplier"):
        dpb.games.RecursiveRegularization(INNER.with_noise(1.0), 2, 0.1)


solve = jax.jit(dpb.solve, static_argnames="trajectory")


@pytest.mark.parametrize(
    "step_size", [0.3, pytest.param(optax.adam(0.1), marks=pytest.mark.slow)]
)
def test_rounds_are_runs_on_games_pulled_to_the_answers_before(step_size):
    made, strength = example("affine"), 0.4
    game, w = made.problem, jnp.asarray([0.5, -0.3, 0.2])
    inner = dpb.games.NoisyExtragradient(3, 1e3, step_size)
    solver = quiet(inner, 3, strength, N)
    found = solve(game, solver, made.data, w, key=jax.random.key(0)).value
    one = dataclasses.replace(inner, noise_multiplier=0.0, precision="float", sizes=N)

    @jax.jit
    def pulled(weights, centers, w):
        def public(u):
            return sum(a * (u - c) for a, c in zip(weights, centers, strict=True))

        problem = dataclasses.replace(game, public=public)
        return dpb.solve(problem, one, made.data, w, key=jax.random.key(1)).value

    centers, weights = [], np.zeros(3, np.float32)
    for index in range(3):
        centers.append(w)
        weights[index] = strength * 2.0**index
        w = pulled(weights, [*centers, w, w][:3], w)  # those to come weigh nothing
    np.testing.assert_allclose(found, w, atol=2e-4)
    assert float(jnp.linalg.norm(found - centers[-1])) > 0.005


def test_rounds_of_a_single_pass_read_batches_of_their_own():
    problem = dpb.games.VariationalInequality(lambda w, z: z * jnp.ones_like(w))
    single = dpb.privacy.SinglePass(2)
    inner = dpb.games.NoisyExtragradient(1, 1e3, 1.0, sampling=single)
    solver = quiet(inner, 2, 1e-9, 8)
    run = solve(
        problem, solver, jnp.arange(8.0), jnp.zeros(1), key=jax.random.key(0),
        trajectory=True,
    )  # fmt: skip
    means = [2.0, 3.0, 4.0, 5.0]  # of records t and t + 4
    midpoints = [-means[0], -means[0] - means[2]]
    np.testing.assert_allclose(run.trajectory[:, 0], midpoints, rtol=1e-5)


def test_all_rounds_are_composed_and_a_single_pass_over_them_is_charged_once():
    for sampling, charged in (
        (dpb.FullBatch(), 12),
        (dpb.privacy.SinglePass(5), 1),
        (dpb.privacy.SinglePass(6), 2),  # ten batches of sixty records
    ):
        inner = dataclasses.replace(INNER, sampling=sampling)
        solver = dpb.games.RecursiveRegularization(inner, 3, 0.1)
        (release,) = solver.with_noise(1.0).ledger(SADDLE, 60).releases
        assert release.count == 12
        assert sampling.charged(release.count, 60) == charged
        multiplier = release.noise_multiplier
        assert multiplier == pytest.approx(12**0.5)


def test_skipped_updates_of_all_rounds_are_counted():
    problem = dpb.games.VariationalInequality(
        lambda w, z: 0.0 * w + z, lambda w: jnp.full_like(w, jnp.inf)
    )
    inner = dpb.games.NoisyExtragradient(2, 1.0, 0.1)
    solver, data, key = quiet(inner, 3, 0.1, 4), jnp.ones(4), jax.random.key(0)
    state = solver.init(problem, jnp.zeros(1))
    step = jax.jit(lambda state, key: solver.step(problem, data, state, key=key))
    for _ in range(solver.num_steps):
        state = step(state, key)
    assert int(rejected_updates(state)) == 12


def test_other_solvers_of_a_round_are_refused():
    with pytest.raises(TypeError, match="inner must be an instance of NoisyExtrag"):
        dpb.games.RecursiveRegularization(dpb.games.GroupDescent(), 2, 0.1)
