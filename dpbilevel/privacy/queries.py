"""Queries: what is read of one role's records, and what it costs."""

import dataclasses
from collections.abc import Callable
from typing import Self

from jaxtyping import Array, Float, PyTree

from .. import _checks
from .budget import Neighbours
from .clipping import Bounded, Precision, clipped_mean
from .noise import PRNGKey
from .sampling import AbstractSampling, FullBatch, Index

RECORDS = "records"  # the role of the records of a one-level problem
LEVELS = ("upper", "lower")
ROLES = (*LEVELS, RECORDS)


@dataclasses.dataclass(frozen=True)
class Query:
    r"""The part of a release that reads one role's records: one clipped mean.

    What is read and what it costs are one object: `read` clips to the norm that the
    ledger charges, on a batch drawn as it accounts for.

    Args:
        role: Whose records: `"upper"`, `"lower"` or `"records"`.
        size: The planned number of records $n$.
        clip_norm: $C$, the bound on one record's value in $\ell_2$; traced inside a
            compiled step.
        sampling: How its batch is drawn.
    """

    role: str
    size: int
    clip_norm: float | Float[Array, ""]
    sampling: AbstractSampling = dataclasses.field(default_factory=FullBatch)

    def __post_init__(self):
        _checks.one_of("Query", "role", self.role, ROLES)
        _checks.count("Query", size=self.size)
        _checks.positive("Query", clip_norm=self.clip_norm)
        _checks.instance("Query", AbstractSampling, sampling=self.sampling)
        object.__setattr__(self, "clip_norm", _checks.number(self.clip_norm))

    @classmethod
    def of_contribution(
        cls,
        role: str,
        size: int,
        contribution: float | Float[Array, ""],
        sampling: AbstractSampling = FullBatch(),
    ) -> Self:
        """What costs as much as a clipped mean with this contribution of one record."""
        return cls(role, size, contribution * sampling.denominator(size), sampling)

    @property
    def contribution(self) -> float:
        r"""One record's share of the mean: $C$ over the public denominator."""
        return float(self.clip_norm) / self.sampling.denominator(self.size)

    def read(
        self,
        fun: Callable[[PyTree], PyTree],
        records: PyTree,
        *,
        precision: Precision,
        key: PRNGKey | None,
        neighbours: Neighbours = Neighbours.REPLACE_ONE,
        index: Index = None,
    ) -> Bounded:
        """The clipped mean of a per-record function on a fresh batch.

        Args:
            fun: Maps one record to a pytree.
            records: All records of the role.
            precision: How they are summed, as in `clipped_mean`.
            key: A typed key for the draw of the batch, where `sampling` needs one.
            neighbours: The relation of the release, as in `clipped_mean`.
            index: The number of the batch in the run, for samplings that are numbered.

        Privacy:
            Sealed with this query's `contribution`.
        """
        batch = self.sampling.draw(records, self.size, key=key, index=index)
        return clipped_mean(
            fun,
            batch,
            clip_norm=self.clip_norm,
            precision=precision,
            neighbours=neighbours,
        )
