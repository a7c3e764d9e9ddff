"""Records of people who have several rows each."""

import dataclasses
import math
import unicodedata
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree
from typing_extensions import override

from ... import _checks
from .randomness import Keyed
from .stores import AbstractStore, Fill

_NO_ID = -1
# Texts of missing values.
_MISSING = ("None", "nan", "NaN", "NaT", "<NA>", "--")
_UNSEEN = "\ufeff\u200b"  # characters that no screen shows


class PersonRows(eqx.Module):
    """Rows grouped by person and padded to the largest allowed number of rows.

    `by_person` makes it. Its leading axis is that of the people, so that what the
    library calls a record is one person.

    Attributes:
        rows: A pytree of arrays of shape `(n, most, ...)`. A place without a row holds
            a copy of another row of the person, or zeros if there is none.
        present: Which places hold a row.
    """

    rows: PyTree
    present: Bool[Array | np.ndarray, "n most"]


@dataclasses.dataclass(frozen=True)
class PersonUnit:
    r"""The unit of privacy: one person with at most `most_rows` rows.

    The value of a person is the mean of the values of the rows,

    $$v_p = \frac{1}{m_p} \sum_{j=1}^{m_p} v(z_{pj}),$$

    or, with `combine="sum"`, the sum over `most_rows` in place of $m_p$. It is zero for
    a person without rows. A value is clipped once a person, so that whatever is charged
    for a record is charged for a person, however many rows the person has.

    Args:
        most_rows: The number of rows that count, at most.
        combine: `"mean"`, which counts people alike, or `"sum"`, which counts rows
            alike.
    """

    most_rows: int = 8
    combine: Literal["mean", "sum"] = "mean"

    def __post_init__(self):
        _checks.count("per_person", most_rows=self.most_rows)
        _checks.one_of("per_person", "combine", self.combine, ("mean", "sum"))

    def __str__(self) -> str:
        """Return the unit in words."""
        rows = "1 row" if self.most_rows == 1 else f"{self.most_rows} rows"
        return f"one person (at most {rows} each)"

    def weights(self, present: Bool[Any, "*n most"]) -> Float[Any, "*n most"]:
        """Return an array: weight of each row in a person's value; 0 without a row."""
        present = present.astype(bool).astype(float)
        if self.combine == "sum":
            return present / self.most_rows
        return present / present.sum(-1, keepdims=True).clip(1)

    def check(self, records: Any) -> None:
        """Raise an error unless records are `PersonRows` of `most_rows` rows each."""
        if not isinstance(records, PersonRows):
            raise TypeError(
                "per_person: the problem is one of people, so data must come from "
                f"by_person(records, ids, most_rows={self.most_rows})."
            )
        if (places := jnp.shape(records.present)[-1]) != self.most_rows:
            raise ValueError(
                f"per_person: the problem has most_rows={self.most_rows}, the data "
                f"have {places}. Give by_person and per_person the same number."
            )


@dataclasses.dataclass(frozen=True)
class PerPerson:
    """Function of a person that combines the values of a function of a row.

    The row is the last argument of `fun`, and the value a pytree of floats.
    """

    fun: Callable[..., PyTree]
    unit: PersonUnit

    def __call__(self, *args: Any) -> PyTree:
        """Return the mean of `fun` over a person's rows, or its sum over most_rows."""
        *first, given = args
        person = given.record if isinstance(given, Keyed) else given
        self.unit.check(person)
        rows = person.rows
        if isinstance(given, Keyed):  # a key for each row
            rows = Keyed(rows, jax.random.split(given.key, self.unit.most_rows))
        values = jax.vmap(lambda row: self.fun(*first, row))(rows)
        weights = self.unit.weights(person.present)

        def combined(v):
            own = weights.astype(v.dtype).reshape(-1, *[1] * (v.ndim - 1))
            return jnp.sum(jnp.where(own > 0, own * v, 0), axis=0)

        return jax.tree.map(combined, values)


def by_person(
    records: PyTree, ids: Any, *, most_rows: int = 8, name: str = "by_person"
) -> PersonRows:
    """Return `PersonRows`: rows grouped by id, at most `most_rows` for each person.

    The people are in the order of their sorted ids, the rows of each in the given
    order. Of a person with more rows than `most_rows` the first ones count. A row does
    not count if a floating-point entry of it is not finite. A person without a row that
    counts is a person all the same, and contributes zero.

    Args:
        records: A pytree of arrays that share their leading axis, one row each.
        ids: The id of the person of each row: strings, integers or the like. A row
            without an id (`None`, NaN, an empty string) is left out.
        most_rows: The number of rows that count, at most, as in `per_person`.
        name: The caller, for an error.

    Returns:
        NumPy arrays with one entry for each person.

    Raises:
        ValueError: The number of ids is not that of the rows, or `most_rows` is below
            1.

    Privacy:
        Which rows of a person count depends on the rows of that person alone. Two
        spellings of an id are two people, and then the guarantee is for each of them.

    Example:
        >>> import numpy as np
        >>> visits = {"features": np.ones((4, 2)), "label": np.array([0, 1, 1, 0])}
        >>> people = by_person(visits, ["b", "a", "b", "b"], most_rows=2)
        >>> people.rows["label"]
        array([[1, 1],
               [0, 1]])
        >>> people.present
        array([[ True, False],
               [ True,  True]])
    """
    _checks.count(name, most_rows=most_rows)
    rows = jax.tree.map(np.asarray, records)
    count = _checks.leading_axis(f"{name}: records", rows)
    numbers, people = numbered(ids)
    if len(numbers) != count:
        raise ValueError(f"{name}: got {len(numbers)} ids for {count} rows.")
    counts = numbers != _NO_ID
    for v in jax.tree.leaves(rows):
        if np.issubdtype(v.dtype, np.inexact):
            with np.errstate(over="ignore"):  # a warning would tell of a number
                seen = v.astype(jax.dtypes.canonicalize_dtype(v.dtype), copy=False)
            counts &= np.isfinite(seen).all(axis=tuple(range(1, v.ndim)))
    # Stable, so that the rows of a person keep their order.
    order = np.argsort(numbers, kind="stable")
    order = order[counts[order]]
    person = numbers[order]
    place = np.arange(len(order)) - np.searchsorted(person, person)
    keep = place < most_rows
    order, person, place = order[keep], person[keep], place[keep]
    present = np.zeros((people, most_rows), bool)
    present[person, place] = True

    def placed(v):
        placed = np.zeros((people, most_rows, *v.shape[1:]), v.dtype)
        placed[person, place] = v[order]
        # Losses of made-up rows might not be finite; that of the first row is used.
        empty = ~present.reshape(people, most_rows, *[1] * (v.ndim - 1))
        return np.where(empty, placed[:, :1], placed)

    return PersonRows(jax.tree.map(placed, rows), present)


def combined(
    fun: Callable[[PyTree], Float[np.ndarray, "n w"]],
    records: PyTree,
    unit: PersonUnit | None,
    empty: float = 0.0,
) -> Float[np.ndarray, "n w"]:
    """Return an array, a row per person: values of a function of rows, combined.

    `PerPerson` for NumPy: the function maps all rows at once to one row of numbers
    each. The records are `PersonRows` if there is a unit; without a unit the values of
    `fun` are returned. `empty` is the value of a place without a row.
    """
    if unit is None:
        return fun(records)
    places = records.present.shape
    flat = jax.tree.map(
        lambda v: v.reshape(math.prod(places), *v.shape[2:]), records.rows
    )
    values = fun(flat)
    values = values.reshape(*places, math.prod(values.shape[1:]))
    weights = unit.weights(records.present)
    values = np.where(records.present[..., None], values, 0)
    mean = np.einsum("nm,nmw->nw", weights, values)
    return (mean + (1 - weights.sum(1, keepdims=True)) * empty).astype(values.dtype)


def on_rows(fun: Callable[[PyTree], PyTree], records: PyTree) -> PyTree:
    """Return `fun` of records, or `PersonRows` with `fun` applied to the rows."""
    if not isinstance(records, PersonRows):
        return fun(records)
    return PersonRows(fun(records.rows), records.present)


def numbered(ids: Any) -> tuple[Int[np.ndarray, " n"], int]:
    """Return each row's person number, -1 without an id, and the number of people.

    Ids of one type of numbers or dates are compared as they are, others as text. Each
    is read by itself, so that no id changes how others are read.
    """
    if isinstance(ids, str | bytes):
        raise ValueError("by_person: ids is a text; pass the column, table['id'].")
    plain = isinstance(ids, jax.Array) or type(ids) is np.ndarray
    if plain and np.asarray(ids).dtype.kind not in "OUST":
        ids = np.asarray(ids)
        missing = ids != ids  # NaN and NaT alone differ from themselves
    else:
        ids = words(ids)
        missing = ids == ""
    if ids.ndim != 1:
        raise ValueError(f"by_person: ids must be one column, got shape {ids.shape}.")
    known, own = np.unique(ids[~missing], return_inverse=True)
    numbers = np.full(len(ids), _NO_ID)
    numbers[~missing] = own
    return numbers, len(known)


def words(ids: Any) -> np.ndarray:
    """Return an array of ids as text, "" for a missing one."""
    shape = np.shape(ids) if hasattr(ids, "shape") else (len(ids),)
    entries = ids if len(shape) == 1 else np.ravel(ids)
    found = np.empty(len(entries), object)  # a long id makes no other one longer
    found[:] = [_word(v) for v in entries]
    return found.reshape(shape)


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str) and str(value) in _MISSING:
        return ""
    if isinstance(value, float | np.floating) and value.is_integer():
        value = int(value)  # where some ids of a column are missing
    text = str(value)
    for unseen in _UNSEEN:
        text = text.replace(unseen, "")
    return unicodedata.normalize("NFC", text).strip()


class PersonStore(AbstractStore):
    """Storage that reads the records of another by person, as leaves of `PersonRows`.

    The arguments, and what is refused, are those of `OnDisk.by_person`.
    """

    order = "C"

    def __init__(self, store: AbstractStore, ids: Any, most_rows: int):
        numbers, people = numbered(ids)
        if len(numbers) != store.count:
            got = f"got {len(numbers)} ids for {store.count} rows"
            raise ValueError(f"OnDisk.by_person: {got}.")
        known = np.flatnonzero(numbers >= 0)
        first = np.diff(numbers[known], prepend=-1) != 0  # rows of another person
        if np.count_nonzero(first) != people:
            raise ValueError(
                "OnDisk.by_person: the rows of a person do not follow each other. Sort "
                "the file by person."
            )
        super().__init__(store.files)
        self.store, self.most_rows = store, most_rows
        self.begins = np.append(known[first], len(numbers))
        # Numbers in the order of the file; -1 without an id.
        self.numbers: Int[np.ndarray, " n"] = np.full(len(numbers), -1)
        self.numbers[known] = np.cumsum(first) - 1
        self.count, self.tables, self.arrays = people, store.tables, store.arrays
        places = [((most_rows, *shape), dtype) for shape, dtype in store.kinds]
        self.kinds = [*places, ((most_rows,), np.dtype(bool))]

    @override
    def reader(self, start: int) -> Fill:
        place, read = start, self.store.reader(int(self.begins[start]))

        def fill(leaves: list[np.ndarray]) -> None:
            nonlocal place
            begin, end = self.begins[place], self.begins[place + len(leaves[0])]
            order = self.store.order
            rows = [
                np.empty((end - begin, *leaf.shape[2:]), leaf.dtype, order)
                for leaf in leaves[:-1]
            ]
            read(rows)
            numbers = self.numbers[begin:end].astype(float)
            numbers[numbers < 0] = np.nan
            found = by_person(rows, numbers, most_rows=self.most_rows)
            for leaf, values in zip(leaves, [*found.rows, found.present], strict=True):
                leaf[...] = values
            place += len(leaves[0])

        return fill
