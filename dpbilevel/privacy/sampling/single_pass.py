"""Disjoint batches: every record is read once a pass."""

from typing import ClassVar

import jax.numpy as jnp
from typing_extensions import override

from .._lazy import dp_accounting
from ..budget import Neighbours
from .base import Batch
from .fixed_size import AbstractFixedBatch


class SinglePass(AbstractFixedBatch):
    r"""Disjoint batches: every record is in one of them, at most.

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
        """The number of batches of a pass over `size` planned records.

        Raises:
            ValueError: There are fewer records than a batch holds.
        """
        self._check_fits(size)
        return size // self.size

    def draw(self, records, size, *, key, index=None) -> Batch:
        """Returns batch `index`, modulo their number; the key is not used.

        Raises:
            ValueError: No `index`: the solver does not number its batches.
        """
        if index is None:
            raise ValueError(
                "SinglePass.draw: needs index=, the number of the batch in the run."
            )
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
        """One release a pass, for the passes that `count` batches begin."""
        return -(-count // self.batches(size))

    @override
    def failure(self, neighbours: Neighbours, size: int) -> float:
        return 0.0
