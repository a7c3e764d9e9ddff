"""What a release is and what it costs: mechanisms, sampling, the ledger, reports."""

from .budget import Neighbours, People, PrivacyBudget
from .clipping import Basis, Bounded, clipped_mean
from .disk import OnDisk
from .fixed_size import FixedSize
from .ledger import Ledger
from .mechanisms import Gaussian
from .noise import root_key
from .queries import Query
from .releases import Release
from .report import PrivacyReport, Status
from .sampling import FullBatch, Poisson
from .single_pass import SinglePass

__all__ = [
    "Basis",
    "Bounded",
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
    "Release",
    "SinglePass",
    "Status",
    "clipped_mean",
    "root_key",
]
