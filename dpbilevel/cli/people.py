"""People who have several rows each: their ids, their levels, means over their rows."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, PyTree

from ..privacy.records.people import PerPerson, PersonUnit, by_person, words
from .columns import Records
from .tables import MALFORMED, Table

# Cells that say that a row has no id.
_NO_ID = {"", "na", "n/a", "nan", "nat", "none", "null", "<na>", MALFORMED}
_LONGEST = 64  # letters of an id that is kept as it is
# Names of columns that probably hold the id of a person.
_ID = re.compile(
    r"(?i)(.*[ _-])?id|.*(patient|customer|client|user|person|member|subject|kunden)"
    r"[ _-]?(id|nr|no|num|number|nummer|key|code)?"
)


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


def with_ids(records: Records, table: Table, column: str) -> Records:
    """Return the records of the rows that have an id, with their ids.

    Raises:
        ValueError: The table lacks the column.

    Privacy:
        Whether a row is left out depends on that row alone.
    """
    ids = ids_of(table, column)
    return dataclasses.replace(records, ids=ids).take(ids != "")


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
