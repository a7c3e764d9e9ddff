"""Profiles in closed form: Gaussian releases, and releases without delta."""

import math
from typing import Any, TypeAlias

import numpy as np
import scipy
from typing_extensions import TypeIs

from ..._extras import dp_accounting

Profile: TypeAlias = Any  # a float or an array of them
_LARGEST = 700.0  # beyond this epsilon nothing is private


def gaussian_delta(mu: float, epsilon: Profile) -> Profile:
    r"""Return the least $\delta$ of $\mu$-Gaussian DP at one $\varepsilon$ or an array.

    It is $\Phi(-\varepsilon/\mu + \mu/2) - e^\varepsilon \Phi(-\varepsilon/\mu -
    \mu/2)$. Here $\mu \ge 0$, and $\varepsilon$ is one or an array, of any sign.

    References:
        Balle and Wang, "Improving the Gaussian mechanism for differential privacy",
        ICML 2018, Theorem 8.
    """
    if mu == 0:
        return np.maximum(0.0, -np.expm1(epsilon))
    if math.isinf(mu):
        return np.ones_like(epsilon)
    near = scipy.special.log_ndtr(-epsilon / mu + mu / 2)
    far = epsilon + scipy.special.log_ndtr(-epsilon / mu - mu / 2)
    # far < near; the difference is taken in the log domain to keep small deltas.
    return np.exp(near) * -np.expm1(np.minimum(far - near, 0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    r"""Return the least $\varepsilon \ge 0$ of $\mu$-GDP at this $\delta$, or infinity.

    It is the safe end of the last bracket: the profile there is at most `delta`.
    """
    if delta == 0 or math.isinf(mu):
        return math.inf if mu and delta < 1 else 0.0
    low = high = 0.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, max(2 * high, mu)
        if high > 1e300:
            return math.inf
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def normal_masses(edges: np.ndarray) -> np.ndarray:
    """Return standard normal masses between neighbouring edges, exact in both tails."""
    below, above = scipy.special.ndtr(edges), scipy.special.ndtr(-edges)
    return np.where(edges[:-1] > 0, -np.diff(above), np.diff(below))


def pure_event(epsilon: float) -> "dp_accounting.DpEvent":
    r"""Return the randomized-response event that dominates an $\varepsilon$-DP release.

    Binary randomized response dominates every mechanism, at any $\varepsilon > 0$.

    References:
        Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
        ICML 2015, Theorem 2.
    """
    coin = 2 / (1 + math.exp(epsilon)) if epsilon < _LARGEST else 0.0
    return dp_accounting.RandomizedResponseDpEvent(coin, 2)


def is_pure(
    part: "dp_accounting.DpEvent",
) -> "TypeIs[dp_accounting.RandomizedResponseDpEvent]":
    """Return whether an event is binary randomized response, as of `pure_event`."""
    kind = dp_accounting.RandomizedResponseDpEvent
    return isinstance(part, kind) and part.num_buckets == 2


def pure_epsilon(part: "dp_accounting.RandomizedResponseDpEvent") -> float:
    """Return the epsilon of a `pure_event`, never below the one it was made from."""
    coin = part.noise_parameter
    # The summand covers the rounding of the coin and of the logarithm.
    return math.log((2 - coin) / coin) + 2.0**-50 if coin > 0 else math.inf


def pure_delta(total: float, epsilon: Profile) -> Profile:
    r"""Return the least $\delta$ at $\varepsilon$ of a pure $\varepsilon_0$-DP release.

    It is $\bigl(e^{\varepsilon_0} - e^\varepsilon\bigr)_+ / (1 + e^{\varepsilon_0})$,
    where `total` is $\varepsilon_0$ and $\varepsilon \ge 0$ is one or an array.
    """
    gap = -np.expm1(np.minimum(epsilon - total, 0.0))
    return gap / (1 + np.exp(-total))


def pure_and_gaussian_delta(total: float, mu: float, epsilon: float) -> Profile:
    r"""Return $\delta$ at $\varepsilon$ of one pure release composed with Gaussians.

    The privacy loss of randomized response is $\pm \varepsilon_0$, and losses add up:
    $$\delta(\varepsilon) = \frac{e^{\varepsilon_0} \delta_\mu(\varepsilon -
    \varepsilon_0) + \delta_\mu(\varepsilon + \varepsilon_0)}{1 + e^{\varepsilon_0}}.$$
    `total` is $\varepsilon_0$, and $\mu$ is that of the Gaussian releases.
    """
    if math.isinf(total):
        return 1.0
    likely = 1 / (1 + math.exp(-total))
    near, far = (gaussian_delta(mu, epsilon + sign * total) for sign in (-1, 1))
    return likely * near + (1 - likely) * far


def smallest_pure_epsilon(total: float, delta: float) -> float:
    r"""Return the least $\varepsilon \ge 0$ with `pure_delta` at most `delta`."""
    left = 1 - delta * (1 + math.exp(-total))
    return max(0.0, total + math.log(left)) if left > 0 else 0.0
