"""Records as two levels, ready for a solver."""

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import PyTree

from ..bilevel.problem import Levels
from ..privacy.budget import Neighbours, People
from .columns import AbstractRecords, Records
from .files import AbstractData


def load_levels(
    data: AbstractData,
    people: People,
    neighbours: Neighbours,
    *,
    base: Path,
    override: Path | None = None,
) -> Levels:
    """Reads the records and splits them into validation and training.

    Args:
        data: Where they come from.
        people: Who is behind them; shared levels get the training records.
        neighbours: The relation, which decides how they are split.
        base: The folder that relative paths start from.
        override: A file to read instead of the config's.

    Returns:
        `Levels(upper=validation, lower=training)` of float32 arrays. NON-PRIVATE:
        this is the data.

    Raises:
        ValueError: Too few records, a missing file or column: counts and headers are
            public.
        OSError: A file cannot be read or downloaded.

    Privacy:
        No cell's content raises, warns or prints. Under replace-one the split is a
        fixed permutation of the row numbers. Under add-or-remove-one the number of
        rows is private, so each record goes where a hash of itself says, and no
        record's place depends on another record.
    """
    records = data.records(base, override)
    assert isinstance(records, Records)  # matrices are records of one level
    shared = people is People.SHARED
    training, validation = _split(records, data, neighbours, shared)
    lower = records.take(training)
    if data.sources is not None and data.sources.flip:
        lower = data.sources.corrupted(lower)
    if shared:
        return Levels.shared(lower.tree())
    upper = records.take(validation)
    # A source belongs to a training record alone.
    return Levels(Records(upper.features, upper.label).tree(), lower.tree())


def load_records(
    data: AbstractData,
    neighbours: Neighbours,
    *,
    base: Path,
    override: Path | None = None,
) -> PyTree:
    """The training records of a problem of one level; all else as in `load_levels`.

    Returns:
        The records as arrays. NON-PRIVATE: this is the data.
    """
    records = data.records(base, override)
    training, _ = _split(records, data, neighbours, shared=False)
    return records.take(training).tree()


def _split(
    records: AbstractRecords, data: AbstractData, neighbours: Neighbours, shared: bool
):
    """The row numbers of training and validation records."""
    if neighbours is Neighbours.REPLACE_ONE:
        return _split_by_row(records, data, shared)
    training, validation = _split_by_hash(records, data)
    return np.arange(len(records)) if shared else training, validation


def _split_by_row(records: AbstractRecords, data: AbstractData, shared: bool):
    wanted = data.training if shared else data.training + data.validation
    rows = len(records)
    if rows < wanted:
        asked = f"training = {data.training}"
        if not shared and data.validation:
            asked += f" and validation = {data.validation}"
        raise ValueError(
            f"there are {rows} records, but [data] asks for {asked}. Use smaller "
            "numbers or more records."
        )
    order = np.random.default_rng(data.split_seed).permutation(rows)  # public
    return order[: data.training], order[data.training : wanted]


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
