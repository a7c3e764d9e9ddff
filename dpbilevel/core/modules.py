"""Initial points that are Equinox modules: their arrays are the variables."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .problem import AbstractOneLevel, AbstractProblem
from .proximal import Proximal


@dataclasses.dataclass(frozen=True)
class StaticLeaves:
    """Leaves of an initial point that are no arrays, such as activations.

    Attributes:
        variables: The structure of the arrays.
        parts: These leaves, one pytree for each variable of the problem.
        pair: Whether the variables are a pair, as of two levels.
    """

    variables: Any
    parts: tuple[PyTree, ...]
    pair: bool

    def merge(self, value: PyTree) -> PyTree:
        """Put these leaves back into `value` if it is like the initial point."""
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
    """Return the problem on arrays, the arrays of `w0`, and other leaves or `None`.

    Args:
        owner: The name of the caller in an error.
        problem: The problem, whose functions take the module.
        w0: The initial point, or its shapes.
        trainable: Which arrays are variables, as for `equinox.partition`; all if it is
            `None`. The other arrays are constants of the problem.

    Returns:
        The problem on arrays, the arrays, and the other leaves; an initial point
        without modules, or of arrays alone, is returned as it is, with `None`.

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


class _Lifted(eqx.Module):
    """A problem apart from the arrays that are not trained."""

    problem: AbstractProblem
    frozen: PyTree


def lifted(problem: AbstractProblem) -> Any:
    """Return a problem as an argument of a compiled program, which calls `lowered`.

    Arrays that are not trained are leaves of it, and no constants of the program.
    """
    terms = vars(type(problem)).get("terms", ())
    functions = [getattr(problem, name) for name in terms]
    found = [fun.frozen for fun in functions if isinstance(fun, _OfArrays)]
    if not found or found[0] is None:  # one for all functions
        return problem
    bare = _mapped(problem, lambda fun: dataclasses.replace(fun, frozen=None))
    return _Lifted(bare, found[0].tree)


def lowered(problem: Any) -> Any:
    """Return the problem that `lifted` took."""
    if not isinstance(problem, _Lifted):
        return problem
    frozen = _Frozen(problem.frozen)
    return _mapped(problem.problem, lambda fun: dataclasses.replace(fun, frozen=frozen))


def _mapped(problem: Any, change: Callable[[Any], Any]) -> Any:
    """Return a problem whose functions are changed, also those of a proximal term."""

    def changed(fun):
        if isinstance(fun, Proximal):  # reads arrays alone, its weights modules of x
            weights = {k: change(v) for k, v in vars(fun).items() if callable(v)}
            return dataclasses.replace(fun, **weights)
        return change(fun)

    functions = {name: getattr(problem, name) for name in type(problem).terms}
    changes = {k: changed(fun) for k, fun in functions.items() if fun is not None}
    return dataclasses.replace(problem, **changes)


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "dtype")
