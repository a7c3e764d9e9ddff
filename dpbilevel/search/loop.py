"""Searches in a loop on the host: `minimize` calls a black box."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from .._extras import check_installed
from ..core.solution import Solution
from ..privacy.budget import PrivacyBudget
from ..privacy.keys import PRNGKey
from ..privacy.per_example.clipping import Precision
from ..runs.guards import step_bar
from .ask_tell import AskTell
from .base import AbstractAskTellSolver, BlackBox

# A function from points to all records' losses at each of them, in their order.
Evaluations = Callable[[Float[np.ndarray, "k d"]], Iterable[Any]]


def minimize(
    problem: BlackBox,
    solver: AbstractAskTellSolver,
    w0: Float[Array, " d"],
    *,
    key: PRNGKey,
    budget: PrivacyBudget | None = None,
    precision: Precision = "grid",
    folder: Path | str | None = None,
    progress: bool = False,
    trajectory: bool = False,
) -> Solution:
    """Run `solver` on losses computed in Python, and return a `Solution`.

    Computations are in float64, whatever the setting of JAX; the black box itself is
    called under the caller's setting. With the losses of a `FiniteSum`, the same key
    and no folder, the releases are those of `solve` in float64. It cannot be used
    inside `jax.jit`.

    Args:
        problem: The black box.
        solver: An ask/tell solver: calibrated, or any with `budget`.
        w0: The initial point, one vector, public or already private; projected onto the
            set. A solver that searches the whole box uses only its shape.
        key: One typed key, consumed by this run; not used if it resumes another. In a
            program of several processes it must be the same in all of them.
        budget: The guarantee: the solver is calibrated first, for the problem's number
            of records, and its own noise is replaced.
        precision: As in `calibrate`; used with `budget` only.
        folder: Folder for all evaluations. A later call with the same arguments and
            folder continues an interrupted run without evaluating again; after the end
            it returns the finished result. It needs `budget`, so that the folder can
            record the cost, and `BlackBox.records`, so that no run continues on other
            records.
        progress: Whether to show a bar of steps and evaluations; needs tqdm.
        trajectory: Whether to return the released iterates.

    Returns:
        The solution as NumPy arrays, with its report if there is a `budget`.

    Raises:
        TypeError: The key is not typed, the solver is no ask/tell solver, or the black
            box returns something else than real numbers.
        ValueError: The solver is not calibrated or planned for another number of
            records, `w0` does not fit, the black box returns another shape, the folder
            holds something else or a run on other records, `records` is missing, the
            folder's lock file was deleted during the run, or JAX runs in several
            processes with a `folder`.
        OSError: The disk refuses.

    Warns:
        UserWarning: The folder holds a finished run, or the solver has a remark, made
            from released values.

    Privacy:
        One run under the solver's ledger. Every number of evaluations is fixed or
        follows from released values. Errors name types and shapes, never a loss. An
        exception of the black box itself is passed on as it is, so the black box must
        not reveal records by it. Losses and checkpoint in the folder are SECRET,
        readable by their owner alone, and deleted at the end; the result holds released
        values only.

        A resumed run makes the releases of the interrupted one, bit for bit on the same
        machine, and spends nothing more, if the records are the same in the same order,
        which `BlackBox.records` identifies. With a folder the noise of a step also
        depends on all losses so far: a copy of the folder that continues with the same
        losses releases the same bits. A copy that continues with other losses releases
        with noise of its own, and its budget has to be added.
    """
    if getattr(problem, "losses", minimize) is None:
        raise TypeError("minimize: the black box has losses=None. Use AskTell.")

    if progress:
        check_installed("minimize: progress=True", "tqdm")
    options: Any = {"key": key, "budget": budget, "precision": precision}
    search = AskTell(problem, solver, w0, folder=folder, owner="minimize", **options)
    losses: Any = problem.losses  # of copies of the points
    evaluate = functools.partial(map, losses)
    solution = run_search(search, solver.num_steps, evaluate, progress)
    return solution if trajectory else dataclasses.replace(solution, trajectory=None)


def run_search(
    search: AskTell, num_steps: int, evaluations: Evaluations, progress: bool
) -> Solution:
    """Evaluate points until a search is done, and return its `Solution`."""
    count = itertools.count(1)
    with search, step_bar(num_steps, "search", shown=progress) as show:
        while len(points := search.ask()):
            for losses in evaluations(points):
                search.tell([losses])
                show(search.done, evaluations=next(count))
    assert search.result is not None
    return search.result
