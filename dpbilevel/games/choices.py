"""Choice of the best candidate of a solver's parameters."""

import math

import numpy as np
import scipy

from ..privacy.accounting import profiles
from ..privacy.budget import PrivacyBudget


def cheapest(gap: np.ndarray, cost: np.ndarray) -> int:
    """Return the cheapest candidate with a gap within 5 % of the least."""
    return int(np.argmin(np.where(gap <= 1.05 * np.min(gap), cost, np.inf)))


def integers(most: int, count: int) -> np.ndarray:
    """Return at most `count` integers from 1 to `most`, evenly spread in logarithms."""
    return np.unique(np.round(np.geomspace(1, max(most, 1), count)).astype(int))


def estimated_multiplier(
    rate: np.ndarray, count: np.ndarray, budget: PrivacyBudget
) -> np.ndarray:
    r"""Estimate the multiplier by the central limit, to compare candidates only.

    $\mu = q \sqrt{k (e^{1 / z^2} - 1)}$ for $k$ releases on a share $q$ of the records.
    """

    def excess(log_mu: float) -> float:
        delta = profiles.gaussian_delta(math.exp(log_mu), budget.epsilon)
        return float(delta) - budget.delta

    mu = math.exp(scipy.optimize.brentq(excess, -20.0, 5.0))
    return 1 / np.sqrt(np.log1p((mu / rate) ** 2 / count))
