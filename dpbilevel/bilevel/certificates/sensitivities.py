"""Sensitivity of a hypergradient that is computed inexactly, and its error.

Everything here is known before any data is seen, or from the released x. `certificate`
holds the bounds, `sizes` are the planned ones, `dtype` is that of the computation, and
`bounds` are the certificate's at an `x`, by default at the worst one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ... import _checks
from ..._checks import Number
from ...core.problem import AbstractProblem
from ...privacy.budget import People
from ...privacy.exact.floats import all_finite, check_rounding, unit_roundoff
from ...privacy.per_example.structure import rowwise
from ...privacy.records.rows import reader
from ..problem import BilevelProblem, Levels, Sizes
from .constants import AbstractCertificate
from .fixed_count import Bounds

# How much of the sensitivity both inexact solves may add, and how much rounding may.
_SOLVES, _ROUNDING = 0.01, 0.05
# More inner steps than anyone would run.
MOST_STEPS = 100_000
# Coordinates of x and y that a ledger lists the rounding of clipped contributions for.
_LISTED_DIMENSIONS = 64, 4096
# Rows that are summed at once, and the units of roundoff granted to one record's loss.
ROWS, UNITS = 4096, 32


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Numbers of steps of the two inner solves, fixed before any data is seen."""

    lower: int  # accelerated gradient steps for the lower solution
    linear: int  # Chebyshev steps for the linear system


@functools.lru_cache
def step_counts(certificate: AbstractCertificate, sizes: Sizes) -> StepCounts:
    r"""Return `StepCounts` whose errors add at most 1 % to the sensitivities' sum.

    An error of $e$ in the hypergradient adds $2 e$ to the sensitivity of either role.
    Both solves get the same share: $C \alpha, c \tau \le (S_{up} + S_{low}) / 800$ at
    the worst $x$.
    """
    bounds = certificate.bounds(sizes)
    allowed = _SOLVES / 8 * (bounds.upper + bounds.lower)  # solves, roles, neighbours
    spectrum, radius = bounds.spectrum, 2 * bounds.solution_radius

    def fewest(steps: Callable[[Any], Any], factor: Any) -> int:
        count = 1.0 if factor == 0 else math.inf
        if factor > 0 and allowed > 0:
            count = steps(allowed / factor)
        if not count <= MOST_STEPS:
            raise ValueError(
                f"ImplicitBilevel: needs more than {MOST_STEPS} inner steps. Raise the "
                "strong convexity by a public penalty, or use PenaltyBilevel."
            )
        return int(count)

    accelerated = functools.partial(spectrum.accelerated_steps, radius)
    linear_factor = bounds.linear_error * bounds.upper_gradient
    linear = fewest(spectrum.chebyshev_steps, linear_factor)
    return StepCounts(fewest(accelerated, bounds.lower_error), linear)


def hypergradient_sensitivity(
    certificate: AbstractCertificate,
    sizes: Sizes,
    dtype: DTypeLike,
    x: PyTree | None = None,
    dimensions: tuple[int, int] = (1, 1),
) -> Levels:
    r"""Return `Levels`: bounds on how far a replaced record moves the hypergradient.

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
    \bar L$. Numbers on the host without `x`.

    Where upper records are clipped, at $C$, they are charged $2 C / n_f$ alone, as no
    error of the lower level depends on them. $d_x$ systems are solved then, and with
    $d_x, d_y$ the `dimensions`, by default the least ones, $\omega$ has instead of the
    last two terms the following. As $\|\nabla_{xy} G\, w\| \le c \sqrt\mu
    \|w\|_H$ for all $w$, the right-hand sides together are at most $c \sqrt{d_x \mu
    \beta}$ long, which makes the linear term $\sqrt{d_x \kappa}$ times as large; one
    record's contribution is off by $u (32 + d_y) p (\bar L + \sqrt{d_x} c L_{fy})$; and
    clips and their sum, in groups of 64, by $u (128 + 2 d_x) C$.
    """
    bounds = certificate.bounds(sizes, x)
    error = solve_error(bounds, step_counts(certificate, sizes))
    error += rounding_error(bounds, sizes, dtype, dimensions)
    least = jnp.minimum if isinstance(error, jax.Array) else min
    of_upper = error if bounds.clip is None else 0 * error
    return Levels(
        least(bounds.upper + 2 * of_upper, 2 * bounds.largest),  # both are in one ball
        least(bounds.lower + 2 * error, 2 * bounds.largest),
    )


def check_dtype(
    certificate: AbstractCertificate, sizes: Sizes, dtype: DTypeLike
) -> None:
    """Refuse a dtype whose rounding adds over 5 % to the sum of sensitivities."""
    bounds = certificate.bounds(sizes)
    check_rounding(
        "ImplicitBilevel",
        "roundings of the hypergradient",
        4 * rounding_error(bounds, sizes, dtype),  # two neighbours, two roles
        bounds.upper + bounds.lower,
        dtype,
        allowed=_ROUNDING,
        remedy="raise the strong convexity (mu_g) by a larger public penalty, in "
        "linear_tuning by the lower end of bounds=; or use PenaltyBilevel or "
        "SingleLoopBilevel, which clip",
    )


def ledger_sensitivity(
    certificate: AbstractCertificate, sizes: Sizes, dtype: DTypeLike
) -> Levels:
    """Return `Levels` of the sensitivities that a ledger lists, the worst over x.

    Disjoint people have a ratio of noise to sensitivity per role, fixed before $x$ and
    the dtype are known. If the sensitivities vary with $x$, each by its own factor,
    both roles are listed with the larger one: noise that serves the role that needs it
    most then serves the whole budget best. The rounding of clipped contributions is
    listed for 64 coordinates of $x$ and 4096 of $y$; with more, the noise is larger
    than listed.
    """
    shares = hypergradient_sensitivity(
        certificate, sizes, dtype, dimensions=_LISTED_DIMENSIONS
    )
    ratios, factor = multiple_of_ratios(certificate, sizes, shares)
    return Levels(factor * ratios.upper, factor * ratios.lower)


def multiple_of_ratios(
    certificate: AbstractCertificate, sizes: Sizes, shares: Levels
) -> tuple[Levels, Any]:
    """Return (ratios, factor to cover `shares`) for disjoint people, else (shares, 1).

    For disjoint people `role_ratios` and the least factor that makes them as large as
    the shares, what a record of each level changes at some $x$; the shares themselves
    and 1 for all others.
    """
    if sizes.people is not People.DISJOINT:
        return shares, 1.0
    ratios = role_ratios(certificate, sizes)
    parts = shares.upper / ratios.upper, shares.lower / ratios.lower
    most = jnp.maximum if isinstance(parts[0], jax.Array) else max
    return ratios, most(*parts)


def role_ratios(certificate: AbstractCertificate, sizes: Sizes) -> Levels:
    """Return `Levels` in the ratio of the sensitivities; equal if these vary in x."""
    bounds = certificate.bounds(sizes)
    error = 2 * solve_error(bounds, step_counts(certificate, sizes))
    upper, lower = float(bounds.upper + error), float(bounds.lower + error)
    # A role whose records move nothing has rounding alone, which must not cost much.
    least = 1e-3 * max(upper, lower)
    upper, lower = max(upper, least), max(lower, least)
    if certificate.varies:  # each by its own factor
        upper = lower = max(upper, lower)
    return Levels(upper, lower)


def solve_error(bounds: Bounds, counts: StepCounts) -> Number:
    """Return a bound on how far both inexact solves move the hypergradient."""
    spectrum, radius = bounds.spectrum, 2 * bounds.solution_radius
    lower = spectrum.accelerated_error(radius, counts.lower)
    linear = spectrum.chebyshev_error(counts.linear) * bounds.upper_gradient
    return bounds.lower_error * lower + bounds.linear_error * linear


def hypergradient_error(
    certificate: AbstractCertificate, sizes: Sizes, dtype: DTypeLike
) -> Number:
    """Return a bound on an unclipped hypergradient's error: solves and rounding."""
    bounds, steps = certificate.bounds(sizes), step_counts(certificate, sizes)
    return solve_error(bounds, steps) + rounding_error(bounds, sizes, dtype)


def rounding_error(
    bounds: Bounds, sizes: Sizes, dtype: DTypeLike, dimensions: tuple[int, int] = (1, 1)
) -> Number:
    """Return a first-order bound on how far rounding moves the hypergradient.

    As derived at `hypergradient_sensitivity`.
    """
    mean = _mean_rounding(bounds, sizes, dtype) * bounds.parts
    kappa = bounds.spectrum.condition_number
    linear = 4 * kappa**0.5 * (2 * kappa + 1) * mean * bounds.upper_gradient
    last = 2 * mean * bounds.gradient
    if bounds.clip is not None:
        (of_x, of_y), unit = dimensions, unit_roundoff(dtype)
        linear = linear * (of_x * kappa) ** 0.5
        turned = of_x**0.5 * bounds.linear_error * bounds.upper_gradient
        last = unit * (UNITS + of_y) * bounds.parts * (bounds.gradient + turned)
        last += unit * (128 + 2 * of_x) * bounds.clip
    return (
        bounds.lower_error * solution_rounding(bounds, sizes, dtype)
        + bounds.linear_error * linear
        + last
    )


def solution_rounding(bounds: Bounds, sizes: Sizes, dtype: DTypeLike) -> Number:
    """Return a first-order bound on how far rounding moves the lower solution."""
    gradient = _mean_rounding(bounds, sizes, dtype) * bounds.lower_gradient
    gradient += 100 * unit_roundoff(dtype) * bounds.smoothness * bounds.solution_radius
    return 2 * gradient / bounds.strong_convexity


def _mean_rounding(bounds: Bounds, sizes: Sizes, dtype: DTypeLike) -> float:
    """Return a bound on the relative rounding error of a mean over records."""
    n = max(sizes.upper, sizes.lower)  # the longer mean
    terms = min(n, ROWS) * bounds.rows  # of a chunk, added in any order
    return unit_roundoff(dtype) * (UNITS + terms + -(-n // ROWS))


def units_of(problem: AbstractProblem) -> int:
    """Return the roundoff units granted to one record's value: 32 plus its rows."""
    return UNITS + (0 if problem.unit is None else problem.unit.most_rows)


def common_dtype(w: PyTree, owner: str = "ImplicitBilevel") -> jnp.dtype:
    """Return the one dtype of all variables `w`; raise unless float32 or float64.

    The bound on rounding refers to it.
    """
    dtypes = {jnp.dtype(v.dtype) for v in jax.tree.leaves(w)}
    if len(dtypes) != 1 or not dtypes <= {jnp.dtype("f4"), jnp.dtype("f8")}:
        raise ValueError(f"{owner}: variables must be all float32 or all float64.")
    return dtypes.pop()


@dataclasses.dataclass(frozen=True)
class Means:
    """Derivatives of both levels' objectives, public terms included. NON-PRIVATE."""

    problem: BilevelProblem
    data: Levels
    sizes: Sizes

    def lower_y(self, x: PyTree, y: PyTree) -> PyTree:
        r"""Return the lower objective's gradient in y, $\nabla_y G$."""
        return self._lower(1, x, y)

    def lower_x(self, x: PyTree, y: PyTree) -> PyTree:
        r"""Return the lower objective's gradient in x, $\nabla_x G$, at `x` and `y`."""
        if self.problem.reads_x("lower"):
            return self._lower(0, x, y)
        return _plus(optax.tree.zeros_like(x), self.problem.lower_public, 0, x, y)

    def lower_yx(self, x: PyTree, y: PyTree, direction: PyTree) -> PyTree:
        """Return how the lower gradient in y changes along a direction of x."""
        lower_y = functools.partial(self.lower_y, y=y)
        if not self.problem.reads_x("lower"):
            zeros = optax.tree.zeros_like(y)

            def lower_y(x):
                return _plus(zeros, self.problem.lower_public, 1, x, y)

        return jax.jvp(lower_y, (x,), (direction,))[1]

    def _lower(self, argument: int, x: PyTree, y: PyTree) -> PyTree:
        def gradient(total):
            loss = functools.partial(total, self.problem.lower)
            return jax.grad(loss, argument)(x, y)

        mean = _mean(gradient, self.data.lower, self.sizes.lower)
        return _plus(mean, self.problem.lower_public, argument, x, y)

    def upper(self, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
        """Return the pair of the upper objective's gradients in x and in y."""

        def gradients(total):
            return jax.grad(lambda w: total(self.problem.upper, *w))((x, y))

        mean_x, mean_y = _mean(gradients, self.data.upper, self.sizes.upper)
        public = self.problem.upper_public
        return _plus(mean_x, public, 0, x, y), _plus(mean_y, public, 1, x, y)


def _plus(mean: PyTree, public, argument: int, x, y) -> PyTree:
    if public is None:
        return mean
    return optax.tree.add(mean, jax.grad(public, argument)(x, y))


def _mean(derivative: Callable, records: PyTree, size: int) -> PyTree:
    """Return a derivative summed over chunks of records, over the planned `size`.

    `derivative` maps `total(loss, x, y)`, the sum of a loss over the records of a
    chunk, to the derivative of that sum.
    """
    n = _checks.leading_axis("records", records)
    rows = min(n, ROWS)
    read = reader(records, None, n, rows)

    def part(index):
        piece, fresh = read(index)

        def total(loss, x, y):
            dtype = common_dtype((x, y))
            chunk = jax.vmap(lambda record: readable(record, dtype))(piece)
            own = functools.partial(loss, x, y)
            losses = jax.vmap(rowwise("BilevelProblem", own))(chunk)
            return jnp.sum(jnp.where(fresh, losses, 0))

        return derivative(total)

    indices = jnp.arange(-(-n // rows), dtype=jnp.int32)
    if n == rows:
        total = part(indices[0])
    else:
        empty = optax.tree.zeros_like(jax.eval_shape(part, indices[0]))

        def add(total, index):
            return optax.tree.add(total, part(index)), None

        total, _ = jax.lax.scan(add, empty, indices)
    return jax.tree.map(lambda v: v / size, total)


def wide(records: PyTree, dtype: jnp.dtype) -> PyTree:
    """Return records with their floating-point entries converted to a dtype."""

    def widened(v):
        return v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v

    return jax.tree.map(widened, records)


def readable(record: PyTree, dtype: jnp.dtype) -> PyTree:
    """Return the record in a dtype, or zeros if one of its numbers is not finite."""
    record = wide(record, dtype)
    readable = all_finite(record)
    return jax.tree.map(lambda v: jnp.where(readable, v, jnp.zeros_like(v)), record)
