"""Private training by other programs, charged in the ledger of a search as declared."""

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
    r"""What one private training by another program releases.

    Args:
        history: The phases of one training, each `(noise_multiplier, sample_rate,
            num_steps)`, as `accountant.history` of Opacus has them: in each of
            `num_steps` steps every record is in the batch with the chance
            `sample_rate`, independently of the others, and the sum of the batch's
            clipped gradients gets Gaussian noise of `noise_multiplier` times the clip
            norm. A rate of 1 stands for full batches.
        num_records: The number of training records, public.
        people: `"overlapping"` where a person may have a record among those that are
            trained on and one among those that are evaluated, `"disjoint"` where no
            person has.

    Raises:
        ValueError: No phase, or numbers that no training has.

    Privacy:
        A declaration cannot be checked here, and the status of the report is never
        better than `CONDITIONAL`. It has to hold for every training that the search may
        run: where noise, rate or number of steps depend on the point, declare the least
        noise, the largest rate and the most steps. Every training has to draw noise and
        batches of its own: one fixed seed would repeat them. Batches of a fixed size,
        or of shuffled records, are not those of a chance. A record that is replaced
        changes the sum of a batch by at most twice the clip norm. Nor may a training
        raise an error because of one record, such as one with a missing number.
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
        owner = type(self).__name__
        phases = tuple(_phase(owner, phase) for phase in history)
        if not phases:
            raise ValueError(f"{owner}: history names no phase of a training.")
        _checks.count(owner, num_records=num_records)
        allowed = [People.OVERLAPPING, People.DISJOINT]
        if people not in allowed:
            values = [known.value for known in allowed]
            _checks.one_of(owner, "people", people, values)
        fields = {"history": phases, "num_records": int(num_records)}
        for name, value in (fields | {"people": People(people)}).items():
            object.__setattr__(self, name, value)  # frozen

    @classmethod
    def gdp(
        cls,
        mu: float,
        num_records: int,
        people: People | str = People.OVERLAPPING,
    ) -> Self:
        r"""A training that is $\mu$-GDP under replace-one, such as one of `NoisyGD`.

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
        """A training whose event dp-accounting describes, as jax_privacy's does.

        Args:
            event: Gaussian releases, with Poisson batches or full ones, and
                compositions of such; multipliers are noise over the clip norm.
            num_records: As in the class.
            people: As in the class.

        Raises:
            ValueError: Another event is among them.
        """
        return cls(_history(event, 1), num_records, people)

    @property
    def event(self) -> "dp_accounting.DpEvent":
        """That of one training; multipliers are relative to replace-one."""
        phases = []
        for multiplier, rate, steps in self.history:
            single = dp_accounting.GaussianDpEvent(
                multiplier / self.neighbours.contributions
            )
            if rate < 1:
                single = dp_accounting.PoissonSampledDpEvent(rate, single)
            phases.append(dp_accounting.SelfComposedDpEvent(single, steps))
        return dp_accounting.ComposedDpEvent(phases)

    def __str__(self) -> str:
        """The phases in words."""
        return ", then ".join(
            f"{steps} {'step' if steps == 1 else 'steps'} of noise multiplier "
            f"{multiplier:.4g} on "
            + (f"Poisson batches of rate {rate:.4g}" if rate < 1 else "full batches")
            for multiplier, rate, steps in self.history
        )


@dataclasses.dataclass(frozen=True)
class Trainings(AbstractRelease):
    """`count` trainings of a black box, each as declared.

    Args:
        mechanism: What one of them releases.
        basis: A declaration.

    Privacy:
        As if all models were released, which is an adaptive composition with what is
        released of the losses: a loss reads the training records by its model alone,
        and a training the others by released points alone. Whoever has a record on both
        sides is charged for both, disjoint people for one of them. Runs of a selection
        must stay secret, so there a training is part of what is selected instead.
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

    @override
    def check(self, budget: PrivacyBudget) -> None:
        """Refuses trainings that cost more than the budget before anything else does.

        Raises:
            ValueError: They do.
        """
        alone = Ledger((self,), self.mechanism.people)
        if alone.delta(budget.epsilon) <= budget.delta:
            return
        found = alone.epsilon(budget.delta) if budget.delta else float("inf")
        raise ValueError(
            f"calibrate: {self.count} declared trainings, the most that this search "
            f"may run, cost epsilon = {found:.4g} at delta = {budget.delta:.3g} by "
            f"themselves, more than the budget of {budget.epsilon:.4g}; train with "
            "more noise or fewer steps, or give the search fewer evaluations."
        )

    @override
    def row(self) -> LedgerRow:
        """Return the trainings in the report, in the words of the declaration."""
        return LedgerRow(
            self.name,
            self.count,
            {_TRAINING_RECORDS: RoleRow(self.mechanism.num_records, "as declared")},
            type(self.mechanism).__name__,
            self.mechanism.precision,
            self.basis.value,
            declared=str(self.mechanism),
        )

    @override
    def forecast(self, coordinates: int | None) -> ForecastRow:
        return ForecastRow(self.name, declared=str(self.mechanism))

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        apart = people is People.DISJOINT
        event = dp_accounting.SelfComposedDpEvent(self.mechanism.event, self.count)
        yield _TRAINING_RECORDS if apart else RECORDS, event


def check_fits(training: DeclaredTraining, num_records: int, folder: Any) -> None:
    """Refuses fits of an estimator that are not those declared.

    Raises:
        ValueError: There is a folder, or another number of training records.
    """
    if folder is not None:
        raise ValueError(
            "PrivateSearch.fit: training is charged once for every fit, but with "
            "folder= a later call trains again; give no folder, or search a BlackBox "
            "by dpbilevel.search.minimize and train the answer yourself."
        )
    if training.num_records != num_records:
        raise ValueError(
            "PrivateSearch.fit: training declares num_records="
            f"{training.num_records}, but X has {num_records} rows; declare the "
            "training of these records."
        )


def check_search(training: Any, estimator: Any, solver: Any, losses: Any) -> None:
    """Refuses a search of an estimator that would not be as declared.

    Raises:
        TypeError: `training` is no declaration.
        ValueError: Losses or their units would be taken from training records, or all
            fits would draw the same noise.
    """
    owner = "PrivateSearch"
    _checks.instance(owner, DeclaredTraining, training=training)
    if solver is None or losses is None:
        raise ValueError(
            f"{owner}: with training the training records are protected, so neither "
            "losses nor their units may be taken from them; give losses=, and solver= "
            "with a clip norm that is known to suit them."
        )
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "random_state" and value is not None:
            raise ValueError(
                f"{owner}: {name} is set, so that all private trainings would draw "
                "the same noise, and a difference of two models would be without any; "
                f"leave {name}=None."
            )


def _phase(owner: str, phase: Any) -> tuple[float, float, int]:
    try:
        multiplier, rate, steps = phase
    except (TypeError, ValueError):
        raise ValueError(
            f"{owner}: every phase of history must be (noise_multiplier, sample_rate, "
            f"num_steps), such as (1.1, 0.01, 1_000), got {_checks.shown(phase)}."
        ) from None
    _checks.positive(owner, noise_multiplier=multiplier, sample_rate=rate)
    if rate > 1:
        raise ValueError(f"{owner}: sample_rate must be at most 1, got {rate}.")
    _checks.count(owner, num_steps=steps)
    return float(multiplier), float(rate), int(steps)


def _history(event, count: int) -> tuple[tuple[float, float, int], ...]:
    """The phases of an event that happens `count` times."""
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
        f"DeclaredTraining.of_event: {type(event).__name__} is not accounted for; "
        "give Gaussian releases with full or Poisson batches, and compositions of them."
    )
