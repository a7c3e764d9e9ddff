"""Applications: weights of data sources, penalties of groups, recalibrated models."""

from .adapters import LowRankLinear, adapters, low_rank, merged
from .linear_tuning import linear_tuning
from .mixed_sources import MixedSources
from .penalties import PenaltyTuning, ScaledGroups, penalty_start, penalty_tuning
from .recalibration import Recalibration
from .selected_sources import ScoringModel, SelectedSources
from .sources import (
    SourceWeighting,
    mixed_model,
    mixing_start,
    source_mixing,
    source_weighting,
    source_weights,
)
from .warm_start import WarmStarted

__all__ = [
    "LowRankLinear",
    "MixedSources",
    "PenaltyTuning",
    "Recalibration",
    "ScaledGroups",
    "ScoringModel",
    "SelectedSources",
    "SourceWeighting",
    "WarmStarted",
    "adapters",
    "linear_tuning",
    "low_rank",
    "merged",
    "mixed_model",
    "mixing_start",
    "penalty_start",
    "penalty_tuning",
    "source_mixing",
    "source_weighting",
    "source_weights",
]
