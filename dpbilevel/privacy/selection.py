"""Private selection: the best of a random number of repetitions."""

import collections
import dataclasses
from collections.abc import Iterator

from typing_extensions import override

from .. import _checks
from .._extras import dp_accounting
from .accounting import profiles
from .accounting.repetitions import Repetitions
from .budget import People
from .ledger import AbstractRelease
from .per_example.clipping import Basis
from .queries import Query
from .releases import AbstractNoisyRelease, Release


@dataclasses.dataclass(frozen=True)
class Selection(AbstractNoisyRelease):
    r"""`count` releases of the best of $K$ runs, with the value that selects it.

    A run is the release of a value, or first a training, made of Gaussian releases, and
    then the release of a value of what it found; what the best run released is shown.

    Args:
        name: What is selected.
        count: How many times.
        queries: What the value of one run reads, one query.
        mechanism: The noise of one value.
        repetitions: The law of $K$.
        runs: The fixed number of runs that are made; those after the first $K$ are left
            out.
        basis: What the sensitivity rests on.
        trainings: The releases before the value, for each of the trainings that a run
            picks from by a public law. Each is charged as the training that costs most
            privacy.

    Raises:
        ValueError: A training refers to another relation.

    Privacy:
        $K$ is drawn once, without data, and never released. At most `runs` repetitions
        are possible, so that the law of what is released is within $P(K >$ `runs`$)$ in
        total variation of what is charged. The releases of one run compose to one
        Gaussian for each kind of person: a person whose records are read by training
        and value alike is charged for both, and disjoint people for one of them
        (`docs/mathematics.md`, "Private selection").

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022; Liu and Talwar, "Private selection from private candidates", STOC
        2019, for the geometric law; Koskela, Redberg and Wang, "Privacy profiles for
        private selection", ICML 2024, for profiles, of which those in
        `docs/mathematics.md` are a variant.
    """

    repetitions: Repetitions
    runs: int
    basis: Basis = Basis.CLIPPED
    trainings: tuple[tuple[AbstractRelease, ...], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        _checks.count("Selection", runs=self.runs)
        relations = {r.neighbours for training in self.trainings for r in training}
        if relations - {self.neighbours}:
            raise ValueError(
                "Selection: give trainings and value the same `neighbours`."
            )

    @property
    @override
    def reads(self) -> tuple[Query, ...]:
        trained = (q for part in self.trainings for r in part for q in r.reads)
        return *self.queries, *trained

    @property
    @override
    def sizes(self) -> dict[str, int]:
        trained = (r.sizes for part in self.trainings for r in part)
        return dict(collections.ChainMap(super().sizes, *trained))

    @property
    def failure(self) -> float:
        """Probability of more repetitions than there are runs."""
        return self.count * float(self.repetitions.beyond(self.runs)[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts on the law of the number of repetitions, and the privacy of one run."""
        law = (
            f"{self.name}: the best of K, {self.repetitions}; drawn once, never shown, "
            f"and above the {self.runs} runs made with probability {self.failure:.3g}, "
            "counted in delta"
        )
        if not self.trainings:
            return (law,)
        run = ", ".join(
            f"{mu:.4g}-GDP towards {role} records"
            for role, mu in self.run_mus(People.DISJOINT).items()
        )
        kind = f"one of {len(self.trainings)} trainings" * (len(self.trainings) > 1)
        trainings = f"{kind or 'a training'} and the release of a value"
        return law, f"{self.name}: a run is {trainings}, together {run}"

    def run_mus(self, people: People) -> dict[str, float]:
        r"""Return a dict of one run's largest $\mu$ in a training, by kind of person.

        Args:
            people: Who may have records where.

        Raises:
            ValueError: A training is not made of Gaussian releases on full batches.
        """
        value = Release(self.name, 1, self.queries, self.mechanism, basis=self.basis)
        found = collections.defaultdict(float)
        for training in self.trainings or ((),):
            charged = collections.defaultdict(list)
            for release in (*training, value):
                for person, event in release.charges(people):
                    charged[person].append(event)
            for person, events in charged.items():
                mu = profiles.gaussian_mu(dp_accounting.ComposedDpEvent(events))
                if mu is None:
                    raise ValueError(
                        "Selection: trainings must use Gaussian noise and FullBatch."
                    )
                found[person] = max(found[person], mu)
        return dict(found)

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        for person, mu in self.run_mus(people).items():
            event = self.repetitions.event(dp_accounting.GaussianDpEvent(1 / mu))
            yield person, dp_accounting.SelfComposedDpEvent(event, self.count)
