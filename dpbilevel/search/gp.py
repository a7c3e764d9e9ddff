r"""Posterior of a gradient under a Gaussian process, given evaluations.

The process is a function of mean zero plus an unknown constant: a common offset of all
losses, whose gradient is zero, is no evidence of a slope.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .base import Proposal
from .kernels import AbstractKernel, cast

Scalar = Float[Array, ""]

# A trace below minus this fraction of the prior trace is a rounding error.
_ROUNDING = 1e-8


class GradientPosterior(eqx.Module):
    r"""The posterior of the gradient at $\theta$, given evaluations at some points.

    With $m$ points $D$, $K = k(D, D) + c_0 1 1^\top + \nu I$ and $G = \nabla_\theta
    k(\theta, D)$, the gradient has posterior mean $W y$ with $W = G K^{-1}$, the same
    linear map of the losses $y$ of every record, and covariance $\nabla k \nabla^\top -
    G K^{-1} G^\top$, which does not depend on losses. $L$ is the Cholesky factor of
    $k(D, D) + \nu I$, the identity on rows that are no points.
    """

    kernel: AbstractKernel  # k
    theta: Float[Array, " d"]
    points: Float[Array, "m d"]  # D
    mask: Bool[Array, " m"]  # which rows are points; the others change nothing
    nugget: Scalar  # nu, the variance of an evaluation's noise, rounding included
    precision: Scalar  # 1 / c_0, the inverse variance of the unknown constant
    root: Float[Array, "m m"]  # L
    explained: Float[Array, "m d"]  # L^-1 G^T
    ones: Float[Array, " m"]  # L^-1 1
    prior: Float[Array, "d d"]  # the covariance before any evaluation

    @property
    def prior_trace(self) -> Scalar:
        """Trace of the gradient's covariance before any evaluation."""
        return jnp.trace(self.prior)

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """Posterior covariance of the gradient."""
        cross, variance = self._correction
        known = self.explained.T @ self.explained
        return self.prior - known + cross[:, None] * cross[None] / variance

    @property
    def trace(self) -> Scalar:
        """Trace of the posterior covariance; NaN if points nearly coincide."""
        return self._trace_after(*self._correction, _square(self.explained))

    @property
    def weights(self) -> Float[Array, "d m"]:
        """Matrix $W$ from losses to the gradient; unused columns are zero."""
        cross, variance = self._correction
        explained = self.explained - self.ones[:, None] * (cross / variance)[None]
        return _solve(self.root, explained, trans="T").T

    def trace_with(
        self, points: Float[Array, "b d"], mask: Bool[Array, " b"]
    ) -> Scalar:
        """Return the covariance's trace after evaluations at the points in `mask`.

        The value is infinite if rounding errors made the trace negative or NaN.
        """
        across = self.kernel.covariance(self.points, points, self.theta)
        across = jnp.where(self.mask[:, None] & mask[None], across, 0)
        known = _solve(self.root, across)
        among = self.kernel.covariance(points, points, self.theta) - known.T @ known
        slope = self.kernel.slope(self.theta, points) - known.T @ self.explained
        rest = 1 - known.T @ self.ones  # the constant at the new points
        right = jnp.concatenate([slope, rest[:, None]], axis=1)  # one solve for both
        right = jnp.where(mask[:, None], right, 0)
        gained = _quadratic_form(_covariance(among, mask, self.nugget), right)
        cross, variance = self._correction
        cross, variance = cross + gained[:-1, -1], variance + gained[-1, -1]
        explained = _square(self.explained) + jnp.trace(gained[:-1, :-1])
        trace = self._trace_after(cross, variance, explained)
        return jnp.where(trace >= -_ROUNDING * self.prior_trace, trace, jnp.inf)

    @property
    def _correction(self) -> tuple[Float[Array, " d"], Scalar]:
        """Vector and divisor of the rank-one correction for the unknown constant."""
        return self.explained.T @ self.ones, self.precision + _square(self.ones)

    def _trace_after(self, cross, variance, explained) -> Scalar:
        # The correction is zero before any point, and if the constant is known.
        return self.prior_trace - explained + _square(cross) / variance


def gradient_posterior(
    kernel: AbstractKernel,
    theta: Float[Array, " d"],
    points: Float[Array, "m d"],
    mask: Bool[Array, " m"] | None = None,
    *,
    nugget: float | Scalar,
    constant: float | Scalar = 1e4,
) -> GradientPosterior:
    """Return the `GradientPosterior` at `theta`, a function of points alone.

    The variance of the unknown constant is in variances of the kernel. Zero assumes
    centred losses; 1e4 leaves at most 1e-4 of the spurious gradient of a constant loss.
    """
    if jnp.result_type(theta) != jnp.float64:
        raise ValueError(
            "GradientInformativeBO: use minimize, or jax_enable_x64 and a float64 w0."
        )
    mask = jnp.ones(len(points), bool) if mask is None else mask
    nugget, constant = cast(nugget, theta), cast(constant, theta)
    precision = 1 / (constant * cast(kernel.variance, theta))
    matrix = kernel.covariance(points, points, theta)
    root = jnp.linalg.cholesky(_covariance(matrix, mask, nugget))
    slope = jnp.where(mask[:, None], kernel.slope(theta, points), 0)
    explained, ones = solve_both(root, slope, mask.astype(theta.dtype))
    inputs = kernel, theta, points, mask, nugget, precision
    return GradientPosterior(*inputs, root, explained, ones, kernel.prior(theta))


class History(NamedTuple):
    """Evaluated points and all records' losses there; `mask` marks the used columns."""

    points: Float[Array, "m d"]
    losses: Float[Array, "n m"]
    mask: Bool[Array, " m"]

    def with_latest(self, proposal: Proposal, losses: Float[Array, "n q"]) -> "History":
        """Return a `History` with further points before the earlier ones."""
        order = jnp.arange(len(proposal.points), dtype=proposal.count.dtype)
        used = order < proposal.count
        losses = jnp.where(used[None], losses.astype(self.losses.dtype), 0)
        return History(
            jnp.concatenate([proposal.points, self.points]),
            jnp.concatenate([losses, self.losses], axis=1),
            jnp.concatenate([used, self.mask]),
        )


def record_gradient(
    posterior: GradientPosterior, mask: Bool[Array, " m"]
) -> Callable[[Array], Array]:
    """Return the function from a record's losses to its posterior mean gradient."""

    def gradient(losses):
        finite = jnp.isfinite(losses)
        largest = jnp.max(jnp.where(finite & mask, losses, -jnp.inf))
        largest = jnp.where(jnp.isfinite(largest), largest, 0)
        return posterior.weights @ jnp.where(finite, losses, largest)

    return gradient


def solve_both(
    root: Float[Array, "m m"], matrix: Float[Array, "m d"], vector: Float[Array, " m"]
) -> tuple[Float[Array, "m d"], Float[Array, " m"]]:
    """Return both solutions of a lower triangular system: for a matrix, for a vector.

    There is one call, because jaxlib's triangular solves under `jax.vmap` wait for
    threads of their own pool: on two cores, two solves at once can deadlock.
    """
    right = jnp.concatenate([matrix, vector[:, None]], axis=1)
    solutions = _solve(root, right)
    return solutions[:, :-1], solutions[:, -1]


def _covariance(matrix, mask, nugget):
    """Return a matrix plus the nugget on its diagonal; identity on unused rows."""
    used = jnp.where(mask[:, None] & mask[None], matrix, 0)
    return used + jnp.diag(jnp.where(mask, nugget, 1))


@jax.custom_jvp
def _quadratic_form(matrix, right):
    r"""Return $R^\top A^{-1} R$ for a positive definite matrix $A$ and a matrix $R$.

    Derivatives of a factorization take several solves at once; see `solve_both`.
    """
    half = _solve(jnp.linalg.cholesky(matrix), right)
    return half.T @ half


@_quadratic_form.defjvp
def _quadratic_form_jvp(primals, tangents):
    matrix, right = primals
    root = jnp.linalg.cholesky(matrix)
    half = _solve(root, right)
    whole = _solve(root, half, trans="T")
    turned = tangents[1].T @ whole
    return half.T @ half, turned + turned.T - whole.T @ tangents[0] @ whole


def _solve(root, right, trans="N"):
    return jax.scipy.linalg.solve_triangular(root, right, trans=trans, lower=True)


def _square(values):
    return jnp.sum(values * values)
