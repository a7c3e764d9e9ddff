"""Audits: attempts to refute a privacy claim by running it.

NON-PRIVATE. Audits open sealed values and release the same records many times: give
them public or synthetic records only.
"""

from .claims import Claim as Claim
from .claims import event_claim as event_claim
from .claims import gaussian_claim as gaussian_claim
from .claims import ledger_claims as ledger_claims
from .claims import pure_claim as pure_claim
from .neighbours import Canary as Canary
from .neighbours import canaries as canaries
from .one_run import OneRun as OneRun
from .one_run import epsilon_from_guesses as epsilon_from_guesses
from .one_run import one_run as one_run
from .reuse import NoiseReuse as NoiseReuse
from .reuse import noise_reuse as noise_reuse
from .sensitivity import SensitivitySearch as SensitivitySearch
from .sensitivity import sensitivity_search as sensitivity_search
from .tradeoff import Cut as Cut
from .tradeoff import SolverRun as SolverRun
from .tradeoff import TradeOff as TradeOff
from .tradeoff import audit_canaries as audit_canaries
from .tradeoff import audit_solver as audit_solver
from .tradeoff import trade_off as trade_off
