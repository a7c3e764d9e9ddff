"""The order of the tests of solvers; solvers that need float64 are run in it."""

import contextlib
import pathlib

import jax
import pytest

from tests.contract.recorded import CASES

HERE = pathlib.Path(__file__).parent


def case_of(item):
    """Return the name of the case that a test of this folder is about, or None."""
    call = getattr(item, "callspec", None)
    name = call.params.get("name") if call and item.path.parent == HERE else None
    return name if name in CASES else None


def pytest_collection_modifyitems(items):
    """Let the tests of one solver follow each other: its programs compile once."""
    places = [place for place, item in enumerate(items) if case_of(item)]
    ordered = sorted((items[place] for place in places), key=case_of)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture(autouse=True)
def double(request):
    case = CASES.get(case_of(request.node))
    wide = jax.enable_x64(True) if case and case.double else contextlib.nullcontext()
    with wide:
        yield
