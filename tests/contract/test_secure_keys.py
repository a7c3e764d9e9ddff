"""Solvers with keys of the cryptographic generator.

`DPBILEVEL_KEYS=chacha20 pytest tests/contract` runs the whole contract with such keys.
"""

import functools

import chex
import jax
import pytest

from dpbilevel.privacy.chacha20 import CHACHA20
from tests.cases import slow
from tests.contract.recorded import CASES, KEY, ledger_of, notes_of
from tests.contract.test_releases import SEEDS, matches, noises_of, sound

SECURE = ["localized"]
SECURE += slow("noisy_gd_adam", "noisy_payoff", "f2sa", "extragradient")


@pytest.fixture(autouse=True)
def secure_keys(monkeypatch):
    key = functools.partial(jax.random.key, impl=CHACHA20)
    monkeypatch.setattr(jax.random, "key", key)


@pytest.mark.parametrize("name", SECURE)
def test_releases_and_noise_are_those_of_the_ledger_with_secure_keys(name):
    made = notes_of(name, KEY)
    assert matches(made, ledger_of(name), CASES[name].adaptive)
    assert {len(note.key) for note in made} == {8}  # 256 bits
    noises = noises_of(notes_of(name, *SEEDS))
    assert sound(noises)
    assert not sound([z / 2 for z in noises])
    again = notes_of(name, KEY)
    chex.assert_trees_all_equal([v.released for v in made], [v.released for v in again])
