"""Declared private training by other programs, counted in the ledger of a search."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

from typing_extensions import override

from .. import _checks
from .._extras import dp_accounting
from ..privacy.budget import Neighbours, People, PrivacyBudget
from ..privacy.ledger import AbstractRelease, Ledger
from ..privacy.per_example.clipping import Basis
from ..privacy.queries import RECORDS
from ..privacy.rows import ForecastRow, LedgerRow, RoleRow

TRAINING = "training"
_TRAINING_RECORDS = "training records"


@dataclasses.dataclass(frozen=True)
class DeclaredTraining:
    r"""Declaration of a private training by another program: noise, rates, steps.

    Args:
        history: The phases of one training, each `(noise_multiplier, sample_rate,
            num_steps)`, as in `accountant.history` of Opacus: in each of `num_steps`
            steps every record is in the batch with probability `sample_rate`,
            independently of the others, and the sum of the batch's clipped gradients
            gets Gaussian noise of `noise_multiplier` times the clip norm. A rate of 1
            means full batches.
        num_records: The number of training records, public.
        people: `"overlapping"` if a person may have records in both the training and
            the evaluation data, `"disjoint"` if nobody has.

    Raises:
        ValueError: There is no phase, or its numbers are out of range.

    Privacy:
        A declaration cannot be checked here, so the status of the report is at most
        `CONDITIONAL`. It has to hold for every training that the search may run: if
        noise, rate or number of steps depend on the point, declare the least noise, the
        largest rate and the most steps. Every training has to sample its own noise and
        batches, without a fixed seed. Batches of a fixed size or of shuffled records
        are not Poisson batches. A replaced record changes the sum of a batch by at most
        twice the clip norm. No record may make a training raise an error, for example
        by a missing number.
    """

    history: tuple[tuple[float, float, int], ...]
    num_records: int
    people: People = People.OVERLAPPING
    neighbours: ClassVar[Neighbours] = Neighbours.REPLACE_ONE
    precision: ClassVar[str] = "declared"

    def __init__(
        self,
        history: Sequence[tuple[float, float, int]],
        num_records: int,
        people: People | str = People.OVERLAPPING,
    ):
        owner, phases = type(self).__name__, []
        for phase in history:
            try:
                multiplier, rate, steps = phase
            except (TypeError, ValueError):
                what = "(noise_multiplier, sample_rate, num_steps)"
                raise ValueError(f"{owner}: history must hold {what}.") from None
            _checks.positive(owner, noise_multiplier=multiplier, sample_rate=rate)
            if rate > 1:
                raise ValueError(f"{owner}: sample_rate must be at most 1, got {rate}.")
            _checks.count(owner, num_steps=steps)
            phases.append((float(multiplier), float(rate), int(steps)))
        if not phases:
            raise ValueError(f"{owner}: history has no phase.")
        _checks.count(owner, num_records=num_records)
        value = getattr(people, "value", people)
        _checks.one_of(owner, "people", value, ["overlapping", "disjoint"])
        fields = {"history": tuple(phases), "num_records": int(num_records)}
        for name, value in (fields | {"people": People(people)}).items():
            object.__setattr__(self, name, value)  # frozen

    @classmethod
    def gdp(
        cls, mu: float, num_records: int, people: People | str = People.OVERLAPPING
    ) -> Self:
        r"""Return a `DeclaredTraining` that is $\mu$-GDP under replace-one.

        Args:
            mu: $\mu$.
            num_records: As in the class.
            people: As in the class.
        """
        _checks.positive(f"{cls.__name__}.gdp", mu=mu)
        factor = cls.neighbours.contributions
        return cls(((factor / mu, 1.0, 1),), num_records, people)

    @classmethod
    def of_event(
        cls,
        event: "dp_accounting.DpEvent",
        num_records: int,
        people: People | str = People.OVERLAPPING,
    ) -> Self:
        """Return the `DeclaredTraining` that an event of dp-accounting describes.

        Args:
            event: Gaussian releases with Poisson or full batches, or compositions of
                these; multipliers are noise over the clip norm.
            num_records: As in the class.
            people: As in the class.

        Raises:
            ValueError: The event has a part of another type.
        """
        return cls(_history(event, 1), num_records, people)

    @property
    def event(self) -> "dp_accounting.DpEvent":
        """Event of one training; noise is over the replace-one sensitivity."""
        phases = []
        for multiplier, rate, steps in self.history:
            relative = multiplier / self.neighbours.contributions
            single = dp_accounting.GaussianDpEvent(relative)
            if rate < 1:
                single = dp_accounting.PoissonSampledDpEvent(rate, single)
            phases.append(dp_accounting.SelfComposedDpEvent(single, steps))
        return dp_accounting.ComposedDpEvent(phases)

    def __str__(self) -> str:
        """Describe the phases of a training in words."""
        return ", then ".join(
            f"{steps} {'step' if steps == 1 else 'steps'} of noise multiplier "
            f"{multiplier:.4g} on "
            + (f"Poisson batches of rate {rate:.4g}" if rate < 1 else "full batches")
            for multiplier, rate, steps in self.history
        )


@dataclasses.dataclass(frozen=True)
class Trainings(AbstractRelease):
    """Planned releases for a ledger: `count` declared trainings of a black box.

    Privacy:
        All models count as released, in adaptive composition with the releases of the
        losses: a loss reads training records by its model alone, and a training reads
        evaluation records by released points alone. A person with records on both sides
        is charged for both, disjoint people for one of them. Runs of a selection must
        stay secret, so there a training is part of the selection instead.
    """

    mechanism: DeclaredTraining
    basis: Basis = Basis.CONSTANTS

    @property
    @override
    def failure(self) -> float:
        return 0.0

    @property
    @override
    def sizes(self) -> dict[str, int]:
        return {_TRAINING_RECORDS: self.mechanism.num_records}

    def check(self, budget: PrivacyBudget) -> None:
        """Raise `ValueError` if the trainings alone exceed the budget."""
        alone = Ledger((self,), self.mechanism.people)
        if alone.delta(budget.epsilon) <= budget.delta:
            return
        epsilon = alone.epsilon(budget.delta) if budget.delta else float("inf")
        raise ValueError(
            f"calibrate: up to {self.count} declared trainings cost epsilon = "
            f"{epsilon:.4g} at delta = {budget.delta:.3g}, more than the budget."
        )

    def row(self) -> LedgerRow:
        """Return the report's `LedgerRow` of the trainings, worded as declared."""
        training, basis = self.mechanism, self.basis.value
        roles = {_TRAINING_RECORDS: RoleRow(training.num_records, "as declared")}
        source = type(training).__name__, training.precision, basis
        return LedgerRow(self.name, self.count, roles, *source, declared=str(training))

    @override
    def forecast(self, coordinates: int | None) -> ForecastRow:
        return ForecastRow(self.name, declared=str(self.mechanism))

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        disjoint = people is People.DISJOINT
        event = dp_accounting.SelfComposedDpEvent(self.mechanism.event, self.count)
        yield _TRAINING_RECORDS if disjoint else RECORDS, event


def check_fits(training: DeclaredTraining, num_records: int, folder: Any) -> None:
    """Raise `ValueError` if rows are not as many as declared, or a folder is given."""
    if folder is not None:
        raise ValueError(
            "PrivateSearch.fit: leave out folder=: training= counts one call only."
        )
    if training.num_records != num_records:
        due = training.num_records
        raise ValueError(
            f"PrivateSearch.fit: X must have num_records={due} rows, got {num_records}."
        )


def check_search(training: Any, estimator: Any, solver: Any, losses: Any) -> None:
    """Raise `ValueError` if losses, solver or seeds defeat a declared training.

    Losses and their units must not be taken from training records, and fits must not
    all have the same noise.
    """
    owner = "PrivateSearch"
    _checks.instance(owner, DeclaredTraining, training=training)
    if solver is None or losses is None:
        raise ValueError(
            f"{owner}: training= protects its records: give losses= and solver= too."
        )
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "random_state" and value is not None:
            raise ValueError(f"{owner}: {name} repeats noise; set it to None.")


def _history(event, count: int) -> tuple[tuple[float, float, int], ...]:
    """Return (multiplier, rate, steps) triples of `count` runs of an event."""
    match event:
        case dp_accounting.NoOpDpEvent():
            return ()
        case dp_accounting.SelfComposedDpEvent(event=inner, count=repeats):
            return _history(inner, count * repeats)
        case dp_accounting.ComposedDpEvent(events=parts):
            return tuple(phase for part in parts for phase in _history(part, count))
        case dp_accounting.GaussianDpEvent(noise_multiplier=multiplier):
            return ((multiplier, 1.0, count),)
        case dp_accounting.PoissonSampledDpEvent(
            sampling_probability=rate,
            event=dp_accounting.GaussianDpEvent(noise_multiplier=multiplier),
        ):
            return ((multiplier, rate, count),)
    raise ValueError(
        f"DeclaredTraining.of_event: {type(event).__name__} is not supported. Give "
        "Gaussian releases with full or Poisson batches."
    )
