"""Every deliberately broken mechanism is rejected, and the sound one passes."""

import pytest

from tests.audit.mutants import MUTANTS as OF_STEPS
from tests.audit.mutants import survivors
from tests.audit.mutants_of_all import MUTANTS as OF_ALL
from tests.audit.mutants_onelevel import sound_noisy_gd
from tests.audit.mutants_search import MUTANTS as OF_SEARCHES
from tests.audit.test_audit import AT_ONCE
from tests.cases import Mutant, found

MUTANTS = OF_STEPS | OF_SEARCHES
# Those that JAX's own check of keys would stop before any run.
REUSING = ("key reused across leaves", "one batch accounted as two independent ones")
AUDITED = {type(found("AUDITS")[name].solver).__name__ for name in AT_ONCE}
# Broken copies of each family, one of each way to err: noise, counts, clips, rates,
# people and sensitivities. The slow suite and `make audit` have them all.
SHORT = {
    "noise x 0.707",
    "one of two releases a step counted",
    "draws at a wrong rate",
    "the noise of a step taken back at once",
    "overlapping people accounted as disjoint",
    "half the sensitivity of the hypergradient",
    "half the sensitivity of the resolvent",
    "chain cut short at the exact optimum",
    "half the sensitivity of the utility",
}


def marks(name):
    return [
        *([pytest.mark.reuses_keys] if name in REUSING else []),
        *([] if name in SHORT else [pytest.mark.slow]),
    ]


BROKEN = [pytest.param(name, marks=marks(name)) for name in MUTANTS]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_mechanism_is_rejected(name):
    outcome = MUTANTS[name].broken()
    assert not outcome.passed, str(outcome)


# One of all that break the same sound mechanism; solvers are audited in test_audit.
CONTROLS = {mutant.sound: name for name, mutant in MUTANTS.items()}.values()
OF_SHORT = {MUTANTS[name].sound for name in SHORT if MUTANTS[name].of not in AUDITED}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if MUTANTS[name].sound in OF_SHORT else pytest.mark.slow
        )
        for name in CONTROLS
    ],
)
def test_sound_mechanism_passes(name):
    outcome = MUTANTS[name].sound()
    assert outcome.passed, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ALL)
def test_less_noise_than_claimed_is_rejected_in_every_solver(name):
    broken, sound = OF_ALL[name].broken(), OF_ALL[name].sound()
    assert not broken.passed, str(broken)
    assert sound.passed, str(sound)


def test_a_mutant_that_survives_is_named():
    harmless = Mutant("NoisyGD", sound_noisy_gd, sound_noisy_gd)
    caught = MUTANTS["noise x 0.707"]
    assert survivors({"harmless": harmless, "caught": caught}) == ["harmless"]
