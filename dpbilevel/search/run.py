"""What a search runs: arguments that are checked, and the plan for them."""

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
from ..runs.checkpoint import Checkpoint
from ..runs.resume import first_checkpoint
from .base import AbstractAskTellSolver, BlackBox
from .folder import fingerprint

_COPIES = (
    "no copy of the folder goes on with other losses: each one that does is one more "
    "release, with noise of its own, and the budgets add"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has evaluated nothing; with a report if it was calibrated here.

    Attributes:
        owner: What to name in an error.
        problem: The problem without its losses: compiled code must not read them, and
            need not keep them alive.
        solver: The solver, calibrated and bound to the problem's number of records.
        report: Its guarantee.
        costs: Its epsilon and delta.
        first: The run before its first step.
    """

    owner: str
    problem: BlackBox
    solver: AbstractAskTellSolver
    report: PrivacyReport | None
    costs: tuple[float, float]
    first: Checkpoint


def planned(
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
    """Calibrates the solver if there is a budget, and binds it to the black box.

    Args:
        owner: What to name in an error.
        problem: The black box.
        solver: A solver that asks for losses: calibrated, or with `budget` any.
        w0: The starting point.
        key: One typed key.
        budget: The guarantee to reach; `None` if the solver is calibrated.
        precision: As in `calibrate`; read with `budget` only.
        folder: Where evaluations are kept; only checked here, not read or written.

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
                said = (*report.assumptions, _COPIES)
                report = dataclasses.replace(report, assumptions=said)
        given, solver = solver, bound_to(problem, solver, None, owner)
        try:  # before the first evaluation, which may take hours
            solver.ledger(problem, solver.sizes).events()
        except ValueError as error:
            raise ValueError(
                f"{owner}: the solver is not calibrated; give "
                "budget=PrivacyBudget(epsilon, delta), or a solver from "
                f"dpbilevel.calibrate. {error}"
            ) from None
        costs = spent.costs_of(problem, given, n, owner)
        same = fingerprint(problem, solver, w0, budget, report)
        first = first_checkpoint(
            problem, solver, w0, key=key, fingerprint=same, with_start=False
        )
    public = dataclasses.replace(problem, losses=_unseen, records="", evaluates="")
    return Run(owner, public, solver, report, costs, first)


def _unseen(point: np.ndarray) -> np.ndarray:
    raise TypeError("AbstractAskTellSolver: ask and tell must not call losses.")


def _check(owner, problem, solver, key, budget, folder) -> None:
    """Raises before anything is planned."""
    check_key(key)
    _checks.instance(owner, BlackBox, problem=problem)
    if not isinstance(solver, AbstractAskTellSolver):
        name = getattr(solver, "__name__", type(solver).__name__)
        raise TypeError(
            f"{owner}: solver must be one that asks for losses, such as "
            "RandomSearch(30, clip_range), RepeatAndSelect, NoisyUCB or "
            f"GradientInformativeBO, got {name}."
        )
    if solver.neighbours is not Neighbours.REPLACE_ONE:
        raise ValueError(
            f"{owner}: a black box states its number of records, which "
            "add-or-remove-one keeps private; use Neighbours.REPLACE_ONE."
        )
    if problem.training is not None and folder is None and jax.process_count() > 1:
        raise ValueError(
            f"{owner}: in a program of several processes each would train by itself "
            "and release the same noise on losses of other models; give folder=, "
            "with which one process evaluates for all."
        )
    if folder is not None and budget is None:
        raise ValueError(
            f"{owner}: folder= keeps the report and the spending of the run, so it "
            "needs budget=; leave the calibration to it."
        )
    if folder is not None and not problem.records:
        raise ValueError(
            f"{owner}: folder= can go on with an interrupted run, which on other "
            "records would be a second release; it needs BlackBox(..., records=), "
            "what tells the records and their order from others, such as "
            "hashlib.sha256(X.tobytes()).hexdigest()."
        )


def _start(owner: str, problem: BlackBox, w0: Any) -> Any:
    """The start in float64."""
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(w0)):
        raise TypeError(
            f"{owner}: calls Python between steps, so it cannot be used inside "
            "jax.jit, jax.vmap or jax.grad; call it from plain Python."
        )
    if not hasattr(w0, "shape") or len(w0.shape) != 1:
        raise ValueError(
            f"{owner}: w0 must be one vector, a floating-point array of shape (d,), as "
            f"points are, got {jax.tree.map(np.shape, w0)} in a "
            f"{type(w0).__name__}; put all parameters into one numpy.array(..., float) "
            "and unpack them where losses are evaluated."
        )
    check_start(w0)
    with double_precision():
        start = jnp.asarray(np.asarray(w0, np.float64))
        check_set("w_set", problem.w_set, start)
        return start
