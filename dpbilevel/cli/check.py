"""The command `dpbilevel check`: how a file fits a config, for the curator alone."""

import collections
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .._checks import did_you_mean
from ..privacy.budget import People
from .columns import CUT, MISSING, UNUSABLE, Value, named, positions
from .config import Config
from .data import CsvData, ids_of, is_id
from .loading import find_files, test_file, without_sources
from .tables import MALFORMED, Cells, Table, declaration_for, read_table

_SHOWN = 5  # row numbers and unlisted values that a line shows
_FIRST = (
    "For the curator alone: nothing here is protected, and this command writes no file",
    "and is part of no run. Do not publish it. Correct spellings, units and bounds in",
    "the config by what you know without the records: the config is public.",
    "Row 1 is the first row below the header.",
)
_REMEDIES = {
    CUT: "cut to the bounds; correct mean and scale if values beyond are plausible",
    UNUSABLE: "unreadable, so that the record has no influence; correct the cells, or "
    "declare unit or decimal",
}
_UNLIKE_HEADER = "rows with more or fewer cells than the header, or with an open quote"
_LIST_OR_SPELL = (
    "Add these values to the list, or correct the spelling of a listed value."
)
_SPELL_OR_LIST = (
    "Correct the cells. Or list the value: it then gets a coefficient of its own."
)


def check(
    config: Config,
    data: Path | None = None,
    validation: Path | None = None,
    ids: str | None = None,
) -> Iterator[str]:
    """Yield NON-PRIVATE lines of text on how the files of a config fit the config.

    The files, and the column of ids, are by default those of the config. A `ValueError`
    says that a column is missing; the line before it shows the names that are close.

    Privacy:
        NON-PRIVATE, and every line says so: lines contain cells of the files.
    """
    source, known = config.data, ids or config.privacy.person
    files = *find_files(config, data, validation), test_file(config)
    together = config.privacy.people in (People.DISJOINT, People.OVERLAPPING)
    first = source.training + source.validation * (together and files[1] is None)
    asked = first, source.validation, source.test.records if source.test else 0
    yield from (f"NON-PRIVATE: {line}" for line in _FIRST)
    for i, file in enumerate(files):
        if file is not None:
            table = read_table(file, source.separator, source.missing)
            short = table.rows < asked[i] and not known  # else people are counted
            fewer = f", but [data] asks for {asked[i]}" if short else ""
            yield f"NON-PRIVATE: {file}: {table.rows} rows{fewer}"
            own = source if i == 0 else without_sources(source)
            misfits = _misfits([*own.used_columns.names, known], table)
            lines = misfits, _lines(own, table), _people(table, config, known)
            for line in itertools.chain(*lines):
                # A name or a cell may hold what ends a line, or moves the cursor.
                shown = "".join(sign if sign.isprintable() else "?" for sign in line)
                yield f"NON-PRIVATE:   {shown}"


def _misfits(names: list[str], table: Table) -> Iterator[str]:
    """Yield lines on columns that the header lacks, and on malformed rows."""
    for name in names:
        if name and name not in table.columns:
            has = f"; the header has {', '.join(map(repr, [*table.columns][:_SHOWN]))}"
            yield f"no column {name!r}{did_you_mean(name, table.columns) or has}"
    cells = next(iter(table.columns.values()), ())
    rows = np.flatnonzero([cell == MALFORMED for cell in cells])
    if len(rows):
        yield f"{_UNLIKE_HEADER}: {len(rows)} (rows {_rows(rows)})"


def _lines(data: CsvData, table: Table) -> Iterator[str]:
    label, none = data.label, ("the record has no influence", _LIST_OR_SPELL)
    other = "counts as none of them", _SPELL_OR_LIST
    # Values, and effect and remedy of an unlisted one, by column.
    lists: dict[str, tuple[tuple[Value, ...], str, str]] = {
        block.column: (block.values, *other) for block in data.categorical
    }
    if label.of_classes:
        values = tuple(v for vs in label.of_classes.values() for v in vs)
        lists[label.column] = values, *none
    places = filter(None, (data.sources, data.groups))
    lists |= {place.column: (place.values, *none) for place in places}
    marks = data.encode(table).marks.T
    for name, of_column in zip(data.used_columns.names, marks, strict=True):
        if name not in lists:
            yield from _numbers(name, table.column(name), of_column)
    for name, (values, *said) in lists.items():
        yield from _values(name, table.column(name), values, *said)


def _people(table: Table, config: Config, known: str) -> Iterator[str]:
    """Yield lines on the rows of each person, by the columns that may hold ids.

    `known` is the column of ids, or an empty text.
    """
    privacy = config.privacy
    used = config.data.used_columns.names
    free = [name for name in table.columns if name not in used]
    for name in [known] if known else filter(is_id, free):
        rows = collections.Counter(ids_of(table, name).tolist())
        without = rows.pop("", 0)
        counts = collections.Counter(rows.values())
        most = privacy.most_rows
        shown = ", ".join(f"{n} with {m}" for m, n in sorted(counts.items())[:_SHOWN])
        yield (
            f"{name}: {len(rows)} people, by their number of rows: {shown or 'none'}"
            f"{', ...' if len(counts) > _SHOWN else ''} (at most "
            f"{max(counts, default=0)})"
        )
        if without:
            yield f"  {without} rows without an id, which are left out"
        cut = sum(n for m, n in counts.items() if m > most)
        if cut and privacy.person == name:
            yield f"  {cut} people have more than {most} rows; their first {most} count"
        if max(counts, default=0) > 1 and not privacy.person:
            yield f"  set person = {name!r} in [privacy] to protect people, not rows"


def _numbers(name: str, cells: Cells, marks: np.ndarray) -> Iterator[str]:
    missing = int(np.sum(marks == MISSING))
    yield f"{name}: {len(cells) - missing} cells, {missing} empty"
    for mark, remedy in _REMEDIES.items():
        rows = np.flatnonzero(marks == mark)
        if len(rows):
            yield (
                f"  {len(rows)} {remedy} (rows {_rows(rows)}; the first cell is "
                f"{cells[int(rows[0])]!r})"
            )
        if mark == UNUSABLE and len(rows) and cells[int(rows[0])] != MALFORMED:
            keys = declaration_for(cells[int(rows[0])])
            no_value = (
                f"missing = [{cells[int(rows[0])]!r}] in [data] if it is no value"
            )
            where = "where the column is declared, such as its entry of numeric"
            read = f"it can be read with {keys} {where}"
            yield f"    {read}" if keys else f"    give {no_value}"


def _values(
    name: str, cells: Cells, values: tuple[Value, ...], effect: str, remedy: str
) -> Iterator[str]:
    found = positions(cells, values)
    counts = {named(v): int(np.sum(found == i)) for i, v in enumerate(values)}
    yield f"{name}: " + ", ".join(f"{value!r} {n}" for value, n in counts.items())
    absent = [value for value, n in counts.items() if not n]
    if absent:
        yield f"  no row has {', '.join(map(repr, absent))}: compare the spelling"
    rows = np.flatnonzero(found < 0)
    if len(rows):
        others = collections.Counter(cells[int(i)] for i in rows).most_common(_SHOWN)
        shown = ", ".join(f"{value!r} {n}" for value, n in others)
        yield (
            f"  {len(rows)} not listed, {effect}: {shown} (rows {_rows(rows)}). "
            f"{remedy}"
        )


def _rows(rows: np.ndarray) -> str:
    shown = ", ".join(str(row + 1) for row in rows[:_SHOWN])
    return shown + (", ..." if len(rows) > _SHOWN else "")
