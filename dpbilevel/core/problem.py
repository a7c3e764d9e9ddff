"""What a plan and a run need of a problem, whatever it is."""

import abc
from typing import Self

import equinox as eqx
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from ..privacy.budget import People
from .levels import Sizes, one_level


class AbstractProblem(eqx.Module):
    """A problem on records: its shapes, their numbers, and what it refuses."""

    @abc.abstractmethod
    def check(self, w0: PyTree, data: PyTree) -> None:
        """Raises `ValueError` or `TypeError` where `w0` or `data` do not fit."""

    @abc.abstractmethod
    def sizes_of(self, data: PyTree, people: People | str | None = None) -> Sizes | int:
        """The numbers of records in `data`.

        Args:
            data: The records.
            people: Who is behind them, for two levels.
        """

    @abc.abstractmethod
    def check_sizes(self, owner: str, sizes: object) -> None:
        """Refuses sizes of another kind than `sizes_of` returns.

        Args:
            owner: What to name in an error.
            sizes: The planned sizes.
        """

    @abc.abstractmethod
    def check_people(self, data: PyTree, people: People) -> None:
        """Refuses data that contradict `people`.

        Args:
            data: The records.
            people: Who is said to be behind them.
        """

    def traced(self, w0: PyTree, data: PyTree) -> Self:
        """The problem with what tracing its functions can tell; by default nothing.

        Args:
            w0: The starting point.
            data: The records; only their shapes are read.
        """
        del w0, data
        return self


class AbstractOneLevel(AbstractProblem):
    """A problem on the records of one level, whose sizes are one number."""

    def sizes_of(self, data: PyTree, people: People | str | None = None) -> Sizes | int:
        """The length of the leading axis.

        Raises:
            TypeError: `people` is given, or the records are those of two levels.
            ValueError: Leading axes differ.
        """
        if people is not None:
            raise TypeError(
                f"people={_checks.shown(people)} is for two levels; "
                f"{type(self).__name__} has one."
            )
        return one_level(data)

    @override
    def check_sizes(self, owner: str, sizes: object) -> None:
        _checks.count(owner, sizes=sizes)

    def check_people(self, data: PyTree, people: People) -> None:
        """Raises `TypeError`: `people` is for problems of two levels."""
        raise TypeError(
            f"people={people.value!r} is for two levels; {type(self).__name__} has one."
        )
