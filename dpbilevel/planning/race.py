"""Successive halving of settings by their regret on synthetic data."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from .methods import Candidate

Effort = Literal["fast", "thorough"]
Losses = list[list[float]]  # by run and population

# Number of runs that each remaining setting makes, round after round: in the first two
# rounds on every population, then over all populations together. In the last round rare
# failures have to show: sources that are drawn anew may suit a method in four runs and
# not in the fifth.
_ROUNDS = {"fast": ((1, 3), (16, 24)), "thorough": ((2, 6), (64, 64))}
# The same if each run takes long and little effort is wanted.
_FEW_ROUNDS = ((1, 1), (4, 8))
# Fraction of a method's settings that stay after each round but the last, at least one.
# The first time the mean over the populations decides: the worst of few runs is noise.
_STAY = (0.4, 0.25, 0.25)
# A method is dropped if its score is this far above the best one, after each round but
# the last: few runs say little if the budget is small.
_HOPELESS = (0.5, 0.2, 0.1)
# Weight of the worst population in a score; the mean of all has the rest.
_WORST_WEIGHT = 0.25
# The achievable improvement is at least this fraction of the constant answer's loss.
_LEAST = 0.15


class Outcome(NamedTuple):
    """Losses of the best setting of a method in its dry runs.

    Attributes:
        setting: Index of the setting.
        losses: Losses by run and population.
        regret: Regret on the worst population; of methods that were dropped as it was
            then, from fewer runs.
    """

    setting: int
    losses: Losses
    regret: float


def rounds_of(effort: Effort, populations: int, *, large: bool) -> tuple[int, ...]:
    """Return the number of runs on every population, round after round."""
    each, total = _FEW_ROUNDS if large else _ROUNDS[effort]
    return (*each, *(-(-count // populations) for count in total))


def race(
    methods: list[Candidate],
    rounds: tuple[int, ...],
    dry_run: Callable[[int, int], list[float]],
    constant_losses: Callable[[int], list[float]],
    progress: Callable[[int, int], None],
) -> tuple[list[Outcome], Losses]:
    """Run successive halving within each method, and drop methods that are far behind.

    The best method of one level stays, for comparison with two levels.

    Args:
        methods: The method of each setting.
        rounds: The number of runs of each remaining setting, round after round.
        dry_run: Returns the losses of a setting on all populations, by the index of
            the setting and of the run.
        constant_losses: Returns the losses of the best constant answers on all
            populations, by the index of the run.
        progress: As for `auto`, in runs on all populations.

    Returns:
        The best setting of every method, and the losses of the constant answers.
    """
    losses: dict[int, Losses] = {index: [] for index in range(len(methods))}
    left, dropped, constants = [*losses], {}, []
    done = 0
    for number, count in enumerate(rounds):
        if number:
            made = {index: losses[index] for index in left}
            left, worst = _survivors(methods, made, constants, number - 1)
            dropped |= worst
        names = collections.Counter(methods[index].name for index in left)
        total = done + _most_runs(names, rounds, number)
        for run in range(len(constants), len(constants) + count):
            constants.append(constant_losses(run))
            for index in left:
                losses[index].append(dry_run(index, run))
                done += 1
                progress(done, total)
    # Only among settings of equally many runs: few runs depend on their records.
    last = worst_regrets([losses[index] for index in left], constants)
    regret = dict(zip(left, last, strict=True)) | dropped
    return [Outcome(index, losses[index], regret[index]) for index in regret], constants


def _most_runs(
    settings: Mapping[str, int], rounds: tuple[int, ...], number: int
) -> int:
    """Return the largest possible number of runs from round `number` on.

    The total that is shown never grows, so the fraction that is done never falls.
    """
    runs = 0
    for later in range(number, len(rounds)):
        if later > number:
            settings = {k: _stay(v, later - 1) for k, v in settings.items()}
        runs += rounds[later] * sum(settings.values())
    return runs


def _stay(settings: int, number: int) -> int:
    """Return how many settings of a method stay after a round."""
    return max(1, round(_STAY[number] * settings))


def _survivors(
    methods: list[Candidate], losses: dict[int, Losses], constants: Losses, number: int
) -> tuple[list[int], dict[int, float]]:
    """Return the settings that stay, and the best settings of dropped methods.

    Args:
        methods: The method of each setting.
        losses: The losses of the settings that are left.
        constants: The losses of the constant answers.
        number: The index of the round that was made.

    Returns:
        Settings that stay, and the worst regret of dropped ones.
    """
    table = regrets([*losses.values()], constants)
    mean, worst, score = (
        dict(zip(losses, values.tolist(), strict=True))
        for values in (np.mean(table, 1), np.max(table, 1), scores(table))
    )
    order = score if number else mean
    by_method: dict[str, list[int]] = {}
    for index in sorted(losses, key=order.__getitem__):
        by_method.setdefault(methods[index].name, []).append(index)
    firsts = [settings[0] for settings in by_method.values()]
    one_level = [index for index in firsts if methods[index].levels == 1]
    single = min(one_level, key=score.__getitem__, default=None)
    limit = min(score.values()) + _HOPELESS[number]
    left, dropped = [], {}
    for first, settings in zip(firsts, by_method.values(), strict=True):
        if first == single or score[first] <= limit:
            left += settings[: _stay(len(settings), number)]
        else:
            dropped[first] = worst[first]
    return left, dropped


def scores(
    regrets: Float[np.ndarray, "settings populations"],
) -> Float[np.ndarray, " settings"]:
    """Return the score that a method is chosen by; the smallest is best.

    The weighted mean of the mean regret and the worst one: the restricted Bayes rule of
    Hodges and Lehmann, "The use of previous experience in reaching statistical
    decisions", 1952.
    """
    mean, worst = np.mean(regrets, 1), np.max(regrets, 1)
    return (1 - _WORST_WEIGHT) * mean + _WORST_WEIGHT * worst


def worst_regrets(losses: Sequence[Losses], constants: Losses) -> list[float]:
    """Return the regret of each setting on its worst population."""
    return np.max(regrets(losses, constants), 1).tolist()


def regrets(
    losses: Sequence[Losses], constants: Losses
) -> Float[np.ndarray, "settings populations"]:
    """Return the regrets of settings from losses and constant answers by run."""
    # The mean over the runs, because a failure counts by how much it loses.
    table = np.asarray([np.mean(runs, 0) for runs in losses])
    return regret(table, np.mean(constants, 0))


def regret(
    table: Float[np.ndarray, "settings populations"],
    starts: Sequence[float] | Float[np.ndarray, " populations"],
) -> Float[np.ndarray, "settings populations"]:
    """Return the fraction of the achievable improvement that each setting lacks.

    Args:
        table: The mean losses.
        starts: The mean losses of the best constant answers.
    """
    starts = np.asarray(starts)
    best = np.minimum(np.min(table, 0), starts)
    achievable = np.maximum(starts - best, _LEAST * np.abs(starts) + 1e-9)
    return np.minimum((table - best) / achievable, 1e6)


def advantage(losses: Losses, of: Losses, starts: Sequence[float]) -> tuple[float, ...]:
    """Return by how much a setting is better than another one on each population.

    Args:
        losses: The losses of the setting.
        of: The losses of the other setting; the runs that both made are compared.
        starts: The mean losses of the best constant answers.

    Returns:
        Fractions of the achievable improvement, negative if the setting is worse.
    """
    both = min(len(losses), len(of))
    here, there = regret(
        np.asarray([np.mean(runs[:both], 0) for runs in (losses, of)]), starts
    )
    return tuple((there - here).tolist())
