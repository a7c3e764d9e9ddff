"""The config that `dpbilevel init` writes, with comments."""

import dataclasses
import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

from . import auto
from .columns import Value
from .config import parse_config
from .facts import Content, Header, Range, Values
from .tables import Location

TASKS = {
    "training": "one linear model of all records",
    "source_weighting": "some sources may be bad: weigh them by clean records",
    "penalty_tuning": "some features may be noise: tune their penalties",
    "group_fair": "a model for the group that is worst off",
    "group_robust": "a model for other mixtures of groups than that of the records",
}
PLACES = {
    "source_weighting": "sources",
    "group_fair": "groups",
    "group_robust": "groups",
}


_IGNORED = "# Records with other values have no influence, and no message reports them."


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a config is written from.

    Attributes:
        header: Of the file of records.
        task: The name of the task.
        label: The column of the label.
        classes: The values of both classes, or the range of a numeric label.
        columns: The contents of the features, by column.
        places: Column and values of the sources or groups.
        shares: The shares of the groups.
        training: The number of training records.
        validation: That of validation records; 0 for one level.
        clean: The file of validation records.
        people: Who has records in which level.
        epsilon: Of the budget.
        delta: Of the budget.
        neighbours: The relation.
        test: File, protection and number of records of the test.
        from_file: Whether values were read from a public file.
    """

    header: Header
    task: str
    label: str
    classes: tuple[Values, Values] | Range
    columns: dict[str, Content]
    places: tuple[str, Values] | None
    shares: tuple[float, ...]
    training: int
    validation: int
    clean: Path | None
    people: str
    epsilon: float
    delta: float
    neighbours: str
    test: tuple[Path, str, int] | None
    from_file: bool


def written(made: Draft, out: Path) -> str:
    """The text of a config, which every command takes as it is.

    Args:
        made: The facts.
        out: The file that it is for: paths are relative to its folder.

    Raises:
        ValueError: The facts fit no config; the message names the table.
    """
    text = "\n".join(_lines(made, out.parent)) + "\n"
    tables = tomllib.loads(text)
    parse = parse_config if "solver" in tables else auto.parse_unplanned
    parse(tables, Location(str(out)))
    return text


def _lines(made: Draft, folder: Path) -> Iterator[str]:
    said = (
        "read from the file, which was declared public"
        if made.from_file
        else "typed for dpbilevel init, which read no value of a record"
    )
    yield f"# {TASKS[made.task][:1].upper()}{TASKS[made.task][1:]}."
    yield "# Everything in this file is public. Columns, classes, bounds and names were"
    yield f"# {said}."
    yield f'task = "{made.task}"'
    yield from _privacy_lines(made)
    yield from _data_lines(made, folder)
    yield from _label_lines(made)
    yield from _column_lines(made)
    if made.places is not None:
        yield ""
        yield f"[data.{PLACES[made.task]}]"
        yield f"column = {_quoted(made.places[0])}"
        yield f"values = {_list(made.places[1])}"
        yield _IGNORED
    yield ""
    yield from _test_lines(made, folder)
    yield ""
    yield from _model_lines(made)


def _privacy_lines(made: Draft) -> Iterator[str]:
    yield ""
    yield "[privacy]"
    yield f"epsilon = {made.epsilon:g}  # of one run; smaller is more private"
    yield f"delta = {made.delta:g}  # less than one over the number of records"
    if made.people:
        overlap = made.people == "overlapping"
        words = "one record in each part" if overlap else "one record"
        yield f'people = "{made.people}"  # nobody has more than {words}'
    public = made.neighbours == "replace_one"
    words = "the numbers of records are public" if public else "they are private"
    yield f'neighbours = "{made.neighbours}"  # {words}'


def _data_lines(made: Draft, folder: Path) -> Iterator[str]:
    yield ""
    yield "[data]"
    yield 'source = "csv"'
    yield f"path = {_relative(made.header.file, folder)}"
    if made.header.separator != ",":
        yield f"separator = {json.dumps(made.header.separator)}"
    if made.clean is not None:
        yield f"validation_path = {_relative(made.clean, folder)}"
    yield f"training = {made.training}"
    if made.validation:
        yield f"validation = {made.validation}"


def _label_lines(made: Draft) -> Iterator[str]:
    yield ""
    yield "[data.label]"
    yield f"column = {_quoted(made.label)}"
    if isinstance(made.classes, Range):
        yield from _standardized(made.classes, "{:.6g}")
    else:
        yield f"positive = {_list(made.classes[0])}"
        yield f"negative = {_list(made.classes[1])}"
        yield _IGNORED


def _column_lines(made: Draft) -> Iterator[str]:
    for name, content in made.columns.items():
        yield ""
        if isinstance(content, Range):
            yield "[[data.numeric]]"
            yield f"name = {_quoted(name)}"
            yield f"columns = [{_quoted(name)}]"
            yield from _standardized(content, "[{:.6g}]")
            yield "# An empty cell counts as the mean; text leaves out the record."
        else:
            yield "[[data.categorical]]"
            yield f"column = {_quoted(name)}"
            yield f"values = {_list(content)}  # another value is none of them"


def _standardized(content: Range, form: str) -> Iterator[str]:
    """Mean and scale that map the ends to -1 and 1 with the clip of 3."""
    low, high = content.low, content.high
    yield f"# From {low:g} to {high:g}, three scales around the mean; beyond is cut."
    yield f"mean = {form.format((low + high) / 2)}"
    yield f"scale = {form.format((high - low) / 6)}"
    if content.unit:
        yield f'unit = {_quoted(content.unit)}  # and decimal = "," for 1.234,50'


def _test_lines(made: Draft, folder: Path) -> Iterator[str]:
    if made.test is None:
        yield "# What the model is worth on other people, if you want to know:"
        yield "# [data.test]"
        yield '# path = "test.csv"'
        yield '# accuracy = "public"  # or "counted", with noise, or "non_private"'
        return
    file, kind, records = made.test
    yield "[data.test]"
    yield f"path = {_relative(file, folder)}"
    yield f'accuracy = "{kind}"'
    if records:
        yield f"records = {records}"


def _model_lines(made: Draft) -> Iterator[str]:
    yield "[model]"
    if made.task in ("group_fair", "group_robust"):
        yield f"shares = [{', '.join(f'{v:g}' for v in made.shares)}]"
        yield "radius = 5.0           # norm of the largest model"
        if made.task == "group_robust":
            yield "strength = 0.1         # near 0: the worst-off group; large: all"
        yield ""
        yield "[solver]"
        yield 'type = "GroupDescent"  # its settings follow from the sizes'
        return
    numeric = isinstance(made.classes, Range)
    yield f'loss = "{"squared" if numeric else "logistic"}"'
    if made.task == "source_weighting" and made.places is not None:
        yield f"num_sources = {len(made.places[1])}"
        yield "ridge = 1e-4"
    yield ""
    yield from auto.UNPLANNED


def _relative(file: Path, folder: Path) -> str:
    return _quoted(Path(os.path.relpath(file, folder)).as_posix())


def _list(values: Values) -> str:
    return f"[{', '.join(map(_quoted, values))}]"


def _quoted(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)
