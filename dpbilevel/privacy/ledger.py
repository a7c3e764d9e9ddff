"""The ledger: planned releases of a run, and the epsilon and delta that they cost."""

import abc
import collections
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

import scipy

from .. import _checks
from .._extras import dp_accounting
from .accounting import profiles
from .accounting.closed_forms import gaussian_delta, gaussian_epsilon
from .budget import Neighbours, People, PrivacyBudget
from .per_example.clipping import Basis
from .queries import RECORDS, Query
from .rows import ForecastRow, LedgerRow, RoleRow

_NEGLIGIBLE = 1e-20  # smaller than any delta of a budget


@dataclasses.dataclass(frozen=True)
class AbstractRelease(abc.ABC):
    """`count` planned releases of one kind, and the events that each person is charged.

    Attributes:
        name: What is released, in the words of the algorithm.
        count: How many times.
        queries: What it reads, one query per role.
        basis: What the sensitivities rest on; a field of every subclass.
        mechanism: What makes it private; a field of every subclass.
        notes: What was proved about it, in the words of the report.
        overflow: Part of `failure` that is the chance of an overflowing batch.
        computed_error: Part of `failure` that is the error of computed scores.
    """

    name: str
    count: int
    queries: tuple[Query, ...]
    notes: ClassVar[tuple[str, ...]] = ()
    overflow: ClassVar[float] = 0.0
    computed_error: ClassVar[float] = 0.0
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
            raise ValueError(f"{owner}: {RECORDS!r} allows no other role, got {roles}.")

    @property
    def reads(self) -> tuple[Query, ...]:
        """All queries that read records, a tuple; also of intermediate releases."""
        return self.queries

    @property
    def sizes(self) -> dict[str, int]:
        """The planned numbers of records, by role."""
        return {query.role: query.size for query in self.reads}

    @property
    def contribution(self) -> float:
        """Largest change of the value by one person with a record in every role."""
        return sum(query.contribution for query in self.queries)

    def repeated(self, count: int) -> tuple[Self, ...]:
        """Return a tuple of planned releases that stand for this one in `count` runs.

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
        """Bound on the total variation distance of the releases from those charged."""

    @property
    def neighbours(self) -> Neighbours:
        """Neighbouring relation that the noise refers to."""
        return self.mechanism.neighbours

    def check(self, budget: PrivacyBudget) -> None:
        """Raise `ValueError` if no noise can meet the budget; by default do nothing."""
        del budget

    def row(self) -> LedgerRow:
        """Return a `LedgerRow`: what is read, and by what mechanism."""
        factor = self.neighbours.contributions
        roles = {
            q.role: RoleRow(q.size, repr(q.sampling), factor * q.contribution)
            for q in self.queries
        }
        kind, precision = type(self.mechanism).__name__, self.mechanism.precision
        basis = self.basis.value
        return LedgerRow(self.name, self.count, roles, kind, precision, basis)

    @abc.abstractmethod
    def forecast(self, coordinates: int | None) -> ForecastRow:
        """Return a `ForecastRow`: how the noise compares with the signal.

        The number of coordinates of a release is `None` if it is unknown.
        """

    @abc.abstractmethod
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        """Yield pairs (kind of person, event) that account for all `count` releases."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All planned releases of a run, whose costs are composed per kind of person.

    Args:
        releases: Every release, in the order of the algorithm.
        people: Who may have records where. Disjoint roles compose apart and the
            guarantee is the maximum; otherwise one `"person"` is charged everything.
        assumptions: What the guarantee rests on besides clipping.

    Raises:
        ValueError: The releases do not share one neighbouring relation.
        TypeError: `releases` is not a tuple of `Release`.

    References:
        Adaptive composition: Dong, Roth and Su, "Gaussian differential privacy", 2022;
        disjoint roles: McSherry, "Privacy integrated queries", 2009 (parallel
        composition).
    """

    releases: tuple[AbstractRelease, ...]
    people: People = People.OVERLAPPING
    assumptions: tuple[str, ...] = ()

    def __post_init__(self):
        _checks.instance("Ledger", tuple, releases=self.releases)
        for release in self.releases:
            _checks.instance("Ledger", AbstractRelease, releases=release)
        if not isinstance(self.people, People):
            allowed = [people.value for people in People]
            _checks.one_of("Ledger", "people", self.people, allowed)
            object.__setattr__(self, "people", People(self.people))
        relations = {release.neighbours for release in self.releases}
        if len(relations) > 1:
            raise ValueError("Ledger: give all mechanisms the same `neighbours`.")

    @property
    def neighbours(self) -> Neighbours:
        """Neighbouring relation of every release; replace-one if there is none."""
        return next((r.neighbours for r in self.releases), Neighbours.REPLACE_ONE)

    @property
    def failure(self) -> float:
        """Bound on the total variation distance of the run from what is charged."""
        return sum(release.failure for release in self.releases)

    def events(self) -> "dict[str, dp_accounting.DpEvent]":
        """Return a dict by kind of person: one composed event of all its releases."""
        charged = collections.defaultdict(list)
        for release in self.releases:
            for person, event in release.charges(self.people):
                charged[person].append(event)
        return {p: dp_accounting.ComposedDpEvent(e) for p, e in charged.items()}

    @property
    def basis(self) -> Basis:
        """Basis of the guarantee: the weakest basis of a release."""
        bases = (release.basis for release in self.releases)
        return functools.reduce(Basis.worse, bases, Basis.CLIPPED)

    def delta(self, epsilon: float) -> float:
        r"""Return the least $\delta$ at `epsilon` that holds for every person.

        Args:
            epsilon: $\varepsilon \ge 0$.

        Returns:
            1 where a release is unproved.
        """
        unproved = self.basis is Basis.UNPROVED
        return 1.0 if unproved else self.delta_if_proved(epsilon)

    def delta_if_proved(self, epsilon: float, *, rough: bool = False) -> float:
        """Return the delta at `epsilon` as if every sampler met its target.

        A `rough` one is an estimate, off by some percent.
        """
        failure, events = self.failure, self.events().values()
        curves = [profiles.profile(e, self.neighbours, rough=rough) for e in events]

        def worst(epsilon: float) -> float:
            return max((profile(epsilon) for profile in curves), default=0.0)

        if not failure:
            return min(1.0, worst(epsilon) + 0.0)  # never -0.0

        def total(epsilon: float) -> float:
            return profiles.total_variation_delta(epsilon, failure, worst(epsilon))

        here, alone = total(epsilon), worst(epsilon)
        if here - alone <= max(1e-9 * alone, _NEGLIGIBLE):
            return here
        # The price of an overflow grows with epsilon; any smaller one holds as well.
        # At the end the failures alone cost a delta of 1.
        ends = 0.0, min(epsilon, -math.log(min(failure, 1.0)))
        smaller = scipy.optimize.minimize_scalar(total, bounds=ends, method="bounded")
        mu = max(map(self._full_batch_mu, events))
        most = float(gaussian_delta(mu, epsilon))
        return min(here, float(smaller.fun), most)

    def epsilons(self, delta: float) -> dict[str, float]:
        r"""Return a dict of the smallest $\varepsilon$ at `delta`, by kind of person.

        Infinite where a release is unproved. As `epsilon`, but `delta` may be 0.
        """
        events, failure, relation = self.events(), self.failure, self.neighbours
        if self.basis is Basis.UNPROVED:
            return dict.fromkeys(events, math.inf)
        if not failure:
            return {p: profiles.epsilon(e, relation, delta) for p, e in events.items()}
        found = {}
        for person, event in events.items():
            found[person] = gaussian_epsilon(self._full_batch_mu(event), delta)
            spent = 1e-9 * delta  # on failures
            for _ in range(20):
                value = profiles.epsilon(event, relation, delta - spent)
                slack = profiles.total_variation_delta(value, failure)
                if slack <= spent:
                    found[person] = min(value, found[person])
                    break
                spent = 1.5 * slack  # more than now: the next epsilon is larger
                if spent >= delta:  # nothing is left for the releases themselves
                    break
        return found

    def epsilon(self, delta: float) -> float:
        r"""Return the least $\varepsilon$ at `delta` that holds for every person.

        Args:
            delta: $\delta$ in (0, 1); Gaussian noise has no finite epsilon at zero.
        """
        _checks.fraction("Ledger.epsilon", delta=delta)
        return max(self.epsilons(delta).values(), default=0.0)

    def __add__(self, other: "Ledger") -> "Ledger":
        """Return the ledger of both runs on the same records, one after the other."""
        if self.people is not other.people:
            raise ValueError(f"Ledger: people differ: {self.people}, {other.people}.")
        assumptions = dict.fromkeys(self.assumptions + other.assumptions)
        return Ledger(self.releases + other.releases, self.people, tuple(assumptions))

    def repeat(self, count: int) -> "Ledger":
        """Return the ledger of `count` repetitions of this run."""
        _checks.count("Ledger.repeat", count=count)
        releases = tuple(part for r in self.releases for part in r.repeated(count))
        return dataclasses.replace(self, releases=releases)

    def part(self, done: int, steps: int) -> "Ledger":
        """Return the ledger of the first `done` of `steps` equal steps.

        A release that is not made equally often in every step counts in full.
        """

        def first(release: AbstractRelease) -> AbstractRelease:
            each, rest = divmod(release.count, steps)
            return release if rest else dataclasses.replace(release, count=each * done)

        return dataclasses.replace(self, releases=tuple(map(first, self.releases)))

    def named(self, run: str) -> "Ledger":
        """Return the ledger with each release's name prefixed by the run."""
        names = ((r, f"{run}: {r.name}") for r in self.releases)
        releases = tuple(dataclasses.replace(r, name=name) for r, name in names)
        return dataclasses.replace(self, releases=releases)

    def _full_batch_mu(self, event) -> float:
        """Return a mu that bounds an event's cost by full batches, or infinity.

        The rows that a batch leaves out depend on no record. A full batch therefore
        also bounds the cost of batches that overflow, but not of draws that are off.
        """
        if any(release.failure > release.overflow for release in self.releases):
            return math.inf
        return profiles.full_batch_mu(event)
