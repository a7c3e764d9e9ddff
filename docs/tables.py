"""The tables of the pages that list every public solver: python -m docs.tables.

They follow from the classes and their docstrings; the command writes them into the
pages, and a test fails where a page says something else.
"""

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import dpbilevel as dpb
from dpbilevel._checks import (
    Count,
    Fraction,
    NonNegative,
    PoissonRate,
    Positive,
    ProperFraction,
    SignedShare,
)
from dpbilevel.applications.penalties import PenaltyTuning
from dpbilevel.applications.sources import SourceWeighting
from dpbilevel.bilevel.pipeline import AbstractStages
from dpbilevel.bilevel.problem import BilevelProblem
from dpbilevel.cli.config import public_classes
from dpbilevel.core.descent import StepSize
from dpbilevel.core.outputs import AbstractOutput
from dpbilevel.core.solver import MECHANISM_FIELDS
from dpbilevel.games.groups import GroupGame
from dpbilevel.games.problem import AbstractVariationalInequality
from dpbilevel.onelevel.problem import AbstractFiniteSum
from dpbilevel.privacy.per_example.clipping import Basis
from dpbilevel.privacy.sampling.base import AbstractSampling
from tests.cases import found

ROOT = Path(__file__).parents[1]

# Place in which a config names the solvers of these problems.
PLACES = {
    BilevelProblem: "`[solver]`, for tasks of two levels",
    PenaltyTuning: '`[solver]`, for `task = "penalty_tuning"`',
    SourceWeighting: '`[solver]`, for `task = "source_weighting"`',
    AbstractVariationalInequality: "`[solver]`, for games",
    GroupGame: '`[solver]`, for `task = "group_fair"` and `"group_robust"`',
    AbstractFiniteSum: (
        '`[solver]`, for `task = "training"`; `[solver.inner]` and `[refit]`'
    ),
}
# Fields that the library fills in, or that a text file cannot hold.
NOT_KEYS = ("run_noise", "sizes", "dtype", "scoring", *MECHANISM_FIELDS)
KINDS = {
    Count: "integer >= 1",
    Positive: "number > 0",
    NonNegative: "number >= 0",
    Fraction: "number in (0, 1)",
    PoissonRate: "number in (0, 1)",
    ProperFraction: "number in [0, 1)",
    int: "integer",
    SignedShare: "number in [-1, 1]",
    StepSize: "number > 0",
    AbstractSampling: "table",
    AbstractOutput: "text or table",
}


def solvers() -> dict[str, type]:
    """Return the public solvers by name, package by package."""
    kinds = public_classes(dpb.AbstractSolver)
    return dict(sorted(kinds.items(), key=lambda pair: (pair[1].__module__, pair[0])))


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _section(kind: type, title: str) -> str:
    """Return a section of a class docstring, without its indentation."""
    doc = inspect.getdoc(kind) or ""
    section = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    return inspect.cleandoc(section[1]) if section else ""


def _plain(text: str) -> str:
    """Text for a cell of a table, in which no bar may stand for itself."""
    return " ".join(text.split()).replace(r"\|", r"\Vert ").replace("|", r"\|")


def _source(kind: type) -> str:
    """Return the references, without what is different here."""
    text = _plain(_section(kind, "References"))
    return re.split(r"(?i)[.,] (?=(?:here|there|where|with)\b)", text)[0].rstrip(".")


def _rests_on(kind: type) -> str:
    if issubclass(kind, AbstractStages):
        return "its parts"
    runs = (case.solver for case in found("CONTRACT").values())
    bases = {run.basis for run in runs if type(run) is kind}
    words = {Basis.CLIPPED: "clipping", Basis.CONSTANTS: "constants"}
    return " or ".join(words[basis] for basis in Basis if basis in bases)


def algorithms() -> str:
    """Return the table of all methods."""

    def path(name: str, kind: type) -> str:
        package = kind.__module__.split(".")[1]
        return f"`{name}`" if hasattr(dpb, name) else f"`{package}.{name}`"

    rows = (
        (
            path(name, kind),
            _plain((inspect.getdoc(kind) or "").split("\n")[0]).rstrip("."),
            _source(kind),
            _rests_on(kind),
        )
        for name, kind in solvers().items()
    )
    return _table(("class", "method", "source", "guarantee rests on"), *rows)


def config() -> str:
    """Return the config page's table of solvers."""
    rows = (
        (f"`{name}`", PLACES[kind.problem_type] if kind.in_config else "Python only")
        for name, kind in solvers().items()
    )
    return _table(("solver", "where in a config"), *rows)


def _type(kind) -> str:
    if kind in KINDS:
        return KINDS[kind]
    arguments = tuple(v for v in typing.get_args(kind) if v is not type(None))
    if len(arguments) == 1 and arguments[0] in KINDS:  # of a union with None
        return KINDS[arguments[0]]
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if Ellipsis in arguments:
        return "list of numbers"
    listed = typing.get_origin(kind) is tuple
    return f"{len(arguments)} numbers" if listed else "table"


def _default(field: dataclasses.Field) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, AbstractSampling):
        return f"`{type(value).__name__}`"
    if isinstance(value, AbstractOutput):
        return f'`"{type(value).__name__}"`'
    if isinstance(value, str):
        return f'`"{value}"`'
    text = str(list(value) if isinstance(value, tuple) else value)
    # Equinox breaks long representations into lines, which would end a row.
    return " ".join(text.split()).replace("( ", "(").replace(" )", ")")


def _meanings(kind: type) -> dict[str, str]:
    """Return the meaning of each field, without what concerns programs.

    A field that the docstring of the class leaves out is described by a base class.
    """
    entry = re.compile(r"^(\w+): ((?:.*\n?)(?:    .*\n?)*)", re.MULTILINE)
    return {
        name: re.sub(r" Static\.|[,;] or an optax optimizer[^.]*", "", _plain(text))
        for base in reversed(kind.__mro__)
        for title in ("Attributes", "Args")
        for name, text in entry.findall(_section(base, title))
    }


def keys() -> str:
    """Return the config page's table of the keys of every solver.

    Raises:
        ValueError: A docstring does not describe a field.
    """
    rows = []
    for name, kind in solvers().items():
        fields = dataclasses.fields(kind) if kind.in_config else ()
        meanings = _meanings(kind)
        for field in fields:
            if field.name in NOT_KEYS:
                continue
            if field.name not in meanings:
                raise ValueError(f"{name}: its docstring must describe {field.name}.")
            key = f"`{name}`", f"`{field.name}`", _type(field.type), _default(field)
            rows.append((*key, meanings[field.name]))
    return _table(("solver", "key", "type", "default", "meaning"), *rows)


PAGES = {"docs/methods.md": (algorithms,), "docs/config.md": (config, keys)}


def written(page: str, table: str) -> str:
    """Return a page with this table instead of the one with the same heads.

    Args:
        page: The text of the page.
        table: The table.
    """
    heads = re.escape(table.split("\n")[0])
    return re.sub(rf"^{heads}\n(\|.*\n)+", lambda _: table + "\n", page, flags=re.M)


def main() -> None:
    """Write every table into its page."""
    for name, tables in PAGES.items():
        file = ROOT / name
        for table in tables:
            file.write_text(written(file.read_text(), table()))


if __name__ == "__main__":
    main()
