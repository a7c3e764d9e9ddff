"""Private searches whose answers go into a study of Optuna."""

import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from .. import _checks
from .._extras import missing
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from ..privacy.report import PrivacyReport, rounded_up
from ..sets import Box
from .ask_tell import AskTell
from .base import AbstractAskTellSolver
from .declared import DeclaredTraining
from .gibo import GradientInformativeBO
from .problem import BlackBox
from .ranges import Categorical, Range
from .space import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FixedTrial

_OWNER = "optimize_study"


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
) -> StudyAnswer:
    """Runs an objective of Optuna privately, and adds what is released to its study.

    The objective returns the loss of every validation record, not their mean. It is
    called with trials that have no study (`optuna.trial.FixedTrial`): what it reports
    or sets there reaches no storage. At the end the study has

    - each point whose noisy loss the solver releases, as a finished trial with that
      value: all points of `NoisyUCB`, the best of `RepeatAndSelect`;
    - where no loss is released (`RandomSearch`, `GradientInformativeBO`), the answer
      as a trial that waits (`Study.enqueue_trial`): the next that the study evaluates,
      which must be on public records.

    User attributes of each say so, and what it cost. Needs Optuna.

    Args:
        study: The study, of one objective that is minimized. Its sampler and pruner
            take no part.
        objective: The losses at a trial, one for each record, in the same order at
            every trial. It asks the trial for parameters of `distributions` by the
            `suggest` methods.
        distributions: Public: `FloatDistribution`, `IntDistribution` or
            `CategoricalDistribution` by parameter.
        solver: What searches, as in `minimize`, in one coordinate in [-1, 1] for each
            parameter; with categories no `GradientInformativeBO`.
        num_records: The number of validation records, public.
        budget: The guarantee for them, and with `training` for those trained on.
        key: One typed key.
        folder: As in `AskTell`: a study that was interrupted goes on, and one that is
            done is not added to the study a second time.
        records: Text that tells the records from others, as in `BlackBox`; needed with
            `folder`.
        training: What one call of the objective releases of other records that it
            trains on, as in `BlackBox`.
        trainings_after: As in `BlackBox`.

    Returns:
        The answer.

    Raises:
        ImportError: Optuna is missing.
        TypeError: A distribution, or what the objective returns, is of another kind.
        ValueError: The study maximizes or has several objectives, a distribution has
            one value, or as `minimize`.

    Privacy:
        As `minimize`. No loss of a record, no mean of losses and no number of
        evaluations is written to the study's storage: it holds released values alone.
        When trials are added, which their times show, is not protected. What the
        objective writes elsewhere is its own to keep silent, and so is a study or a
        storage that it reaches by other ways than its trial.
    """
    optuna = _optuna()
    _check_study(study, optuna)
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
    start = np.zeros(space.coordinates)
    with AskTell(
        problem, solver, start, key=key, budget=budget, folder=folder
    ) as search:
        while len(points := search.ask()):
            for point in points:
                trial = optuna.trial.FixedTrial(space.parameters(point))
                search.tell([objective(trial)])
    solution, noisy = search.result, search.noisy_losses
    assert solution is not None
    assert solution.report is not None
    assert noisy is not None
    trials = [
        (space.parameters(point), float(value))
        for point, value in zip(*noisy, strict=True)
    ]
    answer = StudyAnswer(
        space.parameters(solution.value), tuple(trials), solution.report
    )
    _add(study, answer, distributions, _name(folder, answer), optuna)
    return answer


class _StudySpace:
    """Optuna's distributions on coordinates in [-1, 1]."""

    def __init__(self, distributions: Any, optuna: Any):
        _checks.instance(_OWNER, Mapping, distributions=distributions)
        if not distributions:
            raise ValueError(f"{_OWNER}: distributions names no parameter.")
        self._steps: dict[str, Any] = {}
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
        """The parameters at a point."""
        found = self._space.parameters(point)
        for name, entry in self._steps.items():
            found[name] = min(entry.low + found[name] * entry.step, entry.high)
        return found


def _name(folder: Path | str | None, answer: StudyAnswer) -> str:
    """Tells this release from all others; the same for a folder that is done."""
    if folder is None:
        return uuid.uuid4().hex
    text = repr((str(Path(folder).resolve()), answer.params, answer.trials))
    return hashlib.sha256(text.encode()).hexdigest()  # of what is public


def _add(study: Any, answer: StudyAnswer, distributions: Any, name: str, optuna: Any):
    """Adds what was released to a study, unless it has it already."""
    report = answer.report
    cost = f"epsilon = {rounded_up(report.epsilon)} at delta = "
    cost += f"{rounded_up(report.delta)} ({report.relation}), for all trials together"
    there = {v.user_attrs.get("release") for v in study.get_trials(deepcopy=False)}
    for number, (params, value) in enumerate(answer.trials):
        said = {"privacy": cost, "release": f"{name}-{number}"}
        trial = optuna.trial.create_trial(
            params=params,
            distributions=dict(distributions),
            value=value,
            user_attrs=said | {"loss": "a mean of clipped losses, with noise"},
        )
        if said["release"] not in there:
            study.add_trial(trial)
    if not answer.trials and name not in there:
        said = {"privacy": cost, "release": name}
        waits = said | {"loss": "not released; evaluate on public records alone"}
        study.enqueue_trial(answer.params, user_attrs=waits)


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
