"""Checks of an oracle's arguments, before anything runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _checks
from ..bilevel.problem import BilevelProblem, Levels
from ..onelevel.problem import check_scalar
from ..privacy.per_example.clipping import one_record
from ..privacy.queries import LEVELS
from .linear import AbstractLinearSolver
from .minimizers import AbstractLowerSolver
from .objectives import merge, split

_KINDS = {"solver": AbstractLowerSolver, "linear_solver": AbstractLinearSolver}


def check_arguments(
    owner: str,
    problem: BilevelProblem,
    x: PyTree,
    y: PyTree,
    data: Levels,
    *,
    name: str = "y0",
    roles: tuple[str, ...] = LEVELS,
    v0: PyTree = None,
    **solvers: object,
) -> tuple[PyTree, PyTree]:
    """Check all arguments; return the arrays of floats of `y`, and the rest of it.

    Args:
        owner: The function that was called, for the errors.
        problem: The problem.
        x: The upper variable.
        y: The lower variable or an initial point.
        data: The records.
        name: The owner's name of `y`.
        roles: The levels that the owner reads.
        v0: An initial point of a linear solve, or `None`.
        **solvers: `solver` and `linear_solver`, those that the owner takes.

    Raises:
        TypeError: An argument of another type.
        ValueError: No arrays of floats where the variables should be, records that
            share no leading axis, a loss or a public term that is not a scalar, or a
            `v0` unlike `y`.
    """
    _checks.instance(owner, BilevelProblem, problem=problem)
    _checks.instance(owner, Levels, data=data)
    for key, value in solvers.items():
        _checks.instance(owner, _KINDS[key], **{key: value})
    _check_upper_variable(owner, x)
    variable, rest = _split(owner, name, y)
    if v0 is not None:
        _check_alike(owner, v0, variable)
    for role in roles:
        _check_terms(owner, problem, role, x, variable, rest, getattr(data, role))
    return variable, rest


def _check_upper_variable(owner: str, x: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        kind = _kind(leaf)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(
                f"{owner}: x{jax.tree_util.keystr(path)} must be a floating-point "
                f"array, got {_described(leaf)}. Split other leaves off by "
                "equinox.partition(x, equinox.is_inexact_array)."
            )


def _split(owner: str, name: str, y: PyTree) -> tuple[PyTree, PyTree]:
    if y is None:
        text = f"{owner}: the shape of y is not known without an initial point. Pass"
        raise ValueError(f"{text} {name}=, for instance jnp.zeros(d).")
    variable, rest = split(y)
    if not jax.tree.leaves(variable):
        kinds = sorted({_described(leaf) for leaf in jax.tree.leaves(y)})
        raise ValueError(
            f"{owner}: {name} must be a pytree with arrays of floats, got "
            f"{' and '.join(kinds) or 'no leaves'}."
        )
    return variable, rest


def _check_alike(owner: str, v0: PyTree, variable: PyTree) -> None:
    expected = jax.tree.map(_described, variable)
    try:
        given = jax.tree.map(_described, jax.eval_shape(lambda v: v, v0))
    except TypeError:
        given = jax.tree.map(_described, v0)
    unlike = jax.tree.structure(given) != jax.tree.structure(expected)
    if unlike or jax.tree.leaves(given) != jax.tree.leaves(expected):
        raise ValueError(
            f"{owner}: v0 must be like the arrays of floats of y, {expected}, got "
            f"{given}. Pass solution.value of an earlier LinearSolution."
        )


def _check_terms(
    owner: str,
    problem: BilevelProblem,
    role: str,
    x: PyTree,
    variable: PyTree,
    rest: PyTree,
    records: PyTree,
) -> None:
    _checks.leading_axis(f"{owner}: data.{role}", records)

    # Leaves of a module that are no arrays cannot be traced.
    def of_arrays(term: Callable) -> Callable:
        return lambda x, y, *record: term(x, merge(y, rest), *record)

    loss, public = getattr(problem, role), getattr(problem, f"{role}_public")
    record = one_record(records)
    check_scalar(f"{owner}: problem.{role}", of_arrays(loss), x, variable, record)
    if public is not None:
        where = f"{owner}: problem.{role}_public"
        check_scalar(where, of_arrays(public), x, variable, of="the public term")


def _kind(leaf: object) -> jnp.dtype | None:
    known = hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)
    return jnp.result_type(leaf) if known else None


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = _kind(value)
    if kind is None:
        return type(value).__name__
    return f"{kind}{list(jnp.shape(value))}"
