"""Mechanisms: the only code that opens a bounded value."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ._lazy import dp_accounting
from .budget import Neighbours
from .exact.grid import Grid
from .exact.normal import standard_normal
from .noise import PRNGKey, check_shared
from .per_example.clipping import SUMS, Bounded, Precision

# Noise is this much larger than claimed, to cover the rounding of clipped sums in
# floating point or to the grid of the noise (at most 2**-12 of a contribution), of
# multipliers and of clip norms in float32.
ROUNDING_MARGIN = 2.0**-11


class Gaussian(eqx.Module):
    r"""The Gaussian mechanism: adds $\mathcal N(0, (m S)^2 I)$ to a bounded value.

    Args:
        noise_multiplier: $m \ge 0$, the noise's standard deviation over the value's
            $\ell_2$ sensitivity $S$. `None` until a plan sets it.
        neighbours: The relation under which $S$ is taken.
        precision: Precision of the values that it releases: `"grid"`, on which noise
            and value are integers and their sum is exact, or `"float"`, for research.
            Static.

    Privacy:
        One release of a bounded value; exactly $1/m$-GDP. With $m = 0$ nothing is
        private and the ledger says so. In precision `"float"` noise and sum are
        idealised as reals: a float that can be reached from one value and not from its
        neighbour identifies the value. On the grid the noise is an integer made of
        random bits, whose distribution is proved (docs/precision.md, "The distribution
        of the noise").
    """

    noise_multiplier: float | Float[Array, ""] | None = None
    neighbours: Neighbours = eqx.field(static=True, default=Neighbours.REPLACE_ONE)
    precision: Precision = eqx.field(static=True, default="grid")

    def __check_init__(self):
        if self.noise_multiplier is not None:
            _checks.non_negative("Gaussian", noise_multiplier=self.noise_multiplier)
        if not isinstance(self.neighbours, Neighbours):
            raise TypeError(
                "Gaussian: neighbours must be one of "
                f"{', '.join(map(str, Neighbours))}, got {self.neighbours!r}."
            )
        _checks.one_of("Gaussian", "precision", self.precision, tuple(SUMS))

    def release(self, bounded: Bounded, *, key: PRNGKey) -> PyTree:
        """Opens `bounded` and returns its value plus noise.

        Args:
            bounded: What to release.
            key: A typed key for this release alone.

        Returns:
            A pytree like the value, in float32 or float64. To automatic
            differentiation it is a constant: derivatives of a solver's output see
            released values only and are post-processing.

        Raises:
            ValueError: The mechanism is not calibrated, the value is of another
                precision, or processes that share it have different keys.
            TypeError: `bounded` is not a `Bounded`, the key is not typed, or the
                multiplier is of half precision.
        """
        if not isinstance(bounded, Bounded):
            raise TypeError(
                "Gaussian: only a Bounded value can be released, because its "
                f"sensitivity is known; got {type(bounded).__name__}. Compute it with "
                "clipped_mean."
            )
        if bounded.precision != self.precision:
            raise ValueError(
                f"Gaussian: precision is {self.precision!r}, but the value is of "
                f"precision {bounded.precision!r}; give clipped_mean and Gaussian the "
                "same precision=."
            )
        check_shared(key, bounded.raw)
        _checks.single_precision("Gaussian", self)
        multiplier = _checks.at_least_single(self.multiplier)
        _checks.non_negative("Gaussian", noise_multiplier=multiplier)
        std = multiplier * (1 + ROUNDING_MARGIN) * bounded.sensitivity(self.neighbours)
        # Noise that underflows must not pass for a multiplier of zero.
        passes = (jnp.asarray(std) != 0) | (jnp.asarray(multiplier) == 0)
        if isinstance(bounded.raw, Grid):
            released = bounded.raw.with_noise(std, passes, key=key)
        else:
            noise = standard_normal(bounded.raw, key=key)
            released = jax.tree.map(
                lambda v, z: jnp.where(passes, v, 0).astype(z.dtype) + std * z,
                bounded.raw,
                noise,
            )
        # The noise is additive, so a derivative through the sum would bypass it.
        return jax.lax.stop_gradient(released)

    def event(self) -> "dp_accounting.GaussianDpEvent":
        """One release as an event of dp-accounting.

        Its multiplier is relative to the sensitivity under `neighbours`, so it must be
        composed by an add-or-remove accountant, which does not double it.

        Raises:
            ValueError: The mechanism is not calibrated.
        """
        return dp_accounting.GaussianDpEvent(float(self.multiplier))

    def scaled(self, factor: float | Float[Array, ""]) -> "Gaussian":
        """The same mechanism with `factor` times the noise."""
        return dataclasses.replace(self, noise_multiplier=factor * self.multiplier)

    def with_multiplier(self, noise_multiplier: float | Float[Array, ""]) -> "Gaussian":
        """The same mechanism with this noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def with_precision(self, precision: Precision) -> "Gaussian":
        """The same mechanism for values of this precision."""
        return dataclasses.replace(self, precision=precision)

    @property
    def multiplier(self) -> float | Float[Array, ""]:
        """The calibrated `noise_multiplier`.

        Raises:
            ValueError: There is none yet.
        """
        if self.noise_multiplier is None:
            raise ValueError(
                "Gaussian: no noise multiplier yet, so nothing can be released. Get a "
                "calibrated solver from dpbilevel.calibrate(problem, solver, budget, "
                "sizes=...).solver, or give noise_multiplier=."
            )
        return self.noise_multiplier
