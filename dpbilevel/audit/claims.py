"""Claims of an audit: privacy profiles, and the trade-off curves they imply."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import scipy
from jaxtyping import Float

from .. import _checks
from .._extras import dp_accounting
from ..privacy import Ledger, Neighbours
from ..privacy.accounting import profiles
from ..privacy.accounting.closed_forms import pure_delta

Claim: TypeAlias = Callable[[Float[np.ndarray, " n"]], Float[np.ndarray, " n"]]
"""A privacy profile: the largest allowed delta at each epsilon of an array."""

# Any set of epsilons gives valid bounds; a dense one gives tight ones.
_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-3, 60.0, 1600)])


def gaussian_claim(mu: float) -> Claim:
    r"""Return the privacy profile, a function, of $\mu$-Gaussian differential privacy.

    Args:
        mu: $\mu \ge 0$.

    Raises:
        ValueError: $\mu$ is negative or not finite.
    """
    _checks.non_negative("gaussian_claim", mu=mu)
    return functools.partial(profiles.gaussian_delta, mu)


def pure_claim(epsilon: float) -> Claim:
    r"""Return the privacy profile, a function, of $\varepsilon_0$-differential privacy.

    Randomized response is the worst such mechanism, so $\delta(\varepsilon) =
    (e^{\varepsilon_0} - e^\varepsilon)_+ / (1 + e^{\varepsilon_0})$.

    Args:
        epsilon: $\varepsilon_0 \ge 0$.

    Raises:
        ValueError: $\varepsilon_0$ is negative or not finite.

    References:
        Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
        ICML 2015.
    """
    _checks.non_negative("pure_claim", epsilon=epsilon)
    return functools.partial(pure_delta, epsilon)


def event_claim(event: "dp_accounting.DpEvent", neighbours: Neighbours) -> Claim:
    """Return an event's privacy profile, a function, by this library's accountant.

    Args:
        event: An event whose multipliers are relative to the relation's sensitivity.
        neighbours: The relation.

    Returns:
        The profile. It is computed when first called; it then raises `ValueError` if
        the library does not account for the event.
    """
    mu = profiles.gaussian_mu(event)
    if mu is not None:
        return functools.partial(profiles.gaussian_delta, mu)
    return lambda e: np.vectorize(profiles.profile(event, neighbours))(e)


def ledger_claims(ledger: Ledger) -> dict[str, Claim]:
    """Return the privacy profiles that a ledger promises, functions by kind of person.

    Args:
        ledger: Every release of a run.

    Returns:
        Profiles by kind of person. Each includes the chance of overflowing batches.
    """
    failure, neighbours = ledger.failure, ledger.neighbours

    def with_slack(claim: Claim) -> Claim:
        return lambda e: claim(e) + failure * (1 + np.exp(e))

    events = ledger.events().items()
    return {person: with_slack(event_claim(e, neighbours)) for person, e in events}


class TradeOffCurve:
    r"""Largest true positive rate that a claim leaves to any test.

    A test and its complement both obey the claim, so at false positive rate $\alpha$
    the rate is

    $$\inf_{\varepsilon \ge 0} \min\bigl(\delta(\varepsilon) + e^\varepsilon \alpha,\;
    1 - e^{-\varepsilon} (1 - \delta(\varepsilon) - \alpha)\bigr).$$

    Args:
        claim: The profile; called once, on non-negative epsilons.

    Raises:
        ValueError: The profile is NaN somewhere.

    References:
        Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
        ICML 2015, Theorem 2.1.
    """

    def __init__(self, claim: Claim):
        self._deltas = np.asarray(claim(_EPSILONS), np.float64)
        if np.isnan(self._deltas).any():
            raise ValueError("the claim is NaN at some epsilon; return a delta.")

    def __call__(self, false_positives: Float[np.ndarray, " n"]) -> np.ndarray:
        """Return the largest true positive rates at these false positive rates."""
        rates = np.asarray(false_positives, np.float64)[..., None]
        direct = self._deltas + np.exp(_EPSILONS) * rates
        mirrored = 1 - np.exp(-_EPSILONS) * (1 - self._deltas - rates)
        return np.minimum(1.0, np.minimum(direct, mirrored).min(axis=-1))

    def least_false_positives(self, true_positives: float) -> float:
        """Return the least false positive rate at this true positive rate."""
        direct = np.exp(-_EPSILONS) * (true_positives - self._deltas)
        mirrored = 1 - self._deltas - np.exp(_EPSILONS) * (1 - true_positives)
        return float(max(0.0, direct.max(), mirrored.max()))


def gaussian_mu_of(true_positives: float, false_positives: float) -> float:
    r"""Return the $\mu$ of the Gaussian mechanism for which a test has these rates."""
    # Rates of 0 and 1 have no quantile; no number of runs measures rates so near.
    rates = np.clip([true_positives, false_positives], 1e-16, 1 - 1e-16)
    return float(np.subtract(*scipy.special.ndtri(rates)))
