import math

import dp_accounting
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from dp_accounting import rdp

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from tests.cases import slow
from tests.privacy import reference_accounting

REPLACE, ADD_OR_REMOVE = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE
DELTA = 1e-5
Gaussian, Poisson = dp_accounting.GaussianDpEvent, dp_accounting.PoissonSampledDpEvent


def without_replacement(fraction, multiplier):
    size = 10_000
    return dp_accounting.SampledWithoutReplacementDpEvent(
        size, round(fraction * size), Gaussian(multiplier)
    )


def repeated(event, count):
    return dp_accounting.SelfComposedDpEvent(event, count)


def exact_gaussian_delta(mu, epsilon):
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        near = mpmath.ncdf(-epsilon / mu + mu / 2)
        return float(near - mpmath.exp(epsilon) * mpmath.ncdf(-epsilon / mu - mu / 2))


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.5, 4.0, 40.0, -0.5, -4.0])
def test_gaussian_profile_is_that_of_balle_and_wang(mu, epsilon):
    exact = exact_gaussian_delta(mu, epsilon)
    assert profiles.gaussian_delta(mu, epsilon) == pytest.approx(
        exact, rel=1e-9, abs=1e-300
    )


@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
def test_gaussian_epsilon_agrees_with_dp_accounting(sigma):
    expected = dp_accounting.get_epsilon_gaussian(sigma, DELTA)
    for relation in dpb.Neighbours:
        value = profiles.epsilon(Gaussian(sigma), relation, DELTA)
        assert value == pytest.approx(expected, rel=1e-9)
        # gaussian_delta inverts it.
        back = profiles.delta(Gaussian(sigma), relation, value)
        assert back == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("mu", [1e-6, 1e-4, 0.3, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("delta", [1e-300, 1e-15, 1e-5, 0.5, 0.99])
def test_gaussian_epsilon_ends_on_the_safe_side_and_no_further(mu, delta):
    value = profiles.gaussian_epsilon(mu, delta)
    assert profiles.gaussian_delta(mu, value) <= delta
    if value > 0:
        assert profiles.gaussian_delta(mu, value * (1 - 1e-6)) > delta


def test_gaussian_epsilon_at_the_ends():
    assert profiles.gaussian_epsilon(0.0, 0.0) == 0
    assert profiles.gaussian_epsilon(0.0, 1e-5) == 0
    assert profiles.gaussian_epsilon(1.0, 0.0) == math.inf
    assert profiles.gaussian_epsilon(math.inf, 0.5) == math.inf
    assert profiles.gaussian_epsilon(1e160, 1e-5) == math.inf


@pytest.mark.parametrize("multiplier", [1e-320, 1e-200, 1e200])
def test_extreme_multipliers_neither_overflow_nor_vanish(multiplier):
    event = repeated(Gaussian(multiplier), 4)
    assert profiles.gaussian_mu(event) == 2 / multiplier
    assert profiles.gaussian_mu(Gaussian(multiplier)) > 0


@pytest.mark.parametrize("target", [1e-5, 1e-12, 1e-15, 1e-20])
def test_a_hundred_thousand_releases_keep_a_small_delta(target):
    # As many subsets of everything as make one Gaussian of multiplier 1.
    many = repeated(without_replacement(1.0, math.sqrt(1e5)), 100_000)
    exact = profiles.gaussian_epsilon(1.0, target)
    (composed,) = profiles.compositions(many, REPLACE)
    assert target <= composed.delta(exact) <= 1.01 * target
    whole = profiles.full_batch_mu(many)
    assert whole == pytest.approx(1.0, rel=1e-12)
    assert profiles.epsilon(many, REPLACE, target) <= exact * (1 + 1e-9)


@pytest.mark.parametrize("make", [without_replacement, Poisson])
def test_a_batch_at_random_costs_no_more_than_the_one_with_the_record(make):
    for multiplier in (1e-3, 0.05, 1.0):
        inner = multiplier if make is without_replacement else Gaussian(multiplier)
        event = repeated(make(0.1, inner), 1000)
        whole = profiles.gaussian_epsilon(math.sqrt(1000) / multiplier, 1e-13)
        assert 0 < profiles.epsilon(event, REPLACE, 1e-13) <= whole < math.inf


def test_many_full_batches_with_little_noise_are_not_discretized():
    # Their one Gaussian of multiplier 0.003 would need gigabytes.
    full, sampled = repeated(Gaussian(3.0), 1_000_000), Poisson(0.1, Gaussian(2.0))
    event = dp_accounting.ComposedDpEvent([full, sampled])
    assert profiles.delta(event, REPLACE, 10.0) == 1
    whole = profiles.gaussian_epsilon(math.hypot(1000 / 3, 1 / 2), DELTA)
    assert profiles.epsilon(event, REPLACE, DELTA) == whole


def test_an_approximate_law_costs_its_distance_there_and_back():
    paid = profiles.total_variation_delta(1.0, 1e-6, 1e-5)
    assert paid == pytest.approx(1e-5 + (1 + math.e) * 1e-6, rel=1e-12)
    assert profiles.total_variation_delta(1.0, 0.0, 1e-5) == 1e-5
    assert profiles.total_variation_delta(1e6, 1e-9) == 1
    assert profiles.total_variation_delta(math.inf, 0.0) == 0


def test_profiles_at_the_ends():
    assert profiles.gaussian_delta(0.0, 1.0) == 0
    assert profiles.gaussian_delta(math.inf, 1.0) == 1
    silent, broken = dp_accounting.NoOpDpEvent(), Gaussian(0.0)
    assert profiles.epsilon(silent, REPLACE, DELTA) == 0
    assert profiles.epsilon(broken, REPLACE, DELTA) == math.inf
    assert profiles.delta(broken, REPLACE, 1.0) == 1
    for event in (Poisson(0.1, Gaussian(0.0)), without_replacement(0.1, 0.0)):
        assert profiles.delta(event, REPLACE, 1.0) == 1
        assert profiles.epsilon(event, REPLACE, DELTA) == math.inf


def test_gaussians_compose_by_their_squared_precision():
    parts = [repeated(Gaussian(2.0), 3), Gaussian(0.5), repeated(Gaussian(7.0), 2)]
    event = repeated(dp_accounting.ComposedDpEvent(parts), 5)
    mu = math.sqrt(5 * (3 / 4 + 4 + 2 / 49))
    assert profiles.gaussian_mu(event) == pytest.approx(mu)
    assert profiles.gaussian_mu(Poisson(0.1, Gaussian(1.0))) is None


@pytest.mark.parametrize("relation", [REPLACE, ADD_OR_REMOVE])
@pytest.mark.parametrize("multiplier", [0.07, 0.3])
def test_little_noise_beside_sampled_releases_is_counted(multiplier, relation):
    loud, sampled = Gaussian(multiplier), repeated(Poisson(0.01, Gaussian(4.0)), 20)
    event = dp_accounting.ComposedDpEvent([loud, sampled])
    alone = profiles.gaussian_epsilon(1 / multiplier, DELTA)
    whole = profiles.gaussian_epsilon(math.hypot(1 / multiplier, 20**0.5 / 4), DELTA)
    assert alone < profiles.epsilon(event, relation, DELTA) < whole


RDP_RELATIONS = {
    "gaussian": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "poisson": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "subset": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


@pytest.mark.parametrize("multiplier", [0.8, 2.0, 6.0])
@pytest.mark.parametrize("name", RDP_RELATIONS)
def test_epsilon_is_below_renyi_and_basic_composition(name, multiplier):
    event, relation = {
        "gaussian": (Gaussian(multiplier), REPLACE),
        "poisson": (Poisson(0.02, Gaussian(multiplier)), ADD_OR_REMOVE),
        "subset": (without_replacement(0.02, multiplier), REPLACE),
    }[name]
    count = 200
    tight = profiles.epsilon(repeated(event, count), relation, DELTA)
    accountant = rdp.RdpAccountant(neighboring_relation=RDP_RELATIONS[name])
    renyi = accountant.compose(event, count).get_epsilon(DELTA)
    basic = count * profiles.epsilon(event, relation, DELTA / count)
    assert 0 < tight <= renyi <= basic


@pytest.mark.parametrize(
    ("event", "relation", "expected"),
    [
        (without_replacement(0.01, 2.0), REPLACE, 0.720),
        (Poisson(0.01, Gaussian(2.0)), REPLACE, 0.561),
        (Poisson(0.01, Gaussian(4.0)), ADD_OR_REMOVE, 0.272),
    ],
)
def test_reference_values_of_a_thousand_sampled_releases(event, relation, expected):
    # Noise of 4 clip norms; its multiplier is 2 where the sensitivity is 2 clip norms.
    value = profiles.epsilon(repeated(event, 1000), relation, DELTA)
    assert value == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_sampling_everything_is_no_sampling(multiplier):
    whole = profiles.epsilon(repeated(Gaussian(multiplier), 3), REPLACE, DELTA)
    subset = repeated(without_replacement(1.0, multiplier), 3)
    assert profiles.epsilon(subset, REPLACE, DELTA) == pytest.approx(whole, rel=1e-3)
    nearly = repeated(without_replacement(0.9999, multiplier), 3)
    assert profiles.epsilon(nearly, REPLACE, DELTA) == pytest.approx(whole, rel=1e-2)


def hockey_stick(p, q, epsilon):
    grid = np.linspace(-30, 30, 200_001)
    excess = np.maximum(p(grid) - math.exp(epsilon) * q(grid), 0)
    return scipy.integrate.trapezoid(excess, grid)


def mixture(fraction, shift, sigma):
    normal = scipy.stats.norm
    return lambda x: (
        (1 - fraction) * normal.pdf(x, 0, sigma)
        + fraction * normal.pdf(x, shift, sigma)
    )


@pytest.mark.parametrize("fraction", [0.01, 0.3])
@pytest.mark.parametrize("multiplier", [0.7, 2.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_the_subset_profile_is_attained(fraction, multiplier, epsilon):
    # All other records contribute -C, so a batch without the person is N(0) on both
    # sides, and one with the person is moved by one sensitivity.
    attained = max(
        hockey_stick(*pair, epsilon)
        for pair in (
            (mixture(fraction, 1, multiplier), mixture(0, 1, multiplier)),
            (mixture(0, 1, multiplier), mixture(fraction, 1, multiplier)),
        )
    )
    claimed = profiles.delta(
        without_replacement(fraction, multiplier), REPLACE, epsilon
    )
    assert attained * (1 - 1e-6) <= claimed <= attained * 1.001 + 1e-9


@pytest.mark.parametrize("count", [1, 10, 300])
def test_composed_subsets_lose_at_least_what_that_worst_case_loses(count):
    # Its two sides are the pair of Poisson sampling under add-or-remove.
    worst = Poisson(0.05, Gaussian(1.5))
    attained = profiles.epsilon(repeated(worst, count), ADD_OR_REMOVE, DELTA)
    subsets = repeated(without_replacement(0.05, 1.5), count)
    assert profiles.epsilon(subsets, REPLACE, DELTA) >= attained - 1e-3


@pytest.mark.parametrize("multiplier", [0.7, 2.0])
@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("relation", dpb.Neighbours)
def test_poisson_profiles_equal_numerical_integrals(relation, rate, multiplier):
    # In units of C: replaced, the record moves the sum by +1 or by -1 from nothing.
    sigma = multiplier * relation.contributions
    other_rate = rate if relation is REPLACE else 0.0
    pair = mixture(rate, 1, sigma), mixture(other_rate, -1, sigma)
    for epsilon in (0.05, 0.5):
        expected = max(hockey_stick(*pair, epsilon), hockey_stick(*pair[::-1], epsilon))
        event = Poisson(rate, Gaussian(multiplier))
        value = profiles.delta(event, relation, epsilon)
        assert expected * (1 - 1e-6) <= value <= expected * 1.001 + 1e-9


@pytest.mark.parametrize("rate", [2.0**-31, 1e-6, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("multiplier", [0.15, *slow(0.25, 1.0)])
def test_a_loss_that_has_a_largest_value_has_no_mass_beyond(rate, multiplier):
    # An added record's loss is below -log(1 - rate), however little the noise.
    most = -math.log1p(-rate)

    def added(count, epsilon):
        event = repeated(Poisson(rate, Gaussian(multiplier)), count)
        return profiles.compositions(event, ADD_OR_REMOVE)[1].delta(epsilon)

    for part in (0.5, 0.9, 0.99, 1 - 1e-6):
        exact = reference_accounting.added(rate, 1 / multiplier, part * most)
        found = added(1, part * most)
        assert exact * (1 - 1e-11) - 1e-16 <= found <= exact * 1.001 + 2e-6
    for count in (1, 5):
        assert added(count, count * (most * (1 + 1e-8) + 1e-14)) < 1e-20


@pytest.mark.parametrize("make", [without_replacement, Poisson])
def test_more_noise_fewer_releases_and_smaller_batches_are_more_private(make):
    def epsilon(rate=0.05, multiplier=1.5, count=20):
        inner = multiplier if make is without_replacement else Gaussian(multiplier)
        event = repeated(make(rate, inner), count)
        return profiles.epsilon(event, REPLACE, DELTA)

    assert epsilon() > epsilon(multiplier=1.6) > epsilon(multiplier=5.0) > 0
    assert epsilon() > epsilon(count=19) > epsilon(count=1)
    assert epsilon() > epsilon(rate=0.04) > epsilon(rate=0.001)


def test_what_no_accountant_supports_is_refused():
    with pytest.raises(ValueError, match=r"SampledWithoutReplacement.*not accounted"):
        profiles.delta(without_replacement(0.1, 1.0), ADD_OR_REMOVE, 1.0)
    nested = Poisson(0.1, Poisson(0.1, Gaussian(1.0)))
    laplace = dp_accounting.LaplaceDpEvent(1.0)
    for event in (nested, laplace):
        with pytest.raises(ValueError, match="not accounted for"):
            profiles.delta(event, REPLACE, 1.0)
