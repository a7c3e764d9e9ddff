"""Plan and run in one call, in a folder or not; solutions read back from folders."""

import dataclasses
import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import _checks
from .._extras import check_installed
from ..core.levels import Sizes
from ..core.loop import arrays, check_device, check_planned, run_checked, solver_for
from ..core.plan import calibrated
from ..core.problem import AbstractProblem, arrays_of
from ..core.process_spending import begun, costs_by
from ..core.saved import PAGE, read, unreadable
from ..core.solution import Solution, divergence
from ..core.solver import AbstractSolver
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.keys import PRNGKey, check_key
from ..privacy.per_example.clipping import Precision
from ..privacy.report import PrivacyReport
from . import checkpoint, guards, spending
from .checkpoint import SOLUTION, Checkpoint, hashed
from .guards import uninterruptible
from .run import (
    Run,
    checkpoint_of,
    facts_of,
    first_run,
    resumed,
    run_watched,
)

# Facts that change with the versions of JAX and others.
_OF_SOFTWARE = ("plan", "software", "program")


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
    check_key(key)
    solver_for(problem, solver, "fit")
    check_device("fit")
    watched: Any = {"progress": progress, "callback": callback, "every": every}
    if callback is not None:
        _checks.function("fit", callback=callback)
    if every is not None:
        _checks.count("fit", every=every)
    if progress:
        check_installed("fit: progress=True", "tqdm")
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
        check_planned(problem, plan.solver, data, "fit")
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
    if _checks.concrete(rejected) and int(rejected):
        _checks.warn(f"fit: {divergence(int(rejected))}", RuntimeWarning)
    return solution


def run_in_folder(
    folder: Path,
    run: Run,
    settings: dict[str, Any],
    begun: Callable[[], Callable[[], None]],
    **watched: Any,
) -> Solution:
    """Run in a folder, go on there, or read the result back; return the `Solution`.

    A finished run is read back, and its records are not compared. Errors are those of
    `fit`, after which the last checkpoint is intact. `settings` are public facts that a
    later call must not change. `begun` is called if the run begins, and returns what
    `run_watched`, with its arguments `watched`, calls as `count`.
    """
    if jax.process_count() > 1:
        raise ValueError("fit: folder= needs one process. Use start and Run.save.")
    start = hashed(jax.tree.leaves(run.state))
    settings = settings | {"start": start, "trajectory": run.path is not None}
    facts = json.loads(json.dumps(settings, default=checkpoint.as_json))
    facts |= facts_of(run)
    with guards.held(folder) as still_locked:
        if (folder / SOLUTION).is_dir():
            return _finished(folder, run, facts)
        first, report = checkpoint_of(run, facts), run.plan.report
        saved = begun_in(folder, first, report, facts, owner="fit: folder")
        for leftover in folder.glob(".save-*"):  # of a crash
            shutil.rmtree(leftover, ignore_errors=True)
        count = begun() if saved.done == 0 else lambda: None

        def counted():  # before anything is shown
            still_locked()
            count()

        def keep(run):
            still_locked()
            parts = run.done, run.key, run.state, run.path, saved.fingerprint
            checkpoint.write(folder, Checkpoint(*parts))

        run = run_watched(resumed(run, saved), counted, keep=keep, **watched)
        with uninterruptible():
            checkpoint.replace_json(folder / checkpoint.RUN, facts)
            run.solution.save(folder / SOLUTION, overwrite=True)
            spending.finish(folder)
        return run.solution


def begun_in(
    folder: Path,
    first: Checkpoint,
    report: PrivacyReport,
    facts: dict[str, Any],
    *,
    owner: str,
    records: str = "the records",
) -> Checkpoint:
    """Record the spending of a folder's run; return its `Checkpoint`, resumed or new.

    The folder is under its lock, and messages name it `owner`. `first` is the run
    before its first step, `facts` are public.

    Raises:
        ValueError: The folder holds another run or something else, or the total
            spending would exceed a limit of a folder above it.
        OSError: The disk refuses.
    """
    if not (folder / checkpoint.NAME).is_file():
        checkpoint.check_empty(owner, folder)
        checkpoint.write(folder, first)
    saved = checkpoint.resume_run(folder, checkpoint.read(folder), first, records)
    try:
        spending.begin(folder, 1, report, facts)
    except ValueError:
        known = spending.read(folder).runs or [*folder.glob(checkpoint.EVALUATIONS)]
        if saved.done == 0 and not known:  # nothing was released
            checkpoint.remove(folder)
        raise
    return saved


def _finished(folder: Path, run: Run, facts: dict[str, Any]) -> Solution:
    """Return a finished folder's `Solution`, of this run; delete its checkpoint."""
    try:
        then = json.loads((folder / checkpoint.RUN).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"fit: {folder} holds no run of fit, or a damaged one. Give a new folder."
        ) from error
    if then.get("software") != facts["software"]:  # on which the others depend
        facts = {k: v for k, v in facts.items() if k not in _OF_SOFTWARE}
    checkpoint.check_same_run(folder, then, facts)
    spending.finish(folder)
    found = load(folder, like=run.solution.value)

    def on_device(leaf):
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    value, path = jax.tree.map(on_device, (found.value, found.trajectory))
    return dataclasses.replace(found, value=value, trajectory=path)


def load(folder: str | Path, *, like: PyTree = None) -> Solution[Any]:
    """Return the `Solution` in a folder: a saved one, or that of a finished run.

    Args:
        folder: A folder that `Solution.save` wrote, the `folder` of a finished `fit`,
            or the result folder of `dpbilevel run`. Of the latter, the value is in the
            units of its config, as `solution.npz` has it, and there is no trajectory.
        like: A value of the same structure and shapes, such as the model before
            training: needed if the value has other nodes than dictionaries, lists and
            tuples, such as Equinox modules and named tuples. Their functions and
            static fields are those of `like`.

    Returns:
        The solution, with its report. Its arrays are NumPy's, equal bit for bit.

    Raises:
        ValueError: The folder holds no solution, a damaged one, or one of another
            version; or `like` is needed or differs.

    Privacy:
        Reads released values: free. No file that it reads can run code.
    """
    folder = Path(folder)
    if (folder / checkpoint.SOLUTION).is_dir():
        folder = folder / checkpoint.SOLUTION
    if (folder / PAGE).is_file():
        parts, facts = read(folder, like)
    elif (folder / checkpoint.RESULT).is_file():
        parts, facts = _of_command(folder)
    else:
        names = f"{PAGE} or {checkpoint.RESULT}"
        raise ValueError(
            f"load: {folder} holds no solution ({names}). Give the folder of "
            "Solution.save, or that of a finished dpbilevel run."
        )
    try:
        rejected = int(facts["rejected_updates"])
        text = json.dumps(facts["report"])
        report = None if text == "null" else PrivacyReport.from_json(text)
        return Solution(parts["value"], parts["trajectory"], rejected, report)
    except Exception as error:  # files of others may raise anything
        raise unreadable(folder, error) from error


def _of_command(folder: Path) -> tuple[dict[str, PyTree], dict[str, Any]]:
    """Return two dicts of a finished command-line run: its pytrees, its result page."""
    try:
        page = json.loads((folder / checkpoint.RESULT).read_text(encoding="utf-8"))
        content = io.BytesIO((folder / checkpoint.ARRAYS).read_bytes())
        with np.load(content, allow_pickle=False) as arrays:  # a pickle could run code
            x, y = arrays["x"], arrays["y"] if "y" in arrays.files else None
        one_level = y is None and "people" not in page["report"]
        return {"value": x if one_level else (x, y), "trajectory": None}, page
    except Exception as error:  # as above
        raise unreadable(folder, error) from error
