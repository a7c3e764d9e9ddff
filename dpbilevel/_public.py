"""The public names of the library, except `PrivateSearch`, which needs more."""

from . import (
    applications,
    audit,
    bilevel,
    draws,
    games,
    onelevel,
    oracles,
    planning,
    privacy,
    search,
    sets,
)
from .applications import (
    linear_tuning,
    penalty_tuning,
    source_weighting,
    source_weights,
)
from .audit import debug
from .audit.certificate import certificate
from .bilevel import (
    BilevelProblem,
    ImplicitBilevel,
    Levels,
    PenaltyBilevel,
    Refitted,
    SingleLoopBilevel,
    Sizes,
)
from .core import outputs, proximal
from .core.accountants import delta, epsilon, noise_multiplier, records_needed
from .core.loop import solve
from .core.plan import calibrate
from .core.process_spending import PrivacyWarning, spent
from .core.solution import Plan, Solution
from .core.solver import AbstractSolver
from .onelevel import (
    FiniteSum,
    Logistic,
    NoisyGD,
    absolute_loss,
    hinge_loss,
    logistic_loss,
    squared_loss,
)
from .planning import auto
from .privacy import (
    FixedSize,
    FullBatch,
    Neighbours,
    OnDisk,
    People,
    Poisson,
    PrivacyBudget,
    Randomized,
    by_person,
    root_key,
)
from .runs.fit import fit
from .runs.run import advance, resume, start
from .runs.saved import load

__all__ = [
    "AbstractSolver",
    "BilevelProblem",
    "FiniteSum",
    "FixedSize",
    "FullBatch",
    "ImplicitBilevel",
    "Levels",
    "Logistic",
    "Neighbours",
    "NoisyGD",
    "OnDisk",
    "PenaltyBilevel",
    "People",
    "Plan",
    "Poisson",
    "PrivacyBudget",
    "PrivacyWarning",
    "Randomized",
    "Refitted",
    "SingleLoopBilevel",
    "Sizes",
    "Solution",
    "absolute_loss",
    "advance",
    "applications",
    "audit",
    "auto",
    "bilevel",
    "by_person",
    "calibrate",
    "certificate",
    "debug",
    "delta",
    "draws",
    "epsilon",
    "fit",
    "games",
    "hinge_loss",
    "linear_tuning",
    "load",
    "logistic_loss",
    "noise_multiplier",
    "onelevel",
    "oracles",
    "outputs",
    "penalty_tuning",
    "planning",
    "privacy",
    "proximal",
    "records_needed",
    "resume",
    "root_key",
    "search",
    "sets",
    "solve",
    "source_weighting",
    "source_weights",
    "spent",
    "squared_loss",
    "start",
]
