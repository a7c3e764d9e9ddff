"""Private selection: the best of a random number of noisy evaluations."""

import dataclasses
from typing import Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .._checks import Count, Number, Positive, check_fields
from ..core.solver import AbstractGaussianSolver
from ..privacy.noise import PRNGKey, derive
from ..privacy.per_example.clipping import Basis
from ..privacy.selection import Repetitions, Selection
from .base import AbstractAskTellSolver, Proposal
from .best_run import BestRun, check_enough
from .candidates import LOSS, box_of, start_of, uniform
from .declared import TRAINING, Trainings
from .losses import loss_query, noisy_loss
from .problem import BlackBox, SearchProblem

BEST = f"point of the least {LOSS}"


class RepeatAndSelect(
    AbstractAskTellSolver[BestRun], AbstractGaussianSolver[SearchProblem, BestRun]
):
    r"""The best of $K$ random points by their noisy losses, with $K$ random.

    One repetition draws a point uniformly from the problem's box and releases the mean
    of its losses, clipped to $[0, B]$, with Gaussian noise. Of $K$ repetitions only the
    best is released, with its noisy loss, at a little more privacy cost than one. There
    are always `num_steps` evaluations, of which those after the first $K$ are ignored,
    so that $K$ is not revealed. With a Poisson law $K$ may be zero; the answer is then
    the start.

    Args:
        num_steps: The number of evaluations; far above `mean`, so that $K$ is larger
            with a chance well below delta. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        mean: The expected $K$, above 1. Static.
        shape: Of the negative binomial law of $K$: 1 is geometric, 0 logarithmic,
            `math.inf` Poisson, which needs the fewest steps. Static.

    Raises:
        ValueError: $P(K >$ `num_steps`$)$ is above 1/1000; the message names a number
            of steps that serves.

    Privacy:
        One selection among Gaussian releases of sensitivity $B / n$ under replace-one,
        $B / (2 n)$ under add-or-remove-one, enforced by clipping. A single selection is
        accounted for by the smaller bound of its privacy profile and its Renyi
        divergences; composed with other releases, by the divergences
        (`docs/mathematics.md`, "Private selection"). $P(K >$ `num_steps`$)$ is added to
        delta. Points are drawn from a public law and none is left out by its loss. All
        runs but the best stay secret: their points, their losses and the models that
        were trained there.

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
        """The law of the number of repetitions."""
        return Repetitions(self.mean, self.shape)

    @override
    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> BestRun:
        w = start_of("RepeatAndSelect", problem, w0)
        return BestRun.start(w, w.dtype)

    @override
    def ask(self, problem: SearchProblem, state: BestRun, *, key: PRNGKey) -> Proposal:
        box = box_of("RepeatAndSelect", problem)  # also after the first K points
        return Proposal(uniform(box, state.w, 1, key=key), jnp.ones((), jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> BestRun:
        key_repeats, key_select = derive(key, "repeats", "select")
        value = noisy_loss(
            self._selection(self.sizes),
            problem,
            proposal,
            losses,
            self.clip_range,
            key=key_select,
        )
        law, most = self.repetitions, self.num_steps
        return state.after(proposal.points[0], value, law, most, key=key_repeats)

    @override
    def released(self, state: BestRun) -> Float[Array, " d"]:
        """The start, and after the last step the answer."""
        return state.w

    @override
    def adversary_view(self, state: BestRun) -> PyTree:
        """The answer and its noisy loss."""
        return state.w, state.value

    @override
    def noisy_losses(self, state: BestRun) -> tuple[Array, Array]:
        """Return the best run after the last step; none if nothing was repeated."""
        last = state.t == self.num_steps
        shown = int(last & jnp.isfinite(state.best_value))
        return state.w[None][:shown], state.value[None][:shown]

    @override
    def releases(self, problem: SearchProblem, sizes: int) -> tuple[Selection]:
        """One selection; a declared training is part of every run."""
        selection = self._selection(sizes)
        training = problem.training if isinstance(problem, BlackBox) else None
        if training is None:
            return (selection,)
        if any(rate < 1 for _, rate, _ in training.history):
            raise ValueError(
                "RepeatAndSelect: training on Poisson batches is not accounted for "
                "together with private selection; declare a training on full batches "
                "or DeclaredTraining.gdp, or search by RandomSearch or NoisyUCB."
            )
        run = (Trainings(TRAINING, 1, (), training),)
        basis = Basis.CONSTANTS
        return (dataclasses.replace(selection, trainings=(run,), basis=basis),)

    @override
    def charged_trainings(self) -> int:
        """None: those of its runs are part of what is selected."""
        return 0

    @override
    def with_noise(self, scale: Number) -> Self:
        """Sets the multiplier of every repetition to `scale`."""
        return dataclasses.replace(self, noise_multiplier=scale)

    @override
    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        return {BEST: 1}

    def _selection(self, sizes: int) -> Selection:
        queries = (loss_query(self.clip_range, sizes),)
        law, most = self.repetitions, self.num_steps
        return Selection(BEST, 1, queries, self.release_noise, law, most)
