"""What every release says: what it reads, what it costs, how it is reported."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .. import _checks
from ._lazy import dp_accounting
from .budget import Neighbours, People, PrivacyBudget
from .per_example.clipping import Basis
from .queries import LEVELS, RECORDS, Query
from .rows import ForecastRow, LedgerRow, RoleRow


@dataclasses.dataclass(frozen=True)
class AbstractRelease(abc.ABC):
    """`count` releases of one kind, and what each person is charged for them.

    Attributes:
        name: What is released, in the words of the algorithm.
        count: How many times.
        queries: What it reads, one query per role.
        basis: What the sensitivities rest on; a field of every subclass.
        mechanism: What makes it private; a field of every subclass.
        notes: What was proved about it, in the words of the report.
    """

    name: str
    count: int
    queries: tuple[Query, ...]
    if TYPE_CHECKING:  # fields of subclasses, in an order of theirs
        mechanism: ClassVar[Any]
        basis: ClassVar[Basis]

    def __post_init__(self):
        owner = type(self).__name__
        _checks.count(owner, count=self.count)
        _checks.instance(owner, tuple, queries=self.queries)
        for query in self.queries:
            _checks.instance(owner, Query, queries=query)
        roles = [query.role for query in self.queries]
        if len(set(roles)) != len(roles):
            raise ValueError(f"{owner}: one query per role; add up the clip norms.")
        if RECORDS in roles and len(roles) > 1:
            raise ValueError(
                f"{owner}: the records of one level have no others beside them, got "
                f"queries of {roles}; use the roles {LEVELS} of two levels."
            )

    @property
    def reads(self) -> tuple[Query, ...]:
        """All that is read, also for what is released on the way and not shown."""
        return self.queries

    @property
    def sizes(self) -> dict[str, int]:
        """The planned numbers of records, by role."""
        return {query.role: query.size for query in self.reads}

    @property
    def contribution(self) -> float:
        """The largest share of one person with a record in every role."""
        return sum(query.contribution for query in self.queries)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was proved about it, in the words of the report."""
        return ()

    def repeated(self, count: int) -> tuple[Self, ...]:
        """The releases of `count` runs.

        Numbered batches begin anew in every run, so a record of the first batches is
        charged in each of them: such runs are not counted as one long run, unless each
        ends with a pass.
        """
        total = count * self.count
        if any(
            query.sampling.charged(total, query.size)
            != count * query.sampling.charged(self.count, query.size)
            for query in self.queries
        ):
            return (self,) * count
        return (dataclasses.replace(self, count=total),)

    @property
    @abc.abstractmethod
    def failure(self) -> float:
        """How far, in total variation, all of them are from what is charged."""

    @property
    def neighbours(self) -> Neighbours:
        """The relation that the noise refers to."""
        return self.mechanism.neighbours

    @property
    def overflow(self) -> float:
        """The part of `failure` that is the chance of an overflowing batch."""
        return 0.0

    @property
    def computed_error(self) -> float:
        """The part of `failure` that errors of computed scores are."""
        return 0.0

    def check(self, budget: PrivacyBudget) -> None:
        """Refuses a budget that no noise reaches; by default none is known to be."""
        del budget

    def row(self) -> LedgerRow:
        """Return the row of the report: what is read, and by what mechanism."""
        factor = self.neighbours.contributions
        roles = {
            q.role: RoleRow(q.size, repr(q.sampling), factor * q.contribution)
            for q in self.queries
        }
        return LedgerRow(
            self.name,
            self.count,
            roles,
            type(self.mechanism).__name__,
            self.mechanism.precision,
            self.basis.value,
        )

    @abc.abstractmethod
    def forecast(self, coordinates: int | None) -> ForecastRow:
        """Return how the noise compares with the signal, as a row of the report.

        Args:
            coordinates: Number of coordinates of a release, if known.
        """

    @abc.abstractmethod
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        """The events of all `count` releases, with the kind of person they charge."""
