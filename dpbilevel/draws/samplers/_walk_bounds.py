"""Proved bounds of a grid walk; the proofs are in the docstring of `GridWalk`."""

import dataclasses
import math

import numpy as np

from . import _lattice
from .base import Regularity

FLATNESS = 0.5 + 1 / math.sqrt(12)  # of a cell against its faces, by its diagonal


@dataclasses.dataclass(frozen=True)
class WalkBounds:
    """Proved bounds of a lattice of cells and a penalty, before any data is seen."""

    regularity: Regularity
    frame: _lattice.AbstractFrame
    cells: tuple[int, ...]
    penalty: float
    slack: float

    @property
    def convex(self) -> bool:
        return self.regularity.strong_convexity is not None

    @property
    def rise(self) -> float:
        """Largest distance of the potential from its value at the centre: L R."""
        return self.regularity.lipschitz * float(self.frame.radius)

    @property
    def error(self) -> float:
        """Largest error of the extension of the computed potential."""
        return (2 * self.frame.reach - 1) * self.regularity.error

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of h, in the coordinates of the lattice."""
        slope = self.regularity.lipschitz
        if self.frame.reach > 1:
            radial = self.penalty + (0 if self.convex else 2 * self.rise)
            slope += radial * float(self.frame.inverse_inradius)
        return slope * self.frame.stretch

    @property
    def change(self) -> float:
        """Lipschitz constant of h times the diagonal of a cell."""
        widths = zip(self.frame.sides, self.cells, strict=True)
        return self.lipschitz * math.hypot(*(float(w) / count for w, count in widths))

    @property
    def needed_slack(self) -> float:
        """Largest change of the computed h from the middle of a cell to its points."""
        return self.change / 2 + 2 * self.error

    @property
    def oscillation(self) -> float:
        """Largest difference of the computed h between any two cells."""
        reach = self.frame.reach
        return (1 + reach) * self.rise + self.penalty * (reach - 1) + 2 * self.error

    @property
    def gap(self) -> float:
        """Lower bound on the spectral gap of the walk."""
        n, longest = len(self.cells), max(self.cells)
        gap = math.exp(-self.oscillation) * (1 - math.cos(math.pi / longest)) / (2 * n)
        if not self.convex:
            return gap
        spread = FLATNESS * self.change + 2 * self.error
        return max(gap, (math.exp(-spread) / (2 * n * longest)) ** 2 / 2)

    @property
    def rarity(self) -> float:
        """Upper bound on the logarithm of one over the least probability of a cell."""
        return self.oscillation + sum(map(math.log, self.cells))

    def steps(self, mixing: float) -> float:
        """Return the steps for a relative error of the cell's distribution."""
        gap = self.gap  # (1 - gap)^T <= exp(-gap T)
        return (self.rarity - math.log(mixing)) / gap if gap else math.inf

    def mixing(self, steps: int) -> float:
        """Return the relative error of the cell's distribution after so many steps."""
        return math.exp(min(self.rarity - self.gap * steps, 0.0))

    def tries(self, mixing: float, exhausted: float) -> float:
        """Return the tries that keep the effect of exhaustion small."""
        misses = self._misses(mixing)
        excess = self._last_resort() - math.log(exhausted)
        return 1 + excess / misses if misses else math.inf

    def exhausted(self, mixing: float, tries: int) -> float:
        """Return the largest relative addition of exhaustion to the distribution."""
        excess = self._last_resort() - self._misses(mixing) * (tries - 1)
        return math.exp(min(excess, 0.0))

    def _misses(self, mixing: float) -> float:
        """Bound minus the logarithm of the probability that a try fails, from below."""
        n, reach, odds = len(self.cells), self.frame.reach, -math.inf
        if reach > 1:
            decay = self.penalty - self.rise - n + 1
            shells = n * math.log(reach) - math.log(n)  # without the decay
            shells = min(shells, -math.log(decay)) if decay > 0 else shells
            odds = math.log(n + self.rise) + shells + 2 * self.error
        mean = self.change / math.sqrt(12)  # of a cell against its middle
        inside = -self.slack - mean - 2 * self.error - np.logaddexp(0.0, odds)
        return -math.log1p(-(1 - mixing) * math.exp(inside))

    def _last_resort(self) -> float:
        """Return the logarithm of B."""
        folded = 2 * len(self.cells) * math.log(self.frame.reach) + 2 * self.error
        folded = float(np.logaddexp(0.0, folded)) if self.frame.reach > 1 else 0.0
        return 2 * self.slack + folded


def queries(cells: tuple[int, ...], steps: float | None, tries: float) -> float:
    """Return the evaluations of the centre, of the table or the walks, and of tries."""
    if steps is None:
        return 1 + float(min(math.prod(cells), 10**300)) + tries
    return 2 + (math.ceil(steps) if steps < math.inf else steps) * tries + tries


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that fits."""
    units = {"years": 3.2e7, "days": 86400, "hours": 3600, "seconds": 1}
    unit = next((u for u, length in units.items() if seconds >= length), "seconds")
    return f"{seconds / units[unit]:.3g} {unit}"
