r"""Gradients under a Gaussian process, given evaluations.

The process is a function of mean zero plus an unknown constant: a common offset of all
losses, whose gradient is zero, is no evidence of a slope.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .kernels import AbstractKernel, cast

Scalar = Float[Array, ""]

# A trace below minus this share of the prior one is a loss of precision.
_LOST = 1e-8


class GradientPosterior(eqx.Module):
    r"""What evaluations at some points tell about the gradient at $\theta$.

    With $m$ points $D$, $K = k(D, D) + c_0 + \nu I$ and the slopes $G = \nabla_\theta
    k(\theta, D)$, the gradient has posterior mean $W y$ with $W = G K^{-1}$, the same
    linear map of everyone's losses, and covariance $\nabla k \nabla^\top - G K^{-1}
    G^\top$, which does not depend on losses. The constant $c_0$ is `constant` times the
    variance.

    Attributes:
        theta: Where the gradient is sought.
        points: One a row.
        mask: Which rows are points; the others change nothing.
        nugget: $\nu$, the variance of an evaluation's noise, rounding included.
        root: The Cholesky factor of $K$, the identity on rows that are no points.
        explained: $L^{-1} G^\top$.
        total: The covariance before any evaluation.
    """

    kernel: AbstractKernel
    constant: Scalar
    theta: Float[Array, " d"]
    points: Float[Array, "m d"]
    mask: Bool[Array, " m"]
    nugget: Scalar
    root: Float[Array, "m m"]
    explained: Float[Array, "m d"]
    total: Float[Array, "d d"]

    @property
    def prior_trace(self) -> Scalar:
        """The trace of the covariance before any evaluation."""
        return jnp.trace(self.total)

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """The posterior covariance of the gradient."""
        return self.total - self.explained.T @ self.explained

    @property
    def trace(self) -> Scalar:
        """Its trace; NaN where points are too close for the nugget."""
        return _difference(self.prior_trace, self.explained)

    @property
    def weights(self) -> Float[Array, "d m"]:
        """$W$; its columns of rows that are no points are zero."""
        solve = jax.scipy.linalg.solve_triangular
        return solve(self.root, self.explained, trans="T", lower=True).T

    def trace_with(
        self, points: Float[Array, "b d"], mask: Bool[Array, " b"]
    ) -> Scalar:
        """The trace after evaluations at further points.

        Args:
            points: One a row.
            mask: Which rows are points.

        Returns:
            Infinity where rounding left no trace, or a negative one.
        """
        across = _masked(self._prior(self.points, points), self.mask, mask)
        solve = jax.scipy.linalg.solve_triangular
        known = solve(self.root, across, lower=True)
        new = self._prior(points, points) - known.T @ known
        slope = self.kernel.slope(self.theta, points) - known.T @ self.explained
        root = _root(new, mask, self.nugget)
        gained = solve(root, jnp.where(mask[:, None], slope, 0), lower=True)
        trace = _difference(self.trace, gained)
        return jnp.where(trace >= -_LOST * self.prior_trace, trace, jnp.inf)

    def _prior(self, a, b):
        constant = self.constant * cast(self.kernel.variance, a)
        return self.kernel.covariance(a, b, self.theta) + constant


def gradient_posterior(
    kernel: AbstractKernel,
    theta: Float[Array, " d"],
    points: Float[Array, "m d"],
    mask: Bool[Array, " m"] | None = None,
    *,
    nugget: float | Scalar,
    constant: float | Scalar = 1e4,
) -> GradientPosterior:
    """The posterior of the gradient at `theta`, whatever the losses were.

    Args:
        kernel: The covariance of losses; not fitted to anyone's.
        theta: Where the gradient is sought.
        points: One a row.
        mask: Which rows are points; all when omitted.
        nugget: The variance of an evaluation's noise, at least a little above zero.
        constant: The variance of the unknown constant, in variances of the kernel.
            Zero takes losses for centred; 1e4 leaves at most 1e-4 of the gradient that
            a constant loss would feign.

    Raises:
        ValueError: `theta` is not in double precision.
    """
    double("gradient_posterior", theta)
    mask = jnp.ones(len(points), bool) if mask is None else mask
    nugget, constant = cast(nugget, theta), cast(constant, theta)
    covariance = kernel.covariance(points, points, theta)
    whole = covariance + constant * cast(kernel.variance, theta)
    root = _root(whole, mask, nugget)
    slope = jnp.where(mask[:, None], kernel.slope(theta, points), 0)
    explained = jax.scipy.linalg.solve_triangular(root, slope, lower=True)
    return GradientPosterior(
        kernel,
        constant,
        theta,
        points,
        mask,
        nugget,
        root,
        explained,
        kernel.prior(theta),
    )


def double(owner: str, theta: Array) -> None:
    """Raises unless `theta` is in double precision.

    Args:
        owner: What needs it.
        theta: A point.

    Raises:
        ValueError: It is not; the message says what to do.
    """
    if jnp.result_type(theta) != jnp.float64:
        raise ValueError(
            f"{owner}: differences of nearby losses need float64, got a point of "
            f"{jnp.result_type(theta).name}. Set jax.config.update('jax_enable_x64', "
            "True), or run under jax.enable_x64(True), and give a float64 w0; "
            "dpbilevel.search does both."
        )


def _masked(matrix, rows, columns):
    return jnp.where(rows[:, None] & columns[None], matrix, 0)


def _root(matrix, mask, nugget):
    """The Cholesky factor with the nugget, the identity on rows that are no points."""
    diagonal = jnp.where(mask, nugget, 1)
    return jnp.linalg.cholesky(_masked(matrix, mask, mask) + jnp.diag(diagonal))


def _difference(trace, explained):
    return trace - jnp.sum(explained * explained)
