"""Problems of two levels, and their solvers."""

from . import zoo
from .certificates.constants import AbstractCertificate, Constants, SecondOrderConstants
from .f2sa import F2SA
from .finite_difference import FiniteDifferenceBilevel
from .implicit import ImplicitBilevel
from .lower_first import LowerFirst
from .one_level import OneLevel
from .penalty import PenaltyBilevel
from .problem import BilevelProblem, Levels, Sizes
from .refitted import Refitted
from .single_loop import SingleLoopBilevel

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
    "zoo",
]
