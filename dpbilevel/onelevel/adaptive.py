"""Noisy gradient descent that finds its clip norm, or its step size as well."""

import dataclasses
from typing import Any
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import PyTree
from typing_extensions import override

from .._checks import Count, Fraction, Number, Positive, ProperFraction
from ..core.descent import Descent, SkippedUpdates, StepSize, as_rule, finite_or, scaled
from ..core.solver import AbstractIterative, State
from ..privacy.keys import PRNGKey
from ..privacy.releases import Release
from .noisy_gd import (
    GRADIENT,
    AbstractDescent,
    AbstractGradientSolver,
    DescentState,
    NoisyGD,
)
from .problem import AbstractFiniteSum, Scalar

# Largest ratio of the clip norm to the first one, in either direction.
_RANGE = 1e3
_MEMORY = 0.9  # of the direction that a gradient is compared with
_CERTAIN = 3.0  # standard deviations at which the step size changes by the full rate
_LONGEST = 0.3  # of a step, in lengths of the iterate
_STEP_RANGE = 1e6  # of the step size, in either direction


class AbstractAdaptiveClip(AbstractGradientSolver[State], AbstractIterative):
    r"""Descent whose clip norm adapts to the fraction of gradients that clipping keeps.

    Attributes:
        clip_norm: $C_0$, the norm of the first step; public.
        kept: $k$, the mean fraction of their lengths that gradients are to keep.
        rate: $\rho$, the most by which the logarithm of the norm changes in a step.
        weight: $a$, the length of the coordinate in clip norms.
    """

    clip_norm: AbstractVar[float]
    kept: AbstractVar[float]
    rate: AbstractVar[float]
    weight: AbstractVar[float]

    def read(
        self,
        problem: AbstractFiniteSum,
        data: PyTree,
        w: PyTree,
        clip_norm: Scalar,
        *,
        key: PRNGKey,
    ) -> tuple[PyTree, Any, Scalar]:
        r"""Release a gradient; return it, a bound on its noise, and the next clip norm.

        Privacy:
            One `release`, at the point $w_t$ and the clip norm $C_t$.
        """
        # Gradients and coordinates, clipped together at C_t and released.
        release = self._release(problem, self.sizes, clip_norm / self.clip_norm)
        root = (1 + self.weight**2) ** 0.5
        norms = {query.role: query.clip_norm for query in release.queries}
        lengths = {role: norm * self.weight / root for role, norm in norms.items()}
        gradients = problem.record_gradients(w)

        def beside(gradient, length):
            return lambda record: (gradient(record), jnp.asarray(length))

        rows = {role: beside(gradients[role], v) for role, v in lengths.items()}
        gradient, length = release.apply(rows, data, key=key)
        gradient = optax.tree.add(gradient, problem.public_gradient(w))
        # The fraction of their lengths that gradients keep moves the clip norm.
        kept = length / sum(lengths.values())  # k_t
        missing = (self.kept - kept) / (1 - self.kept)
        norm = clip_norm * jnp.exp(self.rate * jnp.clip(missing, -1.0, 1.0))
        first = jnp.asarray(self.clip_norm, norm.dtype)
        norm = jnp.clip(norm, first / _RANGE, first * _RANGE)  # C_{t+1}
        return gradient, release.deviation, norm.astype(clip_norm.dtype)

    @override
    def release(self, problem, sizes) -> Release:
        return self._release(problem, sizes, 1.0)

    def _release(self, problem, sizes, factor: Number) -> Release:
        """Return the first step's planned `Release`, clip norms times `factor`.

        A level may have a clip norm of its own, which `clip_norm` does not set. The
        ledger charges the people of each level by its fraction of the sensitivity, so
        that the ratios of the norms must stay.
        """
        release = super().release(problem, sizes)
        longer = factor * (1 + self.weight**2) ** 0.5
        queries = tuple(
            dataclasses.replace(query, clip_norm=query.clip_norm * longer)
            for query in release.queries
        )
        return dataclasses.replace(release, queries=queries)

    @override
    def assumptions(self, problem, sizes):
        return (
            "the noise follows the clip norm of its step, a function of earlier "
            "releases; both are listed at the first step",
        )

    @override
    def dimensions(self, w0):
        return {GRADIENT: optax.tree.size(w0) + 1}


class _ClipState(DescentState):
    clip_norm: Scalar  # C_t


class AdaptiveClipGD(AbstractAdaptiveClip[_ClipState], AbstractDescent[_ClipState]):
    r"""`NoisyGD` whose clip norm adapts to the fraction of gradients that it keeps.

    Every record's gradient $g_i$ has one more coordinate of the constant length $a
    C_t$, and both are clipped as one vector:

    $$(\tilde g_t, \tilde l_t) = \frac{1}{m} \sum_{i \in B_t} \mathrm{clip}_{C_t \sqrt{1
    + a^2}} (\nabla \ell(w_t, z_i), a C_t) + \mathcal N(0, s_t^2 I), \qquad C_{t+1} =
    C_t \exp\Bigl(\rho\, \Bigl[\frac{k - k_t}{1 - k}\Bigr]_{-1}^1\Bigr),$$

    with $k_t = \tilde l_t / (a C_t)$ and the bracket cut to [-1, 1]. A gradient of at
    most $C_t$ is not clipped. Clipping keeps the same fraction of a longer gradient and
    of its coordinate, so that $k_t$ is a noisy mean of these fractions. $C_t$ stays
    within a factor of 1000 of $C_0$. The noise is $\sqrt{1 + a^2}$ times that of
    `NoisyGD` at the norm $C_t$.

    It is for gradients whose lengths are not known. With
    few records $k_t$ is mostly noise, and so is the norm. Steps of a given size shrink
    with the clip norm, those of an optax optimizer that scales gradients do not.

    Args:
        num_steps: The number of steps. Static.
        clip_norm: $C_0$, the norm of the first step; public.
        step_size: As in `NoisyGD`.
        momentum: As in `NoisyGD`.
        kept: $k$, the mean fraction of their lengths that gradients are to keep.
        rate: $\rho$, the most by which the logarithm of the norm changes in a step.
        weight: $a$, the length of the coordinate in clip norms.

    Privacy:
        `num_steps` Gaussian releases, each of one clipped mean of sensitivity $2 C_t
        \sqrt{1 + a^2} / m$ under replace-one. $C_t$ is a function of earlier releases,
        and the noise is relative to it: the coordinate is a part of what is clipped and
        costs no release of its own. If records of two levels are read, the norms of
        both move by the same factor. Report and ledger list the sensitivity at $C_0$.

    References:
        Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private learning with
        adaptive clipping", NeurIPS 2021, Algorithm 1; here with the mean fraction that
        is kept in place of the fraction of records below the norm. One clip bounds both
        parts, and no second norm is computed.
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    momentum: ProperFraction | None = None
    kept: Fraction = 0.97
    rate: Positive = 0.2
    weight: Positive = 0.3

    @override
    def init(self, problem, w0) -> _ClipState:
        norm = jnp.asarray(self.clip_norm, jnp.result_type(float))
        return _ClipState(**vars(super().init(problem, w0)), clip_norm=norm)

    @override
    def step(self, problem, data, state, *, key) -> _ClipState:
        w, c = state.w, state.clip_norm
        gradient, deviation, norm = self.read(problem, data, w, c, key=key)
        state = self.moved(problem, gradient, state, deviation)
        return dataclasses.replace(state, clip_norm=norm)

    @override
    def adversary_view(self, state):
        return state.w, state.clip_norm


# Descents with the fields of `NoisyGD`, as a stage of a pipeline.
NoisyDescent = NoisyGD | AdaptiveClipGD


class _StepState(_ClipState):
    length: Scalar  # lambda_t
    direction: PyTree  # m_t


class AdaptiveGD(AbstractAdaptiveClip[_StepState]):
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

    @override
    def init(self, problem, w0) -> _StepState:
        w = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        numbers = (self.clip_norm, self.first_step)
        norm, length = (jnp.asarray(v, jnp.result_type(float)) for v in numbers)
        memory = Descent(length, problem.w_set).init(w)
        t, direction = jnp.zeros((), jnp.int32), optax.tree.zeros_like(w)
        kept, last = self.output.init(w), None  # the step size takes care of itself
        return _StepState(w, kept, memory, t, last, norm, length, direction)

    @override
    def step(self, problem, data, state, *, key) -> _StepState:
        w, c, t = state.w, state.clip_norm, state.t
        gradient, _, norm = self.read(problem, data, w, c, key=key)  # q_t
        fade = 1 - t.astype(c.dtype) / self.num_steps  # f_t
        length, direction = self._tuned(gradient, state, fade)
        # A projected step, no longer than what the public terms allow.
        descent = Descent(fade * length / c, problem.w_set)
        along = descent.curvature_limited(gradient, problem.public_gradient, w)
        new, memory = descent.update(along, state.memory, w)
        kept = self.remembered(state.kept, new, before=w, t=t)
        return _StepState(new, kept, memory, t + 1, None, norm, length, direction)

    def _tuned(
        self, gradient: PyTree, state: _StepState, fade: Scalar
    ) -> tuple[Scalar, PyTree]:
        r"""Return the next step length and direction; the old ones if not finite."""
        w, old, first = state.w, (state.length, state.direction), self.first_step
        with jax.numpy_dtype_promotion("standard"):  # leaves may be of several dtypes
            unit = scaled(1 / state.clip_norm, gradient)
            size, before = optax.tree.norm(unit), optax.tree.norm(state.direction)
            both = jnp.where(size * before > 0, size * before, 1)
            cosine = optax.tree.vdot(unit, state.direction) / both
            agreement = cosine * optax.tree.size(w) ** 0.5 / _CERTAIN
            change = self.rate * fade * jnp.clip(agreement, -1, 1)
            ends = first / _STEP_RANGE, first * _STEP_RANGE
            length = jnp.clip(old[0] * jnp.exp(change), *ends)
            most = _LONGEST * optax.tree.norm(w) / (fade * jnp.where(size > 0, size, 1))
            length = jnp.where(most > 0, jnp.minimum(length, most), length)
            length = length.astype(old[0].dtype)
        direction = optax.tree.add(scaled(_MEMORY, old[1]), unit)
        found, _ = finite_or((length, direction), old, SkippedUpdates())
        return found

    @override
    def adversary_view(self, state):
        """Return iterate, clip norm, step length and direction, a tuple of four."""
        return state.w, state.clip_norm, state.length, state.direction
