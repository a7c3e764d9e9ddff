r"""The first release of a run, fractions of usable records; `shares` decides on them.

A misspelt class or a column in another unit leaves records without influence. No error
says so, because it would reveal records. A run therefore first releases one noisy mean
of indicators of each level, for a hundredth of the squared budget. The indicators are
of usable records, of each wrong column, and of each class, group and source.
Conclusions from the released means (`core/shares.py`) are post-processing.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..privacy.budget import Neighbours, People, PrivacyBudget
from ..privacy.keys import PRNGKey, derive
from ..privacy.mechanisms import Gaussian
from ..privacy.per_example.clipping import Precision
from ..privacy.queries import LEVELS, RECORDS, Query
from ..privacy.releases import Release
from ..privacy.sampling.base import FullBatch
from .levels import Levels, Sizes
from .loop import public_rows
from .plan import least_multiplier
from .shares import OF_COLUMNS, OF_PLACES, LevelUsability, Usability

SHARE = 0.01  # of the squared budget
# Lengths of the blocks, in units of the usable entry. Shorter blocks mean less noise in
# the usable entry, and more noise in the blocks.
_BLOCK, _PLACES = 1 / OF_COLUMNS, 1 / OF_PLACES
# If there are more, noise hides their fractions, so none is released then.
_MOST_PLACES = 64  # groups or sources
_MOST_NOISE = 0.25  # of the usable share, for its release


@dataclasses.dataclass(frozen=True)
class Columns:
    r"""Declared columns of a level, with its classes, and its groups or sources.

    The row of a record is $(u - 1/2, w / 2, (e - 1/k) / 2, (h - 1/m) / 3)$: whether it
    can be used, its wrong columns with equal entries and norm 1, its class among $k$,
    with $e = 0$ if it has none, and its group or source among $m$ in the same way. Its
    squared norm is at most $1/4 + 1/4 + (1 - 1/k) / 4 + (1 - 1/m) / 9$ for $k, m \ge
    2$, whatever the number of columns is.

    Args:
        names: The name of each column that is checked; the first one is the label's if
            there are classes.
        classes: The name of each class; empty if the label is a number.
        place: The name of the column of groups or sources, one of `names`.
        places: The name of each group or source; empty without them. More than 64 are
            not counted.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...] = ()
    place: str = ""
    places: tuple[str, ...] = ()

    @property
    def lists(self) -> tuple[tuple[tuple[str, ...], float], ...]:
        """Pairs (names, block length): of the classes, and of the groups or sources."""
        few = self.places if len(self.places) <= _MOST_PLACES else ()
        return (self.classes, _BLOCK), (few, _PLACES)

    @property
    def clip_norm(self) -> float:
        """The largest norm of a row of `indicators`."""
        # Each list is centred; a record has one of the k values, or none of them.
        listed = ((len(values), block) for values, block in self.lists if values)
        square = sum(block**2 * max(1 - 1 / k, 1 / k) for k, block in listed)
        return math.sqrt(0.25 + _BLOCK**2 + square)

    def indicators(
        self,
        unusable: Bool[np.ndarray, "n k"],
        outside: Bool[np.ndarray, "n k"] | None = None,
        label: Int[np.ndarray, " n"] | None = None,
        place: Int[np.ndarray, " n"] | None = None,
    ) -> Float[np.ndarray, "n w"]:
        """Return an array with one row of centred indicators for each record.

        Args:
            unusable: Whether the cell of each column leaves its record without
                influence: it cannot be read, or is not among the listed values.
            outside: Whether the cell is cut to declared bounds or is an unlisted
                category. Its column counts as wrong, its record as usable.
            label: The number of each record's class, -1 if it is none of `classes`.
            place: The number of each record's group or source, -1 if it is none of
                `places`.

        Privacy:
            Row by row. NON-PRIVATE until `RecordsCheck.release` releases their mean.
        """
        wrong = unusable if outside is None else unusable | outside
        # Wrong cells of one record count in equal parts; together they have norm 1.
        count = np.maximum(wrong.sum(axis=1, keepdims=True), 1).astype(np.float32)
        usable = ~unusable.any(axis=1, keepdims=True)
        blocks = [usable - np.float32(0.5), _BLOCK * (wrong / np.sqrt(count))]
        for (values, block), number in zip(self.lists, (label, place), strict=True):
            if values:
                assert number is not None
                one_hot = number[:, None] == np.arange(len(values))
                blocks.append(block * (one_hot - np.float32(1 / len(values))))
        return np.concatenate(blocks, axis=1)


@dataclasses.dataclass(frozen=True)
class RecordsCheck:
    """A planned first release of the fractions of usable records.

    Attributes:
        columns: The declaration of each level, by role.
        releases: The release of each level that is checked, for `calibrate(before=)`.
    """

    columns: tuple[tuple[str, Columns], ...]
    releases: tuple[Release, ...]

    @classmethod
    def planned(
        cls,
        columns: Mapping[str, Columns],
        budget: PrivacyBudget,
        sizes: Sizes | int,
        *,
        neighbours: Neighbours = Neighbours.REPLACE_ONE,
        precision: Precision = "grid",
    ) -> "RecordsCheck":
        """Return a `RecordsCheck` that costs a hundredth of everybody's squared budget.

        The role of a declaration is `"records"` for one level; `"upper"` and `"lower"`
        for two, or `"upper"` alone if the levels are shared. The budget is that of the
        whole run.

        Returns:
            The check. It has no releases if the budget has `delta = 0`, which excludes
            Gaussian noise, and none of a level whose usable share would have noise
            above 1/4.

        Privacy:
            Touches no data. The releases are charged to everybody as `Ledger` says.
        """
        levels = tuple(columns.items())
        if budget.delta == 0:
            return cls(levels, ())
        multiplier = _multiplier(FullBatch(), 1, 1, budget)
        # A person who may have a record in each level is charged for all levels.
        disjoint = isinstance(sizes, Sizes) and sizes.people is People.DISJOINT
        of_levels: Any = sizes  # or the number of records of the one level

        def releases(levels) -> tuple[Release, ...]:
            scale = math.sqrt((1 if disjoint else max(len(levels), 1)) / SHARE)
            noise = Gaussian(multiplier * scale, neighbours, precision)
            queries = (
                Query(role, getattr(of_levels, role, of_levels), declared.clip_norm)
                for role, declared in levels
            )
            return tuple(Release(_NAMES[q.role], 1, (q,), noise) for q in queries)

        pairs = zip(levels, releases(levels), strict=True)
        precise = [level for level, v in pairs if v.noise_std <= _MOST_NOISE]
        return cls(levels, releases(precise))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Tuple of texts for the report: assumptions about levels not checked."""
        checked = [release.queries[0].role for release in self.releases]
        left = [role for role, _ in self.columns if role not in checked]
        if not left:
            return ()
        which = "the records" if left == [RECORDS] else f"{' and '.join(left)} records"
        return (
            f"{which} are as declared: whether they can be used is not checked, "
            "because delta is 0 or they are too few for a share with little noise",
        )

    def release(
        self,
        indicators: Mapping[str, Float[np.ndarray, "n w"]],
        *,
        key: PRNGKey,
        owner: str = "solve",
    ) -> Usability:
        """Release the fractions of usable records, as a `Usability`.

        Rows are those of `Columns.indicators`, by role; under replace-one as many as
        planned. The key is for this check alone, such as the first one of `derive(key,
        "usability", "run")`.

        Raises:
            ValueError: The number of rows is not the planned one (replace-one), or
                above the rows of the plan (add-or-remove-one).

        Privacy:
            The call makes the releases that `releases` counts. It reads nothing else of
            the records.
        """
        columns, means = dict(self.columns), self.means(indicators, key, owner)
        pairs = zip(means.items(), self.releases, strict=True)
        levels = {r: _level(columns[r], mean, v.noise_std) for (r, mean), v in pairs}
        return Usability(levels)

    def means(
        self, indicators: Mapping[str, Any], key: PRNGKey, owner: str = "solve"
    ) -> dict[str, Float[Array, " w"]]:
        """Release each checked level's noisy mean indicators: a dict by role."""
        releases = {release.queries[0].role: release for release in self.releases}
        keys = [key] if len(releases) < 2 else derive(key, *releases)
        return {
            role: released_mean(release, indicators[role], key=own, owner=owner)
            for (role, release), own in zip(releases.items(), keys, strict=False)
        }


def released_mean(
    release: Release, rows: Any, *, key: PRNGKey, owner: str = "solve"
) -> Float[Array, " w"]:
    """Release the noisy mean of one level's rows, by a `Release` of one query.

    Errors are those of `RecordsCheck.release`. A row is at most the clip norm long, and
    the key is for this release alone.
    """
    (query,) = release.queries
    if release.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        rows = public_rows(rows, query.size, query.role, owner)
    elif len(rows) != query.size:
        raise ValueError(
            f"{owner}: {release.name!r} takes {query.size} rows, got {len(rows)}."
        )
    return _released(query, release.mechanism, rows, key=key)


_multiplier = functools.lru_cache(maxsize=128)(least_multiplier)
_NAMES = {role: f"usable records of the {role} level" for role in LEVELS}
_NAMES[RECORDS] = "usable records"


@functools.partial(jax.jit, static_argnums=0)
def _released(query: Query, mechanism: Gaussian, rows, *, key) -> Float[Array, " w"]:
    """Release the noisy mean that a query reads; compiled once for all multipliers."""
    upper, lower = (rows if role == query.role else None for role in LEVELS)
    data = rows if query.role == RECORDS else Levels(upper, lower)
    release = Release(_NAMES[query.role], 1, (query,), mechanism)
    return release.apply({query.role: lambda row: row}, data, key=key)


def _level(columns: Columns, released, noise_std: float) -> LevelUsability:
    """Convert a mean of rows of `Columns.indicators` to a `LevelUsability`."""
    means, count = np.asarray(released, float), len(columns.names)
    wrong, rest = means[1 : 1 + count] / _BLOCK, means[1 + count :]
    shares = []
    for values, block in columns.lists:
        own, rest = rest[: len(values)], rest[len(values) :]
        even = 1 / max(len(values), 1)
        pairs = zip(values, own, strict=True)
        shares.append({n: float(v) / block + even for n, v in pairs})
    return LevelUsability(
        float(means[0]) + 0.5,
        noise_std,
        dict(zip(columns.names, map(float, wrong), strict=True)),
        *shares,
        place=columns.place,
    )
