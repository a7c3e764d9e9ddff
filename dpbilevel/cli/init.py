"""The command `dpbilevel init`: asks for the public facts about a file of records."""

from pathlib import Path
from typing import Any

from .draft import PLACES, TASKS, Draft
from .facts import (
    Content,
    Header,
    Range,
    Values,
    content_of,
    count_rows,
    header_of,
    proposed,
    range_of,
    shown,
    values_of,
)
from .questions import Questions, number, one_of

_WORDS = """\
{file} has {count} columns: {names}.
{read}
What you type becomes public with the config. Type what is known without the records,
never what was computed from them.
"""
_HEADER_ONLY = "Nothing but that header was read."
_ALL_READ = "--public: all values were read, as those of a public file, for proposals."


def draft(file: Path, flags: dict[str, Any]) -> Draft:
    """Asks for the public facts about a file.

    Args:
        file: The file of records.
        flags: The flags of the command, by name; a flag replaces its question.

    Raises:
        ValueError: The file has no header, or an answer is missing or cannot be used.
        OSError: A file cannot be read.

    Privacy:
        Reads the header alone; the number of rows where the answer is `count`, and all
        values where `--public` says that they are public.
    """
    header, asked = header_of(file), Questions(flags)
    public = bool(flags.get("public"))
    hints = proposed(header) if public else {}
    names = ", ".join(header.names)
    read = _ALL_READ if public else _HEADER_ONLY
    print(_WORDS.format(file=file, count=len(header.names), names=names, read=read))
    tasks = "".join(f"\n  {name}: {words}" for name, words in TASKS.items())
    task = asked.ask("task", f"tasks:{tasks}\ntask", one_of(*TASKS), "training")
    label = asked.ask("label", "column of the label", _column(header, ()))
    classes = _classes(asked, label, hints, task)
    taken, places, shares = [label], None, ()
    if task in PLACES:
        places = _places(asked, header, taken, hints, PLACES[task])
        taken.append(places[0])
        if PLACES[task] == "groups":
            shares = _shares(asked, len(places[1]))
    columns = _columns(asked, header, taken, hints)
    neighbours = asked.ask(
        "neighbours",
        "is the number of records public (replace_one) or not (add_or_remove_one)",
        one_of("replace_one", "add_or_remove_one"),
        "replace_one",
    )
    sizes = _sizes(asked, header, task, neighbours)
    epsilon = asked.ask("epsilon", "epsilon of the budget", number(0), "1")
    delta = asked.ask(
        "delta",
        "delta of the budget",
        _below_one_over(sizes["training"]),
        _delta(sizes["training"]),
    )
    test = _test(asked, label, columns, header)
    return Draft(
        header=header,
        task=task,
        label=label,
        classes=classes,
        columns=columns,
        places=places,
        shares=shares,
        epsilon=epsilon,
        delta=delta,
        neighbours=neighbours,
        test=test,
        from_file=public,
        **sizes,
    )


def _column(header: Header, taken: list[str] | tuple[()]):
    def read(text: str) -> str:
        if text not in header.names or text in taken:
            left = [name for name in header.names if name not in taken]
            why = "has a role already" if text in taken else "is no column"
            raise ValueError(f"{text!r} {why}; give one of {', '.join(left)}")
        return text

    return read


def _classes(asked: Questions, label: str, hints: dict[str, Content], task: str):
    """The values of both classes, or the range of a numeric label."""
    hint, classes = hints.get(label), task in ("group_fair", "group_robust")
    if asked.has("label-range") and not classes:
        return asked.ask("label-range", "", range_of)
    two = hint if isinstance(hint, tuple) and len(hint) == 2 else None
    question = f"{label}: values of the positive class, separated by commas"
    if not classes:
        question += ", or LOW..HIGH if the label is a number"
    default = str(hint) if isinstance(hint, Range) else shown(two[1:]) if two else None

    def read(text: str) -> Content:
        return range_of(text) if ".." in text and not classes else values_of(text)

    positive = asked.ask("positive", question, read, default)
    if isinstance(positive, Range):
        return positive
    rest = tuple(v for v in two or () if v not in positive)
    question = f"{label}: values of the negative class"
    negative = asked.ask(
        "negative", question, _others(positive), shown(rest) if rest else None
    )
    return positive, negative


def _others(positive: Values):
    def read(text: str) -> Values:
        found = values_of(text)
        if {*found} & {*positive}:
            raise ValueError("no value can be in both classes")
        return found

    return read


def _places(asked: Questions, header: Header, taken, hints, kind: str):
    """The column of sources or groups, and its values."""
    what = kind[:-1]

    def both(text: str) -> tuple[str, Values]:
        column, separator, values = text.partition("=")
        if not separator:
            raise ValueError("give COLUMN=VALUE,VALUE,...")
        return _column(header, taken)(column.strip()), several(values)

    def several(text: str) -> Values:
        found = values_of(text)
        if kind == "sources" and len(found) < 2:
            raise ValueError("give two sources at least: one leaves no choice")
        return found

    if asked.has(kind):
        return asked.ask(kind, "", both)
    column = asked.ask(
        kind, f"column of the {what} of a record", _column(header, taken)
    )
    hint = hints.get(column)
    default = shown(hint) if isinstance(hint, tuple) else None
    question = f"{column}: names of the {kind}, separated by commas"
    return column, asked.ask(kind, question, several, default)


def _shares(asked: Questions, count: int) -> tuple[float, ...]:
    def read(text: str) -> tuple[float, ...]:
        shares = tuple(map(number(0, 1 + 1e-9), text.split(",")))
        if len(shares) != count or sum(shares) > 1 + 1e-6:
            raise ValueError(f"give {count} shares, separated by commas, of sum 1")
        return shares

    equal = ", ".join([f"{1 / count:.4g}"] * count)
    question = "shares of the groups, from public knowledge"
    return asked.ask("shares", question, read, equal)


def _columns(asked: Questions, header: Header, taken, hints) -> dict[str, Content]:
    """What is in the columns of features; where `--column` is given, in those alone."""
    found: dict[str, Content] = {}
    left = [name for name in header.names if name not in taken]
    given = asked.given.get("column") or []
    for text in given:
        column, separator, content = text.partition("=")
        try:
            name = _column(header, [*taken, *found])(column.strip())
            found[name] = content_of(content if separator else "")
        except ValueError as error:
            raise ValueError(f"--column {text}: {error}.") from error
    if given:
        return found
    print(
        "features: for each column give LOW..HIGH for a number, the values of a\n"
        "category, separated by commas, or - to leave it out"
    )
    for name in left:
        default = shown(hints[name]) if name in hints else "-"
        content = asked.ask("column", f"  {name}", _content_or_none, default)
        if content is not None:
            found[name] = content
    if not found:
        raise ValueError(
            "no column was given as a feature, and a model needs one; give --column "
            "NAME=LOW..HIGH or --column NAME=VALUE,VALUE."
        )
    return found


def _content_or_none(text: str) -> Content | None:
    return None if text == "-" else content_of(text)


def _sizes(asked: Questions, header: Header, task: str, neighbours: str):
    """Numbers of records, the file of validation records, and the people."""
    counted = neighbours == "replace_one"
    two_levels = task in ("source_weighting", "penalty_tuning")
    rows = asked.ask(
        "records",
        "number of records"
        + (", or count to count the rows" if counted else ", about"),
        _rows(header, counted, least=1 + two_levels),
    )
    if not two_levels:
        return {"training": rows, "validation": 0, "clean": None, "people": ""}
    clean = None
    if task == "source_weighting":
        question = "file of clean records to judge the sources by (- for a random part)"
        clean = asked.ask("clean", question, _file_beside(header.file))
    if clean is None:
        held_out = number(0, rows, int)
        question = "how many of them are for validation"
        validation = asked.ask("validation", question, held_out, str(-(-rows // 5)))
        rows -= validation
    else:
        of_clean = _rows(header_of(clean), counted)
        question = f"number of records in {clean}"
        validation = asked.ask("validation", question, of_clean)
    people = asked.ask(
        "people",
        "may one person have a record in each part (overlapping) or not (disjoint)",
        one_of("disjoint", "overlapping"),
    )
    return {
        "training": rows,
        "validation": validation,
        "clean": clean,
        "people": people,
    }


def _rows(header: Header, counted: bool, least: int = 1):
    def read(text: str) -> int:
        if text == "count" and counted:
            return count_rows(header)
        return number(least - 1, kind=int)(text)

    return read


def _file_beside(training: Path):
    """Return the reader of a further file, which is not the training file."""

    def read(text: str) -> Path | None:
        if text == "-":
            return None
        if not Path(text).is_file():
            raise ValueError(f"there is no file {text}")
        if Path(text).samefile(training):
            raise ValueError(
                f"{text} holds the training records; give a file of others, or -"
            )
        return Path(text)

    return read


def _below_one_over(records: int):
    """Reads a delta that does not allow for the publication of a record."""

    def read(text: str) -> float:
        value = number(0, 1)(text)
        if value * records >= 1:
            raise ValueError(
                f"give less than one over the number of records, {1 / records:.2g}: "
                "with more, publishing one record at random would meet the guarantee"
            )
        return value

    return read


def _delta(records: int) -> str:
    """The largest power of ten that is at most a tenth over the number of records."""
    return f"1e-{len(str(10 * records - 1)):02d}"


def _test(asked: Questions, label: str, columns: dict[str, Content], header: Header):
    question = "file of other people to test the model on (- for none)"
    file = asked.ask("test", question, _file_beside(header.file), "-")
    if file is None:
        return None
    other = header_of(file)
    missing = [name for name in (label, *columns) if name not in other.names]
    if missing or other.separator != header.separator:
        raise ValueError(
            f"{file} has no column {missing[0]!r}."
            if missing
            else f"{file} has another separator than {header.file}."
        )
    kind = asked.ask(
        "test-accuracy",
        "what protects these people: nothing has to, they are public (public); noise,\n"
        "within the same budget, if they are in no other file (counted); nothing "
        "(non_private)\n  public, counted or non_private",
        one_of("public", "counted", "non_private"),
    )
    if kind != "counted":
        return file, kind, 0
    question = f"number of records in {file}, or count"
    return file, kind, asked.ask("test-records", question, _rows(other, True))
