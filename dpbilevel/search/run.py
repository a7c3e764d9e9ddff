"""A search on the host: its plan, its folder, and checks of losses."""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from .. import _checks
from ..core import process_spending
from ..core.columns import Column
from ..core.loop import bound_to
from ..core.plan import calibrated
from ..core.solution import Solution
from ..onelevel.problem import check_set, check_start
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.exact.floats import double_precision
from ..privacy.keys import PRNGKey, check_key
from ..privacy.per_example.clipping import Precision
from ..privacy.report import PrivacyReport
from ..runs import checkpoint, spending
from ..runs.checkpoint import Checkpoint, first_checkpoint
from ..runs.fit import begun_in
from ..runs.guards import uninterruptible
from .base import AbstractAskTellSolver, BlackBox

_COPIES = (
    "no copy of the folder continues with other losses: each one that does is one more "
    "release, with noise of its own, and the budgets add up"
)
Point = Float[np.ndarray, " d"]
Losses = Float[np.ndarray, " n"]  # of all records at a point
# Released points, one a row, and the noisy mean losses there.
NoisyLosses = tuple[Float[np.ndarray, "k d"], Float[np.ndarray, " k"]]
Result = tuple[Solution, NoisyLosses]


@dataclasses.dataclass(frozen=True)
class Run:
    """A planned search before its first evaluation."""

    owner: str  # for error messages
    problem: BlackBox  # without its losses, which compiled code must not read or keep
    solver: AbstractAskTellSolver  # calibrated and bound to the number of records
    report: PrivacyReport | None  # `None` if the solver was calibrated before
    costs: tuple[float, float]  # epsilon and delta
    first: Checkpoint  # before the first step


def plan_run(
    owner: str,
    problem: BlackBox,
    solver: AbstractAskTellSolver,
    w0: Any,
    key: PRNGKey,
    budget: PrivacyBudget | None,
    precision: Precision,
    folder: Path | str | None,
) -> Run:
    """Return a `Run` before its first evaluation, calibrated if there is a budget.

    Arguments and errors are those of `minimize`; the folder is not read or written.
    """
    _check(owner, problem, solver, key, budget, folder)
    w0 = _start(owner, problem, w0)
    report, n = None, problem.num_records
    with double_precision():
        if budget is not None:
            options = {"sizes": n, "w0": w0, "precision": precision}
            plan = calibrated(problem, solver, budget, **options)
            plan.warn(owner)
            report = plan.report.with_generator(jax.random.key_impl(key))
            solver = plan.solver
            if folder is not None:
                assumptions = (*report.assumptions, _COPIES)
                report = dataclasses.replace(report, assumptions=assumptions)
        unbound, solver = solver, bound_to(problem, solver, None, owner)
        try:  # before the first evaluation, which may take hours
            solver.ledger(problem, solver.sizes).events()
        except ValueError as error:
            raise ValueError(
                f"{owner}: not calibrated. {error} Or give budget=."
            ) from None
        costs = process_spending.costs_of(problem, unbound, n, owner)
        page = fingerprint(problem, solver, w0, budget, report)
        options = {"key": key, "fingerprint": page, "with_start": False}
        first = first_checkpoint(problem, solver, w0, **options)
    public = dataclasses.replace(problem, losses=_unseen, records="", evaluates="")
    return Run(owner, public, solver, report, costs, first)


def _unseen(point: np.ndarray) -> np.ndarray:
    raise TypeError("AbstractAskTellSolver: ask and tell must not call losses.")


def _check(owner, problem, solver, key, budget, folder) -> None:
    check_key(key)
    _checks.instance(owner, BlackBox, problem=problem)
    if not isinstance(solver, AbstractAskTellSolver):
        name = getattr(solver, "__name__", type(solver).__name__)
        raise TypeError(
            f"{owner}: solver must be one that asks for losses, got {name}."
        )
    if solver.neighbours is not Neighbours.REPLACE_ONE:
        raise ValueError(f"{owner}: the number of records is public. Use REPLACE_ONE.")
    alone = problem.training is not None or folder is not None
    if alone and jax.process_count() > 1:
        raise ValueError(
            f"{owner}: folder= and private trainings need one process: several would "
            "release different losses with the same noise. AskTell takes losses from "
            "other processes."
        )
    if folder is not None and budget is None:
        raise ValueError(f"{owner}: folder= records the report. Give budget=.")
    if folder is not None and not problem.records:
        raise ValueError(
            f"{owner}: continuing a run of folder= on other records would be a second "
            "release. Identify the records by BlackBox(..., records=)."
        )


def _start(owner: str, problem: BlackBox, w0: Any) -> Any:
    """Return the initial point as a float64 array, checked to be one vector."""
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(w0)):
        raise TypeError(f"{owner}: cannot be used inside jit, vmap or grad of JAX.")
    if not hasattr(w0, "shape") or len(w0.shape) != 1:
        raise ValueError(
            f"{owner}: w0 must be one vector, a floating-point array of shape (d,), "
            f"got {jax.tree.map(np.shape, w0)} in a {type(w0).__name__}."
        )
    check_start(w0)
    with double_precision():
        start = jnp.asarray(np.asarray(w0, np.float64))
        check_set("w_set", problem.w_set, start)
        return start


def check_losses(owner: str, value: Any, n: int) -> Float[np.ndarray, " n"]:
    """Return losses as a checked array, infinity for NaN; errors name no value."""
    try:
        column = Column.of(value)  # entry by entry: one may be no number
    except (TypeError, ValueError):
        column = None
    scalar = column is not None and (column.kind, column.entries.ndim) == ("objects", 0)
    if column is None or column.kind == "texts" or scalar:
        raise TypeError(
            f"{owner}: the losses at a point must be {n} real numbers, got "
            f"{type(value).__name__} of {getattr(value, 'dtype', 'objects')}."
        )
    losses = column.numbers()
    if losses.shape != (n,):
        got = losses.shape
        raise ValueError(
            f"{owner}: losses must be one per record, shape ({n},), got shape {got}."
        )
    # Under jax_debug_nans JAX would raise because of one record's NaN.
    return np.where(np.isnan(losses), np.inf, losses)


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder with every evaluation and a checkpoint of every step. SECRET.

    Methods raise `ValueError` if the lock was lost, or files are damaged or of another
    run; `OSError` if the disk refuses.
    """

    path: Path  # its lock is held
    check: Callable[[], None]  # raises if the lock was lost
    report: PrivacyReport
    first: Checkpoint  # before the first step

    @property
    def _public(self) -> dict[str, Any]:
        return self.first.fingerprint["run"]

    def result(self) -> Result | None:
        """Return a finished run's `Solution` and noisy losses, or `None`; clean up."""
        file = self.path / checkpoint.SEARCH
        if not file.is_file():
            return None
        try:
            page = json.loads(file.read_bytes())
            value, path = np.asarray(page["value"]), np.asarray(page["trajectory"])
            rejected = int(page.get("rejected_updates", 0))
            noisy = page["noisy_losses"]
            at, values = np.asarray(noisy["points"]), np.asarray(noisy["values"])
            checkpoint.check_same_run(self.path, page, {"run": self._public})
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{file} is damaged or of another version: {error}. Give a new folder."
            ) from error
        self._close()
        points = at.reshape(-1, value.size)  # also where there is none
        return Solution(value, path, rejected), (points, values)

    def begin(self) -> Checkpoint:
        """Record the spending, delete used evaluations, return the `Checkpoint`."""
        records = (
            "the records, their order, or their evaluation (in a PrivateSearch also "
            "the estimator, its losses, the space and the training records)"
        )
        named: Any = {"owner": "folder", "records": records}
        saved = begun_in(self.path, self.first, self.report, self._public, **named)
        self._forget(saved.done)
        return saved

    def losses(self, step: int, number: int, point: Point) -> Losses | None:
        """Return the stored losses of all records at a point, or `None`."""
        self.check()
        file = self._evaluation(step, number)
        if not file.is_file():
            return None
        content = io.BytesIO(file.read_bytes())
        try:
            with np.load(content, allow_pickle=False) as arrays:
                stored, losses = arrays["point"], arrays["losses"]
        except Exception:
            what = f"{file} is damaged. Delete it to evaluate again."
            raise ValueError(what) from None
        if not np.array_equal(stored, point):  # bit for bit
            what = f"{file} holds losses at another point"
            raise ValueError(f"{what}. Continue on the machine of the run.")
        return losses

    def keep_losses(self, step: int, number: int, point: Point, losses: Losses) -> None:
        """Store all records' losses at a point."""
        self.check()
        content = checkpoint.npz({"point": point, "losses": losses})
        checkpoint.replace(self._evaluation(step, number), content, mode=0o600)

    def keep(self, saved: Checkpoint) -> None:
        """Replace the checkpoint, then delete the evaluations of finished steps.

        If the disk refuses, the previous checkpoint is intact.
        """
        self.check()
        checkpoint.write(self.path, saved)
        self._forget(saved.done)

    def finish(self, solution: Solution, noisy: NoisyLosses) -> None:
        """Write released values, record the end, delete checkpoint and evaluations.

        If the disk refuses, the last checkpoint is intact.
        """
        page = {
            "format": 1,
            "value": np.asarray(solution.value).tolist(),
            "trajectory": np.asarray(solution.trajectory).tolist(),
            "rejected_updates": solution.rejected_updates,
            "noisy_losses": {"points": noisy[0].tolist(), "values": noisy[1].tolist()},
            "run": self._public,
        }
        with uninterruptible():
            self.check()
            checkpoint.replace_json(self.path / checkpoint.SEARCH, page)
            self._close()

    def _evaluation(self, step: int, number: int) -> Path:
        name = checkpoint.EVALUATIONS.replace("*", f"{step}-{number}")
        return self.path / name

    def _forget(self, done: int) -> None:
        """Delete the evaluations of steps before `done`."""
        for file in self.path.glob(checkpoint.EVALUATIONS):
            if int(file.name.split("-")[1]) < done:
                file.unlink()

    def _close(self) -> None:
        """Record the run as finished; delete its checkpoint and evaluations."""
        spending.finish(self.path)
        for file in self.path.glob(f"{checkpoint.EVALUATIONS}*"):
            file.unlink()


def fingerprint(
    problem: BlackBox, solver, w0, budget: PrivacyBudget | None, report
) -> dict[str, Any]:
    """Return a dict of what a resumed run must not change: `run` and `records`."""
    public = {
        "budget": budget and {"epsilon": budget.epsilon, "delta": budget.delta},
        "solver": solver,
        "box": problem.w_set,
        "records": problem.num_records,
        "evaluates": problem.evaluates,
        "w0": w0,
        "software": checkpoint.software(),
        "report": report and json.loads(report.to_json()),
    }
    page = json.dumps(public, default=checkpoint.as_json)
    return {"run": json.loads(page), "records": problem.records}
