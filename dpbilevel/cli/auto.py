"""Settings for a config, chosen by dry runs: `dpbilevel auto`."""

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from ..planning.auto_plan import AutoPlan, auto
from ..planning.race import Effort
from ..planning.settings import toml_value
from ..runs import checkpoint
from ..runs.progress import step_bar
from .config import Config, parse_config, read_tables
from .tables import Location
from .tasks import TASKS

# Last lines of a config without settings.
UNPLANNED = (
    "# There is no table [solver]: settings are chosen by dry runs on synthetic",
    "# records. dpbilevel auto CONFIG --out NEW.toml writes them.",
)

# Tables that a plan writes.
_SETTINGS = ("solver", "refit")
# Solvers in place of the missing table, so that the rest of a config is checked.
_DESCENT = {"num_steps": 1, "clip_norm": 1.0, "step_size": 1.0}
_STAND_INS = {
    False: {"type": "NoisyGD", **_DESCENT},
    True: {"type": "OneLevel", "model": _DESCENT},
}


def read_unplanned(path: str) -> tuple[Config, str]:
    """Read a config whose tables `[solver]` and `[refit]` may be missing.

    Returns:
        The config, with a stand-in for its solver, and the text of the file. Keys of
        `[model]` that the task plans are set in both if they are missing.

    Raises:
        ValueError: As `read_config`; the task is a game.
    """
    tables, text = read_tables(path)
    place = Location(path)
    task = TASKS.get(str(tables.get("task")))
    if task is not None and task.is_game:
        first = "missing [solver]: "
        then = "see docs/games.md"
        if "solver" in tables:
            first, then = "[solver] stays as it is: ", "run the config as it is"
        raise place.error(
            f'{first}dry runs plan no games, and task = "{task.name}" is one. Its '
            f"settings follow from theorems; {then}."
        )
    kept = {k: v for k, v in tables.items() if k not in _SETTINGS}
    model = kept.get("model")
    header = re.search(r"^[ \t]*\[model\][^\n]*$", text, re.MULTILINE)
    if task is not None and isinstance(model, dict) and header:
        missing = {k: v for k, v in task.planned.items() if k not in model}
        kept["model"] = model | missing
        lines = "".join(f"\n{key} = {toml_value(v)}" for key, v in missing.items())
        text = text[: header.end()] + lines + text[header.end() :]
    return parse_unplanned(kept, place), text


def parse_unplanned(tables: dict[str, Any], place: Location) -> Config:
    """Return a config with a stand-in for its solver; raise as `read_config`."""
    task = TASKS.get(str(tables.get("task")))
    stand_in = _STAND_INS[task is None or task.two_levels]
    return parse_config(tables | {"solver": stand_in}, place)


def read_for_run(path: str) -> tuple[Config, bool]:
    """Read a config whose settings may be missing.

    Returns:
        The config, and whether it has settings; if not, a stand-in is in their place.

    Raises:
        ValueError: As `read_config`, or as `read_unplanned` without settings.
    """
    tables, _ = read_tables(path)
    if any(name in tables for name in _SETTINGS):
        return parse_config(tables, Location(path)), True
    return read_unplanned(path)[0], False


def completed(config: Config, found: AutoPlan) -> Config:
    """Return a config that was read without settings, with those of a plan."""
    return _with(config, tomllib.loads(found.to_toml()))


def as_before(config: Config, out: Path) -> Config:
    """Return a config without settings with those of the run to be resumed.

    Raises:
        ValueError: The folder has no checkpoint.
    """
    before = checkpoint.read(out).fingerprint["config"]
    return _with(config, {k: before[k] for k in _SETTINGS if k in before})


def _with(config: Config, settings: dict[str, Any]) -> Config:
    given = {k: v for k, v in config.tables.items() if k not in _SETTINGS}
    return parse_config(given | settings, config.place)


def plan(config: Config, effort: Effort) -> AutoPlan:
    """Return the best settings for a config, by dry runs with a progress bar.

    Privacy:
        Touches no data.
    """
    w0 = config.model.start(config.data.blocks)
    with step_bar(0, "dry runs") as bar:
        try:
            return auto(
                config.problem,
                config.privacy.budget,
                sizes=config.sizes,
                w0=w0,
                effort=effort,
                neighbours=config.privacy.neighbours,
                precision=config.privacy.precision,
                progress=bar,
                before=config.check.releases,
            )
        except ValueError as error:
            raise config.place.error(str(error)) from error


def written(text: str, found: AutoPlan) -> str:
    """Return the text of a config with planned settings instead of its own.

    Args:
        text: The config.
        found: The plan.
    """
    lines, kept = [], True
    for line in text.splitlines():
        table = re.match(r"\s*\[+\s*([A-Za-z_-]+)", line)
        if table:
            kept = table[1] not in _SETTINGS
        if kept and line not in UNPLANNED:
            lines.append(line)
    while lines and not lines[-1].strip():
        lines.pop()
    reason = "\n".join(f"# {part}" for part in textwrap.wrap(found.reason, 84))
    return "\n".join([*lines, "", reason, found.to_toml()])
