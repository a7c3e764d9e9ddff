"""Mechanisms: the only library code that opens a sealed value, to add noise to it."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar  # noqa: F811
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from .._checks import NonNegative, Number
from .._extras import dp_accounting
from .budget import Neighbours
from .exact.grid import Grid
from .exact.int61 import Limbs
from .exact.normal import normal_integers, standard_normal
from .keys import PRNGKey, check_key, check_shared
from .per_example.clipping import Bounded, Precision

# Noise is this much larger than claimed, to cover the rounding of clipped sums in
# floating point or to the grid of the noise (at most 2**-12 of a contribution), of
# multipliers and of clip norms in float32.
ROUNDING_MARGIN = 2.0**-11


class AbstractMechanism(_checks.Checked):
    """A mechanism: makes one value that was computed from records public.

    Ledger and report read a mechanism through the members of this class alone.

    Attributes:
        neighbours: The relation that sensitivities are taken under. Static.
        precision: Name of the arithmetic, for the report. Static.
    """

    neighbours: AbstractVar[Neighbours]
    precision: AbstractVar[str]

    @abc.abstractmethod
    def event(self, fraction: float = 1.0) -> "dp_accounting.DpEvent":
        """Return the event of a release for a person who moves the value by `fraction`.

        Its parameters refer to the sensitivity under `neighbours`, so it must be
        composed by an add-or-remove accountant, which does not double it.

        Args:
            fraction: The largest change by the person, in (0, 1], in units of the
                sensitivity.

        Raises:
            ValueError: The mechanism is not calibrated.
        """

    @abc.abstractmethod
    def scaled(self, factor: Number) -> Self:
        """Return a copy of the mechanism with `factor` times the noise."""


class AbstractNoise(AbstractMechanism):
    """A mechanism that adds noise to a bounded value; `Release` takes any.

    A new one is a file with a subclass, its name in `dpbilevel/privacy/__init__.py`,
    and its entry in tests/contract/test_mechanisms.py.

    Attributes:
        precision: Precision of the values that it releases, as in `clipped_mean`.
        multiplier: The standard deviation of the noise, in units of the sensitivity.
            Raises `ValueError` if the mechanism is not calibrated.
        independent: Whether the noise of a release is independent of that of all
            others.
    """

    precision: AbstractVar[Precision]
    multiplier: AbstractVar[Number]
    independent: ClassVar[bool] = True

    @property
    def deviation(self) -> Number:
        """The standard deviation of all that is added, in units of the sensitivity.

        By default `multiplier`. A mechanism that adds more than a draw of fresh noise
        overrides it.
        """
        return self.multiplier

    @abc.abstractmethod
    def part(self, share: float) -> "dp_accounting.DpEvent":
        """Return the event of a part `share` of a release; all parts amount to it.

        A person with a record in each role is charged one part a role. Independent
        releases with these events must be at least as revealing as one release of the
        sum, whatever batches they are made of.

        Args:
            share: Fraction of the sensitivity; fractions add up to 1.

        Raises:
            ValueError: The mechanism is no such composition; people must then be
                disjoint.
        """

    @abc.abstractmethod
    def release(self, bounded: Bounded, *, key: PRNGKey) -> PyTree:
        """Open `bounded` and return its value plus noise.

        Args:
            bounded: The value and its sensitivity.
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


def check_release(mechanism: AbstractNoise, bounded: Bounded, key: PRNGKey) -> None:
    """Raise an error if a mechanism may not open a value; every `release` begins so.

    Raises:
        ValueError: As `AbstractNoise.release`.
        TypeError: As `AbstractNoise.release`.
    """
    owner = type(mechanism).__name__
    _checks.instance(owner, Bounded, bounded=bounded)
    if bounded.precision != mechanism.precision:
        raise ValueError(
            f"{owner}: precision is {mechanism.precision!r}, but that of the value is "
            f"{bounded.precision!r}. Give clipped_mean the same."
        )
    check_shared(check_key(key), bounded.raw)
    _checks.single_precision(owner, mechanism)


class Gaussian(AbstractNoise):
    r"""The Gaussian mechanism: adds $\mathcal N(0, (m S)^2 I)$ to a bounded value.

    Args:
        noise_multiplier: $m \ge 0$, the noise's standard deviation over the value's
            $\ell_2$ sensitivity $S$. `None` until a plan sets it.
        neighbours: The relation under which $S$ is taken. Static.
        precision: Precision of the values that it releases: `"grid"`, on which noise
            and value are integers and their sum is exact, or `"float"`, for research.
            Static.

    Attributes:
        finer: Bits by which the grid is finer than rounding of the value needs.
        integers: Draws the integers of the noise.

    Privacy:
        One release of a bounded value; exactly $1/m$-GDP. With $m = 0$ nothing is
        private and the ledger says so. In precision `"float"` noise and sum are
        idealised as reals: a float that can be reached from one value and not from its
        neighbour identifies the value. On the grid the noise is an integer made of
        random bits, whose distribution is proved (docs/mathematics.md, "The
        distribution of the noise").
    """

    noise_multiplier: NonNegative | None = None
    neighbours: Neighbours = eqx.field(static=True, default=Neighbours.REPLACE_ONE)
    precision: Precision = eqx.field(static=True, default="grid")
    finer: ClassVar[int] = 0
    integers: ClassVar[Callable[..., list[Limbs]]] = staticmethod(normal_integers)

    @override
    def release(self, bounded, *, key):
        check_release(self, bounded, key)
        multiplier = _checks.at_least_single(self.multiplier)
        _checks.non_negative("Gaussian", noise_multiplier=multiplier)
        std = multiplier * (1 + ROUNDING_MARGIN) * bounded.sensitivity(self.neighbours)
        # Noise that underflows must not pass for a multiplier of zero.
        passes = (jnp.asarray(std) != 0) | (jnp.asarray(multiplier) == 0)
        if isinstance(bounded.raw, Grid):
            grid: Any = {"draw": self.integers, "finer": self.finer}
            released = bounded.raw.with_noise(std, passes, **grid, key=key)
        else:
            noise = standard_normal(bounded.raw, key=key, draw=self.integers)

            def noisy(v, z):
                return jnp.where(passes, v, 0).astype(z.dtype) + std * z

            released = jax.tree.map(noisy, bounded.raw, noise)
        # The noise is additive, so a derivative through the sum would bypass it.
        return jax.lax.stop_gradient(released)

    @override
    def event(self, fraction: float = 1.0) -> "dp_accounting.GaussianDpEvent":
        return dp_accounting.GaussianDpEvent(float(self.multiplier) / fraction)

    @override
    def part(self, share: float) -> "dp_accounting.GaussianDpEvent":
        """Return the Gaussian event of multiplier `multiplier / share**0.5`."""
        return self.event(share**0.5)

    @override
    def scaled(self, factor: Number) -> Self:
        return self.with_multiplier(factor * self.multiplier)

    def with_multiplier(self, noise_multiplier: Number) -> Self:
        """Return a copy of the mechanism with this noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    @property
    @override
    def multiplier(self) -> Number:
        if self.noise_multiplier is None:
            raise ValueError(
                "Gaussian: no noise multiplier yet. Take the solver from "
                "dpbilevel.calibrate(problem, solver, budget, sizes=...).solver."
            )
        return self.noise_multiplier
