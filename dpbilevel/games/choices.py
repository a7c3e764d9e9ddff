"""Candidates of parameters, and which of them is the best."""

import math

import numpy as np
import scipy

from ..privacy import accounting
from ..privacy.budget import PrivacyBudget


def cheapest(gap: np.ndarray, cost: np.ndarray) -> int:
    """The cheapest of the candidates whose bound is within 5 % of the least.

    Args:
        gap: The bound of each.
        cost: The number of operator values of each.
    """
    return int(np.argmin(np.where(gap <= 1.05 * np.min(gap), cost, np.inf)))


def integers(most: int, count: int) -> np.ndarray:
    """Integers from 1 to `most`, evenly spread over their logarithms.

    Args:
        most: The largest.
        count: How many, but for equal ones.
    """
    return np.unique(np.round(np.geomspace(1, max(most, 1), count)).astype(int))


def estimated_multiplier(
    rate: np.ndarray, count: np.ndarray, budget: PrivacyBudget
) -> np.ndarray:
    r"""The multiplier by the central limit, to compare candidates: never to be claimed.

    $\mu = q \sqrt{k (e^{1 / z^2} - 1)}$.

    Args:
        rate: $q$, the share of the records in a batch.
        count: $k$ releases.
        budget: The guarantee to reach.
    """

    def excess(log_mu: float) -> float:
        delta = accounting.gaussian_delta(math.exp(log_mu), budget.epsilon)
        return float(delta) - budget.delta

    mu = math.exp(scipy.optimize.brentq(excess, -20.0, 5.0))
    return 1 / np.sqrt(np.log1p((mu / rate) ** 2 / count))
