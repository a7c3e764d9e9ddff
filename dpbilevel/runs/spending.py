"""The spending record: the runs started in a folder, and what they cost together."""

import dataclasses
import datetime
import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

from ..core.spent import cost_of, totals
from ..privacy.report import PrivacyReport, Status
from . import checkpoint

NAME = "spending.jsonl"
LIMIT = "spending_limit.json"  # of all runs in a folder and below it


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was started: spent, whether or not it ever finished.

    Attributes:
        started: Time of the start, in UTC.
        epsilon: The plan's epsilon, or that of the first part of a run if no more was
            begun; infinite if none is claimed.
        delta: The plan's delta.
        relation: The neighbouring relation.
        people: Relation of the people in the levels; empty for one level.
        config: The SHA-256 of the config.
        resumed: How often it was resumed: the same release, no further cost.
        finished: Whether its result was written.
        number: Its number in the folder, as recorded.
        stopped: Released result of its check, if the run stopped after the check.
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

    @property
    def cost(self) -> tuple[float, float]:
        """Epsilon and delta."""
        return self.epsilon, self.delta

    def __str__(self) -> str:
        """One line of text."""
        times = f", resumes: {self.resumed}" if self.resumed else ""
        end = "finished" if self.finished else "not finished"
        if self.stopped:
            end = f"stopped before training, too few usable records: {self.stopped}"
        return f"{self.started}: {cost_of([self])}, {end}{times}"


@dataclasses.dataclass(frozen=True)
class RunLog:
    """What the runs of a folder have spent.

    Attributes:
        runs: The runs in the order in which they were started.
        unreadable: Lines of the record that are damaged, so that the total may be
            larger.
        highest: The highest number of a run that any line tells of.
    """

    runs: tuple[Run, ...]
    unreadable: int = 0
    highest: int = 0

    def __str__(self) -> str:
        """The total by basic composition, and one line per run."""
        lines = []
        if not self.runs:
            lines += ["spending: no spending record: what earlier runs cost is unknown"]
        lines += totals(self.runs)
        if self.unreadable:
            lines += [f"  at least: damaged lines in {NAME}: {self.unreadable}"]
        if self.missing:
            lost = ", ".join(self.missing)
            lines += [f"  at least: no start is recorded of run {lost}"]
        lines += [f"  run {run.number}, {run}" for run in self.runs]
        return "\n".join(lines)

    @property
    def whole(self) -> bool:
        """Whether every run that any line tells of is on record with its cost."""
        return not self.unreadable and not self.missing

    @property
    def last(self) -> int:
        """The highest number of a run; 0 where there is none."""
        return max([self.highest, *(run.number for run in self.runs)])

    @property
    def missing(self) -> list[str]:
        """The numbers whose start is not on record, as single ones or `A to B`."""
        known = sorted({0, self.last + 1, *(run.number for run in self.runs)})
        return [
            str(a + 1) if b == a + 2 else f"{a + 1} to {b - 1}"
            for a, b in itertools.pairwise(known)
            if b > a + 1
        ]


def read(folder: Path) -> RunLog:
    """Reads the record of a folder, which may not exist; no runs without one.

    Raises:
        OSError: There is one that cannot be read.
    """
    try:
        lines = (folder / NAME).read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        lines = []
    runs: list[Run] = []
    unreadable = highest = 0
    for line in lines:
        try:
            highest = max(highest, _apply(json.loads(line), runs))
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable += 1  # counted, so that a total says it may be too small
    return RunLog(tuple(runs), unreadable, highest)


def begin(
    folder: Path, number: int, report: PrivacyReport, config: dict[str, Any]
) -> None:
    """Records that a run starts, or goes on; to be called before it reads a record.

    Args:
        folder: The result folder.
        number: The run's number in the folder, from 1.
        report: The guarantee of the run.
        config: The config as it was given.

    Raises:
        OSError: The disk refuses; the record is as before.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if any(run.number == number for run in read(folder).runs):
        _append(folder, {"event": "resumed", "run": number, "time": now})
        return
    epsilon, delta = cost(report)
    text = json.dumps(config, sort_keys=True)  # one hash for any order of its keys
    event = {
        "event": "started",
        "run": number,
        "started": now,
        "epsilon": epsilon,
        "delta": delta,
        "relation": report.relation,
        "people": "" if report.people is None else str(report.people),
        "config": hashlib.sha256(text.encode()).hexdigest(),
    }
    _append(folder, event)


def cost(report: PrivacyReport) -> tuple[float, float]:
    """Return epsilon and delta of a run; epsilon is infinite if none is claimed."""
    heuristic = report.status is Status.HEURISTIC
    return math.inf if heuristic else report.epsilon, report.delta


def charge(folder: Path, number: int, report: PrivacyReport) -> None:
    """Record once that the whole run counts, instead of its first part alone.

    Raises:
        OSError: The disk refuses; the record is as before.
    """
    if all(run.cost != cost(report) for run in _runs(folder, number)):
        epsilon, delta = cost(report)
        event = {"event": "charged", "run": number, "epsilon": epsilon, "delta": delta}
        _append(folder, event)


def stop(folder: Path, number: int, why: str) -> None:
    """Record that a run ends after its check, and the released values of the check.

    Raises:
        OSError: The disk refuses; the record is as before.
    """
    _append(folder, {"event": "stopped", "run": number, "stopped": why})


def finish(folder: Path, number: int) -> None:
    """Records that a run's result is written, once.

    Raises:
        OSError: The disk refuses; the record is as before.

    Privacy:
        Without the time: how long a run took is covered by no guarantee.
    """
    runs = _runs(folder, number)
    if runs and not runs[0].finished:
        _append(folder, {"event": "finished", "run": number})


def _runs(folder: Path, number: int) -> tuple[Run, ...]:
    """Return the last run of that number, if it is on record."""
    return tuple(run for run in read(folder).runs if run.number == number)[-1:]


def _append(folder: Path, event: dict[str, Any]) -> None:
    """Adds a line; whole or not at all, and never at the cost of an earlier one."""
    file = folder / NAME
    before = file.read_bytes() if file.is_file() else b""
    end = b"\n" if before and not before.endswith(b"\n") else b""
    line = json.dumps(event).encode() + b"\n"
    checkpoint.replace(file, before + end + line)


def _apply(event: dict[str, Any], runs: list[Run]) -> int:
    """What one line of the record adds to the runs; returns the run's number."""
    kind, number = event.pop("event"), event.pop("run")
    if type(number) is not int or number < 1:
        raise ValueError("a run has a number from 1.")
    if kind == "started":
        runs.append(_checked(Run(**event, number=number)))
        return number
    if kind not in ("resumed", "charged", "stopped", "finished"):
        raise ValueError("no such event.")
    found = [i for i, run in enumerate(runs) if run.number == number]
    for i in found[-1:]:  # none where the line of its start is lost
        if kind == "resumed":
            event = {"resumed": runs[i].resumed + 1}
        elif kind == "finished":
            event = {"finished": True}
        runs[i] = _checked(dataclasses.replace(runs[i], **event))
    return number


def _checked(run: Run) -> Run:
    """The run, if it can be added up and printed."""
    if not (run.epsilon >= 0 and run.delta >= 0):
        raise ValueError("a cost is not negative.")
    texts = run.started, run.relation, run.people, run.stopped
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is no text.")
    return run
