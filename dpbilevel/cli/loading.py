"""Records of a run: read from files or made, and split into levels."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import PyTree

from ..bilevel.problem import Levels
from ..core.levels import check_disjoint_ids
from ..core.usability import Columns
from ..privacy.budget import Neighbours, People
from ..privacy.queries import RECORDS
from ..privacy.records.disk import copies
from ..privacy.records.people import PersonUnit
from .columns import CUT, UNUSABLE, Label, Records
from .config import Config
from .data import CsvData, hashes_of, means, people_of, rows_of_people
from .tables import existing

IN_BOTH = "an id is in two files whose people must differ."


def find_files(
    config: Config, data: Path | None = None, validation: Path | None = None
) -> tuple[Path, Path | None]:
    """Return the file of the records, and the file of validation records or `None`.

    Args:
        config: The config; its relative paths start from its folder.
        data: A file to read instead of the config's.
        validation: A file of validation records to read instead of the config's.

    Raises:
        ValueError: A file is missing, or the second one does not fit people or task.
    """
    source, files, folder = config.data, [], Path(config.place.file).parent
    for option, given, path, what in (
        ("--data", data, source.path, "records"),
        ("--validation", validation, source.validation_path, "validation records"),
    ):
        file = given or (folder / path if path else None)
        files.append(file and existing(file, what, f"name another with {option} PATH"))
    file, other = files
    if file is None:
        raise ValueError("no file of records: set path in [data], or give --data PATH.")
    if other is None:
        return file, None
    if config.privacy.people in (None, People.SHARED):
        raise ValueError(
            'a validation file needs people = "disjoint" or "overlapping".'
        )
    if _same(file, other):
        raise ValueError(
            f'{other} has the training records; leave it out or set people = "shared".'
        )
    return file, other


def load(config: Config, file: Path, other: Path | None = None) -> dict[str, Records]:
    """Return `Records` by level, from two files or split from one file.

    Args:
        config: The config.
        file: The file of the records, as `find_files` returns it.
        other: The file of validation records, as `find_files` returns it.

    Returns:
        By role: `"records"` of one level, `"upper"` (validation) and `"lower"`
        (training) of two, `"upper"` alone of shared ones. NON-PRIVATE: this is the
        data.

    Raises:
        ValueError: There are too few records, or a column is missing: counts and
            headers are public.
        OSError: A file cannot be read.

    Privacy:
        No cell's content raises, warns or prints, except that ids of disjoint people
        must not be in both files. Under replace-one the split is a fixed permutation of
        the row numbers; people who have ids are split in the order of the hashes of
        their ids. Under add-or-remove-one the number of records is private. A hash of
        each record, or id, then decides its level, so that no record's level depends on
        another record.
    """
    data, people = config.data, config.privacy.people
    two = people not in (None, People.SHARED) and other is None
    levels = ("training", "validation") if two else ("training",)
    person = config.privacy.person
    training, *rest = _split(data.load(file, person), config, *levels)
    if other is not None:
        rest = _split(without_sources(data).load(other, person), config, "validation")
    if people is People.DISJOINT:
        remedy = 'Set people = "overlapping", or correct them.'
        check_disjoint_ids(training.ids, rest[0].ids, f"{IN_BOTH} {remedy}")
    if people is None:
        return {RECORDS: training}
    if people is People.SHARED:
        return {"upper": training}
    # Only training records have a source.
    upper = dataclasses.replace(rest[0], source=None, group=None)
    return {"upper": upper, "lower": training}


def load_test(config: Config, *others: Path | None) -> Records | None:
    """Return the records of the test file; `None` if the config has none.

    Args:
        config: The config.
        others: The files of training and validation records.

    Raises:
        ValueError: The file is missing, is one of `others`, lacks a column or has too
            few rows; or its records are public and lack a class.

    Privacy:
        NON-PRIVATE: this is the data. No cell's content raises unless it is public.
    """
    test = config.data.test
    file = test_file(config)
    if test is None or file is None:
        return None
    if any(other is not None and _same(file, other) for other in others):
        raise ValueError(
            f"[data.test]: {file} holds training or validation records; give others."
        )
    plain = without_sources(config.data)
    records = plain.load(file, config.privacy.person)
    if test.accuracy == "public":
        _check_classes(plain.label, records, file)
    if not test.records:
        return records
    (chosen,) = _chosen(records, plain.split_seed, {"test.records": test.records})
    return chosen


def test_file(config: Config) -> Path | None:
    """Return the path of the test file, checked to exist; `None` if there is none."""
    if config.data.test is None:
        return None
    file = Path(config.place.file).parent / config.data.test.path
    return existing(file, "test records", "correct path in [data.test]")


def as_levels(records: Mapping[str, Records], unit: PersonUnit | None = None) -> PyTree:
    """Return the arrays of one level, or `Levels` of arrays if there are two.

    Args:
        records: The records by role.
        unit: The unit of privacy if it is a person; arrays are then `PersonRows`.
    """
    trees = {role: rows_of_people(level, unit) for role, level in records.items()}
    if RECORDS in trees:
        return trees[RECORDS]
    return Levels(**trees) if "lower" in trees else Levels.shared(trees["upper"])


def indicators(
    columns: Columns, records: Records, numbers: tuple[float, ...] = (-1.0, 1.0)
) -> np.ndarray:
    """Return an array, a row per record: how it fits the config.

    The row of a person is the mean of those of all rows.

    Args:
        columns: The checked columns of the level.
        records: The records of a file.
        numbers: The label of each class.

    Privacy:
        NON-PRIVATE, record by record: for `RecordsCheck.release`.
    """
    marks, label, place = records.marks[:, : len(columns.names)], None, None
    if columns.classes:
        matches = records.label[:, None] == np.asarray(numbers)
        label = np.where(matches.any(axis=1), matches.argmax(axis=1), -1)
    if columns.places:
        place = records.source if records.group is None else records.group
    rows = columns.indicators(marks == UNUSABLE, marks == CUT, label, place)
    return means(rows, records)


def without_sources(data: CsvData) -> CsvData:
    """Return a copy of `data` without sources and groups."""
    return dataclasses.replace(data, sources=None, groups=None)


def _same(file: Path, other: Path) -> bool:
    """Return whether two paths are one file, or files with the same bytes."""
    return file.samefile(other) or bool(copies([file, other]))


def _check_classes(label: Label, records: Records, file: Path) -> None:
    """Refuse public labels if a class is in no record: it may be misspelt."""
    unlisted = int(np.isnan(records.label).sum())
    for name, number in zip(label.class_names, label.numbers, strict=True):
        if unlisted and not np.any(records.label == number):
            raise ValueError(
                f"no record of {file} has the class {name!r} of {label.column!r}, and "
                f"{unlisted} have an unlisted one. Correct [data.label]."
            )


def _chosen(records: Records, seed: int, counts: dict[str, int]) -> list[Records]:
    """Return disjoint parts with so many records, or people, each in a public order."""
    person, what = np.arange(len(records)), "records"
    if records.ids is None:
        order = np.random.default_rng(seed).permutation(len(records))  # public
    else:
        (ids, person), what = people_of(records), "people"
        rank = hashes_of(ids, seed).__getitem__
        order = np.asarray(sorted(range(len(ids)), key=rank), int)
    if len(order) < sum(counts.values()):
        asked = " and ".join(f"{name} = {count}" for name, count in counts.items())
        raise ValueError(
            f"there are {len(order)} {what}, but [data] asks for {asked}; "
            "ask for fewer."
        )
    parts = np.split(order, np.cumsum([*counts.values()]))[:-1]
    if records.ids is None:  # in the order of the parts
        return [records.take(rows) for rows in parts]
    return [records.take(np.isin(person, part)) for part in parts]


def _split(records: Records, config: Config, *levels: str) -> list[Records]:
    """Split a file's records into one part per level, in the order of `levels`."""
    data = config.data
    counts = {level: getattr(data, level) for level in levels}
    if config.privacy.neighbours is Neighbours.REPLACE_ONE:
        return _chosen(records, data.split_seed, counts)
    bound = 2**64 * counts[levels[0]] // sum(counts.values())
    # Each record or person by itself, so that one more moves no other.
    if records.ids is None:
        seed = str(data.split_seed).encode()
        hashes = (hashlib.sha256(seed + r).digest() for r in records.as_bytes())
    else:
        hashes = hashes_of(records.ids, data.split_seed)
    first = np.asarray([int.from_bytes(v[:8]) < bound for v in hashes], bool)
    return [records.take(first), records.take(~first)][: len(levels)]
