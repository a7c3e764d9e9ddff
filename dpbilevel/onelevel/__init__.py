"""Means of losses and private descent on them."""

from .._extras import public_names
from .adaptive import AdaptiveClipGD as AdaptiveClipGD
from .adaptive import AdaptiveGD as AdaptiveGD
from .correlated_gd import CorrelatedGD as CorrelatedGD
from .localized import LocalizedGD as LocalizedGD
from .losses import Logistic as Logistic
from .losses import PseudoHuber as PseudoHuber
from .losses import absolute_loss as absolute_loss
from .losses import hinge_loss as hinge_loss
from .losses import linear_risk as linear_risk
from .losses import logistic_loss as logistic_loss
from .losses import squared_loss as squared_loss
from .noisy_gd import AllocatedGD as AllocatedGD
from .noisy_gd import NoisyGD as NoisyGD
from .problem import FiniteSum as FiniteSum

__all__ = public_names(globals())
