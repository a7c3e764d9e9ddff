"""Batches of a fixed number of records, disjoint batches, and random allocation."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import scipy
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from ... import _checks
from ..._extras import dp_accounting
from ..budget import Neighbours
from ..keys import PRNGKey, check_key
from ..records.disk import taken
from ..records.rows import padded_rows, shapes_of, unpacked
from .base import OVERFLOW, AbstractSampling, Batch, batch_capacity, masked_batch

# The chance, per draw, that a subset has too few different members.
_EXHAUSTED = 1e-30


class AbstractFixedBatch(AbstractSampling):
    """A scheme whose batches all hold `size` records.

    Attributes:
        size: Records in a batch. Static.
    """

    size: _checks.Count = eqx.field(static=True)

    @override
    def rows(self, size: int) -> int:
        return self.size

    @override
    def denominator(self, size: int) -> float:
        return float(self.size)

    def _batch(self, records: PyTree, members: Int[Array, " rows"]) -> Batch:
        owner = type(self).__name__
        _checks.leading_axis(f"{owner}: records", shapes_of(records))
        batch, padded, _, shards = taken(records, None, members)
        mask = None
        if len(padded) > self.size:
            mask = jnp.arange(len(padded)) < self.size
        return Batch(batch, mask, float(self.size), True, self.size, shards)

    def _check_fits(self, size: int) -> None:
        if self.size > size:
            raise ValueError(
                f"{type(self).__name__}: no batch of {self.size} from {size} records."
            )

    def _check_accounted(self, neighbours: Neighbours, size: int, why: str) -> None:
        """Raise `ValueError` unless `size` records fill a batch, under replace-one."""
        self._check_fits(size)
        if neighbours is not Neighbours.REPLACE_ONE:
            raise ValueError(
                f"{type(self).__name__} batches are accounted under "
                f"Neighbours.REPLACE_ONE only: {why}. Use Poisson(rate) or replace-one."
            )


class FixedSize(AbstractFixedBatch):
    """Batches of `size` records, drawn uniformly without replacement.

    Replace-one only: the batch size is fixed only while the number of records is.
    Not interchangeable with Poisson: the other records in the batch show whether a
    record was left out, so it has its own, larger privacy loss.

    Args:
        size: Records in a batch, at most the number of records. Static.
    """

    def draw(self, records, size, *, key, index=None) -> Batch:
        """Draw a `Batch` of `self.size` different records, uniformly.

        The cost of a small batch grows with its size alone.
        """
        self._check_fits(size)
        key = check_key(key)
        if self._is_small(size):  # the first different ones of some more draws
            drawn = jax.random.randint(key, (self._tries(size),), 0, size, jnp.int32)
            order = jnp.argsort(drawn, stable=True)  # of equals the first drawn leads
            ordered = drawn[order]
            new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
            first = jnp.zeros(len(drawn), bool).at[order].set(new)
            members = drawn[jnp.flatnonzero(first, size=self.size, fill_value=0)]
        else:
            members = jax.random.permutation(key, size)[: self.size]
        return self._batch(records, members)

    def event(self, event, neighbours, size) -> "dp_accounting.DpEvent":
        """Return the event of a release, as of a batch sampled without replacement.

        Raises:
            ValueError: The relation is add-or-remove-one, or the batch is larger than
                the data.
        """
        why = "a record more or less gives a subset of fixed size other members"
        self._check_accounted(neighbours, size, why)
        return dp_accounting.SampledWithoutReplacementDpEvent(size, self.size, event)

    def failure(self, neighbours: Neighbours, size: int) -> float:
        """Return a bound on the chance that a small batch has too few members."""
        return _EXHAUSTED if self._is_small(size) else 0.0

    def _is_small(self, size: int) -> bool:
        return self.size <= size // 4

    def _tries(self, size: int) -> int:
        """Return how many draws find `self.size` different members, but for `failure`.

        While fewer are found, a draw repeats an earlier one with probability
        (self.size - 1) / size at most.
        """
        repeated, spare = (self.size - 1) / size, 1
        while scipy.stats.binom(self.size + spare, repeated).sf(spare) > _EXHAUSTED:
            spare += 1 + spare // 8
        return self.size + spare


class SinglePass(AbstractFixedBatch):
    r"""Disjoint batches: every record is in at most one of them.

    With $k = \lfloor n / B \rfloor$ batches, batch $t$ has the records $t, t + k, t +
    2 k, \dots$; the last $n - k B$ records are in none. After a pass the next one
    begins with the same batches.

    The order of the records must not depend on their values: in a file sorted by a
    private column, one replaced record moves others to other batches. Shuffle such
    records first, with fresh randomness.

    Replace-one only: with a record less, the others would move to other batches.

    Args:
        size: $B$, records in a batch, at most the number of records. Static.

    Privacy:
        By parallel composition a record is charged for the releases of its own batch
        alone, one a pass, although later batches are read at points that depend on
        earlier releases.

    References:
        McSherry, "Privacy integrated queries", 2009, Theorem 4.
    """

    needs_key: ClassVar[bool] = False
    numbered: ClassVar[bool] = True
    assumptions: ClassVar[tuple[str, ...]] = (
        "single pass: the place of a record does not depend on the values of any; "
        "records sorted by a private column are shuffled first",
    )

    def batches(self, size: int) -> int:
        """Return the number of batches of a pass over `size` planned records.

        Raises:
            ValueError: There are fewer records than a batch holds.
        """
        self._check_fits(size)
        return size // self.size

    def draw(self, records, size, *, key, index=None) -> Batch:
        """Return the `Batch` of number `index` modulo `batches`; the key is not used.

        Raises:
            ValueError: No `index`: the solver does not number its batches.
        """
        if index is None:
            raise ValueError("SinglePass.draw: needs index=, the number of the batch.")
        count = self.batches(size)
        # The records t, t + k, t + 2 k, ...
        members = index % count + count * jnp.arange(self.size, dtype=jnp.int32)
        return self._batch(records, members)

    def event(self, event, neighbours, size) -> "dp_accounting.DpEvent":
        """Return the event unchanged: it is for the records of the batch.

        Raises:
            ValueError: The relation is add-or-remove-one, or the batch is larger than
                the data.
        """
        why = "a record less moves others to other batches"
        self._check_accounted(neighbours, size, why)
        return event

    def charged(self, count: int, size: int) -> int:
        """Return the number of passes that `count` batches begin: a charge for each."""
        return -(-count // self.batches(size))

    @override
    def failure(self, neighbours: Neighbours, size: int) -> float:
        return 0.0


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
    """Batches of a pass in which every record is in one, uniformly and independently.

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
        n = _checks.leading_axis("RandomAllocation: records", shapes_of(records))
        places = jax.random.randint(check_key(key), (n,), 0, self.batches)
        return dataclasses.replace(self, places=places)

    def draw(self, records, size, *, key, index=None) -> Batch:
        """Return the `Batch` of number `index` modulo `batches`, of the pass drawn.

        Raises:
            ValueError: No `index`, or no pass: the solver does not draw passes.
        """
        if index is None or self.places is None:
            raise ValueError("RandomAllocation: needs a pass; use AllocatedGD.")
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
