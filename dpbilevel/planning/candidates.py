"""The candidates of `auto` by class of problem, and the solvers that are none."""

import functools
from collections.abc import Mapping

from jaxtyping import PyTree

from ..applications.penalties import PenaltyTuning
from ..applications.sources import SourceWeighting
from ..bilevel.certificates.constants import AbstractCertificate
from ..bilevel.problem import BilevelProblem
from ..bilevel.refitted import lower_ignores_x
from ..core.problem import AbstractProblem
from ..onelevel.problem import FiniteSum
from .methods import Candidate, Methods, is_linear, is_vector
from .synthetic import Layout

_FIRST_ORDER = "PenaltyBilevel stands for the methods of two levels with gradients only"
_GAME = "auto plans no games, and the settings of its solvers follow from the noise"
_LIPSCHITZ = "it needs a Lipschitz constant, which a FiniteSum may not declare"
_LOSSES = "it needs losses only, and search.minimize has its settings"
# Every public solver is built in planning/methods.py or named here with the reason.
NOT_CANDIDATES: Mapping[str, str] = {
    "AdaptiveClipGD": "the largest gradient is an argument of auto",
    "AllocatedGD": "auto plans full batches",
    "F2SA": _FIRST_ORDER,
    "FiniteDifferenceBilevel": _FIRST_ORDER,
    "GradientInformativeBO": _LOSSES,
    "GroupDescent": _GAME,
    "InexactProximalPoint": _GAME,
    "LocalizedDraws": _LIPSCHITZ,
    "LocalizedGD": "NoisyGD stands for descent on one level",
    "NoisyExtragradient": _GAME,
    "NoisyPayoff": _GAME,
    "NoisyUCB": _LOSSES,
    "RandomSearch": _LOSSES,
    "RecursiveRegularization": _GAME,
    "RegularizedExponentialMechanism": _LIPSCHITZ,
    "RepeatAndSelect": _LOSSES,
    "SingleLoopBilevel": _FIRST_ORDER,
    "TunedTraining": "it selects among trainings, which its user lists",
}


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
            which descent clips; the clip norm of a network. Step sizes are in units of
            its inverse square: features of norm $C$ have gradients of norm $C$ and
            curvatures of $C^2$.
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
        return (*found, methods.selection((0.5, 2.0), (2.0, 4.0, 8.0), scoring))
    if not is_vector(w0[1]):
        return (*found, methods.selection((1.0,), (16.0, 8.0)), methods.mixture())
    # Only models of two classes: a model of many classes is far from the answer after
    # a few steps.
    chosen = methods.selection((1.0,), (8.0, 32.0, 64.0)), methods.mixture()
    return (*found, *map(methods.recalibrate, chosen))
