r"""Renyi divergences, for what has no privacy loss distribution: private selection.

Selection among runs of a Gaussian release that is $\mu$-GDP, with $m$ the mean of
$K$, has at the order $\lambda$ a divergence of at most

$$
\frac{\lambda \mu^2}{2} + \frac{\log m}{\lambda - 1} + \sup_p w(p), \qquad
a = \frac{\lambda}{\lambda - 1}, \quad p' = \Phi(\Phi^{-1}(p) + \mu),
$$

$w = m (p' - a p)$ for the Poisson law, $w = (1 + \eta) \log(u' u^{-a} \gamma^{a - 1})$
for the others, with $u = \gamma + (1 - \gamma) p$ and $u'$ the same of $p'$. The
proof is in `docs/mathematics.md`, "Private selection".
"""

import math
from typing import TypeAlias

import numpy as np
import scipy
from jaxtyping import Float
from typing_extensions import TypeIs

from ..._extras import dp_accounting
from .closed_forms import gaussian_delta
from .repetitions import Repetitions

# Dense enough that finer ones change no third digit; see tests.
_ORDERS = 1 + np.geomspace(0.05, 2.0**17, 120)
_RATIOS = _ORDERS / (_ORDERS - 1)

_Curve: TypeAlias = Float[np.ndarray, " orders"]


def uses_renyi(parts: "list[tuple[dp_accounting.DpEvent, int]]") -> bool:
    """Return whether one of these events, each with its count, is a selection."""
    return any(_is_selection(part) for part, _ in parts)


class Divergences:
    r"""The Renyi divergences of a composition, at many orders.

    Args:
        parts: Gaussian releases and selections among such, each with how often it
            happens; multipliers are relative to the sensitivity under the relation.

    Raises:
        ValueError: Another event is among them.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022: Theorem 6, with the exact profile of the Gaussian in it, and the
        proof of Theorem 2, with the exact chances of its events.
    """

    def __init__(self, parts: "list[tuple[dp_accounting.DpEvent, int]]"):
        curves = (count * _curve(part) for part, count in parts)
        self._curve = sum(curves, np.zeros_like(_ORDERS))

    def delta(self, epsilon: float) -> float:
        r"""Return $\delta$ at $\varepsilon \ge 0$."""
        accountant = dp_accounting.rdp.rdp_privacy_accountant
        orders, curve = list(_ORDERS), list(self._curve)
        return float(accountant.compute_delta(orders, curve, max(epsilon, 0.0))[0])

    def epsilon(self, delta: float) -> float:
        r"""Return $\varepsilon$ at $\delta$, infinite at 0."""
        if delta == 0:
            return math.inf
        accountant = dp_accounting.rdp.rdp_privacy_accountant
        orders, curve = list(_ORDERS), list(self._curve)
        return float(accountant.compute_epsilon(orders, curve, delta)[0])


def _is_selection(
    part: "dp_accounting.DpEvent",
) -> "TypeIs[dp_accounting.dp_event.RepeatAndSelectDpEvent]":
    return isinstance(part, dp_accounting.dp_event.RepeatAndSelectDpEvent)


def _curve(part: "dp_accounting.DpEvent") -> _Curve:
    """Return the divergences of one part."""
    base = part.event if _is_selection(part) else part
    if not isinstance(base, dp_accounting.GaussianDpEvent):
        raise ValueError(
            f"accounting: {type(base).__name__} is not accounted for together "
            "with private selection; use FullBatch and Gaussian noise."
        )
    if base.noise_multiplier == 0:
        return np.full_like(_ORDERS, math.inf)
    mu = 1 / base.noise_multiplier
    single = _ORDERS * mu * mu / 2
    if not _is_selection(part):
        return single
    law = Repetitions(part.mean, part.shape)  # the bound in the module's docstring
    selected = single + math.log(law.mean) / (_ORDERS - 1) + _weight(law, mu)
    # A divergence grows with its order, so a larger order's bounds a smaller's.
    return np.minimum.accumulate(selected[::-1])[::-1]


def _weight(law: Repetitions, mu: float) -> _Curve:
    """Return the supremum in the module's docstring."""
    if math.isinf(law.shape):
        return law.mean * gaussian_delta(mu, np.log(_RATIOS))
    return (1 + law.shape) * _largest_log_ratio(law.gamma, mu)


def _largest_log_ratio(gamma: float, mu: float) -> _Curve:
    r"""Return the supremum of $\log(u' u^{-a} \gamma^{a - 1})$, from above.

    A concave function of $p$ over a convex one has a single peak, and beside it every
    value is bounded by $u'$ at the right end of its bracket and $u$ at the left.
    """

    def log_u(quantile):
        return np.log1p((1 / gamma - 1) * scipy.special.ndtr(quantile))  # over gamma

    low, high = np.full_like(_ORDERS, -50 - mu), np.full_like(_ORDERS, 50.0)
    for _ in range(80):
        middle = (low + high) / 2
        slopes = log_u(middle) - log_u(middle + mu) - mu * (middle + mu / 2)
        rises = slopes > np.log(_RATIOS)
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    return log_u(high + mu) - _RATIOS * log_u(low)
