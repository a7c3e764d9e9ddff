"""The table `[data]`: records of files, and people who have several rows each."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from ..core.usability import Columns
from ..privacy.records.people import PerPerson, PersonUnit, words
from .columns import Categorical, Label, Marks, Numeric, Places, Records, named
from .tables import MALFORMED, Table, read_table

_CONSTANT = "constant"  # name of the last feature
# Cells that say that a row has no id.
_NO_ID = {"", "na", "n/a", "nan", "nat", "none", "null", "<na>", MALFORMED}
_LONGEST = 64  # letters of an id that is kept as it is
# Names of columns that probably hold the id of a person.
_ID = re.compile(
    r"(?i)(.*[ _-])?id|.*(patient|customer|client|user|person|member|subject|kunden)"
    r"[ _-]?(id|nr|no|num|number|nummer|key|code)?"
)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A file of records on which the released model is tested.

    Args:
        path: The file, relative to the config; it has the columns of the features and
            the label.
        accuracy: Protection of its people: `"public"`, none is needed; `"counted"`,
            noise, within the budget of the config, which they spend on nothing else,
            because they are in no other file; `"non_private"`, none, as every report
            says.
        records: Number of records of the file that are read; 0 reads all, which
            `"counted"` does not take.
    """

    path: str
    accuracy: Literal["public", "counted", "non_private"]
    records: int = 0

    def __post_init__(self):
        least = int(self.accuracy == "counted")
        if self.records < least:
            raise ValueError(
                f'records must be at least {least} if accuracy = "{self.accuracy}".'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvData:
    """Records of a file, text with a header or Parquet: the table `[data]` of a config.

    Args:
        source: Kind of the file.
        training: Number of training records.
        validation: Number of validation records; 0 for one level.
        sources: The sources of the training records.
        groups: The groups of the records.
        label: The label.
        numeric: Blocks of numeric columns.
        categorical: Categorical columns.
        split_seed: Public seed of the split. Not a privacy seed.
        path: The file, relative to the config.
        separator: Separator of the cells of a row of text.
        missing: Texts of cells without a value, beside the empty text.
        validation_path: File of the validation records, relative to the config, with
            the same columns; that of the sources may be missing. Without it they are a
            random part of the one file.
        test: The file on which the released model is tested.
    """

    source: Literal["csv"] = "csv"
    training: int
    validation: int = 0
    sources: Places | None = None
    groups: Places | None = None
    label: Label
    numeric: tuple[Numeric, ...] = ()
    categorical: tuple[Categorical, ...] = ()
    split_seed: int = 0
    path: str = ""
    separator: Literal[",", ";", "\t"] = ","
    missing: tuple[str, ...] = ()
    validation_path: str = ""
    test: HeldOut | None = None

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        """Pairs of each block's name and number of features, the constant last."""
        numeric = ((block.name, len(block.columns)) for block in self.numeric)
        categorical = ((block.column, len(block.values)) for block in self.categorical)
        return (*numeric, *categorical, (_CONSTANT, 1))

    @property
    def features(self) -> tuple[str, ...]:
        """Tuple of the name of each feature, the constant last."""
        listed = ((b.column, value) for b in self.categorical for value in b.values)
        categorical = (f"{column} = {named(value)}" for column, value in listed)
        return (*(c for b in self.numeric for c in b.columns), *categorical, _CONSTANT)

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Tuple of each coefficient's name: a feature, with a class if several."""
        if not self.label.classes:
            return self.features
        classes = self.label.class_names
        return tuple(f"{name} [{c}]" for name in self.features for c in classes)

    def load(self, file: Path, person: str = "") -> Records:
        """Return the `Records` of a file. NON-PRIVATE: this is the data.

        If there is a column `person` with ids, rows without an id are left out.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """
        table = read_table(file, self.separator, self.missing)
        records = self.encode(table)
        if not person:
            return records
        ids = ids_of(table, person)
        return dataclasses.replace(records, ids=ids).take(ids != "")

    def design(self, table: Table) -> tuple[np.ndarray, list[Marks]]:
        """Return the features of the rows of a table, and the marks of each block.

        Rows have a constant 1 and are scaled to unit length; they need no label.
        """
        blocks = [block.encode(table) for block in (*self.numeric, *self.categorical)]
        values = [values for values, _ in blocks]
        rows = np.concatenate([*values, np.ones((len(values[0]), 1))], 1)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows.astype(np.float32), [marks for _, marks in blocks]

    def encode(self, table: Table) -> Records:
        """Return the rows of a table as `Records`; raise `ValueError` without a column.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """
        features, of_blocks = self.design(table)
        label, of_label = self.label.encode(table)
        source, group = (
            (None, {}) if place is None else place.encode(table)
            for place in (self.sources, self.groups)
        )
        count, marks = len(self.numeric), {}
        for found in (*of_blocks[count:], of_label, *of_blocks[:count]):
            marks |= found
        marks |= source[1] | group[1]
        if source[0] is not None:  # no model of any method may use an unlisted source
            features = np.where(source[0][:, None] < 0, np.float32(np.nan), features)
        columns = [marks[name] for name in self.used_columns.names]
        of_cells = np.stack(columns, 1).astype(np.int8)
        label = label.astype(np.float32)
        return Records(features, label, of_cells, source[0], group[0])

    @property
    def counts_test(self) -> bool:
        """Whether the accuracy on the test file is a counted release."""
        return self.test is not None and self.test.accuracy == "counted"

    @property
    def used_columns(self) -> Columns:
        """`Columns` that a run checks first, with classes, sources or groups."""
        names = [self.label.column, *(c for b in self.numeric for c in b.columns)]
        places = [place for place in (self.sources, self.groups) if place is not None]
        names += [place.column for place in (*self.categorical, *places)]
        columns = Columns(tuple(dict.fromkeys(names)), self.label.class_names)
        for place in places:
            values = tuple(map(named, place.values))
            columns = dataclasses.replace(columns, place=place.column, places=values)
        return columns


def is_id(name: str) -> bool:
    """Return whether a column's name is that of an id, such as `patient_id`."""
    return _ID.fullmatch(name) is not None


def ids_of(table: Table, column: str) -> np.ndarray:
    """Return the id of each row's person as text, `""` for a row without one.

    The id 7.0 is the id 7, as programs write it where some ids are missing.

    Privacy:
        Row by row.
    """

    def own(cell: str) -> str:
        found = re.sub(r"(?<=\d)\.0+$", "", cell)
        if len(found) > _LONGEST:  # or one row would take the memory of many
            return hashlib.sha256(found.encode()).hexdigest()
        return "" if found.lower() in _NO_ID else found

    # The rule of `by_person`, so that there are as many people here as there.
    return np.asarray([own(cell) for cell in words(table.column(column))], str)


def people_of(records: Records) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted ids of the people, and the position of each row's person."""
    assert records.ids is not None
    return np.unique(records.ids, return_inverse=True)


def hashes_of(ids: np.ndarray, seed: int) -> list[bytes]:
    """Return a list of the hash of each id, which decides its person's part in a split.

    Privacy:
        A function of the id and of a public seed, so that no row of anybody moves
        another person.
    """
    salt = f"{seed}:".encode()
    return [hashlib.sha256(salt + str(own).encode()).digest() for own in ids]


def mean_of(fun: Callable[[Any], Any], unit: PersonUnit | None) -> Callable[[Any], Any]:
    """Return `fun`, a function of a row; with a unit, its mean over a person's rows."""
    return fun if unit is None else PerPerson(fun, PersonUnit(unit.most_rows))


def values(
    fun: Callable[[Any], Any], records: Records, unit: PersonUnit | None
) -> np.ndarray:
    """Return `fun` of each record, or for each person the mean over the rows.

    It maps arrays of records, or one record. The mean is NaN without a row that counts.
    """
    found: Any = records.tree(unit)
    if isinstance(found, Mapping):
        return np.asarray(fun(found))
    result = np.asarray(jax.vmap(mean_of(fun, unit))(found))
    seen = found.present.any(1)
    return np.where(seen.reshape(-1, *[1] * (result.ndim - 1)), result, np.nan)
