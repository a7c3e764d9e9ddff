"""Releases without delta: their event, and the profile of the worst one there is."""

import math

import numpy as np
from typing_extensions import TypeIs

from .._lazy import dp_accounting
from .gaussian import Profile, gaussian_delta

# Beyond this epsilon nothing is private.
_LARGEST = 700.0


def event(epsilon: float) -> "dp_accounting.DpEvent":
    r"""An $\varepsilon$-DP release without $\delta$, as the worst one there is.

    Binary randomized response dominates every such mechanism.

    Args:
        epsilon: $\varepsilon > 0$.

    References:
        Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
        ICML 2015, Theorem 2.
    """
    coin = 2 / (1 + math.exp(epsilon)) if epsilon < _LARGEST else 0.0
    return dp_accounting.RandomizedResponseDpEvent(coin, 2)


def is_pure(
    part: "dp_accounting.DpEvent",
) -> "TypeIs[dp_accounting.RandomizedResponseDpEvent]":
    """Whether a part of a composition is one of these."""
    kind = dp_accounting.RandomizedResponseDpEvent
    return isinstance(part, kind) and part.num_buckets == 2


def epsilon_of(part: "dp_accounting.RandomizedResponseDpEvent") -> float:
    """The epsilon behind the coin, never less than the one that it was made from."""
    coin = part.noise_parameter
    # The summand covers the rounding of the coin and of the logarithm.
    return math.log((2 - coin) / coin) + 2.0**-50 if coin > 0 else math.inf


def delta(total: float, epsilon: Profile) -> Profile:
    r"""The profile of a single release without delta: $\bigl(e^{\varepsilon_0} -
    e^\varepsilon\bigr)_+ / (1 + e^{\varepsilon_0})$.

    Args:
        total: $\varepsilon_0$.
        epsilon: $\varepsilon \ge 0$; one or an array.
    """  # noqa: D205
    gap = -np.expm1(np.minimum(epsilon - total, 0.0))
    return gap / (1 + np.exp(-total))


def delta_with_gaussian(total: float, mu: float, epsilon: float) -> Profile:
    r"""The profile of a release without delta together with Gaussian ones.

    The privacy loss of randomized response is $\pm \varepsilon_0$, and losses add up:
    $$\delta(\varepsilon) = \frac{e^{\varepsilon_0} \delta_\mu(\varepsilon -
    \varepsilon_0) + \delta_\mu(\varepsilon + \varepsilon_0)}{1 + e^{\varepsilon_0}}.$$

    Args:
        total: $\varepsilon_0$.
        mu: $\mu$ of the Gaussian releases.
        epsilon: $\varepsilon \ge 0$.
    """
    if math.isinf(total):
        return 1.0
    likely = 1 / (1 + math.exp(-total))
    near, far = (gaussian_delta(mu, epsilon + sign * total) for sign in (-1, 1))
    return likely * near + (1 - likely) * far


def smallest_epsilon(total: float, delta: float) -> float:
    r"""Inverts `delta`: $\log(e^{\varepsilon_0} - \delta (1 + e^{\varepsilon_0}))$."""
    left = 1 - delta * (1 + math.exp(-total))
    return max(0.0, total + math.log(left)) if left > 0 else 0.0
