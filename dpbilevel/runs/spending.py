"""The spending record of a folder: its runs, what they cost together, and limits."""

import dataclasses
import datetime
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _checks
from ..core.process_spending import cost_of, costs_by, guarantee_of, totals
from ..privacy.budget import PrivacyBudget
from ..privacy.report import PrivacyReport
from . import checkpoint
from .checkpoint import LIMIT

NAME = "spending.jsonl"
_ROUNDING = 1e-12  # of a sum, relative


@dataclasses.dataclass(frozen=True)
class Run:
    """A started run on record, finished or not: its time, cost and relation.

    Attributes:
        started: Time of the start, in UTC.
        epsilon: The plan's epsilon, or that of its first part if no more was begun;
            infinite if none is claimed.
        delta: The plan's delta.
        relation: The neighbouring relation.
        people: Relation of the people in the levels; empty for one level.
        config: The SHA-256 of the config.
        resumed: How often it was resumed: the same release, no further cost.
        finished: Whether its result was written.
        number: Its number in the folder, as recorded.
        stopped: Released result of the check that stopped the run, if one did.
        guarantee: What it protects and the status; empty if it is not on record.
    """

    started: str
    epsilon: float
    delta: float
    relation: str
    people: str
    config: str
    resumed: int = 0
    finished: bool = False
    number: int = 1
    stopped: str = ""
    guarantee: str = ""

    def __post_init__(self):
        texts = self.started, self.relation, self.people, self.stopped, self.guarantee
        known = all(isinstance(text, str) for text in texts)
        if not (known and self.epsilon >= 0 and self.delta >= 0):
            raise ValueError("a field of a run is no text, or a cost is negative.")

    def __str__(self) -> str:
        """Return the run as one line of text."""
        times = f", resumes: {self.resumed}" if self.resumed else ""
        end = "finished" if self.finished else "not finished"
        if self.stopped:
            end = f"stopped before training, too few usable records: {self.stopped}"
        return f"{self.started}: {cost_of([self])}, {end}{times}"


@dataclasses.dataclass(frozen=True)
class RunLog:
    """Spending record of one folder: its runs, and the number of damaged lines.

    Attributes:
        runs: The runs in the order in which they were started.
        unreadable: Number of damaged lines; with any, the total may be larger.
        last: The highest number of a run in any line; 0 without runs.
    """

    runs: tuple[Run, ...]
    unreadable: int = 0
    last: int = 0

    @property
    def missing(self) -> int:
        """Number of runs whose start is not on record."""
        return self.last - len({run.number for run in self.runs})

    @property
    def is_complete(self) -> bool:
        """Whether every run that any line mentions is on record with its cost."""
        return not self.unreadable and not self.missing

    def lines(self, folder: str = "") -> list[str]:
        """Return a list of lines of text: what is lost from the record, each run."""
        at = f"{folder}: " if folder else ""
        lost = {f"damaged lines in {NAME}": self.unreadable}
        lost["runs without a recorded start"] = self.missing
        lines = [f"  at least: {at}{k}: {count}" for k, count in lost.items() if count]
        return lines + [f"  {at}run {run.number}, {run}" for run in self.runs]

    def __str__(self) -> str:
        """Return the total by basic composition, and one line for each run."""
        lost = "spending: no spending record: what earlier runs cost is unknown"
        return "\n".join([*(totals(self.runs) or [lost]), *self.lines()])


@dataclasses.dataclass(frozen=True)
class TotalSpent:
    r"""Budget spent by all runs on record in a folder and in the folders below it.

    Attributes:
        records: The runs of each folder that has a record, by the folder's path.
        unknown: Folders in which runs were made, but none is on record.

    Privacy:
        A run counts in full from its start on. The totals are sums of epsilons and of
        deltas (basic composition). For any $\varepsilon$ and $\delta$ fixed in
        advance, all that is released while the sums are at most these is
        $(\varepsilon, \delta)$-DP, also if budget, solver and the decision to start
        a run depend on what others released, and if runs overlap in time. Runs on
        records of different people cost less together.

    References:
        Rogers, Roth, Ullman and Vadhan, "Privacy odometers and filters: pay-as-you-go
        composition", NeurIPS 2016; for runs that overlap, Haney et al., "Concurrent
        composition for interactive differential privacy with adaptive privacy-loss
        parameters", CCS 2023.
    """

    records: dict[str, RunLog]
    unknown: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Tuple of all runs, folder by folder."""
        return tuple(run for record in self.records.values() for run in record.runs)

    @property
    def epsilon(self) -> float:
        """The sum of epsilons; infinite if a record is lost or relations differ."""
        return math.fsum(v.epsilon for v in self.runs) if self._adds_up else math.inf

    @property
    def delta(self) -> float:
        """The sum of deltas, at most 1; 1 if a record is lost or relations differ."""
        return min(1.0, math.fsum(v.delta for v in self.runs)) if self._adds_up else 1.0

    @property
    def _adds_up(self) -> bool:
        whole = not self.unknown and all(v.is_complete for v in self.records.values())
        return whole and len({(run.relation, run.people) for run in self.runs}) <= 1

    def __str__(self) -> str:
        """Return the totals, and one line for each run."""
        lines = totals(self.runs) or ["spending: no run is recorded"]
        lines += [f"  unknown: no record of the runs in {v}" for v in self.unknown]
        logs = self.records.items()
        return "\n".join(lines + [v for name, log in logs for v in log.lines(name)])


def spent(folder: Path | str) -> TotalSpent:
    """Return a `TotalSpent` of all recorded runs in a folder and below it.

    Searches and the command line record their runs. Links are followed. Keep all runs
    on the same records below one folder, and delete none: it would not be seen.

    Raises:
        ValueError: There is no such folder.
        OSError: A folder below it cannot be read.

    Privacy:
        As in `TotalSpent`. Records and total are public.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"spent: there is no folder {folder}. Give a folder of runs.")
    places = [*checkpoint.folders_below(Path(folder))]
    lost = (p for p in places if is_lost(p) and not is_moved(p))
    records = {str(p): read(p) for p in places if (p / NAME).is_file()}
    return TotalSpent(records, tuple(map(str, lost)))


def limit_spending(folder: Path | str, budget: PrivacyBudget) -> None:
    """Write a limit into a folder: runs there that exceed its budget are refused.

    From now on a search with `folder=`, or a run of the command line, starts or goes on
    in this folder or below it only if `spent`, with that run, is at most the budget.
    Several processes may start runs at once. The limit is a file in the folder,
    `spending_limit.json`; another call replaces it. Give a run the path with the link
    if a link below the folder leads elsewhere: by another path it is not refused.

    Args:
        folder: The folder; created if need be.
        budget: The limit, for all runs together.

    Raises:
        TypeError: `budget` is no `PrivacyBudget`.
        OSError: The disk refuses.

    Privacy:
        All runs below the folder together are DP with epsilon and delta of the budget,
        up to the rounding of a sum (1e-12 of it): a filter by basic composition, as in
        `TotalSpent`, of a budget that is fixed before the first run.
    """
    _checks.instance("limit_spending", PrivacyBudget, budget=budget)
    Path(folder).mkdir(parents=True, exist_ok=True)
    page = {"epsilon": float(budget.epsilon), "delta": float(budget.delta)}
    checkpoint.replace_json(Path(folder) / LIMIT, page)


def read(folder: Path) -> RunLog:
    """Return the `RunLog` of a folder, empty without a record; may raise `OSError`."""
    try:
        lines = (folder / NAME).read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        lines = []
    runs: list[Run] = []
    unreadable = last = 0
    for line in lines:
        try:
            event = json.loads(line)
            kind, number = event.pop("event"), event.pop("run")
            if type(number) is not int or number < 1:
                raise ValueError("a run has a number from 1.")
            if kind == "started":
                runs.append(Run(**event, number=number))
            elif kind in ("resumed", "charged", "stopped", "finished"):
                found = [i for i, run in enumerate(runs) if run.number == number]
                for i in found[-1:]:  # none if the line of its start is lost
                    runs[i] = dataclasses.replace(runs[i], **event)
            else:
                raise ValueError("an event has another name.")
            last = max(last, number)
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable += 1  # counted, so that a total says it may be too small
    return RunLog(tuple(runs), unreadable, last)


def is_lost(folder: Path) -> bool:
    """Return whether runs were made in a folder, but none of them is on record."""
    log = read(folder)
    if log.runs:
        return False
    names = checkpoint.RESULT, checkpoint.SEARCH, checkpoint.RUN
    begun = log.last or log.unreadable or any((folder / v).exists() for v in names)
    return bool(begun) or checkpoint.has_released(folder)


def is_moved(folder: Path) -> bool:
    """Return whether a folder is a `run-N`, with a result moved from the one above."""
    if not re.fullmatch(r"run-\d+", folder.name) or read(folder).runs:
        return False
    made_here = (folder / checkpoint.SEARCH).exists() or checkpoint.has_released(folder)
    return (folder.parent / NAME).is_file() and not made_here


def begin(
    folder: Path,
    number: int,
    report: PrivacyReport,
    config: dict[str, Any],
    *,
    first: PrivacyReport | None = None,
) -> None:
    """Record a run's start or resumption; `ValueError` if it would exceed a limit.

    Call it under the folder's lock, before a record is read; numbers begin at 1. If
    there is a `first` part, its guarantee alone is on record until `charge`.

    Raises:
        ValueError: The whole run would take the total above a limit.
        OSError: The disk refuses, or a folder below a limit cannot be read. The record
            is as before after each error.
    """
    if earlier := _runs(folder, number):
        event = {"event": "resumed", "resumed": earlier[0].resumed + 1}
        return _record(folder, number, report, event)
    epsilon, delta = costs_by(first or report)
    now = datetime.datetime.now(datetime.UTC)
    text = json.dumps(config, sort_keys=True)  # one hash for any order of its keys
    event = {
        "event": "started",
        "started": now.isoformat(timespec="seconds"),
        "epsilon": epsilon,
        "delta": delta,
        "relation": report.relation,
        "people": "" if report.people is None else str(report.people),
        "config": hashlib.sha256(text.encode()).hexdigest(),
    }
    event["guarantee"] = guarantee_of(report)
    _record(folder, number, report, event)


def charge(folder: Path, number: int, report: PrivacyReport) -> None:
    """Record the cost of a whole run, once; `ValueError` if it would exceed a limit."""
    epsilon, delta = costs_by(report)
    event = {"event": "charged", "epsilon": epsilon, "delta": delta}
    runs = _runs(folder, number)
    known = any((run.epsilon, run.delta) == (epsilon, delta) for run in runs)
    _record(folder, number, report, None if known else event)


def stop(folder: Path, number: int, why: str) -> None:
    """Record that a run ended after the records check; an `OSError` changes nothing."""
    _append(folder, number, {"event": "stopped", "stopped": why})


def finish(folder: Path, number: int = 1) -> None:
    """Record a run as finished, unless it already is; delete its checkpoint."""
    if any(not run.finished for run in _runs(folder, number)):
        _append(folder, number, {"event": "finished", "finished": True})
    checkpoint.remove(folder)


def _runs(folder: Path, number: int) -> tuple[Run, ...]:
    """Return the last run of this number in a tuple, empty if none is on record."""
    return tuple(run for run in read(folder).runs if run.number == number)[-1:]


def _record(
    folder: Path, number: int, report: PrivacyReport, event: dict[str, Any] | None
) -> None:
    """Add an event to the record; undo it and raise if the run exceeds a limit."""
    file = folder / NAME
    before = file.read_bytes() if file.is_file() else None
    try:
        # On record first: of two runs that start at once, at least one sees the other.
        if event is not None:
            _append(folder, number, event)
        # A resumed run is checked, too: it may have been killed here, or moved since.
        _check_limits(folder, number, report)
    except BaseException:  # or a second attempt would find it on record
        if before is None:
            file.unlink(missing_ok=True)
        else:
            checkpoint.replace(file, before)
        raise


def _append(folder: Path, number: int, event: dict[str, Any]) -> None:
    """Append a line to a spending record in one write that damages no earlier line."""
    file = folder / NAME
    before = file.read_bytes() if file.is_file() else b""
    end = b"\n" if before and not before.endswith(b"\n") else b""
    line = json.dumps({"run": number, **event}).encode() + b"\n"
    checkpoint.replace(file, before + end + line)


def _check_limits(folder: Path, number: int, report: PrivacyReport) -> None:
    """Raise `ValueError` if a recorded run takes a folder's total above its limit."""
    (run,) = _runs(folder, number)
    epsilon, delta = costs_by(report)
    for place, limit in limits(folder):
        found = spent(place)
        # The record may hold only a first part of this run.
        more = max(0.0, epsilon - run.epsilon), max(0.0, delta - run.delta)
        costs = found.epsilon + more[0], min(1.0, found.delta + more[1])
        pairs = zip(costs, limit, strict=True)
        if not all(cost <= most * (1 + _ROUNDING) for cost, most in pairs):
            own, most, all_runs = map(text_of, ((epsilon, delta), limit, costs))
            raise ValueError(
                f"this run of {own} is refused by the limit of {place}, {most}: the "
                f"runs there would cost {all_runs}. Give a smaller budget or a larger "
                "limit; see dpbilevel.search.spent."
            )


def limits(folder: Path) -> Iterator[tuple[Path, tuple[float, float]]]:
    """Yield pairs (folder, (epsilon, delta)): limits of a folder and those above it."""
    ends = Path(os.path.abspath(folder)), folder.resolve()  # links lead to both
    for place in dict.fromkeys(p for end in ends for p in (end, *end.parents)):
        try:
            page = json.loads((place / LIMIT).read_text())
            yield place, (float(page["epsilon"]), float(page["delta"]))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{place / LIMIT} is damaged. Declare the limit again by "
                "dpbilevel.search.limit_spending(folder, budget). Nothing was spent."
            ) from None


def text_of(costs: tuple[float, float]) -> str:
    """Return epsilon and delta as text."""
    return f"epsilon = {costs[0]:.6g} at delta = {costs[1]:.3g}"
