"""Trials of a study of Optuna for the evaluations of a private search."""

import hashlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import _checks
from ..core.process_spending import PrivacyWarning
from ..privacy.report import rounded_up
from ..runs import spending
from .ask_tell import AskTell

OWNER = "optimize_study"
# User attributes of trials.
_RELEASE = "release"  # identifies the search of a release
_UNKNOWN = "not released"
DROP = (
    "drop the first trial of the queue by "
    "study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)"
)


class StudyTrials:
    """The trials of one search in a study: one for every evaluation.

    Args:
        study: The study.
        distributions: The declared distributions by parameter.
        optuna: The module.
    """

    def __init__(self, study: Any, distributions: Any, optuna: Any):
        self._study, self._optuna = study, optuna
        self._distributions = dict(distributions)
        self._states = optuna.trial.TrialState
        self._trial_class = _declared(self._distributions, optuna)
        self._queue: list[Any] = []  # trials taken from the study, not yet evaluated
        self._failed: set[int] = set()  # indices of releases
        self._name, self._shows, self._cost = "", False, {}

    def queued(self, *, answers: bool) -> int:
        """Count the waiting trials, after a check of their parameters.

        Args:
            answers: Whether answers of earlier searches, which wait too, are counted.

        Raises:
            ValueError: A trial has a parameter that is not declared, or a value outside
                of its distribution.
        """
        waiting = self._study.get_trials(deepcopy=False, states=(self._states.WAITING,))
        waiting = [v for v in waiting if answers or _RELEASE not in v.user_attrs]
        for trial in waiting:
            fixed = trial.system_attrs.get("fixed_params", {})
            known = {k: v for k, v in self._distributions.items() if k in fixed}
            try:  # Optuna's own check of names and values
                self._optuna.trial.create_trial(
                    state=self._states.RUNNING, params=fixed, distributions=known
                )
            except (ValueError, TypeError):
                raise ValueError(
                    f"{OWNER}: queued trial {trial.number} has {fixed}, outside of "
                    f"{self._distributions}. Declare these, or {DROP}."
                ) from None
        return len(waiting)

    def take(self, count: int) -> list[dict[str, Any]]:
        """Take the first trials of the queue, and return their parameters."""
        for _ in range(count):
            self._queue.append(self._study.ask(self._distributions))
        return [dict(trial.params) for trial in self._queue]

    def give_up(self, *, queue_again: bool) -> None:
        """Mark trials that were taken from the queue and not evaluated as failed."""
        while self._queue:
            trial = self._queue.pop(0)
            self._study.tell(trial, state=self._states.FAIL)
            if queue_again:
                self._study.enqueue_trial(dict(trial.params), trial.user_attrs)

    def begin(self, search: AskTell, shows: bool, folder: Path | str | None) -> None:
        """Name the search, and warn if the study holds releases of another one.

        Args:
            search: The search before its next evaluation.
            shows: Whether the loss of every evaluation is released.
            folder: The folder of the search.
        """
        self._name, self._shows = _name_of(folder), shows
        report = search.report
        assert report is not None  # a study is searched for a budget
        epsilon, delta = rounded_up(report.epsilon), rounded_up(report.delta)
        spent = f"epsilon = {epsilon} at delta = {delta} ({report.relation})"
        self._cost = {"privacy": f"{spent}, for all trials together"}
        others = 0
        for trial in self._study.get_trials(deepcopy=False):
            release = str(trial.user_attrs.get(_RELEASE, self._name))
            others += not release.startswith(self._name)
            if trial.state == self._states.RUNNING and self._owns(trial):
                # Its process was killed: the lock of the folder excludes others.
                self._study.tell(trial.number, state=self._states.FAIL)
        if others and search.result is None:
            _checks.warn(
                f"{OWNER}: the study holds released values of an earlier search. This "
                "one is a further release: for the same records, the epsilons and "
                "deltas add up.",
                PrivacyWarning,
            )

    def evaluate(
        self,
        objective: Callable[[Any], Any],
        params: dict[str, Any],
        search: AskTell,
        num_records: int,
        exceptions: tuple[type[Exception], ...],
    ) -> None:
        """Call the objective in a trial of the study, and tell the search its losses.

        Raises:
            ValueError: The objective suggests an undeclared parameter or prunes the
                trial, or as `AskTell`.
        """
        index = len(search.noisy_losses[1])
        number = self._start_trial(index, params)
        state, value = self._states.FAIL, None
        try:
            trial, failed = self._trial_class(params, number), False
            try:
                losses = objective(trial)
            except exceptions:
                losses, failed = np.full(num_records, np.nan), True
            except self._optuna.TrialPruned:
                raise ValueError(
                    f"{OWNER}: pruning is not supported; return losses at every trial."
                ) from None
            if trial.refused is not None:  # also if it was caught
                raise trial.refused
            search.tell([losses])
            if failed:
                if self._shows:  # its released loss has a failed trial
                    self._failed.add(index)
            elif self._shows:
                state = self._states.COMPLETE
                value = float(search.noisy_losses[1][index])
            else:
                state = self._states.PRUNED
        finally:
            self._study.tell(number, value, state)

    def finish(
        self, answer: dict[str, Any], released: list[tuple[dict[str, Any], float]]
    ) -> None:
        """Add the releases that are not in the study yet.

        Args:
            answer: The parameters of the answer.
            released: Parameters with their noisy losses, in the order of releases.
        """
        trials = self._study.get_trials(deepcopy=False)
        present = {
            trial.user_attrs.get(_RELEASE)
            for trial in trials
            if trial.state != self._states.FAIL
        }
        for index, (params, value) in enumerate(released):
            attributes = self._attributes(index, shown=True)
            if attributes[_RELEASE] not in present and index not in self._failed:
                known = {"params": params, "distributions": self._distributions}
                trial = self._optuna.trial.create_trial(
                    value=value, user_attrs=attributes, **known
                )
                self._study.add_trial(trial)
        waits = self._cost | {_RELEASE: f"{self._name}-answer"}
        if not released and waits[_RELEASE] not in present:
            waits["loss"] = f"{_UNKNOWN}; evaluate on public records alone"
            self._study.enqueue_trial(answer, user_attrs=waits)

    def _start_trial(self, index: int, params: dict[str, Any]) -> int:
        """Start a queued trial or a new one, and return its number."""
        attributes = self._attributes(index, shown=self._shows)
        if self._queue:
            trial = self._queue.pop(0)
            for name, text in attributes.items():
                trial.set_user_attr(name, text)
            return trial.number
        running = self._states.RUNNING
        # Points are shown only with their losses: if runs are hidden, the index of the
        # selected run must be hidden, too.
        known = {"params": params, "distributions": self._distributions}
        trial = self._optuna.trial.create_trial(
            state=running, user_attrs=attributes, **(known if self._shows else {})
        )
        self._study.add_trial(trial)
        trials = self._study.get_trials(deepcopy=False, states=(running,))
        return next(trial.number for trial in reversed(trials) if self._owns(trial))

    def _owns(self, trial: Any) -> bool:
        return str(trial.user_attrs.get(_RELEASE)).startswith(self._name)

    def _attributes(self, index: int, *, shown: bool) -> dict[str, str]:
        """Return the user attributes of an evaluation, or of a release."""
        if not shown:
            return self._cost | {_RELEASE: self._name, "loss": _UNKNOWN}
        loss = "a mean of clipped losses, with noise"
        return self._cost | {_RELEASE: f"{self._name}-{index}", "loss": loss}


def _name_of(folder: Path | str | None) -> str:
    """Return an identifier of a search; a resumed search has the same one."""
    if folder is None:
        return uuid.uuid4().hex
    path = Path(folder).resolve()
    text = repr((str(path), [run.started for run in spending.read(path).runs]))
    return hashlib.sha256(text.encode()).hexdigest()[:32]  # of what is public


def _declared(distributions: dict[str, Any], optuna: Any) -> Any:
    """Return a subclass of Optuna's trials that suggests declared parameters only."""

    class DeclaredTrial(optuna.trial.FixedTrial):
        """A trial without a study, for parameters in `distributions` only."""

        refused: ValueError | None = None

        def _suggest(self, name: str, distribution: Any) -> Any:
            declared = distributions.get(name)
            if distribution == declared:
                return super()._suggest(name, distribution)
            self.refused = ValueError(
                f"{OWNER}: the objective suggests {name!r} from {distribution}, but "
                f"distributions declares {declared}. Write the same in both places."
            )
            raise self.refused

    return DeclaredTrial
