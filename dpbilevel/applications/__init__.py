"""Applications: weights of data sources, penalties of groups, recalibrated models."""

from .._extras import public_names
from .adapters import LowRankLinear as LowRankLinear
from .adapters import adapters as adapters
from .adapters import low_rank as low_rank
from .adapters import merged as merged
from .linear_tuning import linear_tuning as linear_tuning
from .mixed_sources import MixedSources as MixedSources
from .penalties import PenaltyTuning as PenaltyTuning
from .penalties import ScaledGroups as ScaledGroups
from .penalties import penalty_start as penalty_start
from .penalties import penalty_tuning as penalty_tuning
from .recalibration import Recalibration as Recalibration
from .selected_sources import ScoringModel as ScoringModel
from .selected_sources import SelectedSources as SelectedSources
from .sources import SourceWeighting as SourceWeighting
from .sources import mixed_model as mixed_model
from .sources import mixing_start as mixing_start
from .sources import source_mixing as source_mixing
from .sources import source_weighting as source_weighting
from .sources import source_weights as source_weights
from .warm_start import WarmStarted as WarmStarted

__all__ = public_names(globals())
