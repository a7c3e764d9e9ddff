"""Rows of people on disk, which lie one after the other."""

from typing import Any

import numpy as np
from jaxtyping import Int
from typing_extensions import override

from .people import by_person, numbered
from .stores import AbstractStore, Fill


class PersonStore(AbstractStore):
    """The rows of each person of a store, as the leaves of `PersonRows`.

    Args:
        store: The rows. Those of a person follow each other.
        ids: The id of the person of each row.
        most_rows: The number of rows of a person that count, at most.

    Raises:
        ValueError: The rows of a person do not follow each other, or the number of ids
            is another one. Declared unprotected: that they do not.
    """

    order = "C"

    def __init__(self, store: AbstractStore, ids: Any, most_rows: int):
        numbers, people = numbered(ids)
        if len(numbers) != store.count:
            counts = f"{len(numbers)} ids for {store.count} rows"
            raise ValueError(f"OnDisk.by_person: got {counts}.")
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
