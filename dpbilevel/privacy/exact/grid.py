"""Exact sums on a public grid: integer counts of a step that is a power of two."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, PyTree

from ..keys import PRNGKey
from . import int61
from .floats import floor_log2, is_below, is_finite, power_of_two, upper_mantissa
from .int61 import FRACTION_BITS, MOST_PLACES, Limbs, is_limbs
from .normal import LOG2_STD, MOST_DOUBLINGS, normal_integers

# A released value is rounded to steps of at most half this part of a record's
# contribution over the root of the number of coordinates, twice, which moves neighbours
# apart by at most 2**-12 of it; the margin of the mechanisms covers that.
_RELEASE_BITS = 12
# Bits from the step up to the sensitivity, of a value that is rounded as a whole.
ROUNDED_BITS = 24


class Grid(eqx.Module):
    r"""A pytree of real values $k \cdot 2^e$ with integer $k$.

    Attributes:
        counts: The integers $k$, a pytree of `Limbs`.
        exponent: $e$, the same for all leaves; public.
        contribution: The largest share of one record; of the role with the smallest
            one, where several roles were added. 0 if the value is never released.
        dtypes: What each leaf becomes when it is released.
    """

    counts: PyTree
    exponent: Int[Array, ""]
    contribution: Float[Array, ""]
    dtypes: tuple = eqx.field(static=True)

    def __add__(self, other: "Grid") -> "Grid":
        """Return the sum as a `Grid` with the finer step, exact below 2^60 counts.

        Of steps more than 2^30 apart no grid holds both: the contribution of the sum is
        then 0, and noise is released alone.
        """
        places = self.exponent - other.exponent
        ours, theirs = (jnp.clip(v, 0, MOST_PLACES) for v in (places, -places))
        counts = jax.tree.map(
            lambda a, b: a.finer(ours) + b.finer(theirs),
            self.counts,
            other.counts,
            is_leaf=is_limbs,
        )
        shares = self.contribution, other.contribution
        dtype = max((v.dtype for v in shares), key=lambda kind: jnp.finfo(kind).bits)
        contribution = jnp.minimum(*(v.astype(dtype) for v in shares))
        contribution = jnp.where(jnp.abs(places) <= MOST_PLACES, contribution, 0)
        exponent = jnp.minimum(self.exponent, other.exponent)
        return Grid(counts, exponent, contribution, self.dtypes)

    def values(self, numerator: int | Int32[Array, ""] = 2**FRACTION_BITS) -> PyTree:
        """Return a pytree of the values as floats, each rounded once. NON-PRIVATE.

        With a `numerator` they are times `2**15 / numerator`, and rounded twice.
        """
        leaves, treedef = jax.tree.flatten(self.counts, is_leaf=is_limbs)

        def value(leaf, dtype):
            inverse = 2.0**FRACTION_BITS / jnp.asarray(numerator, dtype)
            return _times_power(leaf.astype(dtype) * inverse, self.exponent)

        return treedef.unflatten(map(value, leaves, self.dtypes))

    def with_noise(
        self,
        std: float | Float[Array, ""],
        passes: Bool[Array, ""],
        *,
        draw: Callable[..., list[Limbs]] = normal_integers,
        finer: int = 0,
        key: PRNGKey,
    ) -> PyTree:
        """Return a pytree of floats: the value plus Gaussian noise on one integer grid.

        The step follows from the noise: it is the standard deviation, rounded up by at
        most $10^{-4}$ of it, over $2^{10 + h}$ with a public $h$. The noise is then the
        same integer for every standard deviation, with the law of a rounded Gaussian
        (`normal_integers`): adding it to integers is rounding the Gaussian mechanism's
        output, which costs no privacy, and the addition is exact.

        Args:
            std: The noise's standard deviation.
            passes: Whether the value is released at all, or noise alone.
            draw: What draws the integers of the noise, as `normal_integers` does.
            finer: Bits by which the step is finer than rounding of the value needs.
            key: A typed key for this draw alone.

        Returns:
            Floating-point leaves. Noise alone where `std` is not finite or exceeds 2^52
            steps. Noise too small for a step of 2^-30 of the sum's is drawn as large as
            that step allows, at most $2^{-43}$ of the contribution.
        """
        leaves, treedef = jax.tree.flatten(self.counts, is_leaf=is_limbs)
        size = sum(math.prod(v.shape) for v in leaves)
        std = jax.lax.stop_gradient(jnp.abs(jnp.asarray(std)))
        contribution = jax.lax.stop_gradient(self.contribution)
        coarsest = floor_log2(contribution) - release_places(size, finer)
        # Zero by its bits: numbers below the normal ones may count as zero or not.
        silent = is_below(std, float(jnp.finfo(std.dtype).smallest_subnormal))
        first = jnp.where(silent, coarsest, floor_log2(std) - LOG2_STD)
        finest = self.exponent - MOST_PLACES
        # Noise below that of the finest step is drawn as large as that step makes it.
        whole = silent | (first < finest)
        first = jnp.maximum(first, finest)
        doublings = jnp.clip(first - coarsest, 0, MOST_DOUBLINGS)
        exponent = first - doublings
        passes &= is_finite(contribution) & is_finite(std)
        passes &= contribution >= jnp.finfo(contribution.dtype).tiny
        passes &= (silent | (std >= jnp.finfo(std.dtype).tiny)) & (exponent <= coarsest)
        # It is from 2^14 to 2^15, and at most 2^15 over the mantissa of `std`.
        inverse = 2 ** (2 * FRACTION_BITS) // upper_mantissa(std, FRACTION_BITS)
        numerator = jnp.where(whole, 2**FRACTION_BITS, inverse)
        shift = jnp.maximum(self.exponent - exponent, -MOST_PLACES)

        def release(counts, noise):
            kept = counts.shifted(shift).times_fraction(numerator)
            kept = jax.tree.map(lambda v: jnp.where(passes, v, 0), kept)
            return kept + jax.tree.map(lambda v: jnp.where(silent, 0, v), noise)

        noise = draw([v.shape for v in leaves], doublings, key=key)
        counts = treedef.unflatten(map(release, leaves, noise))
        released = Grid(counts, exponent, self.contribution, self.dtypes)
        return released.values(numerator)


def release_places(size: int, finer: int = 0) -> int:
    """Return how many bits the grid step is below a contribution, for `size` numbers.

    Noise has at most 52 of them: `with_noise` adds no value to noise that has more.
    """
    return finer + _RELEASE_BITS + 2 + math.ceil(math.log2(max(size, 1)) / 2)


def on_grid(value: PyTree, sensitivity: Float[Array, ""]) -> Grid:
    r"""Round floating-point leaves to a `Grid`: integers times one power of two.

    Two values end up at most $\sqrt d \cdot 2^{-24}$ of the sensitivity further apart,
    which is how far one record moves the value; for several roles, the smallest. Its
    power of two is the grid's, and public.
    """
    exponent = floor_log2(sensitivity) - ROUNDED_BITS
    dtypes = tuple(v.dtype for v in jax.tree.leaves(value))
    value = jax.lax.stop_gradient(value)
    counts = jax.tree.map(lambda v: int61.from_float(_times_power(v, -exponent)), value)
    return Grid(counts, exponent, sensitivity / 2, dtypes)


def _times_power(value: Float[Array, "..."], exponent: Int[Array, ""]) -> Array:
    """Return the value times 2**exponent, by two powers that do not overflow."""
    half = exponent >> 1
    powers = [power_of_two(v, value.dtype) for v in (half, exponent - half)]
    # Constants would be multiplied first.
    first, second = jax.lax.optimization_barrier(powers)
    return value * first * second
