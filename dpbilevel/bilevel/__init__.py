"""Problems of two levels, and their solvers."""

from .certificates.constants import AbstractCertificate, Constants, SecondOrderConstants
from .implicit import ImplicitBilevel
from .penalty import PenaltyBilevel
from .pipeline import OneLevel
from .problem import BilevelProblem, Levels, Sizes
from .refitted import LowerFirst, Refitted
from .single_loop import F2SA, FiniteDifferenceBilevel, SingleLoopBilevel

__all__ = [
    "F2SA",
    "AbstractCertificate",
    "BilevelProblem",
    "Constants",
    "FiniteDifferenceBilevel",
    "ImplicitBilevel",
    "Levels",
    "LowerFirst",
    "OneLevel",
    "PenaltyBilevel",
    "Refitted",
    "SecondOrderConstants",
    "SingleLoopBilevel",
    "Sizes",
]
