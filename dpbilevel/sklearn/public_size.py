"""Public number of records of a fit, and releases that are planned before it."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PyTree

from .. import _checks
from ..core.plan import least_multiplier
from ..core.problem import Problem
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.mechanisms import Gaussian
from ..privacy.queries import RECORDS, Query
from ..privacy.records.people import PersonUnit, by_person, combined, numbered
from ..privacy.records.rows import filler, padded_rows
from ..privacy.releases import Release
from ..privacy.report import PrivacyReport
from ..privacy.sampling.base import FullBatch


@dataclasses.dataclass(frozen=True)
class PublicSize:
    """Neighbouring relation and public number of records of a fit.

    Attributes:
        relation: The neighbouring relation.
        size: The public number of records.
        unit: The unit of privacy; `None` for one row.
    """

    relation: Neighbours
    size: Any  # an integer, or `Sizes` of two levels under replace-one
    unit: PersonUnit | None = None

    @classmethod
    def of(
        cls,
        owner: str,
        neighbours: str,
        size: int | None,
        rows: int,
        unit: PersonUnit | None = None,
    ) -> "PublicSize":
        """Return a `PublicSize` from an estimator's parameters and the rows of a fit.

        Raises:
            ValueError: The relation is unknown, or the size is missing or superfluous.
        """
        names = tuple(relation.value for relation in Neighbours)
        _checks.one_of(owner, "neighbours", neighbours, names)
        relation = Neighbours(neighbours)
        if relation is Neighbours.REPLACE_ONE:
            if size is not None:
                what = "size= is for neighbours='add_or_remove_one'; leave it out."
                raise ValueError(f"{owner}: {what}")
            return cls(relation, rows, unit)
        if size is None:
            raise ValueError(f"{owner}: give size=, a public number of records.")
        _checks.count(owner, size=size)
        return cls(relation, int(size), unit)

    def rows(self, records: PyTree) -> PyTree:
        """Return records, padded with NaN to a public number if theirs is private.

        So no shape reveals their number, and no program is compiled for it.
        """
        if self.relation is Neighbours.REPLACE_ONE:
            return records
        rows = padded_rows(self.size)

        def filled(column):
            missing = max(rows - len(column), 0)  # `solve` refuses too many
            widths = [(0, missing)] + [(0, 0)] * (column.ndim - 1)
            return np.pad(column, widths, constant_values=filler(column.dtype))

        return jax.tree.map(filled, records)

    def problem(self, problem: Problem) -> Problem:
        """Return a problem on rows as one on the records of the fit."""
        if self.unit is None:
            return problem
        return problem.per_person(self.unit.most_rows, self.unit.combine)

    def combined(
        self, fun: Callable[[PyTree], Any], records: PyTree, empty: float = 0.0
    ) -> Float[np.ndarray, "n w"]:
        """Return one row of numbers for each record, by `combined` for people."""
        return combined(fun, records, self.unit, empty)


def with_nan(
    rows: Float[np.ndarray, "n d"], counts: Bool[np.ndarray, " n"]
) -> Float[np.ndarray, "n d"]:
    """Return rows in the library's precision; NaN for records that do not count.

    Args:
        rows: Features, NaN for missing ones.
        counts: Which records have a target.
    """
    counts = counts & np.isfinite(rows).all(axis=1)
    rows = np.where(counts[:, None], rows, np.nan)
    return rows.astype(jnp.result_type(float))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a table, to be grouped by person.

    Attributes:
        ids: The id of the person of each row; `None` if every row is a record.
        unit: The unit of privacy; `None` with `ids`.
    """

    ids: Any = None
    unit: PersonUnit | None = None

    def count(self, rows: int) -> int:
        """Return the number of records among so many rows."""
        return rows if self.unit is None else numbered(self.ids)[1]

    def records(self, rows: PyTree) -> PyTree:
        """Return the records: the rows, or those of each person."""
        if self.unit is None:
            return rows
        return by_person(rows, self.ids, most_rows=self.unit.most_rows)

    def means(self, rows: Float[np.ndarray, "n w"]) -> Float[np.ndarray, "p w"]:
        """Return one row of numbers for each record."""
        return combined(np.asarray, self.records(rows), self.unit)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Name, size and price of a planned release of means of all records.

    Attributes:
        name: Name of the release.
        parts: Least and largest part of the squared budget of the fit.
        wanted: Noise of a mean that is worth a larger part.
        most_noise: Largest useful noise; with more of it nothing is released.
        count: Number of releases.
        clip_norm: Largest norm of a record.
    """

    name: str
    parts: tuple[float, float]
    wanted: float
    most_noise: float
    count: int = 1
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class AbstractBeforehand(abc.ABC):
    """A planned release before a fit, or none.

    Attributes:
        budget: Budget of the whole fit.
        public: Public number of records, and the relation.
    """

    budget: PrivacyBudget
    public: PublicSize

    @property
    @abc.abstractmethod
    def terms(self) -> Terms:
        """`Terms` of the release, from public numbers."""

    @property
    def planned(self) -> Release | None:
        """`Release` as planned, whatever its noise; `None` if delta is 0."""
        return _release_within(self.budget, self.public, self.terms)

    @property
    def release(self) -> Release | None:
        """Planned `Release`; `None` with too much noise, or if delta is 0."""
        found, most = self.planned, self.terms.most_noise
        return None if found is None or found.noise_std > most else found

    @property
    def releases(self) -> tuple[Release, ...]:
        """Tuple of the `Release` for `calibrate(before=)`, or an empty tuple."""
        return () if self.release is None else (self.release,)


@functools.lru_cache(maxsize=128)
def _release_within(
    budget: PrivacyBudget, public: PublicSize, terms: Terms
) -> Release | None:
    if budget.delta == 0:
        return None
    multiplier = least_multiplier(FullBatch(), terms.count, 1, budget)
    noise = Gaussian(multiplier, public.relation, "grid")
    queries = (Query(RECORDS, public.size, terms.clip_norm),)
    whole = Release(terms.name, terms.count, queries, noise)
    least, most = terms.parts
    part = min(max((whole.noise_std / terms.wanted) ** 2, least), most)
    return dataclasses.replace(whole, mechanism=noise.scaled(part**-0.5))


def mean_noise(report: PrivacyReport) -> float:
    """Return the largest noise of the mean of all steps, in units of the clip norm."""
    rows = zip(report.forecast, report.ledger[-len(report.forecast) :], strict=True)
    return max(
        (row.noise_norm_over_clip_norm or 0) / made.count**0.5 for row, made in rows
    )
