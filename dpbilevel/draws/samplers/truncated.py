r"""Normal values conditioned on an interval, however far out it lies.

With $S(x) = 1 - \Phi(x)$ and the Mills ratio $R(x) = S(x) / \varphi(x)$, for $z \ge 0$

$$\Lambda_z(t) = \log \frac{S(z)}{S(z + t)} = z t + \frac{t^2}{2}
    - \log \frac{R(z + t)}{R(z)},$$

in which nothing cancels or underflows: it is what distances from an end of the interval
are computed from.
"""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import erf, erfc
from jaxtyping import Array, Float

from ...privacy.keys import PRNGKey, derive
from ...privacy.noise import standard_exponential

Values = Float[Array, "..."]
_FAR = 5.0  # from here on the continued fraction is exact to rounding
_TERMS = 20
_NEWTON = 6
_WIDEST = 64.0  # e^{-Λ} is zero beyond, in float64 as well


def truncated_normal(
    mean: Float[Array, " n"],
    deviation: Float[Array, ""] | float,
    lower: Float[Array, " n"],
    upper: Float[Array, " n"],
    *,
    key: PRNGKey,
) -> Float[Array, " n"]:
    r"""Return independent normal values, each conditioned on [lower, upper].

    Ends may be infinite, and an interval may be a point. Values come by inversion, with
    $s$ the deviation: an interval that holds the mean is split there, a side chosen by
    its probability; on one side the distance $t$ from the end that is nearer to the
    mean solves $\Lambda_z(t) = E$ with an exponential $E$ conditioned on $E \le
    \Lambda_z(w)$, $w$ being the width. Newton's method decreases to the solution, since
    $\Lambda_z$ is convex and the first guess lies above it. Far ends are resolved to
    probabilities of $2^{-64}$ in float32 and $2^{-96}$ in float64, near ends to the
    rounding of $s$.
    """
    key_side, key_distance = derive(key, "side", "distance")
    low, high = (lower - mean) / deviation, (upper - mean) / deviation
    shape, dtype = low.shape, low.dtype
    mass_left, mass_right = _central(-low), _central(high)
    total = mass_left + mass_right
    chance = jnp.where(total > 0, mass_right / jnp.where(total > 0, total, 1), 1)
    coin = jnp.exp(-standard_exponential(shape, dtype, key=key_side)) < chance
    right = (low >= 0) | ((high > 0) & coin)
    near = jnp.maximum(jnp.where(right, low, -high), 0)
    far = jnp.where(right, high, -low)
    exponential = standard_exponential(shape, dtype, key=key_distance)
    distance = deviation * tail_distance(near, far - near, exponential)
    inside = (low < 0) & (high > 0)
    anchor = jnp.where(inside, mean, jnp.where(right, lower, upper))
    value = jnp.where(right, anchor + distance, anchor - distance)
    return jnp.clip(value, lower, upper)


def tail_distance(near: Values, width: Values, exponential: Values) -> Values:
    r"""Return the distance from `near` of a normal draw in the next `width` outwards.

    It solves $\Lambda_z(t) = E'$ for the end $z \ge 0$ and a width $w \le \infty$. For
    standard exponential $E$, $E' = -\log(1 - (1 - e^{-E})(1 - e^{-\Lambda_z(w)}))$ has
    their distribution conditioned on $E \le \Lambda_z(w)$.
    """
    last = tail_exponent(near, width)
    missing = jnp.expm1(-exponential) * -jnp.expm1(-last)  # in (-1, 0]
    # A sum of positive numbers keeps 1 + missing exact when it is close to zero.
    survival = jnp.exp(-last) - jnp.exp(-exponential) * jnp.expm1(-last)
    target = jnp.where(
        missing > -0.5, -jnp.log1p(jnp.maximum(missing, -0.5)), -jnp.log(survival)
    )
    tiny = jnp.finfo(near.dtype).tiny  # if both are zero
    first = 2 * target / (near + jnp.sqrt(near**2 + 2 * target) + tiny)

    def newton(_, t):
        excess = tail_exponent(near, t) - target
        return jnp.clip(t - excess * mills_ratio(near + t), 0, first)

    return jnp.minimum(jax.lax.fori_loop(0, _NEWTON, newton, first), width)


def tail_exponent(near: Values, distance: Values) -> Values:
    """Return -log P(Z > near + distance | Z > near), Z normal; distance cut at 64."""
    t = jnp.minimum(distance, _WIDEST)
    ratio = mills_ratio(near + t) / mills_ratio(near)
    return near * t + t**2 / 2 - jnp.log(ratio)


def log_probability(mean: Values, half_width: Values) -> Values:
    """Return log P(|Z + mean| <= half_width) of a standard normal Z, mean >= 0."""
    near = jnp.maximum(mean - half_width, 0)
    scale = jnp.log(mills_ratio(near)) - near**2 / 2 - 0.5 * math.log(2 * math.pi)
    beside = scale + jnp.log(-jnp.expm1(-tail_exponent(near, 2 * half_width)))
    around = _central(half_width - mean) + _central(half_width + mean)
    outside = mean >= half_width
    return jnp.where(outside, beside, jnp.log(jnp.where(outside, 1, around)))


def mills_ratio(x: Values) -> Values:
    r"""Return the normal tail probability beyond `x` >= 0 over the density at `x`.

    By the continued fraction $1 / (x + 1 / (x + 2 / (x + \dots)))$ from 5 on.
    """
    large = jnp.maximum(x, _FAR)
    tail = jnp.zeros_like(large)
    for k in range(_TERMS, 0, -1):  # unrolled: a loop takes longer than its divisions
        tail = k / (large + tail)
    small = jnp.minimum(x, _FAR)
    near = math.sqrt(math.pi / 2) * erfc(small * math.sqrt(0.5))
    return jnp.where(x < _FAR, near * jnp.exp(small**2 / 2), 1 / (large + tail))


def _central(x):
    """Return the normal probability between 0 and x; zero for a negative x."""
    return 0.5 * erf(jnp.maximum(x, 0) * math.sqrt(0.5))
