"""The page of every key of a config says what the reader of configs does."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import dpbilevel as dpb
from docs.tables import PLACES
from dpbilevel.bilevel.problem import BilevelProblem
from dpbilevel.cli import columns, data, tasks
from dpbilevel.cli.config import Privacy, parse_config, public_classes
from dpbilevel.cli.toml_tables import Location
from dpbilevel.games.problem import AbstractVariationalInequality
from dpbilevel.privacy.sampling.base import AbstractSampling
from tests.cli.test_runner import GENERATED

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
ROW = re.compile(r"^\| (.*?) \| `(\w+)` \| (.*?) \| (.*?) \| .* \|$", re.MULTILINE)
WHERE = {
    Privacy: ["`privacy`"],
    data.CsvData: ["`data`"],
    data.HeldOut: ["`data.test`"],
    columns.Places: ["`data.sources`"],
    columns.Numeric: ["`data.numeric`"],
    columns.Categorical: ["`data.categorical`"],
    columns.Label: ["`data.label`"],
    dpb.Poisson: ["`sampling`", "`sampling` (Poisson)"],
    dpb.FixedSize: ["`sampling`", "`sampling` (FixedSize)"],
    dpb.privacy.SinglePass: ["`sampling`", "`sampling` (SinglePass)"],
    dpb.FullBatch: ["`sampling`"],
}
SELECTORS = {"type"}
SCHEMES = public_classes(AbstractSampling)
FILE = "tests/cli/test_config_page.py"


def section(title):
    assert f"\n## {title}\n" in PAGE, f"docs/config.md needs the section {title}"
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def check_rows(cls, rows):
    fields = {f.name: f for f in dataclasses.fields(cls)}
    told = {key: default for key, _, default in rows if key not in SELECTORS}
    where = f"the rows of {cls.__name__} in docs/config.md"
    assert set(told) == set(fields), f"{where}, found by WHERE of {FILE}"
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        )
        assert (told[name] == "required") == required, name
        if isinstance(field.default, int | float):
            assert told[name] == str(field.default).lower(), name
        if isinstance(field.default, str):
            assert told[name] == f'`"{field.default}"`', name


@pytest.mark.parametrize("cls", WHERE, ids=lambda cls: cls.__name__)
def test_every_key_is_on_the_page_with_its_default(cls):
    rows = [row[1:] for row in ROW.findall(PAGE) if row[0] in WHERE[cls]]
    check_rows(cls, rows)


def is_listed(name, table, key):
    """Whether the type of a key on the page lists this choice."""
    (types,) = [row[2] for row in ROW.findall(PAGE) if row[:2] == (table, key)]
    return f'`"{name}"`' in types


@pytest.mark.parametrize("name", SCHEMES)
def test_every_sampling_scheme_is_on_the_page(name):
    assert SCHEMES[name] in WHERE, f"add {name} to WHERE of {FILE}"
    remedy = f'docs/config.md: add "{name}" to the row `type` of the table `sampling`'
    assert is_listed(name, "`sampling`", "type"), remedy


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task_is_on_the_page(name):
    remedy = f'docs/config.md: add "{name}" to the row `task` of the top level'
    assert is_listed(name, "top level", "task"), remedy
    task = tasks.TASKS[name]
    solvers = public_classes(dpb.AbstractSolver).values()
    kinds = {kind.problem_type for kind in solvers if kind.in_config}
    for kind in kinds:
        of_all = "games" if task.is_game else "tasks of two levels"
        said = f'"{name}"' in PLACES[kind] or (
            of_all in PLACES[kind] and (task.is_game or task.two_levels)
        )
        fits = issubclass(task.problem_type, kind)
        assert said == fits, (
            f'docs/tables.py: name `task = "{name}"` in PLACES[{kind.__name__}] if '
            "its solvers are for the task; then run python -m docs.tables"
        )


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_key_of_a_task_is_on_the_page_with_its_default(name):
    rows = ROW.findall(section(f'[model], for task = "{name}"'))
    check_rows(tasks.TASKS[name].model, [row[1:] for row in rows])


@pytest.mark.parametrize("task", tasks.TASKS.values(), ids=lambda task: task.name)
def test_a_task_says_what_its_problems_are(task):
    kind = task.problem_type
    assert task.two_levels == issubclass(kind, BilevelProblem)
    assert task.is_game == issubclass(kind, AbstractVariationalInequality)


def test_every_table_is_on_the_page():
    tables = tomllib.loads(GENERATED) | {"no": {}}
    with pytest.raises(ValueError, match="Allowed keys: ") as error:
        parse_config(tables, Location("a.toml"))
    names = str(error.value).split("Allowed keys: ")[1].rstrip(".").split(", ")
    assert names
    for name in names:
        assert f"`{name}`" in PAGE, name
