"""What a guarantee leaves to an attacker: the largest power at few false alarms."""

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
