"""Result folder of a run: released values, the guarantee and a figure."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.shares import LevelUsability, Usability
from ..core.solution import divergence
from ..privacy.report import PrivacyReport
from ..runs import checkpoint, lock
from ..runs.checkpoint import SEARCH
from .evaluation import Evaluation
from .tables import Location
from .task import AbstractModel, Task
from .tasks import TASKS

RESULT = checkpoint.RESULT
ARRAYS = "solution.npz"
FIGURE = "figure.png"
_AUDIT = "audit.json"
LEVELS = {
    "records": "records",
    "upper": "validation records",
    "lower": "training records",
}
MOST_NAMED = 16  # largest number of bars and coefficients with names


@dataclasses.dataclass(frozen=True)
class Result:
    """Published result of a finished run.

    Attributes:
        task: Name of the task.
        names: Name of each shown value, such as a source.
        shown: The released weights or log-penalties.
        x: The released upper variable; of a game the first.
        y: The released lower variable, or `None`; of a game the second.
        trajectory: Shown values after every step; row 0 is the initial point.
        report: The guarantee.
        versions: Versions of the software.
        config: The config as it was given.
        power: Largest power of any attack with 5 % false alarms, by the ledger.
        rejected_updates: As in `Solution`.
        features: Name of the feature of each coefficient.
        test: The accuracy or error on the test file, if the config names one.
        usability: Released result of the check of the records; `None` without one.
    """

    task: str
    names: tuple[str, ...]
    shown: np.ndarray
    x: np.ndarray
    y: np.ndarray | None
    trajectory: np.ndarray
    report: PrivacyReport
    versions: dict[str, str]
    config: dict[str, Any]
    power: float
    rejected_updates: int = 0
    features: tuple[str, ...] = ()
    test: Evaluation | None = None
    usability: Usability | None = None

    @property
    def declared(self) -> Task[Any]:
        """Declaration of the task."""
        return TASKS[self.task]

    @property
    def settings(self) -> AbstractModel:
        """The table `[model]` of the config."""
        return self.declared.read(self.config["model"], Location(RESULT))

    @property
    def model(self) -> np.ndarray | None:
        """Coefficients of the released model, if the task has one."""
        if not self.declared.has_model:
            return None
        return self.y if self.declared.two_levels else self.x  # of a game the first

    @property
    def has_moved(self) -> bool:
        """Whether what is shown differs from the public initial point."""
        return bool(np.any(self.shown != self.trajectory[0]))

    @property
    def ends_there(self) -> bool:
        """Whether what is shown is the end of the trajectory, and no average of it."""
        end = self.trajectory[-1]
        return bool(np.allclose(self.shown, end, rtol=1e-4, atol=1e-6))

    @property
    def checked(self) -> list[str]:
        """Text on the released fractions of usable records, for each level."""
        levels = {} if self.usability is None else self.usability.levels
        lines = []
        for role, level in levels.items():
            usable = f"{100 * min(max(level.usable, 0.0), 1.0):.0f} %"
            text = f"usable {LEVELS[role]}: {usable} +- {100 * level.noise_std:.0f} %"
            if level.constant_accuracy is not None:
                text += f"; the most frequent class: {level.constant_accuracy:.2g}"
            lines.append(text)
        return lines

    @property
    def warnings(self) -> list[str]:
        """Warnings about the run and its records."""
        remarks = [] if self.usability is None else [*self.usability.remarks]
        remark = divergence(self.rejected_updates)
        return remarks if remark is None else [*remarks, remark]

    def __str__(self) -> str:
        """Return the released values, then the report, as a page of text."""
        task = self.declared
        stays = "" if self.has_moved else " (as at the start; no step moved them)"
        lines = [f"released {task.label} of each {task.of}{stays}:"]
        lines += _aligned(self.names, self.shown)
        lines += [f"  ({task.remark})"] if task.remark else []
        if self.model is not None:
            model = np.ravel(self.model)
            text = f"released model: {model.size} coefficients in {ARRAYS}, of columns "
            text += "as the config encodes them"
            kept = largest(model) if self.features and not task.shows_model else []
            if len(kept):
                text += ", the largest:" if len(kept) < model.size else ":"
            lines.append(text)
            lines += _aligned(
                [self.features[i] for i in kept], [float(model[i]) for i in kept]
            )
        lines += [] if self.test is None else [str(self.test)]
        lines += self.checked
        lines += [f"WARNING: {remark}" for remark in self.warnings]
        return "\n".join([*lines, "", str(self.report)])


def _aligned(names: Sequence[str], values: Iterable[float]) -> list[str]:
    """Return one line per value, with the names in one column."""
    width = max(map(len, names), default=0)
    pairs = zip(names, values, strict=True)
    return [f"  {name:<{width}}  {value:.4f}" for name, value in pairs]


def largest(model: np.ndarray) -> np.ndarray:
    """Return the positions of the largest coefficients, in the order of the config."""
    return np.sort(np.argsort(-np.abs(model), kind="stable")[:MOST_NAMED])


def save(folder: Path, result: Result, figure: bytes) -> None:
    """Write a result; `result.json` comes last, so its presence means complete.

    Raises:
        OSError: The disk refuses.

    Privacy:
        Released values and public ones only.
    """
    arrays = {
        "x": result.x,
        "trajectory": result.trajectory,
        "shown": result.shown,
        "names": np.asarray(result.names, str),
        "features": np.asarray(result.features, str),
    }
    if result.y is not None:
        arrays["y"] = result.y
    checkpoint.replace(folder / ARRAYS, checkpoint.npz(arrays))
    checkpoint.replace(folder / FIGURE, figure)
    page = {
        "format": 1,
        "task": result.task,
        "label": result.declared.label,
        "released": dict(zip(result.names, result.shown.tolist(), strict=True)),
        "x": result.x.tolist(),
        "y": None if result.y is None else result.y.tolist(),
        "features": result.features,
        "test": None if result.test is None else dataclasses.asdict(result.test),
        checkpoint.CHECK: None
        if result.usability is None
        else dataclasses.asdict(result.usability),
        "power_at_5_percent_false_alarms": result.power,
        "rejected_updates": result.rejected_updates,
        "report": json.loads(result.report.to_json()),
        "versions": result.versions,
        "config": result.config,
    }
    checkpoint.replace_json(folder / RESULT, page)  # last: says that all is there


def set_aside(folder: Path, number: int) -> int:
    """Move the result of the last run on record into a folder of its own, `run-N`.

    Returns:
        The number of the last run. It is higher than on record if a `run-N` shows that
        the record has lost some.

    Raises:
        OSError: The disk refuses; what was moved is in its new place.
    """
    if not (folder / RESULT).exists():
        return number
    while (folder / f"run-{number}" / RESULT).exists():
        number += 1
    aside = folder / f"run-{number}"
    aside.mkdir(exist_ok=True)
    # `result.json` says that a result is complete, so it goes last here too.
    for name in (ARRAYS, FIGURE, RESULT):
        if (folder / name).exists():
            (folder / name).replace(aside / name)
    return number


def load(folder: Path) -> Result:
    """Read a finished result folder.

    Raises:
        ValueError: The folder holds no finished run, or a damaged one.
    """
    file = folder / RESULT
    if not file.is_file():
        raise ValueError(f"{folder} holds no finished run{_why(folder)}.")
    try:
        page = json.loads(file.read_text(encoding="utf-8"))
        with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        return Result(
            task=page["task"],
            names=tuple(page["released"]),
            shown=found["shown"],
            x=found["x"],
            y=found.get("y"),
            trajectory=found["trajectory"],
            report=PrivacyReport.from_json(json.dumps(page["report"])),
            versions=page["versions"],
            config=page["config"],
            rejected_updates=page.get("rejected_updates", 0),
            features=tuple(page.get("features", ())),
            test=Evaluation(**page["test"]) if page.get("test") else None,
            power=page["power_at_5_percent_false_alarms"],
            usability=usability_of(page),
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"{folder} is not a result folder of this version of dpbilevel, or "
            f"{RESULT} or {ARRAYS} in it is damaged: {error}."
        ) from error


def usability_of(page: dict[str, Any]) -> Usability | None:
    """Return the released result of the check of the records, for JSON."""
    found = page.get(checkpoint.CHECK)
    if found is None:
        return None
    levels = {role: LevelUsability(**f) for role, f in found["levels"].items()}
    return Usability(levels)


def _why(folder: Path) -> str:
    """Return why a folder holds no finished run, and where to look."""
    if not folder.exists():
        return ": there is no such folder"
    if not folder.is_dir():
        return ": it is a file; give the folder that a run wrote"
    earlier = sorted(
        int(file.parent.name[4:])
        for file in folder.glob(f"run-*/{RESULT}")
        if file.parent.name[4:].isdecimal()
    )
    finished = ""
    if earlier:
        place = folder / f"run-{earlier[-1]}"
        finished = f"; an earlier one finished, see dpbilevel report {place}"
    if lock.in_use(folder):
        return f": the run in it is in progress{finished}"
    if (folder / checkpoint.NAME).is_file():
        return (
            ": the run in it was interrupted; finish it with dpbilevel run CONFIG "
            f"--out {folder} --resume{finished}"
        )
    if (folder / SEARCH).is_file():
        return f": it is the folder of a search; read {folder / SEARCH}"
    if (folder / _AUDIT).is_file():
        return f": it is the folder of an audit; read {folder / _AUDIT}"
    inside = [file.parent for file in sorted(folder.glob(f"*/{RESULT}"))]
    if inside and not earlier:
        return f": it is the folder of others; see dpbilevel report {inside[-1]}"
    return f": it has no {RESULT}{finished}"
