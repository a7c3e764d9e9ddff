"""Private choice of the initial point of a local search, among public candidates."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import _checks
from .._checks import Checked, Count, Fraction, Number, Positive
from ..draws.mechanisms import Exponential
from ..privacy.noise import PRNGKey, derive
from ..sets import AbstractSet, Box
from .candidates import ends
from .kernels import AbstractKernel, cast
from .random_search import Choice

_DIAGONAL = 19  # points whose coordinates are all at the same fraction of their ranges
# Distances of other points from these, as fractions of the ranges.
_NEAR, _FAR = 0.05, 0.5
# Differences of mean losses to resolve, as a fraction of the clip range.
_RESOLUTION = 1 / 200
# Epsilon of a draw without noise, in place of infinity.
_NOISELESS = 1e6


class Portfolio(Checked):
    r"""Public initial points of a local search, one of which the first step draws.

    The first points are `w0`, the middle of the box, and `starts`. Then follow points
    whose coordinates are all at the same fraction of their ranges. The others are
    normal around random ones of these, with standard deviations of a twentieth to a
    half of the range. If the set is no bounded box, the part within two reaches of `w0`
    is used. A point is drawn with a probability $\propto \exp(-k f(w))$, where $f$ is
    the mean over records of the loss minus the record's least loss at any of the
    points, clipped to $[0, B]$.

    Args:
        size: $M$, the number of points, each with an evaluation; more cost no privacy.
            Static.
        starts: Points of your own, one a row, such as answers on public data; at most
            `size - 2`.
        share: Largest fraction of the squared budget for the draw. A plan takes less if
            less suffices to resolve mean losses that differ by $B / 200$.
        clip_range: $B$; by default the solver's clip norm times the kernel's reach.
        mechanism: The mechanism and its epsilon.

    Raises:
        ValueError: There are more starts than points.

    Privacy:
        One draw, $\varepsilon$-DP without $\delta$, as in `RandomSearch`: the least
        loss that is subtracted is that of the same record.

    References:
        McSherry and Talwar, "Mechanism design via differential privacy", FOCS 2007.
    """

    size: Count = eqx.field(static=True, default=60)
    starts: Any = None
    share: Fraction = 0.3
    clip_range: Positive | None = None
    mechanism: Exponential = Exponential()

    def __check_init__(self):
        number = 0 if self.starts is None else len(self.starts)
        if self.size < number + 2:
            raise ValueError(
                f"Portfolio: size={self.size} points are too few for w0, the middle "
                f"and {number} starts; give size={number + 2} or more."
            )

    def points(
        self,
        feasible: AbstractSet,
        w0: Float[Array, " d"],
        reach: Number,
        *,
        key: PRNGKey,
    ) -> Float[Array, "size d"]:
        """Return the points, a function of public values and the key.

        Args:
            feasible: The set.
            w0: The initial point of the search.
            reach: The reach of the kernel.
            key: A typed key.
        """
        key_base, key_length, key_move = derive(key, "base", "length", "move")
        lower, upper = _range(feasible, w0, cast(reach, w0))
        width = upper - lower
        fractions = jnp.arange(1, _DIAGONAL + 1).astype(w0.dtype) / (_DIAGONAL + 1)
        diagonal = lower[None] + fractions[:, None] * width[None]
        middle = (lower + upper) / 2
        fixed = [w0[None], middle[None], diagonal]
        if self.starts is not None:
            fixed.insert(2, jnp.asarray(self.starts, w0.dtype))
        fixed = jnp.concatenate(fixed)[: self.size]
        rest = self.size - len(fixed)
        base = jax.random.randint(key_base, (rest,), 0, len(fixed), jnp.int32)
        unit = jax.random.uniform(key_length, (rest, 1), w0.dtype)
        length = _NEAR * (_FAR / _NEAR) ** unit
        move = jax.random.normal(key_move, (rest, w0.size), w0.dtype)
        around = fixed[base] + length * move * width[None]
        points = jnp.clip(jnp.concatenate([fixed, around]), lower[None], upper[None])
        return jax.vmap(feasible.project)(points)

    def choice(self, clip_norm: Number, kernel: AbstractKernel) -> Choice:
        """Return the draw, with the default clip range if none is given."""
        clip_range: Any = self.clip_range
        if clip_range is None:
            clip_range = clip_norm * kernel.reach
        return Choice(self.size, clip_range, self.mechanism)

    def split(self, scale: Number, size: int | None) -> tuple[Number, Number]:
        r"""Return the epsilon of the draw, and the noise multiplier of later releases.

        Together they have the zero-concentrated privacy of a Gaussian release of
        multiplier `scale`: $\varepsilon^2 / 4 + m^{-2} = $ `scale`$^{-2}$.

        Args:
            scale: The noise multiplier of both together.
            size: The planned number of records.
        """
        wanted = 2 * math.log(self.size) / _RESOLUTION / size if size else _NOISELESS
        if _checks.concrete(scale) and scale == 0:
            return min(wanted, _NOISELESS), 0.0
        concrete = _checks.concrete(scale) and _checks.concrete(self.share)
        smaller = min if concrete else jnp.minimum
        epsilon = smaller(2 * self.share**0.5 / scale, wanted)
        return epsilon, (scale**-2 - epsilon**2 / 4) ** -0.5


def relative(losses: Float[Array, "n m"]) -> Float[Array, "n m"]:
    """Return losses minus each record's least one; infinity if not finite."""
    finite = jnp.isfinite(losses)
    least = jnp.min(jnp.where(finite, losses, jnp.inf), axis=1, keepdims=True)
    least = jnp.where(jnp.isfinite(least), least, 0)
    return jnp.where(finite, losses - least, jnp.inf)


def _range(feasible, w0, reach):
    """Return two corners of the box, or of the part of another set near `w0`."""
    lower, upper = w0 - 2 * reach, w0 + 2 * reach
    if not isinstance(feasible, Box):
        return lower, upper
    largest = jnp.finfo(w0.dtype).max
    low, high = ends(feasible, w0)
    bounded = (low > -largest) & (high < largest)
    return jnp.where(bounded, low, lower), jnp.where(bounded, high, upper)
