"""Random allocation: its divergences against quadrature, and how passes are drawn."""

import dataclasses
import itertools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpbilevel as dpb
from dpbilevel.privacy.accounting import allocation_loss, profiles
from dpbilevel.privacy.mechanisms import Gaussian
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.releases import Release
from dpbilevel.privacy.sampling.fixed_size import (
    RandomAllocation,
    RandomAllocationEvent,
)
from tests import cases
from tests.privacy import reference_accounting as reference

WAYS = "replace", "remove", "add"
EPSILONS = 0.0, 0.3, 1.0, 2.5
REPLACE, ADD_OR_REMOVE = dpb.Neighbours
# Nodes of the standard normal law, equispaced: exact for what is analytic.
NODES = np.linspace(-9.0, 9.0, 601)
WEIGHTS = np.exp(-(NODES**2) / 2) / math.sqrt(2 * math.pi) * (NODES[1] - NODES[0])


def ratio(z, shift):
    return np.exp(shift * z - shift**2 / 2)


def loss_of(way, ups, downs, a):
    """What the divergence takes the positive part of, from mean density ratios."""
    return {"replace": ups - a * downs, "remove": ups - a, "add": 1 - a * ups}[way]


def of_two(way, mu, epsilon):
    """The divergence for two batches, by quadrature in two dimensions."""
    z = np.linspace(-9.0 - mu, 9.0 + mu, 1201)
    weights = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    ups, downs = ratio(z, mu), ratio(z, -mu)
    pairs = [(v[:, None] + v[None, :]) / 2 for v in (ups, downs)]
    values = np.maximum(loss_of(way, *pairs, math.exp(epsilon)), 0.0)
    return float(weights @ values @ weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_of_one_term_is_a_gaussian_release_at_every_noise(way):
    draw = np.random.default_rng(3)
    shifts = np.concatenate([np.geomspace(1e-7, 0.1, 8), draw.uniform(0.1, 4.0, 40)])
    compared = 0
    for mu in map(float, shifts):
        for epsilon in (1e-6, float(draw.uniform(0, 1.5 * mu)), draw.uniform(0, 10)):
            exact = reference.gaussian(2 * mu if way == "replace" else mu, epsilon)
            if exact > 1e-13:
                term = allocation_loss._Term(way, mu, math.exp(epsilon))
                found = allocation_loss._of_the_sum(term, 1)
                assert exact * (1 - 1e-9) <= found <= 1.02 * exact + 1e-14
                compared += 1
    assert compared > 60


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_costs_no_more_than_one_gaussian_release(way):
    for mu, batches in itertools.product((1e-6, 0.5, 3.0, 7.0), (1, 3, 5000)):
        shift = 2 * mu if way == "replace" else mu
        for epsilon in (1e-3, 0.5, 3.0, 20.0):
            found = allocation_loss.divergence(way, mu, batches, epsilon)
            assert 0 <= found <= reference.gaussian(shift, epsilon) * (1 + 1e-9)


@pytest.mark.parametrize("multiplier", [0.15, 0.4, 0.7])
@pytest.mark.parametrize("relation", dpb.Neighbours)
def test_an_epsilon_of_little_noise_is_found(relation, multiplier):
    base = dp_accounting.GaussianDpEvent(multiplier)
    found = epsilon_of(RandomAllocationEvent(3, base), relation, 1e-5)
    assert found < epsilon_of(base, relation, 1e-5) * 1.02


@pytest.mark.parametrize("mu", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("way", WAYS)
def test_two_batches_are_those_of_a_quadrature(way, mu):
    for epsilon in EPSILONS:
        found = allocation_loss.divergence(way, mu, 2, epsilon)
        exact = of_two(way, mu, epsilon)
        if exact > 1e-12:
            assert exact * (1 - 1e-4) <= found <= 1.01 * exact + 1e-15


@pytest.mark.parametrize("way", ["replace", "remove"])
def test_sums_above_the_window_are_bounded(way, monkeypatch):
    exact = of_two(way, 1.0, 0.3)
    monkeypatch.setattr(allocation_loss, "_OUTSIDE", 1e-4)  # a window that is seen
    assert allocation_loss.divergence(way, 1.0, 2, 0.3) >= exact


@pytest.mark.parametrize("way", WAYS)
def test_a_term_on_the_grid_keeps_its_mass_and_at_least_its_mean(way):
    term, batches = allocation_loss._Term(way, 3.9, math.exp(0.5)), 3
    step, lowest, masses, cut = allocation_loss._discretized(term, batches)
    values = step * (lowest + np.arange(len(masses)))
    assert masses.sum() == pytest.approx(1.0, abs=1e-12)
    # The mean of every ratio is 1.
    assert masses @ values + cut >= loss_of(way, 1.0, 1.0, math.exp(0.5)) - 1e-12


def test_the_two_directions_of_add_or_remove_are_composed_apart():
    mu, epsilon = 1.0, 0.3
    event = RandomAllocationEvent(2, dp_accounting.GaussianDpEvent(1 / mu))
    ways = profiles.compositions(event, ADD_OR_REMOVE)
    for way, composed in zip(("remove", "add"), ways, strict=True):
        exact = of_two(way, mu, epsilon)
        assert exact * (1 - 1e-4) <= composed.delta(epsilon) <= 1.01 * exact
    assert of_two("add", mu, epsilon) < 0.99 * of_two("remove", mu, epsilon)


@pytest.mark.parametrize("way", WAYS)
def test_many_batches_are_those_of_a_simulation_and_of_no_other_noise(way):
    mu, batches, runs, epsilon = 0.8, 20, 400_000, 0.1
    z = np.random.default_rng(0).standard_normal((runs, batches))
    ups, downs = ratio(z, mu).mean(axis=1), ratio(z, -mu).mean(axis=1)
    values = np.maximum(loss_of(way, ups, downs, math.exp(epsilon)), 0.0)
    error = values.std() / math.sqrt(runs)
    found = allocation_loss.divergence(way, mu, batches, epsilon)
    assert abs(found - values.mean()) < 4 * error
    for other in (0.95 * mu, 1.05 * mu):  # the control
        wrong = allocation_loss.divergence(way, other, batches, epsilon)
        assert abs(wrong - values.mean()) > 4 * error


def adaptive(mu, a, lengths, angle, change):
    """The divergence of an adaptive run of two batches with these shifts.

    In the plane of the shifts of both records, each release draws two coordinates. The
    second pair of shifts depends on the first output: `change` where it is positive.
    """
    z = NODES[::10]
    weights = np.outer(WEIGHTS[::10], WEIGHTS[::10]).ravel() * 100
    x, y = (v.ravel() for v in np.meshgrid(z, z, indexing="ij"))

    def ratios(length, other, angle):
        up = np.exp(length * mu * x - (length * mu) ** 2 / 2)
        along = math.cos(angle) * x + math.sin(angle) * y
        down = np.exp(other * mu * along - (other * mu) ** 2 / 2)
        return up, down

    first_up, first_down = ratios(*lengths, angle)
    total = 0.0
    for side, (up, down) in (
        (x > 0, ratios(*lengths, angle)),
        (x <= 0, ratios(*change)),
    ):
        start = (first_up - a * first_down)[side, None]
        values = np.maximum(start + (up - a * down)[None, :], 0.0) / 2
        total += float(weights[side] @ values @ weights)
    return total


def test_no_adaptive_pair_of_shifts_exceeds_the_opposite_ones():
    mu, epsilon = 1.0, 0.5
    bound = allocation_loss.divergence("replace", mu, 2, epsilon)
    draw = np.random.default_rng(1)
    found = []
    for _ in range(12):
        lengths, other = draw.uniform(0.3, 1.0, (2, 2))
        angles = draw.uniform(0, math.pi, 2)
        change = (*other, angles[1])
        found.append(adaptive(mu, math.exp(epsilon), lengths, angles[0], change))
    assert max(found) < bound
    opposite = (1.0, 1.0), math.pi, (1.0, 1.0, math.pi)
    worst = adaptive(mu, math.exp(epsilon), *opposite)
    assert worst == pytest.approx(bound, rel=2e-3)
    # The control: the bound of a smaller shift is exceeded.
    assert worst > allocation_loss.divergence("replace", 0.97 * mu, 2, epsilon)


@pytest.mark.parametrize("relation", dpb.Neighbours)
def test_profiles_are_convex_and_never_below_the_divergence(relation):
    mu, batches = 0.7, 30
    for way in ("replace",) if relation is REPLACE else ("remove", "add"):
        ratios, found = allocation_loss.profile(way, mu, batches)
        assert np.all(np.diff(ratios) > 0)
        slopes = np.diff(found) / np.diff(ratios)
        assert np.all(np.diff(slopes) > -1e-9)
        assert np.all(slopes >= -1 - 1e-9)
        for epsilon in (-0.4, -0.05, 0.02, 0.1, 0.33, 0.7):
            line = np.interp(math.exp(epsilon), ratios, found)
            exact = allocation_loss.divergence(way, mu, batches, epsilon)
            assert exact * (1 - 1e-3) <= line <= 1.1 * exact + 1e-13


def epsilon_of(event, relation, delta=1e-6):
    composed = dp_accounting.ComposedDpEvent([event])
    return profiles.epsilon(composed, relation, delta)


@pytest.mark.parametrize("relation", dpb.Neighbours)
def test_passes_cost_about_as_much_as_poisson_batches(relation):
    base, batches, passes = dp_accounting.GaussianDpEvent(1.0), 50, 4
    repeated = dp_accounting.SelfComposedDpEvent
    one = RandomAllocationEvent(batches, base)
    allocated = epsilon_of(repeated(one, passes), relation)
    poisson = dp_accounting.PoissonSampledDpEvent(1 / batches, base)
    sampled = epsilon_of(repeated(poisson, passes * batches), relation)
    assert 0.8 * sampled < allocated < 1.05 * sampled
    # Without the secret of its batch a record costs a Gaussian release a pass.
    assert 2 * allocated < epsilon_of(repeated(base, passes), relation)


def test_two_passes_are_those_of_a_quadrature():
    mu, epsilon = 0.6, 0.8
    z = np.linspace(-9.6, 9.6, 241)
    weights = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    ups, downs = ratio(z, mu), ratio(z, -mu)
    up, down = ((v[:, None] + v[None, :]).ravel() / 2 for v in (ups, downs))
    mass = np.outer(weights, weights).ravel()
    losses, law = np.log(up / down), mass * up
    # One loss against all others in order: a pass more, without a grid of losses.
    order = np.argsort(losses)
    losses, law = losses[order], law[order]
    tail = np.append(np.cumsum(law[::-1])[::-1], 0.0)
    weighted = np.append(np.cumsum((law * np.exp(-losses))[::-1])[::-1], 0.0)
    places = np.searchsorted(losses, epsilon - losses, side="right")
    exact = np.sum(law * (tail[places] - np.exp(epsilon - losses) * weighted[places]))
    event = RandomAllocationEvent(2, dp_accounting.GaussianDpEvent(1 / (2 * mu)))
    twice = dp_accounting.SelfComposedDpEvent(event, 2)
    composed = dp_accounting.ComposedDpEvent([twice])
    found = profiles.delta(composed, REPLACE, epsilon)
    assert exact * (1 - 1e-4) <= found <= 1.01 * exact


N, BATCHES = 1000, 8
RECORDS = jnp.arange(float(N))
SCHEME = RandomAllocation(BATCHES)


def a_pass(key):
    drawn = SCHEME.in_pass(RECORDS, key=key)
    return [drawn.draw(RECORDS, N, key=None, index=i) for i in range(BATCHES)]


def test_every_record_is_in_one_batch_of_a_pass():
    batches = a_pass(jax.random.key(0))
    members = [np.asarray(b.records)[np.asarray(b.mask)] for b in batches]
    assert sorted(np.concatenate(members)) == list(range(N))
    assert {b.denominator for b in batches} == {N / BATCHES}
    assert {b.records.shape for b in batches} == {(SCHEME.rows(N),)}
    assert all(b.mask is not None and not b.rows_fixed for b in batches)


def test_batches_of_records_are_uniform_and_fresh_in_every_pass():
    keys = jax.random.split(jax.random.key(1), 400)
    places = np.asarray(jax.vmap(lambda k: SCHEME.in_pass(RECORDS, key=k).places)(keys))
    counts = np.stack([np.sum(places == i, axis=0) for i in range(BATCHES)])
    assert scipy.stats.chisquare(counts.ravel()).pvalue > 1e-3
    together = np.mean(places[1:] == places[:-1])
    assert abs(together - 1 / BATCHES) < 4 * math.sqrt(0.11 / places[1:].size)
    pairs = np.mean(places[:, 1:] == places[:, :-1])
    assert abs(pairs - 1 / BATCHES) < 4 * math.sqrt(0.11 / places[:, 1:].size)


def test_the_chance_of_an_overflow_is_counted():
    most = SCHEME.rows(N)
    exceeded = scipy.stats.binom(N, 1 / BATCHES).sf(most)
    assert exceeded <= SCHEME.failure(REPLACE, N) < 1e-11
    budget = dpb.PrivacyBudget(1.0, 1e-6)
    solver = dpb.onelevel.AllocatedGD(3, BATCHES, 1.0, 0.1)
    problem = dpb.FiniteSum(lambda w, z: w[0] * z)
    plan = dpb.calibrate(problem, solver, budget, sizes=N)
    failure = plan.solver.ledger(problem, N).failure
    assert failure == pytest.approx(3 * BATCHES * SCHEME.failure(REPLACE, N))


@pytest.mark.parametrize(("count", "passes"), [(1, 1), (8, 1), (9, 2), (17, 3)])
def test_a_pass_that_is_begun_is_charged(count, passes):
    query = Query("records", N, 1.0, SCHEME)
    release = Release("mean", count, (query,), Gaussian(1.0))
    ((_, event),) = release.charges(dpb.People.SHARED)
    assert (event.count, event.event.batches) == (passes, BATCHES)


@pytest.mark.parametrize("batches", [3, 1000, 65_535])
def test_that_some_places_are_more_frequent_is_counted(batches):
    # 64 random bits modulo the batches: so many places have one value of them more.
    more = 2**64 % batches
    distance = more * (batches - more) / batches / 2**64  # in total variation
    assert 0 < distance <= RandomAllocation(batches).failure(REPLACE, 10**6)


def test_a_release_outside_of_a_pass_is_refused():
    query = Query("records", N, 1.0, SCHEME)
    release = Release("mean", BATCHES, (query,), Gaussian(1.0))
    what = {"records": lambda z: z}
    with pytest.raises(ValueError, match=r"needs a pass; use AllocatedGD"):
        release.apply(what, RECORDS, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"needs a pass; use AllocatedGD"):
        release.apply(what, RECORDS, key=jax.random.key(0), index=0)


@pytest.mark.parametrize(
    "made",
    [
        lambda s: dpb.NoisyGD(4, 1.0, 0.1, sampling=s),
        lambda s: dpb.PenaltyBilevel(
            4, 10.0, step_size=1.0, inner=dpb.NoisyGD(2, 1.0, 1.0), sampling=s
        ),
        lambda s: dpb.onelevel.LocalizedGD((1.0,), 3, 1.0, 1.0, sampling=s),
    ],
)
def test_solvers_that_draw_no_passes_refuse_the_scheme(made):
    with pytest.raises(ValueError, match="RandomAllocation needs a solver"):
        made(SCHEME)


@pytest.mark.parametrize("name", ["extragradient", "proximal_point"])
def test_solvers_that_number_batches_refuse_the_scheme(name):
    solver = cases.found("CONTRACT")[name].solver
    with pytest.raises(ValueError, match="RandomAllocation needs a solver that draws"):
        dataclasses.replace(solver, sampling=SCHEME)


def test_more_batches_than_records_are_refused():
    solver = dpb.onelevel.AllocatedGD(2, 300, 1.0, 0.1)
    problem = dpb.FiniteSum(lambda w, z: w[0] * z)
    with pytest.raises(ValueError, match="batches must be at most 200"):
        dpb.calibrate(problem, solver, dpb.PrivacyBudget(1.0, 1e-6), sizes=200)


def test_more_batches_than_places_are_drawn_for_are_refused():
    with pytest.raises(ValueError, match="at most 65536 batches"):
        RandomAllocation(65_537)
    assert jax.random.randint(jax.random.key(0), (9,), 0, 65_536).max() < 65_536
