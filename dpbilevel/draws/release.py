"""The release of one drawn answer."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from .. import _checks
from ..privacy import accounting
from ..privacy._lazy import dp_accounting
from ..privacy.budget import People, PrivacyBudget
from ..privacy.clipping import Basis
from ..privacy.queries import RECORDS
from ..privacy.releases import PERSON, AbstractRelease
from ..privacy.sampling import FullBatch
from .mechanisms import Exponential, RegularizedExponential
from .samplers.base import Certificate


@dataclasses.dataclass(frozen=True)
class Draw(AbstractRelease):
    r"""One answer drawn by a score.

    Args:
        name: What is drawn.
        count: How many times.
        queries: What the score reads, one per role.
        mechanism: The noise, relative to the sum of the queries' sensitivities.
        rate: $k$; two scores less than $1 / k$ apart are nearly as likely.
        certificate: What is proved of the sampler.
        basis: What the sensitivities rest on.
        inexact: How far, in total variation, each law is from the exact one besides
            the sampler's error.

    Privacy:
        A person with a record in every role moves the score by the sum of the roles'
        sensitivities and is charged the mechanism's event; disjoint people are charged
        their role's share.
    """

    mechanism: Exponential | RegularizedExponential
    rate: float
    certificate: Certificate
    basis: Basis = Basis.CLIPPED
    inexact: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        kinds = (Exponential, RegularizedExponential)
        _checks.instance("Draw", kinds, mechanism=self.mechanism)
        _checks.instance("Draw", Certificate, certificate=self.certificate)
        _checks.positive("Draw", rate=self.rate)
        _checks.non_negative("Draw", inexact=self.inexact)
        if any(not isinstance(q.sampling, FullBatch) for q in self.queries):
            raise ValueError("Draw: a score reads all records; use FullBatch.")
        if not self.certificate.proved:
            object.__setattr__(self, "basis", Basis.UNPROVED)

    @property
    def failure(self) -> float:
        """The distance of the drawn law from the one that is charged, or its aim."""
        made = self.certificate
        distance = made.distance if made.proved else made.aim
        return self.count * (distance + self.inexact)

    @property
    def computed_error(self) -> float:
        """How far computed scores, all together, take the draws from the exact law."""
        return self.count * self.inexact

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the sampler, and the distance in total variation."""
        if not self.failure or not self.certificate.proved:
            return self.certificate.notes
        distance = (
            f"{self.name}: within {self.failure:.3g} of the exact law in total "
            "variation, counted in delta"
        )
        return (*self.certificate.notes, distance)

    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        """The events of all draws, with the kind of person they charge."""
        apart = people is People.DISJOINT
        shares = {PERSON: 1.0}
        if apart or any(query.role == RECORDS for query in self.queries):
            shares = {q.role: q.contribution / self.contribution for q in self.queries}
        certificate = self.certificate
        if not certificate.proved:  # nothing is claimed; the noise is as if it were
            certificate = Certificate(certificate.num_steps, certificate.queries)
        for person, share in shares.items():
            event = self.mechanism.event(share, certificate)
            yield person, dp_accounting.SelfComposedDpEvent(event, self.count)

    def check(self, budget: PrivacyBudget) -> None:
        """Refuses samplers that take the budget for themselves, at any noise.

        Args:
            budget: The guarantee to reach.

        Raises:
            ValueError: The sampler's distance from its target alone costs as much.
        """
        certificate = self.certificate
        if not certificate.proved:
            return
        spent = 2 * certificate.log_ratio
        if spent >= budget.epsilon:
            raise ValueError(
                f"calibrate: log_ratio={certificate.log_ratio:.3g} of the sampler "
                f"alone costs {spent:.3g} of epsilon = {budget.epsilon:.3g}; give it a "
                "smaller log_ratio."
            )
        distance = certificate.distance
        cost = accounting.total_variation_delta(budget.epsilon, distance)
        if distance and cost >= budget.delta:
            small = 0.01 * budget.delta * distance / cost
            raise ValueError(
                f"calibrate: distance={distance:.3g} of the sampler alone costs "
                f"{cost:.3g} of delta = {budget.delta:.3g}; use at most {small:.1g}."
            )

    def row(self) -> dict[str, Any]:
        """The draw in the report, with its temperature."""
        return super().row() | {"temperature": 1 / self.rate}

    def forecast(self, coordinates: int | None) -> dict[str, Any]:
        """How far apart two scores are that the draw can tell from each other."""
        row = {"release": self.name, "temperature": 1 / self.rate}
        return row if coordinates is None else row | {"coordinates": coordinates}
