"""Audits: attempts to refute a privacy claim by running it.

NON-PRIVATE. Audits open sealed values and release the same records many times: give
them public or synthetic records only.
"""

from . import debug
from .canaries import Canary, canaries
from .certificate import Certificate
from .claims import (
    Claim,
    event_claim,
    gaussian_claim,
    ledger_claims,
    pure_claim,
    refutes,
)
from .device import DeviceArithmetic, device_arithmetic
from .recording import Recorded, Replay, record, replay
from .sensitivity import NoiseReuse, SensitivitySearch, noise_reuse, sensitivity_search
from .tradeoff import Cut, SolverRun, TradeOff, audit_canaries, audit_solver, trade_off
from .worst_cases import worst_case

__all__ = [
    "Canary",
    "Certificate",
    "Claim",
    "Cut",
    "DeviceArithmetic",
    "NoiseReuse",
    "Recorded",
    "Replay",
    "SensitivitySearch",
    "SolverRun",
    "TradeOff",
    "audit_canaries",
    "audit_solver",
    "canaries",
    "debug",
    "device_arithmetic",
    "event_claim",
    "gaussian_claim",
    "ledger_claims",
    "noise_reuse",
    "pure_claim",
    "record",
    "refutes",
    "replay",
    "sensitivity_search",
    "trade_off",
    "worst_case",
]
