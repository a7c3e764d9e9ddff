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


@dataclasses.dataclass(frozen=True)
class _OfArrays:
    """A function of modules as a function of their arrays; equal if its parts are."""

    fun: Callable
    leaves: tuple[Any, ...]
    structure: Any

    def __call__(self, *arguments: PyTree) -> Any:
        parts = jax.tree.unflatten(self.structure, self.leaves)
        modules = map(eqx.combine, arguments[: len(parts)], parts)
        return self.fun(*modules, *arguments[len(parts) :])


def arrays_of(
    owner: str, problem: AbstractProblem, w0: PyTree
) -> tuple[Any, PyTree, StaticLeaves | None]:
    """Return the problem on arrays, the arrays of `w0`, and other leaves or `None`.

    Args:
        owner: The name of the caller in an error.
        problem: The problem, whose functions take the module.
        w0: The initial point, or its shapes.

    Returns:
        The problem on arrays, the arrays, and the other leaves; an initial point
        without modules, or of arrays alone, is returned as it is, with `None`.

    Raises:
        TypeError: The problem is of a kind whose functions cannot be wrapped.
    """
    leaves = jax.tree.leaves(w0)
    modules = jax.tree.leaves(w0, is_leaf=lambda v: isinstance(v, eqx.Module))
    of_modules = any(isinstance(v, eqx.Module) for v in modules)
    if not of_modules or all(map(_is_array, leaves)):
        return problem, w0, None
    # Only the class itself: a subclass may compute its functions from other fields.
    terms = vars(type(problem)).get("terms")
    if terms is None:
        raise TypeError(
            f"{owner}: {type(problem).__name__} takes no w0 with leaves that are no "
            "arrays. Split them off by equinox.partition(w0, equinox.is_inexact_array)."
        )
    arrays, others = eqx.partition(w0, _is_array)
    pair = not isinstance(problem, AbstractOneLevel)
    parts = tuple(others) if pair else (others,)
    found, structure = jax.tree.flatten(parts)

    def of_arrays(fun):
        if isinstance(fun, Proximal):  # reads arrays alone, its weights modules of x
            weights = {k: of_arrays(v) for k, v in vars(fun).items() if callable(v)}
            return dataclasses.replace(fun, **weights)
        return _OfArrays(fun, tuple(found), structure)

    functions = {name: getattr(problem, name) for name in terms}
    changes = {k: of_arrays(fun) for k, fun in functions.items() if fun is not None}
    static = StaticLeaves(jax.tree.structure(arrays), parts, pair)
    return dataclasses.replace(problem, **changes), arrays, static


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "dtype")
