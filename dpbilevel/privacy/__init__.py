"""Releases and their costs: mechanisms, sampling, the ledger, reports."""

from .._extras import public_names
from .budget import Neighbours as Neighbours
from .budget import People as People
from .budget import PrivacyBudget as PrivacyBudget
from .correlated import Correlated as Correlated
from .correlated import CorrelatedRelease as CorrelatedRelease
from .correlated import square_root_feedback as square_root_feedback
from .keys import root_key as root_key
from .ledger import Ledger as Ledger
from .mechanisms import Gaussian as Gaussian
from .per_example.clipping import Basis as Basis
from .per_example.clipping import Bounded as Bounded
from .per_example.clipping import clipped_mean as clipped_mean
from .queries import Query as Query
from .records.disk import OnDisk as OnDisk
from .records.people import by_person as by_person
from .records.randomness import Randomized as Randomized
from .releases import Release as Release
from .report import PrivacyReport as PrivacyReport
from .report import Status as Status
from .sampling.base import FullBatch as FullBatch
from .sampling.base import Poisson as Poisson
from .sampling.fixed_size import FixedSize as FixedSize
from .sampling.fixed_size import SinglePass as SinglePass

__all__ = public_names(globals())
