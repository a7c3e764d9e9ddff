"""Plan of a search on the host, from checked arguments, and checks of losses."""

import dataclasses
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
from ..onelevel.problem import check_set, check_start
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.exact.floats import double_precision
from ..privacy.noise import PRNGKey, check_key
from ..privacy.per_example.clipping import Precision
from ..privacy.report import PrivacyReport
from ..runs.checkpoint import Checkpoint, first_checkpoint
from .base import AbstractAskTellSolver, BlackBox
from .folder import fingerprint

_COPIES = (
    "no copy of the folder continues with other losses: each one that does is one more "
    "release, with noise of its own, and the budgets add up"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run before its first evaluation.

    Attributes:
        owner: Name for error messages.
        problem: The problem without its losses, which compiled code must not read or
            keep alive.
        solver: The solver, calibrated and bound to the problem's number of records.
        report: The guarantee; `None` if the solver was calibrated before.
        costs: Epsilon and delta of the run.
        first: Checkpoint before the first step.
    """

    owner: str
    problem: BlackBox
    solver: AbstractAskTellSolver
    report: PrivacyReport | None
    costs: tuple[float, float]
    first: Checkpoint


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

    Args:
        owner: Name for error messages.
        problem: The black box.
        solver: An ask/tell solver: calibrated, or any with `budget`.
        w0: The initial point.
        key: One typed key.
        budget: The guarantee; `None` if the solver is calibrated.
        precision: As in `calibrate`; used with `budget` only.
        folder: Folder of evaluations; checked here, not read or written.

    Raises:
        TypeError: As `minimize`.
        ValueError: As `minimize`.
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
    """Check the arguments before anything is planned."""
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
