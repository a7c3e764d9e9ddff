"""Searches by losses alone: the problem has no derivatives."""

from ..runs.spending import TotalSpent, limit_spending, spent
from .ask_tell import AskTell
from .base import AbstractAskTellSolver, BlackBox
from .declared import DeclaredTraining
from .gibo import GradientInformativeBO
from .kernels import RBF, AbstractKernel, Matern52, Quadratic
from .loop import minimize
from .noisy_ucb import NoisyUCB
from .random_search import Portfolio, RandomSearch
from .repeat_and_select import RepeatAndSelect
from .space import Categorical, Range
from .tuned_training import TunedTraining

__all__ = [
    "RBF",
    "AbstractAskTellSolver",
    "AbstractKernel",
    "AskTell",
    "BlackBox",
    "Categorical",
    "DeclaredTraining",
    "GradientInformativeBO",
    "Matern52",
    "NoisyUCB",
    "Portfolio",
    "Quadratic",
    "RandomSearch",
    "Range",
    "RepeatAndSelect",
    "TotalSpent",
    "TunedTraining",
    "limit_spending",
    "minimize",
    "spent",
]
