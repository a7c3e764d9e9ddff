"""Successive halving of settings, by what they miss on synthetic twins."""

from collections.abc import Callable
from typing import Literal

import numpy as np

Effort = Literal["fast", "thorough"]

# How many keys each setting that is left runs with, round after round, and what share
# of the settings goes on to the next round.
ROUNDS = {"fast": (1, 2), "thorough": (2, 4, 8)}
_KEPT = 0.25


def race(
    names: list[str],
    rounds: tuple[int, ...],
    dry_run: Callable[[int, int], list[float]],
    starts: list[float],
    progress: Callable[[int, int], None],
) -> tuple[list[list[list[float]]], list[int]]:
    """Successive halving within each method: which is best is decided at the end.

    Args:
        names: The method of each setting.
        rounds: How many keys each setting that is left runs with, round after round.
        dry_run: The losses of a setting on all twins, by its index and the key's.
        starts: The losses of the starting point.
        progress: As for `auto`, in runs on all twins.

    Returns:
        The losses of every setting by run and twin, and the settings that are left.
    """
    losses: list[list[list[float]]] = [[] for _ in names]
    left = [*range(len(names))]
    done, total = 0, len(names) * rounds[0]
    for number, count in enumerate(rounds):
        if number:
            regrets = regrets_of(losses, starts)
            left = _survivors(names, left, regrets)
            total += count * len(left)
        for index in left:
            for _ in range(count):
                losses[index].append(dry_run(index, len(losses[index])))
                done += 1
                progress(done, total)
    return losses, left


def _survivors(names: list[str], left: list[int], regrets: list[float]) -> list[int]:
    """The best settings of each method."""
    survivors = []
    for name in dict.fromkeys(names[i] for i in left):
        members = [i for i in left if names[i] == name]
        members.sort(key=regrets.__getitem__)
        survivors += members[: max(1, round(_KEPT * len(members)))]
    return survivors


def regrets_of(losses: list[list[list[float]]], starts: list[float]) -> list[float]:
    """The missed share of what there is to gain on the worst twin."""
    # The mean, because a run that fails counts by how much it loses.
    table = np.asarray([np.mean(runs, 0) for runs in losses])
    best = np.minimum(np.min(table, 0), starts)
    room = np.maximum(np.asarray(starts) - best, 1e-9)
    return np.max(np.minimum((table - best) / room, 1e6), 1).tolist()
