"""Saddle points and variational inequalities: group games, matrix games, solvers."""

from .._extras import public_names
from .bilinear import BilinearGame as BilinearGame
from .bilinear import NoisyPayoff as NoisyPayoff
from .bilinear import matrix_game as matrix_game
from .extragradient import NoisyExtragradient as NoisyExtragradient
from .extragradient import RecursiveRegularization as RecursiveRegularization
from .group_descent import GroupDescent as GroupDescent
from .groups import GroupGame as GroupGame
from .groups import group_fair as group_fair
from .groups import group_robust as group_robust
from .groups import group_start as group_start
from .groups import group_weights as group_weights
from .problem import SaddleProblem as SaddleProblem
from .problem import VariationalInequality as VariationalInequality
from .proximal_point import InexactProximalPoint as InexactProximalPoint

__all__ = public_names(globals())
