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
from .columns import CUT, UNUSABLE, Records
from .config import Config
from .data import CsvData, hashes_of, people_of
from .tables import existing

IN_BOTH = "an id is in two files whose people must differ."


def find_files(
    config: Config, data: Path | None = None, validation: Path | None = None
) -> tuple[Path, Path | None]:
    """Return the file of the records, and the file of validation records or `None`.

    They are read instead of the config's, whose relative paths start from its folder. A
    `ValueError` says that one is missing, or that the second does not fit the people.
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
    """Return a dict of `Records` by role, from the files of `find_files`. NON-PRIVATE.

    Returns:
        By role: `"records"` of one level, `"upper"` (validation) and `"lower"`
        (training) of two, `"upper"` alone of shared ones.

    Raises:
        ValueError: There are too few records, or a column is missing: counts and
            headers are public.

    Privacy:
        No cell's content raises, warns or prints, except that ids of disjoint people
        must not be in both files. Under replace-one the split is a fixed permutation of
        the row numbers; people who have ids are split in the order of the hashes of
        their ids. Under add-or-remove-one the number of records is private. A hash of
        each record, or id, then decides its level, so that no record's level depends on
        another record.
    """
    data, people = config.data, config.privacy.people
    counts, person = {"training": data.training}, config.privacy.person
    if people not in (None, People.SHARED) and other is None:
        counts["validation"] = data.validation
    options = data.split_seed, config.privacy.neighbours is not Neighbours.REPLACE_ONE
    training, *rest = _split(data.load(file, person), counts, *options)
    if other is not None:
        records = without_sources(data).load(other, person)
        rest = _split(records, {"validation": data.validation}, *options)
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


def load_test(config: Config, *others: Path | None) -> Records:
    """Return the `Records` of a config's test file; refuse one of the `others`.

    Raises:
        ValueError: The file is missing, is one of `others`, lacks a column or has too
            few rows; or its records are public and lack a class.

    Privacy:
        NON-PRIVATE: this is the data. No cell's content raises unless it is public.
    """
    test, file = config.data.test, test_file(config)
    assert test is not None
    assert file is not None
    if any(other is not None and _same(file, other) for other in others):
        raise ValueError(
            f"[data.test]: {file} holds training or validation records; give others."
        )
    plain = without_sources(config.data)
    records = plain.load(file, config.privacy.person)
    if test.accuracy == "public":
        # A class of no record may be misspelt.
        unlisted = int(np.isnan(records.label).sum())
        names = zip(plain.label.class_names, plain.label.of_classes, strict=True)
        for name, number in names:
            if unlisted and not np.any(records.label == number):
                raise ValueError(
                    f"no record of {file} has the class {name!r} of "
                    f"{plain.label.column!r}, and {unlisted} have an unlisted one. "
                    "Correct [data.label]."
                )
    if not test.records:
        return records
    return _split(records, {"test.records": test.records}, plain.split_seed)[0]


def test_file(config: Config) -> Path | None:
    """Return the path of the test file, checked to exist; `None` if there is none."""
    if config.data.test is None:
        return None
    file = Path(config.place.file).parent / config.data.test.path
    return existing(file, "test records", "correct path in [data.test]")


def as_levels(records: Mapping[str, Records], unit: PersonUnit | None = None) -> PyTree:
    """Return the arrays of one level, or `Levels` of arrays if there are two."""
    trees = {role: level.tree(unit) for role, level in records.items()}
    if RECORDS in trees:
        return trees[RECORDS]
    return Levels(**trees) if "lower" in trees else Levels.shared(trees["upper"])


def indicators(
    columns: Columns, records: Records, numbers: tuple[float, ...] = (-1.0, 1.0)
) -> np.ndarray:
    """Return an array with a row of fit indicators for each record or person.

    The row of a person is the mean of those of all rows; `numbers` are the labels.

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
    if records.ids is None:
        return rows
    # The norm of a mean is at most the largest norm of a row.
    people, person = people_of(records)
    total = np.zeros((len(people), rows.shape[1]))
    np.add.at(total, person, rows)
    return (total / np.bincount(person, minlength=1)[:, None]).astype(np.float32)


def without_sources(data: CsvData) -> CsvData:
    """Return a copy of `data` without sources and groups."""
    return dataclasses.replace(data, sources=None, groups=None)


def _same(file: Path, other: Path) -> bool:
    """Return whether two paths are one file, or files with the same bytes."""
    return file.samefile(other) or bool(copies([file, other]))


def _split(
    records: Records, counts: dict[str, int], seed: int, by_hash: bool = False
) -> list[Records]:
    """Return a list of disjoint parts with so many records, or people, each.

    Args:
        records: The records of a file.
        counts: Number of records, by the part's name in `[data]`.
        seed: The public seed.
        by_hash: Whether a hash of each record, or id, decides alone, so that one more
            moves no other; parts are then in the proportion of `counts`.
    """
    if by_hash:
        if records.ids is None:
            salt = str(seed).encode()
            hashes = (hashlib.sha256(salt + r).digest() for r in records.as_bytes())
        else:
            hashes = hashes_of(records.ids, seed)
        bound = 2**64 * next(iter(counts.values())) // sum(counts.values())
        first = np.asarray([int.from_bytes(v[:8]) < bound for v in hashes], bool)
        return [records.take(first), records.take(~first)][: len(counts)]
    person, what = np.arange(len(records.features)), "records"
    if records.ids is None:
        order = np.random.default_rng(seed).permutation(len(person))  # public
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
