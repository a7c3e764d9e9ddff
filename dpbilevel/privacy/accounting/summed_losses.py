r"""The profile of a composition of privacy losses, to relative accuracy.

The law of a sum of losses is a product of powers of Fourier transforms. Every law is
weighed by $e^{\theta l}$ first, with $\theta$ such that the losses near $\varepsilon$
become the likely ones. So the result, however small, is off by a part of itself only,
and that part is bounded: docs/mathematics.md has the proof.
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy

from .losses import AbstractLoss

_TILTS = 96
# Standard deviations at which single losses are cut off.
_REACHES = np.array([4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 15.0, 20.0, 30.0, 37.0])
# The grid of losses: the part of delta that it may add, and its numbers of cells.
_MOST_ADDED, _CELLS, _MOST_CELLS = 5e-3, 2**16, 2**21
_UNIT = 2.0**-52
_FAR = 25.0  # a factor of exp(-25) is negligible
_LEAST = -60.0  # logarithm of the least delta that is resolved


class Composition:
    """The law of a sum of independent privacy losses, and its profile.

    Args:
        parts: Pairs of a loss and how often it occurs.
    """

    def __init__(self, parts: Sequence[tuple[AbstractLoss, int]]):
        self.losses = [loss for loss, _ in parts]
        self.counts = np.array([count for _, count in parts], float)
        pieces = [loss.pieces(_REACHES) for loss in self.losses]
        counted = [*zip(self.counts, pieces, strict=True)]
        spread = sum(
            count * (mass @ loss**2 - (mass @ loss) ** 2)
            for count, (mass, loss, _, _) in counted
        )
        tilts = np.geomspace(1e-3, 40.0, _TILTS) / math.sqrt(max(spread, 1e-30))
        self.tilts = np.concatenate([-tilts[::-1], [0.0], tilts])
        # Logarithms of moments, of losses that are cut off at each reach.
        self.logs = np.zeros((len(_REACHES), len(self.tilts)))
        self.beyond = np.zeros(len(_REACHES))
        for count, (mass, loss, within, beyond) in counted:
            with np.errstate(over="ignore"):
                rises = np.expm1(np.multiply.outer(self.tilts, loss)) * mass
            self.logs += count * np.log1p(np.cumsum(rises, axis=1)[:, within - 1].T)
            self.beyond += count * beyond
        ends = [loss.ends(_REACHES[-1])[1] for loss in self.losses]
        self.most = (1 + 1e-9) * float(self.counts @ np.maximum(ends, 0.0))
        self._laws: dict[tuple[int, int], _Law] = {}

    def delta(self, epsilon: float, *, rough: bool = False) -> float:
        r"""Return an upper bound on the composition's $\delta$ at $\varepsilon \ge 0$.

        A `rough` one is an estimate, off by some percent either way.
        """
        tilts, logs = self.tilts, self.logs
        if np.min((logs[-1] - tilts * (epsilon + _FAR))[:_TILTS]) < -_FAR:
            return 1.0  # hardly any loss is so small
        if epsilon >= self.most:  # only losses that are cut off are so large
            return min(1.0, float(self.beyond[-1]))
        up = tilts[_TILTS + 1 : -1]
        heights = logs[:, _TILTS + 1 : -1] - up * epsilon - np.log(up * (up + 1))
        heights = np.maximum(heights, _LEAST)
        # Beside a moment that overflows, a law would have no window.
        heights[np.isinf(logs[:, _TILTS + 2 :])] = np.inf
        with np.errstate(divide="ignore"):  # the mass cut off must be negligible
            cut = np.maximum(np.log(self.beyond) + 16, 2 * _LEAST)
        costs = np.logaddexp(heights, cut[:, None])
        best = divmod(int(np.argmin(costs)), len(up))
        height = float(heights[best])
        if rough:
            return min(1.0, math.exp(height) / self._width(*best))
        if best not in self._laws or epsilon < self._laws[best].low:
            self._laws[best] = self._law(*best, height, epsilon)
        return self._laws[best].delta(epsilon)

    def _width(self, reach: int, place: int) -> float:
        r"""Return $\sqrt{2 \pi}$ times the standard deviation of the tilted law."""
        near = slice(_TILTS + place, _TILTS + place + 3)
        tilts, logs = self.tilts[near], self.logs[reach, near]
        up, down = np.diff(logs) / np.diff(tilts)
        variance = 2 * (down - up) / (tilts[2] - tilts[0])
        return math.sqrt(2 * math.pi * max(1e-300, variance))

    def _law(self, reach: int, place: int, height: float, epsilon: float) -> "_Law":
        """Return a `_Law` that is accurate for deltas of about `exp(height)`."""
        place += _TILTS + 1
        logs, tilt, log = self.logs[reach], self.tilts[place], self.logs[reach, place]
        less, more = self.tilts[:place], self.tilts[place + 1 :]
        # Chernoff bounds: the mass of the weighed law outside of the window is
        # negligible, and so is the mass of the law itself above the window.
        low = np.max((log - logs[:place] - _FAR) / (tilt - less))
        weighed = (logs[place + 1 :] - log + _FAR) / (more - tilt)
        ends = (logs[place + 1 :] - height + _FAR) / more
        steeper = int(np.argmin(ends))
        high = max(float(ends[steeper]), float(np.min(weighed)), epsilon)
        low = min(float(low), epsilon)
        added = _MOST_ADDED if height > _LEAST / 1.2 else 1.0  # if it is seen at all
        step = math.sqrt(8 * added / (self.counts.sum() * tilt * (tilt + 1)))
        width = high - low
        ranges = [np.ptp(loss.ends(_REACHES[reach])) for loss in self.losses]
        step = max(min(step, width / _CELLS), max(width, *ranges) / _MOST_CELLS)
        parts = [loss.discretized(step, _REACHES[reach]) for loss in self.losses]
        return _Law(parts, self.counts, step, (tilt, more[steeper]), (low, high))


class _Law:
    """Law of a sum of discretized losses, tilted exponentially, which bounds deltas.

    Attributes:
        low: The least epsilon at which it holds.
    """

    def __init__(self, parts, counts, step: float, tilts, window):
        tilt, steeper = tilts
        self.low = window[0]
        self.step, self.tilt = step, tilt
        start = math.floor(window[0] / step)
        size = math.ceil(window[1] / step) - start + 2
        size = scipy.fft.next_fast_len(size, real=True)
        self.grid = step * np.arange(start, start + size)
        log, outside, infinite, origin = 0.0, -steeper * self.grid[-1], 0.0, 0
        transform, off = np.ones(1), 0.0
        for (first, masses, beyond), count in zip(parts, counts, strict=True):
            losses = step * (first + np.arange(len(masses)))
            log_one, weights = _weighed(tilt * losses, masses)
            folded = np.bincount(np.arange(len(weights)) % size, weights, size)
            transform = transform * scipy.fft.rfft(folded) ** count
            off += 2 * count * _norm(folded)
            log += count * log_one
            outside += count * _weighed(steeper * losses, masses)[0]
            infinite += count * beyond
            origin += int(count) * first
        law = scipy.fft.irfft(transform, size)
        self.law = np.roll(law, (origin - start) % size)
        # A transform is off by this part of its norm, and a power by as many times.
        rounding = 8 * _UNIT * math.log2(size)
        norm = _norm(law)
        self._off = rounding * (off + norm) + 16 * _UNIT * counts.sum() * norm
        self._log = log
        self._beyond = infinite + math.exp(min(outside, 0.0))
        self._relative = 1 + counts.sum() * 2.0**-46

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on the sum's delta at `epsilon`, at least `low`."""
        ends = np.searchsorted(self.grid, (epsilon, epsilon + _FAR * 2 / self.tilt))
        losses, law = (v[slice(*ends)] for v in (self.grid, self.law))
        weights = np.exp(np.minimum(self._log - self.tilt * losses, 700.0))
        rest = float(weights[-1]) if ends[1] < len(self.grid) else 0.0
        weights *= -np.expm1(epsilon - losses)
        found = np.sum(weights * law) + self._off * _norm(weights) + rest
        return float(min(1.0, found * self._relative + self._beyond))


def _norm(values) -> float:
    # No linear algebra library is used, because its threads wait for each other.
    # The square of the largest value may overflow.
    largest = float(np.max(np.abs(values), initial=0.0)) or 1.0
    return largest * math.sqrt(np.sum((values / largest) ** 2))


def _weighed(logs, masses) -> tuple[float, np.ndarray]:
    """Return the log of the sum of `masses * exp(logs)`, and each term's fraction."""
    top = float(np.max(logs))
    weights = masses * np.exp(logs - top)
    total = float(weights.sum())
    return top + math.log(total), weights / total
