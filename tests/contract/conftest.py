"""Solvers that need float64 are run in it."""

import jax
import pytest

from tests.contract.recorded import CASES


@pytest.fixture(autouse=True)
def double(request):
    call = getattr(request.node, "callspec", None)
    case = CASES.get(call.params.get("name")) if call else None
    with jax.enable_x64(case is not None and case.double):
        yield
