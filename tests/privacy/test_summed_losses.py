"""Compositions of losses by hand: nothing that a sum of losses has is left out."""

import dataclasses
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.accounting.closed_forms import pure_event
from dpbilevel.privacy.accounting.losses import Atoms, Shifted, Subset, allocated
from dpbilevel.privacy.accounting.summed_losses import Composition, _Law
from tests.privacy import reference_accounting as reference


def law_of(masses, count, step, tilts, window):
    """The law of `count` losses with these masses at the multiples of a step from 0."""
    parts = [(0, np.asarray(masses, float), 0.0)]
    return _Law(parts, np.array([float(count)]), step, tilts, window)


def test_a_discretized_loss_is_no_smaller_than_the_exact_one_for_all_rounding():
    mu, step = 1.0, 2.0**-4
    first, masses, beyond = Shifted(1.0, 1.0, mu / 2).discretized(step, 37.0)
    with mpmath.workdps(40):
        losses = [mpmath.mpf(step * (first + k)) for k in range(len(masses))]
        compared = 0
        for k in range(len(masses)):
            epsilon = losses[k]
            if k % 12 or not -6 < epsilon < 12:
                continue
            more = range(k + 1, len(masses))
            found = mpmath.fsum(
                masses[j] * (1 - mpmath.exp(epsilon - losses[j])) for j in more
            )
            near, far = (mpmath.ncdf(-epsilon / mu + way * mu / 2) for way in (1, -1))
            exact = near - mpmath.exp(epsilon) * far
            # Besides, a composition raises its delta by this part for each release.
            assert (found + beyond) * (1 + 2.0**-46) >= exact
            compared += 1
    assert compared > 20


def test_infinite_losses_of_every_release_count():
    chance, count, epsilon = 1e-3, 50, 0.5
    revealing = Atoms((1 - chance, chance), (1.0, 0.0))
    parts = (revealing, count), (Shifted(1.0, 1.0, 0.5), 1)
    kept = (1 - chance) ** count
    exact = 1 - kept + kept * reference.gaussian(1.0, epsilon - math.log(kept))
    assert exact <= Composition(parts).delta(epsilon) <= 1.01 * exact


def test_above_all_finite_losses_the_infinite_ones_are_left():
    chance, count = 1e-3, 50
    coin = Atoms((0.5, 0.5 - chance, chance), (0.4, 0.6, 0.0))
    exact = 1 - (1 - chance) ** count
    for epsilon in (20.0, 100.0):  # no sum of finite losses is above 12
        found = Composition(((coin, count),)).delta(epsilon)
        assert exact <= found <= 1.001 * count * chance


def test_what_a_pass_may_lose_beyond_its_largest_finite_loss_counts_as_infinite():
    mu, step = 5.0, 0.01  # of a mu above 4 the profile is that of a Gaussian release
    first, masses, beyond = allocated("remove", mu, 3).discretized(step, 9.0)
    largest = step * (first + len(masses) - 2)  # the next one is above it
    assert 0 < reference.gaussian(mu, largest) <= beyond


@pytest.mark.parametrize(("one", "count"), [(0.1, 100), (0.5, 60), (2.0, 20)])
def test_composed_releases_without_delta_cost_what_a_binomial_sum_does(one, count):
    chance = 1 / (1 + math.exp(-one))
    event = dp_accounting.SelfComposedDpEvent(pure_event(one), count)
    profile = profiles.profile(event, dpb.Neighbours.REPLACE_ONE)
    ups = np.arange(count + 1)
    law = scipy.stats.binom.pmf(ups, count, chance)
    for part in (0.3, 0.5, 0.7):
        epsilon = part * one * count
        gaps = np.maximum(one * (2 * ups - count) - epsilon, 0)
        exact = law @ -np.expm1(-gaps)
        assert exact * (1 - 1e-9) <= profile(epsilon) <= 1.01 * exact
    found = profiles.epsilon(event, dpb.Neighbours.REPLACE_ONE, float(exact))
    assert epsilon * (1 - 1e-6) <= found <= 1.01 * epsilon


def test_every_release_without_delta_beside_gaussian_ones_counts():
    one, count, mu, epsilon = 0.1, 20, 0.5, 1.5
    draws = dp_accounting.SelfComposedDpEvent(pure_event(one), count)
    gaussian = dp_accounting.GaussianDpEvent(1 / mu)
    event = dp_accounting.ComposedDpEvent([draws, gaussian])
    exact = sum(
        scipy.stats.binom.pmf(ups, count, 1 / (1 + math.exp(-one)))
        * reference.gaussian(mu, epsilon - one * (2 * ups - count))
        for ups in range(count + 1)
    )
    found = profiles.delta(event, dpb.Neighbours.REPLACE_ONE, epsilon)
    assert exact * (1 - 1e-9) <= found <= 1.01 * exact


EVERY_LOSS = [
    Shifted(0.1, 0.2, 1.0),
    Subset(0.1, 1.0),
    Atoms((1.0, 0.0), (0.5, 0.5)),
    allocated("add", 1.0, 2),
]


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_no_mass_is_lost_when_a_loss_is_discretized(loss):
    for reach in (1.0, 4.0):  # tails that are seen
        _, masses, beyond = loss.discretized(0.01, reach)
        assert masses.sum() + beyond == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_no_cached_composition_is_taken_for_a_loss_of_other_parameters(loss):
    for field in dataclasses.fields(loss):
        other = dataclasses.replace(loss, **{field.name: "another value"})
        assert other != loss


def test_losses_above_the_window_of_a_law_are_bounded():
    chance, loss, epsilon = 1e-6, 3.0, 0.5
    masses = [1 - chance, *[0.0] * 29, chance]
    short = law_of(masses, 1, 0.1, (0.5, 2.0), (-1.0, 1.0))
    assert short.grid[-1] < loss
    assert short.delta(epsilon) >= chance * -math.expm1(epsilon - loss)


def test_no_law_is_used_below_its_window():
    composed = Composition(((Shifted(0.3, 0.0, 1.0), 3000),))
    laws = [composed.delta(epsilon) and [*composed._laws] for epsilon in (20.3, 12.9)]
    assert laws[0] == laws[1]  # one tilt for both
    assert min(law.low for law in composed._laws.values()) <= 12.9


@pytest.mark.parametrize("epsilon", [30.0, 40.0])
def test_a_delta_below_the_rounding_of_a_transform_is_not_below_the_exact_one(epsilon):
    count, chance = 100, 0.1  # a loss of 1 with this chance
    law = law_of([1 - chance, *[0.0] * 7, chance], count, 0.125, (0.5, 1.0), (-1, 101))
    losses = np.arange(math.ceil(epsilon), count + 1)
    exact = scipy.stats.binom.pmf(losses, count, chance) @ -np.expm1(epsilon - losses)
    assert law.delta(epsilon) >= exact
    law._off = 0.0  # the control
    assert law.delta(epsilon) < exact


def test_a_delta_has_the_rounding_of_masses_transforms_and_powers_on_top():
    count, step, tilt, epsilon = 2**16, 2.0**-16, 0.5, 0.5
    law = law_of([0.0, 1.0], count, step, (tilt, 100.0), (-1.0, 2.0))  # a sum of 1
    above = law.grid[law.grid > epsilon]
    factors = np.exp(tilt * (1 - above)) * -np.expm1(epsilon - above)
    # Of a transform and of the one back, and of each power, all of norm 1.
    rounding = 2.0**-52 * (8 * math.log2(len(law.grid)) * (2 * count + 1) + 16 * count)
    exact = -math.expm1(epsilon - 1) * (1 + count * 2.0**-46)
    least = exact + rounding * math.sqrt(np.sum(factors**2))
    assert law.delta(epsilon) >= least * (1 - 1e-10)
