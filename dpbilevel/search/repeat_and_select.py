"""Private selection: release of the best of a random number of runs."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, DTypeLike, Float, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, Number, Positive, check_fields
from .._extras import dp_accounting
from ..core.solver import AbstractGaussianSolver
from ..privacy.accounting import profiles
from ..privacy.accounting.repetitions import Repetitions
from ..privacy.budget import People
from ..privacy.exact.floats import double_precision
from ..privacy.keys import PRNGKey, derive
from ..privacy.ledger import AbstractRelease
from ..privacy.noise import standard_exponential
from ..privacy.per_example.clipping import Basis
from ..privacy.queries import Query
from ..privacy.releases import AbstractNoisyRelease, Release
from . import base
from .base import LOSS, AbstractAskTellSolver, BlackBox, Proposal, SearchProblem
from .declared import TRAINING, Trainings
from .losses import loss_query, noisy_loss


@dataclasses.dataclass(frozen=True)
class Selection(AbstractNoisyRelease):
    r"""Planned release of the best of $K$ runs, with the value that selects it.

    A run releases a value. If there are `trainings`, it first makes one of them, by
    Gaussian releases, and then releases the value of what that found. Only the best of
    the $K$ runs is shown, with all that it released. A public law draws the training of
    a run, so that each run is charged as one with the costliest training.

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

    repetitions: Repetitions  # the law of K
    runs: int  # a fixed number; those after the first K are left out
    basis: Basis = Basis.CLIPPED  # of the sensitivity
    trainings: tuple[tuple[AbstractRelease, ...], ...] = ()  # releases before the value

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
        r"""Return the largest Gaussian $\mu$ of a run, as a dict by kind of person."""
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


BEST = f"point of the least {LOSS}"
# Largest accepted probability that K exceeds the number of runs.
_FAILURE = 1e-3


class BestRun(eqx.Module):
    """The best of the first $K$ runs of a fixed number, hidden until the last one."""

    w: PyTree  # the initial point until the last run, then the answer of the best run
    value: Float[Array, ""]  # zero until the last run, then the best run's noisy loss
    best: PyTree  # answer so far. SECRET like all fields below: it reveals K
    best_value: Float[Array, ""]  # its noisy loss
    repeats: Int[Array, ""]  # K
    t: Int[Array, ""]  # number of runs made

    @classmethod
    def start(cls, w: PyTree, dtype: DTypeLike) -> Self:
        """Return the `BestRun` before the first run; `w` is the answer if K is zero."""
        infinite, zero = jnp.asarray(jnp.inf, dtype), jnp.zeros((), jnp.int32)
        return cls(w, jnp.zeros((), dtype), w, infinite, zero, zero)

    def after(
        self,
        w: PyTree,
        value: Float[Array, ""],
        repetitions: Repetitions,
        num_runs: int,
        *,
        key: PRNGKey,
    ) -> Self:
        """Return the `BestRun` after one more run: its answer, its noisy loss.

        At the first run K, at most `num_runs`, is drawn without reading records.
        """
        beyond = repetitions.beyond(num_runs - 1)
        with double_precision():
            drawn = standard_exponential((), jnp.float64, key=key)
            # K > k if and only if a uniform number is below P(K > k).
            limits = jnp.asarray(-np.log(np.maximum(beyond, 1e-300)), jnp.float64)
            sample = jnp.sum(drawn > limits, dtype=jnp.int32)
        repeats = jnp.where(self.t == 0, sample, self.repeats)
        better = (self.t < repeats) & (value < self.best_value)  # among the first K
        best = optax.tree.where(better, w, self.best)
        best_value = jnp.where(better, value, self.best_value)
        # If K = 0 there is no value to show.
        last = (self.t == num_runs - 1) & jnp.isfinite(best_value)
        shown = optax.tree.where(last, best, self.w)
        shown_value = jnp.where(last, best_value, self.value)
        return type(self)(shown, shown_value, best, best_value, repeats, self.t + 1)


def check_enough(owner: str, repetitions: Repetitions, num_steps: int) -> None:
    """Raise `ValueError`, with a larger `num_steps`, if $K$ may well exceed it."""
    probability = repetitions.beyond(num_steps)[-1]
    if probability > _FAILURE:
        beyond = repetitions.beyond(num_steps + int(500 * repetitions.mean))
        enough = int(np.argmax(beyond < 1e-9))
        raise ValueError(
            f"{owner}: more than num_steps={num_steps} repetitions have probability "
            f"{probability:.2g}. Lower the mean, or give num_steps={enough} with "
            f"mean={repetitions.mean:.6g} and shape={repetitions.shape:.6g}."
        )


class RepeatAndSelect(
    AbstractAskTellSolver[BestRun], AbstractGaussianSolver[SearchProblem, BestRun]
):
    r"""The best of $K$ random points by their noisy losses, with $K$ random.

    One repetition samples a point uniformly from the problem's box and computes the
    mean of its losses, clipped to $[0, B]$, with Gaussian noise. Only the best of $K$
    repetitions is released, with its noisy loss, at a privacy cost little above that of
    one. There are always `num_steps` evaluations; those after the first $K$ are
    ignored, so that $K$ is not revealed. If $K$ is zero, which a Poisson distribution
    allows, the answer is the initial point.

    Args:
        num_steps: The number of evaluations; so far above `mean` that the probability
            of a larger $K$ is well below delta. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        mean: The expected $K$, above 1. Static.
        shape: Shape of the negative binomial distribution of $K$: 1 is geometric, 0
            logarithmic, `math.inf` Poisson, which needs the fewest steps. Static.

    Raises:
        ValueError: $P(K >$ `num_steps`$)$ is above 1/1000; the message names a
            sufficient number of steps.

    Privacy:
        One selection among Gaussian releases of sensitivity $B / n$ under replace-one,
        $B / (2 n)$ under add-or-remove-one, enforced by clipping. A single selection is
        accounted for by the smaller bound of its privacy profile and its Renyi
        divergences; composed with other releases, by the divergences
        (`docs/mathematics.md`, "Private selection"). $P(K >$ `num_steps`$)$ is added to
        delta. Points are sampled without reading records, and none is left out by its
        loss. All other runs must stay secret: their points, losses and models.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022, Theorems 2 and 6; Koskela, Redberg and Wang, "Privacy profiles for
        private selection", ICML 2024, of whose bound the profile here is a variant; Liu
        and Talwar, "Private selection from private candidates", STOC 2019.
    """

    num_steps: Count = eqx.field(static=True)
    clip_range: Positive
    mean: float = eqx.field(static=True)
    shape: float = eqx.field(static=True, default=1.0)

    def __check_init__(self):
        check_fields(self)
        check_enough("RepeatAndSelect", self.repetitions, self.num_steps)

    @property
    def repetitions(self) -> Repetitions:
        """Distribution of the number of repetitions."""
        return Repetitions(self.mean, self.shape)

    @override
    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> BestRun:
        w = base.start_of("RepeatAndSelect", problem, w0)
        return BestRun.start(w, w.dtype)

    @override
    def ask(self, problem: SearchProblem, state: BestRun, *, key: PRNGKey) -> Proposal:
        box = base.box_of("RepeatAndSelect", problem)  # also after the first K points
        return Proposal(base.uniform(box, state.w, 1, key=key), jnp.ones((), jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> BestRun:
        key_repeats, key_select = derive(key, "repeats", "select")
        release, told = self._selection(self.sizes), (problem, proposal, losses)
        value = noisy_loss(release, *told, self.clip_range, key=key_select)
        planned, point = (self.repetitions, self.num_steps), proposal.points[0]
        return state.after(point, value, *planned, key=key_repeats)

    def adversary_view(self, state: BestRun) -> PyTree:
        """Return the answer and its noisy loss."""
        return state.w, state.value

    def noisy_losses(self, state: BestRun) -> tuple[Array, Array]:
        """Return the best run's point and noisy loss, each an array of 0 or 1 rows."""
        last = state.t == self.num_steps
        shown = int(last & jnp.isfinite(state.best_value))
        return state.w[None][:shown], state.value[None][:shown]

    def releases(self, problem: SearchProblem, sizes: int) -> tuple[Selection]:
        """Return one `Selection` in a tuple; its runs include declared trainings."""
        selection = self._selection(sizes)
        training = problem.training if isinstance(problem, BlackBox) else None
        if training is None:
            return (selection,)
        if any(rate < 1 for _, rate, _ in training.history):
            raise ValueError(
                "RepeatAndSelect: private selection has no accounting for training on "
                "Poisson batches. Use RandomSearch or NoisyUCB."
            )
        run = (Trainings(TRAINING, 1, (), training),)
        basis = Basis.CONSTANTS
        return (dataclasses.replace(selection, trainings=(run,), basis=basis),)

    def charged_trainings(self) -> int:
        """Return 0: the selection counts the trainings of its runs."""
        return 0

    def with_noise(self, scale: Number) -> Self:
        """Return a copy with noise multiplier `scale` in every repetition."""
        return dataclasses.replace(self, noise_multiplier=scale)

    @override
    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        return {BEST: 1}

    def _selection(self, sizes: int) -> Selection:
        queries = (loss_query(self.clip_range, sizes),)
        repetitions, most = self.repetitions, self.num_steps
        return Selection(BEST, 1, queries, self.release_noise, repetitions, most)
