"""The values that a search may give a parameter."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
        when: The condition under which the parameter is set, as `{"kernel": "rbf"}` or
            `{"kernel": ["rbf", "poly"]}`: for each `Categorical` named the choices that
            it may have. Elsewhere the parameter is left as the estimator has it.

    Raises:
        TypeError: `when` is no such dictionary.
        ValueError: The ends are not finite and increasing, not positive with `log`, or
            not whole with `integer`.
    """

    low: float
    high: float
    log: bool = False
    size: int | None = None
    integer: bool = False
    when: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self):
        _check_condition("Range", self.when)
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


@dataclasses.dataclass(frozen=True)
class Categorical:
    """The choices that a parameter has, in no order: public and fixed in advance.

    Args:
        choices: Two or more, no two equal: texts, numbers, `None`, estimators.
        when: As in `Range`.

    Raises:
        TypeError: `choices` is no sequence, or its entries cannot be compared, such as
            arrays; or `when` is no dictionary.
        ValueError: There are fewer than two choices, or two are equal.
    """

    choices: Sequence[Any] = dataclasses.field(hash=False)
    when: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self):
        _check_condition("Categorical", self.when)
        if not isinstance(self.choices, list | tuple | range):
            raise TypeError(
                "Categorical: choices must be a list, such as ['linear', 'rbf'], got "
                f"{_checks.shown(self.choices)}."
            )
        object.__setattr__(self, "choices", tuple(self.choices))
        if len(self.choices) < 2:
            raise ValueError(
                f"Categorical: needs at least two choices, got {list(self.choices)}; "
                "set a parameter that has one value in the estimator."
            )
        for number, choice in enumerate(self.choices):
            if any(same(choice, other) for other in self.choices[:number]):
                raise ValueError(f"Categorical: {choice!r} is given twice.")

    @property
    def coordinates(self) -> int:
        """How many coordinates of the search it takes."""
        return 1

    def value(self, position: Float[np.ndarray, " 1"]) -> Any:
        """The choice at a coordinate in [-1, 1], of which all have equal parts.

        Args:
            position: Its coordinate.
        """
        return self.choices[self.number(position)]

    def number(self, position: Float[np.ndarray, " 1"]) -> int:
        """The number of the choice at a coordinate.

        Args:
            position: Its coordinate.
        """
        count = len(self.choices)
        (place,) = np.asarray(position, np.float64)
        return int(np.clip(np.floor((place + 1) / 2 * count), 0, count - 1))

    def center(self, number: int) -> float:
        """The coordinate in the middle of the part of a choice.

        Args:
            number: The number of the choice.
        """
        return (2 * number + 1) / len(self.choices) - 1

    def position(self, value: Any) -> Float[np.ndarray, " 1"]:
        """The coordinate of a choice; the converse of `value`.

        Args:
            value: The choice.

        Raises:
            ValueError: There is no such choice.
        """
        for number, choice in enumerate(self.choices):
            if same(choice, value):
                return np.asarray([self.center(number)])
        raise ValueError(
            f"Categorical: {value!r} is not among the choices {list(self.choices)}."
        )

    def __contains__(self, value: Any) -> bool:
        """Whether a value is one of the choices."""
        return any(same(choice, value) for choice in self.choices)


def same(choice: Any, other: Any) -> bool:
    """Whether two choices are one: `True` and 1 are two.

    Raises:
        TypeError: They cannot be compared, such as arrays.
    """
    if choice is other:
        return True
    if isinstance(choice, bool) != isinstance(other, bool):
        return False
    try:
        return bool(choice == other)
    except ValueError:
        raise TypeError(
            "Categorical: choices must be values that can be compared by ==, such as "
            f"texts, numbers or tuples, got {_checks.shown(choice)} and "
            f"{_checks.shown(other)}."
        ) from None


def _check_condition(owner: str, when: Any) -> None:
    if when is None:
        return
    if not isinstance(when, Mapping) or not when:
        raise TypeError(
            f"{owner}: when must be a dictionary such as {{'kernel': 'rbf'}}, got "
            f"{_checks.shown(when)}."
        )
