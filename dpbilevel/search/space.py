"""The space of an estimator's parameters as a box of coordinates in [-1, 1]."""

import graphlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from .ranges import Categorical, Range, same

Point = Float[np.ndarray, " d"]
_EXAMPLES = (
    "Range(0.1, 10, log=True), or a Categorical, such as Categorical(['a', 'b'])"
)


class Space:
    """Parameters by name, each on coordinates of its own.

    A branch is the part of the space in which the categories that count are the same;
    its middle has all other coordinates at zero.

    Args:
        entries: A `Range` or a `Categorical` per parameter.

    Raises:
        TypeError: An entry is of another kind.
        ValueError: A condition names no category of the space, or never holds.
    """

    def __init__(self, entries: Mapping[str, Range | Categorical]):
        self.entries = dict(entries)
        self._places: dict[str, slice] = {}
        begin = 0
        for name, entry in self.entries.items():
            if not isinstance(entry, Range | Categorical):
                raise TypeError(
                    f"PrivateSearch: space[{name!r}] must be a Range, such as "
                    f"{_EXAMPLES}, got an instance of {type(entry).__name__}."
                )
            self._places[name] = slice(begin, begin + entry.coordinates)
            begin += entry.coordinates
        self.coordinates = begin
        self._allowed = {name: self._conditions(name) for name in self.entries}
        parents = {name: set(allowed) for name, allowed in self._allowed.items()}
        try:
            self._order = list(graphlib.TopologicalSorter(parents).static_order())
        except graphlib.CycleError as error:
            raise ValueError(
                f"PrivateSearch: the conditions of {sorted(set(error.args[1]))} "
                "depend on each other; leave one of them out."
            ) from None
        self._within = {name: self._found_within(name) for name in self._order}

    @property
    def names(self) -> list[str]:
        """The parameters, those that conditions are about before the others."""
        return self._order

    @property
    def categories(self) -> list[str]:
        """The parameters that are categories."""
        kinds = self.entries.items()
        return [name for name, entry in kinds if isinstance(entry, Categorical)]

    def parameters(self, point: Point) -> dict[str, Any]:
        """The parameters at a point, without those whose condition does not hold."""
        active = self._active(point)
        return {
            name: entry.value(self._own(name, point))
            for name, entry in self.entries.items()
            if active[name]
        }

    def position(self, parameters: Mapping[str, Any]) -> Point:
        """The point at parameters, others in the middle.

        Raises:
            ValueError: A name is not in the space, or a value outside of its range.
        """
        unknown = sorted(parameters.keys() - self.entries.keys())
        if unknown:
            raise ValueError(
                f"PrivateSearch: the space has no {unknown[0]!r}; it has "
                f"{sorted(self.entries)}."
            )
        point = np.zeros(self.coordinates)
        for name, value in parameters.items():
            point[self._places[name]] = self.entries[name].position(value)
        return point

    def middle(self, point: Point) -> Point:
        """The middle of the branch of a point."""
        active = self._active(point)
        found = np.zeros(self.coordinates)
        for name in self.categories:
            if active[name]:
                found[self._places[name]] = self._center(name, self._own(name, point))
        return found

    def middles(self) -> list[Point]:
        """Middles of branches that have, together, every choice of every category."""
        found = [self.middle(np.zeros(self.coordinates))]
        for name in self.categories:
            for choice in self._choices(name):
                point = self._within[name].copy()
                point[self._places[name]] = self._position(name, choice)
                found.append(self.middle(point))
        return list({point.tobytes(): point for point in found}.values())

    def within(self, name: str) -> Point:
        """The middle of a branch in which a parameter's condition holds."""
        return self.middle(self._within[name])

    def _conditions(self, name: str) -> dict[str, set[int]]:
        """For each category that a parameter depends on, the numbers of its choices."""
        allowed = {}
        for other, values in (self.entries[name].when or {}).items():
            entry = self.entries.get(other)
            if not isinstance(entry, Categorical):
                raise ValueError(
                    f"PrivateSearch: the condition of {name!r} is about {other!r}, "
                    f"which is no Categorical of the space; it has {self.categories}."
                )
            several = isinstance(values, list | tuple) and values not in entry
            chosen = list(values) if several else [values]
            wrong = [value for value in chosen if value not in entry]
            if wrong or not chosen:
                raise ValueError(
                    f"PrivateSearch: the condition of {name!r} must be one or more "
                    f"choices of {other!r}, which are {list(entry.choices)}, got "
                    f"{values!r}."
                )
            allowed[other] = {
                number
                for number, choice in enumerate(entry.choices)
                if any(same(choice, value) for value in chosen)
            }
        return allowed

    def _active(self, point: Point) -> dict[str, bool]:
        """Whether the condition of each parameter holds."""
        found = {}
        for name in self._order:
            found[name] = all(
                found[other] and self._number(other, point) in numbers
                for other, numbers in self._allowed[name].items()
            )
        return found

    def _found_within(self, name: str) -> Point:
        """A point at which the condition of a parameter holds."""
        above = [name]
        for other in above:  # grows with those that a condition is about, in turn
            above += [v for v in self._allowed[other] if v not in above]
        above = above[1:]
        for numbers in itertools.product(*map(self._choices, above)):
            point = np.zeros(self.coordinates)
            for other, number in zip(above, numbers, strict=True):
                point[self._places[other]] = self._position(other, number)
            if self._active(point)[name]:
                return point
        raise ValueError(
            f"PrivateSearch: the condition of {name!r} never holds, since it is about "
            "parameters whose own conditions exclude each other."
        )

    def _own(self, name: str, point: Point) -> Float[np.ndarray, " c"]:
        return np.asarray(point)[self._places[name]]

    def _choices(self, name: str) -> range:
        return range(len(self._category(name).choices))

    def _number(self, name: str, point: Point) -> int:
        return self._category(name).number(self._own(name, point))

    def _position(self, name: str, number: int) -> float:
        return self._category(name).center(number)

    def _center(self, name: str, position: Float[np.ndarray, " 1"]) -> float:
        category = self._category(name)
        return category.center(category.number(position))

    def _category(self, name: str) -> Categorical:
        entry = self.entries[name]
        assert isinstance(entry, Categorical)
        return entry
