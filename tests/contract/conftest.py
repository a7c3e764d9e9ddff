"""Solvers that need float64 are run in it."""

import contextlib

import jax
import pytest

from tests.contract.recorded import CASES


@pytest.fixture(autouse=True)
def double(request):
    call = getattr(request.node, "callspec", None)
    case = CASES.get(call.params.get("name")) if call else None
    wide = jax.enable_x64(True) if case and case.double else contextlib.nullcontext()
    with wide:
        yield
