"""Plans of a config, from public values alone: its settings, its noise, its audit."""

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from ..audit.canaries import Canary, canaries
from ..audit.tradeoff import TradeOff, audit_canaries
from ..core.plan import calibrate
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..core.usability import RecordsCheck
from ..planning.auto_plan import AutoPlan, auto
from ..planning.candidates import toml_value
from ..privacy.budget import Neighbours, People
from ..privacy.keys import root_key
from ..privacy.ledger import Ledger
from ..privacy.report import PrivacyReport, describe
from . import evaluation
from .config import Config, parse_config, read_tables
from .task import Problem
from .tasks import TASKS
from .toml_tables import Location

PEOPLE = "person of the test file"
_UNLISTED = (
    "Records with {} label{} are ignored in every file. Their number is private, but "
    "for the released fraction of usable records. Compare the spellings with the files."
)
_ASSUMED = {
    "public": "the records of the test file {} are public",
    "counted": "nobody with a record in the test file {} has one in another file",
    "non_private": "NOT protected: the people of the test file {}, on whom the exact "
    "accuracy is computed",
}
# Assumptions about ids.
_SAME_IDS = (
    "an id is no secret: neighbours differ in what the rows of one id say, because the "
    "id decides the level of a person"
)
_APART = "that no id is in two files is checked, and a refusal is protected by nothing"
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


def read_unplanned(path: str, text: str | None = None) -> tuple[Config, str]:
    """Return a config that may lack `[solver]` and `[refit]`, and the file's text.

    The config has a stand-in for its solver. Keys of `[model]` that the task plans are
    set in both if they are missing. Games are refused.
    """
    (tables, text), place = read_tables(path, text), Location(path)
    task = TASKS.get(str(tables.get("task")))
    if task is not None and task.is_game:
        then = "missing [solver]: see docs/games.md"
        if "solver" in tables:
            then = "run the config as it is"
        raise place.error(f'no dry run plans the game task = "{task.name}"; {then}.')
    kept = {k: v for k, v in tables.items() if k not in _SETTINGS}
    model = kept.get("model")
    header = re.search(r"^[ \t]*\[model\][^\n]*$", text, re.MULTILINE)
    if task is not None and isinstance(model, dict) and header:
        missing = {k: v for k, v in task.planned.items() if k not in model}
        kept["model"] = model | missing
        lines = "".join(f"\n{key} = {toml_value(v)}" for key, v in missing.items())
        text = text[: header.end()] + lines + text[header.end() :]
    stand_in = _STAND_INS[task is None or task.two_levels]
    return parse_config(kept | {"solver": stand_in}, place), text


def read_for_run(path: str, text: str | None = None) -> tuple[Config, bool]:
    """Return a config and whether it has a solver; if not, as `read_unplanned` does."""
    tables, text = read_tables(path, text)
    if any(name in tables for name in _SETTINGS):
        return parse_config(tables, Location(path)), True
    return read_unplanned(path, text)[0], False


def completed(config: Config, settings: dict[str, Any]) -> Config:
    """Return a copy of a config with `[solver]` and `[refit]` from `settings` alone."""
    given = {k: v for k, v in config.tables.items() if k not in _SETTINGS}
    found = {k: settings[k] for k in _SETTINGS if k in settings}
    return parse_config(given | found, config.place)


def plan(config: Config) -> AutoPlan:
    """Return the `AutoPlan` of a config, by dry runs with a progress bar.

    Privacy:
        Touches no data.
    """
    privacy = config.privacy
    with config.place.named_in_errors():
        found = auto(
            config.model.problem(config.data.blocks),
            privacy.budget,
            sizes=config.sizes,
            w0=config.model.start(config.data.blocks),
            neighbours=privacy.neighbours,
            precision=privacy.precision,
            progress=True,
            before=config.records_check.releases,
        )
    if not privacy.person:
        return found
    # Dry runs have one row for each person; the guarantee is that of people.
    plan = _calibrated(config, found.trials[0].solver)
    return dataclasses.replace(found, solver=plan.solver, report=plan.report)


def written(text: str, found: AutoPlan) -> str:
    """Return the text of a config with planned settings instead of its own."""
    lines, kept = [], True
    for line in text.splitlines():
        table = re.match(r"\s*\[+\s*([A-Za-z_-]+)", line)
        if table:
            kept = table[1] not in _SETTINGS
        if kept and line not in UNPLANNED:
            lines.append(line)
    reason = "\n".join(f"# {part}" for part in textwrap.wrap(found.reason, 84))
    return "\n".join(["\n".join(lines).rstrip(), "", reason, found.to_toml()])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A planned run that has not touched data."""

    config: Config
    problem: Problem
    solver: AbstractSolver  # calibrated
    w0: PyTree  # public
    report: PrivacyReport  # the guarantee of one run
    records_check: RecordsCheck  # the first release of a run
    ledger: Ledger  # of a run, of its check of the records as well
    records_check_report: PrivacyReport | None  # of that release alone, if there is one


def prepare(config: Config) -> Prepared:
    """Return a `Prepared` run, planned from the config alone.

    A `ValueError` says that no noise reaches the budget.

    Privacy:
        Touches no data. Only the people of the test file, who are in no other file,
        are charged for a counted accuracy, and for nothing else (parallel composition).
    """
    plan, privacy = _calibrated(config, config.solver), config.privacy
    report = plan.report.with_generator(privacy.randomness)
    held_out, counted = config.data.test, config.data.counts_test
    label = "an unlisted" if config.data.label.of_classes else "an unreadable"
    place = f" or {config.task.places[:-1]}" if config.task.places else ""
    assumed = [
        _UNLISTED.format(label, place),
        *reversed(config.records_check.assumptions),
    ]
    if held_out is not None:
        assumed.insert(0, _ASSUMED[held_out.accuracy].format(Path(held_out.path).name))
    if privacy.person:  # assumptions about ids of people who have several rows
        disjoint = privacy.people is People.DISJOINT
        by_id = disjoint and privacy.neighbours is Neighbours.REPLACE_ONE
        assumed += [_SAME_IDS] * (by_id and not config.data.validation_path)
        assumed += [_APART] * (disjoint or counted)
    assumed = (*assumed, *report.assumptions)
    report = dataclasses.replace(report, assumptions=assumed)
    if counted:
        report = _with_test(report, config)
    first, problem, of_first = config.records_check, config.problem, None
    ledger = plan.solver.ledger(problem, config.sizes)
    if first.releases:
        alone = dataclasses.replace(ledger, releases=first.releases)
        two = privacy.people is not None
        of_first = describe(alone, privacy.budget, levels=two, unit=problem.unit)
    releases = (*first.releases, *ledger.releases)
    return Prepared(
        config=config,
        problem=problem,
        solver=plan.solver,
        w0=config.model.start(config.data.blocks),
        report=report,
        records_check=first,
        ledger=dataclasses.replace(ledger, releases=releases),
        records_check_report=of_first,
    )


def _with_test(report: PrivacyReport, config: Config) -> PrivacyReport:
    """Return the report completed by the release of a counted accuracy."""
    tested = describe(evaluation.ledger_of(config), config.privacy.budget, levels=False)
    a, b = report.mu, tested.mu
    return dataclasses.replace(
        report,
        epsilon=max(report.epsilon, tested.epsilon),
        epsilon_by_person=report.epsilon_by_person | {PEOPLE: tested.epsilon},
        ledger=report.ledger + tested.ledger,
        forecast=report.forecast + tested.forecast,
        mu=None if None in (a, b) else max(a or 0.0, b or 0.0),
    )


def _calibrated(config: Config, solver: AbstractSolver) -> Plan[Any]:
    with config.place.named_in_errors():
        return calibrate(
            config.problem,
            solver,
            config.privacy.budget,
            sizes=config.sizes,
            w0=config.model.start(config.data.blocks),
            precision=config.privacy.precision,
            before=config.records_check.releases,
        )


def audit_config(config: Config, runs: int) -> tuple[TradeOff, ...]:
    """Return a tuple of `TradeOff`s, one per kind of person, for a config's solver.

    Privacy:
        Touches no data: neither the config's records nor released values.
    """
    found = canaries_of(prepare(config))
    return audit_canaries(found, key=root_key(), runs=runs)  # new noise each time


def canaries_of(prepared: Prepared) -> dict[str, Canary]:
    """Return worst-case records for an audit, a dict of `Canary` by kind of person."""
    reads = getattr(prepared.problem, "x_in_records", True)  # a game has one level
    return canaries(prepared.solver, x_in_records=reads)
