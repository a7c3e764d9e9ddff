r"""Privacy losses of single releases, discretized from above.

A release is accounted for by its worst pair of laws $P, Q$, whose privacy loss is $L =
\log(dP / dQ)$ under $P$. Between neighbouring multiples of a step both masses are
computed to relative accuracy, and moved to the two ends of the cell with both kept.
This splits every outcome at random into two, from which the pair can be restored: the
divergence of the result is never smaller, and equal at the multiples of the step.

References:
    Doroshenko et al., "Connect the dots: tighter discrete approximations of privacy
    loss distributions", PoPETs 2022.
"""

import abc
import dataclasses
import functools
import math

import numpy as np
from typing_extensions import override

from . import allocation_loss
from .closed_forms import normal_masses

_PIECES = 1024  # number of pieces of a law by which tilts and grids are chosen
# Length of the lower tail in standard deviations. Smaller losses are raised to the end
# of the tail, which is safe. Their mass is 1e-15, with little effect on the divergence.
_NEAR = 8.0
# Divided by the step, this fraction of a cell's mass covers the rounding of masses.
_MARGIN = 2.0**-46


class AbstractLoss(abc.ABC):
    """Privacy loss log(dP/dQ) of one release, by the worst pair of laws `P` and `Q`."""

    @abc.abstractmethod
    def cells(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays: masses of `P` and `Q` with losses below, between, above edges.

        Args:
            edges: Increasing losses; zero may be among them.

        Returns:
            One mass more than there are edges; the first and the last are the tails.
        """

    @abc.abstractmethod
    def ends(self, reach: float) -> tuple[float, float]:
        """Return the lowest and highest privacy loss to keep, `reach` deviations out.

        The reach is the distance from the mean, in standard deviations.
        """

    def pieces(self, reaches: np.ndarray):
        """Return four arrays: masses, losses of pieces; counts, mass beyond, by reach.

        Per reach, as in `ends`, the number of pieces within and the mass beyond follow.
        They serve for choices and not for results.
        """
        ends = np.array([self.ends(reach) for reach in reaches])
        far = 1.01 * float(np.max(np.abs(ends)))
        ups = np.geomspace(1e-8 * far, far, _PIECES // 2)
        edges = np.unique(np.concatenate([-ups, [0.0], ups, ends[:, 1]]))
        mass, other = self.cells(edges)
        kept = (mass > 0) & (other > 0)
        last = np.searchsorted(edges, ends[:, 1])
        beyond = np.cumsum(mass[::-1])[::-1]
        loss = np.log(mass[kept] / other[kept])
        return mass[kept], loss, np.cumsum(kept)[last], beyond[last + 1]

    def discretized(self, step: float, reach: float):
        """Return the loss on a grid: (first multiple, masses, mass at infinity).

        The loss on multiples of `step` is never more private. The reach is as in
        `ends`.
        """
        low, high = self.ends(reach)
        first, last = math.floor(low / step), math.ceil(high / step) + 1
        edges = step * np.arange(first, last + 1)
        mass, other = self.cells(edges)
        below, within, beyond = mass[0], mass[1:-1], mass[-1]
        # u e^{-upper} + (mass - u) e^{-lower} = other
        rise = within - other[1:-1] * np.exp(edges[:-1])
        upper = np.clip(rise / -math.expm1(-step) + _MARGIN / step * within, 0, within)
        masses = np.append(within - upper, 0.0)
        masses[1:] += upper
        masses[0] += below
        return first, masses, float(beyond)


@dataclasses.dataclass(frozen=True)
class Shifted(AbstractLoss):
    r"""Privacy loss between two Gaussian mixtures of weights $p$, $q$, shifts $\pm s$.

    Attributes:
        up: $p$ of the first law, $(1 - p) N(0, 1) + p N(s, 1)$.
        down: $q$ of the second law, $(1 - q) N(0, 1) + q N(-s, 1)$.
        shift: $s$, at most about 15, so that no exponential overflows.
        reverse: Whether the loss is that of the second law over the first.
    """

    up: float
    down: float
    shift: float
    reverse: bool = False

    def _masses(self, x):
        here, s = normal_masses(x), self.shift
        first = (1 - self.up) * here + self.up * normal_masses(x - s)
        second = (1 - self.down) * here + self.down * normal_masses(x + s)
        return (second, first) if self.reverse else (first, second)

    def _inverse(self, losses):
        """Return the real numbers at which the privacy loss has these values."""
        # Let t = e^{s x}: p' t^2 + c t - e^l q' = 0.
        half, ratio = math.exp(-(self.shift**2) / 2), np.exp(losses)
        up, down = self.up * half, ratio * self.down * half
        c = (1 - self.up) - ratio * (1 - self.down)
        size = np.hypot(c, 2 * np.sqrt(up * down))
        with np.errstate(divide="ignore", invalid="ignore"):  # unused branch
            root = np.where(c > 0, 2 * down / (size + c), (size - c) / (2 * up))
            return np.log(root) / self.shift

    def _loss(self, x: float) -> float:
        half = self.shift**2 / 2
        rise = _log_mixed(self.up, x * self.shift - half)
        return rise - _log_mixed(self.down, -x * self.shift - half)

    @override
    def cells(self, edges):
        way = -1 if self.reverse else 1
        inner = self._inverse(way * edges[::way])
        masses = self._masses(np.concatenate([[-np.inf], inner, [np.inf]]))
        return masses[0][::way], masses[1][::way]

    @override
    def ends(self, reach):
        near = min(reach, _NEAR)
        if self.reverse:
            far = -reach - self.shift * (self.down > 0)
            high = -self._loss(far)
            if self.down == 0 and self.up < 1:
                most = -math.log1p(-self.up)  # no loss is larger
                # Close to it, places are lost to rounding: just above, no mass is left.
                if high > (1 - 2.0**-16) * most:
                    high = most + 2.0**-50 * (1 + most)
            return -self._loss(near), high
        return self._loss(-near), self._loss(reach + self.shift * (self.up > 0))


@dataclasses.dataclass(frozen=True)
class Subset(AbstractLoss):
    r"""Privacy loss of a Gaussian release of a random subset, under replace-one.

    With $q$ the fraction sampled and $\delta_\mu$ the profile of the release on the
    whole subset, the profile is $q\, \delta_\mu(\log(1 + (e^\varepsilon - 1) / q))$ at
    $\varepsilon \ge 0$, and symmetric: positive losses are those of
    `Shifted(q, 0, mu)`, negative ones mirror them, and all that is left is zero.

    Attributes:
        fraction: $q$, batch size over number of records.
        shift: $\mu$, one over the noise multiplier.

    References:
        Balle, Barthe and Gaboardi, "Privacy amplification by subsampling", NeurIPS
        2018, Theorem 9.
    """

    fraction: float
    shift: float

    @property
    def _half(self) -> Shifted:
        return Shifted(self.fraction, 0.0, self.shift)

    @override
    def cells(self, edges):
        mass, other = (np.zeros(len(edges) + 1) for _ in range(2))
        for way in (1, -1):
            ends = np.maximum(way * edges[::way], 0.0)
            start = self.shift / 2  # exact lower end of positive losses
            inner = np.where(ends > 0, self._half._inverse(ends), start)
            inner = np.concatenate([[start], np.maximum(inner, start), [np.inf]])
            more, less = self._half._masses(inner)
            mass += (more, less[::way])[way < 0]
            other += (less, more[::way])[way < 0]
        zero = np.searchsorted(edges, 0.0, side="right")
        idle = max(0.0, 1.0 - mass.sum())
        mass[zero] += idle
        other[zero] += idle
        return mass, other

    @override
    def ends(self, reach):
        high = self._half._loss(reach + self.shift)
        return -high, high


@dataclasses.dataclass(frozen=True)
class Atoms(AbstractLoss):
    """A privacy loss with finitely many values.

    Attributes:
        mass: The masses of `P`.
        other: The masses of `Q`.
    """

    mass: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def _losses(self) -> np.ndarray:
        mass, other = np.asarray(self.mass), np.asarray(self.other)
        with np.errstate(divide="ignore"):
            losses = np.log(mass / np.where(mass > 0, other, 1))
        return np.where(other > 0, losses, np.inf)

    @override
    def cells(self, edges):
        places = np.searchsorted(edges, self._losses, side="right")
        count = len(edges) + 1
        first, second = self.mass, self.other
        return np.bincount(places, first, count), np.bincount(places, second, count)

    @override
    def ends(self, reach):
        finite = self._losses[np.isfinite(self._losses)]
        # A cell ends below its upper edge, so the largest loss is below the end.
        return float(finite.min()), float(np.nextafter(finite.max(), np.inf))


@functools.lru_cache(maxsize=16)
def allocated(way: allocation_loss.Way, shift: float, batches: int) -> Atoms:
    """Return `Atoms` that bound a pass's loss if each record is in one random batch.

    It is that of a piecewise linear upper bound on the convex profile. Arguments are
    those of `allocation_loss.profile`; `shift` is its `mu`.
    """
    ratios, found = allocation_loss.profile(way, shift, batches)
    slopes = np.append(np.diff(found) / np.diff(ratios), 0.0)
    other = np.maximum(np.diff(slopes, prepend=-1.0), 0.0)
    mass = np.append(ratios * other, found[-1])
    return Atoms(tuple(mass[1:]), (*other[1:], 0.0))


def _log_mixed(fraction: float, exponent: float) -> float:
    r"""Return $\log(1 - p + p e^a)$ of a fraction $p$ and an exponent $a$."""
    return exponent if fraction == 1 else math.log1p(fraction * math.expm1(exponent))
