r"""Public lattices around convex sets, extended potentials, walks and their bounds.

A frame describes a compact convex set $X$ in coordinates in which it has an interior: a
box $A \supseteq X$ with sides parallel to the axes, a centre $c$, and the gauge
$\psi(z) = \inf \{t > 0 : c + (z - c) / t \in X\}$. The proofs of the bounds are in the
docstring of `GridWalk`.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32
from typing_extensions import override

from ... import _checks
from ...privacy.keys import derive, step_keys
from ...privacy.noise import standard_exponential, standard_gumbel
from ...sets import AbstractSet, Ball, Box, Simplex
from .base import AbstractPotential, Regularity

_BLOCK = 128  # steps whose random numbers are drawn in one call


FLATNESS = 0.5 + 1 / math.sqrt(12)  # of a cell against its faces, by its diagonal


class AbstractFrame(eqx.Module):
    r"""Coordinates of a set in a surrounding box, with center, radii and gauge.

    Coordinates are $z$; distances and radii are those of the space of $x$. `stretch`
    bounds $\|x - x'\|_2 / \|z - z'\|_2$.
    """

    corner: Any  # b
    sides: Any  # w
    center: Any  # c
    radius: Any  # the largest distance from c to a point of X
    inverse_inradius: Any  # the Lipschitz constant of psi
    reach: float = eqx.field(static=True)  # the largest psi on A; 1 where A = X
    stretch: float = eqx.field(static=True)

    @abc.abstractmethod
    def gauge(self, z: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the gauge at coordinates `z`: at most 1 exactly on the set."""

    @abc.abstractmethod
    def point(self, z: Float[Array, " n"]) -> Float[Array, " d"]:
        """Return the flattened point that has the coordinates `z`."""


class BoxFrame(AbstractFrame):
    """Frame of a box: the surrounding box is the set itself."""

    def __init__(self, lower, upper):
        self.corner, self.sides = lower, upper - lower
        self.center = (lower + upper) / 2
        self.radius = (self.sides**2).sum() ** 0.5 / 2
        self.inverse_inradius, self.reach, self.stretch = 0.0, 1.0, 1.0

    @override
    def gauge(self, z) -> Float[Array, ""]:
        return jnp.zeros((), z.dtype)

    @override
    def point(self, z) -> Float[Array, " d"]:
        return jnp.clip(z, self.corner, self.corner + self.sides)


class BallFrame(AbstractFrame):
    """Frame of a ball: the surrounding box is the smallest cube around it."""

    def __init__(self, center, radius):
        self.corner, self.sides = center - radius, 2 * radius + 0 * center
        self.center, self.radius, self.inverse_inradius = center, radius, 1 / radius
        self.reach, self.stretch = math.sqrt(len(center)), 1.0

    @override
    def gauge(self, z: Float[Array, " n"]) -> Float[Array, ""]:
        return jnp.linalg.norm(z - self.center) / self.radius

    @override
    def point(self, z: Float[Array, " n"]) -> Float[Array, " d"]:
        return z


class SimplexFrame(AbstractFrame):
    """Frame of a simplex: all entries but the last, in a cube of its scale."""

    scale: Any

    def __init__(self, scale, dimension, zeros):
        n = dimension - 1
        self.corner, self.sides = zeros, zeros + scale
        self.center, self.scale = zeros + scale / dimension, scale
        self.radius = scale * math.sqrt(n / dimension)
        self.inverse_inradius = math.sqrt(n * dimension) / scale
        self.reach, self.stretch = float(n**2), math.sqrt(dimension)

    def gauge(self, z: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the gauge at `z` by the smallest entry: at most 1 on the simplex."""
        smallest = jnp.minimum(jnp.min(z), self.scale - jnp.sum(z))
        return 1 - (len(z) + 1) * smallest / self.scale

    def point(self, z: Float[Array, " n"]) -> Float[Array, " d"]:
        """Return all entries of the simplex at `z`; the last is the rest, or 0."""
        return jnp.append(z, jnp.maximum(self.scale - jnp.sum(z), 0.0))


def frame_of(owner: str, feasible: AbstractSet, dimension: int) -> AbstractFrame:
    """Return the `AbstractFrame` of a set, on the host if its numbers are known."""
    if isinstance(feasible, Box):
        lower = _flat(owner, feasible.lower, dimension)
        upper = _flat(owner, feasible.upper, dimension)
        if isinstance(lower, np.ndarray) and isinstance(upper, np.ndarray):
            if not np.isfinite(upper - lower).all():
                raise ValueError(f"{owner}: the box must be bounded, got {feasible}.")
        return BoxFrame(lower, upper)
    if isinstance(feasible, Ball):
        center = 0.0 if feasible.center is None else feasible.center
        radius = _checks.number(feasible.radius)
        return BallFrame(_flat(owner, center, dimension), radius)
    if isinstance(feasible, Simplex) and dimension >= 2:
        return SimplexFrame(feasible.scale, dimension, np.zeros(dimension - 1))
    raise ValueError(
        f"{owner}: needs a bounded Box, a Ball or a Simplex of two entries or more, "
        f"got {type(feasible).__name__} with {dimension} entries."
    )


class Extended(eqx.Module):
    r"""Potential extended from a set to its surrounding box, in frame coordinates.

    With $\psi_+ = \max(1, \psi(z))$ and $y = c + (z - c) / \psi_+ \in X$,

    $$
    h(z) = U(c) + \psi_+ (U(y) - U(c)) + K (\psi_+ - 1).
    $$

    This is $U$ on $X$. It is convex if $U$ is and $K \ge 2 L R$, with $R$ the
    radius of the frame: $t (U(c + (z - c) / t) - U(c)) + K (t - 1)$ is jointly convex
    in $(z, t)$ and non-decreasing in $t$, so that $h(z)$ is its least value over the
    convex set $t \ge \psi_+(z)$. One value of $U$ tells it, where the greatest convex
    extension with the constant $L$ is a minimisation over $X$.

    Whatever is not finite counts as $U = 0$.
    """

    potential: AbstractPotential  # U
    frame: AbstractFrame
    unravel: Callable[[Float[Array, " d"]], PyTree] = eqx.field(static=True)  # of x
    penalty: float | Float[Array, ""]  # K

    def reference(self) -> Float[Array, ""]:
        """Return the potential at the frame's centre, which `many` needs."""
        return self._values(self.frame.center[None])[0]

    def many(
        self, zs: Float[Array, "m n"], reference: Float[Array, ""]
    ) -> Float[Array, " m"]:
        """Return the extended potential at every row of `zs`, given `reference()`."""
        outside = jnp.maximum(jax.vmap(self.frame.gauge)(zs), 1.0)
        center = self.frame.center[None]
        values = self._values(center + (zs - center) / outside[:, None])
        return values + (outside - 1) * (values - reference + self.penalty)

    def _values(self, zs: Float[Array, "m n"]) -> Float[Array, " m"]:
        points = jax.vmap(lambda z: self.unravel(self.frame.point(z)))(zs)
        values = self.potential.many(points).astype(zs.dtype)
        return jnp.where(jnp.isfinite(values), values, 0.0)


def middles(frame: AbstractFrame, cells, index) -> Float[Array, "m n"]:
    """Return the middle point of each cell in `index`, one a row."""
    return within(frame, cells, index, jnp.asarray(0.5, frame.corner.dtype))


def within(
    frame: AbstractFrame,
    cells: tuple[int, ...],
    index: Int[Array, "m n"],
    offset: Float[Array, "..."],
) -> Float[Array, "m n"]:
    """Return one point of each cell, at a relative position `offset` in [0, 1]."""
    dtype = frame.corner.dtype
    width = frame.sides / jnp.asarray(cells, dtype)
    return frame.corner[None] + (index.astype(dtype) + offset) * width[None]


def _flat(owner: str, bound: PyTree, dimension: int) -> Any:
    leaves = jax.tree.leaves(bound)
    flat: Any
    known = all(map(_checks.concrete, leaves))
    if known:  # NumPy, for inside a trace nothing of JAX's would be on the host
        flat = np.concatenate([np.ravel(np.asarray(v, float)) for v in leaves])
    else:
        flat = jnp.concatenate([jnp.ravel(v) for v in leaves])
    if len(flat) not in (1, dimension):
        raise ValueError(f"{owner}: the set has {len(flat)} entries, not {dimension}.")
    return flat + np.zeros(dimension) if known else jnp.broadcast_to(flat, dimension)


def from_table(energy, cells, tries, *, key):
    """Draw `tries` cells exactly, from a table of all; return indices, energies."""
    index = np.stack(np.unravel_index(np.arange(math.prod(cells)), cells), axis=-1)
    table = energy(jnp.asarray(index, jnp.int32))

    def one(key):
        noise = standard_gumbel(table.shape, table.dtype, key=key)
        return jnp.argmax(noise - table)

    chosen = jax.lax.map(one, step_keys(key, tries)[1])
    return jnp.asarray(index, jnp.int32)[chosen], table[chosen]


def from_walks(energy, cells, tries, num_steps, dtype, *, key):
    """Make independent walks; return each one's last cell and its energy."""

    def block(state, drawn):
        start, key = drawn
        key_moves, key_coins = derive(key, "walk", "restart")
        words = jax.random.bits(key_moves, (length, tries), jnp.uint32)
        coins = standard_exponential((length, tries), dtype, key=key_coins)
        # The rest of the last block makes no moves.
        counts = start + jnp.arange(length, dtype=jnp.int32)
        words = jnp.where((counts < num_steps)[:, None], words, jnp.uint32(0))

        def one(state, drawn):
            return _step(energy, cells, *state, *drawn), None

        return jax.lax.scan(one, state, (words, coins))[0], None

    middle = jnp.asarray([[count // 2 for count in cells]], jnp.int32)
    index = jnp.broadcast_to(middle, (tries, len(cells)))
    state = (index, jnp.broadcast_to(energy(middle), (tries,)))
    length = min(num_steps, _BLOCK)
    starts = jnp.arange(0, num_steps, length, dtype=jnp.int32)
    _, keys = step_keys(key, len(starts))
    return jax.lax.scan(block, state, (starts, keys))[0]


def _step(energy, cells, index: Int[Array, "m n"], energies, words, coins):
    """Make one step of every walk; return its cell and the energy there.

    Lowy and Liu, Appendix B.3.1, 3(b): i to iii propose, iv accepts.
    """
    proposed = _proposals(cells, index, words)
    raised = energy(proposed)
    moves = coins >= raised - energies
    index = jnp.where(moves[:, None], proposed, index)
    return index, jnp.where(moves, raised, energies)


def _proposals(
    cells: tuple[int, ...], index: Int[Array, "m n"], words: UInt32[Array, " m"]
) -> Int[Array, "m n"]:
    """Return the neighbours that random words propose, or the cell itself.

    The top bit tells whether to move and the next one which way, so that a move and
    its reverse have exactly the same probability; the others choose the axis.
    """
    n = len(cells)
    axis = (words & jnp.uint32(2**30 - 1)) % jnp.uint32(n)
    sign = jnp.where(words >> 30 & 1 == 1, 1, -1)
    sign = jnp.where(words >> 31 == 1, sign, 0)
    along = jnp.arange(n, dtype=jnp.uint32)[None] == axis[:, None]
    beside = index + jnp.where(along, sign[:, None], 0).astype(index.dtype)
    beyond = (beside < 0) | (beside >= jnp.asarray(cells, index.dtype)[None])
    return jnp.where(jnp.any(beyond, axis=1, keepdims=True), index, beside)


@dataclasses.dataclass(frozen=True)
class WalkBounds:
    """Proved bounds of a lattice of cells and a penalty, before any data is seen."""

    regularity: Regularity
    frame: AbstractFrame
    cells: tuple[int, ...]
    penalty: float
    slack: float

    @property
    def convex(self) -> bool:
        return self.regularity.strong_convexity is not None

    @property
    def rise(self) -> float:
        """Bound on how far the potential is from its value at the centre."""
        return self.regularity.lipschitz * float(self.frame.radius)

    @property
    def error(self) -> float:
        """Bound on the error of the extended potential as computed."""
        return (2 * self.frame.reach - 1) * self.regularity.error

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of the extended potential in lattice coordinates."""
        slope = self.regularity.lipschitz
        if self.frame.reach > 1:
            radial = self.penalty + (0 if self.convex else 2 * self.rise)
            slope += radial * float(self.frame.inverse_inradius)
        return slope * self.frame.stretch

    @property
    def change(self) -> float:
        """Bound on the extended potential's change across a cell's diagonal."""
        widths = zip(self.frame.sides, self.cells, strict=True)
        return self.lipschitz * math.hypot(*(float(w) / count for w, count in widths))

    @property
    def needed_slack(self) -> float:
        """Bound on the extended potential's change in a cell, from its middle."""
        return self.change / 2 + 2 * self.error

    @property
    def oscillation(self) -> float:
        """Bound on the difference of the extended potential at two cells."""
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
        """Return how many walk steps, a float, leave a relative error of `mixing`."""
        gap = self.gap  # (1 - gap)^T <= exp(-gap T)
        return (self.rarity - math.log(mixing)) / gap if gap else math.inf

    def mixing(self, steps: int) -> float:
        """Return a bound on the relative error of the last cell's distribution."""
        return math.exp(min(self.rarity - self.gap * steps, 0.0))

    def tries(self, mixing: float, exhausted: float) -> float:
        """Return the tries, a float, whose running out errs by at most `exhausted`."""
        misses = self._misses(mixing)
        excess = self._last_resort() - math.log(exhausted)
        return 1 + excess / misses if misses else math.inf

    def exhausted(self, mixing: float, tries: int) -> float:
        """Return a bound on the relative error that running out of tries causes."""
        excess = self._last_resort() - self._misses(mixing) * (tries - 1)
        return math.exp(min(excess, 0.0))

    def _misses(self, mixing: float) -> float:
        """Return a lower bound on minus the log of the chance that a try fails."""
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
        """Return a bound on the log ratio of densities if all tries fail."""
        folded = 2 * len(self.cells) * math.log(self.frame.reach) + 2 * self.error
        folded = float(np.logaddexp(0.0, folded)) if self.frame.reach > 1 else 0.0
        return 2 * self.slack + folded


def queries(cells: tuple[int, ...], steps: float | None, tries: float) -> float:
    """Return the number of potential evaluations of a draw: table or walks, tries."""
    if steps is None:
        return 1 + float(min(math.prod(cells), 10**300)) + tries
    return 2 + (math.ceil(steps) if steps < math.inf else steps) * tries + tries


def duration(seconds: float) -> str:
    """Return seconds as text in the largest unit that fits, such as 3 hours."""
    units = {"years": 3.2e7, "days": 86400, "hours": 3600, "seconds": 1}
    unit = next((u for u, length in units.items() if seconds >= length), "seconds")
    return f"{seconds / units[unit]:.3g} {unit}"
