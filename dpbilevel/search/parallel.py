"""Evaluations of a step by several processes."""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from .. import _checks
from .loop import Evaluations


def evaluations(losses: Callable[[np.ndarray], Any], n_jobs: int | None) -> Evaluations:
    """What maps points to everyone's losses at each of them, in their order.

    In processes of their own and not in threads: what is printed and warned about rows
    is silenced for a whole process.

    Args:
        losses: The losses at a point.
        n_jobs: The number of processes, -1 for that of the cores; with `None` points
            are evaluated one by one in this process. Otherwise libraries take one
            thread for each evaluation, so that no bit depends on the number.
    """
    if n_jobs is None:
        return lambda points: map(losses, points)

    def found(points):
        # Large records go to the processes by files; in a folder that others can enter
        # each would be readable for a moment.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
            # Threads, or the machines of a cluster, are not taken where a caller's
            # `joblib.parallel_config` names them.
            run: Any = Parallel(
                n_jobs=n_jobs, return_as="generator", temp_folder=own, backend="loky"
            )
            yield from run(delayed(_by_one_thread)(losses, v) for v in points)

    return found


def check_jobs(owner: str, n_jobs: Any) -> None:
    """Raises `ValueError` unless `n_jobs` is a number of processes or `None`."""
    whole = isinstance(n_jobs, int | np.integer) and not isinstance(n_jobs, bool)
    if n_jobs is not None and not (whole and (n_jobs > 0 or n_jobs == -1)):
        raise ValueError(
            f"{owner}: n_jobs must be a number of processes from 1, -1 for one on each "
            f"core, or None, got {_checks.shown(n_jobs)}."
        )


def _by_one_thread(losses, point):
    with threadpool_limits(1):
        return losses(point)
