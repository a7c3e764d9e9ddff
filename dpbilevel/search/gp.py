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
    r"""The posterior of the gradient at $\theta$ by evaluations at some points.

    With $m$ points $D$, $K = k(D, D) + c_0 1 1^\top + \nu I$ and the slopes $G =
    \nabla_\theta k(\theta, D)$, the gradient has posterior mean $W y$ with $W = G
    K^{-1}$, the same linear map of everyone's losses, and covariance $\nabla k
    \nabla^\top - G K^{-1} G^\top$, which does not depend on losses.

    Attributes:
        kernel: $k$.
        theta: Where the gradient is sought.
        points: One a row.
        mask: Which rows are points; the others change nothing.
        nugget: $\nu$, the variance of an evaluation's noise, rounding included.
        precision: $1 / c_0$, the inverse variance of the unknown constant.
        root: $L$, the Cholesky factor of $k(D, D) + \nu I$, the identity on rows that
            are no points.
        explained: $L^{-1} G^\top$.
        ones: $L^{-1} 1$.
        total: The covariance before any evaluation.
    """

    kernel: AbstractKernel
    theta: Float[Array, " d"]
    points: Float[Array, "m d"]
    mask: Bool[Array, " m"]
    nugget: Scalar
    precision: Scalar
    root: Float[Array, "m m"]
    explained: Float[Array, "m d"]
    ones: Float[Array, " m"]
    total: Float[Array, "d d"]

    @property
    def prior_trace(self) -> Scalar:
        """The trace of the covariance before any evaluation."""
        return jnp.trace(self.total)

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """The posterior covariance of the gradient."""
        shared, share = self._shared
        known = self.explained.T @ self.explained
        return self.total - known + shared[:, None] * shared[None] / share

    @property
    def trace(self) -> Scalar:
        """Its trace; NaN where points are too close for the nugget."""
        return self._trace_after(*self._shared, _square(self.explained))

    @property
    def weights(self) -> Float[Array, "d m"]:
        """$W$; its columns of rows that are no points are zero."""
        shared, share = self._shared
        explained = self.explained - self.ones[:, None] * (shared / share)[None]
        return _solve(self.root, explained, trans="T").T

    def trace_with(
        self, points: Float[Array, "b d"], mask: Bool[Array, " b"]
    ) -> Scalar:
        """The trace after evaluations at further points, those rows that are in `mask`.

        Infinity where rounding left no trace, or a negative one.
        """
        across = self.kernel.covariance(self.points, points, self.theta)
        known = _solve(self.root, _masked(across, self.mask, mask))
        among = self.kernel.covariance(points, points, self.theta) - known.T @ known
        slope = self.kernel.slope(self.theta, points) - known.T @ self.explained
        rest = 1 - known.T @ self.ones  # of the constant at the new points
        right = jnp.concatenate([slope, rest[:, None]], axis=1)  # one solve for both
        gained = _explained(
            _covariance(among, mask, self.nugget), jnp.where(mask[:, None], right, 0)
        )
        shared, share = self._shared
        trace = self._trace_after(
            shared + gained[:-1, -1],
            share + gained[-1, -1],
            _square(self.explained) + jnp.trace(gained[:-1, :-1]),
        )
        return jnp.where(trace >= -_LOST * self.prior_trace, trace, jnp.inf)

    @property
    def _shared(self) -> tuple[Float[Array, " d"], Scalar]:
        """What the constant takes back of the gradient, by the rank-one update."""
        return self.explained.T @ self.ones, self.precision + _square(self.ones)

    def _trace_after(self, shared, share, explained) -> Scalar:
        # Before any point nothing is shared, and a constant of variance zero never is.
        return self.prior_trace - explained + _square(shared) / share


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
        kernel: As in `GradientPosterior`; not fitted to anyone's losses.
        theta: Where the gradient is sought.
        points: The points that were evaluated, one a row.
        mask: Which rows are points; all rows when omitted.
        nugget: The variance of an evaluation's noise, at least a little above zero.
        constant: The variance of the unknown constant, in variances of the kernel.
            Zero takes losses for centred; 1e4 leaves at most 1e-4 of the gradient that
            a constant loss would feign.

    Raises:
        ValueError: `theta` is not in double precision.
    """
    if jnp.result_type(theta) != jnp.float64:
        raise ValueError(
            "GradientInformativeBO: differences of nearby losses need float64, got a "
            f"point of {jnp.result_type(theta).name}. Set jax.config.update("
            "'jax_enable_x64', True), or run under jax.enable_x64(True), and give a "
            "float64 w0; dpbilevel.search.minimize does both."
        )
    mask = jnp.ones(len(points), bool) if mask is None else mask
    nugget, constant = cast(nugget, theta), cast(constant, theta)
    precision = 1 / (constant * cast(kernel.variance, theta))
    matrix = kernel.covariance(points, points, theta)
    root = jnp.linalg.cholesky(_covariance(matrix, mask, nugget))
    slope = jnp.where(mask[:, None], kernel.slope(theta, points), 0)
    known = root, *solved(root, slope, mask.astype(theta.dtype))
    given = kernel, theta, points, mask, nugget, precision
    return GradientPosterior(*given, *known, kernel.prior(theta))


def solved(
    root: Float[Array, "m m"], matrix: Float[Array, "m d"], vector: Float[Array, " m"]
) -> tuple[Float[Array, "m d"], Float[Array, " m"]]:
    """Solves with the lower triangular `root` for the columns of `matrix` and `vector`.

    In one call: under `jax.vmap` jaxlib's triangular solves wait for threads of the
    pool that they run in, and where two of them run at once on two cores, forever.
    """
    right = jnp.concatenate([matrix, vector[:, None]], axis=1)
    found = _solve(root, right)
    return found[:, :-1], found[:, -1]


def _masked(matrix, rows, columns):
    return jnp.where(rows[:, None] & columns[None], matrix, 0)


def _covariance(matrix, mask, nugget):
    """With the nugget, and the identity on rows that are no points."""
    return _masked(matrix, mask, mask) + jnp.diag(jnp.where(mask, nugget, 1))


@jax.custom_jvp
def _explained(matrix, right):
    r"""$R^\top A^{-1} R$, whose derivatives take one more triangular solve.

    Those of a factorization take several at once, which may wait for each other, see
    `solved`.
    """
    half = _solve(jnp.linalg.cholesky(matrix), right)
    return half.T @ half


@_explained.defjvp
def _explained_moved(at, moves):
    matrix, right = at
    root = jnp.linalg.cholesky(matrix)
    half = _solve(root, right)
    whole = _solve(root, half, trans="T")
    turned = moves[1].T @ whole
    return half.T @ half, turned + turned.T - whole.T @ moves[0] @ whole


def _solve(root, right, trans="N"):
    return jax.scipy.linalg.solve_triangular(root, right, trans=trans, lower=True)


def _square(values):
    return jnp.sum(values * values)
