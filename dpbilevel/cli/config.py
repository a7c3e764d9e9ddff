"""Configs of the command line: TOML files, strictly read into frozen objects."""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_type_hints

from .. import _public
from ..bilevel.problem import BilevelProblem, Sizes
from ..bilevel.refitted import Refitted
from ..core.outputs import AbstractOutput
from ..core.solver import MECHANISM_FIELDS, AbstractSolver
from ..core.usability import RecordsCheck
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.budget import Neighbours, People, PrivacyBudget
from ..privacy.per_example.clipping import Precision
from ..privacy.queries import RECORDS
from ..privacy.records.people import PersonUnit
from ..privacy.sampling.base import AbstractSampling
from .data import CsvData
from .tables import similar
from .task import AbstractModel, Problem, Task
from .tasks import TASKS
from .toml_tables import (
    Location,
    Reader,
    check_choice,
    check_table,
    collect_errors,
    errors_of_keys,
)

_TABLES = ("task", "privacy", "data", "model", "solver", "refit")
# Keys of `Refitted` itself; the other keys of the table belong to its solver.
_REFIT_KEYS = ("budget_split", "refit_reads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy:
    """The table `[privacy]`; epsilon, delta and the relations have no defaults.

    Args:
        epsilon: Epsilon of the budget.
        delta: Delta of the budget.
        people: Relation of the people in the two levels; only for two levels.
        neighbours: Neighbouring relation.
        precision: `"grid"`, or `"float"` for research.
        allow_large_delta: Whether `run` accepts a delta of one over the number of
            records or more.
        randomness: Generator of the random bits, as in `root_key`; `"chacha20"` is the
            cryptographic one.
        check_records: Whether a run first releases the fraction of usable records.
        person: Column with the id of the person of each row; empty if each row is a
            person.
        most_rows: Number of rows of a person that count, at most.
        combine: What counts of them: `"mean"`, or `"sum"` over `most_rows`.
    """

    epsilon: float
    delta: float
    people: People | None = None
    neighbours: Neighbours
    precision: Precision = "grid"
    allow_large_delta: bool = False
    randomness: Literal["threefry4x32", "chacha20"] = "threefry4x32"
    check_records: bool = True
    person: str = ""
    most_rows: int = 8
    combine: Literal["mean", "sum"] = "mean"

    def __post_init__(self):
        own = self.most_rows, self.combine
        if self.person:
            PersonUnit(*own)
        elif own != (Privacy.most_rows, Privacy.combine):
            raise ValueError("most_rows and combine need person, a column of ids.")
        if self.delta == 0:
            raise ValueError("delta = 0 asks for pure privacy; give a positive one.")
        PrivacyBudget(self.epsilon, self.delta)

    @property
    def budget(self) -> PrivacyBudget:
        """Budget of the run."""
        return PrivacyBudget(self.epsilon, self.delta)

    @property
    def unit(self) -> PersonUnit | None:
        """Unit of privacy if it is a person with several rows; `None` for a row."""
        return PersonUnit(self.most_rows, self.combine) if self.person else None


@dataclasses.dataclass(frozen=True)
class Config:
    """Description of a run by public values alone."""

    place: Location  # the file of the config
    task: Task
    model: AbstractModel
    privacy: Privacy
    data: CsvData
    solver: AbstractSolver  # not calibrated
    tables: dict[str, Any]  # the parsed file

    @property
    def sizes(self) -> Sizes | int:
        """Planned `Sizes`; for one level the number of records or people."""
        if self.privacy.people is None:
            return self.data.training
        return Sizes(self.data.validation, self.data.training, self.privacy.people)

    @property
    def records_check(self) -> RecordsCheck:
        """`RecordsCheck`, the first release of a run: fractions of usable records."""
        own, people = self.data.used_columns, self.privacy.people
        columns = {RECORDS if people is None else "upper": own}
        if people not in (None, People.SHARED):  # only training records have a source
            upper = dataclasses.replace(self.data, sources=None).used_columns
            columns = {"upper": upper, "lower": own}
        return RecordsCheck.planned(
            columns if self.privacy.check_records else {},
            self.privacy.budget,
            self.sizes,
            neighbours=self.privacy.neighbours,
            precision=self.privacy.precision,
        )

    @property
    def problem(self) -> Problem:
        """Problem of the task, on records of the config."""
        problem, own = self.model.problem(self.data.blocks), self.privacy
        if not own.person:
            return problem
        return problem.per_person(own.most_rows, own.combine)

    def check_delta(self) -> None:
        """Raise `ValueError` if delta is at least 1/n, unless the config allows it."""
        delta = self.privacy.delta
        least = 1 / max(self.data.training, self.data.validation)
        if delta >= least and not self.privacy.allow_large_delta:
            raise self.place.child("privacy").error(
                f"delta = {delta:g} is not below one over the number of "
                f"{'people' if self.privacy.person else 'records'}, {least:.2g}. Give "
                "a smaller delta, or allow_large_delta = true."
            )


def read_config(path: str | Path) -> Config:
    """Return the `Config` in a TOML file.

    It holds no key: keys come from the operating system's entropy when a run starts.
    Errors of the file, of its TOML and of the run that it describes name table and key.
    """
    tables, _ = read_tables(path)
    return parse_config(tables, Location(str(path)))


def read_tables(
    path: str | Path, text: str | None = None
) -> tuple[dict[str, Any], str]:
    """Return the tables and text of a TOML file, read unless `text` is given."""
    place = Location(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8-sig") if text is None else text
        # Lines that `dpbilevel init` marked are still comments.
        left = [
            f"{found[1]} in line {number}"
            for number, line in enumerate(text.splitlines(), 1)
            if (found := re.match(r"# (\w+) = .*# REQUIRED: ", line))
        ]
        if left:
            raise place.error(
                f"required facts are missing: {', '.join(left)}; remove their # and "
                "fill them in."
            )
        return tomllib.loads(text), text
    except OSError as error:
        close = similar(Path(path), lambda other: other.suffix == ".toml")
        what = f"cannot be read: {error.strerror}{close}."
        raise place.error(what) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if str(path).endswith(".csv"):
            raise place.error(
                f"is a file of records, not a config; dpbilevel init {path} writes one."
            ) from error
        raise place.error(f"is not a TOML file: {error}.") from error


def parse_config(tables: dict[str, Any], place: Location) -> Config:
    """Return the `Config` of the tables of a file; raises as `read_config` does."""
    if "solver" not in tables and {*tables} <= {*_TABLES}:
        raise place.error(
            "missing table [solver]. dpbilevel auto CONFIG --out NEW.toml writes one."
        )
    collect_errors(errors=errors_of_keys(tables, place, _TABLES, _TABLES[:-1]))
    task = TASKS[check_choice(tables["task"], TASKS, place, "task")]
    build = Reader({}).build  # tables without solvers
    privacy, model, data = collect_errors(
        (build, Privacy, tables["privacy"], place.child("privacy")),
        (build, task.model, tables["model"], place.child("model")),
        (build, CsvData, tables["data"], place.child("data")),
    )
    solver = _solver(tables, place, privacy.neighbours, task.problem_type)
    found, wanted = solver.neighbours, privacy.neighbours
    if found is not wanted:
        raise place.child("solver").error(
            f"refers to {found.value}, [privacy] to {wanted.value}."
        )
    collect_errors(errors=_mistakes(place, task, model, privacy, data))
    return Config(place, task, model, privacy, data, solver, tables)


def public_classes(base: type) -> dict[str, type]:
    """Return a dict by name of the public concrete subclasses of `base`."""
    found = {name: getattr(_public, name) for name in _public.NAMES}
    for package in filter(inspect.ismodule, [*found.values()]):
        found |= {name: getattr(package, name) for name in package.__all__}
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and not inspect.isabstract(value)
    }


def _solver(
    tables, place: Location, neighbours: Neighbours, kind: type
) -> AbstractSolver:
    solvers: dict[str, Any] = public_classes(AbstractSolver)
    fitting, one_level = (
        {
            name: solver
            for name, solver in solvers.items()
            if solver.in_config and issubclass(wanted, solver.problem_type)
        }
        for wanted in (kind, AbstractFiniteSum)
    )
    reader = Reader(
        {
            AbstractSolver: one_level,
            AbstractSolver[BilevelProblem, Any]: fitting,
            AbstractSampling: public_classes(AbstractSampling),
            AbstractOutput: {
                name: rule
                for name, rule in public_classes(AbstractOutput).items()
                if not rule.needs_key  # no solver of a config has one for it
            },
        },
        frozenset({"sizes", "dtype", "scoring", "run_noise", *MECHANISM_FIELDS}),
    )
    where = place.child("solver")
    check_table(tables["solver"], where)
    asked = solvers.get(str(tables["solver"].get("type")))
    if asked is not None and not asked.in_config:
        raise where.error(
            f'type = "{asked.__name__}" is for Python only. Choose from '
            f"{', '.join(sorted(fitting))}."
        )
    solver = reader.build(fitting, tables["solver"], where)
    with where.named_in_errors():  # at any depth, defaults of fields too
        solver = solver.with_neighbours(neighbours)
    if "refit" not in tables:
        return solver
    where = place.child("refit")
    if not issubclass(kind, BilevelProblem):
        raise where.error("is for tasks of two levels only; remove it.")
    check_table(tables["refit"], where)
    fields, hints = dict(tables["refit"]), get_type_hints(Refitted)
    own = {
        key: reader.convert(hints[key], fields.pop(key), where, key)
        for key in _REFIT_KEYS
        if key in fields
    }
    refit = reader.build(one_level, fields, where, beside=_REFIT_KEYS)
    with where.named_in_errors():
        return Refitted(solver, refit.with_neighbours(neighbours), **own)


def _mistakes(
    place: Location, task: Task, model: AbstractModel, privacy: Privacy, data: CsvData
) -> Iterator[ValueError]:
    """Yield errors if tables that are right by themselves do not fit together."""
    people, two = privacy.people, task.two_levels
    of_privacy, of_data = map(place.child, ("privacy", "data"))
    one = f'is for tasks of two levels; task = "{task.name}" has one. Remove it.'
    if two and people is None:
        missing = 'missing key \'people\': "disjoint", "overlapping" or "shared".'
        yield of_privacy.error(missing)
    if not two and people is not None:
        yield of_privacy.error(f"people {one}")
    if privacy.person in data.used_columns.names:  # a model would read the ids
        yield of_privacy.error(
            f"person = {privacy.person!r} is a label, feature, source or group in "
            "[data], too; give it one role."
        )
    if not two and data.validation:
        yield of_data.error(f"validation {one}")
    for name in ("training", "validation") if two else ("training",):
        if getattr(data, name) < 1:
            yield of_data.error(f"{name} must be at least 1.")
    if not (data.numeric or data.categorical):
        yield of_data.error("list columns in [[data.numeric]] or data.categorical.")
    columns = [name for block in data.numeric for name in block.columns]
    if data.label.column in [*columns, *(block.column for block in data.categorical)]:
        yield of_data.error(
            f"the label {data.label.column!r} is a feature, too; give it one role."
        )
    if people is People.SHARED and data.training != data.validation:
        yield of_data.error('training must equal validation if people = "shared".')
    if privacy.neighbours is not Neighbours.REPLACE_ONE and data.counts_test:
        yield of_data.child("test").error(
            'accuracy = "counted" needs neighbours = "replace_one"; use "public".'
        )
    for name in ("sources", "groups"):  # what the task reads, and no more
        found, where = getattr(data, name), of_data.child(name)
        if found is None and name == task.places:
            what = f"The task needs column and values of the {name}."
            yield where.error(f"missing table. {what}")
        elif found is not None and name != task.places:
            yield where.error(f'task = "{task.name}" has no {name}; remove it.')
        elif found is not None and len(found.values) != model.count:
            listed = f"lists {len(found.values)} {name}"
            yield where.error(f"{listed}, but [model] is for {model.count}.")
    yield from model.mistakes(data, of_data)
