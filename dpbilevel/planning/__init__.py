"""Plans without settings: solvers are chosen by dry runs on synthetic records."""

from .candidates import Candidate, candidates
from .dry_runs import AutoPlan, Trial, auto
from .twins import AbstractTwin, Alike, GoodOrBad, Shifted, Twin, twins

__all__ = [
    "AbstractTwin",
    "Alike",
    "AutoPlan",
    "Candidate",
    "GoodOrBad",
    "Shifted",
    "Trial",
    "Twin",
    "auto",
    "candidates",
    "twins",
]
