"""Typical length of rows, from a release before the fit.

Declared bounds admit rows far longer than the rows of the records. Noise and clip norm
are in proportion to the unit of rows, so a unit that fits the records is worth more
than the part of the budget that it costs.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from typing_extensions import override

from ..core.usability import released_mean
from ..privacy.noise import PRNGKey
from ..privacy.records.people import on_rows
from .declared import Frame
from .public_size import AbstractBeforehand, Terms

PART = 0.02  # of the squared budget
SHORT = 1 / 8  # of the longest row; shorter rows are warned of
# Number of bins of lengths, longest rows first, each shorter than the one before by the
# square root of 2.
_BINS = 14
_LONGER = 0.25  # fraction of rows that are longer than the unit
_LEAST = 0.25  # fraction of rows that must count
_MOST_NOISE = 0.1  # noise of a fraction; with more of it the declared unit is kept


@dataclasses.dataclass(frozen=True)
class Lengths(AbstractBeforehand):
    """A planned release of the fraction of rows in each bin of lengths.

    Attributes:
        rows: Records of features in units of a `Frame`, in the planned number; NaN for
            rows that do not count. NON-PRIVATE.
        longest: Length of the longest declared row.
    """

    rows: Any
    longest: float

    @property
    @override
    def terms(self) -> Terms:
        return Terms("lengths of rows", (PART, PART), _MOST_NOISE, _MOST_NOISE)

    def typical_length(self, *, key: PRNGKey, owner: str) -> float:
        """Release the length that a quarter of the rows that count exceed.

        Args:
            key: A typed key for this release alone.
            owner: Name for error messages.

        Returns:
            A fraction of the longest row, from 1 down to 1/128; NaN without a
            release, or if hardly any row counts.

        Privacy:
            The one release of `release`: the mean of rows of zeros with one 1 at most.
        """
        if self.release is None:
            return math.nan
        bins = self.public.combined(lambda v: in_bins(v / self.longest), self.rows)
        fractions = released_mean(self.release, bins, key=key, owner=owner)
        longer = np.cumsum(np.asarray(fractions, float))
        if longer[-1] < _LEAST:
            return math.nan
        wanted = _LONGER * min(longer[-1], 1.0)
        place = int(np.argmax(longer >= wanted))
        before = longer[place - 1] if place else 0.0
        part = (wanted - before) / (longer[place] - before)
        return 2 ** (-(place + part) / 2)

    def unit(self, length: float) -> float:
        """Return the released length in units of the frame; 1 without a release."""
        return 1.0 if math.isnan(length) else self.longest * length

    def frame(self, units: Frame, unit: float) -> Frame:
        """Return the `Frame` of rows that are divided by a released length."""
        return dataclasses.replace(units, scale=units.scale * unit)

    def in_unit(self, records: Any, unit: float) -> Any:
        """Return records whose features are divided by a released length.

        A constant feature, which comes after them, is kept.
        """
        width = jax.tree.leaves(self.rows)[0].shape[-1]

        def divided(rows: dict[str, Any]) -> dict[str, Any]:
            features = rows["features"]
            divisor = np.ones(features.shape[-1], features.dtype)
            divisor[:width] = unit
            return rows | {"features": features / divisor}

        return on_rows(divided, records)


def in_bins(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
    """Return rows of zeros with a one in the bin of each row's length.

    A row that does not count stays all zeros.

    Args:
        rows: Rows of length 1 at most.

    Privacy:
        Row by row. NON-PRIVATE until `Lengths.typical_length` releases the mean.
    """
    counts = np.asarray(np.isfinite(rows).all(axis=1))
    length = np.linalg.norm(np.where(counts[:, None], rows, 0), axis=1)
    bins = np.floor(-2 * np.log2(np.maximum(length, 2.0**-_BINS)))
    bins = np.clip(bins, 0, _BINS - 1)
    found = (bins[:, None] == np.arange(_BINS)) & counts[:, None]
    return found.astype(np.float32)
