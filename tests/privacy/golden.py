"""Events and comparisons with a reference, for tests of the accounting."""

import dataclasses
import math
from collections.abc import Callable

import dp_accounting
import numpy as np

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from tests.privacy import reference_accounting as reference

REPLACE, ADD_OR_REMOVE = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE


DISJOINT, OVERLAPPING, SHARED = dpb.People


Gaussian, Poisson = dp_accounting.GaussianDpEvent, dp_accounting.PoissonSampledDpEvent


@dataclasses.dataclass
class Row:
    """What the library claims, the truth, and a plausible mistake.

    Attributes:
        claimed: The library's number, called once.
        truth: The reference, from NumPy and SciPy alone.
        mistake: A wrong reference, which the comparison must reject.
        slack: How far above the truth the claim may be, relatively.
    """

    claimed: Callable
    truth: Callable
    mistake: Callable
    slack: float = 5e-4


def agrees(claimed, truth, slack):
    # The library may err upwards by its grid, and downwards by rounding only.
    return truth * (1 - 1e-8) <= claimed <= truth * (1 + slack) + 1e-14


def times(event, count):
    return dp_accounting.SelfComposedDpEvent(event, count)


def subset(rate, multiplier, size=1_000_000):
    return dp_accounting.SampledWithoutReplacementDpEvent(
        size, round(rate * size), Gaussian(multiplier)
    )


def delta(event, relation, epsilon):
    return lambda: profiles.delta(event, relation, epsilon)


def inverse_gaussian(mu, target):
    return reference.inverse(lambda e: reference.gaussian(mu, e), target, 1000.0)


def tilted(potential, tilt):
    """The density exp(-F) and that of F plus a function of slope at most `tilt`."""
    x = np.linspace(-40, 40, 400_001)
    laws = []
    for energy in (potential(x), potential(x) + tilt * x):
        density = np.exp(-(energy - energy.min()))
        laws.append(density / density.sum())
    return laws


def hockey_stick(pair, epsilon):
    p, q = pair
    excess = p - math.exp(epsilon) * q, q - math.exp(epsilon) * p
    return max(np.maximum(e, 0).sum() for e in excess)
