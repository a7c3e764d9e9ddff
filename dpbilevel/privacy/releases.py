"""Planned releases of clipped means plus noise: how one is made, and what all cost."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import optax
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from .._extras import dp_accounting
from .budget import Neighbours, People
from .exact.int61 import MOST_PLACES
from .keys import PRNGKey, check_key, derive
from .ledger import AbstractRelease
from .mechanisms import AbstractNoise
from .per_example.clipping import Basis, Bounded
from .queries import LEVELS, RECORDS, AbstractCertifiedQuery, Query, check_rows, of_role
from .rows import ForecastRow, LedgerRow
from .sampling.base import FullBatch, Index

PERSON = "person"  # whoever may have a record in either level

# The largest sum and the largest contribution that the grid holds, in units of the
# contribution of the role with the smallest one.
_LARGEST_SUM, _LARGEST_SHARE = 2.0**36, 2.0 ** (MOST_PLACES - 1)


@dataclasses.dataclass(frozen=True)
class AbstractNoisyRelease(AbstractRelease):
    """Base class of planned releases of a sum of clipped means plus noise.

    Args:
        mechanism: The noise, relative to the sum of the queries' sensitivities.
        joint: Whether both queries read one batch of the same records.
    """

    mechanism: AbstractNoise
    joint: bool = dataclasses.field(default=False, kw_only=True)
    spans_run: ClassVar[bool] = False  # whether it charges all releases together
    value_norm: ClassVar[float | None] = None  # as in `Release`
    clip_ratio: ClassVar[float | None] = None

    def __post_init__(self):
        super().__post_init__()
        owner = type(self).__name__
        _checks.instance(owner, AbstractNoise, mechanism=self.mechanism)
        if not (self.mechanism.independent or self.spans_run):
            raise ValueError(
                f"{owner}: the noise of {type(self.mechanism).__name__} depends on "
                "that of other releases. Use CorrelatedRelease."
            )
        _checks.instance(owner, bool, joint=self.joint)
        if self.joint and (
            tuple(query.role for query in self.queries) != LEVELS
            or len({query.size for query in self.queries}) > 1
            or len({repr(query.sampling) for query in self.queries}) > 1
        ):
            raise ValueError(
                f"{owner}: joint queries must be of {LEVELS}, alike but for clip norms."
            )
        _checks.instance(owner, Basis, basis=self.basis)
        if self.value_norm is not None:
            _checks.positive(owner, value_norm=self.value_norm)
        known = all(_checks.concrete(query.clip_norm) for query in self.queries)
        if self.mechanism.precision != "grid" or not self.queries or not known:
            return
        shares = [query.contribution for query in self.queries]
        least, most = min(shares), max(shares)
        largest = max(q.contribution * q.size for q in self.queries)
        if largest > _LARGEST_SUM * least or most > _LARGEST_SHARE * least:
            raise ValueError(
                f"{owner}: {self.name!r} adds means that one record moves by up to "
                f"{most:.3g} and {least:.3g}, and no grid holds both. Bring the clip "
                "norms or the penalty closer together."
            )

    def apply(
        self, what: Any, data: PyTree, *, key: PRNGKey, index: Index = None
    ) -> PyTree:
        """Make one of these releases: return what is read from the records plus noise.

        Args:
            what: The per-record function of each query, by its role.
            data: The records; those of role `"upper"` are `data.upper`, and so on.
            key: A typed key for the batches and the noise of this release alone.
            index: The number of the release in the run, for samplings that are
                numbered.

        Raises:
            ValueError: What is read rests on less than `basis` says, or rows do not
                fit the plan: see `check_rows`.

        Privacy:
            What `charges` counts for one of `count`.
        """
        for query in self.queries:
            records = of_role(data, query.role)
            check_rows(query.role, records, query.size, self.neighbours)
        key_batch, key_noise = self.keys(key)
        bounded = self.read(what, data, key=key_batch, index=index)
        if bounded.basis.worse(self.basis) is not self.basis:
            raise ValueError(
                f"{self.name!r} is charged as {self.basis}, but is {bounded.basis}."
            )
        return self.mechanism.release(bounded, key=key_noise)

    def keys(self, key: PRNGKey) -> tuple[PRNGKey | None, PRNGKey]:
        """Return the batches' key, `None` if they need none, and the noise's key."""
        # Batches of all records use one to put them in rows at random.
        drawn = self.neighbours is Neighbours.ADD_OR_REMOVE_ONE
        if drawn or any(q.randomized or q.sampling.needs_key for q in self.queries):
            key_batch, key_noise = derive(key, "sampling", "noise")
            return key_batch, key_noise
        return None, key

    def in_pass(self, data: PyTree, *, key: PRNGKey) -> Self:
        """Return a copy of this planned release with the batches of one pass drawn.

        Takes the records and a typed key for this pass alone.

        Privacy:
            As secret as the noise. Draw anew for every pass, or more is spent than
            charged.
        """
        queries = self.queries[-1:] if self.joint else self.queries
        roles = [query.role for query in queries]
        keys = [key] if roles == [RECORDS] else derive(check_key(key), *roles)
        pairs = zip(queries, keys, strict=True)
        drawn = [q.sampling.in_pass(of_role(data, q.role), key=k) for q, k in pairs]
        if self.joint:  # one batch for both
            drawn *= len(self.queries)
        pairs = zip(self.queries, drawn, strict=True)
        bound = (dataclasses.replace(q, sampling=s) for q, s in pairs)
        return dataclasses.replace(self, queries=tuple(bound))

    def read(
        self, what: Any, data: PyTree, *, key: PRNGKey | None, index: Index = None
    ) -> Bounded:
        """Return the sum of one clipped mean per query, sealed as `Bounded`.

        Joint queries read one batch: the sum of their functions is clipped once, at the
        sum of their clip norms, the same bound with less distortion.

        Raises:
            ValueError: The functions are not those of the queries.
        """
        funs: Mapping[str, Callable[[PyTree], PyTree]] = what
        roles = [query.role for query in self.queries]
        if set(funs) != set(roles):
            raise ValueError(
                f"{self.name!r} is charged for queries of {roles}, but reads {[*funs]}."
            )
        key_of = {RECORDS: key}
        if key is not None and roles != [RECORDS]:
            key_of = dict(zip(roles, derive(check_key(key), *roles), strict=True))
        parts = [(query, funs[query.role]) for query in self.queries]
        if self.joint:
            (upper, of_upper), (lower, of_lower) = parts
            clip_norm = upper.clip_norm + lower.clip_norm
            both = dataclasses.replace(lower, clip_norm=clip_norm)
            parts = [(both, lambda z: optax.tree.add(of_upper(z), of_lower(z)))]
        options: Any = {"neighbours": self.neighbours, "index": index}
        options["precision"] = self.mechanism.precision
        drawn = self.neighbours is Neighbours.ADD_OR_REMOVE_ONE
        means = []
        for query, fun in parts:
            needed = drawn or query.randomized or query.sampling.needs_key
            key = key_of.get(query.role) if needed else None
            records = of_role(data, query.role)
            means.append(query.read(fun, records, key=key, **options))
        return functools.reduce(operator.add, means)  # contributions add up

    @property
    def clip_norm(self) -> float:
        """The largest norm of the noiseless value."""
        if self.value_norm is not None:
            return self.value_norm
        return sum(float(query.clip_norm) for query in self.queries)

    @property
    def noise_multiplier(self) -> float:
        """Noise deviation over the sensitivity of a person who is in all roles."""
        return float(self.mechanism.multiplier)

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise in every coordinate."""
        factor = self.neighbours.contributions
        return float(self.mechanism.deviation) * factor * self.contribution

    @property
    def deviation(self) -> Any:
        r"""Bound on a value's deviation in any direction, by noise and batches.

        It is $s$ with $s^2 = \sigma^2 + (\sum_j C_j / \sqrt{m_j})^2$: $\sigma$ is the
        noise of a coordinate, and the sum is over the levels $j$ whose batches are
        drawn. A mean of $m_j$ records that are clipped at $C_j$ deviates by at most
        $C_j / \sqrt{m_j}$ along a direction. Numbers may be traced.
        """
        factor = self.mechanism.deviation * self.neighbours.contributions
        noise = batches = 0.0
        for query in self.queries:
            count = query.sampling.denominator(query.size)
            noise += factor * query.clip_norm / count
            if not isinstance(query.sampling, FullBatch):
                batches += query.clip_norm / count**0.5
        return (noise**2 + batches**2) ** 0.5

    @override
    def row(self) -> LedgerRow:
        return dataclasses.replace(
            super().row(),
            noise_multiplier=float(self.mechanism.multiplier),
            noise_std=self.noise_std,
            clip_norm=self.clip_norm,
        )

    @override
    def forecast(self, coordinates: int | None) -> ForecastRow:
        ratio = self.noise_std / self.clip_norm
        return ForecastRow(
            self.name,
            largest="clip norm" if self.value_norm is None else "largest value",
            noise_std_over_clip_norm=ratio,
            break_even_coordinates=1 / ratio**2 if ratio else math.inf,
            coordinates=coordinates,
            noise_norm_over_clip_norm=coordinates and ratio * math.sqrt(coordinates),
            clip_norm_over_bound=self.clip_ratio and float(self.clip_ratio),
        )


@dataclasses.dataclass(frozen=True)
class Release(AbstractNoisyRelease):
    r"""`count` planned releases of one kind: summed clipped means plus a draw of noise.

    Args:
        name: What is released, in the words of the algorithm.
        count: How many times.
        queries: The clipped means it adds up, one per role.
        mechanism: The noise, relative to the sum of the queries' sensitivities.
        basis: What the sensitivities rest on.
        value_norm: The largest norm of the noiseless value, where it is not the sum of
            the queries' clip norms.
        clip_ratio: The clip norm over the declared bound on what is clipped, where it
            is declared. Only the report reads it.

    Privacy:
        The sensitivity is $S = \sum_r S_r$ over the roles. A person of role $r$ alone
        moves the value by $S_r / S$ of it. A person with a record in each role is
        charged a part of the mechanism for each: for Gaussian noise of multiplier $m$,
        independent releases that split its variance in proportion to $S_r$, that is
        multipliers $m \sqrt{S / S_r}$, whose composition has multiplier $m$.
    """

    basis: Basis = Basis.CLIPPED
    value_norm: float | None = None
    clip_ratio: float | None = None

    @property
    def failure(self) -> float:
        """Bound on the probability that some batch of these releases overflows."""
        batches = self.queries[:1] if self.joint else self.queries  # or one for both
        chances = (q.sampling.failure(self.neighbours, q.size) for q in batches)
        return self.count * sum(chances)

    @property
    @override
    def overflow(self) -> float:
        return self.failure

    @property
    def notes(self) -> tuple[str, ...]:
        """Tuple of texts on how often a record is charged, if not at every release."""
        notes = (
            (query.sampling.per_epoch, query.sampling.charged(self.count, query.size))
            for query in self.queries
        )
        return tuple(
            f"{self.name}: a record is in one batch of a pass, drawn at random, and "
            f"charged for {charged} passes"
            if per_epoch
            else f"{self.name}: batches are disjoint, so a record is charged for "
            f"{charged} of {self.count} releases"
            for per_epoch, charged in notes
            if per_epoch or charged < self.count
        )

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        for person, query, event in self._events(people):
            event = query.sampling.event(event, self.neighbours, query.size)
            count = query.sampling.charged(self.count, query.size)
            yield person, dp_accounting.SelfComposedDpEvent(event, count)

    def _events(
        self, people: People
    ) -> "Iterator[tuple[str, Query, dp_accounting.DpEvent]]":
        """Yield (kind of person, query, event) of one release on a given batch."""
        if self.joint:
            yield PERSON, self.queries[0], self.mechanism.event()  # one batch has both
            return
        for query in self.queries:
            share = query.contribution / self.contribution
            if query.role == RECORDS or people is People.DISJOINT:
                yield query.role, query, self.mechanism.event(share)
            else:
                yield PERSON, query, self.mechanism.part(share)


@dataclasses.dataclass(frozen=True)
class CertifiedRelease(Release):
    """Planned releases of one certified query, from which all that they cost follows.

    Args:
        name: What is released, in the words of the algorithm.
        count: How many times.
        mechanism: The noise, relative to the sensitivity of what is read.
        query: What is read, and what it costs; `apply` takes the point to read it at.
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
