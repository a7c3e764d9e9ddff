"""Records of a run: files, example data or generated records, split into levels."""

import abc
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from ..bilevel.problem import Levels
from ..core.usability import Columns
from ..privacy.budget import Neighbours, People
from ..privacy.queries import RECORDS
from ..privacy.records.stores import copies
from .columns import (
    CUT,
    UNUSABLE,
    Categorical,
    Label,
    Marks,
    Numeric,
    Records,
    Standardized,
    Table,
    listed_marks,
    named,
    positions,
)
from .files import existing, read_csv
from .sources import Groups, Sources

_CONSTANT = "constant"  # name of the last feature


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
        least = 1 if self.accuracy == "counted" else 0
        if self.records < least:
            raise ValueError(
                f'records must be at least {least} if accuracy = "{self.accuracy}", '
                f"got {self.records}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractData(abc.ABC):
    """Source of the records of a run: the table `[data]` of a config.

    Args:
        training: Number of training records.

    Attributes:
        source: Name of the source in a config.
        validation: Number of validation records; 0 for one level.
        sources: The sources of the training records.
        groups: The groups of the records.
        test: The file on which the released model is tested.
        split_seed: Public seed of the split. Not a privacy seed.
        checked_columns: The columns and classes that a run checks first; `None` if
            the records are generated.
        feature_blocks: Blocks of features, without the constant; empty for matrices.
    """

    source: ClassVar[str]
    training: int
    validation: ClassVar[int] = 0
    sources: ClassVar[Sources | None] = None
    groups: ClassVar[Groups | None] = None
    test: ClassVar[HeldOut | None] = None
    split_seed: ClassVar[int]
    checked_columns: ClassVar[Columns | None] = None
    feature_blocks: ClassVar[tuple[Any, ...]] = ()

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        """Name and number of features of each block, the constant last."""
        sizes = ((block.name, len(block.names)) for block in self.feature_blocks)
        return (*sizes, (_CONSTANT, 1)) if self.feature_blocks else ()

    @property
    def features(self) -> tuple[str, ...]:
        """Name of each feature, the constant last; empty for matrices."""
        names = (name for block in self.feature_blocks for name in block.names)
        return (*names, _CONSTANT) if self.feature_blocks else ()

    @abc.abstractmethod
    def load(self, file: Path | None) -> Records:
        """Read `file`, or download or generate the records, and encode them.

        Returns:
            The records. NON-PRIVATE: this is the data.

        Raises:
            ValueError: A column is missing.
            OSError: A file cannot be read or downloaded.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvFile(AbstractData):
    """A comma-separated file with a header.

    Args:
        path: The file, relative to the config.
        separator: Separator of the cells of a row.
    """

    path: str = ""
    separator: Literal[",", ";", "\t"] = ","

    @override
    def load(self, file: Path | None) -> Records:
        assert file is not None
        return self.encode(read_csv(file, self.separator))

    @abc.abstractmethod
    def encode(self, table: Table) -> Records:
        """Return the rows of a table as records; raise `ValueError` without a column.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableData(AbstractData):
    """Records from a table with a header.

    Args:
        numeric: Blocks of numeric columns.
        categorical: Categorical columns.
        label: The label.
        split_seed: Public seed of the split. Not a privacy seed.
    """

    label: Label
    numeric: tuple[Numeric, ...] = ()
    categorical: tuple[Categorical, ...] = ()
    validation: int = 0
    sources: Sources | None = None
    groups: Groups | None = None
    split_seed: int = 0

    def __post_init__(self):
        if not self.feature_blocks:
            raise ValueError("list columns in [[data.numeric]] or data.categorical.")
        if self.groups is not None and not self.groups.column:
            raise ValueError(
                "the groups of a table need groups.column and groups.values."
            )

    @property
    @override
    def feature_blocks(self) -> tuple[Numeric | Categorical, ...]:
        return (*self.numeric, *self.categorical)

    def design(self, table: Table) -> np.ndarray:
        """Return the features of the rows of a table, which needs no label."""
        return _unit_rows([block.encode(table)[0] for block in self.feature_blocks])

    def encode(self, table: Table) -> Records:
        """Return the rows of a table as records.

        Raises:
            ValueError: A column is missing.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """
        numeric = [block.encode(table) for block in self.numeric]
        categorical = [block.encode(table) for block in self.categorical]
        label = self.label.encode(table)
        places = {
            p.column: positions(table.column(p.column), p.values) for p in self._places
        }
        marks = {}
        for _, found in (*categorical, label, *numeric):
            marks |= found
        marks |= {name: listed_marks(found) for name, found in places.items()}
        source, group = (
            None if place is None else places.get(place.column)
            for place in (self.sources, self.groups)
        )
        features = _unit_rows([values for values, _ in (*numeric, *categorical)])
        if source is not None:  # no model of any method may use an unlisted source
            features = np.where(source[:, None] < 0, np.float32(np.nan), features)
        marks = _stacked(marks, self.checked_columns)
        return Records(features, label[0].astype(np.float32), source, group, marks)

    @property
    def _places(self) -> list[Sources | Groups]:
        """Columns of the sources and groups, if there are any."""
        return [p for p in (self.sources, self.groups) if p is not None and p.column]

    @property
    @override
    def checked_columns(self) -> Columns:
        names = [self.label.column, *(c for b in self.numeric for c in b.columns)]
        names += [place.column for place in (*self.categorical, *self._places)]
        columns = Columns(tuple(dict.fromkeys(names)), self.label.classes)
        for place in self._places:
            values = tuple(map(named, place.values))
            columns = dataclasses.replace(columns, place=place.column, places=values)
        return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvData(TableData, CsvFile):
    """Records from a comma-separated file with a header.

    Args:
        validation_path: File of the validation records, relative to the config, with
            the same columns; that of the sources may be missing. Without it they are a
            random part of the one file.
        test: The file on which the released model is tested.
    """

    source: ClassVar[str] = "csv"

    validation_path: str = ""
    test: HeldOut | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SklearnData(TableData):
    """Records from a data set that comes with scikit-learn; its label is `target`.

    Args:
        name: One of breast_cancer, diabetes, digits, iris, wine.
    """

    source: ClassVar[str] = "sklearn"

    name: Literal["breast_cancer", "diabetes", "digits", "iris", "wine"]

    @override
    def load(self, file: Path | None) -> Records:
        import sklearn.datasets  # an extra

        bunch = getattr(sklearn.datasets, f"load_{self.name}")()
        return self.encode(_table(f"scikit-learn's {self.name}", bunch, ["target"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenmlData(TableData):
    """Records downloaded from openml.org and kept in scikit-learn's cache.

    Args:
        name: Name of the data set there, such as `"adult"`.
        version: Version of the data set.
    """

    source: ClassVar[str] = "openml"

    name: str
    version: int

    @override
    def load(self, file: Path | None) -> Records:
        from sklearn.datasets import fetch_openml

        try:
            bunch: Any = fetch_openml(
                self.name, version=self.version, as_frame=False, parser="liac-arff"
            )
        except OSError as error:
            raise OSError(
                f"cannot download {self.name!r} (version {self.version}) from "
                f"openml.org: {error}. Go online once; scikit-learn keeps a copy."
            ) from error
        return self.encode(_table(f"openml's {self.name}", bunch, bunch.target_names))


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of generated features.

    Args:
        name: Name of the block.
        size: Number of features.
        signal: Length of the true coefficients of the block; 0 is pure noise.
    """

    name: str
    size: int
    signal: float

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}.")

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each feature."""
        return tuple(f"{self.name} {j}" for j in range(self.size))

    def coefficients(self, rng: np.random.Generator) -> np.ndarray:
        """Return random coefficients of the block."""
        direction = rng.standard_normal(self.size)
        return self.signal * direction / np.linalg.norm(direction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedData(AbstractData):
    """Synthetic records of a logistic model: normal features, random coefficients.

    Args:
        block: Blocks of features.
        data_seed: Public seed of the records. Not a privacy seed.
    """

    source: ClassVar[str] = "generated"

    block: tuple[Block, ...]
    validation: int = 0
    sources: Sources | None = None
    groups: Groups | None = None
    data_seed: int = 0

    def __post_init__(self):
        if not self.block:
            raise ValueError("block must list at least one block of features.")
        if any(p is not None and p.column for p in (self.sources, self.groups)):
            raise ValueError(
                "generated records have no columns: give sources.flip, or "
                "groups.frequency and groups.turn."
            )

    @property
    @override
    def feature_blocks(self) -> tuple[Block, ...]:
        return self.block

    @property
    @override
    def split_seed(self) -> int:
        return self.data_seed

    @override
    def load(self, file: Path | None) -> Records:
        rng = np.random.default_rng(self.data_seed)
        truth = np.concatenate([block.coefficients(rng) for block in self.block])
        features = rng.standard_normal((self.training + self.validation, len(truth)))
        group, margin = None, features @ truth
        if self.groups is not None:
            group, margin = self.groups.generated(rng, features, truth)
        chance = 1 / (1 + np.exp(-margin))
        label = np.where(rng.random(len(features)) < chance, 1.0, -1.0)  # logistic
        return Records(_unit_rows([features]), label.astype(np.float32), group=group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvMatrices(CsvFile, Standardized):
    """Payoff matrices from the columns of a file: entries are mapped as features are.

    All entries share one $m$ and one $s$, so that payoffs stay comparable. A missing
    cell, or text that is no number, counts as 0.

    Args:
        columns: The columns, row of the matrix by row.
        mean: $m$, public.
        scale: $s > 0$, public.
        split_seed: Public seed of the choice of records, if the file has more. Not a
            privacy seed.
    """

    source: ClassVar[str] = "csv_matrices"

    columns: tuple[tuple[str, ...], ...]
    mean: float
    scale: float
    split_seed: int = 0

    def __post_init__(self):
        _check_rectangle("columns", self.columns)
        self.check_constants(self.mean, self.scale)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of a matrix."""
        return len(self.columns), len(self.columns[0])

    @override
    def encode(self, table: Table) -> Records:
        found = {
            name: self.standardized(table.column(name), self.mean, self.scale)
            for name in self.checked_columns.names
        }
        cells = [found[name][0] for row in self.columns for name in row]
        entries = np.stack(cells, 1).reshape(-1, *self.shape).astype(np.float32)
        marks = {name: marks for name, (_, marks) in found.items()}
        marks = _stacked(marks, self.checked_columns)
        return Records(entries, np.zeros(table.rows), marks=marks)

    @property
    @override
    def checked_columns(self) -> Columns:
        names = dict.fromkeys(name for row in self.columns for name in row)
        return Columns(tuple(names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedMatrices(AbstractData):
    """Synthetic matrices with entries of -1 or 1 around a mean matrix.

    Args:
        mean: The mean matrix, row by row, of entries in [-1, 1].
        data_seed: Public seed of the records. Not a privacy seed.
    """

    source: ClassVar[str] = "generated_matrices"

    mean: tuple[tuple[float, ...], ...]
    data_seed: int = 0

    def __post_init__(self):
        _check_rectangle("mean", self.mean)
        if not all(-1 <= entry <= 1 for row in self.mean for entry in row):
            raise ValueError("mean must hold numbers in [-1, 1]: means of signs.")

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of a matrix."""
        return len(self.mean), len(self.mean[0])

    @property
    @override
    def split_seed(self) -> int:
        return self.data_seed

    @override
    def load(self, file: Path | None) -> Records:
        rng = np.random.default_rng(self.data_seed)
        uniform = rng.random((self.training, *self.shape))
        signs = np.where(uniform < (1 + np.asarray(self.mean)) / 2, 1.0, -1.0)
        return Records(signs.astype(np.float32), np.zeros(self.training))


_OF_FEATURES = CsvData, SklearnData, OpenmlData, GeneratedData
_OF_MATRICES = CsvMatrices, GeneratedMatrices
SOURCES: dict[str, type[AbstractData]] = {kind.source: kind for kind in _OF_FEATURES}
MATRICES: dict[str, type[AbstractData]] = {kind.source: kind for kind in _OF_MATRICES}


def find_files(
    data: AbstractData,
    people: People | None,
    *,
    base: Path,
    override: Path | None = None,
    validation: Path | None = None,
) -> tuple[Path | None, Path | None]:
    """Return the file of the records, and the file of validation records or `None`.

    Args:
        data: Source of the records.
        people: Relation of the people in the two levels; `None` for one level.
        base: The folder that relative paths start from.
        override: A file to read instead of the config's.
        validation: A file of validation records to read instead of the config's.

    Raises:
        ValueError: A file is missing, or the second one does not fit people or task.
    """
    files = []
    for option, given, key in (
        ("--data", override, "path"),
        ("--validation", validation, "validation_path"),
    ):
        if given is not None and not isinstance(data, CsvFile):
            raise ValueError(
                f"{option} names a file, but the config has source = "
                f'"{data.source}", which reads none. Leave {option} out.'
            )
        path = getattr(data, key, "")
        file = given or (base / path if path else None)
        what = "records" if option == "--data" else "validation records"
        files.append(file and existing(file, what, f"name another with {option} PATH"))
    file, other = files
    if file is None and isinstance(data, CsvFile):
        raise ValueError(
            "no file of records: set path in [data], or name one with --data PATH."
        )
    if other is None:
        return file, None
    if people in (None, People.SHARED):
        raise ValueError(
            "validation records have a file of their own, which is for tasks of two "
            'levels with people = "disjoint" or "overlapping". Leave the file out.'
        )
    if file is not None and _same(file, other):
        raise ValueError(
            f"{other} is also the file of the training records, or a copy of it. Leave "
            'it out to split the records, or say people = "shared" to use them twice.'
        )
    return file, other


def load(
    data: AbstractData,
    people: People | None,
    neighbours: Neighbours,
    file: Path | None,
    other: Path | None = None,
) -> dict[str, Records]:
    """Return the records of all levels, from two files or split from one file.

    Args:
        data: Source of the records.
        people: Relation of the people in the two levels; `None` for one level.
        neighbours: The neighbouring relation, which decides how records are split.
        file: The file of the records, as `find_files` returns it.
        other: The file of validation records, as `find_files` returns it.

    Returns:
        By role: `"records"` of one level, `"upper"` (validation) and `"lower"`
        (training) of two, `"upper"` alone of shared ones. NON-PRIVATE: this is the
        data.

    Raises:
        ValueError: There are too few records, or a column is missing: counts and
            headers are public.
        OSError: A file cannot be read or downloaded.

    Privacy:
        No cell's content raises, warns or prints. Under replace-one the split is a
        fixed permutation of the row numbers. Under add-or-remove-one the number of
        rows is private. A hash of each record then decides its level, so that no
        record's level depends on another record.
    """
    two = people not in (None, People.SHARED) and other is None
    levels = ("training", "validation") if two else ("training",)
    training, *rest = _split(data.load(file), data, neighbours, *levels)
    if other is not None:
        rest = _split(without_sources(data).load(other), data, neighbours, "validation")
    if people is None:
        return {RECORDS: training}
    if data.sources is not None and data.sources.flip:
        training = data.sources.corrupted(training)
    if people is People.SHARED:
        return {"upper": training}
    # Only training records have a source.
    upper = dataclasses.replace(rest[0], source=None, group=None)
    return {"upper": upper, "lower": training}


def load_test(data: AbstractData, base: Path, *others: Path | None) -> Records | None:
    """Return the records of the test file; `None` if the config has none.

    Args:
        data: Source of the records.
        base: The folder that relative paths start from.
        others: The files of training and validation records.

    Raises:
        ValueError: The file is missing, is one of `others`, lacks a column or has too
            few rows; or its records are public and lack a class.

    Privacy:
        NON-PRIVATE: this is the data. No cell's content raises unless it is public.
    """
    test = data.test
    if test is None:
        return None
    file = existing(base / test.path, "test records", "correct path in [data.test]")
    if any(other is not None and _same(file, other) for other in others):
        raise ValueError(
            f"{file} is named by [data.test] and is also the file of training or "
            "validation records, or a copy of it. Test the model on other records."
        )
    plain = without_sources(data)
    records = plain.load(file)
    if test.accuracy == "public":
        _check_classes(plain.label, records, file)
    if not test.records:
        return records
    return records.take(_chosen(len(records), data, {"test.records": test.records})[0])


def as_levels(records: Mapping[str, Records]) -> PyTree:
    """Return records by role as float32 arrays, as `Levels` if there are two levels."""
    trees = {role: level.tree() for role, level in records.items()}
    if RECORDS in trees:
        return trees[RECORDS]
    return Levels(**trees) if "lower" in trees else Levels.shared(trees["upper"])


def indicators(columns: Columns, records: Records) -> np.ndarray:
    """Return the indicators of how records of one level fit the config.

    Args:
        columns: The checked columns of the level.
        records: The records of a file.

    Privacy:
        NON-PRIVATE, row by row: for `RecordsCheck.release`.
    """
    assert records.marks is not None
    marks, label, place = records.marks[:, : len(columns.names)], None, None
    if columns.classes:
        label = np.where(np.isnan(records.label), -1, records.label > 0)
    if columns.places:
        place = records.source if records.group is None else records.group
    return columns.indicators(marks == UNUSABLE, marks == CUT, label, place)


def without_sources(data: AbstractData) -> CsvData:
    """Return `data` for a file that need not name the sources and groups."""
    assert isinstance(data, CsvData)
    return dataclasses.replace(data, sources=None, groups=None)


def _same(file: Path, other: Path) -> bool:
    """Return whether two paths are one file, or files with the same bytes."""
    return file.samefile(other) or bool(copies([file, other]))


def _check_classes(label: Label, records: Records, file: Path) -> None:
    """Refuse public labels if a class is in no record: it may be misspelt."""
    unlisted = int(np.isnan(records.label).sum())
    for name, sign in {"positive": 1, "negative": -1}.items():
        if label.positive and unlisted and not np.any(records.label == sign):
            raise ValueError(
                f"no record of {file} has a {label.column!r} that is listed as {name}, "
                f"and {unlisted} have one that is not listed at all. Correct "
                "[data.label] before a run spends a budget."
            )


def _chosen(rows: int, data: AbstractData, counts: dict[str, int]) -> list[np.ndarray]:
    """Return disjoint row numbers, as many as are wanted for each name."""
    asked = " and ".join(f"{name} = {count}" for name, count in counts.items())
    if rows < sum(counts.values()):
        raise ValueError(
            f"there are {rows} records, but [data] asks for {asked}. Use smaller "
            "numbers or more records."
        )
    order = np.random.default_rng(data.split_seed).permutation(rows)  # public
    return np.split(order, np.cumsum([*counts.values()]))[:-1]


def _split(
    records: Records, data: AbstractData, neighbours: Neighbours, *levels: str
) -> list[Records]:
    """Return the records of each level of a file, a level being a key of `[data]`."""
    counts = {level: getattr(data, level) for level in levels}
    if neighbours is Neighbours.REPLACE_ONE:
        return [records.take(rows) for rows in _chosen(len(records), data, counts)]
    bound = 2**64 * counts[levels[0]] // sum(counts.values())
    seed = str(data.split_seed).encode()
    # Each record by itself, so that one more moves no other.
    hashes = (hashlib.sha256(seed + r).digest()[:8] for r in records.as_bytes())
    first = np.asarray([int.from_bytes(value) < bound for value in hashes], bool)
    return [records.take(first), records.take(~first)][: len(levels)]


def _table(name: str, bunch: Any, targets: list[str]) -> Table:
    """Return a data set of scikit-learn as cells; NaN becomes an empty cell."""
    columns = {}
    for j, feature in enumerate(bunch.feature_names):
        # Nominal cells are positions in the list of the column's categories.
        texts = bunch.get("categories", {}).get(feature)
        columns[str(feature)] = [
            "" if v != v else str(texts[int(v)] if texts else v)
            for v in bunch.data[:, j]
        ]
    columns |= {target: [str(v) for v in bunch.target] for target in targets}
    return Table(name, columns, len(bunch.target))


def _unit_rows(blocks: list[np.ndarray]) -> np.ndarray:
    """Return rows of the blocks and a constant 1, scaled to unit length or NaN."""
    rows = np.concatenate([*blocks, np.ones((len(blocks[0]), 1))], 1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _stacked(marks: Marks, columns: Columns) -> np.ndarray:
    """Return the marks of the checked columns, one row per record."""
    return np.stack([marks[name] for name in columns.names], 1).astype(np.int8)


def _check_rectangle(name: str, rows: tuple[tuple, ...]) -> None:
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{name} must be a list of rows of one length, at least one of each."
        )
