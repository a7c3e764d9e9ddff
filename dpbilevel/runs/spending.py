"""The spending record: the runs started in a folder, and what they cost together."""

import dataclasses
import datetime
import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

from ..privacy.report import PrivacyReport, Status, rounded_up
from . import checkpoint

NAME = "spending.jsonl"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was started: spent, whether or not it ever finished.

    Attributes:
        started: When, in UTC.
        epsilon: The plan's epsilon; infinite where none is claimed.
        delta: The plan's delta.
        relation: The neighbouring relation.
        people: Who may have records in which level.
        config: The SHA-256 of the config.
        resumed: How often it was resumed: the same release, no further cost.
        finished: Whether its result was written.
    """

    started: str
    epsilon: float
    delta: float
    relation: str
    people: str
    config: str
    resumed: int = 0
    finished: bool = False

    def __str__(self) -> str:
        """One line of text."""
        times = f", resumes: {self.resumed}" if self.resumed else ""
        end = "finished" if self.finished else "not finished"
        return f"{self.started}: {_cost([self])}, {end}{times}"


@dataclasses.dataclass(frozen=True)
class Spending:
    """What the runs of a folder have spent.

    Attributes:
        runs: The runs in the order in which they were started.
        unreadable: Lines of the record that are damaged, so that the total may be
            larger.
    """

    runs: tuple[Run, ...]
    unreadable: int = 0

    def __str__(self) -> str:
        """The total by basic composition, and one line per run."""
        lines = []
        for (relation, people), group in self._comparable().items():
            runs = f"{len(group)} runs, together" if len(group) > 1 else "1 run,"
            lines += [f"spending: {runs} {_cost(group)} ({relation}, people {people})"]
        if len(self.runs) > 1:
            lines += ["  by basic composition, where they read the same records"]
        if len(lines) > 2:
            lines += ["  under different relations or people no total is stated"]
        if self.unreadable:
            lines += [f"  at least: damaged lines in {NAME}: {self.unreadable}"]
        lines += [f"  run {i}, {run}" for i, run in enumerate(self.runs, start=1)]
        return "\n".join(lines)

    def _comparable(self) -> dict[tuple[str, str], list[Run]]:
        """The runs by the promise that they make."""

        def promise(run: Run) -> tuple[str, str]:
            return run.relation, run.people

        ordered = sorted(self.runs, key=promise)
        return {key: list(group) for key, group in itertools.groupby(ordered, promise)}


def read(folder: Path) -> Spending:
    """Reads the record of a folder.

    Args:
        folder: The result folder, which may not exist.

    Returns:
        The runs; none where there is no record.
    """
    file = folder / NAME
    lines = file.read_bytes().splitlines() if file.is_file() else []
    runs: list[Run] = []
    unreadable = 0
    for line in lines:
        try:
            _apply(json.loads(line), runs)
        except (ValueError, KeyError, TypeError, IndexError):
            unreadable += 1
    return Spending(tuple(runs), unreadable)


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
    if number <= len(read(folder).runs):
        _append(folder, {"event": "resumed", "run": number, "time": now})
        return
    text = json.dumps(config, sort_keys=True)
    run = Run(
        started=now,
        epsilon=math.inf if report.status is Status.HEURISTIC else report.epsilon,
        delta=report.delta,
        relation=report.relation,
        people=str(report.people),
        config=hashlib.sha256(text.encode()).hexdigest(),
    )
    fields = dataclasses.asdict(run)
    for counted in ("resumed", "finished"):
        del fields[counted]
    _append(folder, {"event": "started", "run": number} | fields)


def finish(folder: Path) -> None:
    """Records that the last run's result is written, once.

    Args:
        folder: The result folder.

    Raises:
        OSError: The disk refuses; the record is as before.

    Privacy:
        Without the time: how long a run took is covered by no guarantee.
    """
    runs = read(folder).runs
    if runs and not runs[-1].finished:
        _append(folder, {"event": "finished", "run": len(runs)})


def _append(folder: Path, event: dict[str, Any]) -> None:
    """Adds a line; whole or not at all, and never at the cost of an earlier one."""
    file = folder / NAME
    before = file.read_bytes() if file.is_file() else b""
    end = b"\n" if before and not before.endswith(b"\n") else b""
    line = json.dumps(event).encode() + b"\n"
    checkpoint.replace(file, before + end + line)


def _apply(event: dict[str, Any], runs: list[Run]) -> None:
    """What one line of the record adds to the runs."""
    kind, index = event.pop("event"), event.pop("run") - 1
    if kind == "started":
        runs.append(Run(**event))
        return
    changes: dict[str, Any] = {
        "resumed": {"resumed": runs[index].resumed + 1},
        "finished": {"finished": True},
    }[kind]
    runs[index] = dataclasses.replace(runs[index], **changes)


def _cost(runs: list[Run]) -> str:
    epsilon = sum(run.epsilon for run in runs)
    delta = min(1.0, sum(run.delta for run in runs))
    return f"epsilon = {rounded_up(epsilon)} at delta = {rounded_up(delta)}"
