"""Samplers of the densities that exponential mechanisms draw from."""

from .alternating import AlternatingSampler as AlternatingSampler
from .envelope import ConvexEnvelope as ConvexEnvelope
from .grid_walk import GridWalk as GridWalk
from .proximal import AbstractProximalOracle as AbstractProximalOracle
from .rejection import StochasticRejection as StochasticRejection
