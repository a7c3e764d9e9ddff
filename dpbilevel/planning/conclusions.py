"""Conclusions from dry runs: the best method, and whether two levels are worth it."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ..core.solver import AbstractSolver
from ..privacy.budget import PrivacyBudget
from .methods import Candidate
from .race import Losses, most_runs, regret, scores

# Differences below this fraction of the achievable improvement are the noise of so few
# dry runs: one level is enough.
_NOISE = 0.03
# A mean loss above the best constant answer by this fraction of it does harm.
_HARM = 0.01
# A plan with a run so far above that answer needs luck, which is warned of.
_LUCK = 0.05
# Multiples of epsilon that are tried if two levels are not worth it.
_MORE = (2, 4, 8, 16)

# For an estimate of the time: seconds of compilation for each method, and numbers that
# steps of dry runs read in a second on one core, in records times parameters.
_COMPILING, _NUMBERS_PER_SECOND = 4.0, 1.2e9


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of the dry runs of one setting.

    Attributes:
        method: Name of the candidate.
        solver: The solver, not calibrated.
        levels: Number of levels that it uses.
        losses: Mean test loss of the released model on each population.
        regret: Fraction of the achievable improvement that it lacks on its worst
            population: 0 for the best setting on every population, 1 for one that is no
            better than the best constant answer somewhere. The achievable improvement
            counts as at least 15 % of the loss of that answer.
        runs: Number of dry runs.
        excess: Largest difference between the loss of a run and that of the best
            constant answer to the same records, on each population, over the mean of
            that answer.
        advantage: Advantage over the planned method on each population, in fractions of
            the achievable improvement, in the runs that both made; negative if it is
            worse.
    """

    method: str
    solver: AbstractSolver
    levels: int
    losses: tuple[float, ...]
    regret: float
    runs: int
    excess: tuple[float, ...] = ()
    advantage: tuple[float, ...] = ()


def ranked_best(trials: dict[int, Trial], starts: Sequence[float]) -> list[int]:
    """Return a list of indices: each method's best setting, the best method first.

    Settings whose mean loss is above the best constant answer on a population come
    after all others, within a method and among methods. The score orders the rest; one
    level wins ties. Methods that were dropped after few runs come last.
    """
    most = max(trial.runs for trial in trials.values())
    full = [index for index, trial in trials.items() if trial.runs == most]
    table = np.asarray([trials[index].losses for index in full])
    score = dict(zip(full, scores(regret(table, starts)), strict=True))
    enough = min(score.values()) + _NOISE

    def order(index: int) -> tuple[bool, bool, bool, float]:
        trial = trials[index]
        pairs = zip(trial.losses, starts, strict=True)
        harms = any(loss > start + _HARM * abs(start) for loss, start in pairs)
        if index not in score:
            return True, harms, True, trial.regret
        more = trial.levels > 1 or score[index] >= enough
        return False, harms, more, score[index]

    best: dict[str, int] = {}
    for index in sorted(trials, key=order):
        best.setdefault(trials[index].method, index)
    return list(best.values())


def improves(trial: Trial, starts: Sequence[float]) -> bool:
    """Return whether a method beats the best constant answer on every population.

    It does in the mean, and without a run far above that answer.
    """
    pairs = zip(trial.losses, starts, strict=True)
    better = all(loss < start for loss, start in pairs)
    return better and max(trial.excess, default=0.0) <= _LUCK


def excess_of(losses: Losses, constants: Losses) -> tuple[float, ...]:
    """Return by population the worst run's excess over the constant answers."""
    base = np.asarray(constants)
    above = np.max(np.asarray(losses) - base, axis=0)
    return tuple((above / (np.abs(np.mean(base, axis=0)) + 1e-9)).tolist())


def reason_of(
    ranked: Sequence[Trial],
    budget: PrivacyBudget,
    populations: Sequence[str],
    starts: Sequence[float],
    *,
    default: bool = True,
) -> str:
    """Return a few sentences on why the first of the ranked methods is planned.

    `starts` are the losses of the best constant answers; `default` is whether the
    populations are the default ones.
    """
    first = ranked[0]
    if not improves(first, starts):
        return (
            f"The plan, {first.method}, may be worse than the best constant answer. It "
            "does not improve on that answer for all synthetic data and in every run, "
            f"at {budget}. More records or a larger epsilon are needed."
        )
    # Dropped methods count, too: they may be better on some population.
    leads = [lead for trial in ranked for lead in trial.advantage]
    reach = _percent(max(0.0, 1 - max(first.regret, *leads, 0.0)))
    names = ", ".join(populations)
    text = (
        f"{first.method} is expected to reach at least {reach} of the achievable "
        f"improvement on {len(populations)} kinds of synthetic data ({names})."
    )
    if len(populations) == 1:
        text = _of_one_population(ranked, names)
    if default:
        text += " Pass synthetic= to use your own."
    one, two = (next((t for t in ranked if t.levels == k), None) for k in (1, 2))
    if first is two and one is not None:
        reach = _percent(max(0.0, 1 - one.regret))
        return f"{text} The best method of one level, {one.method}, reaches {reach}."
    if first is two or two is None:
        return text
    text += " One level is as good here as two levels, or nearly."
    # Methods that were dropped after one run are compared on no population.
    doubles = [k for k, t in enumerate(ranked) if t.levels > 1 and t.advantage]
    if not doubles:
        return text
    place = max(doubles, key=lambda k: max(ranked[k].advantage))
    return text + _comparison(ranked[place], place, populations)


def _of_one_population(ranked: Sequence[Trial], name: str) -> str:
    """Return text that compares the plan's loss with the least, on one population."""
    first, least = ranked[0], min(ranked, key=lambda trial: trial.losses[0])
    if first.losses[0] <= least.losses[0]:
        return f"{first.method} has the smallest test loss on synthetic data ({name})."
    return (
        f"On synthetic data ({name}) the test loss of {first.method} is at most "
        f"{_percent(_NOISE)} of the improvement above that of {least.method}."
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _comparison(trial: Trial, place: int, populations: Sequence[str]) -> str:
    """Return text on where an unplanned method is better or worse; '' if nowhere."""
    pairs = list(zip(populations, trial.advantage, strict=False))
    better = ", ".join(name for name, lead in pairs if lead > _NOISE)
    if not better:
        return ""
    most, least = max(trial.advantage), min(trial.advantage)
    text = f" {trial.method} is better on {better} by up to {_percent(most)}"
    worse = ", ".join(name for name, lead in pairs if lead < 0)
    if worse:
        text += f", and worse on {worse} by up to {_percent(-least)}"
    return f"{text}. If your data are like {better}, use plan.trials[{place}].solver."


def outlook_of(
    ranked: Sequence[Trial],
    starts: Sequence[float],
    budget: PrivacyBudget,
    losses: Callable[[list[AbstractSolver], PrivacyBudget], Losses],
    constants: list[float],
) -> str:
    """Return text on the epsilon from which two levels, or any method, help; or ''.

    `losses` returns those of solvers within a budget in one run, by solver and
    population; `constants` are those of the best constant answers in that run.
    """
    useful = improves(ranked[0], starts)
    single = all(trial.levels == 1 for trial in ranked)
    if useful and (single or ranked[0].levels == 2):
        return ""
    for epsilon in (factor * budget.epsilon for factor in _MORE):
        larger = PrivacyBudget(epsilon, budget.delta)
        table = losses([trial.solver for trial in ranked], larger)
        worst = np.max(regret(np.asarray(table), constants), 1).tolist()
        again = {}
        for index, (trial, found) in enumerate(zip(ranked, table, strict=True)):
            excess = excess_of([found], [constants])
            again[index] = dataclasses.replace(
                trial, losses=tuple(found), regret=worst[index], runs=1, excess=excess
            )
        best = again[ranked_best(again, constants)[0]]
        if not useful and improves(best, constants):
            return f" {best.method} may improve on it from about epsilon = {epsilon:g}."
        if useful and best.levels == 2:
            return f" Two levels may be better from about epsilon = {epsilon:g}."
    most = f"epsilon = {_MORE[-1] * budget.epsilon:g}"
    no = "Two levels are no better" if useful else "No method improves on it"
    return f" {no} at {most} either."


def estimate_of(
    methods: Sequence[Candidate], rounds, populations: int, numbers: float
) -> str:
    """Return a line of text: about how many seconds the dry runs take.

    A step reads so many `numbers`, in records times parameters.
    """
    settings = {method.name: len(method.solvers) for method in methods}
    runs = most_runs(settings, rounds, 0) * populations
    # Half of the runs are left out, as a rule; most make 100 steps, some on few rows.
    each = 60 * numbers / _NUMBERS_PER_SECOND
    seconds = (_COMPILING * len(methods) + runs / 2 * each) / 2
    return f"auto: about {max(10, round(seconds, -1)):.0f} seconds on two cores."
