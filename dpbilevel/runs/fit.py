"""Plan and run in one call."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from .. import _checks
from ..core.columns import arrays
from ..core.levels import Sizes
from ..core.loop import bound_to, check_method, run_checked
from ..core.modules import arrays_of
from ..core.plan import calibrated
from ..core.problem import AbstractProblem
from ..core.process_spending import begun, costs_by
from ..core.solution import Solution, divergence
from ..core.solver import AbstractSolver
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.noise import PRNGKey
from ..privacy.per_example.clipping import Precision
from ..privacy.report import PrivacyReport
from .folder import run_in_folder
from .run import Run, check_watched, first_run, run_watched


def fit(
    problem: AbstractProblem,
    solver: AbstractSolver,
    data: PyTree,
    w0: PyTree,
    *,
    budget: PrivacyBudget,
    people: str | None = None,
    key: PRNGKey,
    precision: Precision = "grid",
    trajectory: bool = False,
    progress: bool = False,
    callback: Callable[[Run], object] | None = None,
    every: int | None = None,
    folder: str | Path | None = None,
    trainable: PyTree = None,
    sizes: Sizes | int | None = None,
) -> Solution[PrivacyReport]:
    """Plan for the data's sizes (`calibrate`) and run (`solve`); return a `Solution`.

    Tracing finds here which records' losses read `x`. If none does, the outer step is
    public and costs no budget, without a declaration.

    Args:
        problem: A `BilevelProblem` or a `FiniteSum`.
        solver: A solver of that problem; its own noise is replaced.
        data: The records; arrays, or tables and columns of pandas, polars and pyarrow,
            which are read as float64 matrices and vectors.
        w0: The initial point.
        budget: The guarantee to reach.
        people: `"disjoint"`, `"overlapping"` or `"shared"`, for two levels. By
            default shared data are `"shared"`, and separate data `"overlapping"`.
        key: One typed key.
        precision: As in `calibrate`.
        trajectory: Whether to return the released iterates.
        progress: Whether to show a bar of the steps on stderr; needs tqdm.
        callback: Called with the `Run` after every `every` steps and after the last
            step. It reads `run.done`, `run.value` and `run.epsilon`, all of them
            released. The answer `True` ends the run there; others, such as a loss that
            it returns, do not.
        every: Number of steps between two calls, and between two checkpoints; by
            default a twentieth of all.
        folder: A folder for the run. If the process is killed, the same call goes on
            from the last checkpoint and returns the same bits. If the run is finished,
            it returns the saved solution and reads no record. `key` is used only if
            the run begins: later its checkpoint has the key of the steps to come.
            `callback` may see the steps after the last checkpoint again.
        trainable: Which arrays of `w0` are trained, as for `equinox.partition`: a
            function of a leaf, or a pytree of truth values. By default all are. The
            others keep their values, which must be public.
        sizes: Public numbers of records to plan for, as in `calibrate`; needed under
            add-or-remove-one, where `data` may have more or fewer. By default, those of
            `data`. For two levels it has `people`.

    Returns:
        The solution, with its report.

    Raises:
        TypeError: As in `solve`.
        ValueError: As in `solve` and `calibrate`; or `folder` holds another run, or
            something else.
        OSError: The disk refuses a file of `folder`.

    Warns:
        RuntimeWarning: The run diverged, by `Solution.rejected_updates`.
        PrivacyWarning: Another private run was made in this process on records of the
            same shape; once for each shape.

    Privacy:
        One run under `budget`. If `callback` ends the run early, the whole budget still
        counts, because `callback` decides by released values. The numbers of records
        are published with the report. Under add-or-remove-one they are private, and
        `sizes` are published in their place.

        `folder` has one entry for the run in `spending.jsonl`, before a record is read
        and however often the run is resumed; `search.limit_spending` may refuse the
        run. Its `checkpoint.SECRET` can be read by its owner alone, holds the key of
        the noise to come, and is deleted at the end.
    """
    check_method("fit", problem, solver, key)
    watched: Any = {"progress": progress, "callback": callback, "every": every}
    check_watched(**watched)
    if sizes is None and solver.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        raise ValueError("fit: add-or-remove-one needs public numbers; give sizes=.")
    if sizes is not None and people is not None:
        raise TypeError("fit: give people in sizes=, and leave people= out.")
    problem, w0, leaves = arrays_of("fit", problem, w0, trainable)
    data = arrays(data)
    problem.check_unit(data)
    problem = problem.traced(w0, data)  # reads shapes alone
    found = problem.sizes_of(data, people) if sizes is None else sizes
    planned: Any = {"sizes": found, "w0": w0, "precision": precision}
    plan = calibrated(problem, solver, budget, **planned)
    if sizes is not None:  # others are those of the data
        bound_to(problem, plan.solver, data, "fit")
    plan.warn("fit")
    name, costs = f"fit: {type(solver).__name__}", costs_by(plan.report)
    started = name, plan.report.relation, costs, found, data, key
    begin = functools.partial(begun, *started)
    options: Any = {"key": key, "trajectory": trajectory}
    if folder is None and not any(watched.values()):
        count = begin()
        solution: Any = run_checked(problem, plan.solver, data, w0, **options)
        report = plan.report.with_generator(jax.random.key_impl(key))
        solution = dataclasses.replace(solution, report=report)
        solution = solution if leaves is None else solution.with_leaves(leaves)
        count()
    else:
        run = first_run("fit", problem, plan, data, w0, leaves=leaves, **options)
        if folder is None:
            solution = run_watched(run, begin(), **watched).solution
        else:
            given = {"budget": budget, "sizes": found, "solver": solver}
            solution = run_in_folder(Path(folder), run, given, begin, **watched)
    rejected = solution.rejected_updates
    remark = divergence(int(rejected)) if _checks.concrete(rejected) else None
    if remark is not None:
        warnings.warn(f"fit: {remark}", RuntimeWarning, stacklevel=2)
    return solution
