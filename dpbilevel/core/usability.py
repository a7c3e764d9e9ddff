r"""The first release of a run: how usable the records are.

A misspelt class or a column in another unit leaves records without influence, in
silence, because an error would tell of them. So a run begins with one noisy mean of
indicators of each level, for a hundredth of the squared budget: of the records that can
be used, of each column that is wrong, and of each class. What follows from the released
means, such as to stop before the rest of the budget is spent, is post-processing.
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
from ..privacy.clipping import Precision
from ..privacy.mechanisms import Gaussian
from ..privacy.noise import PRNGKey, derive
from ..privacy.queries import LEVELS, RECORDS, Query
from ..privacy.releases import Release
from ..privacy.sampling import FullBatch
from .levels import Levels, Sizes, people_of
from .loop import public_rows
from .plan import least_multiplier

SHARE = 0.01  # of the squared budget
# Lengths of the blocks of wrong columns and of classes, in units of the usable entry:
# the shorter they are, the less noise that entry has, and the more have theirs.
_BLOCK = 0.5
# The usable share is released if its noise is at most this, and judged with so many
# standard deviations of it: a level whose records are all usable does not fail by
# chance, except with probability 3e-5.
_MOST_NOISE, _DEVIATIONS = 0.25, 2.0


@dataclasses.dataclass(frozen=True)
class Columns:
    r"""The columns of a level and its classes, as declared.

    The row of a record is $(u - 1/2, w / 2, (e - 1/k) / 2)$: whether it can be used,
    its wrong columns with equal entries and norm 1, and its class among $k$, with $e =
    0$ if it has none. Its squared norm is at most $1/4 + 1/4 + (1 - 1/k) / 4$, whatever
    the number of columns is.

    Args:
        names: The name of each column that is checked.
        classes: The name of each class; empty if the label is a number.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...] = ()

    @property
    def clip_norm(self) -> float:
        """The largest norm of a row of `indicators`."""
        one_hot = 1 - 1 / len(self.classes) if self.classes else 0.0
        return math.sqrt(0.25 + _BLOCK**2 * (1 + one_hot))

    def indicators(
        self,
        unusable: Bool[np.ndarray, "n k"],
        outside: Bool[np.ndarray, "n k"] | None = None,
        label: Int[np.ndarray, " n"] | None = None,
    ) -> Float[np.ndarray, "n w"]:
        """Return one row of indicators for each record, centred to be short.

        Args:
            unusable: Whether the cell of each column leaves its record without
                influence: it cannot be read, or is not among the listed values.
            outside: Whether the cell is cut to declared bounds. Its column counts as
                wrong, its record as usable.
            label: The number of each record's class, -1 if it is none of `classes`.

        Privacy:
            Row by row. NON-PRIVATE until `RecordsCheck.release` releases their mean.
        """
        wrong = unusable if outside is None else unusable | outside
        # Wrong cells of one record count in equal parts, of norm 1 in all.
        count = np.maximum(wrong.sum(axis=1, keepdims=True), 1).astype(np.float32)
        usable = ~unusable.any(axis=1, keepdims=True)
        blocks = [usable - np.float32(0.5), _BLOCK * (wrong / np.sqrt(count))]
        if self.classes:
            assert label is not None
            one_hot = label[:, None] == np.arange(len(self.classes))
            blocks.append(_BLOCK * (one_hot - np.float32(1 / len(self.classes))))
        return np.concatenate(blocks, axis=1)


@dataclasses.dataclass(frozen=True)
class LevelUsability:
    """The released means of the indicators of one level. Public.

    Attributes:
        usable: The share of records that can be used, with noise: it may be outside
            of [0, 1].
        noise_std: The standard deviation of the noise of `usable`; twice that of every
            other share.
        columns: For each column, the share of records in which it is wrong. A record
            with `j` wrong columns counts as `j**-0.5` in each of them.
        classes: For each class, the share of records that have it.
    """

    usable: float
    noise_std: float
    columns: dict[str, float]
    classes: dict[str, float]

    @property
    def stops(self) -> bool:
        """Whether less than half of the records can be used, beyond the noise.

        Three quarters, if no record of some class stands out of it: the class may be
        misspelt, and a model of the others is of no use.
        """
        few = self.usable + _DEVIATIONS * self.noise_std < 0.5
        # One more deviation, or usable records would stop by chance more often.
        noise = (_DEVIATIONS + 1) * self.noise_std
        least = min(self.classes.values(), default=1.0)
        return few or (self.usable + noise < 0.75 and least < 2 * noise)

    @property
    def wrong(self) -> tuple[str, ...]:
        """The columns that are wrong in many records, the worst first.

        Those that stand out of the noise, by half of the worst one at least.
        """
        least = max(self.columns.values(), default=0.0) / 2
        least = max(least, 2 * _DEVIATIONS * self.noise_std)
        names = sorted(self.columns, key=lambda name: -self.columns[name])
        return tuple(name for name in names if self.columns[name] > least)

    @property
    def mostly_wrong(self) -> bool:
        """Whether most records have the same wrong columns, beyond the noise.

        The mean of vectors of norm 1 is longer than 1/2 only if many of them agree.
        """
        values, noise = np.asarray([*self.columns.values()]), 2 * self.noise_std
        square = float(values @ values) - len(values) * noise**2
        deviation = noise * math.sqrt(1 + 2 * len(values) * noise**2)
        return square > 0.25 + 2 * _DEVIATIONS * deviation

    @property
    def constant_accuracy(self) -> float | None:
        """The share of the most frequent class among the listed ones.

        It is the accuracy of the best constant answer, up to noise. `None` if the label
        is a number.
        """
        shares = np.clip([*self.classes.values()], 0.0, 1.0)
        total = float(shares.sum())
        return float(shares.max()) / total if total > 0 else None


@dataclasses.dataclass(frozen=True)
class Usability:
    """What the first release of a run says of its records. Public.

    Attributes:
        levels: The released means by role: `"records"`, or `"upper"` and `"lower"`.
            Levels that are too small to be checked are left out.
    """

    levels: dict[str, LevelUsability]

    @property
    def stops(self) -> bool:
        """Whether less than half of the records of a level can be used."""
        return any(level.stops for level in self.levels.values())

    @property
    def usable(self) -> float:
        """The least share of usable records of a level, cut to [0, 1]."""
        shares = (level.usable for level in self.levels.values())
        return min(max(min(shares, default=math.nan), 0.0), 1.0)

    @property
    def constant_accuracy(self) -> float | None:
        """That of the first level that has classes: the upper one of two."""
        known = (level.constant_accuracy for level in self.levels.values())
        return next((value for value in known if value is not None), None)

    @property
    def remarks(self) -> tuple[str, ...]:
        """One text for each level whose columns are not what was declared."""
        found = {role: _remark(level) for role, level in self.levels.items()}
        return tuple(
            f"{text[0].upper()}{text[1:]}"
            if role == RECORDS
            else f"{role} level: {text}"
            for role, text in found.items()
            if text
        )


@dataclasses.dataclass(frozen=True)
class RecordsCheck:
    """A planned first release of how usable the records are.

    Attributes:
        columns: What is declared of each level, by role.
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
        """Return the check at a hundredth of the squared budget of every person.

        Args:
            columns: What is declared, by role: `"records"` for one level; `"upper"` and
                `"lower"` for two, or `"upper"` alone if the levels are shared.
            budget: The budget of the whole run.
            sizes: As for `calibrate`.
            neighbours: The neighbouring relation.
            precision: As for `calibrate`.

        Returns:
            The check. It has no releases if the budget has `delta = 0`, which excludes
            Gaussian noise, and none of a level whose usable share would have noise
            above 1/4.

        Privacy:
            Touches no data. The releases are charged to everybody as `Ledger` says.
        """
        return _planned(tuple(columns.items()), budget, sizes, neighbours, precision)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the report of the run says of levels that are not checked."""
        checked = {query.role for r in self.releases for query in r.queries}
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
        """Release how usable the records are.

        Args:
            indicators: The rows of `Columns.indicators`, by role; under replace-one as
                many as planned.
            key: A typed key for this check alone, such as the first one of
                `derive(key, "usability", "run")`.
            owner: What is named in an error.

        Raises:
            ValueError: The number of rows is not the planned one (replace-one), or
                above the rows of the plan (add-or-remove-one).

        Privacy:
            What `releases` counts. Nothing else of the records is read.
        """
        columns, means = dict(self.columns), self.means(indicators, key, owner)
        return Usability(
            {
                query.role: _level(
                    columns[query.role], means[query.role], release.noise_std
                )
                for release in self.releases
                for query in release.queries
            }
        )

    def means(
        self, indicators: Mapping[str, Any], key: PRNGKey, owner: str = "solve"
    ) -> dict[str, Float[Array, " w"]]:
        """Release the mean of the indicators of each level that is checked.

        Arguments and errors are those of `release`.
        """
        roles = [query.role for r in self.releases for query in r.queries]
        keys = [key] if len(roles) < 2 else derive(key, *roles)
        found = {}
        for release, own in zip(self.releases, keys, strict=False):
            (query,) = release.queries
            rows = indicators[query.role]
            if release.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
                rows = public_rows(rows, query.size, query.role, owner)
            elif len(rows) != query.size:
                raise ValueError(
                    f"{owner}: the check of records is planned for {query.size} "
                    f"{query.role} rows, got {len(rows)}. Plan for the number of rows."
                )
            found[query.role] = _released(query, release.mechanism, rows, key=own)
        return found


@functools.lru_cache(maxsize=128)
def _planned(
    columns: tuple[tuple[str, Columns], ...],
    budget: PrivacyBudget,
    sizes: Sizes | int,
    neighbours: Neighbours,
    precision: Precision,
) -> RecordsCheck:
    if budget.delta == 0:
        return RecordsCheck(columns, ())

    def planned(roles: dict[str, Columns]) -> list[Release]:
        # Who may have a record in each level is charged for all of them.
        apart = people_of(sizes) is People.DISJOINT
        times = 1 if apart else max(len(roles), 1)
        multiplier = least_multiplier(FullBatch(), 1, 1, budget)
        noise = Gaussian(multiplier * math.sqrt(times / SHARE), neighbours, precision)
        counts: Any = {role: getattr(sizes, role, sizes) for role in roles}
        queries = [Query(role, counts[role], roles[role].clip_norm) for role in roles]
        return [Release(_NAMES[q.role], 1, (q,), noise) for q in queries]

    all_roles = dict(columns)
    kept = [r for r in planned(all_roles) if r.noise_std <= _MOST_NOISE]
    return RecordsCheck(
        columns,
        tuple(planned({q.role: all_roles[q.role] for r in kept for q in r.queries})),
    )


_NAMES = {role: f"usable records of the {role} level" for role in LEVELS}
_NAMES[RECORDS] = "usable records"


@functools.partial(jax.jit, static_argnums=0)
def _released(
    query: Query, mechanism: Gaussian, rows: Any, *, key: PRNGKey
) -> Float[Array, " w"]:
    """Make the release of one query; compiled once for all multipliers."""
    upper, lower = (rows if role == query.role else None for role in LEVELS)
    data = rows if query.role == RECORDS else Levels(upper, lower)
    release = Release(_NAMES[query.role], 1, (query,), mechanism)
    return release.of({query.role: _itself}, data, key=key)


def _itself(row: Float[Array, " w"]) -> Float[Array, " w"]:
    return row


def _level(
    columns: Columns, released: Float[Array, " w"], noise_std: float
) -> LevelUsability:
    """Return the shares that the mean of rows of `Columns.indicators` stands for."""
    means, count = np.asarray(released, float), len(columns.names)
    wrong, classes = means[1 : 1 + count] / _BLOCK, means[1 + count :] / _BLOCK
    even = 1 / max(len(columns.classes), 1)
    return LevelUsability(
        float(means[0]) + 0.5,
        noise_std,
        dict(zip(columns.names, map(float, wrong), strict=True)),
        dict(zip(columns.classes, (float(v) + even for v in classes), strict=True)),
    )


def _remark(level: LevelUsability) -> str:
    """Return what is wrong with a level in words, or nothing."""
    if not level.stops and not level.mostly_wrong:
        return ""
    if level.stops:
        text = (
            f"about {_percent(level.usable)} of the records can be used as declared "
            f"(noise {_percent(level.noise_std)})"
        )
    else:
        text = "most records have wrong cells in the same columns"
    shown = [f"{name!r} ({_percent(level.columns[name])})" for name in level.wrong[:5]]
    if shown:
        text += f"; wrong in many records: {', '.join(shown)}"
    if level.stops and level.classes:
        shares = [f"{name!r} ({_percent(v)})" for name, v in level.classes.items()]
        text += f"; shares of the declared classes: {', '.join(shares[:10])}"
        text += f" and {len(shares) - 10} more" if len(shares) > 10 else ""
    return f"{text}."


def _percent(share: float) -> str:
    return f"{round(100 * min(max(share, 0.0), 1.0), 1):g} %"
