"""Whether a run stops or warns, decided from released fractions of usable records."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from ..privacy.queries import RECORDS

# Noise of the fractions of columns and classes, and of groups and sources, in units of
# the noise of the usable fraction.
OF_COLUMNS, OF_PLACES = 2.0, 3.0
# Margin of decisions, in standard deviations of the noise; twice as many for the usable
# fraction and wrong columns. A level whose records are all usable stops by chance with
# probability 3e-5.
_DEVIATIONS = 2.0
# A column is reported if it is wrong in more than this fraction of the records.
_MANY = 0.1
_NEARLY_NONE = 0.05  # fraction of usable records that counts as none


@dataclasses.dataclass(frozen=True)
class LevelUsability:
    """Noisy fractions of one level: usable records, wrong columns, classes. Public.

    Attributes:
        usable: The share of records that can be used, with noise: it may be outside
            of [0, 1].
        noise_std: The standard deviation of the noise of `usable`. The noise of
            `columns` and `classes` is twice as large, of `places` three times.
        columns: For each column, the share of records in which it is wrong. A record
            with `j` wrong columns counts as `j**-0.5` in each of them. The first one is
            the label's if there are classes.
        classes: For each class, the share of records that have it.
        places: For each group or source, the share of records that are in it.
        place: The name of their column.
    """

    usable: float
    noise_std: float
    columns: dict[str, float]
    classes: dict[str, float]
    places: dict[str, float] = dataclasses.field(default_factory=dict)
    place: str = ""

    @property
    def stops(self) -> bool:
        """Whether training is in vain: few usable records, or a value misspelt.

        This is so in three cases. Less than half of the records can be used. Or less
        than three quarters can be used, and some class has no record beyond the noise.
        Or `dropped` names a value, even if it costs few records.
        """
        few = self.usable + _DEVIATIONS * self.noise_std < 0.5
        # One deviation more is needed, or usable records would stop more often.
        noise = (_DEVIATIONS + 1) * self.noise_std
        least = min(self.classes.values(), default=1.0)
        unseen = self.usable + noise < 0.75 and least < OF_COLUMNS * noise
        return few or unseen or bool(self.dropped)

    @property
    def none_usable(self) -> bool:
        """Whether `stops` holds and hardly any record is usable, beyond the noise."""
        most = max(_NEARLY_NONE, _DEVIATIONS * self.noise_std)
        return self.stops and self.usable < most

    @property
    def dropped(self) -> tuple[str, ...]:
        """Tuple of declared classes, groups, sources that are probably misspelt.

        These are classes, groups and sources without a record beyond the noise, if
        records cannot be used because of the column of these values.
        """
        # If no cell is wrong, a fraction exceeds this with probability 3e-5 at most.
        least = 2 * _DEVIATIONS * self.noise_std
        if 1 - self.usable <= least:
            return ()
        return tuple(
            name
            for column, shares, noise in self._lists
            if self.columns[column] > least
            for name in _unseen(shares, noise)
        )

    @property
    def rare(self) -> tuple[str, ...]:
        """Tuple of declared values that no record seems to have, if noise is small.

        The noise is small enough if equal shares would be seen: an equal share is lost
        in the noise with probability 3e-5 at most.
        """
        return tuple(
            name
            for _, shares, noise in self._lists
            if len(shares) * 3 * _DEVIATIONS * noise < 1
            for name in _unseen(shares, noise)
        )

    @property
    def _lists(self) -> Iterator[tuple[str, dict[str, float], float]]:
        """Tuples (column, fraction of each value, noise): classes, groups, sources."""
        if self.classes:
            yield next(iter(self.columns)), self.classes, OF_COLUMNS * self.noise_std
        if self.places:
            yield self.place, self.places, OF_PLACES * self.noise_std

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of columns wrong beyond noise and half the worst rate, worst first.

        These columns exceed the noise, and half of the share of the worst column.
        """
        least = max(self.columns.values(), default=0.0) / 2
        least = max(least, 2 * _DEVIATIONS * self.noise_std)
        names = sorted(self.columns, key=lambda name: -self.columns[name])
        return tuple(name for name in names if self.columns[name] > least)

    @property
    def often_wrong(self) -> bool:
        """Whether many records have the same wrong columns, beyond the noise.

        Either one column is wrong in a tenth of the records, or most records are wrong
        in the same columns. The mean of vectors of norm 1 is longer than 1/2 only if
        many of them agree.
        """
        values = np.asarray([*self.columns.values()])
        noise = OF_COLUMNS * self.noise_std
        square = float(values @ values) - len(values) * noise**2
        deviation = noise * math.sqrt(1 + 2 * len(values) * noise**2)
        most = square > 0.25 + 2 * _DEVIATIONS * deviation
        return most or bool(np.any(values > _MANY + 2 * _DEVIATIONS * noise))

    @property
    def many_unusable(self) -> bool:
        """Whether over a tenth of the records is unusable and a column often wrong.

        If all can be used, this is so with probability 3e-5 at most. Some column must
        be wrong as often as a quarter of this: under add-or-remove-one the records may
        be fewer than planned.
        """
        noise, lost = _DEVIATIONS * self.noise_std, 1 - self.usable
        worst = max(self.columns.values(), default=0.0)
        return lost > max(_MANY + noise, 2 * noise) and worst > max(lost / 4, 2 * noise)

    @property
    def constant_accuracy(self) -> float | None:
        """Fraction of the most frequent class; `None` without classes.

        It is the accuracy of the best constant answer, up to noise. `None` if the label
        is a number.
        """
        shares = np.clip([*self.classes.values()], 0.0, 1.0)
        total = float(shares.sum())
        return float(shares.max()) / total if total > 0 else None


@dataclasses.dataclass(frozen=True)
class Usability:
    """Released fractions of usable records of all levels. Public.

    Attributes:
        levels: The released means by role: `"records"`, or `"upper"` and `"lower"`.
            Levels that are too small to be checked are left out.
    """

    levels: dict[str, LevelUsability]

    @property
    def stops(self) -> bool:
        """Whether the run stops: training is in vain on some level's records."""
        return any(level.stops for level in self.levels.values())

    @property
    def usable(self) -> float:
        """Smallest usable fraction among the levels, cut to [0, 1]; NaN without any."""
        shares = (level.usable for level in self.levels.values())
        return min(max(min(shares, default=math.nan), 0.0), 1.0)

    @property
    def constant_accuracy(self) -> float | None:
        """Accuracy of the best constant answer; `None` if no level has classes."""
        known = (level.constant_accuracy for level in self.levels.values())
        return next((value for value in known if value is not None), None)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Tuple of texts: mistakes in a level's records, for each level with some."""
        found = {role: _remark(level) for role, level in self.levels.items()}
        return tuple(
            f"{text[0].upper()}{text[1:]}"
            if role == RECORDS
            else f"{role} level: {text}"
            for role, text in found.items()
            if text
        )


def _unseen(shares: dict[str, float], noise: float) -> list[str]:
    """Return a list of the names whose fraction is zero up to noise."""
    return [name for name, share in shares.items() if share < _DEVIATIONS * noise]


def _remark(level: LevelUsability) -> str:
    """Return a text on the mistakes in a level; empty if there are none."""
    parts = []
    if level.stops or level.many_unusable:
        none = "no or next to no record can be used, so that a model of the records is "
        parts.append(
            f"{f'{none}noise alone: ' if level.none_usable else ''}about "
            f"{_percent(level.usable)} of the records can be used as declared (noise "
            f"{_percent(level.noise_std)})"
        )
    elif level.often_wrong:
        parts.append(
            "many records have wrong cells in the same columns: values lie outside "
            "the declared range or are not among the listed ones"
        )
    if parts and level.wrong:
        # These are lower bounds: several wrong cells of a record count in part.
        worst = ((name, _percent(level.columns[name])) for name in level.wrong[:5])
        listed = ", ".join(f"{name!r} (at least {share})" for name, share in worst)
        parts.append(f"wrong in many records: {listed}")
    absent = level.dropped if level.stops else level.rare
    if absent:
        names = _first(map(repr, absent))
        parts.append(
            f"no record seems to have {names}"
            if level.stops
            else f"the share of {names} is too small to tell from noise: it may be "
            "rare or misspelt"
        )
    if parts and (level.stops or absent):
        classes = "classes", level.classes, OF_COLUMNS
        places = "groups or sources", level.places, OF_PLACES
        for kind, shares, times in (classes, places):
            if shares:
                listed = (f"{name!r} ({_percent(v)})" for name, v in shares.items())
                noise = f"(noise {_percent(times * level.noise_std)})"
                declared = f"shares of the declared {kind} {noise}"
                parts.append(f"{declared}: {_first(listed)}")
    return f"{'; '.join(parts)}." if parts else ""


def _first(names: Iterator[str]) -> str:
    """Return a text with the first ten names and the number of the others."""
    shown = [*names]
    more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
    return ", ".join(shown[:10]) + more


def _percent(share: float) -> str:
    return f"{round(100 * min(max(share, 0.0), 1.0), 1):g} %"
