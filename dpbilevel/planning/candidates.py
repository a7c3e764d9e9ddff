"""The candidates of `auto` by class of problem, and solvers as tables of configs."""

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from ..applications.penalties import PenaltyTuning
from ..applications.sources import SourceWeighting
from ..bilevel.certificates.constants import AbstractCertificate
from ..bilevel.problem import BilevelProblem
from ..bilevel.refitted import Refitted, lower_ignores_x
from ..core.descent import Rule
from ..core.problem import AbstractProblem
from ..core.solver import MECHANISM_FIELDS, AbstractSolver
from ..onelevel.problem import FiniteSum
from ..privacy.mechanisms import Gaussian
from .methods import Candidate, Methods, is_linear, is_vector, num_classes
from .synthetic import Layout


def toml_of(solver: AbstractSolver) -> str:
    """Return config text: the table `[solver]`, and `[refit]` if there is one.

    Without the noise, as a config has none. A solver that is for Python alone, or holds
    a function or optax rule, is refused.
    """
    if not isinstance(solver, Refitted):
        return "\n".join(_table("solver", solver, named=True)) + "\n"
    lines = [*_table("solver", solver.search, named=True), ""]
    head, *rest = _table("refit", solver.refit, named=True)
    lines += [head, f"budget_split = {toml_value(solver.budget_split)}"]
    if solver.refit_reads != "lower":
        lines.append(f"refit_reads = {toml_value(solver.refit_reads)}")
    return "\n".join((*lines, *rest)) + "\n"


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
    """Return the text of a value in a config; refuse what `toml_of` refuses."""
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


def longest_gradient(model: PyTree) -> float:
    """Return the largest norm of a gradient if features have norm 1 at most.

    It is 1 for a vector of logistic coefficients, and the square root of 2 for a matrix
    of softmax coefficients. Networks have no such norm: 1.
    """
    return 2**0.5 if num_classes(model) > 1 else 1.0


@functools.singledispatch
def candidates(
    problem: AbstractProblem,
    w0: PyTree,
    clip_norm: float,
    records: PyTree = None,
    intercept: int | None = None,
) -> tuple[Candidate, ...]:
    """Return a tuple of `Candidate`s for a problem, by its class.

    `candidates.register` adds those of another class.

    Args:
        problem: The problem.
        w0: The initial point.
        clip_norm: The largest norm of a record's gradient in a linear model, at 0.7 of
            which descent clips, or at 0.4 with three classes and more; the clip norm of
            a network. Step sizes are in units of its inverse square: features of norm
            $C$ have gradients of norm $C$ and curvatures of $C^2$.
        records: The description of a record, as for `auto`; `None` for linear models.
        intercept: The index of the constant feature of a linear model, or `None`.

    Raises:
        TypeError: No candidates are known for this class.
    """
    raise TypeError(
        f"auto: no candidates are known for {type(problem).__name__}. Use "
        "games.NoisyPayoff(), games.GroupDescent(), or planning.candidates.register."
    )


@candidates.register
def _(problem: FiniteSum, w0, clip_norm, records=None, intercept=None):
    return Methods(clip_norm, w0).descent()


@candidates.register
def _(problem: BilevelProblem, w0, clip_norm, records=None, intercept=None):
    methods = Methods(clip_norm, w0[1], intercept)
    found = (*methods.one_level(), methods.penalty_descent())
    if lower_ignores_x(problem, w0):
        found += (methods.lower_first(),)
    if isinstance(problem.constants, AbstractCertificate):
        found += methods.certified(problem, w0[0])
    return found


@candidates.register
def _(problem: PenaltyTuning, w0, clip_norm, records=None, intercept=None):
    scaled = Methods(clip_norm, w0[1]).scaled_groups()
    of_two_levels = candidates.dispatch(BilevelProblem)
    return (scaled, *of_two_levels(problem, w0, clip_norm, None, intercept))


@candidates.register
def _(problem: SourceWeighting, w0, clip_norm, records=None, intercept=None):
    methods = Methods(clip_norm, w0[1], intercept)
    found = methods.one_level()
    if not is_linear(w0[1]):
        # Mixtures of networks are no mixtures, and gradients of weights are mostly
        # noise. A linear model finds the sources from few validation records.
        scoring = Layout(records).linear() if isinstance(records, Mapping) else None
        return (*found, methods.selection((2.0, 4.0, 8.0), scoring))
    if num_classes(w0[1]) > 2:
        return (*found, methods.selection((64.0, 32.0)), methods.mixture())
    # Only models of two classes: a model of many classes is far from the answer after
    # a few steps.
    sizes = (8.0, 32.0, 64.0) if is_vector(w0[1]) else (16.0, 8.0)
    chosen = methods.selection(sizes), methods.mixture()
    return (*found, *map(methods.recalibrate, chosen))
