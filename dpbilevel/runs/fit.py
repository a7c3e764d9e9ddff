"""Plan and run in one call."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from .. import _checks
from ..core import spent
from ..core.levels import Levels
from ..core.loop import solved, solver_for
from ..core.modules import arrays_of
from ..core.plan import calibrated
from ..core.problem import AbstractProblem
from ..core.solution import Solution, divergence
from ..core.solver import AbstractSolver
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.ledger import Ledger
from ..privacy.noise import PRNGKey, check_key
from ..privacy.per_example.clipping import Precision
from ..privacy.queries import RECORDS
from ..privacy.records.disk import OnDisk
from ..privacy.report import PrivacyReport
from ..privacy.sampling.base import FullBatch
from .run import Run, started, watched


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
) -> Solution[PrivacyReport]:
    """Plan and run in one call: `calibrate` on the data's sizes, then `solve`.

    Tracing decides here which records' losses read `x`, so an outer step that is public
    costs no budget and need not be declared.

    Args:
        problem: A `BilevelProblem` or a `FiniteSum`.
        solver: A solver of that problem; its own noise is replaced.
        data: The records.
        w0: The starting point.
        budget: The guarantee to reach.
        people: `"disjoint"`, `"overlapping"` or `"shared"`, for two levels. By
            default shared data are `"shared"` and separate ones `"overlapping"`.
        key: One typed key.
        precision: As in `calibrate`.
        trajectory: Whether to return the released iterates.
        progress: Whether to show a bar of the steps on stderr; needs tqdm.
        callback: Called with the `Run` after every `every` steps and after the last
            one. It shows `run.done`, `run.value` and `run.epsilon`, all of them
            released. A true answer, such as `True`, ends the run there.
        every: The number of steps between two calls; by default a twentieth of all.

    Returns:
        The solution, with its report.

    Raises:
        TypeError: As in `solve`.
        ValueError: As in `solve` and `calibrate`.

    Warns:
        RuntimeWarning: The run diverged, by `Solution.rejected_updates`.
        PrivacyWarning: Another private run was made in this process on records of the
            same shape; said once for each shape.

    Privacy:
        One run under `budget`. If `callback` ends the run early, the whole budget still
            counts, because `callback` decides by released values. The numbers of
            records are published with the report;
        under add-or-remove-one they are private, so use `calibrate` with public sizes
        and `solve` instead.
    """
    solver_for(problem, solver, "fit")
    if solver.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        raise ValueError(
            "fit: takes the sizes from the data, but under add-or-remove-one the "
            "number of records is private. Use calibrate with public sizes=, then "
            "solve."
        )
    check_key(key)
    problem, w0, kept = arrays_of("fit", problem, w0)
    problem = problem.traced(w0, data)  # reads shapes alone
    sizes = problem.sizes_of(data, people)
    if _on_disk(data):
        any_noise = solver.with_sizes(sizes).with_noise(1.0)
        _check_drawn(any_noise.ledger(problem, sizes), data)
    planned: Any = {"sizes": sizes, "w0": w0, "precision": precision}
    plan = calibrated(problem, solver, budget, **planned)
    plan.warn("fit")
    name, costs = f"fit: {type(solver).__name__}", spent.costs_by(plan.report)
    relation = plan.report.relation
    options: Any = {"key": key, "trajectory": trajectory}
    count = spent.begun(name, relation, costs, sizes, data)
    if progress or callback is not None or every is not None:
        run = started("fit", problem, plan, data, w0, kept=kept, **options)
        run = watched(run, count, progress=progress, callback=callback, every=every)
        solution = run.solution
    else:
        solution = solved(problem, plan.solver, data, w0, **options)
    count()
    rejected = solution.rejected_updates
    remark = divergence(int(rejected)) if _checks.concrete(rejected) else None
    if remark is not None:
        warnings.warn(f"fit: {remark}", RuntimeWarning, stacklevel=2)
    reported: Any = dataclasses.replace(solution, report=plan.report)
    return reported if kept is None else reported.with_kept(kept)


def _on_disk(data: PyTree) -> bool:
    levels = (data.upper, data.lower) if isinstance(data, Levels) else (data,)
    return any(isinstance(level, OnDisk) for level in levels)


def _check_drawn(ledger: Ledger, data: PyTree) -> None:
    """Refuses records on disk that batches are drawn from, before noise is sought."""
    for query in (query for release in ledger.releases for query in release.reads):
        if not isinstance(query.sampling, FullBatch):
            name = "data" if query.role == RECORDS else f"data.{query.role}"
            records = data if query.role == RECORDS else getattr(data, query.role)
            owner = type(query.sampling).__name__
            _checks.leading_axis(f"fit: {owner} draws from {name}, which", records)
