"""Exact sums on a public grid: integer counts of a step that is a power of two."""

import contextlib
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .floats import floor_log2, power_of_two
from .noise import PRNGKey, standard_normal

# A released value is rounded to steps of this share of a record's contribution over the
# root of the number of coordinates, which moves neighbours apart by at most 2**-12 of
# it; the margin of the mechanisms covers that.
_RELEASE_BITS = 12
# Beyond this many steps the values of a float64 normal no longer fill the grid.
_LARGEST_SCALE = 2.0**36
# Counts are cut here before they are shifted or added: a sum that wrapped around would
# set neighbours apart by the whole range, a cut one never moves them apart.
_LARGEST_COUNT = 2**61
# The step in shares of the sensitivity of a value that is rounded as a whole.
ROUNDED_BITS = 24


def wide_integers() -> contextlib.AbstractContextManager:
    """Where 64-bit types exist, whatever `jax_enable_x64` says outside."""
    return jax.enable_x64(True)


class Grid(eqx.Module):
    r"""A pytree of real values $k \cdot 2^e$ with integer $k$.

    Attributes:
        counts: The integers $k$, 64 bits wide.
        exponent: $e$, the same for all leaves; public.
        contribution: The largest share of one record; of the role with the smallest
            one, where several roles were added.
        dtypes: What each leaf becomes when it is released.
    """

    counts: PyTree
    exponent: Int[Array, ""]
    contribution: Float[Array, ""]
    dtypes: tuple = eqx.field(static=True)

    def __add__(self, other: "Grid") -> "Grid":
        """The sum on the finer of the two grids, exact below 2^61 counts."""
        with wide_integers():
            exponent = jnp.minimum(self.exponent, other.exponent)
            contribution = jnp.minimum(
                *(v.contribution.astype(jnp.float64) for v in (self, other))
            )
            ours, theirs = self.exponent - exponent, other.exponent - exponent
            left = jax.tree.map(lambda v: _shift(v, ours), self.counts)
            right = jax.tree.map(lambda v: _shift(v, theirs), other.counts)
            counts = optax.tree.add(left, right)
        return Grid(counts, exponent, contribution, self.dtypes)

    def values(self) -> PyTree:
        """The values as floating-point leaves, each rounded once. NON-PRIVATE."""
        with wide_integers():
            step = power_of_two(self.exponent, jnp.float64)
            values = jax.tree.map(lambda v: v.astype(jnp.float64) * step, self.counts)
            return self._in_dtypes(values)

    def _in_dtypes(self, values: PyTree) -> PyTree:
        """Each leaf as it is released."""
        treedef: Any
        leaves, treedef = jax.tree.flatten(values)
        pairs = zip(leaves, self.dtypes, strict=True)
        return treedef.unflatten([leaf.astype(dtype) for leaf, dtype in pairs])

    def with_noise(
        self, std: float | Float[Array, ""], passes: Bool[Array, ""], *, key: PRNGKey
    ) -> PyTree:
        r"""The value plus Gaussian noise, both rounded to one grid.

        For an integer $k$, $\mathrm{round}(k + s z) = k + \mathrm{round}(s z)$: adding
        rounded noise to integers is rounding the Gaussian mechanism's output, which
        costs no privacy, and the addition is exact.

        Args:
            std: The noise's standard deviation.
            passes: Whether the value is released at all, or noise alone.
            key: A typed key for this draw alone.

        Returns:
            Floating-point leaves. Noise alone where `std` is not finite or exceeds 2^36
            steps.
        """
        leaves = jax.tree.leaves(self.counts)
        coordinates = max(sum(v.size for v in leaves), 1)
        with wide_integers():
            std, contribution = (
                jax.lax.stop_gradient(jnp.asarray(v)).astype(jnp.float64)
                for v in (std, self.contribution)
            )
            step = contribution * 2.0**-_RELEASE_BITS / math.sqrt(coordinates)
            exponent = floor_log2(step)
            step = power_of_two(exponent, jnp.float64)
            scale = std / step
            passes &= (contribution > 0) & (jnp.abs(scale) < _LARGEST_SCALE)
            like = jax.tree.map(
                lambda v: jax.ShapeDtypeStruct(v.shape, jnp.float64), self.counts
            )
            noise = standard_normal(like, key=key)

            def release(counts, z):
                kept = _shift(counts, self.exponent - exponent)
                drawn = jnp.round(scale * z).astype(jnp.int64)
                return (jnp.where(passes, kept, 0) + drawn).astype(jnp.float64) * step

            return self._in_dtypes(jax.tree.map(release, self.counts, noise))


def on_grid(value: PyTree, sensitivity: Float[Array, ""]) -> Grid:
    r"""A floating-point value rounded to a grid as a whole.

    Two values end up at most $\sqrt d \cdot 2^{-24}$ of the sensitivity further apart.

    Args:
        value: Floating-point leaves.
        sensitivity: How far one record moves the value; for several roles, the
            smallest. Its power of two is the grid's, and public.
    """
    exponent = floor_log2(sensitivity) - ROUNDED_BITS
    dtypes = tuple(v.dtype for v in jax.tree.leaves(value))
    value = jax.lax.stop_gradient(value)
    with wide_integers():

        def count(v):
            steps = v.astype(jnp.float64) * power_of_two(-exponent, jnp.float64)
            limit = np.float64(_LARGEST_COUNT)
            return jnp.round(jnp.clip(steps, -limit, limit)).astype(jnp.int64)

        counts = jax.tree.map(count, value)
    return Grid(counts, exponent, sensitivity / 2, dtypes)


def _shift(counts: Int[Array, "..."], places: Int[Array, ""]) -> Int[Array, "..."]:
    """Counts of a step finer by `places` bits, or rounded to one coarser by -places."""
    places = places.astype(jnp.int64)
    left, right = jnp.clip(places, 0, 61), jnp.clip(-places, 0, 61)
    largest = jnp.int64(_LARGEST_COUNT) >> left
    half = (jnp.int64(1) << right) >> 1
    shifted = ((jnp.clip(counts, -largest, largest) << left) + half) >> right
    return jnp.where(jnp.abs(places) > 61, 0, shifted)
