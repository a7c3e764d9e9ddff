"""Problems of two levels, their applications and their solvers."""

from . import zoo
from .applications import (
    PenaltyTuning,
    SourceWeighting,
    mixed_model,
    mixing_start,
    penalty_start,
    penalty_tuning,
    source_mixing,
    source_weighting,
    source_weights,
)
from .constants import AbstractCertificate, Constants, SecondOrderConstants
from .f2sa import F2SA
from .finite_difference import FiniteDifferenceBilevel
from .group_runs import ScaledGroups
from .implicit import ImplicitBilevel
from .linear_tuning import linear_tuning
from .lower_first import LowerFirst
from .one_level import OneLevel
from .penalty import PenaltyBilevel
from .penalty_theorem import theorem_accuracy
from .problem import BilevelProblem, Levels, Sizes
from .recalibration import Recalibration
from .refitted import Refitted
from .single_loop import SingleLoopBilevel
from .source_runs import MixedSources, ScoringModel, SelectedSources
from .warm_start import WarmStarted

__all__ = [
    "F2SA",
    "AbstractCertificate",
    "BilevelProblem",
    "Constants",
    "FiniteDifferenceBilevel",
    "ImplicitBilevel",
    "Levels",
    "LowerFirst",
    "MixedSources",
    "OneLevel",
    "PenaltyBilevel",
    "PenaltyTuning",
    "Recalibration",
    "Refitted",
    "ScaledGroups",
    "ScoringModel",
    "SecondOrderConstants",
    "SelectedSources",
    "SingleLoopBilevel",
    "Sizes",
    "SourceWeighting",
    "WarmStarted",
    "linear_tuning",
    "mixed_model",
    "mixing_start",
    "penalty_start",
    "penalty_tuning",
    "source_mixing",
    "source_weighting",
    "source_weights",
    "theorem_accuracy",
    "zoo",
]
