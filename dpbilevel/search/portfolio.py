"""Public points of which a local search starts at the one that is drawn."""

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
from .choice import Choice
from .kernels import AbstractKernel, cast

_DIAGONAL = 19  # points whose coordinates are all at the same share of their ranges
# How far other points are from those, in shares of the ranges.
_NEAR, _FAR = 0.05, 0.5
# Mean losses that differ by this share of the clip range should be distinguished.
_RESOLVED = 1 / 200
# In place of an infinite epsilon, where there is no noise.
_CERTAIN = 1e6


class Portfolio(Checked):
    r"""Public starts of a local search, of which the first step draws one.

    The first points are the search's own start, the middle of the box, and `starts`;
    then points of which every coordinate is at the same share of its range; the rest
    are normal around a random one of these, by a twentieth to a half of the range. Of a
    set that is no bounded box the part within two reaches of the start counts. A point
    is drawn with a probability $\propto \exp(-k f(w))$ where $f$ is the mean, over
    records, of the loss less the least one of the same record at any of the points,
    clipped to $[0, B]$.

    Args:
        size: $M$, the number of points, each with an evaluation; more cost no privacy.
            Static.
        starts: Points of one's own, one a row, such as answers on public data; at most
            `size - 2`.
        share: The largest share of the squared budget. A plan takes less where less
            suffices to tell mean losses apart that are $B / 200$ apart.
        clip_range: $B$; by default the solver's clip norm times the kernel's reach.
        mechanism: The mechanism and its epsilon.

    Raises:
        ValueError: There are more starts than points.

    Privacy:
        One draw as in `Choice`: a record has a row of losses, from which its least one
        is taken, and nothing else is read.

    References:
        McSherry and Talwar, "Mechanism design via differential privacy", FOCS 2007.
    """

    size: Count = eqx.field(static=True, default=60)
    starts: Any = None
    share: Fraction = 0.3
    clip_range: Positive | None = None
    mechanism: Exponential = Exponential()

    def __check_init__(self):
        own = 0 if self.starts is None else len(self.starts)
        if self.size < own + 2:
            raise ValueError(
                f"Portfolio: size={self.size} points are too few for {own} starts, the "
                f"start and the middle; give size={own + 2} or more."
            )

    def points(
        self,
        feasible: AbstractSet,
        w0: Float[Array, " d"],
        reach: Number,
        *,
        key: PRNGKey,
    ) -> Float[Array, "size d"]:
        """The points: a function of public values and the key.

        Args:
            feasible: The set.
            w0: The start.
            reach: Of the kernel.
            key: A typed key.
        """
        key_base, key_length, key_move = derive(key, "base", "length", "move")
        lower, upper = _range(feasible, w0, cast(reach, w0))
        width = upper - lower
        shares = jnp.arange(1, _DIAGONAL + 1).astype(w0.dtype) / (_DIAGONAL + 1)
        diagonal = lower[None] + shares[:, None] * width[None]
        middle = (lower + upper) / 2
        known = [w0[None], middle[None], diagonal]
        if self.starts is not None:
            known.insert(2, jnp.asarray(self.starts, w0.dtype))
        known = jnp.concatenate(known)[: self.size]
        rest = self.size - len(known)
        base = jax.random.randint(key_base, (rest,), 0, len(known), jnp.int32)
        unit = jax.random.uniform(key_length, (rest, 1), w0.dtype)
        length = _NEAR * (_FAR / _NEAR) ** unit
        move = jax.random.normal(key_move, (rest, w0.size), w0.dtype)
        around = known[base] + length * move * width[None]
        points = jnp.clip(jnp.concatenate([known, around]), lower[None], upper[None])
        return jax.vmap(feasible.project)(points)

    def choice(self, clip_norm: Number, kernel: AbstractKernel) -> Choice:
        """The draw, with the range of the losses that is given or follows."""
        clip_range: Any = self.clip_range
        if clip_range is None:
            clip_range = clip_norm * kernel.reach
        return Choice(self.size, clip_range, self.mechanism)

    def split(self, scale: Number, size: int | None) -> tuple[Number, Number]:
        r"""The epsilon of the draw, and the noise multiplier of all that follows.

        Both together have the zero-concentrated privacy of a Gaussian release of
        multiplier `scale`: $\varepsilon^2 / 4 + m^{-2} = $ `scale`$^{-2}$.

        Args:
            scale: Their common noise multiplier.
            size: The planned number of records.
        """
        wanted = 2 * math.log(self.size) / _RESOLVED / size if size else _CERTAIN
        if _checks.concrete(scale) and scale == 0:
            return min(wanted, _CERTAIN), 0.0
        known = _checks.concrete(scale) and _checks.concrete(self.share)
        smaller = min if known else jnp.minimum
        epsilon = smaller(2 * self.share**0.5 / scale, wanted)
        return epsilon, (scale**-2 - epsilon**2 / 4) ** -0.5


def relative(losses: Float[Array, "n m"]) -> Float[Array, "n m"]:
    """Every record's losses less its own least one; infinity for those not finite."""
    finite = jnp.isfinite(losses)
    least = jnp.min(jnp.where(finite, losses, jnp.inf), axis=1, keepdims=True)
    least = jnp.where(jnp.isfinite(least), least, 0)
    return jnp.where(finite, losses - least, jnp.inf)


def _range(feasible, w0, reach):
    """The corners of the box, or of the part of another set that is near the start."""
    lower, upper = w0 - 2 * reach, w0 + 2 * reach
    if not isinstance(feasible, Box):
        return lower, upper
    largest = jnp.finfo(w0.dtype).max
    low, high = ends(feasible, w0)
    bounded = (low > -largest) & (high < largest)
    return jnp.where(bounded, low, lower), jnp.where(bounded, high, upper)
