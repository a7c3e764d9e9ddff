"""What `auto` chooses from: solvers with their settings, baselines included."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..applications.mixed_sources import MixedSources
from ..applications.penalties import PenaltyTuning
from ..applications.recalibration import Recalibration, is_array
from ..applications.scaled_groups import ScaledGroups
from ..applications.selected_sources import ScoringModel, SelectedSources
from ..applications.sources import SourceWeighting
from ..applications.warm_start import WarmStarted
from ..bilevel.certificates.constants import AbstractCertificate
from ..bilevel.lower_first import LowerFirst, lower_ignores_x
from ..bilevel.one_level import OneLevel
from ..bilevel.penalty import PenaltyBilevel
from ..bilevel.problem import BilevelProblem
from ..bilevel.refitted import Refitted
from ..core.outputs import TailMean
from ..core.problem import AbstractProblem
from ..core.solver import AbstractSolver
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from .certified import certified
from .records import Layout

# The norm of a record's gradients in the model of its source and, at the default weight
# of one half, in the common one: the root of 1 + 1/4.
_OF_BOTH = 1.118
# Clip norms in largest norms of a gradient, which only records far on the wrong side
# have: a logistic gradient at 0 has half of it. A model for the signs of losses alone
# may be biased more. Gradients of a network have no largest norm to take a part of.
_CLIPPED, _CLIPPED_FIRST, _CLIPPED_NETWORK = 0.7, 0.5, 1.0

# Steps of descent in inverse squares of the largest norm of a gradient. A logistic loss
# has a curvature of at most a quarter of that square, so that accelerated steps above
# 5.3 diverge. Momentum makes longer moves.
_STABLE, _MOST_MOMENTUM = 4.0, 0.95
# Parts of the squared budget of a fit on lower records and of a `Recalibration`, a
# twentieth of which reads lower records: disjoint people of both levels spend all.
_LOWER_THEN_UPPER = 0.95, 1.05

# Descent of a number of steps of a size.
_Fit = Callable[[int, float], NoisyGD]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method with its settings; each number of steps among them compiles once.

    Attributes:
        name: As in the table of a plan.
        solvers: One for each setting, to be calibrated.
        levels: How many levels it uses.
    """

    name: str
    solvers: tuple[AbstractSolver, ...]
    levels: int


@functools.singledispatch
def candidates(
    problem: AbstractProblem,
    w0: PyTree,
    clip_norm: float,
    records: PyTree = None,
    intercept: int | None = None,
) -> tuple[Candidate, ...]:
    """The candidates for a problem, by its class.

    `candidates.register` adds those of a class of one's own.

    Args:
        problem: The problem.
        w0: Its starting point.
        clip_norm: The largest norm of a record's gradient in a linear model, at 0.7 of
            which descent clips; the clip norm of a network. Step sizes are in units of
            its inverse square: features of norm $C$ have gradients of norm $C$ and
            curvatures of $C^2$.
        records: What a record looks like, as for `auto`; `None` for linear models.
        intercept: The place of the constant feature of a linear model, or `None`.

    Raises:
        TypeError: None are known for this class.
    """
    raise TypeError(
        f"auto: no candidates are known for {type(problem).__name__}; it plans "
        "FiniteSum, BilevelProblem and the problems of source_weighting and "
        "penalty_tuning. For games of groups take games.GroupDescent(), whose "
        "settings follow from the noise. Register more by "
        "dpbilevel.planning.candidates.register."
    )


@candidates.register
def _(
    problem: FiniteSum,
    w0: PyTree,
    clip_norm: float,
    records: PyTree = None,
    intercept: int | None = None,
) -> tuple[Candidate, ...]:
    del records, intercept
    fit = _fit(clip_norm, w0)
    sizes = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    return (
        Candidate("NoisyGD, 30 steps", tuple(fit(30, s) for s in sizes), 1),
        Candidate("NoisyGD, 100 steps", tuple(fit(100, s) for s in sizes), 1),
    )


@candidates.register
def _(
    problem: BilevelProblem,
    w0: PyTree,
    clip_norm: float,
    records: PyTree = None,
    intercept: int | None = None,
) -> tuple[Candidate, ...]:
    del records
    fit = _fit(clip_norm, w0[1])
    then = _recalibration(clip_norm, w0[1], intercept)
    found = (*_one_level(fit, then), _refitted(clip_norm, fit))
    if lower_ignores_x(problem, w0):
        found += (_lower_first(fit),)
    if not isinstance(problem.constants, AbstractCertificate):
        return found
    proved = certified(problem, w0, fit(100, 8.0))
    return (*found, *(Candidate(name, solvers, 2) for name, solvers in proved.items()))


@candidates.register
def _(
    problem: PenaltyTuning,
    w0: PyTree,
    clip_norm: float,
    records: PyTree = None,
    intercept: int | None = None,
) -> tuple[Candidate, ...]:
    del records
    # Without the groups that are dropped rows are shorter, by how much is not known, so
    # that no public bound is near their curvature: descent takes back what is too long.
    settings = itertools.product((0.2, 0.4, 0.7), (10.0, 30.0, 100.0, 200.0))
    fits = [_plain(clip_norm, 50, size, part) for part, size in settings]
    scaled = Candidate("ScaledGroups", tuple(map(ScaledGroups, fits)), 2)
    of_two_levels = candidates.dispatch(BilevelProblem)
    return (scaled, *of_two_levels(problem, w0, clip_norm, None, intercept))


@candidates.register
def _(
    problem: SourceWeighting,
    w0: PyTree,
    clip_norm: float,
    records: PyTree = None,
    intercept: int | None = None,
) -> tuple[Candidate, ...]:
    fit = _fit(clip_norm, w0[1])
    then = _recalibration(clip_norm, w0[1], intercept)
    found = [*_one_level(fit, then)]
    if is_linear(w0[1]):
        sizes = (8.0, 32.0, 64.0) if _is_vector(w0[1]) else (16.0, 8.0)
        methods = _selected(clip_norm, fit, (1.0,), sizes), _mixed(clip_norm, w0[1])
        # Of many classes half of a model is far from the answer for a few steps.
        if then is not None and _is_vector(w0[1]):
            methods = (_recalibrated(method, then) for method in methods)
        found += methods
    else:
        # Mixtures of networks are no mixtures, and with so many parameters gradients of
        # weights are little but noise. A linear model finds the sources from few
        # validation records.
        described = isinstance(records, Mapping)
        scoring = Layout(records).linear() if described else None
        sizes = (2.0, 4.0, 8.0)
        found.append(_selected(clip_norm, fit, (0.5, 2.0), sizes, scoring))
    return tuple(found)


def _descent(
    clip_norm: float, steps: int, size: float, clipped: float = _CLIPPED
) -> NoisyGD:
    """Return descent whose steps of `size` are made by momentum if they are long."""
    plain = _plain(clip_norm, steps, min(size, _STABLE), clipped)
    if size <= _STABLE:
        return plain
    momentum = min(round(1 - _STABLE / size, 3), _MOST_MOMENTUM)
    return dataclasses.replace(plain, momentum=momentum)


def _plain(
    clip_norm: float, steps: int, size: float, clipped: float = _CLIPPED
) -> NoisyGD:
    # As they are shown: a plan can be copied from what it prints.
    clip = float(f"{clipped * clip_norm:.6g}")
    step_size = float(f"{size / clip_norm**2:.6g}")
    return NoisyGD(steps, clip, step_size, output=TailMean())


def is_linear(model: PyTree) -> bool:
    """Whether a model is one array, the coefficients of features."""
    return len(jax.tree.leaves(model)) == 1


def _is_vector(model: PyTree) -> bool:
    """Whether a model has one score."""
    return is_array(model) and jnp.ndim(model) == 1


def _fit(clip_norm: float, model: PyTree) -> _Fit:
    if _is_vector(model):
        return functools.partial(_descent, clip_norm)
    # Of several classes or a network the curvature is mostly far below any bound: long
    # steps are plain, and descent takes back those that are too long.
    clipped = _CLIPPED if is_linear(model) else _CLIPPED_NETWORK
    return functools.partial(_plain, clip_norm, clipped=clipped)


def _recalibration(
    clip_norm: float, model: PyTree, intercept: int | None
) -> Recalibration | None:
    """Return the fit of a few numbers of a linear model, `None` for other models."""
    if not is_array(model):
        return None
    default = Recalibration(intercept=intercept)
    clip = float(f"{default.curvature.clip_norm * clip_norm**2:.6g}")
    curvature = dataclasses.replace(default.curvature, clip_norm=clip)
    return dataclasses.replace(default, curvature=curvature)


def _one_level(fit: _Fit, then: Recalibration | None) -> tuple[Candidate, ...]:
    many = (1.0, 4.0, 16.0, 64.0)
    # From a few hundred validation records, where noise admits few steps, to many.
    upper = [fit(10, s) for s in (0.5, 1.0, 2.0)] + [fit(100, s) for s in (2.0, 8.0)]
    found = (
        Candidate("upper level only", tuple(map(OneLevel, upper)), 1),
        Candidate(
            "lower level only",
            tuple(OneLevel(fit(100, s), reads="lower") for s in many),
            1,
        ),
        Candidate(
            "both levels' records",
            tuple(OneLevel(fit(100, s), reads="both") for s in many),
            1,
        ),
    )
    if then is None:
        return found
    recalibrated = tuple(
        WarmStarted(OneLevel(fit(100, size), "lower"), then, _LOWER_THEN_UPPER)
        for size in (8.0, 32.0, 64.0)
    )
    found += (Candidate("lower level, recalibrated", recalibrated, 1),)
    if then.intercept is None:
        return found
    return (*found, Candidate("base rate", (then,), 1))


def _refitted(clip_norm: float, fit: _Fit) -> Candidate:
    def solver(outer: float, size: float) -> Refitted:
        search = PenaltyBilevel(
            20,
            10.0,
            NoisyGD(10, clip_norm, 1 / clip_norm**2),
            clip_norm=clip_norm,
            upper_clip_norm=0.5 * clip_norm,
            step_size=outer,
        )
        return Refitted(search, fit(100, size), (0.5, 0.5))

    settings = itertools.product((5.0, 20.0), (4.0, 8.0))
    return Candidate("PenaltyBilevel, refitted", _each(solver, settings), 2)


def _lower_first(fit: _Fit) -> Candidate:
    def solver(lower: float, upper: float) -> LowerFirst:
        return LowerFirst(fit(100, lower), fit(30, upper))

    settings = itertools.product((8.0, 32.0), (1.0, 4.0, 16.0))
    return Candidate("LowerFirst", _each(solver, settings), 2)


def _selected(
    clip_norm: float,
    fit: _Fit,
    first_sizes: tuple[float, ...],
    sizes: tuple[float, ...],
    scoring: ScoringModel | None = None,
) -> Candidate:
    # Gradients of a model of the library's own do not depend on the user's clip norm.
    first_clip_norm = clip_norm if scoring is None else 1.0

    def solver(first: float, then: float) -> SelectedSources:
        model = _descent(first_clip_norm, 10, first, _CLIPPED_FIRST)
        return SelectedSources(model, fit(100, then), scoring=scoring)

    def of_both(split: float, then: float) -> SelectedSources:
        shares = (split, split, 1.0)
        lower = solver(1.0, then)
        return dataclasses.replace(lower, fit_reads="both", budget_split=shares)

    settings = itertools.product(first_sizes, sizes)
    both = itertools.product((0.03, 0.1), sizes)
    solvers = _each(solver, settings) + _each(of_both, both)
    return Candidate("SelectedSources", solvers, 2)


def _mixed(clip_norm: float, model: PyTree) -> Candidate:
    descent = _descent if _is_vector(model) else _plain

    def solver(first: float, then: float, clipped: float, size: float) -> MixedSources:
        # Gradients along mixtures are short: no public bound of their curvature.
        mixture = _plain(clip_norm, 10, size, clipped)
        # A step reads every record with every source's model: half of the usual number.
        models = descent(_OF_BOTH * clip_norm, 50, _OF_BOTH**2 * first)
        return MixedSources(models, mixture, descent(clip_norm, 100, then), mixture)

    # Shorter steps for large noise, longer ones where there is little of it.
    longer, shorter = (20.0, 24.0, 0.5, 3.0), (15.0, 4.0, 0.2, 4.0)
    settings = [longer, (15.0, 4.0, 0.1, 4.0), shorter, (15.0, 4.0, 0.35, 2.0)]
    if not _is_vector(model):
        # Of many parameters mixtures move few, and gradients along them are short.
        settings = [(30.0, 16.0, 0.1, 1024.0), longer, shorter]
    return Candidate("MixedSources", _each(solver, settings), 2)


def _recalibrated(method: Candidate, then: Recalibration) -> Candidate:
    """Return a method that chooses sources with a part of the budget for two numbers.

    Upper records say more about the two numbers than about the sources. So disjoint
    people of the upper level spend all of the squared budget, those of the lower level
    three to four fifths.
    """

    def solver(search: SelectedSources | MixedSources) -> WarmStarted:
        inner, outer = (0.4, 0.05, 0.95), (1.0, 0.6)
        if isinstance(search, MixedSources):
            inner = (0.25, 0.02, 0.21, 0.03, 0.68, 0.02, 0.49)
            outer = (1.0, 0.3)
        elif search.fit_reads == "both":
            # A quarter of the fit's part is charged, which is most of the budget.
            inner = search.budget_split
            outer = (1.0, 2 * inner[0])
        search = dataclasses.replace(search, budget_split=inner)
        return WarmStarted(search, then, outer)

    solvers: Any = method.solvers
    return Candidate(f"{method.name}, recalibrated", tuple(map(solver, solvers)), 2)


def _each(make, settings) -> tuple[AbstractSolver, ...]:
    return tuple(make(*values) for values in settings)
