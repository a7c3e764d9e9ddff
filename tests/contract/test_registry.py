"""Public solvers are found, not listed: one without its cases fails here."""

import re

import pytest

import dpbilevel as dpb
from docs import tables
from dpbilevel.cli.config import public_classes
from tests.audit.table import labels
from tests.cases import found

PAGES = [(page, table) for page, made in tables.PAGES.items() for table in made]
pages = pytest.mark.parametrize(("page", "table"), PAGES)


def module_of(kind):
    _, package, *_, module = kind.__module__.split(".")
    return f"tests/{package}/test_{module}.py"


def without_a_case():
    """The public solvers that the test module of no algorithm has a case of."""
    return [
        f"{name} needs an entry in {cases} of a test module, {module_of(kind)}"
        for name, kind in public_classes(dpb.AbstractSolver).items()
        for cases in ("CONTRACT", "AUDITS")
        if kind not in {type(case.solver) for case in found(cases).values()}
    ]


def is_on_the_page(page, table):
    return table() in (tables.ROOT / page).read_text()


def test_every_public_solver_has_its_cases():
    missing = without_a_case()
    assert not missing, "\n".join(missing)


def test_the_page_on_choices_names_every_public_solver():
    text = (tables.ROOT / "docs/choosing.md").read_text()
    solvers = public_classes(dpb.AbstractSolver)
    missing = [name for name in solvers if not re.search(rf"`(\w+\.)*{name}\b", text)]
    assert not missing, f"docs/choosing.md does not say when to use {missing}"


@pages
def test_a_page_has_the_table_that_follows_from_the_public_solvers(page, table):
    assert is_on_the_page(page, table), "run python -m docs.tables"


def test_the_results_of_audits_have_a_row_of_every_audit():
    page = (tables.ROOT / "benchmarks/results/audits.md").read_text()
    table = page.split("| mechanism |")[1]
    rows = re.findall(r"^\| (.+?) \| \d", table, re.MULTILINE)
    wanted = list(labels())
    missing = [f"{name!r} at {wanted.index(name)}" for name in set(wanted) - {*rows}]
    where = "benchmarks/results/audits.md, rows from 0: "
    assert not missing, f"{where}add {missing}, from python -m tests.audit.table NAME"
    others = [name for name in rows if name not in wanted]
    assert not others, f"{where}remove {others}"
    assert rows == wanted, f"{where}put them in the order of tests.audit.table.labels()"


def hollow(page):
    """The rows of audits that some broken copy passes."""
    rows = re.findall(r"^\| (.+?) \| .* (\d+) of (\d+) \|$", page, re.MULTILINE)
    return [name for name, rejected, copies in rows if rejected != copies]


def test_audits_reject_every_broken_copy():
    page = (tables.ROOT / "benchmarks/results/audits.md").read_text()
    # An audit that sees too little of what is released.
    remedy = "show more in adversary_view, or give the audit exact=False"
    assert hollow(page) == [], remedy
    assert hollow(page.replace("| 1 of 1 |", "| 0 of 1 |", 1)) != []  # the control


@pages
@pytest.mark.parametrize("kind", [dpb.NoisyGD, dpb.PenaltyBilevel])
def test_a_new_solver_without_cases_is_seen(kind, page, table, monkeypatch):
    class Planted(kind):
        __doc__ = kind.__doc__

    monkeypatch.setattr(dpb.onelevel, "Planted", Planted, raising=False)
    monkeypatch.setattr(dpb.onelevel, "__all__", [*dpb.onelevel.__all__, "Planted"])
    found_missing = [text for text in without_a_case() if "Planted" in text]
    assert len(found_missing) == 2
    assert not is_on_the_page(page, table)
