import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.games.bilinear import solved
from tests.cases import Audited, Case, planned
from tests.games.saddle_zoo import normal
from tests.zoo.games import bilinear_saddle

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
TERMS = dpb.games.BilinearGame(
    lambda z: z["features"],
    lambda z: jnp.sum(z["features"], 1),
    lambda z: z["features"][0],
    x_set=dpb.sets.Ball(1.0),
)
RECORDS = {"features": normal(30, 3, 2)}
START = (jnp.zeros(3), jnp.full(2, 0.5))

CONTRACT = {
    "noisy_payoff": Case(
        TERMS, dpb.games.NoisyPayoff(clip_norm=2.0, game_steps=20), RECORDS, START
    ),
}


def planned_payoff(kind=dpb.games.NoisyPayoff):
    return planned(kind(clip_norm=0.7, game_steps=10))


AUDITS = {"NoisyPayoff": Audited(planned_payoff())}


def uniform(m, k):
    return jnp.full(m, 1 / m), jnp.full(k, 1 / k)


def gap(matrix, w):
    x, y = (np.asarray(v) for v in w)
    return (matrix.T @ x).max() - (matrix @ y).min()


run_public = jax.jit(solved, static_argnums=4)


@functools.cache
def solution(price, m=6, k=4):
    matrix = np.random.default_rng(0).normal(size=(m, k))
    game = dpb.games.matrix_game(m, k)
    coefficients = jnp.asarray(matrix, jnp.float32), None, None
    return matrix, run_public(game, coefficients, price, uniform(m, k), 2000)


def test_without_a_price_the_public_game_is_solved_exactly():
    matrix, w = solution(0.0)
    assert gap(matrix, w) < 1e-4
    assert gap(matrix, uniform(6, 4)) > 0.5


def test_with_a_price_no_player_gains_by_a_step():
    matrix, (x, y) = solution(0.5)
    project = jax.jit(dpb.sets.Simplex().project)
    x, y = np.asarray(x, float), np.asarray(y, float)
    slopes = matrix @ y + 0.5 * x / np.linalg.norm(x)
    np.testing.assert_allclose(x, project(jnp.asarray(x - slopes)), atol=1e-4)
    slopes = matrix.T @ x - 0.5 * y / np.linalg.norm(y)
    np.testing.assert_allclose(y, project(jnp.asarray(y + slopes)), atol=1e-4)
    assert gap(matrix, (x, y)) > 0.01  # the price is felt


@pytest.mark.slow
def test_games_with_linear_and_public_terms_on_balls_are_solved():
    parts = normal(20, 2, 3), normal(20, 2, seed=1), normal(20, 3, seed=2)
    solver = dpb.games.NoisyPayoff(10.0, caution=0.0, noise_multiplier=0.0, sizes=20)
    for convexity in (0.0, 0.5):
        made = bilinear_saddle(*parts, convexity=convexity)
        key = jax.random.key(0)
        w = jax.jit(dpb.solve)(made.problem, solver, made.data, made.w0, key=key).value
        assert float(made.gap(w)) < 1e-3 < 0.1 < float(made.gap(made.w0))


@functools.cache
def private_gaps(caution, keys=16, n=1000, side=5):
    """Gaps on the law of fresh records with entries of -1 or 1, and of the start."""
    mean = np.random.default_rng(1).uniform(-0.6, 0.6, (side, side))
    problem, w0 = dpb.games.matrix_game(side, side), uniform(side, side)
    solver = dpb.games.NoisyPayoff(caution=caution)
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=n, precision="float")
    law = jnp.asarray(mean, jnp.float32)

    def one(key):
        key_data, key_noise = jax.random.split(key)
        ones = jax.random.uniform(key_data, (n, side, side)) < (1 + law[None]) / 2
        data = jnp.where(ones, 1.0, -1.0)
        x, y = dpb.solve(problem, plan.solver, data, w0, key=key_noise).value
        return jnp.max(law.T @ x) - jnp.min(law @ y)

    found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), keys))
    return np.asarray(found), gap(mean, w0)


def test_the_default_has_a_small_gap_on_a_thousand_records():
    found, start = private_gaps(1.0)
    assert found.mean() < 0.06
    assert start > 0.4


@pytest.mark.slow
def test_caution_is_better_than_the_exact_solution_of_the_noisy_game():
    cautious, exact = private_gaps(1.0, 200)[0], private_gaps(0.0, 200)[0]
    error = np.std(cautious - exact) / 200**0.5
    assert np.mean(exact - cautious) > 3 * error


def test_the_noise_is_that_of_the_declared_coefficients():
    problem = dpb.games.matrix_game(4, 3)
    plan = dpb.calibrate(problem, dpb.games.NoisyPayoff(), BUDGET, sizes=1000)
    (release,) = plan.solver.ledger(problem, 1000).releases
    assert release.clip_norm == pytest.approx(12**0.5)
    expected = release.noise_multiplier * 2 * 12**0.5 / 1000
    assert release.noise_std == pytest.approx(expected)
    assert plan.report.status.name == "ENFORCED"


def test_coefficients_of_a_matrix_game_are_within_the_declared_bound():
    problem = dpb.games.matrix_game(3, 2)
    records = np.random.default_rng(0).normal(size=(50, 3, 2)) * 10.0
    records[0], records[1, 0, 0] = 1.0, np.nan
    found = jax.vmap(lambda z: jnp.linalg.norm(problem.coefficients(z)[0]))(
        jnp.asarray(records, jnp.float32)
    )
    assert float(jnp.max(found)) == pytest.approx(problem.coefficient_bound)


def test_other_solvers_see_the_operator_of_the_same_game():
    record = jax.tree.map(lambda v: v[0], RECORDS)
    x, y = jnp.asarray([0.1, 0.2, -0.3]), START[1]
    along_x, along_y = TERMS.record_operator((x, y), record)
    matrix, x_term, y_term = TERMS.coefficients(record)
    expected = matrix @ y + x_term
    np.testing.assert_allclose(along_x, expected, rtol=1e-5)
    expected = -(matrix.T @ x + y_term)
    np.testing.assert_allclose(along_y, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "solver", "said"),
    [
        ({}, dpb.games.NoisyPayoff(), "coefficient_bound"),
        (
            {"x_set": dpb.sets.Euclidean()},
            dpb.games.NoisyPayoff(2.0),
            "needs bounded sets. Give x_set",
        ),
        ({"y_term": TERMS.x_term}, dpb.games.NoisyPayoff(2.0), r"shape \(2,\)"),
    ],
)
def test_games_that_cannot_be_released_are_refused(changes, solver, said):
    problem = dataclasses.replace(TERMS, **changes)
    solver = solver.with_noise(1.0).with_sizes(30)
    with pytest.raises(ValueError, match=said):
        dpb.solve(problem, solver, RECORDS, START, key=jax.random.key(0))


def test_a_game_that_is_not_bilinear_is_refused():
    problem = dpb.games.SaddleProblem(lambda x, y, z: x @ x - y @ y)
    with pytest.raises(TypeError, match="BilinearGame"):
        dpb.calibrate(problem, dpb.games.NoisyPayoff(1.0), BUDGET, sizes=10)
