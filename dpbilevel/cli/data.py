"""Sources of records, split into features, labels and marks: the table `[data]`."""

import abc
import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from ..core.usability import Columns
from .columns import Categorical, Label, Numeric, Records, named
from .people import with_ids
from .sources import Groups, HeldOut, Sources
from .tables import Table, read_table

_CONSTANT = "constant"  # name of the last feature


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractData(abc.ABC):
    """Source of the records of a run: the table `[data]` of a config.

    Args:
        training: Number of training records.
        validation: Number of validation records; 0 for one level.
        sources: The sources of the training records.
        groups: The groups of the records.

    Attributes:
        source: Name of the source in a config.
        test: The file on which the released model is tested.
        split_seed: Public seed of the split. Not a privacy seed.
        checked_columns: The columns and classes that a run checks first; `None` if
            the records are generated.
        feature_blocks: Blocks of features, without the constant.
    """

    source: ClassVar[str]
    training: int
    validation: int = 0
    sources: Sources | None = None
    groups: Groups | None = None
    test: ClassVar[HeldOut | None] = None
    split_seed: ClassVar[int]
    checked_columns: ClassVar[Columns | None] = None
    feature_blocks: ClassVar[tuple[Any, ...]] = ()

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
        label = getattr(self, "label", None)
        if label is None or not label.classes:
            return self.features
        names = label.class_names
        return tuple(f"{name} [{c}]" for name in self.features for c in names)

    @abc.abstractmethod
    def load(self, file: Path | None, person: str = "") -> Records:
        """Read or generate the records, and return them as `Records`.

        Args:
            file: The file, if there is one.
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
    split_seed: int = 0

    def __post_init__(self):
        if not self.feature_blocks:
            raise ValueError("list columns in [[data.numeric]] or data.categorical.")
        if self.groups is not None and not self.groups.column:
            raise ValueError("groups of a table need groups.column and groups.values.")

    @property
    @override
    def feature_blocks(self) -> tuple[Numeric | Categorical, ...]:
        return (*self.numeric, *self.categorical)

    @abc.abstractmethod
    def table(self, file: Path | None) -> Table:
        """Read the table; errors are those of `load`."""

    @override
    def load(self, file: Path | None, person: str = "") -> Records:
        table = self.table(file)
        records = self.encode(table)
        return with_ids(records, table, person) if person else records

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
        marks, places = {}, {}
        for _, found in (*categorical, label, *numeric):
            marks |= found
        for place in self.places:
            places[place.column], found = place.encode(table)
            marks |= found
        source, group = (
            None if place is None else places.get(place.column)
            for place in (self.sources, self.groups)
        )
        features = _unit_rows([values for values, _ in (*numeric, *categorical)])
        if source is not None:  # no model of any method may use an unlisted source
            features = np.where(source[:, None] < 0, np.float32(np.nan), features)
        marks = np.stack([marks[name] for name in self.checked_columns.names], 1)
        marks = marks.astype(np.int8)
        return Records(features, label[0].astype(np.float32), source, group, marks)

    @property
    def places(self) -> list[Sources | Groups]:
        """`Sources` and `Groups` that are read from columns, if there are any."""
        return [p for p in (self.sources, self.groups) if p is not None and p.column]

    @property
    @override
    def checked_columns(self) -> Columns:
        names = [self.label.column, *(c for b in self.numeric for c in b.columns)]
        names += [place.column for place in (*self.categorical, *self.places)]
        columns = Columns(tuple(dict.fromkeys(names)), self.label.class_names)
        for place in self.places:
            values = tuple(map(named, place.values))
            columns = dataclasses.replace(columns, place=place.column, places=values)
        return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvData(TableData):
    """Records from a file: comma-separated text with a header, or Parquet.

    Args:
        path: The file, relative to the config.
        separator: Separator of the cells of a row of text.
        missing: Texts of cells without a value, beside the empty text.
        validation_path: File of the validation records, relative to the config, with
            the same columns; that of the sources may be missing. Without it they are a
            random part of the one file.
        test: The file on which the released model is tested.
    """

    source: ClassVar[str] = "csv"

    path: str = ""
    separator: Literal[",", ";", "\t"] = ","
    missing: tuple[str, ...] = ()
    validation_path: str = ""
    test: HeldOut | None = None

    @override
    def table(self, file: Path | None) -> Table:
        assert file is not None
        return read_table(file, self.separator, self.missing)


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
    data_seed: int = 0

    def __post_init__(self):
        if not self.block:
            raise ValueError("block must list at least one block of features.")
        if any(p is not None and p.column for p in (self.sources, self.groups)):
            raise ValueError(
                "generated records have no columns: give flip, or frequency and turn."
            )

    @property
    @override
    def split_seed(self) -> int:
        return self.data_seed

    @property
    @override
    def feature_blocks(self) -> tuple[Block, ...]:
        return self.block

    @override
    def load(self, file: Path | None, person: str = "") -> Records:
        rng = np.random.default_rng(self.data_seed)
        truth = np.concatenate([block.coefficients(rng) for block in self.block])
        features = rng.standard_normal((self.training + self.validation, len(truth)))
        group, margin = None, features @ truth
        if self.groups is not None:
            group, margin = self.groups.generated(rng, features, truth)
        chance = 1 / (1 + np.exp(-margin))
        label = np.where(rng.random(len(features)) < chance, 1.0, -1.0)  # logistic
        return Records(_unit_rows([features]), label.astype(np.float32), group=group)


_KINDS = CsvData, GeneratedData
SOURCES: dict[str, type[AbstractData]] = {kind.source: kind for kind in _KINDS}


def _unit_rows(blocks: list[np.ndarray]) -> np.ndarray:
    """Return rows of the blocks and a constant 1, scaled to unit length or NaN."""
    rows = np.concatenate([*blocks, np.ones((len(blocks[0]), 1))], 1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
