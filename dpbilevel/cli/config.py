"""Configs of the command line: strict TOML into frozen objects."""

import dataclasses
import inspect
import tomllib
from pathlib import Path
from typing import Any

from .. import _public
from ..bilevel.problem import BilevelProblem, Sizes
from ..bilevel.refitted import Refitted
from ..core.outputs import AbstractOutput
from ..core.solver import AbstractSolver
from ..games.problem import AbstractVariationalInequality, SaddleProblem
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.budget import Neighbours, People, PrivacyBudget
from ..privacy.clipping import Precision
from ..privacy.sampling import AbstractSampling
from .datasets import MATRICES, SOURCES, Sources
from .files import AbstractData
from .matrices import MatrixData
from .tables import Place, Reader, check_choice, check_keys, check_table
from .tasks import TASKS, AbstractTask, GroupTask, MatrixGameTask, SourceWeightingTask

_TABLES = ("task", "privacy", "data", "model", "solver", "refit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy:
    """The table `[privacy]`: all but the precision must be said.

    Args:
        epsilon: The budget's epsilon.
        delta: The budget's delta.
        people: Who has records in which level; said for two levels, and only there.
        neighbours: The neighbouring relation.
        precision: `"grid"`, or `"float"` for research.
    """

    epsilon: float
    delta: float
    people: People | None = None
    neighbours: Neighbours
    precision: Precision = "grid"

    def __post_init__(self):
        if self.delta == 0:
            raise ValueError(
                "delta = 0 asks for pure differential privacy, but the solvers release "
                "with Gaussian noise, which has none at any scale. Use a delta well "
                "below one over the number of records, such as 1e-6."
            )
        PrivacyBudget(self.epsilon, self.delta)

    @property
    def budget(self) -> PrivacyBudget:
        """The budget."""
        return PrivacyBudget(self.epsilon, self.delta)


@dataclasses.dataclass(frozen=True)
class Config:
    """A run, described by public values alone.

    Attributes:
        place: The file it was read from.
        task_name: The name of the task.
        task: What is solved.
        privacy: The guarantee.
        data: Where the records come from.
        solver: The solver, not yet calibrated.
        tables: The parsed file.
    """

    place: Place
    task_name: str
    task: AbstractTask
    privacy: Privacy
    data: AbstractData
    solver: AbstractSolver
    tables: dict[str, Any]

    @property
    def sizes(self) -> Sizes | int:
        """The planned numbers of records: an integer for one level."""
        if self.privacy.people is None:
            return self.data.training
        return Sizes(self.data.validation, self.data.training, self.privacy.people)

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return Path(self.place.file).parent

    @property
    def problem(self) -> BilevelProblem | SaddleProblem:
        """The problem."""
        return self.task.problem(self.data.blocks)


def read_config(path: str | Path) -> Config:
    """Reads a config.

    Args:
        path: A TOML file.

    Returns:
        The config. It holds no key: keys come from the operating system's entropy
        when a run starts.

    Raises:
        ValueError: The file is missing, is no TOML, or says something that no run can
            do; the message names file, table and key.
    """
    place = Place(str(path))
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise place.error(f"cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise place.error(f"is not a TOML file: {error}.") from error
    return parse_config(tables, place)


def parse_config(tables: dict[str, Any], place: Place) -> Config:
    """Builds a config from parsed tables.

    Args:
        tables: The parsed file.
        place: Its name.

    Returns:
        The config.

    Raises:
        ValueError: As in `read_config`.
    """
    check_keys(tables, place, allowed=_TABLES, required=_TABLES[:-1])
    task_name = check_choice(tables["task"], TASKS, place, "task")
    reader = Reader({}, {}, frozenset())
    privacy = reader.build(Privacy, tables["privacy"], place.child("privacy"))
    model = place.child("model")
    task: AbstractTask = reader.build(TASKS[task_name], tables["model"], model)
    table, where = tables["data"], place.child("data")
    kinds = MATRICES if task_name == "matrix_game" else SOURCES
    data = reader.build_named(kinds, table, where, "source")
    kind = BilevelProblem if task.two_levels else AbstractVariationalInequality
    solver = _solver(tables, place, privacy.neighbours, kind)
    config = Config(place, task_name, task, privacy, data, solver, tables)
    _check_people(config)
    _check_levels(config)
    _check_sources(config)
    _check_groups(config)
    _check_matrices(config)
    return config


def public_classes(base: type) -> dict[str, type]:
    """The concrete classes of one kind that the library and its packages export.

    Args:
        base: The abstract class.
    """
    top = {name: getattr(_public, name) for name in _public.__all__}
    packages = [value for value in top.values() if inspect.ismodule(value)]
    for package in packages:
        top |= {name: getattr(package, name) for name in package.__all__}
    return {
        name: value
        for name, value in top.items()
        if isinstance(value, type)
        and issubclass(value, base)
        and not inspect.isabstract(value)
    }


def _solver(tables, place: Place, neighbours: Neighbours, kind: type) -> AbstractSolver:
    solvers: dict[str, Any] = public_classes(AbstractSolver)
    fitting, one_level = (
        {n: v for n, v in solvers.items() if v.in_config and v.problem_type is wanted}
        for wanted in (kind, AbstractFiniteSum)
    )
    reader = Reader(
        {
            AbstractSolver: one_level,
            AbstractSampling: public_classes(AbstractSampling),
            AbstractOutput: public_classes(AbstractOutput),
        },
        _mechanisms(neighbours),
        frozenset({"sizes", "dtype"}),
    )
    where = place.child("solver")
    check_table(tables["solver"], where)
    asked = solvers.get(str(tables["solver"].get("type")))
    if asked is not None and not asked.in_config:
        raise where.error(
            f'type = "{tables["solver"]["type"]}" is for Python only: its parts are '
            f"not written in a config. Choose from {', '.join(sorted(fitting))}."
        )
    solver = reader.build_named(fitting, tables["solver"], where)
    if "refit" not in tables:
        return solver
    where = place.child("refit")
    if kind is not BilevelProblem:
        raise where.error("is for tasks of two levels only; remove it.")
    check_table(tables["refit"], where)
    fields = dict(tables["refit"])
    split = fields.pop("budget_split", None)
    refit = reader.build_named(one_level, fields, where)
    try:
        if split is None:
            return Refitted(solver, refit)
        pair = reader.convert(tuple[float, float], split, where, "budget_split")
        return Refitted(solver, refit, budget_split=pair)
    except ValueError as error:
        raise where.error(str(error)) from error


def _mechanisms(neighbours: Neighbours) -> dict[type, Any]:
    """Every uncalibrated mechanism under the relation that `[privacy]` names."""
    return {
        cls: cls(neighbours=neighbours)
        for cls in public_classes(object).values()
        if "neighbours" in getattr(cls, "__dataclass_fields__", {})
        and hasattr(cls, "release")
    }


def _check_people(config: Config) -> None:
    where, two_levels = config.place.child("privacy"), config.task.two_levels
    if two_levels and config.privacy.people is None:
        raise where.error(
            "missing key 'people', which says where one person may have records: "
            '"disjoint", "overlapping" or "shared".'
        )
    if not two_levels and config.privacy.people is not None:
        raise where.error(
            f'people is for tasks of two levels; task = "{config.task_name}" has one. '
            "Remove it."
        )


def _check_levels(config: Config) -> None:
    where = config.place.child("data")
    two_levels = config.task.two_levels
    for name in ("training", "validation") if two_levels else ("training",):
        if getattr(config.data, name) < 1:
            raise where.error(f"{name} must be at least 1.")
    if not two_levels and config.data.validation:
        raise where.error(
            f'validation is for tasks of two levels; task = "{config.task_name}" '
            "would read none of them. Remove it; keep records for evaluation in "
            "another file."
        )
    try:
        _ = config.sizes
    except ValueError as error:
        raise where.error(
            f'[privacy] says people = "shared", so the same records are in both '
            f"levels: training and validation must be equal, got "
            f"{config.data.training} and {config.data.validation}."
        ) from error


def _check_sources(config: Config) -> None:
    where, sources = config.place.child("data.sources"), config.data.sources
    if not isinstance(config.task, SourceWeightingTask):
        if sources is not None:
            raise where.error('is for task = "source_weighting" only; remove it.')
        return
    if sources is None:
        raise where.error(
            "missing table. Source weighting needs the sources of the training "
            "records: flip (generated corruption) or column and values."
        )
    wanted = config.task.num_sources
    if sources.count != wanted:
        raise where.error(
            f"lists {sources.count} sources, but [model] has num_sources = {wanted}."
        )
    _check_corruption(config, sources, where)


def _check_corruption(config: Config, sources: Sources, where: Place) -> None:
    private_count = config.privacy.neighbours is Neighbours.ADD_OR_REMOVE_ONE
    if (
        sources.flip
        and private_count
        and config.tables["data"]["source"] != "generated"
    ):
        raise where.error(
            "flip corrupts labels by row number, which moves when a record is added or "
            'removed. Use neighbours = "replace_one", or column and values.'
        )


def _check_groups(config: Config) -> None:
    where, groups = config.place.child("data.groups"), config.data.groups
    if not isinstance(config.task, GroupTask):
        if groups is not None:
            raise where.error(
                'is for task = "group_fair" and "group_robust" only; remove it.'
            )
        return
    if groups is None:
        raise where.error(
            "missing table. A game of groups needs them: column and values, or "
            "frequency and turn for generated records."
        )
    wanted = len(config.task.shares)
    if groups.count != wanted:
        raise where.error(
            f"lists {groups.count} groups, but [model] has {wanted} shares."
        )


def _check_matrices(config: Config) -> None:
    task, data = config.task, config.data
    if not isinstance(task, MatrixGameTask) or not isinstance(data, MatrixData):
        return
    wanted = task.rows, task.columns
    if data.shape != wanted:
        raise config.place.child("data").error(
            f"lists matrices of {data.shape[0]} rows and {data.shape[1]} columns, but "
            f"[model] has rows = {wanted[0]} and columns = {wanted[1]}."
        )
