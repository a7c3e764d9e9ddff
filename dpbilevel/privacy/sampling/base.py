"""Batch sampling: how a batch is drawn, and the event that accounts for it."""

import abc
import bisect
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import scipy
from jaxtyping import Array, Bool, Int, PyTree
from typing_extensions import override

from ... import _checks
from ..._extras import dp_accounting
from ..budget import Neighbours
from ..keys import PRNGKey, check_key, derive
from ..records.disk import taken
from ..records.rows import BLOCK, Shards, padded_rows, shapes_of, unpacked

# The probability, per draw, that a batch exceeds the default capacity. Ten million
# draws cost less than a thousandth of a delta of 1e-15 at epsilon 22, of 1e-6 at
# epsilon 43.
OVERFLOW = 2.0**-116

Index = int | Int[Array, ""] | None


class Batch(eqx.Module):
    """Records drawn for one query, with their mask and public denominator.

    Attributes:
        records: A pytree with a leading axis of fixed length. Rows that are no records
            hold NaN, and zero where they are not floating point.
        mask: Which rows are records; `None` when all are.
        denominator: The fixed public number that sums are divided by.
        rows_fixed: Whether a record that is in the batch or not leaves all others in
            their rows. Static.
        size: How many rows may be records, where those after them only make parts on
            several devices equal. Static.
        shards: How the rows are spread over devices, where that is known. Static.
        key: A typed key that `clipped_mean` may draw other rows by, if any.
    """

    records: PyTree
    mask: Bool[Array, " n"] | None
    denominator: float
    rows_fixed: bool = eqx.field(static=True, default=True)
    size: int | None = eqx.field(static=True, default=None)
    shards: Shards | None = eqx.field(static=True, default=None)
    key: PRNGKey | None = None


class AbstractSampling(_checks.Checked):
    """A sampling scheme: how a batch is drawn, and the event that accounts for it.

    Attributes:
        needs_key: Whether `draw` draws at random.
        numbered: Whether a batch depends on its number in the run, so that only solvers
            that number their batches can use it.
        per_epoch: Whether the batches of a pass are drawn at once, so that only solvers
            that draw whole passes can use it.
        assumptions: What its accounting assumes.
    """

    needs_key: ClassVar[bool] = True
    numbered: ClassVar[bool] = False
    per_epoch: ClassVar[bool] = False
    assumptions: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def draw(
        self, records: PyTree, size: int, *, key: PRNGKey | None, index: Index = None
    ) -> Batch:
        """Draw one `Batch` of the records.

        Args:
            records: All records, with a common leading axis, `Padded` or `OnDisk`.
            size: The planned, public number of records.
            key: A typed key for this draw alone, as secret as the noise's; or `None`.
            index: The number of the batch in the run, from 0; read by schemes that are
                `numbered`.
        """

    @abc.abstractmethod
    def rows(self, size: int) -> int:
        """Return the largest number of records in a batch from `size` records."""

    @abc.abstractmethod
    def denominator(self, size: int) -> float:
        """Return the public number that a batch's sum is divided by."""

    @abc.abstractmethod
    def event(
        self, event: "dp_accounting.DpEvent", neighbours: Neighbours, size: int
    ) -> "dp_accounting.DpEvent":
        """Return the event of one release of a batch drawn this way.

        Args:
            event: The event of the release of a given batch. It refers to the
                sensitivity under `neighbours` of the batch's clipped mean, that is 2C
                or C over the denominator.
            neighbours: The relation.
            size: The planned number of records.

        Raises:
            ValueError: No accountant supports this scheme under `neighbours`.
        """

    def in_pass(self, records: PyTree, *, key: PRNGKey) -> "AbstractSampling":
        """Return a copy with a pass's batches drawn if `per_epoch`, else the scheme.

        The key is for this pass alone.
        """
        return self

    def charged(self, count: int, size: int) -> int:
        """Return how many of `count` releases of a run a record is charged for.

        All of them, unless a record is known to be in few batches. Each release reads a
        batch of its own.
        """
        return count

    @abc.abstractmethod
    def failure(self, neighbours: Neighbours, size: int) -> float:
        """Return a bound on the chance, per draw, of a batch not drawn as accounted."""


class FullBatch(AbstractSampling):
    """Batches of all records: no amplification, any relation."""

    needs_key: ClassVar[bool] = False

    def draw(self, records, size, *, key, index=None) -> Batch:
        """Return a `Batch` of all records, with the key if one is given."""
        records, present = unpacked(records)
        return Batch(records, present, self.denominator(size), key=key)

    @override
    def rows(self, size: int) -> int:
        return size

    @override
    def denominator(self, size: int) -> float:
        return float(size)

    @override
    def event(self, event, neighbours, size):
        return event

    @override
    def failure(self, neighbours: Neighbours, size: int) -> float:
        return 0.0


class Poisson(AbstractSampling):
    r"""Batches that include every record independently with probability `rate`.

    The batch has a fixed shape, of room for `capacity` records, and a mask. A draw of
    more records drops the last ones; the probability of that event over the run is
    added to $\delta$ (times $1 + e^\varepsilon$), so a truncated draw never goes
    unaccounted.
    Sums are divided by the public `rate * size`.

    Args:
        rate: In (0, 1); realised to 32 bits, and accounted for as realised. Static.
        capacity: The most records of a batch, whose rows are the next multiple of 64.
            The overflow probability is bounded for the rows that records are padded to,
            which are at least as many as the records. The default is the smallest
            multiple of 64 that overflows with probability at most 2^-116 a draw, by a
            tail bound.
    """

    rate: _checks.PoissonRate = eqx.field(static=True)
    capacity: _checks.Count | None = eqx.field(static=True, default=None)

    @property
    def realised_rate(self) -> float:
        """Probability of inclusion as drawn, a multiple of 2**-32."""
        return self._threshold / 2**32

    @property
    def _threshold(self) -> int:
        return min(max(math.ceil(self.rate * 2**32), 1), 2**32 - 1)

    @override
    def rows(self, size: int) -> int:
        return self.capacity or batch_capacity(padded_rows(size), self.realised_rate)

    def draw(self, records, size, *, key, index=None) -> Batch:
        """Draw a `Batch` of fixed shape, with a mask; records without room are dropped.

        Rows that are chosen keep their places whether or not they are records, so
        that a record less moves no other.

        Raises:
            ValueError: There are more rows than planned for a given `capacity`.
        """
        records, present = unpacked(records)
        n = _checks.leading_axis("Poisson: records", shapes_of(records))
        if self.capacity is not None and n > padded_rows(size):
            raise ValueError(
                f"Poisson: capacity={self.capacity} is for {size} records, got {n} "
                "rows. Calibrate for them, or leave capacity out."
            )
        key_members, key_rows = derive(check_key(key), "sampling", "rows")
        bits = jax.random.bits(key_members, (n,), jnp.uint32)
        chosen = bits < jnp.uint32(self._threshold)  # integers: the rate is exact
        most = self.rows(size)
        if most == padded_rows(size):  # no overflow is accounted for
            most = max(n, most)  # more on several devices
        elif self.capacity is None:
            most = batch_capacity(max(n, padded_rows(size)), self.realised_rate)
        count = self.denominator(size)
        return masked_batch(records, present, chosen, most, count, key=key_rows)

    def denominator(self, size: int) -> float:
        """Return the expected number of records in a batch."""
        return self.realised_rate * size

    @override
    def event(self, event, neighbours, size):
        return dp_accounting.PoissonSampledDpEvent(self.realised_rate, event)

    def failure(self, neighbours: Neighbours, size: int) -> float:
        """Return a bound on the probability that more rows are chosen than have room.

        The rows are those that `size` records are padded to, under both relations.
        """
        rows = padded_rows(size)
        if self.capacity is None:
            return OVERFLOW if self.rows(size) < rows else 0.0
        return float(scipy.stats.binom(rows, self.realised_rate).sf(self.capacity))


def batch_capacity(trials: int, rate: float) -> int:
    r"""Return a batch size that is exceeded with probability at most `OVERFLOW`.

    By Chernoff's bound: of $n$ members $k$ or more come with probability at most
    $e^{-n \,\mathrm{KL}(k / n \| q)}$ where $k \ge n q$.

    Returns:
        The smallest multiple of 64 by the bound, at most that of all members.
    """
    blocks = range(1, -(-trials // BLOCK))

    def fits(block: int) -> bool:
        part = (block * BLOCK + 1) / trials
        gap = scipy.special.kl_div([part, 1 - part], [rate, 1 - rate]).sum()
        return part > rate and trials * gap >= -math.log(OVERFLOW)

    return (bisect.bisect_left(blocks, True, key=fits) + 1) * BLOCK


def masked_batch(
    records: PyTree,
    present: Bool[Array, " n"] | None,
    chosen: Bool[Array, " n"],
    most: int,
    denominator: float,
    *,
    key: PRNGKey | None = None,
) -> Batch:
    """Return a `Batch` of the first `most` chosen rows, with a mask.

    Rows that are not `present` are no records; `None` if all are.
    """
    n = len(chosen)
    # Slots beyond those of the chosen rows are filled with nothing, up to whole
    # blocks: in others a row that is moved on may be rounded otherwise.
    members = jnp.flatnonzero(chosen, size=most, fill_value=n)
    members = jnp.pad(members, (0, -most % BLOCK), constant_values=n)
    batch, members, mask, shards = taken(records, present, members)
    # A record that is drawn moves all that come after it by a row.
    return Batch(batch, mask, denominator, False, most, shards, key)


def check_sampling(owner: str, sampling: AbstractSampling, numbers: bool) -> None:
    """Raise an error if the solver `owner` cannot draw batches by a sampling scheme.

    Only a solver that `numbers` its batches can use a scheme that is `numbered`.

    Raises:
        TypeError: `sampling` is no scheme.
        ValueError: Its batches are drawn for whole passes, or it needs the number of
            the batch, which the solver does not give.
    """
    _checks.instance(owner, AbstractSampling, sampling=sampling)
    name = type(sampling).__name__
    if sampling.per_epoch:
        raise ValueError(
            f"{owner}: {name} needs a solver that draws whole passes, AllocatedGD. Use "
            "Poisson, FixedSize or FullBatch."
        )
    if sampling.numbered and not numbers:
        raise ValueError(
            f"{owner}: {name} needs a solver that numbers its batches, as "
            "NoisyExtragradient does. Use Poisson, FixedSize or FullBatch."
        )
