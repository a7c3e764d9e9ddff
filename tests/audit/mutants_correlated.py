"""Broken copies of correlated noise."""

import functools

import dp_accounting

from dpbilevel.onelevel import CorrelatedGD
from dpbilevel.privacy.correlated import Correlated, sensitivity
from tests.audit.runs import audited
from tests.cases import Mutant
from tests.onelevel.test_correlated import planned_correlated
from tests.privacy.test_correlated import Reused


class OfOneStep(Correlated):
    """A run is charged for steps with a record, not for what later ones take back."""

    def event(self, fraction=1.0):
        moved = fraction * len(range(0, self.num_steps, self.gap)) ** 0.5
        return dp_accounting.GaussianDpEvent(float(self.multiplier) / moved)


class OfOneParticipation(Correlated):
    """A record is charged as if it were in one batch alone."""

    def event(self, fraction=1.0):
        moved = fraction * sensitivity(self.feedback, self.num_steps, self.num_steps)
        return dp_accounting.GaussianDpEvent(float(self.multiplier) / moved)


@functools.cache
def kind_with(mechanism):
    class Broken(CorrelatedGD):
        @property
        def release_noise(self):
            return mechanism(**vars(super().release_noise))

    return Broken


@functools.cache
def correlated(mechanism=Correlated):
    kind = CorrelatedGD if mechanism is Correlated else kind_with(mechanism)
    return audited(planned_correlated(kind, feedback=(0.6,)), runs=20_000)


MUTANTS = {
    "the noise of a step taken back at once": Mutant(
        "CorrelatedGD", lambda: correlated(Reused), correlated
    ),
    "what later steps take back is not charged": Mutant(
        "CorrelatedGD", lambda: correlated(OfOneStep), correlated
    ),
    "several participations charged as one": Mutant(
        "CorrelatedGD", lambda: correlated(OfOneParticipation), correlated
    ),
}
