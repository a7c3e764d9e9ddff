"""What is proved of a grid walk; the proofs are in the text of `GridWalk`."""

import dataclasses
import math

import numpy as np

from . import _lattice
from .base import Regularity

FLATNESS = 0.5 + 1 / math.sqrt(12)  # of a cell against its faces, by its diagonal


@dataclasses.dataclass(frozen=True)
class WalkBounds:
    """What is proved of a lattice of cells and a penalty, before any data is seen."""

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
        """How far the potential may be from its value at the centre: L R."""
        return self.regularity.lipschitz * float(self.frame.radius)

    @property
    def error(self) -> float:
        """How far the extension of what is computed is from that of U."""
        return (2 * self.frame.reach - 1) * self.regularity.error

    @property
    def lipschitz(self) -> float:
        """Of h, in the coordinates of the lattice."""
        slope = self.regularity.lipschitz
        if self.frame.reach > 1:
            radial = self.penalty + (0 if self.convex else 2 * self.rise)
            slope += radial * float(self.frame.inverse_inradius)
        return slope * self.frame.stretch

    @property
    def change(self) -> float:
        """The Lipschitz constant of h times the diagonal of a cell."""
        widths = zip(self.frame.sides, self.cells, strict=True)
        return self.lipschitz * math.hypot(*(float(w) / count for w, count in widths))

    @property
    def needed_slack(self) -> float:
        """How far what is computed moves from the middle of a cell to its points."""
        return self.change / 2 + 2 * self.error

    @property
    def oscillation(self) -> float:
        """Of what is computed, between any two cells."""
        reach = self.frame.reach
        return (1 + reach) * self.rise + self.penalty * (reach - 1) + 2 * self.error

    @property
    def gap(self) -> float:
        """A lower bound on the spectral gap of the walk."""
        n, longest = len(self.cells), max(self.cells)
        gap = math.exp(-self.oscillation) * (1 - math.cos(math.pi / longest)) / (2 * n)
        if not self.convex:
            return gap
        spread = FLATNESS * self.change + 2 * self.error
        return max(gap, (math.exp(-spread) / (2 * n * longest)) ** 2 / 2)

    @property
    def rarity(self) -> float:
        """The logarithm of one over the least probability of a cell, at most."""
        return self.oscillation + sum(map(math.log, self.cells))

    def steps(self, mixing: float) -> float:
        """After how many the law of the cell has at most the relative error."""
        gap = self.gap  # (1 - gap)^T <= exp(-gap T)
        return (self.rarity - math.log(mixing)) / gap if gap else math.inf

    def mixing(self, steps: int) -> float:
        """The relative error of the law of the cell after so many steps."""
        return math.exp(min(self.rarity - self.gap * steps, 0.0))

    def tries(self, mixing: float, exhausted: float) -> float:
        """How many keep the part of the last resort at most at `exhausted`."""
        misses = self._misses(mixing)
        excess = self._last_resort() - math.log(exhausted)
        return 1 + excess / misses if misses else math.inf

    def exhausted(self, mixing: float, tries: int) -> float:
        """How much the last resort may add to the law, relatively."""
        excess = self._last_resort() - self._misses(mixing) * (tries - 1)
        return math.exp(min(excess, 0.0))

    def _misses(self, mixing: float) -> float:
        """Minus the logarithm of the probability that a try fails, at least."""
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
        """The logarithm of B."""
        folded = 2 * len(self.cells) * math.log(self.frame.reach) + 2 * self.error
        folded = float(np.logaddexp(0.0, folded)) if self.frame.reach > 1 else 0.0
        return 2 * self.slack + folded


def queries(cells: tuple[int, ...], steps: float | None, tries: float) -> float:
    """Evaluations of the centre, of the table (no steps) or the walks, and of tries."""
    if steps is None:
        return 1 + float(min(math.prod(cells), 10**300)) + tries
    return 2 + (math.ceil(steps) if steps < math.inf else steps) * tries + tries


def duration(seconds: float) -> str:
    """Seconds in the largest unit that fits."""
    for unit, length in {"years": 3.2e7, "days": 86400, "hours": 3600}.items():
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"
