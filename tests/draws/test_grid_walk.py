import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel.draws import GridWalk
from dpbilevel.draws.samplers import _lattice
from dpbilevel.draws.samplers.base import Regularity
from dpbilevel.sets import Ball, Box, Euclidean, NonNegative, Product, Simplex
from tests.cases import slow
from tests.draws.lattice_zoo import (
    CASES,
    Peak,
    Setting,
    law,
    peak,
    setting,
    transition_matrix,
)

EXACT = ["interval", *slow("box", "ball", "segment", "simplex", "bumpy")]


@pytest.mark.parametrize("name", EXACT)
def test_the_walk_is_reversible_lazy_and_leaves_exp_minus_h_as_it_is(name):
    walk = setting(name)
    flow = walk.q[:, None] * walk.transitions
    np.testing.assert_allclose(flow, flow.T, atol=1e-14)
    np.testing.assert_allclose(walk.q @ walk.transitions, walk.q, atol=1e-14)
    assert np.diag(walk.transitions).min() >= 0.5 - 1e-12
    wrong = np.exp(-1.1 * walk.table)[:, None] * walk.transitions
    assert not np.allclose(wrong, wrong.T, atol=1e-6)


def test_without_staying_the_walk_would_not_be_lazy(monkeypatch):
    walk = setting("box")
    proposals = _lattice._proposals
    always = lambda cells, index, words: proposals(cells, index, words | 1 << 31)  # noqa: E731
    monkeypatch.setattr(_lattice, "_proposals", always)
    with jax.enable_x64(True):
        hasty = transition_matrix(walk.table, walk.cells, walk.index)
    assert np.diag(hasty).min() < 0.4
    assert np.linalg.eigvals(hasty).real.min() < -0.5
    assert np.linalg.eigvals(walk.transitions).real.min() > -1e-12


@pytest.mark.parametrize("name", EXACT)
def test_certified_steps_suffice_by_the_measured_gap(name):
    walk = setting(name)
    root = np.sqrt(walk.q)
    symmetric = root[:, None] * walk.transitions / root[None]
    gap = 1 - np.sort(np.linalg.eigvalsh((symmetric + symmetric.T) / 2))[-2]
    assert 0 < walk.bounds.gap <= gap
    assert walk.bounds.rarity >= -np.log(walk.q.min())
    mixing = np.tanh(walk.sampler.log_ratio / 4)
    power = np.linalg.matrix_power(walk.transitions, walk.sampler.num_steps)
    assert np.abs(power / walk.q - 1).max() <= mixing
    few = np.linalg.matrix_power(walk.transitions, int(1 / gap))
    assert np.abs(few / walk.q - 1).max() > mixing


MESH = {
    "interval": 7000,
    "segment": 7000,
    "bumpy": 7000,
    "box": 360,
    "ball": 360,
    "simplex": 360,
}


def log_ratio(densities):
    return np.abs(np.log(densities[0] / densities[1])).max()


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_law_is_within_the_certified_ratio_of_the_target(name):
    walk = setting(name)
    found = walk.sampler.guarantee(walk.regularity, walk.feasible)
    assert found.proved
    steps, tries = walk.sampler.num_steps, walk.sampler.num_tries
    density, target, weight = law(walk, steps, tries, MESH[name])
    assert density.sum() * weight == pytest.approx(1.0, abs=5e-3)
    assert log_ratio((density, target)) <= found.log_ratio <= 0.01
    assert log_ratio(law(walk, steps, 1, MESH[name])[:2]) > 0.01
    assert log_ratio(law(walk, sum(walk.cells), tries, MESH[name])[:2]) > 0.01


@pytest.mark.parametrize("name", ["interval", *slow("ball")])
def test_neighbors_differ_by_the_mechanism_and_twice_the_log_ratio(name):
    one = setting(name)
    with jax.enable_x64(True):
        other = Setting(name, Peak(0.8 * one.potential.slopes))
    steps, tries = one.sampler.num_steps, one.sampler.num_tries
    p, p_target, _ = law(one, steps, tries, MESH[name])
    q, q_target, _ = law(other, steps, tries, MESH[name])
    exact = log_ratio((p_target, q_target))
    assert exact > 0.02
    assert log_ratio((p, q)) <= exact + 2 * one.sampler.log_ratio


@pytest.mark.parametrize("name", ["simplex", *slow("ball")])
def test_the_extension_is_convex_lipschitz_and_exact_on_the_set(name):
    built = setting(name)
    rng = np.random.default_rng(3)
    corner, sides = np.asarray(built.frame.corner), np.asarray(built.frame.sides)
    a, b = corner + sides * rng.uniform(size=(2, 4000, 2))
    with jax.enable_x64(True):
        at_a, at_b, middle = (built.energy(jnp.asarray(z)) for z in (a, b, (a + b) / 2))
        gauges = np.asarray(jax.vmap(built.frame.gauge)(jnp.asarray(a)))
        exact = np.asarray(
            jax.vmap(lambda z: built.potential(built.frame.point(z)))(jnp.asarray(a))
        )
    assert (middle <= (at_a + at_b) / 2 + 1e-12).all()
    change = np.abs(at_a - at_b) / np.linalg.norm(a - b, axis=1)
    assert change.max() <= built.bounds.lipschitz
    np.testing.assert_allclose(at_a[gauges <= 1], exact[gauges <= 1], rtol=1e-12)
    assert np.ptp(gauges) > 1
    assert gauges.max() <= built.frame.reach


def test_without_the_penalty_the_extension_is_not_convex():
    with jax.enable_x64(True):
        built = Setting(
            "ball", Peak(np.array([[0.2, 1.0], [-0.2, -1.0]])), penalty=1e-9
        )
        corner, rng = np.array([0.5, -0.5]), np.random.default_rng(3)
        a, b = jnp.asarray(corner + rng.uniform(size=(2, 4000, 2)))
        at_a, at_b, middle = (built.energy(v) for v in (a, b, (a + b) / 2))
    assert (middle > (at_a + at_b) / 2 + 1e-3).any()
    assert not built.sampler.guarantee(built.regularity, built.feasible).proved


@pytest.mark.parametrize(
    ("feasible", "dimension", "message"),
    [
        (Euclidean(), 2, "needs a bounded Box"),
        (NonNegative(), 2, "needs a bounded Box"),
        (Product((Ball(1.0),)), 2, "got Product with 2 entries"),
        (Simplex(), 1, "of two entries or more"),
        (Box(0.0, np.inf), 2, "must be bounded"),
        (Box(np.zeros(3), np.ones(3)), 2, "the set has 3 entries, not 2"),
    ],
)
def test_sets_without_a_lattice_are_refused(feasible, dimension, message):
    with pytest.raises(ValueError, match=message):
        GridWalk(tabulate=False).with_counts(Regularity(dimension, 1.0, 0.0), feasible)


def test_more_evaluations_than_anyone_runs_are_refused_with_their_number_and_time():
    regularity = Regularity(6, 20.0, 0.0)
    message = (
        r"T = 3\.\d+e\+08 certified steps .* evaluations, about .* days.*num_steps"
    )
    with pytest.raises(ValueError, match=message):
        GridWalk(tabulate=False).with_counts(regularity, Box(0.0, 1.0))
    with pytest.raises(ValueError, match="a table of"):
        GridWalk(tabulate=True).with_counts(regularity, Box(0.0, 1.0))
    with pytest.raises(ValueError, match=r"tabulate=True.*declared convex"):
        GridWalk(tabulate=False).with_counts(Regularity(2, 20.0), Box(0.0, 1.0))
    with pytest.raises(ValueError, match="needs a Lipschitz constant"):
        GridWalk(tabulate=False).with_counts(Regularity(2, np.inf), Box(0.0, 1.0))


def test_fewer_steps_than_certified_prove_nothing_and_say_so():
    regularity, feasible = Regularity(1, 4.0, 0.0), CASES["interval"][0]
    certified = GridWalk(tabulate=False).with_counts(regularity, feasible)
    assert certified.guarantee(regularity, feasible).proved
    short = GridWalk(num_steps=certified.num_steps // 2)
    short = short.with_counts(regularity, feasible)
    found = short.guarantee(regularity, feasible)
    assert not found.proved
    assert found.log_ratio == np.inf
    assert "HEURISTIC" in found.notes[0]
    steep = Regularity(1, 8.0, 0.0)
    assert not certified.guarantee(steep, feasible).proved
    inexact = Regularity(1, 4.0, 0.0, error=0.1)
    assert not certified.guarantee(inexact, feasible).proved
    assert (
        GridWalk(tabulate=False)
        .with_counts(inexact, feasible)
        .guarantee(inexact, feasible)
        .proved
    )


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="not planned"):
        GridWalk(tabulate=False).draw(
            peak(1, 1.0), Ball(1.0), jnp.zeros(1), key=jax.random.key(0)
        )
    with pytest.raises(ValueError, match="leave num_steps out"):
        GridWalk(tabulate=True, num_steps=3)
    with pytest.raises(ValueError, match="num_tries must be an integer"):
        GridWalk(num_tries=0)
    planned = GridWalk(tabulate=False).with_counts(Regularity(1, 1.0, 0.0), Ball(1.0))
    with pytest.raises(ValueError, match="planned for 1 axes, got 2"):
        planned.draw(peak(2, 1.0), Ball(1.0), jnp.zeros(2), key=jax.random.key(0))


def test_an_error_of_the_values_is_paid_for_in_steps_and_tries():
    feasible = Ball(0.5)
    exact, inexact = (
        GridWalk(tabulate=False, max_queries=10**12).with_counts(
            Regularity(2, 1.0, 0.0, error=e), feasible
        )
        for e in (0.0, 0.05)
    )
    assert inexact.num_steps > exact.num_steps
    assert inexact.num_tries > exact.num_tries
    assert inexact.slack > exact.slack
