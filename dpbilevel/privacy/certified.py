"""Certified reads: values whose sensitivity a proof bounds instead of clipping."""

import abc
import dataclasses
from typing import Any, NamedTuple

from jaxtyping import PyTree
from typing_extensions import override

from .noise import PRNGKey
from .per_example.clipping import Basis, Bounded, Precision
from .queries import Query
from .releases import Release
from .sampling.base import Index


class Costs(NamedTuple):
    """The cost of a release of a certified query, as fields of a `Release`."""

    queries: tuple[Query, ...]
    basis: Basis
    value_norm: float
    joint: bool = False


class AbstractCertifiedQuery(abc.ABC):
    """A read and its cost, which a proof bounds instead of clipping.

    Its value is no sum over records, and one proof bounds what a record of each role
    does to it, so that one object has the costs of all roles.
    """

    @abc.abstractmethod
    def costs(self, precision: Precision) -> Costs:
        """Return what the ledger lists: the largest contribution of each role.

        Args:
            precision: As for `read`.

        Raises:
            ValueError: The problem lacks what the proof needs, or the default
                floating-point dtype is too coarse for it.
        """

    @abc.abstractmethod
    def read(
        self,
        point: Any,
        data: PyTree,
        *,
        precision: Precision,
        key: PRNGKey | None,
        index: Index = None,
    ) -> Bounded:
        """Return the value, sealed with its contribution at the point.

        That is a multiple of the listed ones, the same for every role and at least what
        a record of any role contributes there: disjoint people are charged by the
        listed shares. It may exceed their sum where the point is coarser than planned.

        Args:
            point: Where it is computed: released or public.
            data: The records.
            precision: `"float"`, or `"grid"`: rounded to a public grid.
            key: A typed key for the batch, where its sampling needs one.
            index: The number of the batch in the run.
        """


@dataclasses.dataclass(frozen=True)
class CertifiedRelease(Release):
    """Releases of one certified query, from which all that they cost follows.

    Args:
        name: What is released, in the words of the algorithm.
        count: How many times.
        mechanism: The noise, relative to the sensitivity of what is read.
        query: What is read, and what it costs; `of` takes the point to read it at.
        clip_ratio: As in `Release`.
    """

    queries: tuple[Query, ...] = dataclasses.field(init=False)
    joint: bool = dataclasses.field(init=False)
    basis: Basis = dataclasses.field(init=False)
    value_norm: float = dataclasses.field(init=False)
    query: AbstractCertifiedQuery = dataclasses.field(
        kw_only=True, repr=False, compare=False
    )

    def __post_init__(self):
        costs = self.query.costs(self.mechanism.precision)
        for name, value in costs._asdict().items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
        super().__post_init__()

    @override
    def read(self, what, data, *, key, index=None) -> Bounded:
        precision = self.mechanism.precision
        return self.query.read(what, data, precision=precision, key=key, index=index)
