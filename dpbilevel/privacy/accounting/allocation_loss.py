r"""Privacy profile of passes in which each record is in one batch, drawn at random.

A pass makes $t$ Gaussian releases. Each record is in one of them, drawn uniformly and
independently of all others. Given the places of the others, and whatever earlier
releases decide, the releases with and without a record are compared through

$$
r_i = e^{\mu z_i - \mu^2 / 2}, \qquad r'_i = e^{-\mu z_i - \mu^2 / 2}, \qquad
z_i \sim \mathcal N(0, 1),
$$

the density ratios of release $i$ with the record, or the one that replaces it, to that
without any, where $\mu$ is the clip norm over the standard deviation of the noise.

For each $a \ge 0$ the hockey-stick divergence of a pass is at most

$$
\mathbb E \Bigl(\frac1t \sum_i (r_i - a\, r'_i)\Bigr)_+ , \qquad \mathbb E \Bigl(\frac1t
\sum_i r_i - a\Bigr)_+ , \qquad \mathbb E \Bigl(1 - \frac at \sum_i r_i\Bigr)_+
$$

where a record is replaced, removed and added; docs/mathematics.md has the proof. These
are the profiles of fixed pairs of laws, so that passes with fresh places compose as
their privacy losses add.

The law of a sum of $t$ independent terms is a power of a Fourier transform of one term
on a grid. A term is rounded to the grid at random with its mean kept, which can only
raise the mean of a convex function, and weighed by $e^{\theta w}$, so that small values
are computed to relative accuracy.

References:
    Feldman and Shenfeld, "Privacy amplification by random allocation", NeurIPS 2025
    (add-or-remove-one); Chua et al., "Balls-and-bins sampling for DP-SGD", AISTATS
    2025. The bound for replace-one is derived in docs/mathematics.md.
"""

import functools
import math
from typing import Literal

import numpy as np
import scipy

from .closed_forms import gaussian_delta, normal_masses

Way = Literal["replace", "remove", "add"]

# Cells of the grid of a term, the point at which its tails are cut off, and the
# probability outside of the window of the sum.
_POINTS, _TAIL, _OUTSIDE = 2**14, 9.0, 1e-20
_ROUNDING = 1e-6  # relative, of sums and probabilities; they are off by much less
_LARGEST_SHIFT = 4.0  # of a mu beyond it a release is hardly amplified
_LARGEST = 300.0  # losses beyond it count as infinite
_LEAST = 1e-14  # a divergence below which all larger losses count as infinite


class _Term:
    """The term $w(z)$ that one release adds to a sum, increasing in a normal $z$.

    `replace`: $r - a r'$; `remove`: $r - a$; `add`: $1 - a r$, with $-z$ for $z$.
    """

    def __init__(self, way: Way, mu: float, a: float):
        self.mu = mu
        # w = up r(z) - down r(-z) + constant
        self.up, self.down, self.constant = {
            "replace": (1.0, a, 0.0),
            "remove": (1.0, 0.0, -a),
            "add": (0.0, a, 1.0),
        }[way]

    def __call__(self, z):
        mu = self.mu
        ups = self.up * np.exp(mu * z - mu**2 / 2)
        return ups - self.down * np.exp(-mu * z - mu**2 / 2) + self.constant

    def inverse(self, w):
        r"""Return the normal values $z$ at which the term is $w$, or $\pm\infty$."""
        # Let s = e^{mu z}: up s - down / s = e^{mu^2/2} (w - constant).
        v = np.exp(self.mu**2 / 2) * (np.asarray(w) - self.constant)
        if not self.down:
            root = np.maximum(v, 0.0)
        elif not self.up:
            root = np.where(v < 0, self.down / np.where(v < 0, -v, 1.0), np.inf)
        else:
            size = np.hypot(v, 2 * math.sqrt(self.down))
            # The stable one of the two forms of the positive root.
            small = 2 * self.down / np.where(v < 0, size - v, 1.0)
            root = np.where(v < 0, small, (v + size) / 2)
        with np.errstate(divide="ignore"):
            return np.log(root) / self.mu

    def cells(self, edges):
        r"""Return two arrays by cell of $z$: probability, and part of the term's mean.

        The mean of $e^{\mu z - \mu^2/2}$ over a cell is the probability of the cell for
        a law that is moved by $\mu$.
        """
        mass = normal_masses(edges)
        mean = self.constant * mass
        if self.up:
            mean += self.up * normal_masses(edges - self.mu)
        if self.down:
            mean -= self.down * normal_masses(edges + self.mu)
        return mass, mean

    @property
    def deviation(self) -> float:
        """Standard deviation of the term."""
        spread, shared = math.expm1(self.mu**2), math.expm1(-(self.mu**2))
        alone = (self.up - self.down) ** 2 * spread
        return math.sqrt(alone + 2 * self.up * self.down * (spread - shared))


def divergence(way: Way, mu: float, batches: int, epsilon: float) -> float:
    r"""Return an upper bound on a pass's hockey-stick divergence at $\varepsilon$.

    The divergence is $H_a$ at $a = e^\varepsilon$, and the bound is mostly within 0.01.
    The bound is never more than the profile of one Gaussian release, by the convexity
    of the divergence in pairs of laws. It is that profile if $\mu > 4$.

    Args:
        way: The worst pair: `replace`, or `remove` and `add` for its two directions.
        mu: $\mu$, one record's clip norm over the noise.
        batches: $t$, the number of batches of a pass.
        epsilon: $\varepsilon$, of any sign.
    """
    one = float(gaussian_delta(2 * mu if way == "replace" else mu, epsilon))
    if batches == 1 or mu > _LARGEST_SHIFT:
        return one
    return min(one, _of_the_sum(_Term(way, mu, math.exp(epsilon)), batches))


def _of_the_sum(term: _Term, batches: int) -> float:
    if term(_TAIL + term.mu) <= 0:  # a positive term is too rare to be discretized
        _, (mean,) = term.cells(np.array([term.inverse(0.0), np.inf]))
        return max(0.0, float(mean))
    step, lowest, masses, cut = _discretized(term, batches)
    values = step * (lowest + np.arange(len(masses)))
    # Each sixteen cells are merged into their highest.
    starts = np.arange(0, len(values), 16)
    tops = values[np.minimum(starts + 15, len(values) - 1)]
    above = tops, _log(np.add.reduceat(masses, starts))
    tilt = _saddle(*above)
    end, outside = _window(tilt, *above, batches)
    logs = tilt * values + _log(masses)
    total = scipy.special.logsumexp(logs)
    weights = np.exp(logs - total)
    # No linear algebra is used, because its threads wait for others.
    variance = float(np.sum(weights * (values - np.sum(weights * values)) ** 2))
    spread = 12 * math.sqrt(batches * variance)
    size = scipy.fft.next_fast_len(int((end + max(spread, end)) / step) + 2, real=True)
    # The sum modulo the window: what falls below it comes in again from above.
    law = np.bincount(np.arange(len(values)) % size, weights, minlength=size)
    power = scipy.fft.irfft(scipy.fft.rfft(law) ** batches, size)
    positive = np.arange(1, int(end / step) + 2)  # sums in steps
    chances = np.maximum(power[(positive - batches * lowest) % size], 0.0)
    sums = step * positive
    untilted = np.exp(np.minimum(batches * total - tilt * sums, 700.0))
    found = (1 + _ROUNDING) * np.sum(chances * sums * untilted)
    return float(min(1.0, (found + outside) / batches + cut))


def _window(tilt: float, values, logs, batches: int) -> tuple[float, float]:
    r"""Return a cut $b$ and a bound on $\mathbb E[S; S > b]$, $S$ the sum of terms.

    With the moment $M(\tau)^t$ of $e^{\tau S}$ it is at most $b\, e^{-\tau b}
    M(\tau)^t$ where $b \ge 1 / \tau$.
    """
    weights = scipy.special.softmax(tilt * values + logs)
    deviation = math.sqrt(batches * np.sum(weights * values**2))
    tilts = tilt + np.geomspace(1e-2, 1e2, 16) / max(deviation, values[-1])
    exponents = np.multiply.outer(tilts, values) + logs
    moments = scipy.special.logsumexp(exponents, axis=1)
    ends = (batches * moments - math.log(_OUTSIDE)) / tilts
    best = int(np.argmin(ends))
    end = max(ends[best], 1 / tilts[best], values[-1])
    log_bound = batches * moments[best] - tilts[best] * end
    return end, end * math.exp(log_bound)


def _discretized(term: _Term, batches: int):
    r"""Return a term on a grid: (step, first multiple, probabilities, mean cut off).

    With $w' = \min(w, b)$ it holds that $(\sum w_i)_+ \le (\sum w'_i)_+ + \sum (w_i -
    b)_+$, with equality where the sum is positive whenever a term exceeds $b$. A term
    that is raised to a lower end raises the sum.
    """
    deviation = term.deviation
    far = batches * max(term.down, -term.constant, 1.0)
    far += 20 * deviation * batches**0.5
    high = min(float(term(_TAIL + term.mu)), far)
    # Below -t a sum with a term of at most 1 each is negative anyhow.
    low = -far if term.up else -float(batches)
    low = max(float(term(-_TAIL - term.mu)), low)
    step = max((high - low) / _POINTS, min(deviation, high) / 100)
    lowest = math.floor(low / step)  # a grid of multiples: sums are exact
    values = step * np.arange(lowest, math.ceil(high / step) + 1)
    inner = term.inverse(values)
    mass, mean = term.cells(np.append(inner, np.inf))
    (mass, above), (mean, mean_above) = ((v[:-1], v[-1]) for v in (mass, mean))
    # A cell's mass on its two ends, with the mean kept.
    upper = np.clip((mean - values[:-1] * mass) / step, 0.0, mass)
    masses = np.zeros(len(values))
    masses[:-1] += mass - upper
    masses[1:] += upper
    masses[0] += scipy.special.ndtr(inner[0])
    masses[-1] += above
    cut = max(0.0, float(mean_above - values[-1] * above))
    return step, lowest, masses, cut


def _log(masses):
    with np.errstate(divide="ignore"):
        return np.log(masses)


def _saddle(values, logs) -> float:
    """Return the exponential tilt that makes a law's mean about 0; 0 if it is positive.

    Any tilt is valid. The last value is positive.
    """

    def mean(tilt):
        return float(np.sum(scipy.special.softmax(tilt * values + logs) * values))

    if mean(0.0) >= 0:
        return 0.0
    high = 1 / values[-1]
    for _ in range(60):
        if mean(high) >= 0:
            found, _ = scipy.optimize.brentq(
                mean, 0.0, high, rtol=1e-3, full_output=True, disp=False
            )
            return float(found)
        high *= 2
    return 0.0


def profile(way: Way, mu: float, batches: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return arrays $a = e^\varepsilon$ and $H_a$, bounds on a pass's divergence.

    Straight lines between them are above the profile, which is convex. Points at
    negative losses are $H_{1/a} = 1 - 1/a + H'_a / a$, by the reversed way.
    $a$ increases from 0 and $H_a$ decreases. Arguments are those of `divergence`.
    """
    reverse: dict[Way, Way] = {"replace": "replace", "remove": "add", "add": "remove"}
    ratios, found = _at_positive_losses(way, mu, batches)
    a, reversed_found = _at_positive_losses(reverse[way], mu, batches)
    ratios = np.concatenate([[0.0], 1 / a[:0:-1], ratios])
    negative = (1 - 1 / a + reversed_found / a)[:0:-1]
    found = np.concatenate([[1.0], negative, found])
    # A convex function below all points is below their lower hull.
    kept: list[int] = []
    for i in range(len(ratios)):
        while len(kept) > 1 and _above(ratios, found, kept[-2], kept[-1], i):
            kept.pop()
        kept.append(i)
    return ratios[kept], np.minimum.accumulate(found[kept])


@functools.lru_cache(maxsize=8)
def _at_positive_losses(way: Way, mu: float, batches: int):
    r"""Return arrays $a \ge 1$ and bounds on the divergence at $a$, down to zero."""
    level = divergence(way, mu, batches, 0.0)
    scale = max(2.5 * level, 1e-6)  # of a Gaussian's loss, were it one
    losses, found = [0.0], [level]
    while found[-1] > _LEAST and losses[-1] < _LARGEST:
        losses.append(losses[-1] + max(scale / 12, losses[-1] / 20))
        found.append(divergence(way, mu, batches, losses[-1]))
    return np.exp(losses), np.array(found)


def _above(x, y, first: int, middle: int, last: int) -> bool:
    """Return whether the middle point is on or above the line through the others."""
    rise = (y[last] - y[first]) * (x[middle] - x[first])
    return (y[middle] - y[first]) * (x[last] - x[first]) >= rise
