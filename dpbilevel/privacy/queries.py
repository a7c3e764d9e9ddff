"""Queries: reads of one role's records, and their costs."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from .budget import Neighbours
from .keys import PRNGKey, check_key, derive
from .per_example.clipping import Basis, Bounded, Precision, clipped_mean
from .records.disk import OnDisk
from .records.randomness import with_keys
from .records.rows import BLOCK, Padded, padded_rows, shapes_of, unpacked
from .sampling.base import AbstractSampling, FullBatch, Index

RECORDS = "records"  # the role of the records of a one-level problem
LEVELS = ("upper", "lower")
ROLES = (*LEVELS, RECORDS)


@dataclasses.dataclass(frozen=True)
class Query:
    r"""Planned read of one role's records, as a part of a release: one clipped mean.

    What is read and what it costs are one object: `read` clips to the norm that the
    ledger charges, on a batch drawn as it accounts for.

    Args:
        role: Whose records: `"upper"`, `"lower"` or `"records"`.
        size: The planned number of records $n$.
        clip_norm: $C$, the bound on one record's value in $\ell_2$; traced inside a
            compiled step.
        sampling: How its batch is drawn.
        randomized: Whether the function that it reads takes `Keyed` records.
    """

    role: str
    size: int
    clip_norm: float | Float[Array, ""]
    sampling: AbstractSampling = dataclasses.field(default_factory=FullBatch)
    randomized: bool = False

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
        """Make a query with the clip norm that gives one record this contribution."""
        return cls(role, size, contribution * sampling.denominator(size), sampling)

    @property
    def contribution(self) -> float:
        """Largest change of the mean by one record: clip norm over denominator."""
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
        """Return a `Bounded` clipped mean of a per-record function on a fresh batch.

        Args:
            fun: Maps one record to a pytree.
            records: All records of the role.
            precision: How they are summed, as in `clipped_mean`.
            key: A typed key for the batch and the losses, if one of them is drawn.
            neighbours: The relation of the release, as in `clipped_mean`.
            index: The number of the batch in the run, for samplings that are numbered.

        Privacy:
            Sealed with this query's `contribution`.
        """
        if self.randomized:
            key, key_loss = derive(check_key(key), "sampling", "loss")
            fun, records = with_keys(fun, records, key=key_loss)
        batch = self.sampling.draw(records, self.size, key=key, index=index)
        options: Any = {"precision": precision, "neighbours": neighbours}
        return clipped_mean(fun, batch, clip_norm=self.clip_norm, **options)


class Costs(NamedTuple):
    """The cost of a release of a certified query, as fields of a `Release`."""

    queries: tuple[Query, ...]
    basis: Basis
    value_norm: float
    joint: bool = False


class AbstractCertifiedQuery(abc.ABC):
    """A read of records and its cost, bounded by a proof and not by clipping.

    Its value is no sum over records. One proof bounds what a record of any role does to
    it, so that one object has the costs of all roles.
    """

    @abc.abstractmethod
    def costs(self, precision: Precision) -> Costs:
        """Return the `Costs` that the ledger lists: each role's largest contribution.

        Raises:
            ValueError: The problem lacks what the proof needs, or the default
                floating-point dtype is too coarse for it.
        """

    @abc.abstractmethod
    def read(
        self,
        point: Any,
        data: PyTree,
        *,
        precision: Precision,
        key: PRNGKey | None,
        index: Index = None,
    ) -> Bounded:
        """Return the value as `Bounded`, sealed with its contribution at the point.

        That is a multiple of the listed ones, the same for every role and at least what
        a record of any role contributes there: disjoint people are charged by the
        listed shares. It may exceed their sum where the point is coarser than planned.
        The point is released or public. In precision `"grid"` the value is rounded to a
        public grid.
        """


def of_role(data: PyTree, role: str) -> PyTree:
    """Return the part of `data`, or of sizes, that belongs to a role."""
    return data if role == RECORDS else getattr(data, role)


def check_rows(role: str, records: PyTree, size: int, neighbours: Neighbours) -> None:
    """Raise `ValueError` if the number of rows does not fit a plan for `size` records.

    Only shapes are read. Under replace-one there are no more rows than planned; fewer
    are covered, because means are divided by the planned number. Under
    add-or-remove-one the number of records is private and what is released depends on
    the number of rows, so records are padded to the rows of the plan.

    Raises:
        ValueError: The rows do not fit the plan.
    """
    name = "data" if role == RECORDS else f"data.{role}"
    rows = _checks.leading_axis(name, shapes_of(unpacked(records)[0]))
    if neighbours is Neighbours.REPLACE_ONE:
        if rows > size:
            raise ValueError(
                f"step: the plan is for {size} records in {name}, got {rows} rows."
            )
        return
    least = padded_rows(size)
    # Rows on several devices are padded to whole blocks on each of them.
    fits = least <= rows < least + BLOCK * jax.device_count()
    if not isinstance(records, Padded | OnDisk) or not fits:
        raise ValueError(
            f"step: {name} is not padded to {least} rows; use dpbilevel.advance."
        )
