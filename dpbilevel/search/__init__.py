"""Searches by losses alone: the problem has no derivatives."""

from .._extras import public_names
from ..runs.spending import TotalSpent as TotalSpent
from ..runs.spending import limit_spending as limit_spending
from ..runs.spending import spent as spent
from .ask_tell import AskTell as AskTell
from .base import AbstractAskTellSolver as AbstractAskTellSolver
from .base import BlackBox as BlackBox
from .declared import DeclaredTraining as DeclaredTraining
from .gibo import GradientInformativeBO as GradientInformativeBO
from .kernels import RBF as RBF
from .kernels import AbstractKernel as AbstractKernel
from .kernels import Matern52 as Matern52
from .kernels import Quadratic as Quadratic
from .loop import minimize as minimize
from .noisy_ucb import NoisyUCB as NoisyUCB
from .random_search import Portfolio as Portfolio
from .random_search import RandomSearch as RandomSearch
from .repeat_and_select import RepeatAndSelect as RepeatAndSelect
from .space import Categorical as Categorical
from .space import Range as Range
from .tuned_training import TunedTraining as TunedTraining

__all__ = public_names(globals())
