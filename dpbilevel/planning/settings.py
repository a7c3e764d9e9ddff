"""Settings of a solver as the tables of a config."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import equinox as eqx

from ..bilevel.refitted import Refitted
from ..core.descent import Rule
from ..core.solver import MECHANISM_FIELDS, AbstractSolver
from ..privacy.mechanisms import Gaussian


def toml_of(solver: AbstractSolver) -> str:
    """Return config text: the table `[solver]`, and `[refit]` if there is one.

    Args:
        solver: The solver; its noise is left out, because a config has none.

    Raises:
        ValueError: The solver is for Python alone, or holds a function or optax rule.
    """
    return "\n".join(_lines(solver)) + "\n"


def _lines(solver: AbstractSolver) -> Iterator[str]:
    if not isinstance(solver, Refitted):
        yield from _table("solver", solver, named=True)
        return
    yield from _table("solver", solver.search, named=True)
    yield ""
    head, *rest = _table("refit", solver.refit, named=True)
    yield from (head, f"budget_split = {toml_value(solver.budget_split)}")
    if solver.refit_reads != "lower":
        yield f"refit_reads = {toml_value(solver.refit_reads)}"
    yield from rest


def _table(place: str, part: Any, *, named: bool = False) -> Iterator[str]:
    nested = []
    if not part.in_config:
        raise _unwritten(type(part).__name__)
    yield f"[{place}]"
    if named:
        yield f'type = "{type(part).__name__}"'
    for field, value in _changed(part):
        if isinstance(value, AbstractSolver):
            nested.append((field, value))
        else:
            yield f"{field.name} = {toml_value(value)}"
    for field, value in nested:
        yield ""
        first = (*typing.get_args(field.type), field.type)[0]  # as configs read it
        generic = first is not type(value)
        yield from _table(f"{place}.{field.name}", value, named=generic)


def _changed(part: Any) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Yield (field, value) pairs that differ from defaults, without `[privacy]`."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        same = type(field.default) is type(value) and repr(field.default) == repr(value)
        mechanism = field.name in MECHANISM_FIELDS or isinstance(value, Gaussian)
        if not same and not mechanism:
            yield field, value


def toml_value(value: Any) -> str:
    """Return the text of a value in a config.

    Raises:
        ValueError: As `toml_of`.
    """
    if isinstance(value, Rule):
        raise _unwritten("an optax rule")
    if isinstance(value, eqx.Module):  # an output rule, a sampling
        fields = {field.name: toml_value(v) for field, v in _changed(value)}
        fields = {"type": f'"{type(value).__name__}"'} | fields
        return f"{{ {', '.join(f'{k} = {v}' for k, v in fields.items())} }}"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if callable(value) or isinstance(value, dict):
        raise _unwritten("a function or its owner")
    return repr(value if isinstance(value, int) else float(value))


def _unwritten(what: str) -> ValueError:
    return ValueError(
        f"to_toml: a config cannot hold {what}, which is for Python alone. Print the "
        "plan and copy the solver from there."
    )
