"""The loop on the host that runs a solver on a black box, resumable."""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .. import _checks
from .._extras import missing
from ..core import checkpoint, lock
from ..core.checkpoint import Checkpoint
from ..core.descent import rejected_updates
from ..core.loop import bound_to
from ..core.plan import calibrate
from ..core.solution import PrivateResult, Solution, divergence
from ..onelevel.problem import check_set, check_start
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.clipping import Precision
from ..privacy.grid import wide_integers
from ..privacy.noise import PRNGKey, check_key, derive, step_keys
from .base import AbstractAskingSolver
from .folder import Folder, Memory, described
from .problem import BlackBox, SearchProblem


@overload
def minimize(
    problem: BlackBox,
    solver: AbstractAskingSolver,
    w0: Float[Array, " d"],
    *,
    key: PRNGKey,
    budget: None = None,
    precision: Precision = "grid",
    folder: None = None,
    progress: bool = False,
    trajectory: bool = False,
) -> Solution: ...


@overload
def minimize(
    problem: BlackBox,
    solver: AbstractAskingSolver,
    w0: Float[Array, " d"],
    *,
    key: PRNGKey,
    budget: PrivacyBudget,
    precision: Precision = "grid",
    folder: Path | str | None = None,
    progress: bool = False,
    trajectory: bool = False,
) -> PrivateResult: ...


def minimize(
    problem: BlackBox,
    solver: AbstractAskingSolver,
    w0: Float[Array, " d"],
    *,
    key: PRNGKey,
    budget: PrivacyBudget | None = None,
    precision: Precision = "grid",
    folder: Path | str | None = None,
    progress: bool = False,
    trajectory: bool = False,
) -> Solution | PrivateResult:
    """Runs `solver` on losses that come from Python; `solve` for black boxes.

    All of it is computed in float64, whatever the setting of JAX; the black box itself
    is called under the caller's setting. With the losses of a `FiniteSum` and the same
    key it releases what `solve` does in float64. Not for use inside `jax.jit`.

    Args:
        problem: The black box.
        solver: A solver that asks for losses: calibrated, or with `budget` any.
        w0: The starting point, one vector, public or already private; projected onto
            the set. What searches the whole box takes its shape only.
        key: One typed key; consumed by this run, or not used if it resumes another.
        budget: The guarantee to reach: the solver is calibrated first, on the
            problem's number of records, and its own noise is replaced.
        precision: As in `calibrate`; read with `budget` only.
        folder: Where to keep every evaluation as it is made. A later call with the same
            arguments and folder goes on where the run was interrupted, without
            evaluating again; one after the end returns the finished result. Needs
            `budget`, so that the folder can say what its run costs, and
            `BlackBox.records`, so that no other records are told to go on with.
        progress: Whether to show a bar of steps and evaluations; needs tqdm.
        trajectory: Whether to return the released iterates.

    Returns:
        The solution as NumPy arrays; with `budget` together with its report.

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
    check_key(key)
    _check(problem, solver, progress)
    if folder is not None:
        _check_resumable(problem, budget)
    w0 = _start(problem, w0)
    report = None
    with wide_integers():
        if budget is not None:
            plan = calibrate(
                problem,
                solver,
                budget,
                sizes=problem.num_records,
                w0=w0,
                precision=precision,
            )
            solver, report = plan.solver, plan.report
        solver = bound_to(problem, solver, None, "minimize")
        _check_calibrated(problem, solver)
        first = _before(problem, solver, w0, key)
        public = described(problem, solver, w0)
    if folder is None or budget is None or report is None:
        found = _run(problem, solver, first, Memory(), progress)
    else:
        asked = {"epsilon": budget.epsilon, "delta": budget.delta}
        public = {"budget": asked, **public, "report": json.loads(report.to_json())}
        place = Path(folder)
        with lock.held(place):
            notebook = Folder(place, report, public, problem.records)
            before = notebook.finished()
            if before is not None:
                warnings.warn(
                    f"minimize: {place} holds a finished run, whose result is "
                    "returned; nothing was evaluated, whatever the records are now. "
                    "For a new run, a second release, give a new folder.",
                    stacklevel=2,
                )
            else:
                saved = notebook.begun(first)
                before = _run(problem, solver, saved, notebook, progress)
                notebook.finish(*before)
            found = before
    value, path, rejected = found
    shown = path if trajectory else None
    if report is None:
        return Solution(value, shown, rejected)
    return PrivateResult(value, report, shown, rejected)


def _run(
    problem: BlackBox,
    solver: AbstractAskingSolver,
    saved: Checkpoint,
    notebook: Memory | Folder,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray, int]:
    """All steps that are left; returns answer, released iterates, rejected updates."""
    # What is compiled must not read losses, and need not keep them alive.
    public = dataclasses.replace(problem, losses=_unseen, records="", evaluates="")
    with wide_integers():
        structure: Any = jax.tree.structure(solver.init(public, _point(saved)))
    with _bar(progress, solver.num_steps, saved.done) as shown:
        while saved.done < solver.num_steps:

            def losses(number: int, point: np.ndarray, step: int = saved.done):
                found = notebook.losses(
                    step, number, point, lambda: _evaluate(problem, point)
                )
                shown(0)
                return found

            saved = _step(public, solver, structure, saved, losses)
            notebook.keep(saved)
            shown(1)
    with wide_integers():
        state = _state(structure, saved)
        value = np.asarray(solver.answer(public, state))
    rejected = int(rejected_updates(state))
    for remark in (solver.remark(state), divergence(rejected)):
        if remark is not None:
            warnings.warn(f"minimize: {remark}", stacklevel=3)
    return value, saved.path[0], rejected


def _step(
    problem: BlackBox,
    solver: AbstractAskingSolver,
    structure: Any,
    saved: Checkpoint,
    losses: Callable[[int, np.ndarray], np.ndarray],
) -> Checkpoint:
    """One step: asks, evaluates on the host, tells."""
    with wide_integers():
        # The next checkpoint holds `key`, which does not tell the noise before it.
        key, key_ask, key_tell = _keys(saved.key)
        # Through the host each time, as after a resume, so that no bit can differ.
        state = _state(structure, saved)
        asked = _ask(problem, solver, state, key=key_ask)
        points = np.asarray(asked.points, np.float64)
        count = int(asked.count)
    found = np.zeros((len(points), problem.num_records))
    for number in range(count):
        found[number] = losses(number, points[number].copy())
    with wide_integers():
        table = jnp.asarray(found.T)
        state = _tell(problem, solver, state, asked, table, key=key_tell)
        (row,) = checkpoint.leaves(solver.released(state))
        path = np.concatenate([saved.path[0], row[None]])
    return dataclasses.replace(
        saved,
        done=saved.done + 1,
        key=key,
        state=checkpoint.leaves(state),
        path=[path],
    )


@jax.jit
def _keys(key):
    """The key of the steps to come, and those of one step as `solve` has them."""
    key, (key_step,) = step_keys(key, 1)
    return key, *derive(key_step, "ask", "tell")


@jax.jit
def _ask(problem, solver, state, *, key):
    return solver.ask(problem, state, key=key)


@jax.jit
def _tell(problem, solver, state, asked, losses, *, key):
    return solver.tell(problem, state, asked, losses, key=key)


def _before(problem, solver, w0, key) -> Checkpoint:
    """The run before its first step."""
    state = solver.init(problem, w0)
    (row,) = checkpoint.leaves(solver.released(state))
    return Checkpoint(0, key, checkpoint.leaves(state), [row[None][:0]], {})


def _point(saved: Checkpoint) -> Array:
    """A point of the right shape: where all states begin has the structure of all."""
    return jnp.zeros(saved.path[0].shape[1:])


def _state(structure: Any, saved: Checkpoint) -> PyTree:
    return structure.unflatten([jnp.asarray(v) for v in saved.state])


def _evaluate(problem: BlackBox, point: np.ndarray) -> np.ndarray:
    """The losses at a point, checked without a word about their values."""
    value, n = problem.losses(point), problem.num_records
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
    raise TypeError("AbstractAskingSolver: ask and tell must not call losses.")


def _check_calibrated(problem: BlackBox, solver: Any) -> None:
    """Raises before the first evaluation, which may take hours."""
    try:
        solver.ledger(problem, solver.sizes).events()
    except ValueError as error:
        raise ValueError(
            "minimize: the solver is not calibrated; give "
            "budget=PrivacyBudget(epsilon, delta), or a solver from "
            f"dpbilevel.calibrate. {error}"
        ) from None


def _check(problem: SearchProblem, solver: Any, progress: bool) -> None:
    _checks.instance("minimize", BlackBox, problem=problem)
    if not isinstance(solver, AbstractAskingSolver):
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
    if progress:
        try:
            import tqdm  # noqa: F401
        except ImportError:
            raise ValueError(missing("minimize: progress=True", "tqdm")) from None


def _check_resumable(problem: BlackBox, budget: PrivacyBudget | None) -> None:
    if budget is None:
        raise ValueError(
            "minimize: folder= keeps the report and the spending of the run, so it "
            "needs budget=; leave the calibration to it."
        )
    if not problem.records:
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
    with wide_integers():
        start = jax.tree.map(lambda v: jnp.asarray(np.asarray(v, np.float64)), w0)
        check_set("w_set", problem.w_set, start)
        return start


@contextlib.contextmanager
def _bar(progress: bool, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """What to call with 0 after an evaluation and with 1 after a step."""
    if not progress:
        yield lambda steps: None
        return
    from tqdm import tqdm

    evaluations = 0
    with tqdm(total=total, initial=done, unit="step") as bar:

        def shown(steps: int) -> None:
            nonlocal evaluations
            evaluations += 1 - steps
            bar.set_postfix(evaluations=evaluations)
            bar.update(steps)

        yield shown
