"""How far one record moves a hypergradient that is computed inexactly, and how exactly.

Everything here is known before any data is seen, or from the released x.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .._fields import Number
from ..privacy.budget import People
from . import fixed_count
from .bounds import Bounds
from .constants import AbstractCertificate
from .problem import Levels, Sizes

# How much of the sensitivity both inexact solves may add, and how much rounding may.
_SOLVES, _ROUNDING = 0.01, 0.05
# More inner steps than anyone would run.
MOST_STEPS = 100_000
# Rows that are summed at once, and the units of roundoff granted to one record's loss.
ROWS, UNITS = 4096, 32


@dataclasses.dataclass(frozen=True)
class Effort:
    """How many steps the two inner solves take, fixed before any data is seen.

    Attributes:
        lower_steps: Accelerated gradient steps for the lower solution.
        linear_steps: Chebyshev steps for the linear system.
    """

    lower_steps: int
    linear_steps: int


@functools.lru_cache
def effort(certificate: AbstractCertificate, sizes: Sizes) -> Effort:
    r"""The fewest steps whose errors add at most 1 % to the sum of sensitivities.

    An error of $e$ in the hypergradient adds $2 e$ to the sensitivity of either role.
    Both solves get the same share: $C \alpha, c \tau \le (S_{up} + S_{low}) / 800$ at
    the worst $x$.

    Args:
        certificate: The bounds.
        sizes: The planned sizes.

    Raises:
        ValueError: The condition number asks for more steps than anyone would run.
    """
    bounds = certificate.bounds(sizes)
    allowed = _SOLVES / 8 * (bounds.upper + bounds.lower)
    ends = bounds.strong_convexity, bounds.smoothness

    def fewest(steps: Callable[[Any], Any], factor: Any) -> int:
        count = 1.0 if factor == 0 else math.inf
        if factor > 0 and allowed > 0:
            count = steps(allowed / factor)
        if not count <= MOST_STEPS:
            raise ValueError(
                "ImplicitBilevel: the constants ask for more than "
                f"{MOST_STEPS} inner steps, with smoothness {bounds.smoothness:.3g} "
                f"and strong convexity {bounds.strong_convexity:.3g}. Raise the strong "
                "convexity (mu_g) by a larger public penalty, or use PenaltyBilevel, "
                "which needs no constants."
            )
        return int(count)

    return Effort(
        fewest(
            lambda error: fixed_count.accelerated_steps(
                *ends, 2 * bounds.solution_radius, error
            ),
            bounds.lower_error,
        ),
        fewest(
            lambda factor: fixed_count.chebyshev_steps(*ends, factor),
            bounds.linear_error * bounds.upper_gradient,
        ),
    )


def at(
    certificate: AbstractCertificate,
    sizes: Sizes,
    dtype: DTypeLike,
    x: PyTree | None = None,
) -> Levels:
    r"""How far one replaced record of each level moves the computed hypergradient.

    $S_r + 2 (C \alpha + c \tau + \omega)$ with $\alpha$ and $\tau$ what the fixed
    numbers of steps guarantee at this $x$, and $\omega$ a bound on floating-point
    rounding to first order in the unit roundoff $u$. With $\rho = u (32 + \text{rows} +
    \text{chunks})$ the relative error of a mean over records, every gradient is off by
    $e = \rho L' + 100 u \beta r$ at most, with $L'$ the parts of $\nabla_y G$ where
    the accelerated method looks; the last term also stands for the sums that its steps
    make. They add up to an error of $2 e / \mu$ in $y$, those of the linear solver to a
    residual of at most $4 \sqrt\kappa (2 \kappa + 1) \rho p L_{fy}$, and the last sums
    to $2 \rho p \bar L$, where $p$ = `Bounds.parts`: sums round like their parts, which
    may cancel. No two values in the ball of radius $\bar L$ are further apart than $2
    \bar L$.

    Args:
        certificate: The bounds.
        sizes: The planned sizes.
        dtype: What the hypergradient is computed in.
        x: The upper variable; by default the worst.

    Returns:
        The sensitivities of a change in either level: on the host without `x`.
    """
    bounds = certificate.bounds(sizes, x)
    error = solve_error(bounds, effort(certificate, sizes))
    error += rounding_error(bounds, sizes, dtype)
    least = jnp.minimum if isinstance(error, jax.Array) else min
    return Levels(
        least(bounds.upper + 2 * error, 2 * bounds.gradient),
        least(bounds.lower + 2 * error, 2 * bounds.gradient),
    )


def check_dtype(
    certificate: AbstractCertificate, sizes: Sizes, dtype: DTypeLike
) -> None:
    """Refuses a plan whose rounding the dtype makes a large part of the sensitivity.

    Args:
        certificate: The bounds.
        sizes: The planned sizes.
        dtype: What the hypergradient is computed in.

    Raises:
        ValueError: Rounding would add more than 5 % to the sum of sensitivities.
    """
    bounds = certificate.bounds(sizes)
    added = 4 * rounding_error(bounds, sizes, dtype)
    if not added <= _ROUNDING * (bounds.upper + bounds.lower):
        name = jnp.dtype(dtype).name
        enable = (
            ""
            if name == "float64"
            else "Enable 64-bit with jax.config.update('jax_enable_x64', True) and "
            "give float64 records and starting point; or "
        )
        raise ValueError(
            f"ImplicitBilevel: in {name}, rounding may move the hypergradient by as "
            f"much as {added / (bounds.upper + bounds.lower):.2g} of what a record "
            f"may, and {_ROUNDING} is allowed. {enable}raise the strong convexity "
            "(mu_g) by a larger public penalty, in linear_tuning by the lower end of "
            "bounds=; or use PenaltyBilevel or SingleLoopBilevel, which clip."
        )


def ledger_sensitivity(
    certificate: AbstractCertificate, sizes: Sizes, dtype: DTypeLike
) -> Levels:
    r"""The sensitivities that a ledger lists: the largest ones over all x.

    Disjoint people have a ratio of noise to sensitivity per role, fixed before $x$ and
    the dtype are known. Where the sensitivities vary with $x$, each by its own factor,
    both roles are listed with the larger one: noise that serves the role that needs it
    most then serves the whole budget best.

    Args:
        certificate: The bounds.
        sizes: The planned sizes.
        dtype: What the hypergradient will be computed in.
    """
    shares = at(certificate, sizes, dtype)
    if sizes.people is not People.DISJOINT:
        return shares
    listed = ratios(certificate, sizes)
    factor = max(shares.upper / listed.upper, shares.lower / listed.lower)
    return Levels(factor * listed.upper, factor * listed.lower)


def ratios(certificate: AbstractCertificate, sizes: Sizes) -> Levels:
    """What the listed sensitivities of disjoint people are proportional to.

    Args:
        certificate: The bounds.
        sizes: The planned sizes.
    """
    bounds = certificate.bounds(sizes)
    error = 2 * solve_error(bounds, effort(certificate, sizes))
    upper, lower = float(bounds.upper + error), float(bounds.lower + error)
    # A role whose records move nothing sees but rounding; it must not ask for much.
    least = 1e-3 * max(upper, lower)
    upper, lower = max(upper, least), max(lower, least)
    if certificate.varies:
        upper = lower = max(upper, lower)
    return Levels(upper, lower)


def _lower_error(bounds: Bounds, steps: int):
    radius = 2 * bounds.solution_radius
    return fixed_count.accelerated_error(
        bounds.strong_convexity, bounds.smoothness, radius, steps
    )


def _linear_error(bounds: Bounds, steps: int):
    factor = fixed_count.chebyshev_error(
        bounds.strong_convexity, bounds.smoothness, steps
    )
    return factor * bounds.upper_gradient


def solve_error(bounds: Bounds, effort: Effort) -> Number:
    """How far both inexact solves move the hypergradient.

    Args:
        bounds: The bounds at an x.
        effort: The numbers of steps.
    """
    return bounds.lower_error * _lower_error(
        bounds, effort.lower_steps
    ) + bounds.linear_error * _linear_error(bounds, effort.linear_steps)


def rounding_error(bounds: Bounds, sizes: Sizes, dtype: DTypeLike) -> Number:
    """How far rounding moves the hypergradient, to first order; see `at`.

    Args:
        bounds: The bounds at an x.
        sizes: The planned sizes.
        dtype: What it is computed in.
    """
    mean = _mean_rounding(sizes, dtype) * bounds.parts
    kappa = fixed_count.condition_number(bounds.strong_convexity, bounds.smoothness)
    linear = 4 * kappa**0.5 * (2 * kappa + 1) * mean * bounds.upper_gradient
    return (
        bounds.lower_error * solution_rounding(bounds, sizes, dtype)
        + bounds.linear_error * linear
        + 2 * mean * bounds.gradient
    )


def solution_rounding(bounds: Bounds, sizes: Sizes, dtype: DTypeLike) -> Number:
    r"""How far rounding moves a computed lower solution, to first order; see `at`.

    Args:
        bounds: The bounds at an x.
        sizes: The planned sizes.
        dtype: What it is computed in.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    gradient = _mean_rounding(sizes, dtype) * bounds.lower_gradient
    gradient += 100 * unit * bounds.smoothness * bounds.solution_radius
    return 2 * gradient / bounds.strong_convexity


def _mean_rounding(sizes: Sizes, dtype: DTypeLike) -> float:
    """The relative error of a mean over records."""
    n = max(sizes.upper, sizes.lower)
    return float(jnp.finfo(dtype).eps) / 2 * (UNITS + min(n, ROWS) + -(-n // ROWS))
