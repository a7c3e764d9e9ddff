"""Plan of a search on the host, from checked arguments."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import _checks
from ..core import spent
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
    *,
    key: PRNGKey,
    budget: PrivacyBudget | None,
    precision: Precision,
    folder: Path | str | None,
) -> Run:
    """Return the run of a solver, which is calibrated first if there is a budget.

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
            solver, report = plan.solver, plan.report
            if folder is not None:
                assumptions = (*report.assumptions, _COPIES)
                report = dataclasses.replace(report, assumptions=assumptions)
        unbound, solver = solver, bound_to(problem, solver, None, owner)
        try:  # before the first evaluation, which may take hours
            solver.ledger(problem, solver.sizes).events()
        except ValueError as error:
            raise ValueError(
                f"{owner}: the solver is not calibrated ({error}). Give "
                "budget=PrivacyBudget(epsilon, delta), or a solver from "
                "dpbilevel.calibrate."
            ) from None
        costs = spent.costs_of(problem, unbound, n, owner)
        first = first_checkpoint(
            problem,
            solver,
            w0,
            key=key,
            fingerprint=fingerprint(problem, solver, w0, budget, report),
            with_start=False,
        )
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
            f"{owner}: solver must be RandomSearch, RepeatAndSelect, NoisyUCB, "
            "GradientInformativeBO or another one that asks for losses, got "
            f"{name}."
        )
    if solver.neighbours is not Neighbours.REPLACE_ONE:
        raise ValueError(
            f"{owner}: a black box publishes its number of records, which "
            "add-or-remove-one keeps private. Use Neighbours.REPLACE_ONE."
        )
    if problem.training is not None and folder is None and jax.process_count() > 1:
        raise ValueError(
            f"{owner}: several processes would train different models and release "
            "their losses with the same noise. Give folder=, with which one process "
            "evaluates for all."
        )
    if folder is not None and budget is None:
        raise ValueError(
            f"{owner}: folder= records the report and the cost of the run. Give "
            "budget=, which calibrates the solver."
        )
    if folder is not None and not problem.records:
        raise ValueError(
            f"{owner}: continuing an interrupted run of folder= on other records would "
            "be a second release. Identify the records and their order by "
            "BlackBox(..., records=hashlib.sha256(X.tobytes()).hexdigest())."
        )


def _start(owner: str, problem: BlackBox, w0: Any) -> Any:
    """Return the initial point in float64."""
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(w0)):
        raise TypeError(
            f"{owner}: calls Python between steps, so it cannot be used inside "
            "jax.jit, jax.vmap or jax.grad. Call it from plain Python."
        )
    if not hasattr(w0, "shape") or len(w0.shape) != 1:
        raise ValueError(
            f"{owner}: w0 must be one vector, a floating-point array of shape (d,), "
            f"got {jax.tree.map(np.shape, w0)} in a {type(w0).__name__}. Put all "
            "parameters into one numpy.array(..., float)."
        )
    check_start(w0)
    with double_precision():
        start = jnp.asarray(np.asarray(w0, np.float64))
        check_set("w_set", problem.w_set, start)
        return start
