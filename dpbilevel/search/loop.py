"""Searches on the host: `minimize` calls a black box, `AskTell` is told its losses."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from .._extras import check_installed
from ..core.solution import Solution
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from ..privacy.per_example.clipping import Precision
from ..privacy.report import PrivacyReport
from ..runs.progress import step_bar
from .base import AbstractAskTellSolver, BlackBox
from .folder import NoisyLosses
from .rounds import Rounds
from .run import plan_run

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
    """Run `solver` on losses computed in Python: `solve` for black boxes.

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
            holds something else or a run on other records, `records` is missing, or the
            folder's lock file was deleted during the run.
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
        raise TypeError(
            "minimize: the black box has losses=None. Give a function of the point, "
            "or evaluate points elsewhere by dpbilevel.search.AskTell."
        )

    def evaluations(points):
        assert problem.losses is not None
        return map(problem.losses, points)  # copies, which a black box may change

    solution = run_search(
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


def run_search(
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
    """Return the solution of `minimize`, with its trajectory."""
    if progress:
        check_installed(f"{owner}: progress=True", "tqdm")
    run = plan_run(owner, problem, solver, w0, folder=folder, **options)
    count = itertools.count(1)
    with (
        Rounds(run, folder) as rounds,
        step_bar(run.solver.num_steps, "search", shown=progress) as show,
    ):
        while len(points := rounds.ask()):
            for losses in evaluations(points):
                rounds.tell([losses])
                show(rounds.done, evaluations=next(count))
    assert rounds.solution is not None
    return rounds.solution


class AskTell:
    """A search in steps: `ask` returns points, `tell` takes all records' losses there.

    It works like `minimize`, but the evaluations are made elsewhere: on a cluster, by
    another process, days later. With the same losses and the same key it makes the
    releases of `minimize`, bit for bit, if both have a folder or both have none.

    Args:
        problem: The black box; its `losses` may be `None`, and are not called.
        solver: An ask/tell solver: calibrated, or any with `budget`.
        w0: The initial point, one vector, public or already private.
        key: One typed key; consumed by this search.
        budget: The guarantee: the solver is calibrated first.
        precision: As in `calibrate`; used with `budget` only.
        folder: Folder for the losses and for a checkpoint of every step. A later object
            with the same arguments and folder continues the search, in this process or
            another one; after the end it has the result. The folder is locked until the
            search is done, closed or no longer referenced.

    Raises:
        TypeError: As `minimize`.
        ValueError: As `minimize`; or the folder is in use.
        OSError: The disk refuses.

    Warns:
        UserWarning: As `minimize`.

    Privacy:
        As `minimize`: one run under the solver's ledger, recorded in the folder before
        the first point is returned, whether or not it is finished. Points and their
        number are functions of released values. With a folder the noise of a step also
        depends on all losses told so far, as in `minimize`. The object is SECRET: it
        holds losses and the key of future noise. It cannot be copied, pickled or used
        after `os.fork`: two objects would release with the same noise. The time of
        evaluations, and other uses of the losses, are not covered.
    """

    def __init__(
        self,
        problem: BlackBox,
        solver: AbstractAskTellSolver,
        w0: Float[np.ndarray, " d"],
        *,
        key: PRNGKey,
        budget: PrivacyBudget | None = None,
        precision: Precision = "grid",
        folder: Path | str | None = None,
    ):
        plan = plan_run(
            "AskTell",
            problem,
            solver,
            w0,
            key=key,
            budget=budget,
            precision=precision,
            folder=folder,
        )
        self._rounds = Rounds(plan, folder)

    def ask(self) -> Float[np.ndarray, "k d"]:
        """Return the points to evaluate next, float64; none when the search is done.

        Until `tell` has taken losses, every call returns the same points.

        Raises:
            ValueError: The search was closed, or belongs to the process from which this
                one was forked, or the folder's lock file was deleted or replaced.
            OSError: The disk refuses.
        """
        return self._rounds.ask()

    def tell(self, losses: Sequence[Float[np.ndarray, " n"]]) -> None:
        """Take losses at the points of `ask`, in their order.

        When all points have losses, the step is released.

        Args:
            losses: One row for each point, or for the first ones: a table of shape `(k,
                n)`, or a sequence of vectors. A record's loss is at the same place in
                every row. NaN counts as the worst loss.

        Raises:
            TypeError: The losses are no real numbers.
            ValueError: Their shapes do not fit, `ask` was not called, or as in `ask`.
                Nothing is taken then; the message names shapes and no loss.
            OSError: The disk refuses.
        """
        self._rounds.tell(losses)

    @property
    def result(self) -> Solution | None:
        """Released solution with its trajectory; `None` until the search is done."""
        return self._rounds.solution

    @property
    def report(self) -> PrivacyReport | None:
        """Guarantee, known before the first point; `None` without `budget`."""
        return self._rounds.report

    @property
    def noisy_losses(self) -> NoisyLosses:
        """Points whose noisy mean losses were released so far, and these losses.

        Shapes `(k, d)` and `(k,)`: all points of `NoisyUCB`, one of `RepeatAndSelect`
        after its end, none of solvers that release no loss.
        """
        return self._rounds.noisy_losses

    def close(self) -> None:
        """Unlock the folder, so that another object can continue, and this one cannot.

        Without a folder this does nothing.
        """
        self._rounds.close()

    def __enter__(self) -> "AskTell":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
