"""Noise multipliers of Poisson batches against the least that dp-accounting finds."""

import itertools
import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

import dpbilevel as dpb
from dpbilevel.core import plan
from dpbilevel.privacy.ledger import Ledger
from dpbilevel.privacy.mechanisms import Gaussian
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.releases import Release

EPSILONS, DELTAS = (0.1, 0.5, 2.0, 10.0), (1e-5, 1e-8, 1e-12)
STEPS, RATES = (10, 1000, 100_000), (1e-4, 0.01, 0.5)
ALL = list(itertools.product(EPSILONS, DELTAS, STEPS, RATES))
GRID = [row for i, row in enumerate(ALL) if i * 7 % 9 < 5]


def multiplier(relation, epsilon, delta, steps, rate):
    """The multiplier that a plan of so many Poisson batches gets."""
    query = Query("records", 1_000_000, 1.0, dpb.Poisson(rate))

    def ledger(scale):
        noise = Gaussian(scale, neighbours=relation)
        return Ledger((Release("query", steps, (query,), noise),))

    return plan._least_scale(ledger, dpb.PrivacyBudget(epsilon, delta))


def theirs(relation, multiplier, steps, rate):
    """Their accountant, which doubles the sensitivity itself under replace-one."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation[relation.name])
    noise = dp_accounting.GaussianDpEvent(multiplier * relation.contributions)
    return accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, noise), steps)


# The least multipliers at which dp-accounting, at its discretization of 1e-4, finds the
# epsilon of the row; `test_the_stored_multipliers_are_those_of_dp_accounting`.
STORED = {
    ("add_or_remove_one", 0.5, 1e-05, 1000, 0.01): 2.3823,
    ("replace_one", 0.5, 1e-05, 1000, 0.01): 2.2239,
    ("add_or_remove_one", 2.0, 1e-08, 1000, 0.01): 1.1539,
    ("replace_one", 2.0, 1e-08, 1000, 0.01): 0.84758,
    ("add_or_remove_one", 10.0, 1e-05, 1000, 0.01): 0.54678,
    ("replace_one", 10.0, 1e-05, 100000, 0.01): 1.5813,
    ("add_or_remove_one", 2.0, 1e-05, 100000, 0.01): 6.3515,
    ("add_or_remove_one", 2.0, 1e-08, 1000, 0.5): 41.989,
    ("replace_one", 0.5, 1e-08, 1000, 0.5): 155.97,
    ("replace_one", 10.0, 1e-08, 1000, 0.01): 0.3258,
}


@pytest.mark.parametrize("row", STORED)
def test_no_plan_has_one_percent_more_noise_than_dp_accounting_needs(row):
    relation, *parameters = row
    found = multiplier(dpb.Neighbours(relation), *parameters)
    assert 0.995 * STORED[row] <= found <= 1.01 * STORED[row]


@pytest.mark.slow
@pytest.mark.parametrize("row", STORED)
def test_the_stored_multipliers_are_those_of_dp_accounting(row):
    relation, epsilon, delta, *parameters = row
    accountant = theirs(dpb.Neighbours(relation), STORED[row], *parameters)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("relation", dpb.Neighbours)
@pytest.mark.parametrize("row", GRID)
def test_with_one_percent_less_noise_dp_accounting_does_not_reach_the_budget(
    relation, row
):
    epsilon, delta, *parameters = row
    found = multiplier(relation, *row)
    assert math.isfinite(found)
    less = theirs(relation, found / 1.01, *parameters)
    assert less.get_epsilon(delta) > epsilon
