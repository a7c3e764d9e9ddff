"""Guesses of one run: exact for one coin, valid for many."""

import numpy as np
import pytest
import scipy

import dpbilevel as dpb
from dpbilevel import audit


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_for_one_coin_the_bound_is_the_trade_off_curve(mu):
    # The test that is best against a Gaussian errs as often either way.
    power = scipy.stats.norm.cdf(mu / 2)
    for chance, expected in ((power - 1e-3, False), (power + 1e-3, True)):
        assert audit.refutes(1, 1, 1, chance, audit.gaussian_claim(mu)) is expected


def right_guesses(mu, canaries, guesses, runs):
    """Of coins that each move a Gaussian by mu standard deviations."""
    draw = np.random.default_rng(0)
    coins = draw.choice([-1.0, 1.0], (runs, canaries))
    seen = coins * mu / 2 + draw.normal(size=coins.shape)
    chosen = np.argsort(-np.abs(seen), axis=1)[:, :guesses]
    right = np.sign(seen) == coins
    return np.take_along_axis(right, chosen, axis=1).sum(1)


@pytest.mark.parametrize(("canaries", "guesses"), [(100, 100), (400, 40)])
def test_a_true_claim_is_refuted_no_more_often_than_the_significance_says(
    canaries, guesses
):
    mu, significance = 1.0, 0.05
    counts = right_guesses(mu, canaries, guesses, runs=2000)

    def refuted(claimed):
        found = {
            int(c): audit.refutes(int(c), guesses, canaries, significance, claimed)
            for c in np.unique(counts)
        }
        return np.mean([found[int(c)] for c in counts])

    assert refuted(audit.gaussian_claim(mu)) <= significance
    assert refuted(audit.gaussian_claim(mu / 5)) > 0.5  # the control


def epsilon_of_pure_guesses(correct, guesses, significance):
    """The bound of Steinke, Nasr and Jagielski without delta."""

    def excess(epsilon):
        chance = scipy.special.expit(epsilon)
        return scipy.stats.binom.sf(correct - 1, guesses, chance) - significance

    return scipy.optimize.brentq(excess, 0.0, 60.0)


def test_the_whole_curve_of_a_gaussian_shows_more_than_one_pair():
    delta, counts = 1e-5, (95, 100, 1000, 0.05)
    by_pair = epsilon_of_pure_guesses(95, 100, 0.05)
    mu = scipy.optimize.brentq(
        lambda mu: audit.refutes(*counts, audit.gaussian_claim(mu)) - 0.5,
        0.01,
        10.0,
        xtol=1e-3,
    )
    assert dpb.privacy.accounting.profiles.gaussian_epsilon(mu, delta) > by_pair


def test_more_right_guesses_refute_more():
    found = [
        audit.refutes(c, 50, 200, 0.05, audit.gaussian_claim(0.5)) for c in range(51)
    ]
    assert found == sorted(found)
    assert found[-1]
    assert not found[25]  # as coins fall
