"""Successive halving of settings, by what they miss on synthetic twins."""

from collections.abc import Callable
from typing import Literal

import numpy as np

Effort = Literal["fast", "thorough"]

# How many runs each setting that is left makes on every twin, round after round, but in
# the last one on all twins together: there rare failures have to show. And what share
# of the settings goes on to the next round.
_ROUNDS = {"fast": (1, 2, 24), "thorough": (2, 4, 64)}
_KEPT = 0.25


def rounds_of(effort: Effort, twins: int) -> tuple[int, ...]:
    """How many runs on every twin, round after round, for so many twins."""
    *first, last = _ROUNDS[effort]
    return (*first, -(-last // twins))


def race(
    names: list[str],
    rounds: tuple[int, ...],
    dry_run: Callable[[int, int], list[float]],
    starts: list[float],
    progress: Callable[[int, int], None],
) -> tuple[list[int], list[list[list[float]]]]:
    """Successive halving within each method: which is best is decided at the end.

    Args:
        names: The method of each setting.
        rounds: How many runs each setting that is left makes, round after round.
        dry_run: The losses of a setting on all twins, by its index and the run's.
        starts: The losses of the starting point.
        progress: As for `auto`, in runs on all twins.

    Returns:
        The settings that are left, and their losses by run and twin.
    """
    losses: dict[int, list[list[float]]] = {index: [] for index in range(len(names))}
    left = [*losses]
    done, total = 0, len(names) * rounds[0]
    for number, count in enumerate(rounds):
        if number:
            regrets = regrets_of([losses[index] for index in left], starts)
            left = _survivors(names, left, dict(zip(left, regrets, strict=True)))
            total += count * len(left)
        first = sum(rounds[:number])
        for run in range(first, first + count):
            for index in left:
                losses[index].append(dry_run(index, run))
                done += 1
                progress(done, total)
    return left, [losses[index] for index in left]


def _survivors(
    names: list[str], left: list[int], regrets: dict[int, float]
) -> list[int]:
    """The best settings of each method."""
    survivors = []
    for name in dict.fromkeys(names[i] for i in left):
        members = [i for i in left if names[i] == name]
        members.sort(key=regrets.__getitem__)
        survivors += members[: max(1, round(_KEPT * len(members)))]
    return survivors


def regrets_of(losses: list[list[list[float]]], starts: list[float]) -> list[float]:
    """The missed share of what there is to gain on the worst twin, after equal runs."""
    # The mean, because a run that fails counts by how much it loses.
    table = np.asarray([np.mean(runs, 0) for runs in losses])
    best = np.minimum(np.min(table, 0), starts)
    room = np.maximum(np.asarray(starts) - best, 1e-9)
    return np.max(np.minimum((table - best) / room, 1e6), 1).tolist()
