"""The loop on the host that runs a solver on a black box, resumable."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from ..core.solution import Solution
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from ..privacy.per_example.clipping import Precision
from ..runs.progress import check_bar, step_bar
from .base import AbstractAskTellSolver
from .problem import BlackBox
from .rounds import Rounds
from .run import planned

# Maps points to everyone's losses at each of them, in their order, one by one.
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
    """Run `solver` on losses computed in Python: `solve` for black boxes.

    All of it is computed in float64, whatever the setting of JAX; the black box itself
    is called under the caller's setting. With the losses of a `FiniteSum`, the same key
    and no folder it releases what `solve` does in float64. Not for use inside
    `jax.jit`.

    Args:
        problem: The black box.
        solver: A solver that asks for losses: calibrated, or with `budget` any.
        w0: The starting point, one vector, public or already private; projected onto
            the set. A solver that searches the whole box takes its shape only.
        key: One typed key; consumed by this run, or not used if it resumes another. In
            a program of several processes the same one in all of them.
        budget: The guarantee to reach: the solver is calibrated first, on the
            problem's number of records, and its own noise is replaced.
        precision: As in `calibrate`; read with `budget` only.
        folder: Folder for every evaluation. A later call with the same arguments and
            folder continues an interrupted run without evaluating again; after the end
            it returns the finished result. Needs `budget`, so that the folder can say
            what its run costs, and `BlackBox.records`, so that no run goes on with
            other records.
        progress: Whether to show a bar of steps and evaluations; needs tqdm.
        trajectory: Whether to return the released iterates.

    Returns:
        The solution as NumPy arrays, with its report if there is a `budget`.

    Raises:
        TypeError: The key is not typed, the solver does not ask for losses, or the
            black box returns something else than real numbers.
        ValueError: The solver is not calibrated or planned for another number of
            records, `w0` does not fit, the black box returns another shape, or the
            folder holds something else or a run on other records, or there is no
            text by which to compare them, or its lock file was deleted during the run.
        OSError: The disk refuses.

    Warns:
        UserWarning: The folder holds a finished run, or the solver has a remark, made
            from released values.

    Privacy:
        One run under the solver's ledger. Every number of evaluations is fixed or
        follows from released values. Errors tell types and shapes, never a loss; an
        exception of the black box itself is passed on as it is, and is the black box's
        to keep silent. Losses and checkpoint in the folder are SECRET, readable by
        their owner alone, and deleted at the end; the result holds released values
        only. A resumed run makes the releases of the interrupted one, bit for bit on
        the same machine, and spends nothing more: if the records are the same in the
        same order, which `BlackBox.records` says. With a folder the noise of a step
        also depends on all losses so far. So a copy of the folder that goes on with
        the same losses releases the same bits. One that goes on with other losses
        releases with noise of its own, and its budget has to be added.
    """
    if getattr(problem, "losses", minimize) is None:
        raise TypeError(
            "minimize: the black box has losses=None; give a function of the point, "
            "or evaluate points elsewhere by dpbilevel.search.AskTell."
        )

    def evaluations(points):
        assert problem.losses is not None
        return map(problem.losses, points)  # copies, which a black box may change

    solution = searched(
        problem,
        solver,
        w0,
        evaluations,
        key=key,
        budget=budget,
        precision=precision,
        folder=folder,
        progress=progress,
    )
    return solution if trajectory else dataclasses.replace(solution, trajectory=None)


def searched(
    problem: BlackBox,
    solver: AbstractAskTellSolver,
    w0: Any,
    evaluations: Evaluations,
    *,
    progress: bool,
    folder: Path | str | None,
    owner: str = "minimize",
    **options: Any,
) -> Solution:
    """What `minimize` does, with losses from `evaluations`, and the trajectory."""
    if progress:
        check_bar(f"{owner}: progress=True")
    run = planned(owner, problem, solver, w0, folder=folder, **options)
    count = itertools.count(1)
    with (
        Rounds(run, folder) as rounds,
        step_bar(run.solver.num_steps, "search", shown=progress) as show,
    ):
        while len(points := rounds.ask()):
            for losses in evaluations(points):
                rounds.tell([losses])
                show(rounds.done, evaluations=next(count))
    for remark in rounds.remarks:
        warnings.warn(f"{owner}: {remark}", stacklevel=3)
    assert rounds.solution is not None
    return rounds.solution
