"""The values that a search may give a parameter."""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float

from .. import _checks


@dataclasses.dataclass(frozen=True)
class Range:
    """The values a parameter may take: an interval, public and fixed in advance.

    Args:
        low: The smallest value.
        high: The largest one.
        log: Whether the search moves in the value's logarithm.
        size: The length of a vector parameter, searched coordinate by coordinate;
            `None` for a number.
        integer: Whether the value is rounded to a whole number. Losses then do not
            tell a slope between two of them: for `RandomSearch`, or for ranges that
            are wide.

    Raises:
        ValueError: The ends are not finite and increasing, not positive with `log`, or
            not whole with `integer`.
    """

    low: float
    high: float
    log: bool = False
    size: int | None = None
    integer: bool = False

    def __post_init__(self):
        ends = (self.low, self.high)
        finite = all(_checks.concrete(v) and math.isfinite(v) for v in ends)
        if not (finite and self.low < self.high):
            raise ValueError(
                "Range: low and high must be finite and increasing numbers, got "
                f"{self.low!r} and {self.high!r}."
            )
        if self.log and self.low <= 0:
            raise ValueError(f"Range: log=True needs low above 0, got {self.low!r}.")
        if self.integer and not all(float(v).is_integer() for v in ends):
            raise ValueError(
                f"Range: integer=True needs whole ends, got {self.low!r} and "
                f"{self.high!r}."
            )
        if self.size is not None:
            _checks.count("Range", size=self.size)

    @property
    def coordinates(self) -> int:
        """How many coordinates of the search it takes."""
        return 1 if self.size is None else self.size

    def value(self, position: Float[np.ndarray, " c"]) -> float | int | np.ndarray:
        """The parameter at coordinates in [-1, 1].

        Args:
            position: Its coordinates.
        """
        low, high = self._ends
        inner = low + (np.asarray(position, np.float64) + 1) / 2 * (high - low)
        found = np.exp(inner) if self.log else inner
        found = np.clip(np.rint(found) if self.integer else found, self.low, self.high)
        found = found.astype(int) if self.integer else found
        return found[0].item() if self.size is None else found

    def position(self, value: Any) -> Float[np.ndarray, " c"]:
        """The coordinates in [-1, 1] of a parameter; the converse of `value`.

        Args:
            value: A number, or for a vector one number or as many as it has.

        Raises:
            ValueError: It is no number in the range.
        """
        if value not in self:
            raise ValueError(
                f"Range: {value!r} is not in the range from {self.low} to {self.high}."
            )
        low, high = self._ends
        inner = np.log(value) if self.log else np.asarray(value, np.float64)
        return np.broadcast_to(2 * (inner - low) / (high - low) - 1, self.coordinates)

    def __contains__(self, value: Any) -> bool:
        """Whether a value, or every entry of a vector, is a number in the range."""
        if isinstance(value, bool):
            return False
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            return False
        fits = numbers.shape in ((), (self.coordinates,) * (self.size is not None))
        return fits and bool(np.all((self.low <= numbers) & (numbers <= self.high)))

    @property
    def _ends(self) -> tuple[float, float]:
        # Half a step more at the ends, so that every whole number has its share.
        margin = 0.5 if self.integer else 0.0
        ends = self.low - margin, self.high + margin
        low, high = (math.log(v) if self.log else v for v in ends)
        return low, high
