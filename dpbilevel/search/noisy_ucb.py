"""Global Bayesian optimization of noisy values: a private GP-UCB."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree
from typing_extensions import override

from .._checks import Count, NonNegative, Positive, check_fields
from ..core.solver import AbstractNoisySolver
from ..privacy.ledger import AbstractRelease
from ..privacy.noise import PRNGKey, derive
from ..privacy.releases import Release
from .base import AbstractAskTellSolver, Proposal
from .candidates import (
    LOSS,
    box_of,
    check_starts,
    ends,
    start_of,
    starts_of,
    uniform,
)
from .gp import solved
from .kernels import RBF, cast
from .losses import loss_query, noisy_loss
from .problem import SearchProblem


class _State(eqx.Module):
    w: Float[Array, " d"]
    points: Float[Array, "steps d"]
    values: Float[Array, " steps"]  # released: noise included
    t: Int[Array, ""]


class NoisyUCB(
    AbstractAskTellSolver[_State], AbstractNoisySolver[SearchProblem, _State]
):
    r"""Minimizes the lower confidence bound of a surrogate of noisy losses.

    At every step the point is evaluated at which $m(w) - \beta s(w)$ is smallest among
    random ones, half of them uniform in the problem's box and half near the best so
    far; the mean of its losses, clipped to $[0, B]$, is released with Gaussian noise. A
    Gaussian process with posterior mean $m$ and deviation $s$ is fitted to the released
    values, with the variance of the privacy noise as its noise. The answer is the
    evaluated point of the smallest $m$.

    Args:
        num_steps: The number of evaluations. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        lengthscale: Of the squared exponential kernel, in sides of the box.
        variance: Of the mean loss over the box, in squared units of the loss; public.
            By default $(B / 4)^2$.
        exploration: $\beta \ge 0$.
        num_candidates: How many points a step chooses from. Static.
        starts: Points that are evaluated first, one a row, such as good ones on public
            data; at most `num_steps`.

    Raises:
        ValueError: There are more starts than steps.

    Privacy:
        `num_steps` Gaussian releases of sensitivity $B / n$ under replace-one, $B / (2
        n)$ under add-or-remove-one, enforced by clipping. No assumption on the losses
        or the surrogate: it sees released values only, and all of them are covered.

    References:
        Srinivas, Krause, Kakade and Seeger, "Gaussian process optimization in the
        bandit setting", ICML 2010, Algorithm 1, here with noise for privacy.
    """

    shows_every_loss: ClassVar[bool] = True
    num_steps: Count = eqx.field(static=True)
    clip_range: Positive
    lengthscale: Positive = 0.3
    variance: Positive | None = None
    exploration: NonNegative = 2.0
    num_candidates: Count = eqx.field(static=True, default=1000)
    starts: Any = None

    def __check_init__(self):
        check_fields(self)
        check_starts("NoisyUCB", self.starts, num_steps=self.num_steps)

    @override
    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> _State:
        w = start_of("NoisyUCB", problem, w0)
        # Rows without values hold the start: any point, left out by `_evaluated`.
        points = jnp.broadcast_to(w, (self.num_steps, *w.shape))
        values = jnp.zeros(self.num_steps, w.dtype)
        return _State(w, points, values, jnp.zeros((), jnp.int32))

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        box = box_of("NoisyUCB", problem)
        key_everywhere, key_near = derive(key, "proposal", "search")
        half = -(-self.num_candidates // 2)
        everywhere = uniform(box, state.w, half, key=key_everywhere)
        lower, upper = ends(box, state.w)
        # Half of them near the best so far, at half a length scale.
        away = jax.random.normal(key_near, everywhere.shape, state.w.dtype)
        step = cast(self.lengthscale / 2, state.w) * (upper - lower)
        near = jnp.clip(state.w[None] + step[None] * away, lower[None], upper[None])
        candidates = jnp.concatenate([everywhere, near])
        mean, deviation = self._posterior(box, state, candidates)
        bound = mean - cast(self.exploration, mean) * deviation  # equal without values
        point = candidates[jnp.argmin(bound)]
        starts = starts_of("NoisyUCB", self.starts, box, state.w)
        if len(starts):
            point = jnp.where(state.t < len(starts), starts[state.t], point)
        return Proposal(point[None], jnp.ones((), jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        release = self.release(problem, self.sizes)
        value = noisy_loss(release, problem, proposal, losses, self.clip_range, key=key)
        state = _State(
            state.w,
            state.points.at[state.t].set(proposal.points[0]),
            state.values.at[state.t].set(value),
            state.t + 1,
        )
        box = box_of("NoisyUCB", problem)
        found, _ = self._posterior(box, state, state.points)  # not its noisy values
        best = jnp.argmin(jnp.where(self._evaluated(state), found, jnp.inf))
        return dataclasses.replace(state, w=state.points[best])

    @override
    def released(self, state: _State) -> Float[Array, " d"]:
        return state.w

    @override
    def adversary_view(self, state: _State) -> PyTree:
        """The best point, and all points with their noisy values."""
        return state.w, state.points, state.values

    @override
    def noisy_losses(self, state: _State) -> tuple[Array, Array]:
        return state.points[: int(state.t)], state.values[: int(state.t)]

    @override
    def release(self, problem: SearchProblem, sizes: int) -> Release:
        query = loss_query(self.clip_range, sizes)
        return Release(LOSS, 1, (query,), self.release_noise)

    @override
    def releases(
        self, problem: SearchProblem, sizes: int
    ) -> tuple[AbstractRelease, ...]:
        return (self.counted_release(problem, sizes),)

    @override
    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        return {LOSS: 1}

    def _evaluated(self, state: _State) -> Bool[Array, " steps"]:
        """Which rows hold values."""
        return jnp.arange(self.num_steps, dtype=jnp.int32) < state.t

    def _posterior(self, box, state, points):
        """Mean and deviation of the surrogate, in units of losses."""
        lower, upper = ends(box, state.w)
        sides = jnp.maximum(upper - lower, jnp.finfo(lower.dtype).tiny)
        scale = cast(self.lengthscale, state.w) * sides
        amplitude = cast(self.clip_range / 4, state.values)
        if self.variance is not None:
            amplitude = jnp.sqrt(cast(self.variance, state.values))
        # The standard deviation of the privacy noise, which is public.
        std = cast(self.release_noise.multiplier, amplitude)
        std *= cast(self.clip_range, amplitude)
        share = loss_query(1.0, self.sizes).contribution
        std *= cast(self.neighbours.contributions * share, amplitude)
        mean, deviation = posterior(
            state.points / scale[None],
            state.values / amplitude,
            self._evaluated(state),
            points / scale[None],
            (std / amplitude) ** 2,
        )
        return mean * amplitude, deviation * amplitude


def posterior(
    points: Float[Array, "m d"],
    values: Float[Array, " m"],
    known: Bool[Array, " m"],
    at: Float[Array, "q d"],
    noise: Float[Array, ""],
) -> tuple[Float[Array, " q"], Float[Array, " q"]]:
    r"""A Gaussian process with kernel $e^{-\|u - v\|^2 / 2}$ about the values' mean.

    Args:
        points: Where values are known, in length scales.
        values: The values, in amplitudes.
        known: Which rows are in use.
        at: Where to predict.
        noise: The variance of the values' noise; a nugget is added to it.

    Returns:
        The posterior means and standard deviations.
    """
    # Without it equal points would leave no Cholesky factor in rounding.
    nugget = jnp.finfo(points.dtype).eps ** 0.5
    both = known[:, None] & known[None, :]
    diagonal = jnp.where(known, noise + cast(nugget, noise), 1)
    covariance = jnp.where(both, _kernel(points, points), 0) + jnp.diag(diagonal)
    count = jnp.maximum(jnp.sum(known), 1).astype(values.dtype)
    center = jnp.sum(jnp.where(known, values, 0)) / count  # the prior mean
    factor = jnp.linalg.cholesky(covariance)
    cross = jnp.where(known[:, None], _kernel(points, at), 0)
    rest = jnp.where(known, values - center, 0)
    half, weights = solved(factor, cross, rest)
    variance = jnp.maximum(1 - jnp.sum(half**2, axis=0), 0)
    return center + half.T @ weights, jnp.sqrt(variance)


def _kernel(u: Float[Array, "m d"], v: Float[Array, "q d"]) -> Float[Array, "m q"]:
    return RBF().covariance(u, v, u[0])
