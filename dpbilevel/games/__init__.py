"""Saddle points and variational inequalities: group games, matrix games, solvers."""

from . import zoo
from .extragradient import NoisyExtragradient
from .gaps import saddle_gap, variational_gap
from .group_descent import GroupDescent
from .group_game import GroupGame
from .groups import group_fair, group_robust, group_start, group_weights
from .matrix import matrix_game
from .problem import SaddleProblem, VariationalInequality
from .proximal_point import InexactProximalPoint

__all__ = [
    "GroupDescent",
    "GroupGame",
    "InexactProximalPoint",
    "NoisyExtragradient",
    "SaddleProblem",
    "VariationalInequality",
    "group_fair",
    "group_robust",
    "group_start",
    "group_weights",
    "matrix_game",
    "saddle_gap",
    "variational_gap",
    "zoo",
]
