"""Public solvers are found, not listed: one without its cases fails here."""

import re
from pathlib import Path

import pytest

import dpbilevel as dpb
from dpbilevel.cli.config import public_classes
from tests.audit import audit_zoo
from tests.cli.test_config_page import WHERE
from tests.contract import solver_zoo
from tests.contract.test_contract import DISTINCT

ROOT = Path(__file__).parents[2]
IN_CONTRACT = {type(solver) for _, solver, *_ in solver_zoo.SOLVERS.values()}
AUDITED = {type(case.solver) for case in audit_zoo.SOLVERS.values()}


def in_readme():
    """The classes that the README's table of algorithms names."""
    table = (ROOT / "README.md").read_text().split("\n## Algorithms\n")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(?:\w+\.)?(\w+)`", " ".join(rows)))


def without_a_case():
    """The public solvers that some place does not know, with the place."""
    found = []
    for name, kind in public_classes(dpb.AbstractSolver).items():
        places = {
            "tests/contract/solver_zoo.py": kind in IN_CONTRACT,
            "tests/audit/audit_zoo.py": kind in AUDITED,
            "README.md, Algorithms": name in in_readme(),
            "docs/config.md": not kind.in_config or kind in WHERE,
        }
        found += [(name, place) for place, known in places.items() if not known]
    return found


def test_every_public_solver_is_in_every_list():
    assert without_a_case() == []


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
