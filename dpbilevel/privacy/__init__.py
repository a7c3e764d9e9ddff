"""Releases and their costs: mechanisms, sampling, the ledger, reports."""

from .budget import Neighbours, People, PrivacyBudget
from .correlated import Correlated, CorrelatedRelease, square_root_feedback
from .ledger import Ledger
from .mechanisms import Gaussian
from .noise import root_key
from .per_example.clipping import Basis, Bounded, clipped_mean
from .queries import Query
from .records.disk import OnDisk
from .records.people import by_person
from .records.randomness import Randomized
from .releases import Release
from .report import PrivacyReport, Status
from .sampling.base import FullBatch, Poisson
from .sampling.fixed_size import FixedSize, SinglePass

__all__ = [
    "Basis",
    "Bounded",
    "Correlated",
    "CorrelatedRelease",
    "FixedSize",
    "FullBatch",
    "Gaussian",
    "Ledger",
    "Neighbours",
    "OnDisk",
    "People",
    "Poisson",
    "PrivacyBudget",
    "PrivacyReport",
    "Query",
    "Randomized",
    "Release",
    "SinglePass",
    "Status",
    "by_person",
    "clipped_mean",
    "root_key",
    "square_root_feedback",
]
