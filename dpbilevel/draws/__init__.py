"""One draw instead of many steps: exponential mechanisms and their samplers."""

from .._extras import public_names
from .exponential import ExponentialMechanism as ExponentialMechanism
from .exponential import (
    RegularizedExponentialMechanism as RegularizedExponentialMechanism,
)
from .localized import LocalizedDraws as LocalizedDraws
from .mechanisms import Draw as Draw
from .mechanisms import Exponential as Exponential
from .mechanisms import RegularizedExponential as RegularizedExponential
from .samplers.alternating import AlternatingSampler as AlternatingSampler
from .samplers.base import AbstractSampler as AbstractSampler
from .samplers.envelope import ConvexEnvelope as ConvexEnvelope
from .samplers.grid import Grid as Grid
from .samplers.grid_walk import GridWalk as GridWalk
from .samplers.proximal import AbstractProximalOracle as AbstractProximalOracle
from .samplers.rejection import StochasticRejection as StochasticRejection

__all__ = public_names(globals())
