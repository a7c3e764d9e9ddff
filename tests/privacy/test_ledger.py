import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
import scipy.optimize
from dp_accounting import pld
from scipy.stats import norm

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.releases import Release

REPLACE, ADD_OR_REMOVE = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE
DISJOINT, OVERLAPPING, SHARED = dpb.People
DELTA = 1e-5
FULL = dpb.FullBatch()
SAMPLINGS = [FULL, dpb.Poisson(0.05), dpb.FixedSize(50)]


def release(
    roles=("records",),
    count=1,
    multiplier=2.0,
    sampling=FULL,
    clip_norms=(1.0, 1.0),
    sizes=(1000, 1000),
    neighbours=REPLACE,
    **fields,
):
    parts = zip(roles, sizes, clip_norms, strict=False)
    queries = tuple(dpb.privacy.Query(role, n, c, sampling) for role, n, c in parts)
    mechanism = dpb.privacy.Gaussian(multiplier, neighbours)
    return dpb.privacy.Release("a", count, queries, mechanism, **fields)


BOTH = ("upper", "lower")


def own_gaussian_epsilon(mu):
    def excess(epsilon):
        near = norm.cdf(-epsilon / mu + mu / 2)
        return near - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2) - DELTA

    return scipy.optimize.brentq(excess, 0, 50, xtol=1e-13)


def test_full_batches_compose_to_the_epsilon_computed_by_hand():
    # One person in both levels; noise of fixed std on the sum of two means.
    first = release(BOTH, 10, 8.0, clip_norms=(1.0, 3.0), sizes=(500, 2000))
    second = release(("lower",), 4, 5.0, sizes=(2000,))
    ledger = dpb.privacy.Ledger((first, second))
    std = 8.0 * 2 * (1 / 500 + 3 / 2000)
    assert first.noise_std == pytest.approx(std)
    moved = 2 * (1 / 500 + 3 / 2000)
    mu = math.sqrt(10 * (moved / std) ** 2 + 4 / 25)
    assert ledger.epsilon(DELTA) == pytest.approx(own_gaussian_epsilon(mu), rel=1e-8)


def test_disjoint_people_are_charged_apart_by_what_they_move():
    first = release(BOTH, 10, 2.0, clip_norms=(1.0, 3.0), sizes=(500, 2000))
    second = release(("lower",), 4, 5.0, sizes=(2000,))
    ledger = dpb.privacy.Ledger((first, second), DISJOINT)
    std = 2.0 * 2 * (1 / 500 + 3 / 2000)
    upper = math.sqrt(10) * (2 * 1 / 500) / std
    lower = math.sqrt(10 * (2 * 3 / 2000 / std) ** 2 + 4 / 25)
    epsilons = ledger.epsilons(DELTA)
    assert epsilons["upper"] == pytest.approx(own_gaussian_epsilon(upper), rel=1e-8)
    assert epsilons["lower"] == pytest.approx(own_gaussian_epsilon(lower), rel=1e-8)
    assert ledger.epsilon(DELTA) == max(epsilons.values())


def native_epsilon(events, relation):
    native = {
        REPLACE: dp_accounting.NeighboringRelation.REPLACE_ONE,
        ADD_OR_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    }
    accountant = pld.PLDAccountant(native[relation])
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("relation", [REPLACE, ADD_OR_REMOVE])
def test_mixed_releases_equal_the_native_accountant_fed_with_noise_over_clip(relation):
    sampled = release(
        count=100, multiplier=2.0, sampling=dpb.Poisson(0.05), neighbours=relation
    )
    full = release(count=10, multiplier=9.0, neighbours=relation)
    noise_over_clip = relation.contributions
    events = [
        (
            dp_accounting.PoissonSampledDpEvent(
                sampled.queries[0].sampling.realised_rate,
                dp_accounting.GaussianDpEvent(2.0 * noise_over_clip),
            ),
            100,
        ),
        (dp_accounting.GaussianDpEvent(9.0 * noise_over_clip), 10),
    ]
    value = dpb.privacy.Ledger((sampled, full)).epsilon(DELTA)
    assert value == pytest.approx(native_epsilon(events, relation), rel=1e-3)


def test_replacing_equals_adding_or_removing_at_twice_the_clip_norm():
    std = 0.01
    epsilons = []
    for relation, clip_norm in ((REPLACE, 1.0), (ADD_OR_REMOVE, 2.0)):
        sensitivity = relation.contributions * clip_norm / 1000
        part = release(
            multiplier=std / sensitivity, neighbours=relation, clip_norms=(clip_norm,)
        )
        assert part.noise_std == pytest.approx(std)
        epsilons.append(dpb.privacy.Ledger((part,)).epsilon(DELTA))
    assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-12)


@pytest.mark.parametrize("people", [OVERLAPPING, SHARED])
@pytest.mark.parametrize("clip_norms", [(1.0, 1.0), (0.1, 5.0)])
def test_overlapping_full_batches_are_one_gaussian_of_added_sensitivity(
    people, clip_norms
):
    ledger = dpb.privacy.Ledger((release(BOTH, 7, 3.0, clip_norms=clip_norms),), people)
    event = ledger.events()["person"]
    assert profiles.gaussian_mu(event) == pytest.approx(math.sqrt(7) / 3, rel=1e-12)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_overlapping_people_lose_at_least_what_disjoint_ones_do(sampling):
    parts = (release(BOTH, 20, 2.0, sampling, clip_norms=(1.0, 2.0)),)
    disjoint = dpb.privacy.Ledger(parts, DISJOINT).epsilon(DELTA)
    overlapping = dpb.privacy.Ledger(parts, OVERLAPPING).epsilon(DELTA)
    assert disjoint < overlapping
    # And at most what they would lose without sampling.
    full = (release(BOTH, 20, 2.0, clip_norms=(1.0, 2.0)),)
    assert overlapping <= dpb.privacy.Ledger(full, OVERLAPPING).epsilon(DELTA) * 1.001


def test_one_shared_batch_is_one_event():
    sampling = dpb.Poisson(0.05)
    joint = release(BOTH, 20, 2.0, sampling, joint=True)
    single = release(("records",), 20, 2.0, sampling)
    values = [
        dpb.privacy.Ledger((part,), SHARED).epsilons(DELTA) for part in (joint, single)
    ]
    assert values[0]["person"] == pytest.approx(values[1]["records"], rel=1e-5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_count_is_as_many_entries_and_as_a_repeated_run(sampling):
    one = release(multiplier=3.0, sampling=sampling)
    counted = dpb.privacy.Ledger((dataclasses.replace(one, count=6),))
    rivals = [dpb.privacy.Ledger((one,) * 6), dpb.privacy.Ledger((one,)).repeat(6)]
    rivals.append(
        dpb.privacy.Ledger((one,)).repeat(2) + dpb.privacy.Ledger((one,)).repeat(4)
    )
    expected = counted.epsilon(DELTA)
    for rival in rivals:
        assert rival.epsilon(DELTA) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("people", [DISJOINT, OVERLAPPING])
@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_the_loss_is_monotone_in_noise_and_count(sampling, people):
    def epsilon(count=10, multiplier=2.0):
        part = release(BOTH, count, multiplier, sampling)
        return dpb.privacy.Ledger((part,), people).epsilon(DELTA)

    assert epsilon(multiplier=4.0) < epsilon(multiplier=2.1) < epsilon()
    assert epsilon(count=1) < epsilon(count=9) < epsilon()


def test_overflowing_batches_are_charged_to_delta():
    sampling = dpb.Poisson(0.1, capacity=152)
    part = release(count=5, multiplier=2.0, sampling=sampling)
    ledger = dpb.privacy.Ledger((part,))
    assert part.failure == pytest.approx(5 * sampling.failure(REPLACE, 1000))
    event = ledger.events()["records"]
    without = profiles.delta(event, REPLACE, 0.2)
    slack = part.failure * (1 + math.exp(0.2))
    assert ledger.delta(0.2) == pytest.approx(without + slack, rel=1e-9)
    assert slack > 1e-4 * without
    epsilon = ledger.epsilon(DELTA)
    assert ledger.delta(epsilon) <= DELTA
    assert epsilon > profiles.epsilon(event, REPLACE, DELTA)


def test_overflows_add_up_over_roles_and_releases_and_once_for_a_joint_batch():
    sampling = dpb.Poisson(0.1, capacity=130)
    sizes = 800, 1000
    upper, lower = (sampling.failure(REPLACE, size) for size in sizes)
    apart = release(BOTH, 3, 2.0, sampling, sizes=sizes)
    joint = release(BOTH, 3, 2.0, sampling, sizes=(800, 800), joint=True)
    assert 0 < upper < lower
    assert apart.failure == pytest.approx(3 * (upper + lower))
    assert joint.failure == pytest.approx(3 * upper)
    total = dpb.privacy.Ledger((apart, joint)).failure
    assert total == pytest.approx(6 * upper + 3 * lower)


def test_a_larger_epsilon_never_needs_a_larger_delta():
    # The price of an overflow alone, (1 + e^epsilon) p, would exceed one.
    part = release(count=100, multiplier=3.0, sampling=dpb.Poisson(0.05, 110))
    assert 1e-13 < part.failure < 1e-9
    ledger = dpb.privacy.Ledger((part,))
    deltas = [ledger.delta(epsilon) for epsilon in (0.5, 2.0, 10.0, 30.0, 800.0)]
    assert 1e-9 > deltas[2] >= deltas[3] * (1 - 1e-3) >= deltas[4] * (1 - 1e-2)
    assert deltas[0] > deltas[1] > deltas[2]
    # It is what some smaller epsilon pays, overflow included.
    event = ledger.events()["records"]
    grid = np.linspace(0.5, 4.0, 71)
    paid = [profiles.delta(event, REPLACE, e) for e in grid]
    paid += part.failure * (1 + np.exp(grid))
    assert deltas[2] == pytest.approx(min(paid), rel=2e-2)
    assert 0 < ledger.delta(0.0) <= 1


@pytest.mark.parametrize(("rate", "capacity"), [(0.5, 100), (0.1, 110)])
def test_batches_that_overflow_cost_no_more_than_full_batches(rate, capacity):
    part = release(count=3, multiplier=2.0, sampling=dpb.Poisson(rate, capacity))
    assert part.failure > 0.1
    ledger, mu = dpb.privacy.Ledger((part,)), math.sqrt(3) / 2.0
    for epsilon in (0.0, 5.0):
        full = float(profiles.gaussian_delta(mu, epsilon))
        assert ledger.delta(epsilon) == pytest.approx(full)
    assert ledger.epsilon(DELTA) == pytest.approx(profiles.gaussian_epsilon(mu, DELTA))


def test_batches_that_overflow_cost_the_people_who_lose_most_a_full_batch():
    sampling = dpb.Poisson(0.5, capacity=100)
    part = release(BOTH, 3, 2.0, sampling, clip_norms=(1.0, 3.0))
    ledger, mu = dpb.privacy.Ledger((part,), DISJOINT), math.sqrt(3) / 2.0
    for epsilon in (0.0, 2.0):
        full = float(profiles.gaussian_delta(0.75 * mu, epsilon))
        assert ledger.delta(epsilon) == pytest.approx(full)


def test_the_epsilon_of_little_noise_is_finite_beside_a_chance_of_overflow():
    part = release(count=200, multiplier=0.2, sampling=dpb.Poisson(0.2))
    ledger = dpb.privacy.Ledger((part,))
    mu = math.sqrt(200) / 0.2
    # Times e^epsilon, the chance of overflow is above any delta.
    assert 100 < ledger.epsilon(DELTA) <= profiles.gaussian_epsilon(mu, DELTA)


@pytest.mark.parametrize("multiplier", [0.0, 1e-3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_too_little_noise_has_no_small_epsilon(sampling, multiplier):
    ledger = dpb.privacy.Ledger((release(multiplier=multiplier, sampling=sampling),))
    assert ledger.epsilon(DELTA) > 1000
    assert ledger.delta(10.0) == pytest.approx(1.0)


def test_a_part_has_whole_steps_and_all_of_what_is_not_the_same_in_every_step():
    ledger = dpb.privacy.Ledger(tuple(release(count=count) for count in (1, 8, 6)))
    for done, counts in ((1, (1, 2, 6)), (3, (1, 6, 6)), (4, (1, 8, 6))):
        part = ledger.part(done, 4)
        assert tuple(r.count for r in part.releases) == counts


def test_an_empty_ledger_loses_nothing():
    assert dpb.privacy.Ledger(()).epsilon(DELTA) == 0
    assert dpb.privacy.Ledger(()).delta(0.0) == 0


def test_names_and_assumptions_are_kept():
    ledger = dpb.privacy.Ledger((release(),), assumptions=("a", "b")).named("inner")
    assert [part.name for part in ledger.releases] == ["inner: a"]
    total = ledger + dpb.privacy.Ledger((release(),), assumptions=("b", "c"))
    assert total.assumptions == ("a", "b", "c")


def test_relations_and_people_are_not_mixed():
    with pytest.raises(ValueError, match="the same `neighbours`"):
        dpb.privacy.Ledger((release(), release(neighbours=ADD_OR_REMOVE)))
    with pytest.raises(ValueError, match="people differ: People"):
        dpb.privacy.Ledger((), DISJOINT) + dpb.privacy.Ledger((), SHARED)


def test_uncalibrated_releases_have_no_epsilon():
    with pytest.raises(ValueError, match=r"dpbilevel\.calibrate"):
        dpb.privacy.Ledger((release(multiplier=None),)).epsilon(DELTA)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_multipliers_are_refused(bad):
    with pytest.raises(ValueError, match="non-negative and finite"):
        dpb.privacy.Gaussian(bad)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "Lower"}, "role must be one of"),
        ({"size": 6e3}, "size must be an integer"),
        ({"clip_norm": -1.0}, "clip_norm must be positive"),
    ],
)
def test_a_bad_query_is_refused(fields, message):
    good = {"role": "lower", "size": 10, "clip_norm": 1.0}
    with pytest.raises(ValueError, match=message):
        dpb.privacy.Query(**(good | fields))


@pytest.mark.parametrize("count", [0, -1, 2.0])
def test_a_release_counts_at_least_once(count):
    query = dpb.privacy.Query("lower", 10, 1.0)
    with pytest.raises(ValueError, match="count must be an integer of at least 1"):
        dpb.privacy.Release("gradient", count, (query,), dpb.privacy.Gaussian(1.0))


def test_people_of_a_ledger_may_be_a_word_but_not_any_word():
    query = dpb.privacy.Query("lower", 10, 1.0)
    release = dpb.privacy.Release("gradient", 1, (query,), dpb.privacy.Gaussian(1.0))
    assert dpb.privacy.Ledger((release,), "disjoint").people is dpb.People.DISJOINT
    with pytest.raises(ValueError, match="people must be one of"):
        dpb.privacy.Ledger((release,), "strangers")
    with pytest.raises(TypeError, match="releases must be an instance of tuple"):
        dpb.privacy.Ledger(release)


def test_epsilon_at_a_delta_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="delta must be strictly between 0 and 1"):
        dpb.privacy.Ledger(()).epsilon(2.0)


@pytest.mark.parametrize(
    "last",
    [
        Query("lower", 100, 1.0, dpb.FullBatch()),
        Query("lower", 50, 1.0, dpb.Poisson(0.01)),
    ],
)
def test_joint_queries_of_different_batches_are_refused(last):
    first = Query("upper", 100, 1.0, dpb.Poisson(0.01))
    same = Query("lower", 100, 2.0, dpb.Poisson(0.01))
    Release("sum", 1, (first, same), dpb.privacy.Gaussian(1.0), joint=True)
    with pytest.raises(ValueError, match="joint queries must be of"):
        Release("sum", 1, (first, last), dpb.privacy.Gaussian(1.0), joint=True)


def test_records_of_one_level_beside_those_of_another_are_refused():
    queries = [
        Query(role, 100, 1.0, dpb.Poisson(0.01)) for role in ("upper", "records")
    ]
    with pytest.raises(ValueError, match="allows no other role"):
        Release("sum", 1, tuple(queries), dpb.privacy.Gaussian(1.0))
