"""Records of two levels, and how many there are of each."""

import dataclasses
from typing import Any, Self

import equinox as eqx
from jaxtyping import PyTree

from .. import _checks
from ..privacy.budget import People


class Levels(eqx.Module):
    """A pair: what belongs to the upper level and what to the lower.

    As data, `upper` and `lower` are pytrees whose leaves share their leading axis
    within a level.

    Attributes:
        upper: The upper level's part.
        lower: The lower level's part.
        is_shared: Whether both parts are the same records. Static.
    """

    upper: Any
    lower: Any
    is_shared: bool = eqx.field(static=True, default=False)

    @classmethod
    def shared(cls, records: PyTree) -> Self:
        """Data in which every record enters both levels.

        Args:
            records: A pytree whose leaves share their leading axis.
        """
        return cls(records, records, True)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many records each level has, and who may be behind them.

    Args:
        upper: Records of the upper level.
        lower: Records of the lower level.
        people: `"disjoint"` (a person has records in one level only),
            `"overlapping"` (may have one record in each) or `"shared"` (the levels
            are the same records).

    Raises:
        ValueError: A count below 1, unknown `people`, or shared levels that differ.
    """

    upper: int
    lower: int
    people: People = People.OVERLAPPING

    def __post_init__(self):
        _checks.count("Sizes", upper=self.upper, lower=self.lower)
        allowed = [people.value for people in People]
        if not isinstance(self.people, People):
            _checks.one_of("Sizes", "people", self.people, allowed)
            object.__setattr__(self, "people", People(self.people))
        if self.people is People.SHARED and self.upper != self.lower:
            raise ValueError(
                f"Sizes: shared levels have equal sizes, got upper={self.upper} and "
                f"lower={self.lower}."
            )


def one_level(data: PyTree) -> int:
    """The number of records of a problem of one level.

    Args:
        data: The records.

    Raises:
        TypeError: They are those of two levels.
        ValueError: Leading axes differ.
    """
    if isinstance(data, Levels):
        raise TypeError(
            "data is Levels, the records of two levels, but the problem has one: give "
            "the records of one level, such as data.upper."
        )
    return _checks.leading_axis("data", data)
