"""Records as two levels, ready for a solver."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import PyTree

from ..bilevel.problem import Levels
from ..core.usability import Columns
from ..privacy.budget import Neighbours, People
from ..privacy.queries import RECORDS
from ..privacy.records.stores import copies
from .columns import CUT, UNUSABLE, AbstractRecords, Records
from .datasets import CsvData
from .files import AbstractData, HeldOut, existing


def find_files(
    data: AbstractData,
    people: People | None,
    *,
    base: Path,
    override: Path | None = None,
    validation: Path | None = None,
) -> tuple[Path | None, Path | None]:
    """The file of the records, and that of validation records if these have their own.

    Args:
        data: Where records come from.
        people: Who is behind them; `None` for one level.
        base: The folder that relative paths start from.
        override: A file to read instead of the config's.
        validation: The same for validation records.

    Raises:
        ValueError: One is missing, or a second file does not fit people or task.
    """
    file = data.file(base, override)
    held_out = data.validation_file(base, validation)
    if file is None or held_out is None:
        return file, held_out
    if people is None:
        raise ValueError(
            "a file of validation records is for tasks of two levels; leave it out."
        )
    if people is People.SHARED:
        raise ValueError(
            'people = "shared" says that the same records are in both levels, but '
            "validation records have a file of their own. Leave it out, or say "
            '"disjoint" or "overlapping".'
        )
    if _same(file, held_out):
        raise ValueError(
            f"{held_out} is also the file of the training records, or a copy of it. "
            'If both levels have the same records, say people = "shared". To split the '
            "records, leave the second file out."
        )
    return file, held_out


def check_files(
    data: AbstractData,
    people: People | None,
    neighbours: Neighbours,
    *,
    base: Path,
    override: Path | None = None,
    validation: Path | None = None,
) -> None:
    """Check that `load` would accept the files.

    Raises:
        ValueError: As `find_files`; a file without a header, a missing column, too few
            records.

    Privacy:
        Reads headers, and under replace-one the numbers of rows: both are public.
    """
    file, held_out = find_files(
        data, people, base=base, override=override, validation=validation
    )
    if data.test is not None:
        _check_tested(data, data.test, _test_file(data.test, base, file, held_out))
    rows = data.checked(file)
    clean = None if held_out is None else without_sources(data).checked(held_out)
    if rows is None or neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        return
    if clean is None:
        _check_rows(rows, data, people is People.SHARED)
    else:
        _check_level(rows, data, "training")
        _check_level(clean, data, "validation")


def load(
    data: AbstractData,
    people: People | None,
    neighbours: Neighbours,
    *,
    base: Path,
    override: Path | None = None,
    validation: Path | None = None,
) -> dict[str, AbstractRecords]:
    """Return the records of all levels, from two files or split from one file.

    Args:
        data: The source of the records.
        people: Who is behind them; `None` for one level.
        neighbours: The relation, which decides how records are split.
        base: The folder that relative paths start from.
        override: A file to read instead of the config's.
        validation: The same for validation records.

    Returns:
        By role: `"records"` of one level, `"upper"` (validation) and `"lower"`
        (training) of two, `"upper"` alone of shared ones. NON-PRIVATE: this is the
        data.

    Raises:
        ValueError: As `find_files`; too few records or a missing column: counts and
            headers are public.
        OSError: A file cannot be read or downloaded.

    Privacy:
        No cell's content raises, warns or prints. Under replace-one the split is a
        fixed permutation of the row numbers. Under add-or-remove-one the number of
        rows is private, so each record goes where a hash of itself says, and no
        record's place depends on another record.
    """
    file, held_out = find_files(
        data, people, base=base, override=override, validation=validation
    )
    found = data.load(file)
    if people is None:
        training, _ = _split(found, data, neighbours, shared=False)
        return {RECORDS: found.take(training)}
    records, shared = _features(found), people is People.SHARED
    if held_out is None:
        training, rows = _split(records, data, neighbours, shared)
        upper = records.take(rows)
    else:
        training = _chosen(records, data, neighbours, "training")
        upper = _features(without_sources(data).load(held_out))
        upper = upper.take(_chosen(upper, data, neighbours, "validation"))
    lower = records.take(training)
    if data.sources is not None and data.sources.flip:
        lower = data.sources.corrupted(lower)
    if shared:
        return {"upper": lower}
    # A source belongs to a training record alone.
    return {
        "upper": Records(upper.features, upper.label, marks=upper.marks),
        "lower": lower,
    }


def as_levels(records: Mapping[str, AbstractRecords]) -> PyTree:
    """Return records by role as float32 arrays, as `Levels` if there are two levels."""
    trees = {role: level.tree() for role, level in records.items()}
    if RECORDS in trees:
        return trees[RECORDS]
    return Levels(**trees) if "lower" in trees else Levels.shared(trees["upper"])


def indicators(columns: Columns, records: AbstractRecords) -> np.ndarray:
    """Return the indicators of how records of one level fit the config.

    Args:
        columns: What is checked of the level.
        records: The records of a file.

    Privacy:
        NON-PRIVATE, row by row: for `RecordsCheck.release`.
    """
    assert records.marks is not None
    marks, label, place = records.marks[:, : len(columns.names)], None, None
    if columns.classes:
        labels = _features(records).label
        label = np.where(np.isnan(labels), -1, labels > 0)
    if columns.places:
        found = _features(records)
        place = found.source if found.group is None else found.group
    return columns.indicators(marks == UNUSABLE, marks == CUT, label, place)


def load_test(
    data: AbstractData,
    *,
    base: Path,
    override: Path | None = None,
    validation: Path | None = None,
) -> Records | None:
    """The records of the test file; `None` where the config has none.

    Raises:
        ValueError: The file is missing, is that of other records, lacks a column or has
            too few rows; or its records are public and lack a class.

    Privacy:
        NON-PRIVATE: this is the data. No cell's content raises unless it is public.
    """
    test = data.test
    if test is None:
        return None
    others = data.file(base, override), data.validation_file(base, validation)
    file = _test_file(test, base, *others)
    _check_tested(data, test, file)
    records = _features(without_sources(data).load(file))
    if test.accuracy == "public":
        _check_classes(data, records, file)
    if not test.records:
        return records
    order = np.random.default_rng(data.split_seed).permutation(len(records))  # public
    return records.take(order[: test.records])


def _test_file(test: HeldOut, base: Path, *others: Path | None) -> Path:
    """The test file, which none of the others is."""
    file = existing(base / test.path, "test records", "correct path in [data.test]")
    if any(other is not None and _same(file, other) for other in others):
        raise ValueError(
            f"{file} is named by [data.test] and is also the file of training or "
            "validation records, or a copy of it. Keep some records in a file of their "
            "own to test the model on."
        )
    return file


def _same(file: Path, other: Path) -> bool:
    """Return whether two paths are one file, or files with the same bytes."""
    return file.samefile(other) or bool(copies([file, other]))


def _check_tested(data: AbstractData, test: HeldOut, file: Path) -> None:
    rows = without_sources(data).checked(file)
    if rows < test.records:
        raise ValueError(
            f"there are {rows} records in {file}, but [data.test] asks for records = "
            f"{test.records}. Use a smaller number or more records."
        )


def _check_classes(data: AbstractData, records: Records, file: Path) -> None:
    """Refuses public labels of which no record has a listed class: it is misspelt."""
    assert isinstance(data, CsvData)
    label = data.label
    unlisted = int(np.isnan(records.label).sum())
    classes = {"positive": (label.positive, 1), "negative": (label.negative, -1)}
    for name, (values, sign) in classes.items():
        if values and unlisted and not np.any(records.label == sign):
            raise ValueError(
                f"no record of {file} has a {label.column!r} that is listed as {name}, "
                f"{list(values)}, and {unlisted} have one that is not listed at all. "
                "Correct the lists in [data.label] before a run spends a budget on "
                "them."
            )


def without_sources(data: AbstractData) -> CsvData:
    """The same for a file that need not name the sources."""
    assert isinstance(data, CsvData)
    return dataclasses.replace(data, sources=None, groups=None)


def _features(records: AbstractRecords) -> Records:
    assert isinstance(records, Records)  # matrices are records of one level
    return records


def _chosen(
    records: Records, data: AbstractData, neighbours: Neighbours, level: str
) -> np.ndarray:
    """The row numbers of the records of a level that has a file of its own."""
    rows, wanted = len(records), getattr(data, level)
    if neighbours is Neighbours.ADD_OR_REMOVE_ONE:  # their number is private
        return np.arange(rows)
    _check_level(rows, data, level)
    return np.random.default_rng(data.split_seed).permutation(rows)[:wanted]  # public


def _check_level(rows: int, data: AbstractData, level: str) -> None:
    wanted = getattr(data, level)
    if rows < wanted:
        raise ValueError(
            f"there are {rows} {level} records, but [data] asks for {level} = "
            f"{wanted}. Use a smaller number or more records."
        )


def _split(
    records: AbstractRecords, data: AbstractData, neighbours: Neighbours, shared: bool
):
    """The row numbers of training and validation records."""
    if neighbours is Neighbours.REPLACE_ONE:
        return _split_by_row(records, data, shared)
    training, validation = _split_by_hash(records, data)
    return np.arange(len(records)) if shared else training, validation


def _split_by_row(records: AbstractRecords, data: AbstractData, shared: bool):
    wanted = _check_rows(len(records), data, shared)
    order = np.random.default_rng(data.split_seed).permutation(len(records))  # public
    return order[: data.training], order[data.training : wanted]


def _check_rows(rows: int, data: AbstractData, shared: bool) -> int:
    """The number of records that one file must have for both levels, if it has them."""
    wanted = data.training if shared else data.training + data.validation
    if rows < wanted:
        asked = f"training = {data.training}"
        if not shared and data.validation:
            asked += f" and validation = {data.validation}"
        raise ValueError(
            f"there are {rows} records, but [data] asks for {asked}. Use smaller "
            "numbers or more records."
        )
    return wanted


def _split_by_hash(records: AbstractRecords, data: AbstractData):
    seed = str(data.split_seed).encode()
    # Each record by itself, so that one more moves no other.
    bound = 2**64 * data.training // (data.training + data.validation)
    draws = [
        int.from_bytes(hashlib.sha256(seed + record).digest()[:8])
        for record in records.as_bytes()
    ]
    in_training = np.asarray([draw < bound for draw in draws], bool)
    return np.flatnonzero(in_training), np.flatnonzero(~in_training)
