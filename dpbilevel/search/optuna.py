"""Private searches that add their releases to a study of Optuna."""

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
from .ask_tell import AskTell
from .base import AbstractAskTellSolver, BlackBox
from .declared import DeclaredTraining
from .folder import read_run
from .gibo import GradientInformativeBO
from .space import Categorical, Range, Space
from .study import DROP, OWNER, StudyTrials

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FixedTrial

_EXCEPTIONS = (
    "unprotected: whether and where the objective raises an exception that catch= "
    "names, after which every record has the worst loss; if that depends on a record, "
    "it changes all losses at that point"
)


@dataclasses.dataclass(frozen=True)
class StudyAnswer:
    """Releases of a private study.

    Attributes:
        params: Parameters of the answer.
        trials: Parameters of the points whose noisy losses were released, each with its
            loss; none for solvers that release no loss.
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
    """Run an Optuna objective privately, tell its study, and return a `StudyAnswer`.

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
            includes them; further ones stay in the queue.
        num_records: The number of validation records, public.
        budget: The guarantee for them, and with `training` for those trained on.
        key: One typed key.
        folder: As in `AskTell`: an interrupted study continues with the queued trials
            of its beginning, and a finished one is not added to the study a second
            time.
        records: Text that identifies the records, as in `BlackBox`; needed with
            `folder`.
        training: Releases of the training in one call of the objective, as in
            `BlackBox`.
        trainings_after: As in `BlackBox`.
        catch: Exceptions of the objective, as in `Study.optimize`: the trial fails,
            every record has the worst loss at this point, and the search continues.
            Other exceptions end the search.

    Returns:
        The answer.

    Raises:
        ImportError: Optuna is missing.
        TypeError: A distribution or the return value of the objective has another type,
            or `catch` has something else than exceptions.
        ValueError: The study maximizes or has several objectives, a distribution has
            one value, the objective suggests a parameter that is not declared or from
            another distribution or raises `TrialPruned`, a queued trial does not fit,
            or as `minimize`.

    Warns:
        PrivacyWarning: The study holds released values of an earlier search.
        UserWarning: As `AskTell`.

    Privacy:
        As `minimize`. The study's storage receives released values and the number of
        evaluations, which is fixed or follows from released values; no loss of a record
        and no mean of losses. Queued trials must be public. The times of trials are
        unprotected, and so is whether and at which trial the objective raises an
        exception: the report says so if `catch` names any. Their texts are not read.
        The objective must not write losses elsewhere, or reach the study by other ways
        than its trial.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError(missing(OWNER, "optuna", extra="optuna")) from error
    _check_study(study, optuna)
    _checks.instance(OWNER, PrivacyBudget, budget=budget)
    exceptions = _exceptions(catch)
    space = _StudySpace(distributions, optuna)
    if space.categories and isinstance(solver, GradientInformativeBO):
        raise ValueError(
            f"{OWNER}: GradientInformativeBO takes no category; change the solver."
        )
    of = ", ".join(f"{name}: {entry}" for name, entry in distributions.items())
    box, evaluates = Box(-1.0, 1.0), f"a study of {of}"
    trains = training, trainings_after
    problem = BlackBox(None, num_records, box, records, evaluates, *trains)
    trials = StudyTrials(study, distributions, optuna)
    try:
        solver = _with_queue(solver, trials, space, folder)
        start, options = np.zeros(space.coordinates), {"key": key, "budget": budget}
        search = AskTell(problem, solver, start, folder=folder, owner=OWNER, **options)
        with search:
            trials.begin(search, solver.shows_every_loss, folder)
            while len(points := search.ask()):
                for point in points:
                    params = space.parameters(point)
                    trials.evaluate(objective, params, search, num_records, exceptions)
    finally:
        begun = folder is not None and read_run(Path(folder)) is not None
        trials.give_up(queue_again=not begun)
    answer = _answer(search, space, bool(exceptions))
    trials.finish(answer.params, list(answer.trials))
    return answer


def _answer(search: AskTell, space: "_StudySpace", catches: bool) -> StudyAnswer:
    """Return the released `StudyAnswer` of a finished search."""
    solution, report = search.result, search.report
    assert solution is not None
    assert report is not None
    if catches:
        assumptions = *report.assumptions, _EXCEPTIONS
        report = dataclasses.replace(report, assumptions=assumptions)
    trials = [
        (space.parameters(point), float(value))
        for point, value in zip(*search.noisy_losses, strict=True)
    ]
    return StudyAnswer(space.parameters(solution.value), tuple(trials), report)


def _exceptions(catch: Any) -> tuple[type[Exception], ...]:
    """Return a tuple of the exception classes that `catch` names."""
    several = isinstance(catch, Iterable) and not isinstance(catch, type)
    exceptions: tuple[Any, ...] = tuple(catch) if several else (catch,)
    for kind in exceptions:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            got = _checks.shown(kind)
            raise TypeError(f"{OWNER}: catch must be exception classes, got {got}.")
    return exceptions


def _with_queue(solver, trials, space, folder) -> AbstractAskTellSolver:
    """Take the queued trials, and return the solver with their points first.

    A resumed run keeps the queued points that it began with.
    """
    has_starts = hasattr(solver, "starts")
    before = None if folder is None else read_run(Path(folder))
    starts = getattr(solver, "starts", None)
    starts = np.zeros((0, space.coordinates)) if starts is None else np.asarray(starts)
    if before is not None:
        points = before["solver"].get("starts") or []
        points = points[: max(0, len(points) - len(starts))]
    else:
        count = trials.queued(answers=has_starts)
        if count and not has_starts:
            raise ValueError(
                f"{OWNER}: the solver takes no queued trials; use NoisyUCB or {DROP}."
            )
        if not count:
            return solver
        room = max(0, (solver.most_evaluations or 0) - len(starts))
        points = [space.position(v) for v in trials.take(min(count, room))]
    if not len(points):
        return solver
    starts = np.concatenate([np.asarray(points, float), starts])
    fields: Any = {"starts": starts}
    return dataclasses.replace(solver, **fields)


class _StudySpace:
    """Optuna's distributions on coordinates in [-1, 1]."""

    def __init__(self, distributions: Any, optuna: Any):
        _checks.instance(OWNER, Mapping, distributions=distributions)
        if not distributions:
            raise ValueError(f"{OWNER}: distributions names no parameter.")
        self._steps: dict[str, Any] = {}
        self._exact: dict[bytes, dict[str, Any]] = {}  # of queued trials
        entries, known = {}, optuna.distributions
        kinds = known.FloatDistribution, known.IntDistribution
        kinds += (known.CategoricalDistribution,)
        for name, entry in distributions.items():
            _checks.instance(OWNER, kinds, **{f"distributions[{name!r}]": entry})
            if entry.single():
                raise ValueError(f"{OWNER}: {name!r} has one value; leave it out.")
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
        self._steps[name] = distribution  # searched by the index of the step
        return Range(0, round((high - low) / step), integer=True)

    def parameters(self, point: Float[np.ndarray, " d"]) -> dict[str, Any]:
        """Return the parameters at a point, by name."""
        exact = self._exact.get(np.asarray(point, float).tobytes())
        if exact is not None:
            return dict(exact)
        values = self._space.parameters(point)
        for name, entry in self._steps.items():
            values[name] = min(entry.low + values[name] * entry.step, entry.high)
        return values

    def position(self, parameters: dict[str, Any]) -> Float[np.ndarray, " d"]:
        """Return coordinates of named parameters, which `parameters` maps back."""
        values = dict(parameters)
        for name, entry in self._steps.items():
            values[name] = round((values[name] - entry.low) / entry.step)
        point = self._space.position(values)
        self._exact[point.tobytes()] = parameters
        return point


def _check_study(study: Any, optuna: Any) -> None:
    _checks.instance(OWNER, optuna.Study, study=study)
    if study.directions != [optuna.study.StudyDirection.MINIMIZE]:
        raise ValueError(f"{OWNER}: the study must minimize one loss.")
