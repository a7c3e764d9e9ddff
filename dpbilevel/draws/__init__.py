"""One draw instead of many steps: exponential mechanisms and their samplers."""

from .exponential import ExponentialMechanism, RegularizedExponentialMechanism
from .localized import LocalizedDraws
from .mechanisms import Draw, Exponential, RegularizedExponential
from .samplers.alternating import AlternatingSampler
from .samplers.base import AbstractSampler
from .samplers.envelope import ConvexEnvelope
from .samplers.grid import Grid
from .samplers.grid_walk import GridWalk
from .samplers.proximal import AbstractProximalOracle
from .samplers.rejection import StochasticRejection

__all__ = [
    "AbstractProximalOracle",
    "AbstractSampler",
    "AlternatingSampler",
    "ConvexEnvelope",
    "Draw",
    "Exponential",
    "ExponentialMechanism",
    "Grid",
    "GridWalk",
    "LocalizedDraws",
    "RegularizedExponential",
    "RegularizedExponentialMechanism",
    "StochasticRejection",
]
