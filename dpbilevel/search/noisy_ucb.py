"""Global Bayesian optimization of noisy values: a private GP-UCB."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree
from typing_extensions import override

from .._checks import Count, NonNegative, Positive, check_fields
from ..core.solver import AbstractNoisySolver
from ..privacy.keys import PRNGKey, derive
from ..privacy.ledger import AbstractRelease
from ..privacy.releases import Release
from . import base
from .base import LOSS, AbstractAskTellSolver, Proposal, SearchProblem
from .gp import solve_both
from .kernels import RBF, cast
from .losses import loss_query, noisy_loss


class _State(eqx.Module):
    w: Float[Array, " d"]
    points: Float[Array, "steps d"]
    values: Float[Array, " steps"]  # released, with noise
    t: Int[Array, ""]


class NoisyUCB(
    AbstractAskTellSolver[_State], AbstractNoisySolver[SearchProblem, _State]
):
    r"""Bayesian optimization by a lower confidence bound of noisy losses.

    Every step evaluates the random point with the smallest $m(w) - \beta s(w)$ and
    releases the mean of its losses, clipped to $[0, B]$, with Gaussian noise. Half of
    the random points are uniform in the problem's box, half near the best point so far.
    $m$ and $s$ are the posterior mean and standard deviation of a Gaussian process
    fitted to the released values, whose noise variance is that of the privacy noise.
    The answer is the evaluated point with the smallest $m$.

    Args:
        num_steps: The number of evaluations. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        lengthscale: Length-scale of the squared exponential kernel, in sides of the
            box.
        variance: Public variance of the mean loss over the box, in squared units of the
            loss; $(B / 4)^2$ by default.
        exploration: $\beta \ge 0$.
        num_candidates: Number of random points of a step. Static.
        starts: Points to evaluate first, one a row, such as good ones on public data;
            at most `num_steps`.

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

    num_steps: Count = eqx.field(static=True)
    clip_range: Positive
    lengthscale: Positive = 0.3
    variance: Positive | None = None
    exploration: NonNegative = 2.0
    num_candidates: Count = eqx.field(static=True, default=1000)
    starts: Any = None

    def __check_init__(self):
        check_fields(self)
        base.check_starts(self, "num_steps")

    @override
    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> _State:
        w = base.start_of("NoisyUCB", problem, w0)
        # Rows without values hold any point; `_evaluated` masks them.
        points = jnp.broadcast_to(w, (self.num_steps, *w.shape))
        values = jnp.zeros(self.num_steps, w.dtype)
        return _State(w, points, values, jnp.zeros((), jnp.int32))

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        box = base.box_of("NoisyUCB", problem)
        key_everywhere, key_near = derive(key, "proposal", "search")
        half = -(-self.num_candidates // 2)
        everywhere = base.uniform(box, state.w, half, key=key_everywhere)
        lower, upper = base.ends(box, state.w)
        # Half of the candidates are near the best point, at half a length-scale.
        away = jax.random.normal(key_near, everywhere.shape, state.w.dtype)
        step = cast(self.lengthscale / 2, state.w) * (upper - lower)
        near = jnp.clip(state.w[None] + step[None] * away, lower[None], upper[None])
        candidates = jnp.concatenate([everywhere, near])
        mean, deviation = self._posterior(box, state, candidates)
        margin = cast(self.exploration, mean) * deviation  # constant without values
        point = candidates[jnp.argmin(mean - margin)]
        starts = base.starts_of("NoisyUCB", self.starts, box, state.w)
        if len(starts):
            point = jnp.where(state.t < len(starts), starts[state.t], point)
        return Proposal(point[None], jnp.ones((), jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        release = self.release(problem, self.sizes)
        value = noisy_loss(release, problem, proposal, losses, self.clip_range, key=key)
        points = state.points.at[state.t].set(proposal.points[0])
        values = state.values.at[state.t].set(value)
        state = _State(state.w, points, values, state.t + 1)
        box = base.box_of("NoisyUCB", problem)
        mean, _ = self._posterior(box, state, state.points)
        best = jnp.argmin(jnp.where(self._evaluated(state), mean, jnp.inf))
        return dataclasses.replace(state, w=state.points[best])

    def adversary_view(self, state: _State) -> PyTree:
        """Return the best point, and all points with their noisy losses."""
        return state.w, state.points, state.values

    @override
    def noisy_losses(self, state: _State) -> tuple[Array, Array]:
        return state.points[: int(state.t)], state.values[: int(state.t)]

    @override
    def release(self, problem: SearchProblem, sizes: int) -> Release:
        query = loss_query(self.clip_range, sizes)
        return Release(LOSS, 1, (query,), self.release_noise)

    @override
    def releases(self, problem, sizes) -> tuple[AbstractRelease, ...]:
        return (self.counted_release(problem, sizes),)

    @override
    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        return {LOSS: 1}

    def _evaluated(self, state: _State) -> Bool[Array, " steps"]:
        """Return a mask of the rows of a state that hold released values."""
        return jnp.arange(self.num_steps, dtype=jnp.int32) < state.t

    def _posterior(self, box, state, points):
        """Return means and standard deviations at points, in units of losses."""
        lower, upper = base.ends(box, state.w)
        sides = jnp.maximum(upper - lower, jnp.finfo(lower.dtype).tiny)
        scale = cast(self.lengthscale, state.w) * sides
        amplitude = cast(self.clip_range / 4, state.values)
        if self.variance is not None:
            amplitude = jnp.sqrt(cast(self.variance, state.values))
        # The standard deviation of the privacy noise, which is public.
        std = cast(self.release_noise.multiplier, amplitude)
        std *= cast(self.clip_range, amplitude)
        unit = loss_query(1.0, self.sizes).contribution
        std *= cast(self.neighbours.contributions * unit, amplitude)
        known = state.points / scale[None], state.values / amplitude
        evaluated, noise = self._evaluated(state), (std / amplitude) ** 2
        mean, deviation = posterior(*known, evaluated, points / scale[None], noise)
        return mean * amplitude, deviation * amplitude


def posterior(
    points: Float[Array, "m d"],
    values: Float[Array, " m"],
    known: Bool[Array, " m"],
    at: Float[Array, "q d"],
    noise: Float[Array, ""],
) -> tuple[Float[Array, " q"], Float[Array, " q"]]:
    r"""Return posterior means and standard deviations of a Gaussian process.

    The kernel is $e^{-\|u - v\|^2 / 2}$, and the prior mean is the mean of the values.
    Points are in length-scales, values and the variance of their noise in units of the
    prior; `known` are the rows in use.
    """
    # Without the nugget, equal points would have no Cholesky factor.
    nugget, kernel, near = jnp.finfo(points.dtype).eps ** 0.5, RBF(), points[0]
    both = known[:, None] & known[None, :]
    diagonal = jnp.where(known, noise + cast(nugget, noise), 1)
    covariance = jnp.where(both, kernel.covariance(points, points, near), 0)
    covariance = covariance + jnp.diag(diagonal)
    count = jnp.maximum(jnp.sum(known), 1).astype(values.dtype)
    center = jnp.sum(jnp.where(known, values, 0)) / count  # the prior mean
    factor = jnp.linalg.cholesky(covariance)
    cross = jnp.where(known[:, None], kernel.covariance(points, at, near), 0)
    rest = jnp.where(known, values - center, 0)
    half, weights = solve_both(factor, cross, rest)
    variance = jnp.maximum(1 - jnp.sum(half**2, axis=0), 0)
    return center + half.T @ weights, jnp.sqrt(variance)
