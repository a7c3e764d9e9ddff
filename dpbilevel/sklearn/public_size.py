"""For how many records a fit is planned, and records in as many rows."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _checks
from ..core.plan import least_multiplier
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.mechanisms import Gaussian
from ..privacy.queries import RECORDS, Query
from ..privacy.records.rows import filler, padded_rows
from ..privacy.releases import Release
from ..privacy.sampling.base import FullBatch


@dataclasses.dataclass(frozen=True)
class PublicSize:
    """Who is a neighbour, and for how many records a fit is planned.

    Attributes:
        relation: The neighbouring relation.
        size: The public number of records.
    """

    relation: Neighbours
    size: Any  # an integer, or `Sizes` of two levels under replace-one

    @classmethod
    def of(
        cls, owner: str, neighbours: str, size: int | None, rows: int
    ) -> "PublicSize":
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


@dataclasses.dataclass(frozen=True)
class Beforehand:
    """A planned release before a fit, or none.

    Attributes:
        release: The release, or None.
    """

    release: Release | None

    @property
    def releases(self) -> tuple[Release, ...]:
        """The release for `calibrate(before=)`."""
        return () if self.release is None else (self.release,)


@functools.lru_cache(maxsize=128)
def release_within(
    budget: PrivacyBudget,
    planned: PublicSize,
    name: str,
    *,
    count: int = 1,
    clip_norm: float = 1.0,
    shares: tuple[float, float],
    wanted: float,
    most_noise: float,
) -> Release | None:
    """Return a release of means of all records, for a part of the squared budget.

    Args:
        budget: The budget of the whole fit.
        planned: The public number of records, and the relation.
        name: What is released.
        count: How many times.
        clip_norm: The largest norm of a record.
        shares: The least and the largest part of the squared budget.
        wanted: The noise of a mean for which a larger part is taken.
        most_noise: With more noise than this, `None` is returned; so it is for delta 0.

    Privacy:
        Touches no data.
    """
    if budget.delta == 0:
        return None
    multiplier = least_multiplier(FullBatch(), count, 1, budget)
    noise = Gaussian(multiplier, planned.relation, "grid")
    whole = Release(name, count, (Query(RECORDS, planned.size, clip_norm),), noise)
    least, most = shares
    share = min(max((whole.noise_std / wanted) ** 2, least), most)
    release = dataclasses.replace(whole, mechanism=noise.scaled(share**-0.5))
    return release if release.noise_std <= most_noise else None
