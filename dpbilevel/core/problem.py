"""The parts of a problem that plans and runs need."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from ..privacy.budget import People
from ..privacy.records.disk import OnDisk, shapes_of
from ..privacy.records.people import PerPerson, PersonRows, PersonUnit
from .levels import Sizes, one_level

Problem = TypeVar("Problem", bound="AbstractProblem")


class AbstractProblem(eqx.Module):
    """A problem on records.

    Attributes:
        record_functions: The names of the fields that are functions of one record, the
            last argument; `per_person` exchanges them.
        unit: What the guarantee protects: `None` for one record, or the `PersonUnit`
            that `per_person` sets.
    """

    record_functions: ClassVar[tuple[str, ...]] = ()
    unit: PersonUnit | None = eqx.field(static=True, default=None, kw_only=True)

    def per_person(
        self, most_rows: int = 8, combine: Literal["mean", "sum"] = "mean"
    ) -> Self:
        r"""Return the problem on people who have several rows each.

        The loss of a person is the mean of the losses of the rows, and its gradient is
        clipped once. Everything that is said of a record then holds for a person:
        sizes are numbers of people, and `by_person` makes the data.

        Args:
            most_rows: The number of rows of a person that count, at most.
            combine: `"mean"`, or `"sum"` for the sum over `most_rows`, which counts all
                rows alike and people with few rows less.

        Raises:
            ValueError: A number is out of range, the problem is one of people already,
                or it has declared constants that people without rows violate.

        Privacy:
            One person, with all rows, is what the guarantee protects. Declared
            constants must hold for the loss 0, too, which is that of a person without
            rows.
        """
        if self.unit is not None:
            raise ValueError("per_person: the problem is one of people already.")
        unit = PersonUnit(most_rows, combine)
        functions = {
            name: PerPerson(getattr(self, name), unit) for name in self.record_functions
        }
        return self.with_functions(functions, unit)

    def with_functions(
        self, functions: dict[str, Any], unit: PersonUnit | None
    ) -> Self:
        """Return the problem with functions of another unit.

        Args:
            functions: The functions, by field.
            unit: The unit.

        Raises:
            ValueError: A declared constant might not hold for people.
        """
        return dataclasses.replace(self, unit=unit, **functions)

    def of_record(self, fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Return a function of one row as one of a record, the last argument.

        Args:
            fun: The function. For a problem on people the values of their rows are
                combined, else it is returned.
        """
        return fun if self.unit is None else PerPerson(fun, self.unit)

    def on_same_records(self, problem: Problem) -> Problem:
        """Return another problem on the kind of records that this one has.

        Args:
            problem: A problem on records that are one row each.
        """
        if self.unit is None:
            return problem
        return problem.per_person(self.unit.most_rows, self.unit.combine)

    def check_unit(self, data: Any) -> None:
        """Refuse rows of people for a problem on records, and the reverse.

        Args:
            data: The records.

        Raises:
            TypeError: They are of the other kind.
            ValueError: Of a person there are more or fewer places than declared.
        """
        whole = PersonRows | OnDisk
        leaves = jax.tree.leaves(data, is_leaf=lambda v: isinstance(v, whole))
        found = [shapes_of(part) for part in leaves]
        if self.unit is not None:
            for part in found:
                self.unit.check(part)
        elif any(isinstance(part, PersonRows) for part in found):
            raise TypeError(
                "the data are rows of people and the problem is one of records: give "
                "problem.per_person(most_rows=...)."
            )

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
