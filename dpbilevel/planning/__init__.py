"""Plans without settings: solvers are chosen by dry runs on synthetic records."""

from .candidates import Candidate, candidates
from .conclusions import Trial
from .dry_runs import AutoPlan, auto
from .records import Classes
from .teachers import AbstractTeacherTwin, AbstractTwin, Twin
from .twins import (
    Alike,
    GoodOrBad,
    MissingPositives,
    NoiseGroups,
    Shifted,
    Tables,
    twins,
)

__all__ = [
    "AbstractTeacherTwin",
    "AbstractTwin",
    "Alike",
    "AutoPlan",
    "Candidate",
    "Classes",
    "GoodOrBad",
    "MissingPositives",
    "NoiseGroups",
    "Shifted",
    "Tables",
    "Trial",
    "Twin",
    "auto",
    "candidates",
    "twins",
]
