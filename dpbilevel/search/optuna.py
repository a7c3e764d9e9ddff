"""Private searches whose answers go into a study of Optuna."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from .. import _checks
from .._extras import missing
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from ..privacy.report import PrivacyReport
from ..sets import Box
from .base import AbstractAskTellSolver, BlackBox
from .declared import DeclaredTraining
from .folder import recorded
from .gibo import GradientInformativeBO
from .loop import AskTell
from .space import Categorical, Range, Space
from .study import StudyTrials

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FixedTrial

_OWNER = "optimize_study"
_EXCEPTIONS = (
    "unprotected: whether and where the objective raises an exception that catch= "
    "names, after which every record counts as the worst; if that depends on a record, "
    "it moves all losses at that point"
)


@dataclasses.dataclass(frozen=True)
class StudyAnswer:
    """What a private study released.

    Attributes:
        params: The parameters of the answer.
        trials: The parameters of the points whose noisy losses were released, each with
            its loss; none for solvers that release no loss.
        report: The guarantee.
    """

    params: dict[str, Any]
    trials: tuple[tuple[dict[str, Any], float], ...]
    report: PrivacyReport


def optimize_study(
    study: "Study",
    objective: "Callable[[FixedTrial], Float[np.ndarray, ' n']]",
    distributions: "Mapping[str, BaseDistribution]",
    solver: AbstractAskTellSolver,
    *,
    num_records: int,
    budget: PrivacyBudget,
    key: PRNGKey,
    folder: Path | str | None = None,
    records: str = "",
    training: DeclaredTraining | None = None,
    trainings_after: int = 0,
    catch: Iterable[type[Exception]] | type[Exception] = (),
) -> StudyAnswer:
    """Run an objective of Optuna privately, and add what is released to its study.

    The objective returns the loss of every validation record, not their mean. As in
    `Study.optimize`, trials that were queued (`Study.enqueue_trial`) are evaluated
    first, and every evaluation has a trial of the study, which is `RUNNING` meanwhile
    and whose number the objective sees. Values that the objective reports or sets on
    its trial (an `optuna.trial.FixedTrial`) are not stored. In the study

    - each point whose noisy loss the solver releases is a finished trial with that
      value: all points of `NoisyUCB`, the best of `RepeatAndSelect`;
    - an evaluation whose loss is not released ends as `PRUNED`, without a value and,
      unless it was queued, without parameters;
    - if no loss is released (`RandomSearch`, `GradientInformativeBO`), the answer is a
      trial that waits: the next that the study evaluates, which must be on public
      records.

    User attributes of each say so, and what it cost. Needs Optuna.

    Args:
        study: The study, of one objective that is minimized. Its pruner takes no part,
            and its sampler only chooses what a queued trial leaves open.
        objective: The losses at a trial, one for each record, in the same order at
            every trial. It asks the trial for parameters of `distributions` by the
            `suggest` methods.
        distributions: Public: `FloatDistribution`, `IntDistribution` or
            `CategoricalDistribution` by parameter.
        solver: The solver, as in `minimize`, in one coordinate in [-1, 1] for each
            parameter. It cannot be `GradientInformativeBO` if there are categories.
            Queued trials need `RandomSearch` or `NoisyUCB`, whose number of evaluations
            includes them; those that are too many go on waiting.
        num_records: The number of validation records, public.
        budget: The guarantee for them, and with `training` for those trained on.
        key: One typed key.
        folder: As in `AskTell`: a study that was interrupted goes on, with the queued
            trials that it began with, and one that is done is not added to the study a
            second time.
        records: Text that tells the records from others, as in `BlackBox`; needed with
            `folder`.
        training: The releases that one call of the objective makes of other records
            that it trains on, as in `BlackBox`.
        trainings_after: As in `BlackBox`.
        catch: Exceptions of the objective, as in `Study.optimize`: the trial fails, the
            point counts as the worst for every record, and the search goes on. Others
            end the search.

    Returns:
        The answer.

    Raises:
        ImportError: Optuna is missing.
        TypeError: A distribution, or what the objective returns, is of another kind, or
            `catch` has something else than exceptions.
        ValueError: The study maximizes or has several objectives, a distribution has
            one value, the objective suggests a parameter that is not declared or from
            another distribution or raises `TrialPruned`, a queued trial does not fit,
            or as `minimize`.

    Warns:
        PrivacyWarning: The study holds released values of an earlier search.
        UserWarning: As `AskTell`.

    Privacy:
        As `minimize`. No loss of a record and no mean of losses is written to the
        study's storage: it holds released values alone, and how many evaluations there
        were, which is fixed or follows from released values. Queued trials are taken to
        be public. Not protected are the times of trials, and whether and at which trial
        the objective raises an exception: the report says so if `catch` names any,
        whose texts are not read. What the objective writes elsewhere is its own to keep
        silent, and so is a study or a storage that it reaches by other ways than its
        trial.
    """
    optuna = _optuna()
    _check_study(study, optuna)
    _checks.instance(_OWNER, PrivacyBudget, budget=budget)
    caught = _caught(catch)
    space = _StudySpace(distributions, optuna)
    if space.categories and isinstance(solver, GradientInformativeBO):
        raise ValueError(
            f"{_OWNER}: GradientInformativeBO follows slopes, which "
            f"{space.categories[0]!r} has none of; take RandomSearch or "
            "RepeatAndSelect."
        )
    of = ", ".join(f"{name}: {entry}" for name, entry in distributions.items())
    problem = BlackBox(
        None,
        num_records,
        Box(-1.0, 1.0),
        records,
        f"a study of {of}",
        training,
        trainings_after,
    )
    trials = StudyTrials(_OWNER, study, distributions, optuna)
    start = np.zeros(space.coordinates)
    try:
        solver = _with_queue(solver, trials, space, folder)
        with _Search(
            problem, solver, start, key=key, budget=budget, folder=folder
        ) as search:
            trials.begin(search, solver.shows_every_loss, folder)
            while len(points := search.ask()):
                for point in points:
                    trials.evaluate(
                        objective,
                        space.parameters(point),
                        search,
                        num_records=num_records,
                        caught=caught,
                    )
    finally:
        begun = folder is not None and recorded(Path(folder)) is not None
        trials.give_up(queue_again=not begun)
    answer = _answer(search, space, bool(caught))
    trials.finish(answer.params, list(answer.trials))
    return answer


class _Search(AskTell):
    """The search of a study."""

    _owner = _OWNER


def _answer(search: AskTell, space: "_StudySpace", catches: bool) -> StudyAnswer:
    """Return the released answer of a finished search."""
    solution, report = search.result, search.report
    assert solution is not None
    assert report is not None
    if catches:
        report = dataclasses.replace(
            report, assumptions=(*report.assumptions, _EXCEPTIONS)
        )
    trials = [
        (space.parameters(point), float(value))
        for point, value in zip(*search.noisy_losses, strict=True)
    ]
    return StudyAnswer(space.parameters(solution.value), tuple(trials), report)


def _caught(catch: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that `catch` names."""
    several = isinstance(catch, Iterable) and not isinstance(catch, type)
    found: tuple[Any, ...] = tuple(catch) if several else (catch,)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(
                f"{_OWNER}: catch must be an exception class or several, such as "
                f"(ValueError,), got {_checks.shown(kind)}."
            )
    return found


def _with_queue(
    solver: AbstractAskTellSolver,
    trials: StudyTrials,
    space: "_StudySpace",
    folder: Path | str | None,
) -> AbstractAskTellSolver:
    """Take the queued trials, and return the solver with their points first.

    A resumed run keeps the queued points that it began with.
    """
    takes = hasattr(solver, "starts")
    before = None if folder is None else recorded(Path(folder))
    own = getattr(solver, "starts", None)
    own = np.zeros((0, space.coordinates)) if own is None else np.asarray(own)
    if before is not None:
        found = before["solver"].get("starts") or []
        first = found[: max(0, len(found) - len(own))]
    else:
        count = trials.queued(own=takes)
        if count and not takes:
            raise ValueError(
                f"{_OWNER}: {count} trials are queued, but {type(solver).__name__} "
                "chooses all points by itself. Take RandomSearch or NoisyUCB, or drop "
                "the first trial of the queue by "
                "study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)."
            )
        if not count:
            return solver
        room = max(0, (solver.most_evaluations or 0) - len(own))
        first = [space.position(v) for v in trials.take(min(count, room))]
    if not len(first):
        return solver
    starts = np.concatenate([np.asarray(first, float), own])
    fields: Any = {"starts": starts}
    return dataclasses.replace(solver, **fields)


class _StudySpace:
    """Optuna's distributions on coordinates in [-1, 1]."""

    def __init__(self, distributions: Any, optuna: Any):
        _checks.instance(_OWNER, Mapping, distributions=distributions)
        if not distributions:
            raise ValueError(f"{_OWNER}: distributions names no parameter.")
        self._steps: dict[str, Any] = {}
        self._known: dict[bytes, dict[str, Any]] = {}  # not rounded on the way
        entries = {}
        for name, entry in distributions.items():
            kinds = optuna.distributions
            known = (kinds.FloatDistribution, kinds.IntDistribution)
            known += (kinds.CategoricalDistribution,)
            if not isinstance(entry, known):
                raise TypeError(
                    f"{_OWNER}: distributions[{name!r}] must be a FloatDistribution, "
                    "an IntDistribution or a CategoricalDistribution of "
                    f"optuna.distributions, got {_checks.shown(entry)}."
                )
            if entry.single():
                raise ValueError(
                    f"{_OWNER}: {name!r} has one value; set it in the objective."
                )
            entries[name] = self._entry(name, entry)
        self._space = Space(entries)
        self.coordinates = self._space.coordinates
        self.categories = self._space.categories

    def _entry(self, name: str, distribution: Any) -> Range | Categorical:
        if hasattr(distribution, "choices"):
            return Categorical(distribution.choices)
        low, high, step = distribution.low, distribution.high, distribution.step
        whole = isinstance(low, int) and isinstance(high, int)
        if step is None or (whole and step == 1):
            return Range(low, high, log=distribution.log, integer=step is not None)
        self._steps[name] = distribution  # by the number of the step
        return Range(0, round((high - low) / step), integer=True)

    def parameters(self, point: Float[np.ndarray, " d"]) -> dict[str, Any]:
        """Return the parameters at a point."""
        known = self._known.get(np.asarray(point, float).tobytes())
        if known is not None:
            return dict(known)
        found = self._space.parameters(point)
        for name, entry in self._steps.items():
            found[name] = min(entry.low + found[name] * entry.step, entry.high)
        return found

    def position(self, parameters: dict[str, Any]) -> Float[np.ndarray, " d"]:
        """Return the point at parameters, which `parameters` maps back."""
        values = dict(parameters)
        for name, entry in self._steps.items():
            values[name] = round((values[name] - entry.low) / entry.step)
        point = self._space.position(values)
        self._known[point.tobytes()] = parameters
        return point


def _check_study(study: Any, optuna: Any) -> None:
    _checks.instance(_OWNER, optuna.Study, study=study)
    if study.directions != [optuna.study.StudyDirection.MINIMIZE]:
        raise ValueError(
            f"{_OWNER}: losses are minimized, but the study's directions are "
            f"{[v.name for v in study.directions]}; give "
            "optuna.create_study(direction='minimize')."
        )


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError(missing(_OWNER, "optuna", extra="optuna")) from error
    return optuna
