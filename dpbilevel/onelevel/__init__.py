"""Means of losses and private descent on them."""

from .adaptive import AdaptiveClipGD, AdaptiveGD
from .correlated_gd import CorrelatedGD
from .localized import LocalizedGD
from .losses import (
    Logistic,
    PseudoHuber,
    absolute_loss,
    hinge_loss,
    linear_risk,
    logistic_loss,
    squared_loss,
)
from .noisy_gd import AllocatedGD, NoisyGD
from .problem import FiniteSum

__all__ = [
    "AdaptiveClipGD",
    "AdaptiveGD",
    "AllocatedGD",
    "CorrelatedGD",
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
