"""Noisy gradient descent whose clip norm adapts to the lengths of the gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import PyTree
from typing_extensions import override

from .._checks import Count, Fraction, Number, Positive, ProperFraction, check_fields
from ..core.descent import StepSize, as_rule
from ..core.solver import AbstractIterative, AbstractNoisySolver, State
from ..privacy.noise import PRNGKey
from ..privacy.releases import Release
from .noisy_gd import GRADIENT, DescentState, NoisyGD, gradient_release
from .problem import AbstractFiniteSum, Scalar

# Largest ratio of the clip norm to the first one, in either direction.
_RANGE = 1e3


class _State(eqx.Module):
    descent: DescentState
    clip_norm: Scalar  # C_t


class AbstractAdaptiveClip(
    AbstractNoisySolver[AbstractFiniteSum, State], AbstractIterative
):
    r"""Descent whose clip norm follows how much of the gradients it keeps.

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
        r"""Return $q_t$, a bound on its standard deviation in any direction, $C_{t+1}$.

        Args:
            problem: The problem.
            data: The records.
            w: $w_t$.
            clip_norm: $C_t$.
            key: A typed key for this release alone.

        Privacy:
            One `release`, at the clip norm $C_t$.
        """
        # Gradients and coordinates, clipped together at C_t and released.
        release = self._release(problem, self.sizes, clip_norm / self.clip_norm)
        root = (1 + self.weight**2) ** 0.5
        norms = {query.role: query.clip_norm for query in release.queries}
        lengths = {role: norm * self.weight / root for role, norm in norms.items()}
        gradients = problem.record_gradients(w)
        rows = {role: _beside(gradients[role], v) for role, v in lengths.items()}
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
        """Return the first step's `Release`, with all clip norms times `factor`.

        A level may have a clip norm of its own, which `clip_norm` does not set. The
        ledger charges the people of each level by its fraction of the sensitivity, so
        that the ratios of the norms must stay.
        """
        release = gradient_release(self, problem, sizes)
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


class AdaptiveClipGD(AbstractAdaptiveClip[_State]):
    r"""`NoisyGD` whose clip norm adapts to how much of the gradients it keeps.

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
    problem_type: ClassVar[type] = AbstractFiniteSum

    def __check_init__(self):
        check_fields(self)
        _ = self._updates  # checks what the fields are together

    @property
    def _updates(self) -> NoisyGD:
        """`NoisyGD` that moves the iterate along the released gradients."""
        fields = self.num_steps, self.clip_norm, self.step_size, self.momentum
        return NoisyGD(*fields, output=self.output)

    @override
    def init(self, problem, w0) -> _State:
        norm = jnp.asarray(self.clip_norm, jnp.result_type(float))
        return _State(self._updates.init(problem, w0), norm)

    @override
    def step(self, problem, data, state, *, key) -> _State:
        w, c = state.descent.w, state.clip_norm
        gradient, deviation, norm = self.read(problem, data, w, c, key=key)
        descent = self._updates.moved(problem, gradient, state.descent, deviation)
        return _State(descent, norm)

    @override
    def released(self, state):
        return state.descent.w

    @override
    def adversary_view(self, state):
        return state.descent.w, state.clip_norm

    @override
    def answer(self, problem, state):
        return self._updates.answer(problem, state.descent)

    @override
    def forecast(self, problem, sizes, w0):
        return self._updates.forecast(problem, sizes, w0)


# Descents with the fields of `NoisyGD`, as a stage of a pipeline.
NoisyDescent = NoisyGD | AdaptiveClipGD


def _beside(gradient: Callable[[PyTree], PyTree], length: Number) -> Callable:
    """Return a function of a record that returns its gradient and `length`."""
    return lambda record: (gradient(record), jnp.asarray(length))
