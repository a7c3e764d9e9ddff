"""Audits: attempts to refute a privacy claim by running it.

NON-PRIVATE. Audits open sealed values and release the same records many times: give
them public or synthetic records only.
"""

from .._extras import public_names
from . import debug as debug
from .canaries import Canary as Canary
from .canaries import canaries as canaries
from .certificate import Certificate as Certificate
from .claims import Claim as Claim
from .claims import event_claim as event_claim
from .claims import gaussian_claim as gaussian_claim
from .claims import ledger_claims as ledger_claims
from .claims import pure_claim as pure_claim
from .claims import refutes as refutes
from .device import DeviceArithmetic as DeviceArithmetic
from .device import device_arithmetic as device_arithmetic
from .recording import Recorded as Recorded
from .recording import Replay as Replay
from .recording import record as record
from .recording import replay as replay
from .sensitivity import NoiseReuse as NoiseReuse
from .sensitivity import SensitivitySearch as SensitivitySearch
from .sensitivity import noise_reuse as noise_reuse
from .sensitivity import sensitivity_search as sensitivity_search
from .tradeoff import Cut as Cut
from .tradeoff import SolverRun as SolverRun
from .tradeoff import TradeOff as TradeOff
from .tradeoff import audit_canaries as audit_canaries
from .tradeoff import audit_solver as audit_solver
from .tradeoff import trade_off as trade_off
from .worst_cases import worst_case as worst_case

__all__ = public_names(globals())
