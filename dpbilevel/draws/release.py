"""Release of one drawn answer."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from .. import _checks
from ..privacy._lazy import dp_accounting
from ..privacy.abstract_release import AbstractRelease
from ..privacy.accounting import profiles
from ..privacy.budget import People, PrivacyBudget
from ..privacy.per_example.clipping import Basis
from ..privacy.queries import RECORDS
from ..privacy.releases import PERSON
from ..privacy.sampling.base import FullBatch
from .mechanisms import AbstractDrawMechanism
from .samplers.base import SamplerGuarantee


@dataclasses.dataclass(frozen=True)
class Draw(AbstractRelease):
    r"""Release of an answer drawn by a score.

    Args:
        name: What is drawn.
        count: How many times.
        queries: What the score reads, one per role.
        mechanism: The noise, relative to the sum of the queries' sensitivities.
        rate: $k$; two scores less than $1 / k$ apart are nearly as likely.
        guarantee: What is proved of the sampler.
        basis: What the sensitivities rest on.
        inexact: How far, in total variation, each law is from the exact one besides
            the sampler's error.

    Privacy:
        A person with a record in every role moves the score by the sum of the roles'
        sensitivities and is charged the mechanism's event; disjoint people are charged
        their role's share.
    """

    mechanism: AbstractDrawMechanism
    rate: float
    guarantee: SamplerGuarantee
    basis: Basis = Basis.CLIPPED
    inexact: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        _checks.instance("Draw", AbstractDrawMechanism, mechanism=self.mechanism)
        _checks.instance("Draw", SamplerGuarantee, guarantee=self.guarantee)
        _checks.positive("Draw", rate=self.rate)
        _checks.non_negative("Draw", inexact=self.inexact)
        if any(not isinstance(q.sampling, FullBatch) for q in self.queries):
            raise ValueError("Draw: a score reads all records; use FullBatch.")
        if not self.guarantee.proved:
            object.__setattr__(self, "basis", Basis.UNPROVED)  # the class is frozen

    @property
    @override
    def failure(self) -> float:
        """Distance of the drawn law from the one that is charged, or its aim."""
        found = self.guarantee
        distance = found.distance if found.proved else found.aim
        return self.count * (distance + self.inexact)

    @property
    @override
    def computed_error(self) -> float:
        return self.count * self.inexact

    @property
    @override
    def notes(self) -> tuple[str, ...]:
        """Notes of the sampler, and the distance in total variation."""
        if not self.failure or not self.guarantee.proved:
            return self.guarantee.notes
        distance = (
            f"{self.name}: within {self.failure:.3g} of the exact law in total "
            "variation, counted in delta"
        )
        return (*self.guarantee.notes, distance)

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        apart = people is People.DISJOINT
        shares = {PERSON: 1.0}
        if apart or any(query.role == RECORDS for query in self.queries):
            shares = {q.role: q.contribution / self.contribution for q in self.queries}
        # Where nothing is proved nothing is claimed: the noise is as if it were.
        log_ratio = self.guarantee.log_ratio if self.guarantee.proved else 0.0
        for person, share in shares.items():
            event = self.mechanism.event(share, log_ratio)
            yield person, dp_accounting.SelfComposedDpEvent(event, self.count)

    @override
    def check(self, budget: PrivacyBudget) -> None:
        """Refuse samplers whose error alone exceeds the budget, at any noise.

        Raises:
            ValueError: The sampler's distance from its target alone costs as much.
        """
        if not self.guarantee.proved:
            return
        log_ratio, distance = self.guarantee.log_ratio, self.guarantee.distance
        spent = 2 * log_ratio  # the laws on both neighbours may be off
        if spent >= budget.epsilon:
            raise ValueError(
                f"calibrate: log_ratio={log_ratio:.3g} of the sampler alone costs "
                f"{spent:.3g} of epsilon = {budget.epsilon:.3g}; give it a smaller "
                "log_ratio."
            )
        cost = profiles.total_variation_delta(budget.epsilon, distance)
        if distance and cost >= budget.delta:
            small = 0.01 * budget.delta * distance / cost
            raise ValueError(
                f"calibrate: distance={distance:.3g} of the sampler alone costs "
                f"{cost:.3g} of delta = {budget.delta:.3g}; use at most {small:.1g}."
            )

    @override
    def row(self) -> dict[str, Any]:
        return super().row() | {"temperature": 1 / self.rate}

    @override
    def forecast(self, coordinates: int | None) -> dict[str, Any]:
        """Return the least difference of scores that the draw can tell apart."""
        row = {"release": self.name, "temperature": 1 / self.rate}
        return row if coordinates is None else row | {"coordinates": coordinates}
