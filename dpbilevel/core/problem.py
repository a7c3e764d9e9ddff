"""The parts of a problem that plans and runs need."""

import abc
from typing import Self

import equinox as eqx
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from ..privacy.budget import People
from .levels import Sizes, one_level


class AbstractProblem(eqx.Module):
    """A problem on records."""

    @abc.abstractmethod
    def check(self, w0: PyTree, data: PyTree) -> None:
        """Raise `ValueError` or `TypeError` if `w0` or `data` do not fit."""

    @abc.abstractmethod
    def sizes_of(self, data: PyTree, people: People | str | None = None) -> Sizes | int:
        """Return the number of records in `data`, or `Sizes` for two levels.

        Args:
            data: The records.
            people: Relation of the people in the levels, for two levels.
        """

    @abc.abstractmethod
    def check_sizes(self, owner: str, sizes: object) -> None:
        """Refuse sizes of another kind than `sizes_of` returns.

        Args:
            owner: The caller, for an error.
            sizes: The planned sizes.
        """

    @abc.abstractmethod
    def check_people(self, data: PyTree, people: People) -> None:
        """Refuse data that contradict `people`.

        Args:
            data: The records.
            people: The declared relation of the people in the levels.
        """

    def traced(self, w0: PyTree, data: PyTree) -> Self:
        """Check `w0` and `data`; return the problem with facts found by tracing it.

        Tracing tells nothing by default. Errors are those of `check`.

        Args:
            w0: The initial point.
            data: The records; only their shapes are read.
        """
        self.check(w0, data)
        return self


class AbstractOneLevel(AbstractProblem):
    """A problem on the records of one level, whose sizes are one number."""

    def sizes_of(self, data: PyTree, people: People | str | None = None) -> Sizes | int:
        """Return the number of records: the length of the leading axis.

        Raises:
            TypeError: `people` is given, or the records are those of two levels.
            ValueError: Leading axes differ.
        """
        if people is not None:
            raise TypeError(f"people={people} is for the problems of two levels.")
        return one_level(data)

    @override
    def check_sizes(self, owner: str, sizes: object) -> None:
        _checks.count(owner, sizes=sizes)

    def check_people(self, data: PyTree, people: People) -> None:
        """Raise `TypeError`: `people` is for problems of two levels."""
        raise TypeError(f"people={people} is for the problems of two levels.")
