import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.stats import beta, norm

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from tests.privacy import reference_accounting as reference
from tests.privacy.golden import (
    ADD_OR_REMOVE,
    DISJOINT,
    OVERLAPPING,
    REPLACE,
    Gaussian,
    Poisson,
    hockey_stick,
    inverse_gaussian,
    subset,
    times,
)


def test_the_reference_inverts_what_is_known_in_closed_form():
    for mu, count, epsilon in [(0.1, 100, 0.3), (1.0, 1, 8.0), (3.0, 4, 40.0)]:
        exact = reference.gaussian(mu * math.sqrt(count), epsilon)
        for loss in (reference.gaussian_loss(mu), reference.removed_loss(1.0, mu)):
            value = reference.composed([(loss, count)], epsilon)
            assert value == pytest.approx(exact, rel=1e-9)
    one = reference.composed([(reference.removed_loss(0.3, 0.5), 1)], 0.2, 1e-5)
    assert one == pytest.approx(reference.removed(0.3, 0.5, 0.2), rel=1e-4)
    one = reference.composed([(reference.added_loss(0.3, 0.5), 1)], 0.2, 1e-5)
    assert one == pytest.approx(reference.added(0.3, 0.5, 0.2), rel=1e-4)


def test_the_reference_composes_two_releases_as_conditioning_does():
    rate, mu, epsilon = 0.3, 1.0, 0.5
    x = np.linspace(-15, 15, 3001)
    up, down = (
        np.log1p(rate * np.expm1(s * x * mu / 2 - mu**2 / 8)) for s in (1.0, -1.0)
    )
    law = norm.pdf(x) * np.exp(up) * (x[1] - x[0])
    rest = [reference.replaced(rate, mu, epsilon - loss) for loss in up - down]
    value = reference.composed([(reference.replaced_loss(rate, mu), 2)], epsilon, 1e-7)
    assert value == pytest.approx(law @ rest, rel=1e-5)


EVENTS = {
    "full": (Gaussian(30.0), REPLACE),
    "poisson, replace": (Poisson(0.02, Gaussian(1.5)), REPLACE),
    "poisson, add or remove": (Poisson(0.02, Gaussian(1.5)), ADD_OR_REMOVE),
    "subset": (subset(0.02, 1.5), REPLACE),
}


every_event = pytest.mark.parametrize("name", EVENTS)


@every_event
def test_fine_is_below_coarse_below_renyi_below_basic_composition(name):
    event, relation = EVENTS[name]
    fine = profiles.epsilon(times(event, 200), relation, 1e-5)
    coarse = profiles.epsilon(times(event, 200), relation, 1e-5)
    basic = 200 * profiles.epsilon(event, relation, 1e-5 / 200)
    assert 0 < fine <= coarse <= basic
    if name == "poisson, replace":  # no Renyi accountant: adding and removing
        return
    # Renyi accountants never double; subsets they take under replace-one alone.
    native = dp_accounting.NeighboringRelation
    kind = native.REPLACE_ONE if name == "subset" else native.ADD_OR_REMOVE_ONE
    accountant = rdp.RdpAccountant(neighboring_relation=kind).compose(event, 200)
    assert coarse <= accountant.get_epsilon(1e-5) <= basic


@every_event
def test_a_count_equals_a_list_and_a_nest_of_events(name):
    event, relation = EVENTS[name]
    composed = dp_accounting.ComposedDpEvent
    forms = [
        times(event, 12),
        composed([event] * 12),
        times(composed([event, times(event, 2)]), 4),
        composed([times(event, 5), dp_accounting.NoOpDpEvent(), times(event, 7)]),
    ]
    values = [profiles.delta(form, relation, 0.3) for form in forms]
    assert values == pytest.approx([values[0]] * 4, rel=1e-6)
    assert values[0] > profiles.delta(times(event, 11), relation, 0.3)


def charged(
    epsilon=0.5,
    multiplier=1.2,
    count=20,
    rate=0.1,
    size=1000,
    capacity=140,
    fixed=100,
    people=OVERLAPPING,
    lower=1.0,
    kind="poisson",
):
    sampling = (
        dpb.Poisson(rate, capacity) if kind == "poisson" else dpb.FixedSize(fixed)
    )
    queries = (
        dpb.privacy.Query("upper", size, 1.0, sampling),
        dpb.privacy.Query("lower", size, lower, sampling),
    )
    release = dpb.privacy.Release("a", count, queries, dpb.privacy.Gaussian(multiplier))
    return dpb.privacy.Ledger((release,), people).delta(epsilon)


@pytest.mark.parametrize(
    "less",
    [
        {"epsilon": 0.6},
        {"multiplier": 1.3},
        {"count": 19},
        {"rate": 0.09},
        {"capacity": 150},
        {"size": 900},
        {"people": DISJOINT},
        {"kind": "subset", "multiplier": 1.3},
        {"kind": "subset", "count": 19},
        {"kind": "subset", "fixed": 90},
        {"kind": "subset", "size": 1100},
        {"kind": "subset", "epsilon": 0.6},
    ],
)
def test_delta_falls_in_every_parameter_that_makes_a_run_more_private(less):
    kind = {"kind": less.get("kind", "poisson")}
    assert 0 < charged(**less) < charged(**kind)


def test_nobody_in_the_ball_is_seen_better_than_an_opposite_pair():
    # Replaced under Poisson sampling in the plane, the record moves by one at most.
    rate, sigma = 0.2, 1.0
    grid = np.linspace(-7, 7, 211)
    x, y = np.meshgrid(grid, grid)

    def law(shift):
        moved = np.exp(-((x - shift[0]) ** 2 + (y - shift[1]) ** 2) / 2 / sigma**2)
        still = np.exp(-(x**2 + y**2) / 2 / sigma**2)
        cell = (grid[1] - grid[0]) ** 2 / (2 * math.pi * sigma**2)
        return (rate * moved + (1 - rate) * still) * cell

    for epsilon in (0.02, 0.2, 0.6):
        event = Poisson(rate, Gaussian(sigma / 2))
        claimed = profiles.delta(event, REPLACE, epsilon)
        attained = []
        for radius in (0.0, 0.5, 1.0):
            for angle in np.linspace(0, math.pi, 5):
                other = radius * math.cos(angle), radius * math.sin(angle)
                attained.append(hockey_stick((law((1.0, 0.0)), law(other)), epsilon))
        assert max(attained) <= claimed * (1 + 1e-3)
        assert max(attained) >= claimed * (1 - 1e-2)


@pytest.mark.parametrize("relation", dpb.Neighbours)
def test_an_attack_never_wins_more_than_is_claimed(relation):
    # The likelihood ratio of ten batches; under replace-one, of fixed size, where all
    # other records pull against the person, so that taking part shows as one shift.
    rate, multiplier, count, epsilon, runs = 0.3, 1.0, 10, 1.0, 100_000
    rng = np.random.default_rng(7)
    noise = multiplier * rng.standard_normal((2, runs, count))
    noise[0] += rng.random((runs, count)) < rate
    ratio = np.log1p(rate * np.expm1((noise - 0.5) / multiplier**2)).sum(-1)
    hits = (ratio > epsilon).sum(-1)
    lower = beta.ppf(1e-4, hits[0], runs - hits[0] + 1)
    upper = beta.isf(1e-4, hits[1] + 1, runs - hits[1])
    attained = lower - math.exp(epsilon) * upper

    event = Poisson(rate, Gaussian(multiplier))
    if relation is REPLACE:
        event = subset(rate, multiplier)
    assert attained <= profiles.delta(times(event, count), relation, epsilon)
    # The attack is strong enough to refute one release fewer in three.
    assert attained > profiles.delta(times(event, 6), relation, epsilon)


def test_subsets_accounted_as_poisson_batches_would_be_refuted():
    attained = reference.removed(0.3, 1.0, 0.5)
    claimed = profiles.delta(subset(0.3, 1.0), REPLACE, 0.5)
    assert claimed >= attained * (1 - 1e-9)
    poisson = profiles.delta(Poisson(0.3, Gaussian(1.0)), REPLACE, 0.5)
    assert poisson < 0.8 * attained


def test_the_factor_two_of_replacing_is_applied_once_whatever_accountants_do():
    native = dp_accounting.NeighboringRelation.REPLACE_ONE
    doubled = pld.PLDAccountant(native).compose(Gaussian(2.0)).get_epsilon(1e-5)
    kept = rdp.RdpAccountant(neighboring_relation=native).compose(Gaussian(2.0))
    assert doubled > 2 * kept.get_epsilon(1e-5)  # one event, two meanings
    for relation, std in ((REPLACE, 4.0), (ADD_OR_REMOVE, 2.0)):
        mechanism = dpb.privacy.Gaussian(2.0, relation)
        release = dpb.privacy.Release(
            "a", 1, (dpb.privacy.Query("records", 1, 1.0),), mechanism
        )
        assert release.noise_std == pytest.approx(std)
        exact = inverse_gaussian(0.5, 1e-5)
        assert dpb.privacy.Ledger((release,)).epsilon(1e-5) == pytest.approx(
            exact, rel=1e-9
        )


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.RandomizedResponseDpEvent(0.5, 3),
        dp_accounting.dp_event.RepeatAndSelectDpEvent(
            Poisson(0.1, Gaussian(1.0)), 10.0, 1.0
        ),
        dp_accounting.ZCDpEvent(0.1),
        dp_accounting.LaplaceDpEvent(1.0),
        dp_accounting.NonPrivateDpEvent(),
        dp_accounting.UnsupportedDpEvent(),
        Poisson(0.1, dp_accounting.ComposedDpEvent([Gaussian(1.0)])),
    ],
)
def test_events_whose_counts_or_relations_are_doubtful_do_not_get_through(event):
    for form in (event, times(event, 100), dp_accounting.ComposedDpEvent([event])):
        with pytest.raises(ValueError, match="not accounted for"):
            profiles.epsilon(form, REPLACE, 1e-5)
