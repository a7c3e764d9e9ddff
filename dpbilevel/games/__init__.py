"""Saddle points and variational inequalities: group games, matrix games, solvers."""

from .bilinear import BilinearGame, NoisyPayoff, matrix_game
from .extragradient import NoisyExtragradient, RecursiveRegularization
from .group_descent import GroupDescent
from .groups import GroupGame, group_fair, group_robust, group_start, group_weights
from .problem import SaddleProblem, VariationalInequality
from .proximal_point import InexactProximalPoint

__all__ = [
    "BilinearGame",
    "GroupDescent",
    "GroupGame",
    "InexactProximalPoint",
    "NoisyExtragradient",
    "NoisyPayoff",
    "RecursiveRegularization",
    "SaddleProblem",
    "VariationalInequality",
    "group_fair",
    "group_robust",
    "group_start",
    "group_weights",
    "matrix_game",
]
