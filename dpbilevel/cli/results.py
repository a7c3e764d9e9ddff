"""Result folder of a run: its guarantee, released values and spending."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.process_spending import guarantee_of
from ..core.shares import LevelUsability, Usability
from ..core.solution import divergence
from ..privacy.report import PrivacyReport
from ..runs import checkpoint, guards, spending
from ..runs.checkpoint import ARRAYS, RESULT
from .config import Config, parse_config
from .evaluation import Evaluation
from .tables import similar
from .toml_tables import Location

LEVELS = {
    "records": "records",
    "upper": "validation records",
    "lower": "training records",
}
_FORMAT = 2
MOST_NAMED = 16  # largest number of bars and coefficients with names


@dataclasses.dataclass(frozen=True)
class Result:
    """Published result of a finished run."""

    config: Config
    shown: np.ndarray  # released weights or log-penalties
    x: np.ndarray  # released upper variable; of a game the first
    y: np.ndarray | None  # released lower variable; of a game the second
    trajectory: np.ndarray  # of what is shown; row 0 is the initial point
    report: PrivacyReport  # the guarantee
    versions: dict[str, str]  # of the software
    power: dict[str, float]  # largest detection rate, by the rate of false alarms
    rejected_updates: int = 0  # as in `Solution`
    test: Evaluation | None = None  # on the test file, if there is one
    usability: Usability | None = None  # of the check of records, if there is one

    @property
    def names(self) -> tuple[str, ...]:
        """Tuple of the name of each shown value, such as a source."""
        return self.config.model.names(self.config.data)

    @property
    def model(self) -> np.ndarray:
        """The released linear model; of a game that of the first player."""
        return self.x if self.y is None or not self.config.task.two_levels else self.y

    @property
    def has_moved(self) -> bool:
        """Whether the shown answer differs from the public initial point."""
        return bool(np.any(self.shown != self.trajectory[0]))

    @property
    def ends_there(self) -> bool:
        """Whether the shown answer is the last iterate, and no average of iterates."""
        end = self.trajectory[-1]
        return bool(np.allclose(self.shown, end, rtol=1e-4, atol=1e-6))

    @property
    def output_rule(self) -> str:
        """Name of the rule by which the shown values follow from the trajectory."""
        solver: Any = self.config.solver
        while solver is not None and not hasattr(solver, "output"):
            solver = getattr(solver, "then", getattr(solver, "search", None))
        return "" if solver is None else type(solver.output).__name__

    @property
    def usable(self) -> list[str]:
        """List of lines on the released fractions of usable records, one per level."""
        levels = {} if self.usability is None else self.usability.levels
        lines = []
        for role, level in levels.items():
            usable = f"{100 * min(max(level.usable, 0.0), 1.0):.0f} %"
            text = f"usable {LEVELS[role]}: {usable} +- {100 * level.noise_std:.0f} %"
            if self.config.privacy.person:
                text += " (of a person's rows, in the mean)"
            if level.constant_accuracy is not None:
                text += f"; the most frequent class: {level.constant_accuracy:.2g}"
            lines.append(text)
        return lines

    @property
    def warnings(self) -> list[str]:
        """List of texts: warnings about the run and its records."""
        remarks = [] if self.usability is None else [*self.usability.remarks]
        remark = divergence(self.rejected_updates)
        return remarks if remark is None else [*remarks, remark]

    def __str__(self) -> str:
        """Return the released values, then the report, as a page of text."""
        task = self.config.task
        stays = "" if self.has_moved else " (as at the start; no step moved them)"
        lines = [f"released {task.label} of each {task.of}{stays}:"]
        lines += _aligned(self.names, self.shown)
        lines += [f"  ({task.remark})"] if task.remark else []
        model = np.ravel(self.model)
        text = f"released model: {model.size} coefficients in {ARRAYS}, of columns "
        text += "as the config encodes them"
        kept = [] if task.shows_model else largest(model)
        if len(kept):
            text += ", the largest:" if len(kept) < model.size else ":"
        lines.append(text)
        columns = self.config.data.coefficients
        lines += _aligned([columns[i] for i in kept], map(float, model[kept]))
        lines += [] if self.test is None else [str(self.test)]
        lines += self.usable
        lines += [f"WARNING: {remark}" for remark in self.warnings]
        return "\n".join([*lines, "", str(self.report)])


def _aligned(names: Sequence[str], values: Iterable[float]) -> list[str]:
    """Return a list of lines of text, one per value, the names in one column."""
    width = max(map(len, names), default=0)
    pairs = zip(names, values, strict=True)
    return [f"  {name:<{width}}  {value:.4f}" for name, value in pairs]


def largest(model: np.ndarray) -> np.ndarray:
    """Return the sorted positions of the 16 coefficients of largest absolute value."""
    return np.sort(np.argsort(-np.abs(model), kind="stable")[:MOST_NAMED])


def save(folder: Path, result: Result) -> None:
    """Write a `Result` into a folder, `result.json` last: its presence means complete.

    Privacy:
        Released values and public ones only.
    """
    config, names = result.config, result.names
    features = config.data.coefficients
    arrays = {
        "x": result.x,
        "trajectory": result.trajectory,
        "shown": result.shown,
        "names": np.asarray(names, str),
        "features": np.asarray(features, str),
    }
    if result.y is not None:
        arrays["y"] = result.y
    checkpoint.replace(folder / ARRAYS, checkpoint.npz(arrays))
    page = {
        "format": _FORMAT,
        "task": config.task.name,
        "label": config.task.label,
        "released": dict(zip(names, result.shown.tolist(), strict=True)),
        "x": result.x.tolist(),
        "y": None if result.y is None else result.y.tolist(),
        "features": features,
        "test": result.test and dataclasses.asdict(result.test),
        checkpoint.CHECK: result.usability and dataclasses.asdict(result.usability),
        "power": result.power,
        "rejected_updates": result.rejected_updates,
        "report": json.loads(result.report.to_json()),
        "versions": result.versions,
        "config": config.tables,
    }
    checkpoint.replace_json(folder / RESULT, page)  # last: says that all is there


def spent(out: Path, shown: Callable[[Path], str] = str) -> str:
    """Return what the runs of a folder cost, as text; empty if none was started.

    `shown` returns the text that stands for a folder.
    """
    record = spending.read(out)
    if spending.is_moved(out.resolve()):  # by a later run
        above = out.resolve().parent
        return f"spending: in the record of its folder: dpbilevel report {shown(above)}"
    if not (record.runs or spending.is_lost(out)):
        return ""
    lines = [str(record)]
    for place, limit in spending.limits(out):
        found = spending.spent(place)
        left = max(0.0, limit[0] - found.epsilon), max(0.0, limit[1] - found.delta)
        texts = (spending.text_of(costs) for costs in (limit, left))
        lines.append(f"limit of {shown(place)}: {'; left: '.join(texts)}")
    return "\n".join(lines)


def total(out: Path, report: PrivacyReport) -> tuple[int, float, float]:
    """Return the number of a folder's runs, and their summed epsilon and delta.

    Of a run that a later one moved, these are the runs of the folder above. The sums
    are infinite and 1 if some run protects another unit than the report, or has another
    status, because they would promise the unit of the report too much.
    """
    place = out.resolve()
    found = spending.spent(place.parent if spending.is_moved(place) else place)
    same = {run.guarantee for run in found.runs} == {guarantee_of(report)}
    if same and found.epsilon >= report.epsilon:
        return len(found.runs), found.epsilon, found.delta
    return len(found.runs), math.inf, 1.0


def load(folder: Path) -> Result:
    """Return the `Result` in the folder of a finished run; refuse any other folder."""
    file = folder / RESULT
    if not file.is_file():
        raise ValueError(f"{folder} holds no finished run{_why(folder)}.")
    try:
        page = json.loads(file.read_text(encoding="utf-8"))
        if page["format"] != _FORMAT:
            raise ValueError(f"its format is {page['format']}, not {_FORMAT}")
        with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        return Result(
            config=parse_config(page["config"], Location(str(file))),
            shown=found["shown"],
            x=found["x"],
            y=found.get("y"),
            trajectory=found["trajectory"],
            report=PrivacyReport.from_json(json.dumps(page["report"])),
            versions=page["versions"],
            rejected_updates=page.get("rejected_updates", 0),
            test=Evaluation(**page["test"]) if page.get("test") else None,
            power=page["power"],
            usability=usability_of(page),
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"{folder} is no result folder of this version, or damaged: {error}. "
            "Report it with the version that wrote it, or run its config again."
        ) from error


def usability_of(page: dict[str, Any]) -> Usability | None:
    """Return the released `Usability` from a dict read as JSON, or `None`."""
    found = page.get(checkpoint.CHECK)
    if found is None:
        return None
    levels = {role: LevelUsability(**f) for role, f in found["levels"].items()}
    return Usability(levels)


def _why(folder: Path) -> str:
    """Return text on why a folder holds no finished run, and where to look."""
    if not folder.exists():
        return f": there is no such folder{similar(folder, Path.is_dir)}"
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
    if guards.in_use(folder):
        return f": the run in it is in progress{finished}"
    if (folder / checkpoint.NAME).is_file():
        return (
            ": the run in it was interrupted; finish it with dpbilevel run CONFIG "
            f"--out {folder} --resume{finished}"
        )
    if (folder / checkpoint.SEARCH).is_file():
        return f": it is the folder of a search; read {folder / checkpoint.SEARCH}"
    inside = [file.parent for file in sorted(folder.glob(f"*/{RESULT}"))]
    if inside and not earlier:
        return f": it is the folder of others; see dpbilevel report {inside[-1]}"
    return f": it has no {RESULT}{finished}"
