"""Search spaces: ranges and categories on coordinates in [-1, 1]."""

import dataclasses
import graphlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from .. import _checks

Point = Float[np.ndarray, " d"]


@dataclasses.dataclass(frozen=True)
class Range:
    """A public interval of values of a parameter.

    Args:
        low: The smallest value.
        high: The largest one.
        log: Whether the search moves in the value's logarithm.
        size: Length of a vector parameter, with one coordinate per entry; `None` for a
            number.
        integer: Whether the value is rounded to a whole number. Losses then have no
            slopes between whole numbers, so use `RandomSearch` or wide ranges.
        when: Condition under which the parameter is set: for each `Categorical` named,
            the choices that it may have, as `{"kernel": "rbf"}` or `{"kernel": ["rbf",
            "poly"]}`. Otherwise the estimator's own value stays.

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
            raise ValueError(f"Range: ends must be finite and increasing, got {ends}.")
        if self.log and self.low <= 0:
            raise ValueError(f"Range: log=True needs low above 0, got {self.low!r}.")
        if self.integer and not all(float(v).is_integer() for v in ends):
            raise ValueError(f"Range: integer=True needs whole ends, got {ends}.")
        if self.size is not None:
            _checks.count("Range", size=self.size)

    @property
    def coordinates(self) -> int:
        """Number of coordinates of the parameter."""
        return 1 if self.size is None else self.size

    def value(self, position: Float[np.ndarray, " c"]) -> float | int | np.ndarray:
        """Return the parameter's value at coordinates in [-1, 1].

        Args:
            position: Its coordinates.
        """
        low, high = self._ends
        inner = low + (np.asarray(position, np.float64) + 1) / 2 * (high - low)
        values = np.exp(inner) if self.log else inner
        values = np.rint(values) if self.integer else values
        values = np.clip(values, self.low, self.high)
        values = values.astype(int) if self.integer else values
        return values[0].item() if self.size is None else values

    def position(self, value: Any) -> Float[np.ndarray, " c"]:
        """Return the coordinates in [-1, 1] of a value; the inverse of `value`.

        Args:
            value: A number, or for a vector one number or one per entry.

        Raises:
            ValueError: The value is no number in the range.
        """
        if value not in self:
            raise ValueError(f"Range: {value!r} is not in {self.low, self.high}.")
        low, high = self._ends
        inner = np.log(value) if self.log else np.asarray(value, np.float64)
        return np.broadcast_to(2 * (inner - low) / (high - low) - 1, self.coordinates)

    def __contains__(self, value: Any) -> bool:
        """Return whether a value, or every entry of a vector, is in the range."""
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
        # Half a step beyond the ends, so that all whole numbers have equal parts.
        margin = 0.5 if self.integer else 0.0
        ends = self.low - margin, self.high + margin
        low, high = (math.log(v) if self.log else v for v in ends)
        return low, high


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Public, unordered choices of a parameter.

    Args:
        choices: Two or more different texts, numbers, `None` or estimators.
        when: Condition under which the parameter is set, as in `Range`.

    Raises:
        TypeError: `choices` is no sequence, or its entries cannot be compared, such as
            arrays; or `when` is no dictionary.
        ValueError: There are fewer than two choices, or two are equal.
    """

    coordinates: ClassVar[int] = 1  # of the parameter, as in `Range`
    choices: Sequence[Any] = dataclasses.field(hash=False)
    when: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self):
        _check_condition("Categorical", self.when)
        choices = self.choices
        if not isinstance(choices, list | tuple | range):
            got = _checks.shown(choices)
            raise TypeError(f"Categorical: choices must be a list, got {got}.")
        object.__setattr__(self, "choices", tuple(choices))
        if len(choices) < 2:
            raise ValueError(f"Categorical: needs two choices, got {list(choices)}.")
        for number, choice in enumerate(choices):
            if any(_same(choice, other) for other in choices[:number]):
                raise ValueError(f"Categorical: {choice!r} is given twice.")

    def value(self, position: Float[np.ndarray, " 1"]) -> Any:
        """Return the choice at a coordinate in [-1, 1]; all choices have equal parts.

        Args:
            position: Its coordinate.
        """
        return self.choices[self.index(position)]

    def index(self, position: Float[np.ndarray, " 1"]) -> int:
        """Return the index of the choice at a coordinate.

        Args:
            position: Its coordinate.
        """
        count = len(self.choices)
        (place,) = np.asarray(position, np.float64)
        return int(np.clip(np.floor((place + 1) / 2 * count), 0, count - 1))

    def center(self, index: int) -> float:
        """Return the middle coordinate of the part of [-1, 1] that a choice has.

        Args:
            index: The index of the choice.
        """
        return (2 * index + 1) / len(self.choices) - 1

    def position(self, value: Any) -> Float[np.ndarray, " 1"]:
        """Return the coordinate of a choice, as an array of one; inverse to `value`.

        Args:
            value: The choice.

        Raises:
            ValueError: There is no such choice.
        """
        for index, choice in enumerate(self.choices):
            if _same(choice, value):
                return np.asarray([self.center(index)])
        raise ValueError(f"Categorical: {value!r} is not among the choices.")

    def __contains__(self, value: Any) -> bool:
        """Return whether a value is one of the choices."""
        return any(_same(choice, value) for choice in self.choices)


def _same(choice: Any, other: Any) -> bool:
    """Return whether two choices are equal; `True` and 1 are different."""
    if choice is other:
        return True
    if isinstance(choice, bool) != isinstance(other, bool):
        return False
    try:
        return bool(choice == other)
    except ValueError:
        pair = f"{_checks.shown(choice)} and {_checks.shown(other)}"
        raise TypeError(f"Categorical: {pair} cannot be compared.") from None


def _check_condition(owner: str, when: Any) -> None:
    if when is not None and (not isinstance(when, Mapping) or not when):
        got = _checks.shown(when)
        raise TypeError(f"{owner}: when must be a dictionary of choices, got {got}.")


class Space:
    """The box [-1, 1]^d of parameters by name, each with coordinates of its own.

    A branch is the part of the space in which the active categories are the same; its
    middle has all other coordinates at zero. In `names` a parameter stands after those
    in its condition.
    """

    def __init__(self, entries: Mapping[str, Range | Categorical]):
        self.entries = dict(entries)
        self.categories = {
            k: v for k, v in entries.items() if isinstance(v, Categorical)
        }
        self._places: dict[str, slice] = {}
        self.coordinates = 0
        for name, entry in self.entries.items():
            kinds = Range | Categorical
            _checks.instance("PrivateSearch", kinds, **{f"space[{name!r}]": entry})
            begin = self.coordinates
            self.coordinates += entry.coordinates
            self._places[name] = slice(begin, self.coordinates)
        self._allowed = {name: self._conditions(name) for name in self.entries}
        parents = {name: set(allowed) for name, allowed in self._allowed.items()}
        try:
            self.names = list(graphlib.TopologicalSorter(parents).static_order())
        except graphlib.CycleError as error:
            names = sorted(set(error.args[1]))
            raise ValueError(f"PrivateSearch: when= of {names} is circular.") from None
        self._active_points = {name: self._active_point(name) for name in self.names}

    def parameters(self, point: Point) -> dict[str, Any]:
        """Return a dict of the parameters at a point whose conditions hold."""
        active = self._active(point)
        return {
            name: entry.value(np.asarray(point)[self._places[name]])
            for name, entry in self.entries.items()
            if active[name]
        }

    def position(self, parameters: Mapping[str, Any]) -> Point:
        """Return a point with named parameters at given values, others at middles."""
        unknown = sorted(parameters.keys() - self.entries.keys())
        if unknown:
            names = sorted(self.entries)
            raise ValueError(f"PrivateSearch: space has {names}, no {unknown[0]!r}.")
        point = np.zeros(self.coordinates)
        for name, value in parameters.items():
            point[self._places[name]] = self.entries[name].position(value)
        return point

    def middle(self, point: Point) -> Point:
        """Return the middle of a point's branch: choices at centers, the rest at 0."""
        active = self._active(point)
        indices = {n: self._index(n, point) for n in self.categories if active[n]}
        return self._centers(indices)

    def middles(self) -> list[Point]:
        """Return a list of the middles of branches in which every choice occurs."""
        middles = [self.middle(np.zeros(self.coordinates))]
        for name, entry in self.categories.items():
            for index in range(len(entry.choices)):
                point = self._active_points[name].copy()
                point[self._places[name]] = entry.center(index)
                middles.append(self.middle(point))
        return list({point.tobytes(): point for point in middles}.values())

    def within(self, name: str) -> Point:
        """Return the middle of a branch in which a parameter's condition holds."""
        return self.middle(self._active_points[name])

    def _conditions(self, name: str) -> dict[str, set[int]]:
        """Return a dict by category: indices of the choices that a condition allows."""
        allowed = {}
        for other, values in (self.entries[name].when or {}).items():
            entry = self.categories.get(other)
            if entry is None:
                raise ValueError(
                    f"PrivateSearch: {name!r} depends on {other!r}, no Categorical."
                )
            several = isinstance(values, list | tuple) and values not in entry
            chosen = list(values) if several else [values]
            if not chosen or any(value not in entry for value in chosen):
                raise ValueError(
                    f"PrivateSearch: the condition of {name!r} must be choices of "
                    f"{other!r}, {list(entry.choices)}, got {values!r}."
                )
            allowed[other] = {entry.index(entry.position(v)) for v in chosen}
        return allowed

    def _active(self, point: Point) -> dict[str, bool]:
        """Return a dict by name: whether a parameter's condition holds at a point."""
        active: dict[str, bool] = {}
        for name in self.names:
            active[name] = all(
                active[other] and self._index(other, point) in indices
                for other, indices in self._allowed[name].items()
            )
        return active

    def _active_point(self, name: str) -> Point:
        """Return a point at which a parameter's condition holds; raise if none does."""
        above = [name]
        for other in above:  # grows by the categories in the conditions
            above += [v for v in self._allowed[other] if v not in above]
        above = above[1:]
        counts = (len(self.categories[other].choices) for other in above)
        for indices in itertools.product(*map(range, counts)):
            point = self._centers(dict(zip(above, indices, strict=True)))
            if self._active(point)[name]:
                return point
        raise ValueError(f"PrivateSearch: the condition of {name!r} never holds.")

    def _centers(self, indices: dict[str, int]) -> Point:
        """Return a point with choices at their centers and other coordinates zero."""
        point = np.zeros(self.coordinates)
        for name, index in indices.items():
            point[self._places[name]] = self.categories[name].center(index)
        return point

    def _index(self, name: str, point: Point) -> int:
        return self.categories[name].index(np.asarray(point)[self._places[name]])
