"""The private runs of this process, and their total cost."""

import dataclasses
import hashlib
import html
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _checks
from ..privacy.keys import PRNGKey
from ..privacy.records.disk import OnDisk
from ..privacy.records.people import PersonRows
from ..privacy.records.rows import shapes_of
from ..privacy.report import PrivacyReport, Status, rounded_up
from .levels import Sizes

Costs = tuple[float, float]  # epsilon and delta


class PrivacyWarning(UserWarning):
    """Warning that budgets of several runs add up, or that runs share a key."""


@dataclasses.dataclass(frozen=True)
class ProcessRun:
    """A private run of this process: its method, cost and sizes, all public.

    Attributes:
        method: The called function, and the solver.
        epsilon: The epsilon of its plan; infinite if none is claimed.
        delta: The delta of its plan.
        relation: The neighbouring relation.
        people: Relation of the people in the levels; empty for one level.
        records: The public number of records, and the shapes of their parts.
        unit: What is protected: `"rows"` or `"people"`.
        times: Number of such runs without another run in between.
    """

    method: str
    epsilon: float
    delta: float
    relation: str
    people: str
    records: str
    unit: str = "rows"
    times: int = 1

    def __str__(self) -> str:
        """Return the run as one line of text."""
        times = f"{self.times} times, each " if self.times > 1 else ""
        people = f", people {self.people}" if self.people else ""
        people += f", {self.unit}" if self.unit != "rows" else ""
        return (
            f"{self.method}: {times}{cost_of([self])} ({self.relation}{people}), "
            f"{self.records}"
        )


@dataclasses.dataclass(frozen=True)
class ProcessSpending:
    """Budget that the private runs of this process have spent.

    Attributes:
        runs: The runs, in order; equal ones in a row are one entry.

    Privacy:
        The totals hold for runs that read the same records; runs on records of
        different people cost less together. `epsilon` and `delta` are sums (basic
        composition), which hold whatever decided on the later runs.
    """

    runs: tuple[ProcessRun, ...]

    @property
    def epsilon(self) -> float:
        """The sum of epsilons; infinite if relations, people or units differ."""
        if len({(run.relation, run.people, run.unit) for run in self.runs}) > 1:
            return math.inf
        return math.fsum(run.times * run.epsilon for run in self.runs)

    @property
    def delta(self) -> float:
        """The sum of deltas, at most 1."""
        return min(1.0, math.fsum(run.times * run.delta for run in self.runs))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """Return the totals, and one line for each run."""
        if not self.runs:
            return "spending: no private run was made in this process"
        lines = totals([run for run in self.runs for _ in range(run.times)])
        return "\n".join([*lines, *(f"  {run}" for run in self.runs)])


class _Process:
    """Public runs and costs of this process, and hashes of keys, which are SECRET."""

    def __init__(self):
        self.lock = threading.Lock()
        self.runs: list[ProcessRun] = []
        self.shapes: dict[str, bool] = {}  # whether a warning was given for each
        self.costs: dict[int, tuple[weakref.ref, Any, Costs]] = {}  # by id of solver
        self.keys: dict[bytes, bool] = {}  # hashes; whether a warning was given


_process = _Process()


def spent() -> ProcessSpending:
    """Return the private runs of this process and their total, a `ProcessSpending`.

    The total counts the fits of estimators and of `PrivateSearch`, `fit`, `solve`,
    `minimize`, `AskTell` and studies. Each counts in full from its first release on,
    even if it is interrupted later. A call that JAX traces is not seen:
    `jax.jit(solve)` runs a compiled program, `jax.vmap(solve)` several runs at once.
    Runs of other processes, such as those of the command line and of parallel workers,
    are not seen either; `dpbilevel.search.spent(folder)` counts runs by their folders.

    Privacy:
        As in `ProcessSpending`. Runs and totals are public.
    """
    with _process.lock:
        return ProcessSpending(tuple(_process.runs))


def guarantee_of(report: PrivacyReport) -> str:
    """Return text: the unit that a report protects, and the report's status."""
    return f"{report.unit}, {report.status.value}"


def costs_by(report: PrivacyReport) -> Costs:
    """Return epsilon and delta of a report; epsilon is infinite if none is claimed."""
    claimed = report.status is not Status.HEURISTIC
    return report.epsilon if claimed else math.inf, report.delta


def begun(
    method: str,
    relation: str,
    costs: Costs,
    sizes: Any,
    records: PyTree,
    key: PRNGKey | None = None,
) -> Callable[[], None]:
    """Warn of a reused key or second run; return a function that counts the run once.

    Call it before anything of the run can reach the user. Only shapes of records are
    read. The key is one that the caller gave.

    Warns:
        PrivacyWarning: Another run was made on records of the same shape, once for
            each shape and process; or with the same key, once for each key.
    """
    if key is not None:
        _check_unused(method, key)
    parts = jax.tree.leaves(shapes_of(records))
    widths = ", ".join(map(str, sorted({np.shape(part)[1:] for part in parts})))
    shapes, whose = f"{sizes} records", ""
    if isinstance(sizes, Sizes):
        shapes = f"{sizes.upper} upper records, {sizes.lower} lower records"
        whose = str(sizes.people.value)
    shapes += f" (shapes of one record: {widths})" if widths else ""
    kinds = jax.tree.leaves(
        records, is_leaf=lambda v: isinstance(v, PersonRows | OnDisk)
    )
    of_people = any(isinstance(shapes_of(v), PersonRows) for v in kinds)
    unit = "people" if of_people else "rows"
    run = ProcessRun(method, *costs, relation, whose, shapes, unit)
    with _process.lock:
        again = _process.shapes.get(shapes) is False
        earlier = [r for r in _process.runs if r.records == shapes]
        if again:
            _process.shapes[shapes] = True
    if again:
        both = ProcessSpending((*earlier, run))
        _checks.warn(
            f"{method}: a second private run of this process on {shapes}. If both read "
            f"the same records, their budgets add: {_text(both.epsilon, both.delta)}. "
            "This is said once for each shape of records; dpbilevel.spent() has the "
            "total of all runs. See "
            "docs/errors.md#a-second-private-run-of-this-process.",
            PrivacyWarning,
        )
    waiting = [run]

    def count() -> None:
        with _process.lock:
            while waiting:
                run, runs = waiting.pop(), _process.runs
                _process.shapes.setdefault(run.records, False)
                if runs and dataclasses.replace(runs[-1], times=1) == run:
                    run = dataclasses.replace(run, times=runs.pop().times + 1)
                runs.append(run)

    return count


def _check_unused(method: str, key: PRNGKey) -> None:
    """Warn if an earlier run had the same key; remember a hash of this key.

    Privacy:
        A hash of the key is kept as long as the process lives.
    """
    if jax.process_count() > 1:  # all processes have one key, and may hold a part
        return
    words = np.asarray(jax.random.key_data(key)).tobytes()
    digest = hashlib.sha256(str(jax.random.key_impl(key)).encode() + words).digest()
    with _process.lock:
        used = _process.keys.get(digest)
        _process.keys[digest] = used is not None
    if used is False:
        _checks.warn(
            f"{method}: an earlier run of this process used the same key, so both have "
            "the same noise, and the difference of what they release can show a "
            "record. Give each run a key of its own, such as dpbilevel.root_key(). See "
            "docs/errors.md#an-earlier-run-of-this-process-used-the-same-key.",
            PrivacyWarning,
        )


def costs_of(problem: Any, solver: Any, sizes: Any, owner: str) -> Costs:
    """Return epsilon and delta of a run: those of its plan, or computed and printed.

    The solver is the object that the caller gave.
    """
    with _process.lock:
        of, planned, costs = _process.costs.get(id(solver), (lambda: None, None, None))
    if costs is not None and of() is solver and planned == sizes:
        return costs
    count = min(sizes.upper, sizes.lower) if isinstance(sizes, Sizes) else sizes
    delta = 10.0 ** math.floor(math.log10(0.1 / max(count, 1)))
    try:
        ledger = solver.with_sizes(sizes).ledger(problem, sizes)
        epsilon = ledger.epsilon(delta)
    except ValueError:  # not calibrated: the run itself raises the error
        return math.inf, delta
    print(
        f"{owner}: without a plan, this run costs {_text(epsilon, delta)} "
        f"({solver.neighbours.value}, {sizes} records), by the noise and in the "
        "precision of the solver. dpbilevel.calibrate finds the noise for a budget, "
        'and sets precision="grid".',
        file=sys.stderr,
    )
    remember(solver, sizes, (epsilon, delta))
    return epsilon, delta


def remember(solver: Any, sizes: Any, costs: Costs) -> None:
    """Remember what a run of this solver object costs, as long as it exists."""
    place = id(solver)

    def forget(_):
        _process.costs.pop(place, None)

    with _process.lock:
        _process.costs[place] = weakref.ref(solver, forget), sizes, costs


def totals(runs: Sequence[Any]) -> list[str]:
    """Return a list of lines of text on the total cost of runs, by relation."""
    lines, groups = [], {}

    def kind(run: Any) -> tuple[str, str, str]:
        return run.relation, run.people, getattr(run, "unit", "rows")

    for run in sorted(runs, key=kind):
        groups.setdefault(kind(run), []).append(run)
    for (relation, people, unit), group in groups.items():
        count = f"{len(group)} runs, together" if len(group) > 1 else "1 run,"
        whose = f", people {people}" if people else ""
        whose += f", {unit}" if unit != "rows" else ""
        lines += [f"spending: {count} {cost_of(group)} ({relation}{whose})"]
    if len(runs) > 1:
        lines += ["  by basic composition, if they read the same records"]
    if len(groups) > 1:
        lines += ["  under different relations, people or units no total is stated"]
    return lines


def cost_of(runs: Sequence[Any]) -> str:
    """Return the summed epsilon and delta of runs as text."""
    delta = min(1.0, math.fsum(run.delta for run in runs))
    return _text(math.fsum(run.epsilon for run in runs), delta)


def _text(epsilon: float, delta: float) -> str:
    return f"epsilon = {rounded_up(epsilon)} at delta = {rounded_up(delta)}"
