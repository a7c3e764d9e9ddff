"""For how many records a fit is planned, and records in as many rows."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _checks
from ..privacy.budget import Neighbours
from ..privacy.rows import filler, padded_rows


@dataclasses.dataclass(frozen=True)
class Planned:
    """Who is a neighbour, and for how many records a fit is planned.

    Attributes:
        relation: The neighbouring relation.
        size: The public number of records.
    """

    relation: Neighbours
    size: Any  # an integer, or `Sizes` of two levels under replace-one

    @classmethod
    def of(cls, owner: str, neighbours: str, size: int | None, rows: int) -> "Planned":
        """From the parameters of an estimator and the number of rows of a fit.

        Raises:
            ValueError: An unknown relation, or a size that is missing or known.
        """
        names = tuple(relation.value for relation in Neighbours)
        _checks.one_of(owner, "neighbours", neighbours, names)
        relation = Neighbours(neighbours)
        if relation is Neighbours.REPLACE_ONE:
            if size is not None:
                raise ValueError(
                    f"{owner}: size= is for neighbours='add_or_remove_one'; under "
                    "replace_one the number of records is public and taken from X."
                )
            return cls(relation, rows)
        if size is None:
            raise ValueError(
                f"{owner}: under neighbours='add_or_remove_one' the number of records "
                "is private; give size=, a public number not far from it."
            )
        _checks.count(owner, size=size)
        return cls(relation, int(size))

    def rows(self, records: PyTree) -> PyTree:
        """Records in a public number of rows: where theirs is private, NaN follow.

        So no shape tells how many there are, and no program is compiled for it.
        """
        if self.relation is Neighbours.REPLACE_ONE:
            return records
        rows = padded_rows(self.size)

        def filled(column):
            missing = max(rows - len(column), 0)  # `solve` refuses too many
            widths = [(0, missing)] + [(0, 0)] * (column.ndim - 1)
            return np.pad(column, widths, constant_values=filler(column.dtype))

        return jax.tree.map(filled, records)
