"""Plans that take few dry runs."""

import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.planning import auto_plan


@pytest.fixture
def one_candidate(monkeypatch):
    """Let `auto` compare one setting on one population by one dry run."""
    one = planning.Candidate("one", (dpb.NoisyGD(3, 1.0, 4.0),), 1)
    monkeypatch.setattr(auto_plan, "candidates", lambda *_, **__: (one,))
    every = auto_plan.populations
    monkeypatch.setattr(auto_plan, "populations", lambda *a: every(*a)[:1])
    monkeypatch.setattr(auto_plan, "rounds_of", lambda *_, **__: (1, 1))
