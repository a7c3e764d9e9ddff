"""Privacy profiles by closed forms and by quadrature, in NumPy and SciPy alone.

Nothing here discretizes a privacy loss. A composition's profile is the inverse Laplace
transform of its losses' moment generating function: for any $c > 0$,

    delta(eps) = 1 / (2 pi i) * integral over Re(s) = c of
                 M(s) exp(-s eps) / (s (s + 1)) ds,    M(s) = E exp(s L),

because 1 / (s (s + 1)) is the Laplace transform of 1 - exp(-u). At the best $c$ the
integrand has the size of delta itself, so small deltas keep their relative precision.
"""

import dataclasses
import fractions
import math
from collections.abc import Callable

import numpy as np
import scipy.optimize
import scipy.stats
from scipy.special import erfcx, gammaln, log_ndtr, ndtr


def gaussian(mu, epsilon):
    """The profile of a Gaussian whose mean moves by `mu` standard deviations."""
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    root = math.sqrt(2)
    if near < -20:
        return float(ndtr(-near) - math.exp(epsilon + log_ndtr(-far)))
    gap = erfcx(near / root) - erfcx(far / root)
    return float(gap * math.exp(-(near**2) / 2) / 2)


def removed(rate, mu, epsilon):
    """A mixture of mean 0 or `mu` against mean 0, one draw."""
    outer = math.exp(epsilon)
    return rate * gaussian(mu, math.log1p((outer - 1) / rate))


def added(rate, mu, epsilon):
    """Mean 0 against a mixture of mean 0 or `mu`, one draw."""
    outer = math.exp(epsilon)
    kept = 1 - outer * (1 - rate)
    if kept <= 0:
        return 0.0
    return kept * gaussian(mu, math.log(outer * rate / kept))


def replaced(rate, mu, epsilon):
    """A mixture of mean 0 or `mu` / 2 against one of mean 0 or -`mu` / 2, one draw."""

    def log_ratio(x):
        up, down = (math.log1p(rate * math.expm1(v)) for v in tilts(x, mu / 2))
        return up - down - epsilon

    def tilts(x, shift):
        return x * shift - shift**2 / 2, -x * shift - shift**2 / 2

    edge = scipy.optimize.brentq(log_ratio, -60, 60, xtol=1e-14)
    tails = [
        (1 - rate) * ndtr(-edge) + rate * ndtr(m - edge) for m in (mu / 2, -mu / 2)
    ]
    return tails[0] - math.exp(epsilon) * tails[1]


def pure(most, epsilon):
    """Of the worst mechanism without delta whose epsilon is `most`."""
    return max(0.0, -math.expm1(epsilon - most)) / (1 + math.exp(-most))


def best_of(mean, shape, mu, epsilon):
    """A bound on the profile of the best of a random number K of `mu`-GDP runs.

    The chances of K are those of `Repetitions`. The smaller one of the two bounds of
    "Private selection" in docs/mathematics.md: by profiles and by Renyi divergences.
    """
    chances = _repetitions(mean, shape)
    numbers = np.arange(len(chances))
    quantiles = np.linspace(-30 - mu, 12, 2001)

    def slope(log_chance):  # the mean of K s^(K - 1) at a chance s
        powers = np.exp(np.multiply.outer(log_chance, numbers[1:] - 1))
        return powers @ (numbers * chances)[1:]

    near, far = slope(log_ndtr(-quantiles)), slope(log_ndtr(-quantiles - mu))
    y = np.linspace(-12, 12, 4001)  # the privacy loss is mu y + mu^2 / 2
    tilts = np.exp(epsilon - mu * y - mu**2 / 2)
    most = [max(0.0, np.max(near - tilt * far)) for tilt in tilts]
    law = np.exp(-(y**2) / 2) * (y[1] - y[0]) / math.sqrt(2 * math.pi)
    orders = 1 + np.geomspace(1e-3, 1e4, 1000)[:, None]
    logs = orders * np.log(near) - (orders - 1) * np.log(far)
    orders = orders[:, 0]
    rise = (orders - 1) * (orders * mu**2 / 2 - epsilon + np.log1p(-1 / orders))
    log_delta = np.max(logs, axis=1) + rise - np.log(orders)
    return min(float(law @ np.asarray(most)), math.exp(np.min(log_delta)))


def _repetitions(mean, shape):
    """The chances of K = 0, 1, ...: of a Poisson or a negative binomial law."""
    most = math.ceil(60 * mean * (1 + (0 if math.isinf(shape) else 1 / (shape + 0.1))))
    numbers = np.arange(most + 1)
    if math.isinf(shape):
        return scipy.stats.poisson.pmf(numbers, mean)

    def chances(log_gamma):
        k = numbers[1:]
        logs = k * np.log1p(-np.exp(log_gamma)) + gammaln(k + shape) - gammaln(k + 1)
        weights = np.concatenate([np.zeros(1), np.exp(logs - np.max(logs))])
        return weights / weights.sum()

    found = scipy.optimize.brentq(lambda g: chances(g) @ numbers - mean, -12, -1e-9)
    return chances(found)


@dataclasses.dataclass(frozen=True)
class Loss:
    """One release: the logarithm of its loss's moment generating function.

    Attributes:
        log_moment: From an array of complex orders to the logarithms.
        idle: The probability of a loss of exactly zero, which has no delta.
    """

    log_moment: Callable
    idle: float = 0.0


def gaussian_loss(mu):
    return Loss(lambda s: s * (s + 1) * mu**2 / 2)


def pure_loss(most):
    """Of randomized response, which any mechanism without delta post-processes."""
    chance = 1 / (1 + math.exp(-most))
    return _quadrature(np.array([most, -most]), np.array([chance, 1 - chance]), 0.0)


def removed_loss(rate, mu):
    return _quadrature(*_nodes(rate, mu, lambda up, _: up, rate))


def added_loss(rate, mu):
    return _quadrature(*_nodes(rate, mu, lambda up, _: -up, 0.0))


def replaced_loss(rate, mu):
    return _quadrature(*_nodes(rate, mu / 2, lambda up, down: up - down, rate))


def subset_loss(rate, mu):
    """The symmetric loss whose profile at non-negative epsilon is that of `removed`."""
    points, weights = np.polynomial.legendre.leggauss(16)
    # Close together at the start: there the mass is, and the transform oscillates.
    edges = mu / 2 + (30 + 12 * mu) * np.linspace(0, 1, 121) ** 2
    half = np.diff(edges)[:, None] / 2
    x = ((edges[:-1, None] + half) + half * points).ravel()
    loss = _mixed(rate, mu * x - mu**2 / 2)
    mass = (
        (half * weights).ravel() * np.exp(-(x**2) / 2 + loss) / math.sqrt(2 * math.pi)
    )
    idle = (1 - rate) * (1 - 2 * ndtr(-mu / 2))
    losses, masses = np.append(loss, -loss), np.append(mass, mass * np.exp(-loss))
    return _quadrature(losses, masses, idle)


def allocated_losses(mu):
    """Of a record in one of two releases: replaced, removed and added.

    By a product of equispaced nodes. A moved law is the standard one times its ratio.
    """
    x = np.linspace(-10 - mu, 10 + mu, 181)
    law = np.exp(-(x**2) / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    mass = np.outer(law, law).ravel()
    up, down = (np.exp(sign * x * mu - mu**2 / 2) for sign in (1.0, -1.0))
    up, down = ((v[:, None] + v[None, :]).ravel() / 2 for v in (up, down))
    return {
        "replaced": _quadrature(np.log(up / down), mass * up, 0.0),
        "removed": _quadrature(np.log(up), mass * up, 0.0),
        "added": _quadrature(-np.log(up), mass, 0.0),
    }


def _mixed(rate, log_ratio):
    return log_ratio if rate == 1 else np.log1p(rate * np.expm1(log_ratio))


def _nodes(rate, shift, combine, moving):
    """Equispaced nodes, which integrate analytic bells to machine precision."""
    x = np.linspace(-30 - 12 * shift, 30 + 12 * shift, 1501)
    up, down = (_mixed(rate, sign * x * shift - shift**2 / 2) for sign in (1.0, -1.0))
    law = moving * np.exp(-((x - shift) ** 2) / 2) + (1 - moving) * np.exp(-(x**2) / 2)
    mass = law * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    kept = mass > 0
    return combine(up, down)[kept], mass[kept], 0.0


def _quadrature(losses, masses, idle):
    def log_moment(s):
        # Minus one, to keep the digits of small losses.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.log1p(np.expm1(np.multiply.outer(s, losses)) @ masses)

    return Loss(log_moment, idle)


UPS = np.linspace(0.02, 1.0, 25)


def composed(parts, epsilon, accuracy=1e-9):
    """The profile of a composition at `epsilon` > 0.

    Args:
        parts: Pairs of a `Loss` and how many releases have it.
        epsilon: Where.
        accuracy: The relative error of cutting the line off, at most.
    """

    def exponent(s):
        log_moment = sum(count * loss.log_moment(s) for loss, count in parts)
        return log_moment - s * epsilon - np.log(s * (s + 1))

    def height(log_order):
        value = exponent(np.array([math.exp(log_order) + 0j]))[0].real
        return value if math.isfinite(value) else 1e300

    best = scipy.optimize.minimize_scalar(
        height, bounds=(-8.0, 16.0), method="bounded", options={"xatol": 1e-3}
    )
    order = math.exp(best.x)
    # Sampling the line wraps epsilon around with this period, which must lie far in
    # the tilted tail: at 35 nats below the integral.
    rises = [(height(best.x + up) - best.fun + 35) / math.expm1(up) for up in UPS]
    period = max(40.0, min(rises)) / order
    idle = sum(count * math.log(loss.idle or 0.5**1000) for loss, count in parts)
    if best.fun < -700:
        return 0.0
    scale, step = math.exp(best.fun) / math.pi, 2 * math.pi / period
    total, first, size = 0.0, 0, 64
    while first < 400_000:
        s = order + 1j * step * np.arange(first, first + size)
        tilt = -s * epsilon - np.log(s * (s + 1)) - best.fun
        values = (np.exp(exponent(s) - best.fun) - np.exp(idle + tilt)).real
        total += float(np.sum(values)) - (values[0] / 2 if first == 0 else 0.0)
        first, last = first + size, float(np.max(np.abs(values[-16:])))
        if last * first < accuracy * abs(total):
            return total * step * scale
        size = min(first, 1024)
    raise ArithmeticError(f"no convergence: {last * first} of {total} may be left")


def inverse(profile, delta, high=100.0):
    """The epsilon at which a decreasing `profile` reaches `delta`."""
    return scipy.optimize.brentq(
        lambda epsilon: math.log(max(profile(epsilon), 1e-300)) - math.log(delta),
        1e-12,
        high,
        xtol=1e-13,
    )


def overflow(size, rate, capacity):
    """The exact probability that more than `capacity` of `size` records are drawn."""
    rate = fractions.Fraction(rate)
    top, bottom = rate.numerator, rate.denominator
    ways = sum(
        math.comb(size, k) * top**k * (bottom - top) ** (size - k)
        for k in range(capacity + 1, size + 1)
    )
    return float(fractions.Fraction(ways, bottom**size))
