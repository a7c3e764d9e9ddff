"""Noisy gradient descent whose noise is correlated between steps."""

import dataclasses
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, UInt32
from typing_extensions import override

from .._checks import Count, Positive, ProperFraction, check_fields
from ..core.descent import StepSize, as_rule
from ..core.solver import AbstractIterative
from ..privacy import correlated
from ..privacy.keys import wrapped
from .noisy_gd import GRADIENT, AbstractDescent, DescentState


class CorrelatedState(DescentState):
    """State of a descent with correlated noise. SECRET: it holds keys of noise."""

    earlier: UInt32[Array, "lags 8"]  # keys of the noise of the steps before, in words


class CorrelatedGD(AbstractDescent[CorrelatedState], AbstractIterative):
    r"""Projected gradient descent whose noise partly cancels noise of earlier steps.

    It is for batches that come in a fixed order. If batches can be drawn at random,
    `NoisyGD` with `Poisson` was better at equal budget (the page "Correlated noise"
    of the results). On full batches no correlation makes the noise in the sum of all
    steps smaller. A record of sensitivity $S$ moves the sum of $T$ steps by up to $T
    S$. So under $\mu$-GDP an unbiased estimate of the sum has a deviation of at least
    $T S / \mu$, which independent noise attains.

    $$w_{t+1} = \Pi_W\bigl(w_t - \eta\,(\tilde g_t + \nabla r(w_t))\bigr), \qquad
    \tilde g_t = \frac{1}{m} \sum_{i \in B_t} \mathrm{clip}_C(\nabla \ell(w_t, z_i)) +
    s \Bigl(z_t - \sum_{j = 1}^{b - 1} a_j z_{t - j}\Bigr),$$

    with independent standard normal $z_t$. The fresh noise is larger than that of
    `NoisyGD` at the same budget, and less of it is left in the sum of all steps. No
    earlier noise is stored: it is drawn again from its keys, which costs $b - 1$
    further draws a step. Steps are not shortened as those of `NoisyGD` are, because
    successive gradients point against each other by their noise alone.

    Args:
        num_steps: The number of steps. Static.
        clip_norm: The bound $C$ on one record's gradient in $\ell_2$.
        step_size: The step size $\eta$, or an optax optimizer, as in `NoisyGD`.
        feedback: $a_1, \ldots, a_{b-1} \ge 0$ with a sum below 1, rounded down to
            multiples of $2^{-15}$. One coefficient $\lambda$ is DP-$\lambda$-CGD;
            `privacy.square_root_feedback(bands)` gives those of the banded inverse
            square root. Static.
        momentum: As in `NoisyGD`.

    Privacy:
        One joint Gaussian release of the clipped means of all steps, of sensitivity
        $\|\sum_j C_{\cdot, j g}\|$ times that of one mean: $2C/m$ under replace-one,
        $C/m$ under add-or-remove-one, enforced by clipping for any loss. Here $C^{-1} =
        I - \sum_j a_j\,\mathrm{shift}^j$, and $g$ is the number of batches of a pass of
        `SinglePass`, or 1 for `FullBatch`. Other sampling is refused. All iterates are
        covered. A checkpoint holds keys of the last $b - 1$ noises as well as that of
        the noise to come.

    References:
        DP-lambda-CGD, arXiv 2601.22334, 2026; Kalinin, McKenna, Upadhyay and Lampert,
        "Back to square roots", ICLR 2026; Denisov, McMahan, Rush, Smith and Thakurta,
        "Improved differential privacy for SGD via optimal private linear operators on
        adaptive streams", NeurIPS 2022 (adaptivity).
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    feedback: tuple[float, ...] = eqx.field(
        static=True, default=(0.5,), converter=correlated.rounded_feedback
    )
    momentum: ProperFraction | None = None
    proximal: ClassVar = ("step_size", "momentum")
    numbers_batches: ClassVar[bool] = True

    def __check_init__(self):
        correlated.check_sampling(type(self).__name__, self.sampling)
        check_fields(self)
        _ = self.release_noise  # checks its fields

    @property
    @override
    def release_noise(self) -> correlated.Correlated:
        """`Correlated` mechanism of all steps of a run on full batches."""
        noise = self.noise_multiplier, self.neighbours, self.precision
        return correlated.Correlated(*noise, self.feedback, self.num_steps)

    @property
    @override
    def run_noise(self):
        return super().release_noise.scaled(1 / self._joint)

    @property
    def _joint(self) -> float:
        return correlated.sensitivity(self.feedback, self.num_steps, 1)

    @override
    def with_noise(self, scale):
        return super().with_noise(scale * self._joint / math.sqrt(self.num_steps))

    @override
    def init(self, problem, w0) -> CorrelatedState:
        earlier = jnp.zeros((len(self.feedback), 8), jnp.uint32)
        fields = vars(super().init(problem, w0)) | {"last": None}
        return CorrelatedState(**fields, earlier=earlier)

    @override
    def step(self, problem, data, state, *, key) -> CorrelatedState:
        words = jax.random.bits(key, (8,), jnp.uint32)
        release = self.release(problem, self.sizes).after(state.earlier, state.t)
        gradient = release.apply(  # noise z_t - sum_j a_j z_(t-j)
            problem.record_gradients(state.w),
            data,
            key=wrapped(words, "chacha20"),
            index=state.t,
        )
        gradient = optax.tree.add(gradient, problem.public_gradient(state.w))
        state = self.moved(problem, gradient, state, release.deviation)
        earlier = jnp.concatenate([words[None], state.earlier[:-1]])
        return dataclasses.replace(state, earlier=earlier)

    @override
    def release(self, problem, sizes) -> correlated.CorrelatedRelease:
        queries, _ = problem.queries(self.clip_norm, self.sampling, sizes)
        return correlated.CorrelatedRelease(GRADIENT, 1, queries, self.release_noise)

    @override
    def forecast(self, problem, sizes, w0):
        """Return `ForecastRow`s as `NoisyGD`; refuse noise too large for the grid."""
        self.release_noise.check_room(optax.tree.size(w0))
        return super().forecast(problem, sizes, w0)
