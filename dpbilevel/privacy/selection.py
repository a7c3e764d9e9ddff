"""Private selection: the best of a random number of repetitions."""

import dataclasses
from collections.abc import Iterator

from typing_extensions import override

from .. import _checks
from ._lazy import dp_accounting
from .budget import People
from .clipping import Basis
from .releases import AbstractGaussianRelease
from .repetitions import Repetitions


@dataclasses.dataclass(frozen=True)
class Selection(AbstractGaussianRelease):
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

    repetitions: Repetitions
    runs: int
    basis: Basis = Basis.CLIPPED

    def __post_init__(self):
        super().__post_init__()
        _checks.count("Selection", runs=self.runs)

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

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        (query,) = self.queries
        event = self.repetitions.event(self.mechanism.event())
        yield query.role, dp_accounting.SelfComposedDpEvent(event, self.count)
