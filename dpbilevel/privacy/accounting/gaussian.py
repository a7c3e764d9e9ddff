"""The profile of a Gaussian release, in closed form."""

import math
from typing import Any, TypeAlias

import numpy as np
import scipy

Profile: TypeAlias = Any  # a float or an array of them
_LARGEST_EPSILON = 1e300


def gaussian_delta(mu: float, epsilon: Profile) -> Profile:
    r"""The profile of $\mu$-GDP: $\Phi(-\varepsilon/\mu + \mu/2) - e^\varepsilon
    \Phi(-\varepsilon/\mu - \mu/2)$.

    Args:
        mu: $\mu \ge 0$.
        epsilon: $\varepsilon$, of any sign; one or an array.

    References:
        Balle and Wang, "Improving the Gaussian mechanism for differential privacy",
        ICML 2018, Theorem 8.
    """  # noqa: D205
    if mu == 0:
        return np.maximum(0.0, -np.expm1(epsilon))
    if math.isinf(mu):
        return np.ones_like(epsilon)
    near = scipy.special.log_ndtr(-epsilon / mu + mu / 2)
    far = epsilon + scipy.special.log_ndtr(-epsilon / mu - mu / 2)
    # far < near; the difference is taken in the log domain to keep small deltas.
    return np.exp(near) * -np.expm1(np.minimum(far - near, 0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    r"""The smallest $\varepsilon \ge 0$ of $\mu$-GDP at a $\delta$ in [0, 1].

    The safe end of the last bracket: the profile there is at most `delta`.
    """
    if delta == 0 or math.isinf(mu):
        return math.inf if mu and delta < 1 else 0.0
    low = high = 0.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, max(2 * high, mu)
        if high > _LARGEST_EPSILON:
            return math.inf
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high
