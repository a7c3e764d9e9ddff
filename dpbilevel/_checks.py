"""Checks of arguments and of annotated fields: one wording for every refusal."""

import dataclasses
import difflib
import enum
import functools
import inspect
import math
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

# A class variable is what type checkers let fields and properties override.
if TYPE_CHECKING:
    from typing import ClassVar as AbstractVar
else:
    from equinox import AbstractVar as AbstractVar


def concrete(value: object) -> bool:
    """Whether `value` is known on the host (not a tracer or an abstract leaf)."""
    return isinstance(value, int | float | np.number | np.ndarray) or (
        isinstance(value, jax.Array) and not isinstance(value, Tracer)
    )


def number(value: Any) -> Any:
    """A number as a float where it is known, and as it is inside a program."""
    return float(value) if concrete(value) else value


def at_least_single(value: float | jax.Array) -> float | jax.Array:
    """A number, or an array of one, in float32 at least, whose rounding is covered."""
    if isinstance(value, np.generic):
        return float(value)
    if isinstance(value, np.ndarray | jax.Array):
        single = value.dtype in (jnp.float32, jnp.float64)
        return jnp.asarray(value) if single else jnp.asarray(value, jnp.float32)
    return value


def single_precision(owner: str, tree: PyTree) -> None:
    """Raises `TypeError` where a number of a pytree is of half precision."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", jnp.float32)
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
            raise TypeError(
                f"{owner}: {type(tree).__name__}{jax.tree_util.keystr(path)} is "
                f"{dtype}, which rounds noise multipliers and clip norms by more than "
                "the margin of the noise. Cast parameters and records if you like, and "
                "keep the solver's and mechanism's numbers in float32 or as Python "
                "floats."
            )


def positive(owner: str, **values: object) -> None:
    """Raises `ValueError` unless every known value is a finite number above zero."""
    _require(owner, values, lambda v: v > 0, "positive and finite")


def non_negative(owner: str, **values: object) -> None:
    """Raises `ValueError` unless every known value is a finite number of at least 0."""
    _require(owner, values, lambda v: v >= 0, "non-negative and finite")


def signed_share(owner: str, **values: object) -> None:
    """Raises `ValueError` unless every known value lies in [-1, 1]."""
    _require(owner, values, lambda v: -1 <= v <= 1, "in [-1, 1]")


def fraction(owner: str, **values: object) -> None:
    """Raises `ValueError` unless every known value lies strictly between 0 and 1."""
    _require(owner, values, lambda v: 0 < v < 1, "strictly between 0 and 1")


def proper_fraction(owner: str, **values: object) -> None:
    """Raises `ValueError` unless every known value is at least 0 and below 1."""
    _require(owner, values, lambda v: 0 <= v < 1, "at least 0 and below 1")


def shown(value: Any) -> str:
    """Describes a wrong value for a message.

    Arrays, dicts and lists may hold records: their kind and size are shown alone.
    """
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:40]}...")
    if value is None or isinstance(value, bool | int | float | enum.Enum):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if concrete(value) and np.ndim(value) == 0:
        return str(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {value.shape}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    name = getattr(value, "__name__", None)
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOU" else "a"
    return f"the function {name}" if name else f"{article} {kind}"


def floats(value: Any) -> Any:
    """The integers of a tuple as floats: inside a program their sum might overflow."""

    def converted(number):
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        return float(number) if whole else number

    # Anything but several numbers is left to the check of the field.
    return tuple(map(converted, value)) if isinstance(value, tuple | list) else value


def budget_split(owner: str, value: object, *parts: str) -> None:
    """Raises `ValueError` unless there is a number from 1e-30 to 1e30 for each part."""
    if not isinstance(value, tuple | list) or len(value) != len(parts):
        *first, last = parts
        raise ValueError(
            f"{owner}: budget_split must be {len(parts)} positive numbers, for "
            f"{', '.join(first)} and {last}, got {shown(value)}."
        )
    for number in value:
        dtype = getattr(number, "dtype", float)
        if not np.issubdtype(dtype, np.floating):
            raise ValueError(
                f"{owner}: budget_split must hold floating-point numbers, got {dtype}."
            )
        within = {"budget_split": number}
        _require(owner, within, lambda v: 1e-30 <= v <= 1e30, "from 1e-30 to 1e30")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user, the last one outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        if frame.f_back is None:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def count(owner: str, **values: object) -> None:
    """Raises `ValueError` unless every value is a Python integer of at least 1."""
    for name, value in values.items():
        whole = isinstance(value, int | np.integer)
        if not whole or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{owner}: {name} must be an integer of at least 1, got {shown(value)}."
            )


def one_of(owner: str, name: str, value: object, allowed: Iterable[object]) -> None:
    """Raises `ValueError` unless `value` is among `allowed`."""
    options = list(allowed)
    if hasattr(value, "shape") or value not in options:
        got = shown(value)
        raise ValueError(f"{owner}: {name} must be one of {options}, got {got}.")


# What to write where an instance of a class is expected.
_SUCH_AS = {
    "AbstractSampling": "dpb.Poisson(rate=0.1) or dpb.FullBatch()",
    "AbstractFiniteSum": "dpb.FiniteSum(loss)",
    "AbstractProblem": "dpb.FiniteSum(loss) or dpb.BilevelProblem(upper, lower)",
    "AbstractOutput": "dpb.outputs.TailMean() or dpb.outputs.Last()",
    "PrivacyBudget": "dpb.PrivacyBudget(epsilon=1.0, delta=1e-6)",
    "Sizes": 'dpb.Sizes(upper=1000, lower=5000, people="disjoint")',
    "AbstractSet": "dpb.sets.Ball(1.0)",
    "BilevelProblem": "dpb.BilevelProblem(upper, lower)",
    "FiniteSum": "dpb.FiniteSum(loss)",
    "Gaussian": "dpb.privacy.Gaussian()",
    "PenaltyTuning": "dpb.penalty_tuning(loss, groups)",
    "SourceWeighting": "dpb.source_weighting(loss, num_sources)",
}


def such_as(*kinds: type) -> str:
    """A sentence that names what to give, where one is known for these classes."""
    such = [_SUCH_AS[k.__name__] for k in kinds if k.__name__ in _SUCH_AS]
    return f" Give {' or '.join(such)}." if such else ""


def classes_of(kind: Any) -> tuple[type, ...]:
    """Return the classes of a class, a union or a tuple."""
    return kind if isinstance(kind, tuple) else typing.get_args(kind) or (kind,)


def names_of(kind: Any) -> str:
    """Return the names of a class, a union or a tuple of classes."""
    return " or ".join(each.__name__ for each in classes_of(kind))


def instance(owner: str, kind: Any, **values: object) -> None:
    """Raises `TypeError` unless every value is an instance of `kind`.

    Args:
        owner: Who raises.
        kind: A class, a union or a tuple of classes.
        values: What is checked, by name.
    """
    kinds = classes_of(kind)
    for name, value in values.items():
        if not isinstance(value, kinds):
            got = value if isinstance(value, type) else type(value)
            what = "the class" if isinstance(value, type) else "an instance of"
            raise TypeError(
                f"{owner}: {name} must be an instance of {names_of(kinds)}, got {what} "
                f"{got.__name__}.{such_as(*kinds)}"
            )


def function(owner: str, **values: object) -> None:
    """Raises `TypeError` unless every value can be called."""
    for name, value in values.items():
        if not callable(value):
            raise TypeError(f"{owner}: {name} must be a function, got {shown(value)}.")


class AbstractStored(eqx.Module):
    """Stands for records that are not in memory, so that no rows can be taken."""


def leading_axis(name: str, records: PyTree) -> int:
    """The common length of the leading axes of records.

    Raises `ValueError` where they are no numeric arrays or their axes differ; the
    message has types and shapes, never a value.
    """
    if isinstance(records, AbstractStored):
        raise ValueError(
            f"{name} must be in memory here, got {type(records).__name__}: records on "
            "disk are read by clipped means of all records alone. Use FullBatch() and "
            "a solver of clipped means, or give a part that fits in memory."
        )
    lengths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(records):
        where = jax.tree_util.keystr(path)
        dtype: Any = getattr(leaf, "dtype", None)
        known = isinstance(dtype, np.dtype)  # data frames have dtypes of their own
        kinds = jnp.number, jnp.bool_
        if not known or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            raise ValueError(
                f"{name}{where} must be a numeric array with one row per record, got "
                f"{(dtype.type if known else type(dtype or leaf)).__name__}. Convert "
                "lists by numpy.asarray(...), data frames by .to_numpy(), and texts to "
                "numbers."
            )
        lengths[where or "value"] = leaf.shape[:1]
    if not lengths or () in lengths.values() or len(set(lengths.values())) > 1:
        raise ValueError(
            f"{name} must be a pytree of arrays that share their leading axis, one "
            f"row per record; got leading axes {lengths}."
        )
    return next(iter(lengths.values()))[0]


def on_device(records: PyTree) -> PyTree:
    """The records as JAX arrays, without the warning that a value is too large."""
    with np.errstate(all="ignore"):  # a warning would tell something about a value
        return jax.tree.map(jnp.asarray, records)


def strict_floats(owner: str) -> None:
    """Raises `ValueError` where `XLA_FLAGS` turns fast floating-point math on."""
    words = os.environ.get("XLA_FLAGS", "").lower().split()
    if any("enable_fast_math" in word and "=false" not in word for word in words):
        raise ValueError(
            f"{owner}: XLA_FLAGS turns fast math on, which lets the compiler assume "
            "that no value is NaN or infinite, so a hostile record would not be "
            "clipped. Remove the flag and start again."
        )


def _require(owner, values, holds, words) -> None:
    for name, value in values.items():
        if np.ndim(value) != 0:
            raise ValueError(
                f"{owner}: {name} must be a single number, got an array of shape "
                f"{np.shape(value)}."
            )
        if isinstance(value, Tracer | jax.ShapeDtypeStruct):
            continue
        known = concrete(value) and not isinstance(value, bool)
        # On the host: comparing a device array inside a trace would not give a truth.
        if not known or not (math.isfinite(float(value)) and holds(float(value))):
            kind = "" if known else "a number, "
            raise ValueError(
                f"{owner}: {name} must be {kind}{words}, got {shown(value)}."
            )


# Known on the host, or inside a program.
Number = float | Float[Array, ""]

Count = Annotated[int, count]
Positive = Annotated[float, positive]
NonNegative = Annotated[float, non_negative]
Fraction = Annotated[float, fraction]
ProperFraction = Annotated[float, proper_fraction]
SignedShare = Annotated[float, signed_share]


class Checked(eqx.Module):
    """A module whose fields are checked against their annotations.

    The annotations of this module refuse numbers outside their range, a `Literal`
    other values, a subclass of `equinox.Module` what is no instance of it, and a
    `Callable` what cannot be called; a field that may be `None` admits that too.
    Equinox runs the check after those of subclasses, which call `check_fields` first
    where they rely on it.
    """

    def __new__(cls, *args: Any, **options: Any):
        check_names(cls, options)
        return super().__new__(cls)

    def __check_init__(self):
        check_fields(self)


# What other libraries call an argument: the field that does the same, and how.
_POISSON = "=dpb.Poisson(rate), whose batches have rate * n records"
_ELSEWHERE = {
    "batch_size": ("sampling", _POISSON),
    "epochs": ("num_steps", ""),
    "l2_clip_norm": ("clip_norm", ""),
    "l2_norm_clip": ("clip_norm", ""),
    "learning_rate": ("step_size", ""),
    "lr": ("step_size", ""),
    "max_grad_norm": ("clip_norm", ""),
    "max_iter": ("num_steps", ""),
    "noise": ("noise_multiplier", ", the noise of each release, and neighbours="),
    "noise_multiplier": ("run_noise", ", which dpb.calibrate finds for a budget"),
    "optimizer": ("step_size", ", such as step_size=optax.adam(0.1)"),
    "sample_rate": ("sampling", _POISSON),
}


def check_names(cls: type, options: Iterable[str]) -> None:
    """Raises `TypeError` where a class has no argument of such a name."""
    names = _arguments(cls)
    for name in options:
        if name in names:
            continue
        field, how = _ELSEWHERE.get(name, ("", ""))
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if field in names:
            hint = f" Use {field}{how}."
        if name in ("random_state", "seed"):
            hint = " Noise is drawn by key=, of the function that runs it."
        raise TypeError(
            f"{cls.__name__}: there is no argument {name!r}.{hint} It has "
            f"{', '.join(names)}."
        )


@functools.cache
def _arguments(cls: type) -> tuple[str, ...]:
    """The names of what a class is made of."""
    return tuple(inspect.signature(cls.__init__).parameters)[1:]


def check_fields(module: Any) -> None:
    """Raises unless every field of a dataclass holds what its annotation admits.

    `TypeError` where a value is of another class, else `ValueError`.
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
    # Annotations are strings where a module imports them from __future__.
    fields = dataclasses.fields(cls)
    texts = any(isinstance(field.type, str) for field in fields)
    hints = typing.get_type_hints(cls, include_extras=True) if texts else {}
    for field in fields:
        kinds = _members(hints.get(field.name, field.type))
        checks = [check for kind in kinds if (check := _check_of(kind)) is not None]
        if len(checks) == 1:  # a union of several is for the class itself to check
            found.append((field.name, type(None) in kinds, checks[0]))
    return found


def _members(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if union else (annotation,)


def _check_of(kind: Any) -> Any:
    """The check of one annotation, called with owner, name and value."""
    if typing.get_origin(kind) is typing.Literal:
        options = typing.get_args(kind)
        return lambda owner, name, value: one_of(owner, name, value, options)
    if Callable in (kind, typing.get_origin(kind)):
        return lambda owner, name, value: function(owner, **{name: value})
    if isinstance(kind, type) and issubclass(kind, eqx.Module | enum.Enum):
        return lambda owner, name, value: instance(owner, kind, **{name: value})
    checks = [check for check in getattr(kind, "__metadata__", ()) if callable(check)]
    if checks:
        return lambda owner, name, value: checks[0](owner, **{name: value})
    return None
