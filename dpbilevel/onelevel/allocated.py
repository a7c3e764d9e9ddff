"""Noisy gradient descent over passes with randomly allocated records."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

from .._checks import Count, Positive
from ..core.descent import StepSize, as_rule
from ..core.outputs import AbstractOutput, Last, check_output
from ..core.solver import AbstractNoisySolver
from ..privacy.noise import derive, step_keys
from ..privacy.releases import Release
from ..privacy.sampling.allocation import RandomAllocation
from .noisy_gd import DescentState, NoisyGD, gradient_release
from .problem import AbstractFiniteSum


class AllocatedGD(AbstractNoisySolver[AbstractFiniteSum, DescentState]):
    r"""DP-SGD in passes: every record is in one batch of each pass, at random.

    At the start of a pass each record is put into one of $t$ batches, uniformly and
    independently. Then one update of `NoisyGD` is made for each batch in turn,

    $$w_{k+1} = \Pi_W\bigl(w_k - \eta\,(\tilde g_k + \nabla r(w_k))\bigr), \qquad
    \tilde g_k = \frac{t}{n} \sum_{i \in B_k} \mathrm{clip}_C(\nabla \ell(w_k, z_i)) +
    \mathcal N(0, s^2 I).$$

    It reads every record once a pass, as shuffled epochs do. The privacy cost is about
    that of Poisson batches of rate $1 / t$. If time permits, full batches give the
    better answer.

    A step of this solver is a pass, and the trajectory has one iterate for each.
    Calibration takes some seconds, and longer for fewer passes.

    Args:
        num_passes: The number of passes. Static.
        batches: $t$, the batches of a pass, at most 65 536. Static.
        clip_norm: The bound $C$ on one record's gradient in $\ell_2$.
        step_size: As in `NoisyGD`.
        output: Which iterate is the answer: `Last()`, `Mean()` of all,
            or `TailMean()` of the second half.

    Privacy:
        `num_passes` compositions of `RandomAllocation`: a pass makes $t$ Gaussian
        releases, and a record influences one of them, whose number is secret. Enforced
        by clipping for any loss, under both relations.

    References:
        Chua, Ghazi, Harrison, Leeman, Kamath, Kumar, Manurangsi, Sinha and Zhang,
        "Balls-and-bins sampling for DP-SGD", AISTATS 2025; Feldman and Shenfeld,
        "Privacy amplification by random allocation", NeurIPS 2025.
    """

    num_passes: Count = eqx.field(static=True)
    batches: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    output: AbstractOutput = eqx.field(default=Last(), kw_only=True)
    problem_type: ClassVar[type] = AbstractFiniteSum

    def __check_init__(self):
        check_output(type(self).__name__, self.output)

    @property
    def num_steps(self) -> int:
        """Number of passes, each of which is one `step`."""
        return self.num_passes

    @property
    @override
    def releases_per_step(self) -> int:
        return self.batches

    @property
    def sampling(self) -> RandomAllocation:
        """Sampling of the batches of a pass."""
        return RandomAllocation(self.batches)

    @property
    def _updates(self) -> NoisyGD:
        """`NoisyGD` that moves the iterate along all released gradients of a run."""
        count = self.num_releases
        return NoisyGD(count, self.clip_norm, self.step_size, output=self.output)

    @override
    def init(self, problem, w0) -> DescentState:
        return self._updates.init(problem, w0)

    @override
    def step(self, problem, data, state, *, key) -> DescentState:
        # Every record into one batch of the pass.
        key_pass, key_noise = derive(key, "sampling", "noise")
        release = self.release(problem, self.sizes).in_pass(data, key=key_pass)

        def update(state, batch):  # one noisy update for each batch
            index, key = batch
            gradients = problem.record_gradients(state.w)
            gradient = release.apply(gradients, data, key=key, index=index)
            gradient = optax.tree.add(gradient, problem.public_gradient(state.w))
            moved = self._updates.moved(problem, gradient, state, release.deviation)
            return moved, None

        _, keys = step_keys(key_noise, self.batches)
        batches = jnp.arange(self.batches), keys
        return jax.lax.scan(update, state, batches)[0]

    @override
    def released(self, state):
        return state.w

    @override
    def forecast(self, problem, sizes, w0):
        return self._updates.forecast(problem, sizes, w0)

    @override
    def adversary_view(self, state):
        """Return the pair of the last iterate and the memory of the output rule."""
        return state.w, state.kept

    @override
    def answer(self, problem, state):
        return self._updates.answer(problem, state)

    @override
    def release(self, problem, sizes) -> Release:
        return gradient_release(self, problem, sizes)

    @override
    def dimensions(self, w0):
        return self._updates.dimensions(w0)
