"""Plans without settings: solvers are chosen by dry runs on synthetic data."""

from .auto_plan import AutoPlan, auto
from .candidates import candidates
from .conclusions import Trial
from .linear_population import AbstractLinearPopulation
from .methods import Candidate
from .populations import (
    Alike,
    GoodOrBad,
    MissingPositives,
    NoiseGroups,
    Shifted,
    Tables,
    populations,
)
from .synthetic import AbstractPopulation, Classes, SyntheticData

__all__ = [
    "AbstractLinearPopulation",
    "AbstractPopulation",
    "Alike",
    "AutoPlan",
    "Candidate",
    "Classes",
    "GoodOrBad",
    "MissingPositives",
    "NoiseGroups",
    "Shifted",
    "SyntheticData",
    "Tables",
    "Trial",
    "auto",
    "candidates",
    "populations",
]
