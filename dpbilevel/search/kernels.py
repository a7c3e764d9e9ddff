"""Kernels: covariance functions of losses, with derivatives in closed form."""

import abc
from typing import Any
from typing import ClassVar as AbstractVar  # for type checkers

import jax
import jax.numpy as jnp
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Float, Int
from typing_extensions import override

from .._checks import Checked, Positive

Scalar = Float[Array, ""]

# Candidate radii of a design, in length-scales.
_SHORTEST, _LONGEST, _TRIED = 1e-4, 3.0, 64


class AbstractKernel(Checked):
    """A covariance function of losses, with its derivatives in closed form.

    Attributes:
        variance: Scale of the covariance, in squared units of the loss.
        reach: Distance up to which evaluations inform a gradient.
    """

    variance: AbstractVar[float]
    reach: AbstractVar[float]

    @abc.abstractmethod
    def covariance(
        self, a: Float[Array, "m d"], b: Float[Array, "k d"], near: Float[Array, " d"]
    ) -> Float[Array, "m k"]:
        r"""Return the matrix of $k(a_i, b_j)$.

        Args:
            a: Points, one a row.
            b: Points.
            near: A point near which distances are precise; rounding errors grow with
                the distance to it.
        """

    @abc.abstractmethod
    def slope(
        self, theta: Float[Array, " d"], z: Float[Array, "m d"]
    ) -> Float[Array, "m d"]:
        r"""Return the gradients of $k(\theta, z_j)$ in $\theta$, one a row, finite."""

    @abc.abstractmethod
    def prior(self, theta: Float[Array, " d"]) -> Float[Array, "d d"]:
        r"""Return the covariance of the gradient at $\theta$ before any evaluation."""

    @abc.abstractmethod
    def radius(self, corners: Int[Array, ""], nugget: Scalar) -> Scalar:
        r"""Return the most informative radius of a regular simplex of points.

        Args:
            corners: Number of corners, at least two; two are a pair of opposite points.
            nugget: The variance of the noise of an evaluation.
        """


class AbstractStationary(AbstractKernel):
    r"""Stationary kernel $\sigma^2 \varphi(\|\theta - \theta'\|^2 / \ell^2)$."""

    lengthscale: Positive = 1.0
    variance: Positive = 1.0

    @abc.abstractmethod
    def _profile(self, s: Array) -> Array:
        r"""Return the profile $\varphi(s)$ of the kernel at each entry of $s$."""

    @abc.abstractmethod
    def _decay(self, s: Array) -> Array:
        r"""Return the decay $-2 \varphi'(s)$ of the profile at each entry of $s$."""

    @property
    @override
    def reach(self) -> float:
        return self.lengthscale

    @override
    def covariance(self, a, b, near):
        a, b = ((v - near[None]) / cast(self.reach, v) for v in (a, b))
        squares = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None]
        # Distances are differences, which default matrix products round too coarsely.
        products = jnp.matmul(a, b.T, precision="highest")
        distances = jnp.maximum(squares - 2 * products, 0)  # not negative by rounding
        return cast(self.variance, a) * self._profile(distances)

    def slope(self, theta, z):
        r"""Return the gradients of $k(\theta, z_j)$ in $\theta$, one a row."""
        offsets = (z - theta[None]) / cast(self.reach, z)
        decay = self._decay(jnp.sum(offsets * offsets, axis=1))
        scale = cast(self.variance, z) / cast(self.reach, z)
        return scale * decay[:, None] * offsets

    def prior(self, theta):
        """Return the prior covariance of a gradient, a multiple of the identity."""
        scale = cast(self.variance, theta) / cast(self.reach, theta) ** 2
        unit = self._decay(jnp.zeros((), theta.dtype))
        return scale * unit * jnp.eye(theta.size, dtype=theta.dtype)

    @override
    def radius(self, corners, nugget):
        corners = jnp.maximum(corners, 2).astype(nugget.dtype)
        noise = nugget / cast(self.variance, nugget)
        edge = 2 * corners / (corners - 1)  # squared, of a simplex of radius one

        def explained(r):  # variance of a gradient that a simplex explains
            apparent = self._profile(jnp.zeros_like(r)) - self._profile(edge * r * r)
            return (r * self._decay(r * r)) ** 2 / (apparent + noise)

        def best(shortest, longest):
            exponents = jnp.linspace(0, 1, _TRIED, dtype=nugget.dtype)
            tried = shortest * (longest / shortest) ** exponents
            return tried[jnp.argmax(explained(tried))]

        step = (_LONGEST / _SHORTEST) ** (1 / (_TRIED - 1))
        coarse = best(cast(_SHORTEST, nugget), cast(_LONGEST, nugget))
        return best(coarse / step, coarse * step) * cast(self.reach, nugget)


class RBF(AbstractStationary):
    r"""Gaussian kernel $\sigma^2 \exp(-\|\theta - \theta'\|^2 / (2 \ell^2))$.

    Args:
        lengthscale: $\ell > 0$, in units of the parameters.
        variance: $\sigma^2 > 0$, in squared units of the loss.
    """

    def _profile(self, s):
        return jnp.exp(-s / 2)

    _decay = _profile


class Matern52(AbstractStationary):
    r"""$k = \sigma^2 (1 + q + q^2/3) e^{-q}$, $q = \sqrt 5 \|\theta-\theta'\|/\ell$.

    Twice differentiable in mean square: the roughest half-integer Matérn kernel that
    the theory of the method covers.

    Args:
        lengthscale: $\ell > 0$, in units of the parameters.
        variance: $\sigma^2 > 0$, in squared units of the loss.
    """

    def _profile(self, s):
        return _matern(s)

    def _decay(self, s):
        return _matern_decay(s)


class Quadratic(AbstractKernel):
    r"""Quadratic kernel $\sigma^2 (\langle \theta, \theta' \rangle + 1)^2$.

    Not stationary: the method's theory does not cover it. It has $(d + 1)(d + 2)/2$
    features, so that many points in general position determine the gradient.

    Args:
        variance: $\sigma^2 > 0$, in squared units of the loss.
        reach: How far from the iterate points are looked for.
    """

    variance: Positive = 1.0
    reach: Positive = 1.0

    @override
    def covariance(self, a, b, near):
        return cast(self.variance, a) * (a @ b.T + 1) ** 2

    def slope(self, theta, z):
        r"""Return the gradients of $k(\theta, z_j)$ in $\theta$, one a row."""
        return 2 * cast(self.variance, z) * (z @ theta + 1)[:, None] * z

    def prior(self, theta):
        r"""Return the covariance of the gradient at $\theta$ before any evaluation."""
        eye = jnp.eye(theta.size, dtype=theta.dtype)
        outer = theta[:, None] * theta[None]
        return 2 * cast(self.variance, theta) * ((theta @ theta + 1) * eye + outer)

    @override
    def radius(self, corners, nugget):
        return cast(self.reach, nugget)


def cast(value: Any, like: Array) -> Array:
    """Convert a number to an array of the dtype of `like`."""
    return jnp.asarray(value, like.dtype)


@jax.custom_jvp
def _matern(s: Array) -> Array:
    q = jnp.sqrt(5 * s)
    return (1 + q + q * q / 3) * jnp.exp(-q)


@_matern.defjvp
def _matern_jvp(primals, tangents):
    # The chain rule through the square root divides by zero at equal points.
    return _matern(*primals), -_matern_decay(*primals) / 2 * tangents[0]


@jax.custom_jvp
def _matern_decay(s: Array) -> Array:
    q = jnp.sqrt(5 * s)
    return (5 / 3) * (1 + q) * jnp.exp(-q)


@_matern_decay.defjvp
def _matern_decay_jvp(primals, tangents):
    (s,) = primals
    return _matern_decay(s), -(25 / 6) * jnp.exp(-jnp.sqrt(5 * s)) * tangents[0]
