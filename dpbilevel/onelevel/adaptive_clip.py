"""Noisy gradient descent whose clip norm follows the lengths of the gradients."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .._checks import Fraction, Number, Positive
from ..privacy.releases import Release
from .noisy_gd import GRADIENT, NoisyGD, _State, gradient_release

# How far the clip norm may go from the first one, as a factor either way.
_RANGE = 1e3


class _AdaptiveState(_State):
    clip_norm: Float[Array, ""]


class AdaptiveClipGD(NoisyGD):
    r"""`NoisyGD` whose clip norm adapts to how much of the gradients it keeps.

    Every record's gradient $g_i$ has one more coordinate of the constant length $a
    C_t$, and both are clipped as one vector:

    $$(\tilde g_t, \tilde l_t) = \frac{1}{m} \sum_{i \in B_t} \mathrm{clip}_{C_t \sqrt{1
    + a^2}} (\nabla \ell(w_t, z_i), a C_t) + \mathcal N(0, s_t^2 I), \qquad C_{t+1} =
    C_t \exp\Bigl(\rho\, \Bigl[\frac{k - k_t}{1 - k}\Bigr]_{-1}^1\Bigr),$$

    with $k_t = \tilde l_t / (a C_t)$ and the bracket cut to [-1, 1]. A gradient of at
    most $C_t$ is not clipped; of a longer one the same share is kept as of the
    coordinate, so that $k_t$ is a noisy mean of the shares that records keep. $C_t$
    stays within a factor of 1000 of $C_0$. The noise is $\sqrt{1 + a^2}$ times that of
    `NoisyGD` at the norm $C_t$.

    It is for gradients whose lengths are not known. On rows of unit norm a fixed norm
    of 1 is as good for a logistic model by steps of a given size: on 6000 records of
    the census at epsilon 1 the median test loss was .386, .384 and .393 from $C_0$ =
    .1, 1 and 10, and .707, .383 and .541 with these norms fixed; by Adam .371, .374 and
    .434, and .543, .381 and .487 (`benchmarks/clip_norms.py`). With few records
    $k_t$ is mostly noise, and the norm wanders.

    A `step_size` fits gradients of one length: if the clip norm shrinks, so do the
    steps, unless it is an optax optimizer that scales them.

    Args:
        num_steps: The number of steps. Static.
        clip_norm: $C_0$, the norm of the first step; public.
        step_size: As in `NoisyGD`.
        momentum: As in `NoisyGD`.
        kept: $k$, the mean share of their lengths that gradients are to keep.
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
        adaptive clipping", NeurIPS 2021, Algorithm 1; here with the mean share that is
        kept in place of the share of records below the norm, so that one clip bounds
        both and no second norm has to be computed.
    """

    kept: Fraction = 0.97
    rate: Positive = 0.2
    weight: Positive = 0.3

    @override
    def init(self, problem, w0) -> _AdaptiveState:
        state = super().init(problem, w0)
        norm = jnp.asarray(self.clip_norm, jnp.result_type(float))
        return _AdaptiveState(**vars(state), clip_norm=norm)

    def step(self, problem, data, state, *, key) -> _State:
        """One noisy gradient with its coordinate, one update of iterate and norm."""
        assert isinstance(state, _AdaptiveState)
        release = self._release(problem, self.sizes, state.clip_norm / self.clip_norm)
        parts = {query.role: self._part(query.clip_norm) for query in release.queries}
        gradients = problem.record_gradients(state.w)
        what = {role: _beside(gradients[role], part) for role, part in parts.items()}
        gradient, length = release.apply(what, data, key=key)
        gradient = optax.tree.add(gradient, problem.public_gradient(state.w))
        moved = self.moved(problem, gradient, state, release.deviation)
        share = length / sum(parts.values())  # k_t
        missing = (self.kept - share) / (1 - self.kept)
        norm = state.clip_norm * jnp.exp(self.rate * jnp.clip(missing, -1.0, 1.0))
        first = jnp.asarray(self.clip_norm, norm.dtype)
        norm = jnp.clip(norm, first / _RANGE, first * _RANGE)
        return dataclasses.replace(moved, clip_norm=norm.astype(state.clip_norm.dtype))

    @override
    def adversary_view(self, state):
        assert isinstance(state, _AdaptiveState)
        return state.w, state.clip_norm

    @override
    def release(self, problem, sizes) -> Release:
        return self._release(problem, sizes, 1.0)

    def _release(self, problem, sizes, factor: Number) -> Release:
        """That of the first step, with the norms of all levels times one factor.

        A level may have a clip norm of its own, which `clip_norm` does not set. The
        ledger charges each level's people by its share of the sensitivity, so that all
        norms have to keep their ratios.
        """
        release = gradient_release(self, problem, sizes)
        longer = factor * (1 + self.weight**2) ** 0.5
        queries = tuple(
            dataclasses.replace(query, clip_norm=query.clip_norm * longer)
            for query in release.queries
        )
        return dataclasses.replace(release, queries=queries)

    @override
    def assumptions(self, problem, sizes) -> tuple[str, ...]:
        return (
            "the noise follows the clip norm of its step, a function of what was "
            "released before; listed are both at the first step",
        )

    @override
    def dimensions(self, w0) -> dict[str, int]:
        return {GRADIENT: optax.tree.size(w0) + 1}

    def _part(self, clip_norm: Number) -> Number:
        """The length of the coordinate in a query of this clip norm."""
        return clip_norm * self.weight / (1 + self.weight**2) ** 0.5


def _beside(gradient: Callable[[PyTree], PyTree], part: Number) -> Callable:
    """A record's gradient and a number of this length."""
    return lambda record: (gradient(record), jnp.asarray(part))
