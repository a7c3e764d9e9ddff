"""The parts of a problem that plans and runs need, and initial points of modules."""

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
from ..privacy.records.disk import OnDisk
from ..privacy.records.people import PerPerson, PersonRows, PersonUnit
from ..privacy.records.randomness import Randomized
from ..privacy.records.rows import shapes_of
from .levels import Levels, Sizes
from .proximal import Proximal

Problem = TypeVar("Problem", bound="AbstractProblem")


class AbstractProblem(eqx.Module):
    """Base class of problems on records: the parts that plans and runs need.

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
        """Return the problem with its functions and its privacy unit replaced.

        A `ValueError` refuses declared constants that might not hold for people.
        """
        return dataclasses.replace(self, unit=unit, **functions)

    def of_record(self, fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Return `fun` of one row, or the `PerPerson` that combines a person's rows.

        For a problem on people the values of their rows are combined.
        """
        return fun if self.unit is None else PerPerson(fun, self.unit)

    def on_same_records(self, problem: Problem) -> Problem:
        """Return a problem on rows, changed to people if this one is on people."""
        if self.unit is None:
            return problem
        return problem.per_person(self.unit.most_rows, self.unit.combine)

    @property
    def has_proximal(self) -> bool:
        """Whether a public term of the problem has a proximal operator."""
        terms = (getattr(self, name) for name in getattr(self, "terms", ()))
        return any(isinstance(term, Proximal) for term in terms)

    def check_unit(self, data: Any) -> None:
        """Raise `TypeError` if data of people meet a problem on records, or vice versa.

        It is a `ValueError` if people have another number of places than declared.
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

        `people` is the relation of the people in two levels.
        """

    @abc.abstractmethod
    def check_sizes(self, owner: str, sizes: object) -> None:
        """Raise an error, naming `owner`, unless `sizes` are as `sizes_of` returns."""

    @abc.abstractmethod
    def check_people(self, data: PyTree, people: People) -> None:
        """Raise an error if two levels' data contradict the relation `people`."""

    def traced(self, w0: PyTree, data: PyTree) -> Self:
        """Check `w0` and `data`; return the problem with facts found by tracing it.

        Tracing tells nothing by default. Only shapes of records are read. Errors are
        those of `check`.
        """
        self.check(w0, data)
        return self


class AbstractOneLevel(AbstractProblem):
    """A problem on the records of one level, whose sizes are one number."""

    def sizes_of(self, data: PyTree, people: People | str | None = None) -> Sizes | int:
        """Return the number of records: the common length of the leading axes.

        Raises:
            TypeError: `people` is given, or the records are those of two levels.
            ValueError: Leading axes differ.
        """
        if people is not None:
            raise TypeError(f"people={people} is for the problems of two levels.")
        if isinstance(data, Levels):
            raise TypeError("data must be of one level, got Levels; give data.upper.")
        return _checks.leading_axis("data", shapes_of(data))

    @override
    def check_sizes(self, owner: str, sizes: object) -> None:
        _checks.count(owner, sizes=sizes)

    def check_people(self, data: PyTree, people: People) -> None:
        """Raise `TypeError`: `people` is for problems of two levels."""
        raise TypeError(f"people={people} is for the problems of two levels.")


@dataclasses.dataclass(frozen=True)
class StaticLeaves:
    """Untrained leaves of an initial point, such as activations and frozen arrays.

    Attributes:
        variables: The structure of the arrays.
        parts: These leaves, one pytree for each variable of the problem.
        pair: Whether the variables are a pair, as of two levels.
    """

    variables: Any
    parts: tuple[PyTree, ...]
    pair: bool

    def merge(self, value: PyTree) -> PyTree:
        """Return `value` with these leaves put back, or unchanged if unlike `w0`."""
        if self.pair and isinstance(value, tuple) and value[1:] == (None,):
            return eqx.combine(value[0], self.parts[0]), None
        if jax.tree.structure(value) != self.variables:
            return value
        return eqx.combine(value, self.parts if self.pair else self.parts[0])


class _Frozen:
    """A pytree of arrays that are not trained; equal to itself alone."""

    def __init__(self, tree: PyTree):
        self.tree = tree


@dataclasses.dataclass(frozen=True)
class _OfArrays:
    """A function of modules as a function of their arrays; equal if its parts are."""

    fun: Callable
    leaves: tuple[Any, ...]
    structure: Any
    frozen: _Frozen | None

    def __call__(self, *arguments: PyTree) -> Any:
        parts = jax.tree.unflatten(self.structure, self.leaves)
        if self.frozen is not None:
            parts = eqx.combine(parts, self.frozen.tree)
        modules = map(eqx.combine, arguments[: len(parts)], parts)
        return self.fun(*modules, *arguments[len(parts) :])


def arrays_of(
    owner: str, problem: AbstractProblem, w0: PyTree, trainable: PyTree = None
) -> tuple[Any, PyTree, StaticLeaves | None]:
    """Return problem and `w0` on trained arrays alone, and other leaves or `None`.

    The functions of the problem take modules like `w0`, which may be shapes. An initial
    point without modules, or of arrays alone, is returned as it is. Arrays that
    `trainable` does not select are constants of the problem; `None` selects all.

    Raises:
        TypeError: The problem is of a kind whose functions cannot be wrapped.
        ValueError: `trainable` does not fit `w0`, or selects none of its arrays.
    """
    if trainable is None:
        trainable = _is_array
        modules = jax.tree.leaves(w0, is_leaf=lambda v: isinstance(v, eqx.Module))
        of_modules = any(isinstance(v, eqx.Module) for v in modules)
        if not of_modules or all(map(_is_array, jax.tree.leaves(w0))):
            return problem, w0, None
    if "terms" not in vars(type(problem)):  # a subclass may have other functions
        raise TypeError(
            f"{owner}: {type(problem).__name__} takes no w0 with leaves that are no "
            "arrays, and no trainable=. Split w0 by equinox.partition in the losses."
        )
    try:
        chosen, others = eqx.partition(w0, trainable)
    except (AttributeError, TypeError, ValueError) as error:
        what = str(error) or type(error).__name__  # JAX's functions give no text
        raise ValueError(
            f"{owner}: trainable= must be a function of any leaf, also of those that "
            f"are no arrays, or a pytree of truth values that fits w0: {what}"
        ) from error
    arrays, static = eqx.partition(chosen, _is_array)
    if not jax.tree.leaves(arrays):
        raise ValueError(f"{owner}: trainable= selects no array of w0.")
    others = eqx.combine(others, static)
    pair = not isinstance(problem, AbstractOneLevel)
    parts = tuple(others) if pair else (others,)
    constant, static = eqx.partition(parts, _is_array)
    leaves, structure = jax.tree.flatten(static)
    frozen = _Frozen(constant) if jax.tree.leaves(constant) else None
    found = tuple(leaves), structure, frozen
    problem = _mapped(problem, lambda fun: _OfArrays(fun, *found))
    return problem, arrays, StaticLeaves(jax.tree.structure(arrays), parts, pair)


class Lifted(eqx.Module):
    """A problem and, separately, the arrays in its functions that are not trained."""

    problem: AbstractProblem
    frozen: PyTree

    def lowered(self) -> Any:
        """Return the problem with the untrained arrays back in its functions."""
        own = _Frozen(self.frozen)
        return _mapped(self.problem, lambda fun: dataclasses.replace(fun, frozen=own))


def lifted(problem: AbstractProblem) -> Any:
    """Return a problem with its untrained arrays as leaves: `Lifted`, or as it is.

    Arrays that are not trained are leaves of it, and no constants of the program. If
    there are some, it is a `Lifted`.
    """
    terms = vars(type(problem)).get("terms", ())
    functions = [getattr(problem, name) for name in terms]
    found = [fun.frozen for fun in functions if isinstance(fun, _OfArrays)]
    if not found or found[0] is None:  # one for all functions
        return problem
    bare = _mapped(problem, lambda fun: dataclasses.replace(fun, frozen=None))
    return Lifted(bare, found[0].tree)


def _mapped(problem: Any, change: Callable[[Any], Any]) -> Any:
    """Return a problem with `change` applied to its functions and proximal weights."""

    def changed(fun):
        if isinstance(fun, Proximal):  # reads arrays alone, its weights modules of x
            weights = {k: change(v) for k, v in vars(fun).items() if callable(v)}
            return dataclasses.replace(fun, **weights)
        return change(fun)

    functions = {name: getattr(problem, name) for name in type(problem).terms}
    changes = {k: changed(fun) for k, fun in functions.items() if fun is not None}
    return dataclasses.replace(problem, **changes)


def is_randomized(fun: Any) -> bool:
    """Return whether a loss, possibly wrapped, is `Randomized`."""
    while fun is not None and not isinstance(fun, Randomized):
        fun = getattr(fun, "fun", None)
    return fun is not None


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "dtype")
