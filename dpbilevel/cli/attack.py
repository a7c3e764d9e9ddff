"""What a guarantee leaves to an attacker: the largest power at few false alarms."""

import math

import numpy as np

from ..audit.claims import TradeOffCurve, ledger_claims
from ..privacy.ledger import Ledger

FALSE_ALARMS = 0.05


def largest_power(*ledgers: Ledger) -> float:
    """The largest power of any test with 5 % false alarms, for the worst-off person.

    Args:
        ledgers: Of runs on different people; every person is charged by one of them.

    Returns:
        The bound by the whole privacy profile, which is below that of one epsilon and
        delta.
    """
    curves = (
        TradeOffCurve(claim)
        for ledger in ledgers
        for claim in ledger_claims(ledger).values()
    )
    rates = np.asarray([FALSE_ALARMS])
    return max((float(curve(rates)[0]) for curve in curves), default=FALSE_ALARMS)


def power_of_budget(epsilon: float, delta: float) -> float:
    r"""The same from one $(\varepsilon, \delta)$ alone.

    $$\min(e^\varepsilon \alpha + \delta,\; 1 - e^{-\varepsilon} (1 - \delta - \alpha),
    \; 1).$$

    Args:
        epsilon: $\varepsilon$.
        delta: $\delta$.

    References:
        Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
        ICML 2015, Theorem 2.1.
    """
    direct = math.exp(min(epsilon, 700.0)) * FALSE_ALARMS + delta
    mirrored = 1 - math.exp(-epsilon) * (1 - delta - FALSE_ALARMS)
    return min(direct, mirrored, 1.0)
