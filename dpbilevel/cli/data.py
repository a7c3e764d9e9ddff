"""The table `[data]`: records of files, and people who have several rows each."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, PyTree

from ..core.usability import Columns
from ..privacy.records.people import PerPerson, PersonUnit, by_person, words
from .columns import Categorical, Label, Numeric, Places, Records, named
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

    def __post_init__(self):
        if not self.feature_blocks:
            raise ValueError("list columns in [[data.numeric]] or data.categorical.")

    @property
    def feature_blocks(self) -> tuple[Numeric | Categorical, ...]:
        """Blocks of features, without the constant."""
        return (*self.numeric, *self.categorical)

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        """Pairs of each block's name and number of features, the constant last."""
        sizes = ((block.name, len(block.names)) for block in self.feature_blocks)
        return (*sizes, (_CONSTANT, 1))

    @property
    def features(self) -> tuple[str, ...]:
        """Name of each feature, the constant last."""
        names = (name for block in self.feature_blocks for name in block.names)
        return (*names, _CONSTANT)

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Name of each coefficient: a feature, with a class if there are several."""
        if not self.label.classes:
            return self.features
        classes = self.label.class_names
        return tuple(f"{name} [{c}]" for name in self.features for c in classes)

    def table(self, file: Path) -> Table:
        """Read the table; errors are those of `load`."""
        return read_table(file, self.separator, self.missing)

    def load(self, file: Path, person: str = "") -> Records:
        """Read the records of a file.

        Args:
            file: The file.
            person: The column with the id of each row's person, if there is one. Rows
                without an id are left out.

        Returns:
            The records. NON-PRIVATE: this is the data.

        Raises:
            ValueError: A column is missing.
            OSError: A file cannot be read.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """
        table = self.table(file)
        records = self.encode(table)
        if not person:
            return records
        ids = ids_of(table, person)
        return dataclasses.replace(records, ids=ids).take(ids != "")

    def design(self, table: Table) -> np.ndarray:
        """Return the features of the rows of a table, which needs no label."""
        return _unit_rows([block.encode(table)[0] for block in self.feature_blocks])

    def encode(self, table: Table) -> Records:
        """Return the rows of a table as `Records`; raise `ValueError` without a column.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """
        numeric = [block.encode(table) for block in self.numeric]
        categorical = [block.encode(table) for block in self.categorical]
        label = self.label.encode(table)
        (source, *_), (group, *_) = places = [
            (None, {}) if place is None else place.encode(table)
            for place in (self.sources, self.groups)
        ]
        marks = {}
        for _, found in (*categorical, label, *numeric, *places):
            marks |= found
        features = _unit_rows([values for values, _ in (*numeric, *categorical)])
        if source is not None:  # no model of any method may use an unlisted source
            features = np.where(source[:, None] < 0, np.float32(np.nan), features)
        columns = [marks[name] for name in self.checked_columns.names]
        of_cells = np.stack(columns, 1).astype(np.int8)
        return Records(features, label[0].astype(np.float32), of_cells, source, group)

    @property
    def counts_test(self) -> bool:
        """Whether the accuracy on the test file is a counted release."""
        return self.test is not None and self.test.accuracy == "counted"

    @property
    def places(self) -> list[Places]:
        """The `Places` that are read from columns, if there are any."""
        return [place for place in (self.sources, self.groups) if place is not None]

    @property
    def checked_columns(self) -> Columns:
        """The columns and classes that a run checks first."""
        names = [self.label.column, *(c for b in self.numeric for c in b.columns)]
        names += [place.column for place in (*self.categorical, *self.places)]
        columns = Columns(tuple(dict.fromkeys(names)), self.label.class_names)
        for place in self.places:
            values = tuple(map(named, place.values))
            columns = dataclasses.replace(columns, place=place.column, places=values)
        return columns


def _unit_rows(blocks: list[np.ndarray]) -> np.ndarray:
    """Return rows of the blocks and a constant 1, scaled to unit length or NaN."""
    rows = np.concatenate([*blocks, np.ones((len(blocks[0]), 1))], 1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def is_id(name: str) -> bool:
    """Return whether a column's name is that of an id, such as `patient_id`."""
    return _ID.fullmatch(name) is not None


def ids_of(table: Table, column: str) -> np.ndarray:
    """Return the id of each row's person as text, `""` for a row without one.

    The id 7.0 is the id 7, as programs write it where some ids are missing.

    Raises:
        ValueError: There is no such column.

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
    """Return the hash of each id, which decides the part of the person in a split.

    Privacy:
        A function of the id and of a public seed, so that no row of anybody moves
        another person.
    """
    salt = f"{seed}:".encode()
    return [hashlib.sha256(salt + str(own).encode()).digest() for own in ids]


def rows_of_people(records: Records, unit: PersonUnit | None) -> PyTree:
    """Return the arrays of a level, as `PersonRows` if records have ids."""
    if unit is None or records.ids is None:
        return records.tree()
    return by_person(records.tree(), records.ids, most_rows=unit.most_rows)


def means(rows: Float[np.ndarray, "n w"], records: Records) -> np.ndarray:
    """Return the mean of each person's rows, or the rows if each is a person's.

    Its norm is at most the largest norm of a row.
    """
    if records.ids is None:
        return rows
    people, person = people_of(records)
    total = np.zeros((len(people), rows.shape[1]))
    np.add.at(total, person, rows)
    return (total / np.bincount(person, minlength=1)[:, None]).astype(np.float32)


def mean_of(fun: Callable[[Any], Any], unit: PersonUnit | None) -> Callable[[Any], Any]:
    """Return a function of a row as one of a person: the mean over the rows."""
    return fun if unit is None else PerPerson(fun, PersonUnit(unit.most_rows))


def values(
    fun: Callable[[Any], Any], records: Records, unit: PersonUnit | None
) -> np.ndarray:
    """Return a value for each record, or for each person the mean over the rows.

    The value is NaN for a person without a row that counts.

    Args:
        fun: A function of arrays of records, or of one record.
        records: The records.
        unit: The unit of privacy.
    """
    found: Any = rows_of_people(records, unit)
    if isinstance(found, Mapping):
        return np.asarray(fun(found))
    result = np.asarray(jax.vmap(mean_of(fun, unit))(found))
    seen = found.present.any(1)
    return np.where(seen.reshape(-1, *[1] * (result.ndim - 1)), result, np.nan)
