"""Successive halving of settings, by what they miss on synthetic twins."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from .candidates import Candidate

Effort = Literal["fast", "thorough"]

# How many runs each setting that is left makes, round after round: in the first two on
# every twin, then on all twins together. In the last one rare failures have to show:
# sources that are drawn anew may suit a method in four runs and not in the fifth.
_ROUNDS = {"fast": ((1, 3), (16, 24)), "thorough": ((2, 6), (64, 64))}
# With little effort, where each run takes long.
_FEW_ROUNDS = ((1, 1), (4, 8))
# The share of a method's settings that goes on after each round but the last, at least
# one. First the mean over the twins decides: the worst of few runs is little but noise.
_KEPT = (0.4, 0.25, 0.25)
# By how much the score has to be above the best one to be left out, after each round
# but the last: few runs say little where the budget is small.
_HOPELESS = (0.5, 0.2, 0.1)
# The weight of the worst twin in a score; the mean of all has the rest.
_OF_WORST = 0.25
# What there is to gain counts as at least this share of the constant answer's loss.
_LEAST = 0.15


def rounds_of(effort: Effort, twins: int, *, large: bool) -> tuple[int, ...]:
    """How many runs on every twin, round after round, for so many twins."""
    on_every, on_all = _FEW_ROUNDS if large else _ROUNDS[effort]
    return (*on_every, *(-(-count // twins) for count in on_all))


def race(
    methods: list[Candidate],
    rounds: tuple[int, ...],
    dry_run: Callable[[int, int], list[float]],
    answers: Callable[[int], list[float]],
    progress: Callable[[int, int], None],
) -> tuple[list[tuple[int, list[list[float]], float]], list[list[float]]]:
    """Successive halving within each method, and of methods that are far behind.

    The best method of one level stays, for comparison with two levels.

    Args:
        methods: The method of each setting.
        rounds: How many runs each setting that is left makes, round after round.
        dry_run: The losses of a setting on all twins, by its index and the run's.
        answers: The losses of the best constant answers on all twins, by the run's
            index.
        progress: As for `auto`, in runs on all twins.

    Returns:
        The best settings of every method, their losses by run and twin, and what they
        miss: of methods that were left out as it was then, from fewer runs. And the
        losses of the constant answers by run and twin.
    """
    losses: dict[int, list[list[float]]] = {index: [] for index in range(len(methods))}
    left, behind, known = [*losses], {}, []
    done = 0
    for number, count in enumerate(rounds):
        if number:
            starts = np.mean(known, 0).tolist()
            shares = shares_of([losses[index] for index in left], starts)
            worst = dict(zip(left, np.max(shares, 1).tolist(), strict=True))
            means = dict(zip(left, np.mean(shares, 1).tolist(), strict=True))
            scores = dict(zip(left, scores_of(shares).tolist(), strict=True))
            order = means if number == 1 else scores
            left = sorted(left, key=order.__getitem__)
            left, out = _survivors(
                methods, left, scores, _HOPELESS[number - 1], _KEPT[number - 1]
            )
            behind |= {index: worst[index] for index in out}
        names = collections.Counter(methods[index].name for index in left)
        total = done + _most_runs(names, rounds, number)
        for run in range(len(known), len(known) + count):
            known.append(answers(run))
            for index in left:
                losses[index].append(dry_run(index, run))
                done += 1
                progress(done, total)
    # Among those of equal runs: what few runs show depends on whose records they had.
    starts = np.mean(known, 0).tolist()
    regrets = regrets_of([losses[index] for index in left], starts)
    missed = dict(zip(left, regrets, strict=True)) | behind
    found = [(index, losses[index], regret) for index, regret in missed.items()]
    return found, known


def _most_runs(
    settings: Mapping[str, int], rounds: tuple[int, ...], number: int
) -> int:
    """Return the largest possible number of runs from round `number` on.

    The total that is shown never grows, so the share that is done never falls.
    """
    runs = 0
    for later in range(number, len(rounds)):
        if later > number:
            kept = _KEPT[later - 1]
            settings = {k: max(1, round(kept * v)) for k, v in settings.items()}
        runs += rounds[later] * sum(settings.values())
    return runs


def _survivors(
    methods: list[Candidate],
    left: list[int],
    scores: dict[int, float],
    hopeless: float,
    kept: float,
) -> tuple[list[int], list[int]]:
    """The best settings of each method, and the best ones of those left out.

    Args:
        methods: The method of each setting.
        left: The settings that are left, best first.
        scores: What they miss, by setting.
        hopeless: By how much more than the best a method that is left out misses.
        kept: The share of a method's settings that goes on.
    """
    by_method: dict[str, list[int]] = {}
    for index in left:
        by_method.setdefault(methods[index].name, []).append(index)
    firsts = [members[0] for members in by_method.values()]
    single = min(
        (i for i in firsts if methods[i].levels == 1),
        key=scores.__getitem__,
        default=None,
    )
    limit = min(scores.values()) + hopeless
    survivors, out = [], []
    for members in by_method.values():
        if members[0] == single or scores[members[0]] <= limit:
            survivors += members[: max(1, round(kept * len(members)))]
        else:
            out.append(members[0])
    return survivors, out


def scores_of(
    shares: Float[np.ndarray, "settings twins"],
) -> Float[np.ndarray, " settings"]:
    """Return what a method is chosen by, less being better.

    The mean over the twins of the missed shares, and the share on the worst twin,
    weighted: the restricted Bayes rule of Hodges and Lehmann, "The use of previous
    experience in reaching statistical decisions", 1952.
    """
    return (1 - _OF_WORST) * np.mean(shares, 1) + _OF_WORST * np.max(shares, 1)


def regrets_of(losses: list[list[list[float]]], starts: list[float]) -> list[float]:
    """The missed share of what there is to gain on the worst twin."""
    return np.max(shares_of(losses, starts), 1).tolist()


def shares_of(
    losses: list[list[list[float]]], starts: list[float]
) -> Float[np.ndarray, "settings twins"]:
    """The missed shares of what there is to gain, by setting and twin."""
    # The mean, because a run that fails counts by how much it loses.
    return missed(np.asarray([np.mean(runs, 0) for runs in losses]), starts)


def missed(
    table: Float[np.ndarray, "settings twins"], starts: Sequence[float]
) -> Float[np.ndarray, "settings twins"]:
    """The missed shares of what there is to gain.

    Where there is hardly anything to gain, in shares of the least that counts.
    """
    best = np.minimum(np.min(table, 0), starts)
    room = np.maximum(np.asarray(starts) - best, _LEAST * np.abs(starts) + 1e-9)
    return np.minimum((table - best) / room, 1e6)


def leads_of(
    losses: list[list[float]], of: list[list[float]], starts: list[float]
) -> tuple[float, ...]:
    """By how much a setting is better than another one, of what there is to gain.

    On every twin, negative where it is worse, in the runs that both made.

    Args:
        losses: Those of the setting, by run and twin.
        of: Those of the other one.
        starts: The losses of the best constant answers.
    """
    both = min(len(losses), len(of))
    table = np.asarray([np.mean(runs[:both], 0) for runs in (losses, of)])
    here, there = missed(table, starts)
    return tuple((there - here).tolist())
