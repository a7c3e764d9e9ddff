"""Choice of solver and settings without records, by dry runs on synthetic data."""

from .._extras import public_names
from .auto_plan import AutoPlan as AutoPlan
from .auto_plan import auto as auto
from .candidates import candidates as candidates
from .conclusions import Trial as Trial
from .linear_population import AbstractLinearPopulation as AbstractLinearPopulation
from .methods import Candidate as Candidate
from .populations import Alike as Alike
from .populations import GoodOrBad as GoodOrBad
from .populations import MissingPositives as MissingPositives
from .populations import NoiseGroups as NoiseGroups
from .populations import Shifted as Shifted
from .populations import Tables as Tables
from .populations import populations as populations
from .synthetic import AbstractPopulation as AbstractPopulation
from .synthetic import Classes as Classes
from .synthetic import SyntheticData as SyntheticData

__all__ = public_names(globals())
