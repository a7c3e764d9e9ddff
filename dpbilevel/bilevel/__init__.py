"""Problems of two levels, and their solvers."""

from .._extras import public_names
from .certificates.constants import AbstractCertificate as AbstractCertificate
from .certificates.constants import Constants as Constants
from .certificates.constants import SecondOrderConstants as SecondOrderConstants
from .implicit import ImplicitBilevel as ImplicitBilevel
from .penalty import PenaltyBilevel as PenaltyBilevel
from .pipeline import OneLevel as OneLevel
from .problem import BilevelProblem as BilevelProblem
from .problem import Levels as Levels
from .problem import Sizes as Sizes
from .refitted import LowerFirst as LowerFirst
from .refitted import Refitted as Refitted
from .single_loop import F2SA as F2SA
from .single_loop import FiniteDifferenceBilevel as FiniteDifferenceBilevel
from .single_loop import SingleLoopBilevel as SingleLoopBilevel

__all__ = public_names(globals())
