"""Annotations of fields that name the values they admit, and their check."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
from jaxtyping import Array, Float

from . import _checks

# Known on the host, or inside a program.
Number = float | Float[Array, ""]

Count = Annotated[int, _checks.count]
Positive = Annotated[float, _checks.positive]
NonNegative = Annotated[float, _checks.non_negative]
Fraction = Annotated[float, _checks.fraction]


class Checked(eqx.Module):
    """A module whose fields are checked against their annotations.

    The annotations of this module refuse numbers outside their range, a `Literal`
    other values, a subclass of `equinox.Module` what is no instance of it, and a
    `Callable` what cannot be called; a field that may be `None` admits that too.
    Equinox runs the check after those of subclasses, which call `check_fields` first
    where they rely on it.
    """

    def __check_init__(self):
        check_fields(self)


def check_fields(module: Any) -> None:
    """Raises unless every field holds what its annotation admits.

    Args:
        module: A dataclass.

    Raises:
        TypeError: A value is of another class.
        ValueError: A number is out of its range, or a word is none of those listed.
    """
    owner = type(module).__name__
    for name, optional, check in _checks_of(type(module)):
        value = getattr(module, name)
        if value is not None or not optional:
            check(owner, name, value)


@functools.cache
def _checks_of(cls: type) -> list[tuple[str, bool, Any]]:
    """For each field with a check: its name, whether it may be `None`, the check."""
    found = []
    for field in dataclasses.fields(cls):
        kinds = _members(field.type)
        checks = [check for kind in kinds if (check := _check_of(kind)) is not None]
        if len(checks) == 1:  # a union of several is for the class itself to check
            found.append((field.name, type(None) in kinds, checks[0]))
    return found


def _members(annotation: Any) -> tuple[Any, ...]:
    union = isinstance(annotation, types.UnionType)
    union = union or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if union else (annotation,)


def _check_of(kind: Any) -> Any:
    """The check of one annotation, called with owner, name and value."""
    if typing.get_origin(kind) is typing.Literal:
        options = typing.get_args(kind)
        return lambda owner, name, value: _checks.one_of(owner, name, value, options)
    if Callable in (kind, typing.get_origin(kind)):
        return lambda owner, name, value: _checks.function(owner, **{name: value})
    if isinstance(kind, type) and issubclass(kind, eqx.Module):
        return lambda owner, name, value: _checks.instance(owner, kind, **{name: value})
    checks = [check for check in getattr(kind, "__metadata__", ()) if callable(check)]
    if checks:
        return lambda owner, name, value: checks[0](owner, **{name: value})
    return None
