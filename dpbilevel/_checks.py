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
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

# A number that is known on the host, or a value inside a program.
Number = float | Float[Array, ""]


def concrete(value: object) -> bool:
    """Return whether `value` is known on the host (no tracer or abstract leaf)."""
    return isinstance(value, int | float | np.number | np.ndarray) or (
        isinstance(value, jax.Array) and not isinstance(value, Tracer)
    )


def number(value: Any) -> Any:
    """Return a value known on the host as a float, and a traced value unchanged."""
    return float(value) if concrete(value) else value


def at_least_single(value: float | jax.Array) -> float | jax.Array:
    """Return a Python number, or an array converted to float32 unless it is float64."""
    if isinstance(value, np.generic):
        return float(value)
    if isinstance(value, np.ndarray | jax.Array):
        single = value.dtype in (jnp.float32, jnp.float64)
        return jnp.asarray(value) if single else jnp.asarray(value, jnp.float32)
    return value


def floats(value: Any) -> Any:
    """Return a tuple or list as a tuple, integers as floats; other values as they are.

    The sum of integers might overflow. The check of the field refuses values of other
    types.
    """
    if not isinstance(value, tuple | list):
        return value
    return tuple(
        float(v) if isinstance(v, int | np.integer) and not isinstance(v, bool) else v
        for v in value
    )


def split_field(*shares: float) -> Any:
    """Return an Equinox field for a budget split, by default these fractions."""
    return eqx.field(default=shares, converter=floats)


def on_device(records: PyTree) -> PyTree:
    """Return records as JAX arrays, without a warning, which would reveal a value."""
    with np.errstate(all="ignore"):
        return jax.tree.map(jnp.asarray, records)


def shown(value: Any) -> str:
    """Return a short text that describes a wrong value, for an error message.

    Arrays, dicts and lists may hold records: only their kind and size are shown.
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
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        return f"a {kind} of {len(value)}"
    if name := getattr(value, "__name__", None):
        return f"the function {name}"
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return a hint, in brackets, at the option that a word is close to, or no text."""
    match = difflib.get_close_matches(word, options, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user, the last one outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        if frame.f_back is None:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _check_of_range(
    words: str, holds: Callable[[float], bool], hint: str = ""
) -> Callable[..., None]:
    """Return a function that raises `ValueError` unless known values are in a range."""

    def check(owner: str, **values: object) -> None:
        for name, value in values.items():
            if np.ndim(value) != 0:  # pyright: ignore[reportArgumentType]
                what = f"must be a single number, got {shown(value)}."
                raise ValueError(f"{owner}: {name} {what}")
            if isinstance(value, Tracer | jax.ShapeDtypeStruct):
                continue
            known = concrete(value) and not isinstance(value, bool)
            # A float of the host: inside a trace, device arrays do not compare.
            found = float(value) if known else math.nan  # pyright: ignore
            if not (math.isfinite(found) and holds(found)):
                what = words if known else f"a number, {words}"
                what = f"must be {what}, got {shown(value)}.{hint}"
                raise ValueError(f"{owner}: {name} {what}")

    return check


positive = _check_of_range("positive and finite", lambda v: v > 0)
non_negative = _check_of_range("non-negative and finite", lambda v: v >= 0)
fraction = _check_of_range("strictly between 0 and 1", lambda v: 0 < v < 1)
poisson_rate = _check_of_range(
    "strictly between 0 and 1",
    lambda v: 0 < v < 1,
    " rate = batch size / number of records.",
)
batch_rate = _check_of_range(
    "in (0, 1], the batch size over the number of records", lambda v: 0 < v <= 1
)
gaussian_delta = _check_of_range(
    "above 0 and well below one over the number of records", lambda v: 0 < v < 1
)
proper_fraction = _check_of_range("at least 0 and below 1", lambda v: 0 <= v < 1)
signed_share = _check_of_range("in [-1, 1]", lambda v: -1 <= v <= 1)
row_norm = _check_of_range("from 1e-15 to 1e15", lambda v: 1e-15 <= v <= 1e15)
_part = _check_of_range("from 1e-30 to 1e30", lambda v: 1e-30 <= v <= 1e30)


def budget_split(owner: str, value: object, *parts: str) -> None:
    """Raise `ValueError` unless a tuple has one float, 1e-30 to 1e30, for each part."""
    if not isinstance(value, tuple | list) or len(value) != len(parts):
        raise ValueError(
            f"{owner}: budget_split must be {len(parts)} positive numbers, for "
            f"{', '.join(parts)}, got {shown(value)}."
        )
    for part in value:
        dtype = getattr(part, "dtype", float)
        if not np.issubdtype(dtype, np.floating):
            raise ValueError(f"{owner}: budget_split must hold floats, got {dtype}.")
        _part(owner, budget_split=part)


def count(owner: str, **values: object) -> None:
    """Raise `ValueError` unless every value is an integer of at least 1."""
    for name, value in values.items():
        whole = isinstance(value, int | np.integer)
        if not whole or isinstance(value, bool) or value < 1:
            what = f"must be an integer of at least 1, got {shown(value)}."
            raise ValueError(f"{owner}: {name} {what}")


def one_of(owner: str, name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ValueError` unless `value` is among `allowed`."""
    options = list(allowed)
    if hasattr(value, "shape") or value not in options:
        got = shown(value)
        raise ValueError(f"{owner}: {name} must be one of {options}, got {got}.")


def function(owner: str, **values: object) -> None:
    """Raise `TypeError` unless every value can be called."""
    for name, value in values.items():
        if not callable(value):
            raise TypeError(f"{owner}: {name} must be a function, got {shown(value)}.")


# Examples of instances of a class, for messages.
_EXAMPLES = {
    "AbstractSampling": "dpb.Poisson(rate=0.1) or dpb.FullBatch()",
    "AbstractFiniteSum": "dpb.FiniteSum(loss)",
    "AbstractProblem": "dpb.FiniteSum(loss) or dpb.BilevelProblem(upper, lower)",
    "AbstractLinearSolver": "dpb.oracles.ConjugateGradient()",
    "AbstractLowerSolver": "dpb.oracles.NewtonCG()",
    "AbstractOutput": "dpb.outputs.TailMean() or dpb.outputs.Last()",
    "PrivacyBudget": "dpb.PrivacyBudget(epsilon=1.0, delta=1e-6)",
    "Sizes": 'dpb.Sizes(upper=1000, lower=5000, people="disjoint")',
    "AbstractSet": "dpb.sets.Ball(1.0)",
    "BilevelProblem": "dpb.BilevelProblem(upper, lower)",
    "Bounded": "dpb.privacy.clipped_mean(fun, records, clip_norm=1.0)",
    "FiniteSum": "dpb.FiniteSum(loss)",
    "Neighbours": "dpb.Neighbours.ADD_OR_REMOVE_ONE or dpb.Neighbours.REPLACE_ONE",
    "Levels": "dpb.Levels(upper=..., lower=...)",
    "Gaussian": "dpb.privacy.Gaussian()",
    "PenaltyTuning": "dpb.penalty_tuning(loss, groups)",
    "Range": "dpb.search.Range(0.1, 10)",
    "SourceWeighting": "dpb.source_weighting(loss, num_sources)",
}


def such_as(*kinds: type) -> str:
    """Return a sentence with code that makes instances of classes, or an empty text."""
    such = [_EXAMPLES[k.__name__] for k in kinds if k.__name__ in _EXAMPLES]
    return f" Give {' or '.join(such)}." if such else ""


def names_of(kind: Any) -> str:
    """Return the names of classes as one text, joined by "or"."""
    return " or ".join(each.__name__ for each in _classes_of(kind))


def _classes_of(kind: Any) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else typing.get_args(kind) or (kind,)


def instance(owner: str, kind: Any, **values: object) -> None:
    """Raise `TypeError` unless every value is an instance of a class, or of several."""
    for name, value in values.items():
        if not isinstance(value, kind):
            kinds = _classes_of(kind)
            got = f"an instance of {type(value).__name__}"
            got = shown(value) if isinstance(value, type) else got
            what = f"an instance of {names_of(kinds)}, got {got}.{such_as(*kinds)}"
            raise TypeError(f"{owner}: {name} must be {what}")


def single_precision(owner: str, tree: PyTree) -> None:
    """Raise `TypeError` if a number of a pytree is of half precision."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", jnp.float32)
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
            where = f"{type(tree).__name__}{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"{owner}: {where} is {dtype}, too coarse for the noise. Give float32."
            )


def strict_floats(owner: str) -> None:
    """Raise `ValueError` if `XLA_FLAGS` turns fast floating-point math on."""
    words = os.environ.get("XLA_FLAGS", "").lower().split()
    if any("enable_fast_math" in word and "=false" not in word for word in words):
        raise ValueError(f"{owner}: fast math in XLA_FLAGS breaks clipping; remove it.")


class AbstractStored(eqx.Module):
    """Base class of records outside of memory, whose rows cannot be indexed."""


def leading_axis(name: str, records: PyTree) -> int:
    """Return the common leading length of arrays in memory; refuse other records.

    Raises:
        ValueError: They are no numeric arrays in memory, or their axes differ. The
            message has types and shapes, never a value.
    """
    if isinstance(records, AbstractStored):
        raise ValueError(
            f"{name} must be in memory here, got {type(records).__name__}. Use "
            "a solver of clipped means, or a part that fits in memory."
        )
    lengths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(records):
        where = jax.tree_util.keystr(path)
        dtype: Any = getattr(leaf, "dtype", None)
        known = isinstance(dtype, np.dtype)  # data frames have dtypes of their own
        kinds = jnp.number, jnp.bool_
        if not known or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            kind = (dtype.type if known else type(dtype or leaf)).__name__
            raise ValueError(
                f"{name}{where} must be a numeric array, got {kind}. Convert lists by "
                "numpy.asarray(...), lazy frames by .collect(), texts to numbers."
            )
        lengths[where or "value"] = leaf.shape[:1]
    if not lengths or () in lengths.values() or len(set(lengths.values())) > 1:
        first = dict([*lengths.items()][:9])  # a list of records has very many
        what = f"must be arrays that share their leading axis, got {first}."
        raise ValueError(f"{name} {what}")
    return next(iter(lengths.values()))[0]


Count = Annotated[int, count]
Positive = Annotated[float, positive]
NonNegative = Annotated[float, non_negative]
Fraction = Annotated[float, fraction]
PoissonRate = Annotated[float, poisson_rate]
ProperFraction = Annotated[float, proper_fraction]
SignedShare = Annotated[float, signed_share]


# Names of arguments in other libraries: the field that does the same, and how.
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
_signature = functools.cache(inspect.signature)


def check_fields(module: Any) -> None:
    """Raise an error unless every field of a dataclass fits its annotation.

    It is a `TypeError` if a value is of another class, else a `ValueError`.
    """
    owner = type(module).__name__
    for name, optional, check in _checks_of(type(module)):
        value = getattr(module, name)
        if value is not None or not optional:
            check(owner, name, value)


@functools.cache
def _checks_of(cls: type) -> list[tuple[str, bool, Any]]:
    """List (name, whether `None` is allowed, check) for every checked field."""
    found = []
    # Annotations are texts if a module imports them from __future__.
    fields = dataclasses.fields(cls)
    texts = any(isinstance(field.type, str) for field in fields)
    hints = typing.get_type_hints(cls, include_extras=True) if texts else {}
    for field in fields:
        kind = hints.get(field.name, field.type)
        union = typing.get_origin(kind) in (types.UnionType, typing.Union)
        kinds = typing.get_args(kind) if union else (kind,)
        checks = [check for kind in kinds if (check := _check_of(kind)) is not None]
        if len(checks) == 1:  # a union of several is for the class itself to check
            found.append((field.name, type(None) in kinds, checks[0]))
    return found


def _check_of(kind: Any) -> Any:
    """Return the function that checks values of an annotation, `None` without one."""
    if typing.get_origin(kind) is typing.Literal:
        options = typing.get_args(kind)
        return lambda owner, name, value: one_of(owner, name, value, options)
    if Callable in (kind, typing.get_origin(kind)):
        return lambda owner, name, value: function(owner, **{name: value})
    if isinstance(kind, type) and issubclass(kind, eqx.Module | enum.Enum):
        return lambda owner, name, value: instance(owner, kind, **{name: value})
    for check in filter(callable, getattr(kind, "__metadata__", ())):
        return lambda owner, name, value: check(owner, **{name: value})
    return None


class Checked(eqx.Module):
    """A module whose fields are checked against their annotations.

    The annotations of this module refuse numbers outside their range, a `Literal`
    other values, a subclass of `equinox.Module` values of other classes, and a
    `Callable` values that cannot be called; a field that may be `None` admits that too.
    Equinox runs the check after those of subclasses, which call `check_fields` first
    if they rely on it.
    """

    def __new__(cls, *args: Any, **options: Any):
        """Make an instance; raise `TypeError` for an unknown argument, with advice."""
        names = [*_signature(cls.__init__).parameters][1:]
        for name in options:
            if name in names:
                continue
            field, how = _ELSEWHERE.get(name, ("", ""))
            hint = f"{did_you_mean(name, names)}."
            if field in names:
                hint = f". Use {field}{how}."
            if name in ("random_state", "seed"):
                hint = ". Noise is drawn by key=, of the function that runs it."
            what = f"there is no argument {name!r}{hint} It has {', '.join(names)}."
            raise TypeError(f"{cls.__name__}: {what}")
        return super().__new__(cls)

    __check_init__ = check_fields
