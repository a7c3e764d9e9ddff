"""Records of two levels (`Levels`), their numbers (`Sizes`), and checks for overlap."""

import dataclasses
import itertools
from typing import Any, Self

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .. import _checks
from ..privacy.budget import People
from ..privacy.records.disk import OnDisk, copies
from ..privacy.records.people import words
from ..privacy.records.stores import AbstractStore


class Levels(eqx.Module):
    """Pair of values, one for the upper and one for the lower level.

    As data, `upper` and `lower` are pytrees whose leaves share their leading axis
    within a level. With `people="disjoint"` no array may be in both levels.

    Attributes:
        upper: The upper level's part.
        lower: The lower level's part.
        is_shared: Whether both parts are the same records. Static.
    """

    upper: PyTree
    lower: PyTree
    is_shared: bool = eqx.field(static=True, default=False)

    @classmethod
    def shared(cls, records: PyTree) -> Self:
        """Return `Levels` in which every record enters both levels.

        Args:
            records: A pytree whose leaves share their leading axis.
        """
        return cls(records, records, True)


def check_pair(owner: str, w0: PyTree) -> None:
    """Raise `ValueError` unless an initial point of two levels is a pair (x, y)."""
    if not isinstance(w0, tuple | list) or len(w0) != 2:
        raise ValueError(f"{owner}: w0 must be a pair (x, y), got {_checks.shown(w0)}.")


@dataclasses.dataclass(frozen=True, init=False)
class Sizes:
    """Numbers of records of two levels, and the relation of the people in them.

    Args:
        upper: Number of records of the upper level.
        lower: Number of records of the lower level.
        people: `"disjoint"` (a person has records in one level only),
            `"overlapping"` (may have one record in each) or `"shared"` (the levels
            are the same records).

    Raises:
        ValueError: A count below 1, unknown `people`, or shared levels that differ.
    """

    upper: int
    lower: int
    people: People

    def __init__(
        self, upper: int, lower: int, people: People | str = People.OVERLAPPING
    ):
        _checks.count("Sizes", upper=upper, lower=lower)
        if not isinstance(people, People):
            _checks.one_of("Sizes", "people", people, [known.value for known in People])
        counts = {"upper": int(upper), "lower": int(lower)}
        fields = counts | {"people": People(people)}
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # frozen
        if self.people is People.SHARED and upper != lower:
            raise ValueError(f"Sizes: shared levels differ: {upper=}, {lower=}.")


def check_disjoint(data: Levels) -> None:
    """Raise `ValueError` if both levels hold one array, shared memory or one file.

    Arrays are compared by identity and memory, never by values: one array in both
    levels, or two views of one NumPy array that have an entry in common. Arguments of a
    compiled function are different arrays in it, even if one array was given twice. One
    file is refused, and so are two Parquet files with the same bytes.
    """
    upper, lower = _arrays(data.upper), _arrays(data.lower)
    stores = [v.store for v in (data.upper, data.lower) if isinstance(v, OnDisk)]
    if len(stores) == 2 and (same := _same_files(*stores)):
        raise ValueError(
            f'people="disjoint" contradicts the data: both levels read {same}. Use '
            'Levels.shared(records), or people="overlapping".'
        )
    for (here, first), (there, second) in itertools.product(upper, lower):
        if first is second or _share_memory(first, second):
            one, other = (jax.tree_util.keystr(path) for path in (here, there))
            raise ValueError(
                f'people="disjoint" contradicts the data: upper{one} and lower{other} '
                "are the same array or parts of it. Use Levels.shared(records), "
                'people="overlapping", or a copy of a public column.'
            )


def check_disjoint_ids(first: Any, second: Any, message: str) -> None:
    """Raise `ValueError` with `message` if two lists share an id; not if one is `None`.

    Privacy:
        Declared unprotected: that somebody is in both. The text of the error is the
        same whoever that is, and however many.
    """
    if first is None or second is None:
        return
    one, other = (set(words(ids).tolist()) - {""} for ids in (first, second))
    if one & other:
        raise ValueError(message)


def _same_files(upper: AbstractStore, lower: AbstractStore) -> str:
    """Return text: the file, or copies of one, that both levels read; "" if none."""
    if set(upper.identities) & set(lower.identities):
        return "one file"
    for group in copies({*upper.tables, *lower.tables}):
        pair = [[p for p in group if p in v.tables] for v in (upper, lower)]
        if all(pair):
            return f"the same bytes ({pair[0][0]} and {pair[1][0]})"
    return ""


def _arrays(level: PyTree) -> list[tuple[Any, Any]]:
    """Return a list of (path, array): a level's nonempty arrays, also in `OnDisk`."""
    records = level.store.arrays if isinstance(level, OnDisk) else level
    leaves = jax.tree_util.tree_leaves_with_path(records)
    kinds = np.ndarray | jax.Array
    return [(path, v) for path, v in leaves if isinstance(v, kinds) and v.size]


def _share_memory(first: object, second: object) -> bool:
    """Return whether two NumPy arrays share an entry; false if that takes too long."""
    if not isinstance(first, np.ndarray) or not isinstance(second, np.ndarray):
        return False
    most: Any = 10_000  # its type differs between stubs of NumPy's releases
    try:
        return np.shares_memory(first, second, max_work=most)
    except np.exceptions.TooHardError:
        return False
