"""Passes whose records are spread over the batches at random."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from ... import _checks
from ..._extras import dp_accounting
from ..budget import Neighbours
from ..noise import PRNGKey, check_key
from ..records.rows import padded_rows, unpacked
from .base import OVERFLOW, AbstractSampling, Batch, batch_capacity, masked_batch

# `jax.random.randint` reads 64 bits for spans up to here, and 32 beyond.
MOST_BATCHES = 2**16


@dataclasses.dataclass(frozen=True)
class RandomAllocationEvent:
    """One pass of Gaussian releases, a record in one of them.

    Attributes:
        batches: Releases of the pass.
        event: The release of one batch.
    """

    batches: int
    event: "dp_accounting.DpEvent"


class RandomAllocation(AbstractSampling):
    r"""Batches of a pass with every record in one, uniformly and independently.

    Batches of a pass differ in size. They have room for as many records as are outgrown
    with probability at most $2^{-116}$, which is counted, and a mask; sums are divided
    by the public $n / t$.

    Args:
        batches: $t$, the batches of a pass, at most 65 536. Static.
        places: The batch of every row in one pass, as secret as the noise; set by
            `in_pass`.

    Privacy:
        Which batch a record is in is secret, and amplifies privacy about as much as
        Poisson batches of rate $1 / t$ do over $t$ steps. Under both relations.

    References:
        Feldman and Shenfeld, "Privacy amplification by random allocation", NeurIPS
        2025; Chua et al., "Balls-and-bins sampling for DP-SGD", AISTATS 2025.
    """

    batches: _checks.Count = eqx.field(static=True)
    places: Int[Array, " n"] | None = None
    needs_key: ClassVar[bool] = False  # but for the places of a pass
    numbered: ClassVar[bool] = True
    per_epoch: ClassVar[bool] = True

    def __check_init__(self):
        _checks.check_fields(self)
        if self.batches > MOST_BATCHES:
            raise ValueError(f"RandomAllocation: at most {MOST_BATCHES} batches.")

    @override
    def rows(self, size: int) -> int:
        return batch_capacity(padded_rows(size), 1 / self.batches)

    @override
    def in_pass(self, records: PyTree, *, key: PRNGKey) -> "RandomAllocation":
        records, _ = unpacked(records)
        n = _checks.leading_axis("RandomAllocation: records", records)
        places = jax.random.randint(check_key(key), (n,), 0, self.batches)
        return dataclasses.replace(self, places=places)

    def draw(self, records, size, *, key, index=None) -> Batch:
        """Return batch `index`, modulo their number, of the pass that was drawn.

        Raises:
            ValueError: No `index`, or no pass: the solver does not draw passes.
        """
        if index is None or self.places is None:
            raise ValueError("RandomAllocation: needs a pass; use AllocatedGD.")
        del key  # the places are drawn already
        records, present = unpacked(records)
        chosen = self.places == index % self.batches
        most = self.rows(max(len(self.places), size))
        return masked_batch(records, present, chosen, most, self.denominator(size))

    def denominator(self, size: int) -> float:
        """Return the expected number of records in a batch."""
        return size / self.batches

    def event(self, event, neighbours, size) -> Any:
        """Return the event of a whole pass, `RandomAllocationEvent`.

        Raises:
            ValueError: There are more batches than records.
        """
        del neighbours
        if self.batches > size:
            raise ValueError(f"RandomAllocation: batches must be at most {size}.")
        return RandomAllocationEvent(self.batches, event)

    def charged(self, count: int, size: int) -> int:
        """Return the number of passes that `count` batches begin."""
        return -(-count // self.batches)

    @override
    def failure(self, neighbours: Neighbours, size: int) -> float:
        # Places are 64 random bits modulo t, of which some are more frequent.
        return OVERFLOW + self.batches / 2**64
