"""Public solvers are found, not listed: one without its cases fails here."""

import re

import pytest

import dpbilevel as dpb
from docs import tables
from dpbilevel.cli.config import public_classes
from tests.audit import audit_zoo
from tests.audit.table import labels
from tests.cli.test_config_page import WHERE
from tests.contract import solver_zoo
from tests.contract.test_contract import DISTINCT

IN_CONTRACT = {type(solver) for _, solver, *_ in solver_zoo.SOLVERS.values()}
AUDITED = {type(case.solver) for case in audit_zoo.SOLVERS.values()}


def without_a_case():
    """The public solvers that some place does not know, with the place."""
    found = []
    for name, kind in public_classes(dpb.AbstractSolver).items():
        places = {
            "tests/contract/solver_zoo.py": kind in IN_CONTRACT,
            "tests/audit/audit_zoo.py": kind in AUDITED,
            "docs/tables.py": name in tables.ALGORITHMS,
            "docs/config.md": not kind.in_config or kind in WHERE,
        }
        found += [(name, place) for place, known in places.items() if not known]
    return found


def test_every_public_solver_is_in_every_list():
    assert without_a_case() == []


@pytest.mark.parametrize("page", tables.PAGES)
def test_a_page_has_the_table_that_follows_from_the_public_solvers(page):
    assert tables.PAGES[page]() in (tables.ROOT / page).read_text()


def test_the_audit_page_has_a_row_of_every_audit():
    table = (tables.ROOT / "docs/audit.md").read_text().split("| mechanism |")[1]
    rows = re.findall(r"^\| (.+?) \| \d", table, re.MULTILINE)
    assert rows == list(labels())


def test_the_short_suite_has_one_solver_of_each_class():
    assert {type(solver_zoo.SOLVERS[name][1]) for name in DISTINCT} == IN_CONTRACT


@pytest.mark.parametrize("kind", [dpb.NoisyGD, dpb.PenaltyBilevel])
def test_a_new_solver_without_cases_is_seen(kind, monkeypatch):
    class Planted(kind):
        pass

    monkeypatch.setattr(dpb.onelevel, "Planted", Planted, raising=False)
    monkeypatch.setattr(dpb.onelevel, "__all__", [*dpb.onelevel.__all__, "Planted"])
    assert {name for name, _ in without_a_case()} == {"Planted"}
    assert len(without_a_case()) == 4
    with pytest.raises(ValueError, match="Planted"):
        tables.algorithms()
