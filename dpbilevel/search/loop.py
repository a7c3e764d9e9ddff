"""The loop on the host that runs a solver on a black box, resumable."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Key, PyTree

from .. import _checks
from .._extras import missing
from ..core import lock
from ..core.checkpoint import Checkpoint
from ..core.loop import bound_to
from ..core.plan import calibrate
from ..core.progress import step_bar
from ..core.resume import first_checkpoint, run_in_parts, solution_of
from ..core.solution import Solution, divergence
from ..onelevel.problem import check_set, check_start
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.clipping import Precision
from ..privacy.floats import double_precision
from ..privacy.noise import PRNGKey, check_key, derive
from ..privacy.report import PrivacyReport
from .base import AbstractAskTellSolver
from .folder import Folder, fingerprint
from .problem import BlackBox


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
    """Runs `solver` on losses that come from Python; `solve` for black boxes.

    All of it is computed in float64, whatever the setting of JAX; the black box itself
    is called under the caller's setting. With the losses of a `FiniteSum` and the same
    key it releases what `solve` does in float64. Not for use inside `jax.jit`.

    Args:
        problem: The black box.
        solver: A solver that asks for losses: calibrated, or with `budget` any.
        w0: The starting point, one vector, public or already private; projected onto
            the set. What searches the whole box takes its shape only.
        key: One typed key; consumed by this run, or not used if it resumes another. In
            a program of several processes the same one in all of them.
        budget: The guarantee to reach: the solver is calibrated first, on the
            problem's number of records, and its own noise is replaced.
        precision: As in `calibrate`; read with `budget` only.
        folder: Where to keep every evaluation as it is made. A later call with the same
            arguments and folder goes on where the run was interrupted, without
            evaluating again; one after the end returns the finished result. Needs
            `budget`, so that the folder can say what its run costs, and
            `BlackBox.records`, so that no run goes on with other records.
        progress: Whether to show a bar of steps and evaluations; needs tqdm.
        trajectory: Whether to return the released iterates.

    Returns:
        The solution as NumPy arrays, with its report if there is a `budget`.

    Raises:
        TypeError: The key is not typed, the solver does not ask for losses, or the
            black box returns something else than real numbers.
        ValueError: The solver is not calibrated or planned for another number of
            records, `w0` does not fit, the black box returns another shape, or the
            folder holds something else or a run on other records, or nothing tells
            which they are.
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
        same order, which `BlackBox.records` tells, and if the folder is no copy of one
        that another run goes on with, whose noise it would use again.
    """
    _check(problem, solver, key, budget, folder, progress)
    run = _plan(problem, solver, _start(problem, w0), key, budget, precision)
    solution, remarks = _run_or_resume(run, folder, progress)
    for remark in remarks:
        warnings.warn(f"minimize: {remark}", stacklevel=2)
    shown = solution.trajectory if trajectory else None
    return dataclasses.replace(solution, trajectory=shown, report=run.report)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run that has evaluated nothing; with a report where it was calibrated here."""

    problem: BlackBox
    solver: AbstractAskTellSolver
    report: PrivacyReport | None
    first: Checkpoint


def _plan(problem: BlackBox, solver, w0, key, budget, precision) -> _Run:
    """Calibrates the solver if there is a budget, and binds it to the black box."""
    report, n = None, problem.num_records
    with double_precision():
        if budget is not None:
            options = {"sizes": n, "w0": w0, "precision": precision}
            plan = calibrate(problem, solver, budget, **options)
            solver, report = plan.solver, plan.report
        solver = bound_to(problem, solver, None, "minimize")
        try:  # before the first evaluation, which may take hours
            solver.ledger(problem, solver.sizes).events()
        except ValueError as error:
            raise ValueError(
                "minimize: the solver is not calibrated; give "
                "budget=PrivacyBudget(epsilon, delta), or a solver from "
                f"dpbilevel.calibrate. {error}"
            ) from None
        same = fingerprint(problem, solver, w0, budget, report)
        first = first_checkpoint(
            problem, solver, w0, key=key, fingerprint=same, with_start=False
        )
    return _Run(problem, solver, report, first)


def _run_or_resume(
    run: _Run, folder: Path | str | None, progress: bool
) -> tuple[Solution, list[str]]:
    """The solution, by what is left to run, and what to warn of."""
    if folder is None or run.report is None:  # one without the other was refused
        return _run(run, run.first, None, progress)
    with lock.held(Path(folder)):
        notebook = Folder(Path(folder), run.report, run.first)
        solution = notebook.result()
        if solution is not None:
            return solution, [
                f"{folder} holds a finished run, whose result is returned; nothing was "
                "evaluated, whatever the records are now. For a new run, a second "
                "release, give a new folder."
            ]
        solution, remarks = _run(run, notebook.begin(), notebook, progress)
        notebook.finish(solution)
        return solution, remarks


def _run(
    run: _Run, saved: Checkpoint, notebook: Folder | None, progress: bool
) -> tuple[Solution, list[str]]:
    """All steps that are left; the solution, and what to warn of."""
    problem, solver = run.problem, run.solver
    # What is compiled must not read losses, and need not keep them alive.
    public = dataclasses.replace(problem, losses=_unseen, records="", evaluates="")
    evaluate = functools.partial(_evaluate, problem)
    silent = contextlib.nullcontext(lambda done, **numbers: None)
    evaluations = itertools.count(1)
    with step_bar(solver.num_steps) if progress else silent as show:

        def losses(step, number, point):
            if notebook is None:
                found = evaluate(point)
            else:
                found = notebook.losses(step, number, point, evaluate)
            show(step, evaluations=next(evaluations))
            return found

        def keep(saved):
            if notebook is not None:
                notebook.keep(saved)
            show(saved.done)

        part = functools.partial(_step, public, solver, losses)
        saved = run_in_parts(part, saved, solver.num_steps, keep)
    with double_precision():
        solution = solution_of(public, solver, saved)
    remarks = solver.remark(saved.state), divergence(int(solution.rejected_updates))
    return solution, [remark for remark in remarks if remark is not None]


def _step(
    problem: BlackBox,
    solver: AbstractAskTellSolver,
    losses: Callable[[int, int, np.ndarray], np.ndarray],
    saved: Checkpoint,
    keys: Key[Array, " 1"],
) -> tuple[PyTree, PyTree]:
    """One step: asks, evaluates on the host, tells."""
    with double_precision():
        key_ask, key_tell = _keys(keys)
        asked = _ask(problem, solver, saved.state, key=key_ask)
        points = np.asarray(asked.points, np.float64)
    table = np.zeros((len(points), problem.num_records))
    for number in range(int(asked.count)):  # public: by released values alone
        table[number] = losses(saved.done, number, points[number])
    with double_precision():
        state = _tell(problem, solver, saved.state, asked, table.T, key=key_tell)
        return state, solver.released(state)[None]


@jax.jit
def _keys(keys):
    """The keys of one step as `solve` has them."""
    (key,) = keys
    return derive(key, "ask", "tell")


@jax.jit
def _ask(problem, solver, state, *, key):
    return solver.ask(problem, state, key=key)


@jax.jit
def _tell(problem, solver, state, asked, losses, *, key):
    return solver.tell(problem, state, asked, losses, key=key)


def _evaluate(problem: BlackBox, point: np.ndarray) -> np.ndarray:
    """The losses at a point, checked without a word about their values."""
    # A copy: what is kept of an evaluation says at which point it was.
    value, n = problem.losses(point.copy()), problem.num_records
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.dtype.kind not in "fiub":
        raise TypeError(
            f"minimize: losses must return a vector of {n} real numbers, got "
            f"{type(value).__name__} of {found.dtype.type.__name__}; return "
            "numpy.asarray(..., float)."
        )
    if found.shape != (n,):
        raise ValueError(
            f"minimize: losses must return one loss per record, shape ({n},), got "
            f"shape {found.shape}. Return no mean over records; where training on "
            "data that are not protected fails, return NaN for every record."
        )
    with np.errstate(all="ignore"):  # a warning would tell something about a value
        found = found.astype(np.float64)
    # Under jax_debug_nans JAX would raise where one record's loss is NaN.
    return np.where(np.isnan(found), np.inf, found)


def _unseen(point: np.ndarray) -> np.ndarray:
    raise TypeError("AbstractAskTellSolver: ask and tell must not call losses.")


def _check(problem, solver, key, budget, folder, progress) -> None:
    """Raises before anything is planned."""
    check_key(key)
    _checks.instance("minimize", BlackBox, problem=problem)
    if not isinstance(solver, AbstractAskTellSolver):
        name = getattr(solver, "__name__", type(solver).__name__)
        raise TypeError(
            "minimize: solver must be one that asks for losses, such as "
            "RandomSearch(30, clip_range), RepeatAndSelect, NoisyUCB or "
            f"GradientInformativeBO, got {name}."
        )
    if solver.neighbours is not Neighbours.REPLACE_ONE:
        raise ValueError(
            "minimize: a black box states its number of records, which "
            "add-or-remove-one keeps private; use Neighbours.REPLACE_ONE."
        )
    if progress and importlib.util.find_spec("tqdm") is None:
        raise ValueError(missing("minimize: progress=True", "tqdm"))
    if folder is not None and budget is None:
        raise ValueError(
            "minimize: folder= keeps the report and the spending of the run, so it "
            "needs budget=; leave the calibration to it."
        )
    if folder is not None and not problem.records:
        raise ValueError(
            "minimize: folder= can go on with an interrupted run, which on other "
            "records would be a second release; it needs BlackBox(..., records=), "
            "what tells the records and their order from others, such as "
            "hashlib.sha256(X.tobytes()).hexdigest()."
        )


def _start(problem: BlackBox, w0: Any) -> Any:
    """The start in float64."""
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(w0)):
        raise TypeError(
            "minimize: calls Python between steps, so it cannot be used inside "
            "jax.jit, jax.vmap or jax.grad; call it from plain Python."
        )
    if not hasattr(w0, "shape") or len(w0.shape) != 1:
        raise ValueError(
            "minimize: w0 must be one vector, a floating-point array of shape (d,), as "
            f"the black box is called with, got {jax.tree.map(np.shape, w0)} in a "
            f"{type(w0).__name__}; put all parameters into one numpy.array(..., float) "
            "and unpack them in losses."
        )
    check_start(w0)
    with double_precision():
        start = jnp.asarray(np.asarray(w0, np.float64))
        check_set("w_set", problem.w_set, start)
        return start
