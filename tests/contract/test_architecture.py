"""The order of the packages: nothing imports upwards, and nothing in a circle."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "dpbilevel"
# Lowest first. What stands in one entry of the list may not import each other.
BELOW_ALL = ("_version", "_checks", "_extras", "sets")
PACKAGES = ("privacy", "core", "runs", "onelevel", "bilevel", "applications")
PACKAGES += ("games", "oracles", "draws", "search", "planning", "audit", "sklearn")
ORDER = (*BELOW_ALL, *PACKAGES, "_public", "cli", "__main__")


def sources(root=LIBRARY):
    """The module names below `root`, each with its text."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text()
        for path in root.rglob("*.py")
        if path.name != "__init__.py"
    }


@functools.cache
def nodes(text):
    """Those of a text, which several tests ask for."""
    return list(ast.walk(ast.parse(text)))


def imports(name, text, names):
    """The modules of the library that a module imports, wherever in its text."""
    for node in nodes(text):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = name.split(".")[: -node.level]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                yield whole if whole in names else ".".join(base) or alias.name


def upwards(modules):
    """The imports that go up, or that the order does not know."""
    found = []
    for name, text in modules.items():
        here = name.split(".")[0]
        for other in imports(name, text, modules):
            there = other.split(".")[0]
            if there == "__version__":
                continue
            if ORDER.index(there) > ORDER.index(here):
                found.append((name, other))
    return found


def test_no_import_goes_upwards():
    assert upwards(sources()) == []


def test_an_import_upwards_is_seen():
    planted = "def late():\n    from ..bilevel.penalty import PenaltyBilevel\n"
    assert upwards(sources() | {"privacy.planted": planted}) == [
        ("privacy.planted", "bilevel.penalty")
    ]


def graph(modules):
    return {name: set(imports(name, text, modules)) for name, text in modules.items()}


def test_no_modules_import_each_other_in_a_circle():
    graphlib.TopologicalSorter(graph(sources())).prepare()


def test_a_circle_is_seen():
    modules = sources()
    modules["privacy.budget"] += "\nfrom .ledger import Ledger\n"
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph(modules)).prepare()


def test_the_top_of_the_library_is_small():
    modules = {name for name in sources() if "." not in name}
    packages = {path.parent.name for path in LIBRARY.glob("*/__init__.py")}
    assert packages == {*PACKAGES, "cli"}
    assert len(packages) <= 14
    assert len(modules) <= 6


OPENS = {
    "privacy/per_example/clipping.py",
    "privacy/mechanisms.py",
    "draws/mechanisms.py",
}
OPENS |= {"audit/recording.py"}
UNSEALS = {"draws/mean_loss.py", "draws/hyper.py"}
UNSEALS |= {"games/proximal_point.py", "search/losses.py"}


def places_of(pattern):
    return {
        file.relative_to(LIBRARY).as_posix()
        for file in LIBRARY.rglob("*.py")
        if re.search(pattern, file.read_text())
    }


def difference(found, listed, name):
    """What to do about places of code that are not those of a list."""
    added = [f"add {place!r} to {name}" for place in sorted(found - listed)]
    return added + [f"remove {place!r} from {name}" for place in listed - found]


def test_sealed_values_are_opened_in_a_few_listed_places():
    opened = difference(places_of(r"\.raw\b"), OPENS, "OPENS")
    places = places_of(r"\bunsealed\(") - {"privacy/per_example/clipping.py"}
    unsealed = difference(places, UNSEALS, "UNSEALS")
    wrong = "; ".join(opened + unsealed)
    assert not wrong, f"{wrong} of {__file__}; name them in docs/architecture.md too"


def test_the_page_of_the_architecture_names_these_places():
    page = (LIBRARY.parent / "docs/architecture.md").read_text()
    rows = page.split("\n## Where records are read\n")[1].split("\n## ")[0]
    missing = [place for place in OPENS | UNSEALS if f"`{place}`" not in rows]
    assert not missing, f"docs/architecture.md, Where records are read: name {missing}"
