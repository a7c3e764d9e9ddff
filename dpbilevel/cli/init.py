"""The command `dpbilevel init`: a commented config, from flags and a header."""

import argparse
import csv
import dataclasses
import datetime
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .._checks import did_you_mean
from . import environment, plans
from .columns import Value
from .data import ids_of, is_id
from .tables import SEPARATORS, existing, is_parquet, opened, read_names, read_table
from .task import Task
from .tasks import TASKS

MOST_ROWS = 8  # rows of a person that count, unless a flag gives another number
OFFERED = {name: task.summary for name, task in TASKS.items() if task.template}
_NUMBER = r"[-+]?(?:\d+[.,]?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*([^\s\d.,].*?)?\s*")
_DAY = r"(\d{4}-\d\d-\d\d)"
_DATES = re.compile(rf"\s*{_DAY}\s*\.\.\s*{_DAY}\s*(.*?)\s*")
_FORMAT = "and then the format of the file, as in 2000-01-31..2000-12-31 %d.%m.%Y"
_LOSSES = '"logistic" for two classes, "softmax" for more, "squared" for a number'


@dataclasses.dataclass(frozen=True)
class Range:
    """Plausible values of a number; values beyond are cut to the ends."""

    low: float
    high: float
    unit: str = ""  # text before or after a number; of dates their format
    origin: str = ""  # day 0 of dates, whose ends are days
    decimal: str = ""  # decimal sign, if it is no point

    def __post_init__(self):
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            ends = f"{self.low:g}..{self.high:g}"
            raise ValueError(f"the range {ends} must be increasing and finite.")


Values = tuple[Value, ...]


class Header(NamedTuple):
    """Path, separator and column names of a file; the names are public."""

    file: Path
    separator: str
    names: tuple[str, ...]


def draft(flags: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the text of a config, and a list of the flags that are still missing.

    Privacy:
        Reads the header alone, and the number of rows if a flag is `count`.
    """
    task, header = TASKS[flags.task], header_of(flags.data)
    given = getattr(flags, task.places) if task.places else None
    _check_used(flags, task)
    place, places = _pair(given, f"--{task.places}") if given else ("", ())
    pairs = [_pair(text, "--column") for text in flags.column or ()]
    used = [name for name in (flags.person, flags.label, place) if name]
    columns = {name: content_of(text) for name, text in pairs}
    for flag in ("clean", "test"):
        if getattr(flags, flag) not in (None, "-"):
            existing(Path(getattr(flags, flag)), f"--{flag}", "give its path")
    _check_names([*used, *(name for name, _ in pairs)], header)
    classes = _classes(flags)
    training, validation = _sizes(flags, header)
    values = values_of(places) if places else ()
    if task.places == "sources" and len(values) == 1:
        raise ValueError(f"--sources {given} is one source; give two or more.")
    facts = {
        "flags": flags,
        "task": task,
        "header": header,
        "columns": columns,
        "unused": [n for n in header.names if n not in [*used, *columns]],
        "classes": classes,
        "place": place,
        "places": values,
        "training": training,
        "validation": validation,
        "test_records": _rows(flags, "test_records", flags.test),
        "is_tested": flags.test not in (None, "-"),
        "person": next(filter(is_id, header.names), "patient_id"),
    }
    missing = _missing(facts)
    text = _rendered(facts | {"missing": missing})
    if not missing:
        config, _ = plans.read_for_run(str(flags.out), text)
        config.check_delta()
    return text, missing


def _check_used(flags: argparse.Namespace, task: Task) -> None:
    """Raise `ValueError` if a flag says what no config of this task and unit holds."""
    for has, what, *names in (
        (flags.person, "--person", "most-rows"),
        (task.places == "sources", "--task source_weighting", "sources", "clean"),
        (task.places == "groups", "a --task of groups", "groups", "shares"),
        (task.two_levels, "a --task of two levels", "validation", "people"),
    ):
        for name in names:
            if not has and getattr(flags, name.replace("-", "_")) is not None:
                raise ValueError(f"--{name} needs {what}; give that, or leave it out.")


def _missing(facts: dict[str, Any]) -> list[str]:
    """Return a list of the flags of required facts that are missing."""
    flags, task = facts["flags"], facts["task"]
    found = {
        "label": flags.label,
        "label-range, or --positive and --negative, or --classes": facts["classes"],
        "column": facts["columns"],
        "records": facts["training"] is not None,
        "validation": facts["validation"] is not None or not task.two_levels,
        "people": flags.people or not task.two_levels,
        "clean": flags.clean or task.places != "sources",
        task.places: facts["place"] or not task.places,
        "test-accuracy": flags.test_accuracy or not facts["is_tested"],
        "test-records": flags.test_records or flags.test_accuracy != "counted",
    }
    return [f"--{flag}" for flag, there in found.items() if not there]


def _rendered(facts: dict[str, Any]) -> str:
    flags, task = facts["flags"], facts["task"]
    templates = environment()
    templates.filters |= {
        "toml": lambda value: json.dumps(value, ensure_ascii=False),
        "path": lambda file: Path(os.path.relpath(file, flags.out.parent)).as_posix(),
    }
    count = len(facts["places"]) or 2
    is_number, classes = isinstance(facts["classes"], Range), facts["classes"]
    several = 0 if is_number or len(classes or ()) < 3 else len(classes)
    loss = "softmax" if several else "squared" if is_number else "logistic"
    loss = f'loss = "{loss}"  # {_LOSSES}'
    if several:
        loss += f"\nnum_classes = {several}  # number of classes"
    facts |= {
        "most_rows": MOST_ROWS if flags.most_rows is None else flags.most_rows,
        "offered": OFFERED,
        "whom": "people" if flags.person else "records",
        "delta": flags.delta or _delta(facts["training"], facts["validation"]),
        "is_number": is_number,
        "loss": loss,
        "shares": flags.shares or [float(f"{1 / count:.4g}")] * count,
        "unplanned": () if task.is_game else plans.UNPLANNED,
    }
    model = templates.from_string(task.template).render(facts)
    return templates.get_template("config.toml").render(facts, model=model)


def header_of(file: Path) -> Header:
    """Return the `Header` of a file, read from its first line; refuse one of numbers.

    A row with numbers or with a name twice is no header.
    """
    existing(file, "records", "give the path of a CSV file")
    if file.suffix == ".toml":
        raise ValueError(f"{file} is a config; give the CSV file of the records.")
    first = ""
    if not is_parquet(file):
        with opened(file) as lines:
            first = lines.readline()
    separator = max(SEPARATORS, key=first.count)  # commas if there is none
    names = tuple(read_names(file, separator))
    if any(isinstance(_value(name), int | float) or not name for name in names):
        raise ValueError(f"a name in the first row of {file} is a number or empty.")
    return Header(file, separator, names)


def remarks(flags: argparse.Namespace) -> Iterator[str]:
    """Yield lines of text on what a draft assumes because no flag says it."""
    if flags.person and flags.most_rows is None:
        yield f"most_rows = {MOST_ROWS}: correct it if people have more rows"
    for text in flags.column or ():
        name, content = _pair(text, "--column")
        dates = _DATES.fullmatch(content)
        if dates and not dates[3]:
            yield (
                f"cells of {name!r} are read as 2000-01-31; if they look different, "
                f"give the range {_FORMAT}"
            )
    found = next(filter(is_id, header_of(flags.data).names), None)
    if found and not flags.person:
        yield f"{found!r} may be the id of a person. If people have several rows, give"
        flag = f"--person {shlex.quote(found)}"
        yield f"{flag}; otherwise each row is protected as a person"


def content_of(text: str) -> Range | Values:
    """Return the `Range` or the values that the text after `NAME=` describes."""
    found = _DATES.fullmatch(text)
    if found is not None:
        first, last = (datetime.date.fromisoformat(found[i]) for i in (1, 2))
        return Range(0, (last - first).days, found[3], found[1])
    found = _RANGE.fullmatch(text)
    if found is not None:
        low, high = (float(found[i].replace(",", ".")) for i in (1, 2))
        comma = "," in f"{found[1]}{found[2]}"
        return Range(low, high, found[3] or "", decimal="," if comma else "")
    if "," not in text:
        raise ValueError(
            f"cannot read {text!r}; give LOW..HIGH of numbers, values separated by "
            f"commas, or a range of dates {_FORMAT}."
        )
    return values_of(text)


def numbers(text: str) -> list[float]:
    """Return the numbers in a text, separated by commas."""
    return [float(part) for part in text.split(",")]


def values_of(text: str) -> Values:
    """Return a tuple of the different values in text, split at commas; quotes work."""
    cells = next(csv.reader([text], skipinitialspace=True), [])
    found = tuple(_value(cell.strip()) for cell in cells if cell.strip())
    if not found or len(set(found)) < len(found):
        raise ValueError(f"cannot use {text!r}; give different values, by commas.")
    return found


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, separator, content = text.partition("=")
    if not separator:
        raise ValueError(f"{flag} {text} has no '='; give NAME=VALUES.")
    return name.strip(), content


def _check_names(names: list[str], header: Header) -> None:
    """Raise `ValueError` unless these are different columns of the file."""
    listed = ", ".join(header.names)
    for i, name in enumerate(names):
        if name not in header.names:
            where = f"{header.file}{did_you_mean(name, header.names)}"
            raise ValueError(f"{name!r} is no column of {where}; give one of {listed}.")
        if name in names[:i]:
            raise ValueError(f"the column {name!r} is named twice; give it one role.")


def _classes(flags: argparse.Namespace) -> Range | tuple[Values, ...] | None:
    """Return the values of each class, or the label's `Range`; `None` if not known.

    Of two classes the positive one comes first.
    """
    is_game = TASKS[flags.task].is_game
    if flags.label_range and is_game:
        raise ValueError(f"--task {flags.task} has classes; leave out --label-range.")
    several = values_of(flags.classes) if flags.classes else ()
    if is_game and len(several) > 2:
        raise ValueError(
            f"--task {flags.task} has two classes; give --positive and --negative, "
            "each with the values of one class or several."
        )
    if len(several) > 1:
        return tuple((value,) for value in several)
    if flags.label_range:
        found = content_of(flags.label_range)
        if not isinstance(found, Range) or found.origin:
            raise ValueError(f"--label-range {flags.label_range} is not LOW..HIGH.")
        return found
    if not (flags.positive and flags.negative):
        return None
    return values_of(flags.positive), values_of(flags.negative)


def _sizes(flags: argparse.Namespace, header: Header) -> tuple[int | None, int | None]:
    """Return the numbers of training and validation records, `None` if not known."""
    rows = _rows(flags, "records", header.file)
    if not TASKS[flags.task].two_levels:
        return rows, None
    from_file = TASKS[flags.task].places == "sources" and flags.clean != "-"
    validation = _rows(flags, "validation", flags.clean if from_file else None)
    if rows is not None and not from_file:
        validation = -(-rows // 5) if validation is None else validation
        rows -= validation
    return rows, validation


def _rows(flags: argparse.Namespace, name: str, file: str | Path | None) -> int | None:
    """Return the number that a flag gives, or counts in `file`; `None` without it."""
    text, flag = getattr(flags, name), "--" + name.replace("_", "-")
    if text is None:
        return None
    if text == "count" and file is not None:
        if flags.neighbours != "replace_one":
            raise ValueError(f"{flag} count publishes the size; give a number.")
        header = header_of(Path(file))
        table = read_table(header.file, header.separator)
        people = {*ids_of(table, flags.person)} - {""} if flags.person else ()
        return len(people) if flags.person else table.rows
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text} is not an integer; give one.") from error


def _delta(*counts: int | None) -> str:
    """Return as text the largest power of ten up to 0.1 over the number of records."""
    records = max(count or 0 for count in counts)
    return f"1e-{len(str(10 * records - 1)):02d}" if records else "1e-06"


def _value(text: str) -> Value:
    """Return a number if the text is the plain form of one, else the text."""
    for kind in (int, float):
        try:
            read = kind(text)
        except ValueError:
            continue
        if abs(read) < math.inf and f"{read}" == text:
            return read
    return text
