"""Private selection: the best of a random number of repetitions."""

import dataclasses
from collections.abc import Iterator

from .. import _checks
from .._lazy import dp_accounting
from ..clipping import Basis
from .budget import Neighbours, People
from .ledger import AbstractRelease
from .mechanisms import Gaussian
from .repetitions import Repetitions


@dataclasses.dataclass(frozen=True)
class Selection(AbstractRelease):
    r"""`count` releases of the best of $K$ Gaussian releases, with its value.

    Args:
        name: What is selected.
        count: How many times.
        queries: What one run reads, one query.
        mechanism: The noise of one run.
        repetitions: The law of $K$.
        runs: The fixed number of runs that are made; those after the first $K$ are left
            out.
        basis: What the sensitivity rests on.

    Privacy:
        $K$ is drawn once, without data, and never shown. At most `runs` repetitions are
        possible, so that the law of what is released is within $P(K >$ `runs`$)$ in
        total variation of what is charged.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022; Liu and Talwar, "Private selection from private candidates", STOC
        2019, for the geometric law.
    """

    mechanism: Gaussian
    repetitions: Repetitions
    runs: int
    basis: Basis = Basis.CLIPPED

    def __post_init__(self):
        super().__post_init__()
        _checks.instance("Selection", Gaussian, mechanism=self.mechanism)
        _checks.count("Selection", runs=self.runs)

    @property
    def neighbours(self) -> Neighbours:
        """The mechanism's."""
        return self.mechanism.neighbours

    @property
    def noise_multiplier(self) -> float:
        """The noise of one run over its sensitivity."""
        return self.mechanism.event().noise_multiplier

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise of one run."""
        return self.noise_multiplier * self.neighbours.contributions * self.contribution

    @property
    def clip_norm(self) -> float:
        """The largest norm of the noiseless value of one run."""
        return sum(query.clip_norm for query in self.queries)

    @property
    def value_norm(self) -> None:
        """None: the largest value is the clip norm."""
        return None

    @property
    def clip_ratio(self) -> None:
        """None: no bound on the losses is declared."""
        return None

    @property
    def failure(self) -> float:
        """The chance of more repetitions than there are runs."""
        return self.count * float(self.repetitions.beyond(self.runs)[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """The law of the number of repetitions."""
        return (
            f"{self.name}: the best of K, {self.repetitions}; drawn once, never shown, "
            f"and above the {self.runs} runs made with probability {self.failure:.3g}, "
            "counted in delta",
        )

    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        """The events of all selections."""
        (query,) = self.queries
        event = self.repetitions.event(self.mechanism.event())
        yield query.role, dp_accounting.SelfComposedDpEvent(event, self.count)
