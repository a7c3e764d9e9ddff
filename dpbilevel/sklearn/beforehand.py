"""Public numbers of records, and the releases that are planned before a fit."""

import abc
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PyTree
from typing_extensions import override

from .. import _checks
from ..core.plan import least_multiplier
from ..core.problem import Problem
from ..core.usability import released_mean
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.keys import PRNGKey
from ..privacy.mechanisms import Gaussian
from ..privacy.queries import RECORDS, Query
from ..privacy.records.people import PersonUnit, by_person, combined, numbered, on_rows
from ..privacy.records.rows import filler, padded_rows
from ..privacy.releases import Release
from ..privacy.report import PrivacyReport
from ..privacy.sampling.base import FullBatch
from .declared import Frame


@dataclasses.dataclass(frozen=True)
class PublicSize:
    """Neighbouring relation and public number of records of a fit."""

    relation: Neighbours
    size: Any  # an integer, or `Sizes` of two levels under replace-one
    unit: PersonUnit | None = None  # of privacy; `None` for one row

    @classmethod
    def of(cls, estimator: Any, rows: int, unit: PersonUnit | None) -> "PublicSize":
        """Return the `PublicSize` that an estimator's parameters and rows imply."""
        owner, size = type(estimator).__name__, estimator.size
        names = tuple(relation.value for relation in Neighbours)
        _checks.one_of(owner, "neighbours", estimator.neighbours, names)
        relation = Neighbours(estimator.neighbours)
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
        """Return a problem on rows, changed to the privacy unit of the fit."""
        if self.unit is None:
            return problem
        return problem.per_person(self.unit.most_rows, self.unit.combine)


def with_nan(
    rows: Float[np.ndarray, "n d"], counts: Bool[np.ndarray, " n"]
) -> Float[np.ndarray, "n d"]:
    """Return rows in the library's precision; NaN for records that do not count.

    A record counts if it has a target and no feature is NaN.
    """
    counts = counts & np.isfinite(rows).all(axis=1)
    rows = np.where(counts[:, None], rows, np.nan)
    return rows.astype(jnp.result_type(float))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a table, to be grouped by person."""

    ids: Any = None  # of the person of each row; `None` if every row is a record
    unit: PersonUnit | None = None  # of privacy, with ids

    def count(self, rows: int) -> int:
        """Return the number of records: `rows`, or the number of people with ids."""
        return rows if self.unit is None else numbered(self.ids)[1]

    def records(self, rows: PyTree) -> PyTree:
        """Return the records: the rows, or those of each person."""
        if self.unit is None:
            return rows
        return by_person(rows, self.ids, most_rows=self.unit.most_rows)

    def means(self, rows: Float[np.ndarray, "n w"]) -> Float[np.ndarray, "p w"]:
        """Return one row of numbers a record: for a person the mean of the rows."""
        return combined(np.asarray, self.records(rows), self.unit)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Arguments of a fit and what follows from them before a label is read."""

    budget: PrivacyBudget
    key: PRNGKey
    table: Float[np.ndarray, "n d"]  # features, NaN for missing ones
    units: Frame  # of the features
    people: Rows  # whose row each one is
    public: PublicSize

    def records(self, rows: PyTree) -> PyTree:
        """Return the records that rows form, padded to their public number."""
        return self.public.rows(self.people.records(rows))


@dataclasses.dataclass(frozen=True)
class Terms:
    """Name, budget and tolerable noise of a planned release of means of all records."""

    name: str
    parts: tuple[float, float]  # least and largest part of the fit's squared budget
    wanted: float  # noise of a mean that is worth a larger part
    most_noise: float  # with more of it nothing is released
    count: int = 1  # number of releases
    clip_norm: float = 1.0  # largest norm of a record


@dataclasses.dataclass(frozen=True)
class AbstractBeforehand(abc.ABC):
    """A release planned before a fit, and made if its noise is small enough."""

    budget: PrivacyBudget  # of the whole fit
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


PART = 0.02  # of the squared budget
SHORT = 1 / 8  # of the longest row; shorter rows are warned of
# Number of bins of lengths, longest rows first, each shorter than the one before by the
# square root of 2.
_BINS = 14
_LONGER = 0.25  # fraction of rows that are longer than the unit
_LEAST = 0.25  # fraction of rows that must count
_MOST_NOISE = 0.1  # noise of a fraction; with more of it the declared unit is kept


@dataclasses.dataclass(frozen=True)
class Lengths(AbstractBeforehand):
    """A planned release of the fraction of rows in each bin of lengths.

    Attributes:
        rows: Records of features in units of a `Frame`, in the planned number; NaN for
            rows that do not count. NON-PRIVATE.
        longest: Length of the longest declared row.
    """

    rows: Any
    longest: float

    @property
    @override
    def terms(self) -> Terms:
        return Terms("lengths of rows", (PART, PART), _MOST_NOISE, _MOST_NOISE)

    def typical_length(self, *, key: PRNGKey, owner: str) -> float:
        """Release the length that a quarter of rows exceed, over the longest; or NaN.

        It is a fraction of the longest row, from 1 down to 1/128; NaN without a
        release, or if hardly any row counts. The key is for this release alone.

        Privacy:
            The one release of `release`: the mean of rows of zeros with one 1 at most.
        """
        if self.release is None:
            return math.nan
        unit = self.public.unit
        bins = combined(lambda v: in_bins(v / self.longest), self.rows, unit)
        fractions = released_mean(self.release, bins, key=key, owner=owner)
        longer = np.cumsum(np.asarray(fractions, float))
        if longer[-1] < _LEAST:
            return math.nan
        wanted = _LONGER * min(longer[-1], 1.0)
        place = int(np.argmax(longer >= wanted))
        before = longer[place - 1] if place else 0.0
        part = (wanted - before) / (longer[place] - before)
        return 2 ** (-(place + part) / 2)

    def unit(self, length: float) -> float:
        """Return the released length in the `Frame`'s units; 1 without a release."""
        return 1.0 if math.isnan(length) else self.longest * length

    def frame(self, units: Frame, unit: float) -> Frame:
        """Return the `Frame` with its scale times `unit`, for rows divided by it."""
        return dataclasses.replace(units, scale=units.scale * unit)

    def in_unit(self, records: Any, unit: float) -> Any:
        """Return records whose features, but for a constant, are divided by `unit`.

        A constant feature, which comes after them, is kept.
        """
        width = jax.tree.leaves(self.rows)[0].shape[-1]

        def divided(rows: dict[str, Any]) -> dict[str, Any]:
            features = rows["features"]
            divisor = np.ones(features.shape[-1], features.dtype)
            divisor[:width] = unit
            return rows | {"features": features / divisor}

        return on_rows(divided, records)


def in_bins(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
    """Return a one-hot array: the bin of each row's length, zeros if it does not count.

    A row that does not count stays all zeros.

    Privacy:
        Row by row. NON-PRIVATE until `Lengths.typical_length` releases the mean.
    """
    counts = np.asarray(np.isfinite(rows).all(axis=1))
    length = np.linalg.norm(np.where(counts[:, None], rows, 0), axis=1)
    bins = np.floor(-2 * np.log2(np.maximum(length, 2.0**-_BINS)))
    bins = np.clip(bins, 0, _BINS - 1)
    found = (bins[:, None] == np.arange(_BINS)) & counts[:, None]
    return found.astype(np.float32)
