"""Compositions of losses by hand: nothing that a sum of losses has is left out."""

import math

import numpy as np
import pytest
import scipy.stats

from dpbilevel.privacy.composition import Composition
from dpbilevel.privacy.losses import Atoms


def test_above_all_finite_losses_the_infinite_ones_are_left():
    chance, count = 1e-3, 50
    coin = Atoms((0.5, 0.5 - chance, chance), (0.4, 0.6, 0.0))
    exact = 1 - (1 - chance) ** count
    for epsilon in (20.0, 100.0):  # no sum of finite losses is above 12
        found = Composition(((coin, count),)).delta(epsilon)
        assert exact <= found <= 1.001 * count * chance


@pytest.mark.parametrize(("one", "count"), [(0.1, 100), (0.5, 60), (2.0, 20)])
def test_composed_releases_without_delta_cost_what_a_binomial_sum_does(one, count):
    chance = 1 / (1 + math.exp(-one))
    composed = Composition(
        ((Atoms((chance, 1 - chance), (1 - chance, chance)), count),)
    )
    ups = np.arange(count + 1)
    law = scipy.stats.binom.pmf(ups, count, chance)
    for part in (0.3, 0.5, 0.7):
        epsilon = part * one * count
        gaps = np.maximum(one * (2 * ups - count) - epsilon, 0)
        exact = law @ -np.expm1(-gaps)
        assert exact * (1 - 1e-9) <= composed.delta(epsilon) <= 1.01 * exact
