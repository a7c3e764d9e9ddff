"""The page of every key of a config says what the reader of configs does."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import dpbilevel as dpb
from dpbilevel.bilevel.problem import BilevelProblem
from dpbilevel.cli import columns, data, tasks
from dpbilevel.cli.config import Privacy, parse_config
from dpbilevel.cli.toml_tables import Location
from dpbilevel.games.problem import AbstractVariationalInequality
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


def section(title):
    assert f"\n## {title}\n" in PAGE, f"docs/config.md needs the section {title}"
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def check_rows(cls, rows):
    fields = {f.name: f for f in dataclasses.fields(cls)}
    told = {key: default for key, _, default in rows if key not in SELECTORS}
    assert set(told) == set(fields)
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
