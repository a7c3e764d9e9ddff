"""Noisy descent that finds its step size and its clip norm during the run."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .._checks import Count, Fraction, Positive, check_fields
from ..core.descent import Descent, Memory, SkippedUpdates, finite_or, scaled
from .adaptive_clip import AbstractAdaptiveClip
from .problem import AbstractFiniteSum, Scalar

_MEMORY = 0.9  # of the direction that a gradient is compared with
_CERTAIN = 3.0  # standard deviations at which the step size changes by the full rate
_LONGEST = 0.3  # of a step, in lengths of the iterate
_RANGE = 1e6  # of the step size, in either direction


class _State(eqx.Module):
    w: PyTree
    kept: PyTree  # memory of the output rule
    memory: Memory
    t: Int[Array, ""]
    clip_norm: Scalar  # C_t
    length: Scalar  # lambda_t
    direction: PyTree  # m_t


class AdaptiveGD(AbstractAdaptiveClip[_State]):
    r"""Noisy gradient descent that finds its step size and its clip norm.

    The released gradient $q_t$, public terms included, is compared with the direction
    of the gradients before it. The step size grows while they agree and shrinks if they
    point back, and all steps fade towards the end of the run:

    $$w_{t+1} = \Pi_W\Bigl(w_t - f_t \lambda_{t+1} \frac{q_t}{C_t}\Bigr), \qquad
    \lambda_{t+1} = \lambda_t e^{\rho f_t a_t}, \qquad a_t = \Bigl[\frac{\sqrt d}{3}
    \frac{\langle q_t, m_t \rangle}{\|q_t\| \|m_t\|}\Bigr]_{-1}^1, \qquad m_{t+1} = 0.9
    m_t + \frac{q_t}{C_t},$$

    with $f_t = 1 - t / T$ and the bracket cut to [-1, 1]. If $q_t$ is noise alone, its
    cosine with $m_t$ is random, with standard deviation $1 / \sqrt d$ in $d$
    coordinates. A step from a point that is not zero is at most 0.3 times as long as
    the point, and $\lambda$ is shortened with it. $C_t$ follows the fraction of their
    lengths that gradients keep, as in `AdaptiveClipGD`.

    It is for networks. A first step or a clip norm that is too small by a factor of 100
    costs some of the first steps only.

    Args:
        num_steps: $T$, the number of steps. Static.
        clip_norm: $C_0$, the norm of the first step; public.
        first_step: $\lambda_0$, the length of the first step along a gradient as long
            as the clip norm. Without clipping $\lambda_t / C_t$ is the step size.
        kept: As in `AdaptiveClipGD`. Small values are good for networks.
        rate: $\rho$, the most by which the logarithms of $\lambda$ and $C$ change in a
            step.
        weight: As in `AdaptiveClipGD`.

    Privacy:
        `num_steps` Gaussian releases, those of `AdaptiveClipGD`. Their noise is $(1 +
        \mathrm{weight}^2)^{1/2}$ times that of `NoisyGD`, 2 % more by default.
        $\lambda_t$ and $m_t$ are functions of released gradients and public terms:
        post-processing, free.

    References:
        Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private learning with
        adaptive clipping", NeurIPS 2021 (the clip norm); Baydin, Cornish, Martinez
        Rubio, Schmidt and Wood, "Online learning rate adaptation with hypergradient
        descent", ICLR 2018 (the sign of the comparison). Liu and Bu, "Towards
        hyperparameter-free optimization with differential privacy", ICLR 2025, release
        noisy losses to the same end; here the released gradients suffice.
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive = 1.0
    first_step: Positive = 0.5
    kept: Fraction = 0.7
    rate: Positive = 0.2
    weight: Positive = 0.2
    problem_type: ClassVar[type] = AbstractFiniteSum

    def __check_init__(self):
        check_fields(self)

    @override
    def init(self, problem, w0) -> _State:
        w = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        numbers = (self.clip_norm, self.first_step)
        norm, length = (jnp.asarray(v, jnp.result_type(float)) for v in numbers)
        memory = Descent(length, problem.w_set).init(w)
        t, direction = jnp.zeros((), jnp.int32), optax.tree.zeros_like(w)
        return _State(w, self.output.init(w), memory, t, norm, length, direction)

    @override
    def step(self, problem, data, state, *, key) -> _State:
        w, c, t = state.w, state.clip_norm, state.t
        gradient, _, norm = self.read(problem, data, w, c, key=key)  # q_t
        fade = 1 - t.astype(c.dtype) / self.num_steps  # f_t
        length, direction = self._tuned(gradient, state, fade)
        # A projected step, no longer than what the public terms allow.
        descent = Descent(fade * length / c, problem.w_set)
        along = descent.curvature_limited(gradient, problem.public_gradient, w)
        new, memory = descent.update(along, state.memory, w)
        kept = self.remembered(state.kept, new, before=w, t=t)
        return _State(new, kept, memory, t + 1, norm, length, direction)

    def _tuned(
        self, gradient: PyTree, state: _State, fade: Scalar
    ) -> tuple[Scalar, PyTree]:
        r"""Return the pair $\lambda_{t+1}, m_{t+1}$; the old ones if not finite."""
        w, old, first = state.w, (state.length, state.direction), self.first_step
        with jax.numpy_dtype_promotion("standard"):  # leaves may be of several dtypes
            unit = scaled(1 / state.clip_norm, gradient)
            size, before = optax.tree.norm(unit), optax.tree.norm(state.direction)
            both = jnp.where(size * before > 0, size * before, 1)
            cosine = optax.tree.vdot(unit, state.direction) / both
            agreement = cosine * optax.tree.size(w) ** 0.5 / _CERTAIN
            change = self.rate * fade * jnp.clip(agreement, -1, 1)
            length = jnp.clip(old[0] * jnp.exp(change), first / _RANGE, first * _RANGE)
            most = _LONGEST * optax.tree.norm(w) / (fade * jnp.where(size > 0, size, 1))
            length = jnp.where(most > 0, jnp.minimum(length, most), length)
            length = length.astype(old[0].dtype)
        direction = optax.tree.add(scaled(_MEMORY, old[1]), unit)
        found, _ = finite_or((length, direction), old, SkippedUpdates.none())
        return found

    @override
    def released(self, state):
        return state.w

    @override
    def adversary_view(self, state):
        """Return iterate, clip norm, step length and direction, a tuple of four."""
        return state.w, state.clip_norm, state.length, state.direction

    @override
    def answer(self, problem, state):
        return self.output.answer(state.kept, state.w)
