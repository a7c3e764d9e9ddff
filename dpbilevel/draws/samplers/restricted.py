r"""Draws from $\mathcal N(a, s^2 I)$ restricted to a set, by a fixed number of tries.

A box needs one try. On a ball and on the simplex a try is accepted with a probability
that is bounded from below before any mean is seen; when all tries are rejected the
projection of the mean is returned, and the chance of that counts in the guarantee of
the sampler.
"""

import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Array, Bool, Float, PyTree

from ...privacy.exact.normal import standard_normal
from ...privacy.keys import PRNGKey, derive
from ...privacy.noise import standard_exponential
from ...sets import AbstractSet, Ball, Box, Simplex, corners, parts
from .truncated import log_probability, mills_ratio, tail_exponent, truncated_normal

_HALVINGS = 24  # of a bisection
_ROUNDING = 0.999  # what the last halvings would still gain
_CELLS_PER_DEVIATION = 64  # of the distance of a mean from the center
_MOST_CELLS = 4096
_LEVELS = 256  # quantiles of Q


def restricted_normal(
    feasible: AbstractSet,
    mean: PyTree,
    deviation: Float[Array, ""] | float,
    tries: int,
    *,
    key: PRNGKey,
) -> PyTree:
    """Return a normal point conditioned on a set; the mean projected if tries fail.

    The set is a box (or a product of boxes), which needs one try, a ball, or a simplex,
    on which the density refers to the volume of its hyperplane. The mean $a$ may be
    anywhere, and the point has its structure; the deviation is $s > 0$.
    """
    point, accepted = try_normal(feasible, mean, deviation, tries, key=key)
    return optax.tree.where(accepted, point, feasible.project(mean))


def try_normal(
    feasible: AbstractSet,
    mean: PyTree,
    deviation: Float[Array, ""] | float,
    tries: int,
    *,
    key: PRNGKey,
) -> tuple[PyTree, Bool[Array, ""]]:
    """Return the point of the first accepted try, and whether there is one.

    Arguments are those of `restricted_normal`; given that a try was accepted the point
    has exactly the distribution that is asked for.
    """
    check_set(feasible)
    flat, unravel = jax.flatten_util.ravel_pytree(mean)
    deviation = jnp.asarray(deviation, flat.dtype)
    if isinstance(feasible, Ball):
        at_zero = jax.tree.map(jnp.zeros_like, mean)
        middle = at_zero if feasible.center is None else feasible.center
        center = jax.flatten_util.ravel_pytree(middle)[0].astype(flat.dtype)
        radius = jnp.asarray(feasible.radius, flat.dtype) / deviation
        offset = (flat - center) / deviation
        points, accepted = _ball(offset, radius, tries, key)
        points = center[None, :] + deviation * points
    elif isinstance(feasible, Simplex):
        points, accepted = _simplex(flat, deviation, feasible.scale, tries, key)
    else:
        both = corners(feasible, mean)
        lower, upper = (jax.flatten_util.ravel_pytree(end)[0] for end in both)
        point = truncated_normal(flat, deviation, lower, upper, key=key)
        return unravel(point), jnp.asarray(True)
    # Rounding may leave the set.
    first = feasible.project(unravel(points[jnp.argmax(accepted)]))
    return first, jnp.any(accepted)


def check_set(feasible: AbstractSet) -> None:
    """Raise `ValueError` if a set is neither box, ball nor simplex."""
    boxes = all(isinstance(part, Box) for part in parts(feasible))
    if not boxes and not isinstance(feasible, Ball | Simplex):
        raise ValueError(
            "restricted_normal: the set must be a Box or boxes, a Ball or a Simplex."
        )


def diameter(feasible: AbstractSet, dimension: int) -> float:
    """Return the diameter of a set, also of a box whose bounds are plain numbers."""
    if (
        isinstance(feasible, Box)
        and np.ndim(feasible.lower) == np.ndim(feasible.upper) == 0
        and isinstance(feasible.lower, int | float)
    ):
        return math.sqrt(dimension) * float(feasible.upper - feasible.lower)
    return float(feasible.diameter)


def acceptance(
    feasible: AbstractSet, dimension: int, deviation: float, reach: float
) -> float:
    r"""Return a lower bound on the chance that a `restricted_normal` try is accepted.

    1 on boxes. On the simplex, with $d$ coordinates and scale $S$, whatever the mean,

    $$p \ge \frac{1}{e \sqrt{12}} \frac{1}{\min(s \sqrt d, S)
        \max(\sqrt{2 / \pi} / s, d / S)} .$$

    Proof. The sum $V$ of independent normal values with means $a_i + \lambda$, each
    conditioned on being non-negative, has a log-concave density $f$, and $\lambda$ is
    chosen such that $E V = S$; a try is accepted with probability $f(S) / \sup f_j$,
    $f_j$ being the density of the coordinate with the largest mean. $f(E V) \ge
    e^{-1} \sup f$ (Fradelizi 1997) and $\sup f \ge 1 / \sqrt{12 \operatorname{Var} V}$,
    as of all densities under a bound the uniform one has the least variance.
    Conditioning shrinks the variance of a normal value below $s^2$, and log-concave
    densities on the half-line have a variance of at most their squared mean (Borell),
    so that $\operatorname{Var} V \le \min(d s^2, S^2)$. With $a_j + \lambda \ge 0$,
    $\sup f_j \le 2 / (s \sqrt{2 \pi})$; otherwise $f_j$ decreases, so that $\sup f_j
    \le 1 / E V_j \le d / S$.

    On a ball, from which the mean is at most `reach`, it is that of `_ball_acceptance`.
    """
    if isinstance(feasible, Ball):
        radius = float(feasible.radius) / deviation
        return _ball_acceptance(dimension, radius, reach / deviation)
    if isinstance(feasible, Simplex):
        scale = float(feasible.scale)
        spread = min(deviation * math.sqrt(dimension), scale)
        height = max(math.sqrt(2 / math.pi) / deviation, dimension / scale)
        return 1 / (math.e * math.sqrt(12) * spread * height)
    return 1.0


def reach(
    feasible: AbstractSet, dimension: int, deviation: float, probability: float
) -> float:
    r"""Return how far from a ball noise takes points, but for `probability`; else 0.

    It is exceeded with at most that probability: with the ball at zero, $\|x + \sigma
    \xi\|^2 = (\|x\| + \sigma \xi_1)^2 + \sigma^2 \chi^2_{d-1}$, and each of the two is
    beyond its quantile with half the probability.
    0 on other sets, whose `acceptance` does not depend on it.
    """
    if not isinstance(feasible, Ball):
        return 0.0
    radius = float(feasible.radius)
    along = radius + deviation * scipy.stats.norm.isf(probability / 2)
    others = dimension - 1
    beside = scipy.stats.chi2.isf(probability / 2, others) if others else 0
    return float(math.hypot(along, deviation * math.sqrt(beside)) - radius)


def _ball(offset, radius, tries, key):
    r"""Return points tried in a ball of radius $r$ about 0, and an accepted mask.

    With $A = \|a\|$, $u = a / A$ and $x = x_1 u + w$, $w \perp u$, $Q = \|w\|^2$: the
    marginal density of $w$ is proportional to $e^{-Q/2 + \psi(Q)}$ with $\psi(Q) =
    \log P(|Z + A| \le \sqrt{r^2 - Q})$, and given $w$ the coordinate $x_1$ is a normal
    value conditioned on an interval. The set of $(x_1, Q)$ being convex, $\psi$ is
    concave (Prékopa), so that $\psi(Q) \le \psi(q) - \theta (Q - q)$ with $\theta =
    -\psi'(q)$. Hence $w$ is proposed with the variance $1 / (1 + 2 \theta)$ and
    accepted with probability $\exp(\psi(Q) - \psi(q) + \theta (Q - q))$, exactly, at
    any $q$; the one with $q = E Q$ accepts most often.
    """
    keys = derive(key, "proposal", "accept", "side")
    size, dtype = offset.shape[0], offset.dtype
    length = jnp.linalg.norm(offset)
    axis = jnp.zeros_like(offset).at[0].set(1)
    unit = jnp.where(length > 0, offset / jnp.where(length > 0, length, 1), axis)
    middle, slope = _tangent(length, radius, size)
    draws = standard_normal(jax.ShapeDtypeStruct((tries, size), dtype), key=keys[0])
    beside = draws - (draws @ unit)[:, None] * unit[None, :]  # w
    beside = beside / jnp.sqrt(1 + 2 * slope)
    square = jnp.sum(beside**2, 1)
    inside = square < radius**2
    half = jnp.sqrt(jnp.where(inside, radius**2 - square, 1))  # 1: rejected anyway
    top = log_probability(length, jnp.sqrt(radius**2 - middle))
    log_ratio = log_probability(length, half) - top + slope * (square - middle)
    coin = standard_exponential((tries,), dtype, key=keys[1])
    means = jnp.broadcast_to(length, (tries,))
    along = truncated_normal(means, 1.0, -half, half, key=keys[2])
    return beside + along[:, None] * unit[None, :], inside & (coin >= -log_ratio)


def _tangent(length, radius, size):
    r"""Return (q, theta) of `_ball`, solving $q = (d - 1) / (1 + 2 \theta(q))$."""

    def slope_at(q):
        half = jnp.sqrt(radius**2 - q)
        near = jnp.maximum(length - half, 0)
        # The density at the nearer end over the probability between the ends.
        scale = -((length - half) ** 2) / 2 - 0.5 * math.log(2 * math.pi)
        front = jnp.exp(scale - log_probability(length, half))
        back = front * jnp.exp(-2 * length * half)
        hazard = 1 / (mills_ratio(near) * -jnp.expm1(-tail_exponent(near, 2 * half)))
        front = jnp.where(length >= half, hazard, front)
        back = jnp.where(length >= half, hazard * jnp.exp(-2 * length * half), back)
        return (front + back) / (2 * half)

    def halve(_, ends):
        low, high = ends
        q = (low + high) / 2
        below = q * (1 + 2 * slope_at(q)) < size - 1
        return jnp.where(below, q, low), jnp.where(below, high, q)

    if size == 1:
        return jnp.zeros_like(length), jnp.zeros_like(length)
    most = jnp.minimum(size - 1.0, radius**2 * (1 - 1e-4)).astype(length.dtype)
    q, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(length), most))
    return q, slope_at(q)


def _simplex(mean, deviation, scale, tries, key):
    r"""Return points tried on the simplex of sum $S$, and a mask of those accepted.

    A common shift $\lambda$ of the mean leaves the distribution as it is. All
    coordinates but that of the largest mean, $j$, are proposed as normal values
    conditioned on being non-negative; $w_j$ is what they leave of $S$, and the try is
    accepted with probability $f_j(w_j) / \sup f_j$, which is the distribution exactly,
    at any $\lambda$. The one at which $E \sum_i w_i = S$ is found by bisection: there
    tries are accepted often.
    """
    keys = derive(key, "proposal", "accept")
    size, dtype = mean.shape[0], mean.dtype
    largest = jnp.argmax(mean)
    top = mean[largest]

    def total(shift):
        z = (mean + shift) / deviation
        beyond = 1 / mills_ratio(jnp.maximum(-z, 0)) + jnp.minimum(z, 0)
        ahead = z + jnp.exp(-(z**2) / 2) / (
            math.sqrt(2 * math.pi) * jax.scipy.special.ndtr(jnp.maximum(z, 0))
        )
        return deviation * jnp.sum(jnp.where(z < 0, beyond, ahead))

    def halve(_, ends):
        low, high = ends
        shift = (low + high) / 2
        below = total(shift) < scale
        return jnp.where(below, shift, low), jnp.where(below, high, shift)

    ends = (-top - size * deviation**2 / scale, scale - top)
    shift, _ = jax.lax.fori_loop(0, 2 * _HALVINGS, halve, ends)
    means = jnp.broadcast_to(mean + shift, (tries, size)).reshape(-1)
    zero, far = jnp.zeros_like(means), jnp.full_like(means, jnp.inf)
    values = truncated_normal(means, deviation, zero, far, key=keys[0])
    values = values.reshape(tries, size).at[:, largest].set(0)  # w_j comes last
    left = scale - jnp.sum(values, 1)
    center = top + shift
    gap = (left - jnp.maximum(center, 0)) ** 2 / 2
    gap = gap + jnp.maximum(-center, 0) * left
    coin = standard_exponential((tries,), dtype, key=keys[1])
    accepted = (left >= 0) & (coin >= gap / deviation**2)
    return values.at[:, largest].set(left), accepted


def _ball_acceptance(dimension: int, radius: float, reach: float) -> float:
    r"""Return a lower bound on a ball's acceptance, for means at most `reach` outside.

    Let $Z(A)$ be the probability of the ball and $B(A) = \min_\theta
    \sup_Q (\psi_A(Q) + \theta Q) - \frac{d-1}{2} \log(1 + 2 \theta)$ the logarithm of
    what is proposed in all, so that $p(A) = Z(A) e^{-B(A)}$. $\psi_A$, hence $Z$ and
    $B$, decrease in $A$; thus on a cell $[A_0, A_1]$

    $$p(A) \ge Z(A_1) e^{-B(A_0)} = p(A_1) e^{B(A_1) - B(A_0)} .$$

    $p(A_1)$ itself is $E e^{\psi(Q) - \psi(q) + \theta (Q - q)}$ with $(1 + 2 \theta) Q
    \sim \chi^2_{d-1}$; the integrand increases up to $q$ and decreases from there, so
    that its smaller end bounds it in every interval of quantiles.
    """
    if dimension == 1:
        return 1.0
    most = radius + reach
    start = max(0.0, math.sqrt(max(radius**2 - dimension, 0.0)) - 10.0)
    cells = math.ceil(_CELLS_PER_DEVIATION * (most - start))
    edges = np.linspace(start, most, 1 + min(max(cells, 1), _MOST_CELLS))
    edges = np.unique(np.concatenate([[0.0], edges]))[:, None]
    low = np.zeros_like(edges)
    high = np.full_like(edges, min(dimension - 1.0, radius**2 * (1 - 1e-4)))
    for _ in range(_HALVINGS):
        q = (low + high) / 2
        below = q * (1 + 2 * _slope(edges, radius, q)) < dimension - 1
        low, high = np.where(below, q, low), np.where(below, high, q)
    slope = _slope(edges, radius, low)
    top = _psi(edges, radius, low)
    proposed = top + slope * low - 0.5 * (dimension - 1) * np.log1p(2 * slope)
    levels = np.linspace(0, 1, _LEVELS + 1)[None, 1:-1]
    squares = scipy.stats.chi2.ppf(levels, dimension - 1) / (1 + 2 * slope)
    with np.errstate(invalid="ignore", divide="ignore"):
        log_ratio = _psi(edges, radius, squares) - top + slope * (squares - low)
    values = np.where(squares < radius**2, np.exp(np.minimum(log_ratio, 0)), 0)
    # The two outermost intervals do not count.
    chance = np.minimum(values[:, :-1], values[:, 1:]).sum(1) / _LEVELS
    drop = np.diff(proposed[:, 0])
    return _ROUNDING * float(min(chance[0], np.min(chance[1:] * np.exp(drop))))


def _psi(length, radius, square):
    half = np.sqrt(np.maximum(radius**2 - square, 1e-300))
    front = scipy.special.log_ndtr(half - length)
    return front + np.log1p(-np.exp(scipy.special.log_ndtr(-half - length) - front))


def _slope(length, radius, square):
    half = np.sqrt(radius**2 - square)
    scale = -0.5 * math.log(2 * math.pi) - _psi(length, radius, square)
    front = np.exp(scale - (half - length) ** 2 / 2)
    back = np.exp(scale - (half + length) ** 2 / 2)
    return (front + back) / (2 * half)
