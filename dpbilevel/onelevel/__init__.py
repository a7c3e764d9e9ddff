"""Means of losses and private descent on them."""

from .adaptive_clip import AdaptiveClipGD
from .allocated import AllocatedGD
from .linear_models import Logistic, PseudoHuber, linear_risk
from .localized import LocalizedGD
from .losses import absolute_loss, hinge_loss, logistic_loss, squared_loss
from .noisy_gd import NoisyGD
from .problem import FiniteSum

__all__ = [
    "AdaptiveClipGD",
    "AllocatedGD",
    "FiniteSum",
    "LocalizedGD",
    "Logistic",
    "NoisyGD",
    "PseudoHuber",
    "absolute_loss",
    "hinge_loss",
    "linear_risk",
    "logistic_loss",
    "squared_loss",
]
