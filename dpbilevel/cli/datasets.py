"""Where the records of a run come from: files, example data, generated records."""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from ..core.usability import Columns
from .columns import (
    Categorical,
    Label,
    Numeric,
    Records,
    Table,
    listed,
    named,
    positions,
    stacked,
    unit_rows,
)
from .files import AbstractData, CsvFile, HeldOut, existing
from .sources import Groups, Sources

CONSTANT = ("constant", 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureData(AbstractData):
    """Records of features and a label; its fields are those of `AbstractData`."""

    validation: int = 0
    sources: Sources | None = None
    groups: Groups | None = None

    @property
    @abc.abstractmethod
    def listed(self) -> Sequence[Any]:
        """The blocks of features, without the constant."""

    @property
    @override
    def blocks(self) -> tuple[tuple[str, int], ...]:
        return (*((block.name, block.size) for block in self.listed), CONSTANT)

    @property
    @override
    def features(self) -> tuple[str, ...]:
        names = (name for block in self.listed for name in block.names)
        return (*names, CONSTANT[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableData(FeatureData):
    """Records from a table with a header.

    Args:
        numeric: Blocks of numeric columns.
        categorical: Categorical columns.
        label: The label.
        split_seed: The public seed of the split. Not a privacy seed.
    """

    label: Label
    numeric: tuple[Numeric, ...] = ()
    categorical: tuple[Categorical, ...] = ()
    split_seed: int = 0

    def __post_init__(self):
        if not self.numeric and not self.categorical:
            raise ValueError(
                "the records have no features: list columns in [[data.numeric]] or "
                "[[data.categorical]]."
            )
        if self.groups is not None and not self.groups.column:
            raise ValueError(
                "the groups of a table are in one of its columns: give groups.column "
                "and groups.values."
            )

    @property
    @override
    def listed(self) -> list[Numeric | Categorical]:
        return [*self.numeric, *self.categorical]

    def design(self, table: Table) -> np.ndarray:
        """The features of the rows of a table, which needs no label; as `encode`."""
        return unit_rows(np.concatenate([b.features(table) for b in self.listed], 1))

    def encode(self, table: Table) -> Records:
        """The rows of a table as records.

        Raises:
            ValueError: A column is missing.

        Privacy:
            Row by row, by constants of the config; a cell's content never raises.
        """
        features = self.design(table)
        label = self.label.values(table).astype(np.float32)
        marks = stacked(self.cell_marks(table))
        group = None
        if self.groups is not None:
            group = positions(table.column(self.groups.column), self.groups.values)
        if self.sources is None or not self.sources.column:
            return Records(features, label, group=group, marks=marks)
        found = positions(table.column(self.sources.column), self.sources.values)
        # A record of no known source, -1, has no influence on any model of any method.
        features = np.where(found[:, None] < 0, np.float32(np.nan), features)
        return Records(features, label, found, group, marks)

    def cell_marks(self, table: Table) -> dict[str, np.ndarray]:
        """Return the marks of the cells of each checked column. NON-PRIVATE."""
        found = {self.label.column: self.label.fits(table)}
        for block in self.numeric:
            for name, mean, scale in block.constants:
                found[name] = block.marks(table.column(name), mean, scale)
        for block in self.categorical:
            found.setdefault(block.column, block.marks(table))
        for place in self._places:
            found[place.column] = listed(table.column(place.column), place.values)
        return found

    @property
    def _places(self) -> list[Sources | Groups]:
        """Columns of the sources and groups, if there are any."""
        return [p for p in (self.sources, self.groups) if p is not None and p.column]

    @property
    @override
    def checked_columns(self) -> Columns:
        names = [self.label.column, *(c for b in self.numeric for c in b.columns)]
        names += [block.column for block in self.categorical]
        names += [place.column for place in self._places]
        columns = Columns(tuple(dict.fromkeys(names)), self.label.classes)
        for place in self._places:
            values = tuple(map(named, place.values))
            columns = dataclasses.replace(columns, place=place.column, places=values)
        return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvData(TableData, CsvFile):
    """Records from a comma-separated file with a header.

    Args:
        validation_path: A file of the validation records, relative to the config, with
            the same columns but that of the sources. Without it they are a random part
            of the one file.
        test: The file on which the released model is tested.
    """

    source: ClassVar[str] = "csv"

    validation_path: str = ""
    test: HeldOut | None = None

    @override
    def validation_file(self, base: Path, override: Path | None) -> Path | None:
        if override is None and not self.validation_path:
            return None
        path = override or base / self.validation_path
        return existing(
            path, "validation records", "name another with --validation PATH"
        )


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
        names = [str(name) for name in bunch.feature_names]
        columns = {n: [str(v) for v in bunch.data[:, j]] for j, n in enumerate(names)}
        columns["target"] = [str(v) for v in bunch.target]
        table = Table(f"scikit-learn's {self.name}", columns, len(bunch.data))
        return self.encode(table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenmlData(TableData):
    """Records downloaded from openml.org and kept in scikit-learn's cache.

    Args:
        name: The data set's name there, such as `"adult"`.
        version: Its version.
    """

    source: ClassVar[str] = "openml"

    name: str
    version: int

    @override
    def load(self, file: Path | None) -> Records:
        from sklearn.datasets import fetch_openml

        try:
            bunch = fetch_openml(
                self.name, version=self.version, as_frame=False, parser="liac-arff"
            )
        except OSError as error:
            raise OSError(
                f"cannot download {self.name!r} (version {self.version}) from "
                f"openml.org: {error}. Go online once (scikit-learn keeps a copy), or "
                'use a local file with source = "csv".'
            ) from error
        columns = _openml_columns(bunch)
        rows = len(next(iter(columns.values())))
        return self.encode(Table(f"openml's {self.name}", columns, rows))


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of generated features.

    Args:
        name: The block's name.
        size: The number of features.
        signal: The length of the true coefficients of the block; 0 is pure noise.
    """

    name: str
    size: int
    signal: float

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each feature."""
        return tuple(f"{self.name} {j}" for j in range(self.size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedData(FeatureData):
    """Synthetic records of a logistic model: normal features, random coefficients.

    Args:
        block: The blocks of features.
        data_seed: The public seed of the records. Not a privacy seed.
    """

    source: ClassVar[str] = "generated"

    block: tuple[Block, ...]
    data_seed: int = 0

    def __post_init__(self):
        if not self.block:
            raise ValueError("block must list at least one block of features.")
        if any(
            found is not None and found.column for found in (self.sources, self.groups)
        ):
            raise ValueError(
                "generated records have no columns: give sources.flip, or "
                "groups.frequency and groups.turn."
            )

    @property
    @override
    def listed(self) -> tuple[Block, ...]:
        return self.block

    @property
    @override
    def split_seed(self) -> int:
        return self.data_seed

    @override
    def load(self, file: Path | None) -> Records:
        rng = np.random.default_rng(self.data_seed)
        truth = np.concatenate([_coefficients(rng, block) for block in self.block])
        features = rng.standard_normal((self.training + self.validation, len(truth)))
        group = None
        if self.groups is None:
            margin = features @ truth
        else:
            group, margin = self.groups.generated(rng, features, truth)
        chance = 1 / (1 + np.exp(-margin))
        label = np.where(rng.random(len(features)) < chance, 1.0, -1.0)  # logistic
        return Records(unit_rows(features), label.astype(np.float32), group=group)


_KINDS = CsvData, SklearnData, OpenmlData, GeneratedData
SOURCES: dict[str, type[AbstractData]] = {kind.source: kind for kind in _KINDS}


def _coefficients(rng: np.random.Generator, block: Block) -> np.ndarray:
    direction = rng.standard_normal(block.size)
    return block.signal * direction / np.linalg.norm(direction)


def _openml_columns(bunch) -> dict[str, list[str]]:
    """Text cells; nominal columns come as positions in their list of categories."""
    columns = {}
    for j, name in enumerate(bunch.feature_names):
        values, listed = bunch.data[:, j], bunch.categories.get(name)
        columns[name] = [
            "" if v != v else str(listed[int(v)] if listed else v) for v in values
        ]
    for name in bunch.target_names:
        columns[name] = [str(v) for v in bunch.target]
    return columns
