"""Private selection: the best of a random number of noisy evaluations."""

import dataclasses
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .._checks import Count, Number, Positive, check_fields
from ..privacy.budget import Neighbours
from ..privacy.floats import double_precision
from ..privacy.ledger import Ledger
from ..privacy.mechanisms import Gaussian
from ..privacy.noise import PRNGKey, derive, standard_exponential
from ..privacy.selection import Repetitions, Selection
from .base import AbstractAskTellSolver, Proposal
from .candidates import LOSS, box_of, start_of, uniform
from .losses import loss_query, noisy_loss
from .problem import SearchProblem

BEST = f"point of the least {LOSS}"
# A chance of needing more runs than are made that no budget would pay for.
_FAILURE = 1e-3


class _State(eqx.Module):
    w: Float[Array, " d"]  # the start, until the last step
    value: Float[Array, ""]  # zero, until the last step
    best: Float[Array, " d"]  # SECRET, as all below: who sees it, knows K
    best_value: Float[Array, ""]
    repeats: Int[Array, ""]
    t: Int[Array, ""]


class RepeatAndSelect(AbstractAskTellSolver[_State]):
    r"""The best of $K$ random points by their noisy losses, with $K$ random.

    One repetition draws a point uniformly from the problem's box and releases the mean
    of its losses, clipped to $[0, B]$, with Gaussian noise. Of $K$ repetitions only the
    best is released, with its noisy loss, at little more than the price of one. Always
    `num_steps` points are evaluated, and those after the first $K$ are left out, so
    that nothing tells $K$. With a Poisson law $K$ may be zero; the answer is then
    the start.

    Args:
        num_steps: The number of evaluations; far above `mean`, so that $K$ is larger
            with a chance well below delta. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        mean: The expected $K$, above 1. Static.
        shape: Of the negative binomial law of $K$: 1 is geometric, 0 logarithmic,
            `math.inf` Poisson, which needs the fewest steps. Static.
        noise: The mechanism; its multiplier is per repetition.
        sizes: The planned number of records; set by `calibrate`. Static.

    Raises:
        ValueError: $P(K >$ `num_steps`$)$ is above 1/1000; the message names a number
            of steps that serves.

    Privacy:
        One selection among Gaussian releases of sensitivity $B / n$ under replace-one,
        $B / (2 n)$ under add-or-remove-one, enforced by clipping; accounted by its
        Renyi divergences (`docs/privacy.md`, "Private selection"). $P(K >$
        `num_steps`$)$ is paid for in delta. Points are drawn from a public law and none
        is left out by its loss.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022, Theorems 2 and 6; Liu and Talwar, "Private selection from private
        candidates", STOC 2019.
    """

    num_steps: Count = eqx.field(static=True)
    clip_range: Positive
    mean: float = eqx.field(static=True)
    shape: float = eqx.field(static=True, default=1.0)
    noise: Gaussian = Gaussian()
    sizes: Any = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_fields(self)
        chance = self.repetitions.beyond(self.num_steps)[-1]
        if chance > _FAILURE:
            beyond = self.repetitions.beyond(self.num_steps + int(500 * self.mean))
            enough = int(np.argmax(beyond < 1e-9))
            raise ValueError(
                f"RepeatAndSelect: more than num_steps={self.num_steps} repetitions "
                f"have probability {chance:.2g}, which delta has to pay for; with "
                f"mean={self.mean:.6g} and shape={self.shape:.6g} num_steps={enough} "
                "makes it less than 1e-9. Or lower the mean."
            )

    @property
    def repetitions(self) -> Repetitions:
        """The law of the number of repetitions."""
        return Repetitions(self.mean, self.shape)

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.noise.neighbours

    @override
    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> _State:
        w = start_of("RepeatAndSelect", problem, w0)
        infinite = jnp.asarray(jnp.inf, w.dtype)
        zero = jnp.zeros((), jnp.int32)
        return _State(w, jnp.zeros((), w.dtype), w, infinite, zero, zero)

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        box = box_of("RepeatAndSelect", problem)  # also after the first K points
        return Proposal(uniform(box, state.w, 1, key=key), jnp.ones((), jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        key_repeats, key_select = derive(key, "repeats", "select")
        repeats = jnp.where(state.t == 0, self._repeats(key_repeats), state.repeats)
        selection = self._selection(self.sizes)
        value = noisy_loss(
            selection, problem, proposal, losses, self.clip_range, key=key_select
        )
        better = (state.t < repeats) & (value < state.best_value)
        best = jnp.where(better, proposal.points[0], state.best)  # among the first K
        best_value = jnp.where(better, value, state.best_value)
        # Where nothing was repeated there is no value to show.
        last = (state.t == self.num_steps - 1) & jnp.isfinite(best_value)
        return _State(
            jnp.where(last, best, state.w),
            jnp.where(last, best_value, state.value),
            best,
            best_value,
            repeats,
            state.t + 1,
        )

    @override
    def released(self, state: _State) -> Float[Array, " d"]:
        """The start, and after the last step the answer."""
        return state.w

    @override
    def adversary_view(self, state: _State) -> PyTree:
        """The answer and its noisy loss."""
        return state.w, state.value

    @override
    def ledger(self, problem: SearchProblem, sizes: int) -> Ledger:
        assumptions = self.assumptions(problem, sizes)
        return Ledger((self._selection(sizes),), assumptions=assumptions)

    @override
    def with_noise(self, scale: Number) -> Self:
        """Sets the multiplier of every repetition to `scale`."""
        return dataclasses.replace(self, noise=self.noise.with_multiplier(scale))

    @override
    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        return {BEST: 1}

    def _selection(self, sizes: int) -> Selection:
        queries = (loss_query(self.clip_range, sizes),)
        law, most = self.repetitions, self.num_steps
        return Selection(BEST, 1, queries, self.noise, law, most)

    def _repeats(self, key: PRNGKey) -> Int[Array, ""]:
        """Draws K, at most the number of steps."""
        beyond = self.repetitions.beyond(self.num_steps - 1)
        with double_precision():
            drawn = standard_exponential((), jnp.float64, key=key)
            # K > k exactly where a uniform number is below P(K > k).
            limits = jnp.asarray(-np.log(np.maximum(beyond, 1e-300)), jnp.float64)
            return jnp.sum(drawn > limits, dtype=jnp.int32)
