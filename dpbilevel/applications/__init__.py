"""Applications: weights of data sources, penalties of groups, recalibrated models."""

from .base import (
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
from .group_runs import ScaledGroups
from .linear_tuning import linear_tuning
from .recalibration import Recalibration
from .source_runs import MixedSources, ScoringModel, SelectedSources
from .warm_start import WarmStarted

__all__ = [
    "MixedSources",
    "PenaltyTuning",
    "Recalibration",
    "ScaledGroups",
    "ScoringModel",
    "SelectedSources",
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
]
