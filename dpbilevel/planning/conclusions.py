"""What follows from dry runs: which method is best, and whether two levels pay."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ..core.solver import AbstractSolver
from ..privacy.budget import PrivacyBudget
from .race import missed, regrets_of, scores_of

# Differences of less than this share of what there is to gain are the noise of so few
# dry runs: one level is enough.
_WORTH = 0.03
# A mean loss above the best constant answer by this share of it does harm.
_HARM = 0.01
# A plan with a run so far above that answer needs luck, which is warned of.
_LUCK = 0.05
# Multiples of epsilon tried where two levels do not pay.
_MORE = (2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Trial:
    """What dry runs found for one setting.

    Attributes:
        method: The candidate's name.
        solver: The solver, not calibrated.
        levels: How many levels it uses.
        losses: The mean test loss of the released model on each twin.
        regret: The share of what there is to gain that it misses on its worst twin: 0
            for the best of all settings on every twin, 1 for one that is no better
            than the best constant answer somewhere. Where there is less to gain than
            15 % of the loss of that answer, the share of these.
        runs: How many dry runs this rests on.
        excess: By how much the loss of a run is above that of the best constant answer
            to the same records, at most, on each twin, over the mean of that answer.
        leads: By which share of what there is to gain it is better than the planned
            method on each twin, in the runs that both made; negative where it is worse.
    """

    method: str
    solver: AbstractSolver
    levels: int
    losses: tuple[float, ...]
    regret: float
    runs: int
    excess: tuple[float, ...] = ()
    leads: tuple[float, ...] = ()


def ranked_best(trials: dict[int, Trial], starts: Sequence[float]) -> list[int]:
    """Return the best setting of each method, best first; one level if it is near.

    Settings whose mean loss is above the best constant answer on a twin come after all
    that are not, within a method and among methods. What is left is ordered by the
    score. Methods that were left out after few runs come last.
    """
    harms = {i: _harms(trial.losses, starts) for i, trial in trials.items()}
    most = max(trial.runs for trial in trials.values())
    full = [i for i, trial in trials.items() if trial.runs == most]
    table = np.asarray([trials[i].losses for i in full])
    scores = dict(zip(full, scores_of(missed(table, starts)), strict=True))
    enough = min(scores.values()) + _WORTH

    def order(index: int) -> tuple[bool, bool, bool, float]:
        trial = trials[index]
        if index not in scores:
            return True, harms[index], True, trial.regret
        more = trial.levels > 1 or scores[index] >= enough
        return False, harms[index], more, scores[index]

    best: dict[str, int] = {}
    for index in sorted(trials, key=order):
        best.setdefault(trials[index].method, index)
    return list(best.values())


def reason_of(
    ranked: Sequence[Trial],
    budget: PrivacyBudget,
    twins: list[str],
    starts: Sequence[float],
    *,
    own: bool = False,
) -> str:
    """Return in a few sentences why the first method is planned.

    Args:
        ranked: The best setting of each method.
        budget: The budget.
        twins: The names of the synthetic records.
        starts: The losses of the best constant answers.
        own: Whether the caller's function drew the synthetic records.
    """
    first = ranked[0]
    single, double = (
        next((trial for trial in ranked if trial.levels == levels), None)
        for levels in (1, 2)
    )
    if not improves(first, starts):
        return (
            f"The plan, {first.method}, may be worse than the best constant answer. It "
            "does not improve on that answer on every kind of synthetic records and in "
            f"every run, at {budget}. More records or a larger epsilon are needed."
        )
    # Of methods that were left out, too, which are better on some twins.
    most = max(first.regret, *(lead for trial in ranked for lead in trial.leads), 0.0)
    found = f"misses at most {most:.0%} of the possible improvement"
    if len(twins) == 1:
        found = "releases the model of the least test loss"
    text = (
        f"{first.method} {found} on synthetic records ({', '.join(twins)})."
        f"{'' if own else ' If your data differ, pass twins= or synthetic= in Python.'}"
    )
    if first.levels == 2 and single is not None:
        best = f" The best method of one level, {single.method}, misses up to"
        return f"{text}{best} {single.regret:.0%}."
    if double is None or first.levels == 2:
        return text
    place = max(
        (k for k, trial in enumerate(ranked) if trial.levels > 1),
        key=lambda k: sum(ranked[k].leads),
    )
    text += _compared(ranked[place], place, twins)
    return f"{text} Two levels do not pay here: one level is as good, or nearly."


def improves(trial: Trial, starts: Sequence[float]) -> bool:
    """Return whether a method beats the best constant answer on every twin.

    In the mean, and without a run far above it.
    """
    pairs = zip(trial.losses, starts, strict=True)
    better = all(loss < start for loss, start in pairs)
    return better and max(trial.excess, default=0.0) <= _LUCK


def _harms(losses: Sequence[float], starts: Sequence[float]) -> bool:
    """Whether a method is worse than the best constant answer on some twin."""
    pairs = zip(losses, starts, strict=True)
    return any(loss > start + _HARM * abs(start) for loss, start in pairs)


def _compared(trial: Trial, place: int, twins: list[str]) -> str:
    """Where a method that is not planned would be better, and where worse."""
    pairs = list(zip(twins, trial.leads, strict=False))
    better = [name for name, lead in pairs if lead > _WORTH]
    if not better:
        return ""
    text = (
        f" {trial.method} is better on {', '.join(better)}, by up to "
        f"{max(trial.leads):.0%}"
    )
    worse = [name for name, lead in pairs if lead < 0]
    if worse:
        text += f", and worse on {', '.join(worse)}, by up to {-min(trial.leads):.0%}"
    return (
        f"{text}: where your records are like the former, fit "
        f"plan.trials[{place}].solver."
    )


def outlook_of(
    ranked: Sequence[Trial],
    starts: list[float],
    budget: PrivacyBudget,
    table: Callable[..., list[list[list[float]]]],
    answers: list[float],
) -> str:
    """The epsilon from which two levels pay or, where no method is useful, one is.

    Args:
        ranked: The best setting of each method.
        starts: The losses of the best constant answers.
        budget: The budget.
        table: As `_DryRuns.table`.
        answers: The losses of the best constant answers in its run.
    """
    useful = improves(ranked[0], starts)
    single = all(trial.levels == 1 for trial in ranked)
    if useful and (single or ranked[0].levels == 2):
        return ""
    for epsilon in (factor * budget.epsilon for factor in _MORE):
        larger = PrivacyBudget(epsilon, budget.delta)
        losses = table([trial.solver for trial in ranked], larger)
        again = _judged(ranked, losses, answers)
        best = again[ranked_best(dict(enumerate(again)), answers)[0]]
        if not useful and improves(best, answers):
            return (
                f" From about epsilon = {epsilon:g} on {best.method} may improve on it."
            )
        if useful and best.levels == 2:
            return f" Two levels may pay from about epsilon = {epsilon:g} on."
    most = f"epsilon = {_MORE[-1] * budget.epsilon:g}"
    if not useful:
        return f" No method does so at {most} either."
    return f" Nor do they on these records at {most}."


def _judged(
    ranked: Sequence[Trial], losses: list[list[list[float]]], starts: list[float]
) -> list[Trial]:
    """The trials of the same settings with other losses."""
    pairs = zip(ranked, losses, regrets_of(losses, starts), strict=True)
    return [
        dataclasses.replace(
            trial,
            losses=tuple(found),
            regret=regret,
            runs=1,
            excess=excess_of([found], [starts]),
        )
        for trial, (found,), regret in pairs
    ]


def excess_of(
    losses: Sequence[Sequence[float]], answers: Sequence[Sequence[float]]
) -> tuple[float, ...]:
    """Return the `excess` of a trial from losses and constant answers by run."""
    base = np.asarray(answers)
    above = np.max(np.asarray(losses) - base, axis=0)
    return tuple((above / (np.abs(np.mean(base, axis=0)) + 1e-9)).tolist())
