"""The other door to the records: hypergradients, sealed by declared constants.

A hypergradient is no sum over records, so clipping does not bound what one of them
does. A certificate does, and whatever is computed here inexactly is part of the bound.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from . import _checks
from .clipping import Basis, Bounded, Precision
from .grid import Grid, floor_log2, wide_integers
from .oracles import certified
from .privacy.budget import People
from .problems.bilevel import BilevelProblem, Levels, Sizes
from .problems.constants import AbstractCertificate, Bounds
from .sets import Ball, Euclidean

# How much of the sensitivity both inexact solves may add, and how much rounding may.
_SOLVES, _ROUNDING = 0.01, 0.05
_MOST_STEPS = 100_000
# Rows that are summed at once, and the units of roundoff granted to one record's loss.
_ROWS, UNITS = 4096, 32
# The step of the grid in shares of the smallest sensitivity.
_BITS = 24


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

    def fewest(error: Callable[[int], float]) -> int:
        # Both errors fall geometrically, so two of them tell the rate.
        one, two = error(2), error(4)
        if one <= allowed:
            return 1 if error(1) <= allowed else 2
        rate = math.log(two / one) / 2 if two > 0 else -math.inf
        steps = 2 + math.ceil(math.log(allowed / one) / rate) if rate < 0 else math.inf
        if allowed == 0 or steps > _MOST_STEPS:
            raise ValueError(
                "ImplicitBilevel: the constants ask for more than "
                f"{_MOST_STEPS} inner steps, with smoothness {bounds.smoothness:.3g} "
                f"and strong convexity {bounds.strong_convexity:.3g}. Raise the strong "
                "convexity (mu_g) by a larger public penalty, or use PenaltyBilevel, "
                "which needs no constants."
            )
        return int(steps)

    return Effort(
        fewest(lambda k: bounds.lower_error * _lower_error(bounds, k)),
        fewest(lambda m: bounds.linear_error * _linear_error(bounds, m)),
    )


def sensitivities(
    certificate: AbstractCertificate, sizes: Sizes, dtype: Any, x: PyTree | None = None
) -> Levels:
    r"""How far one replaced record of each level moves the computed hypergradient.

    $S_r + 2 (C \alpha + c \tau + \omega)$ with $\alpha$ and $\tau$ what the fixed
    numbers of steps guarantee at this $x$, and $\omega$ a bound on floating-point
    rounding to first order in the unit roundoff $u$. With $\rho = u (32 + \text{rows} +
    \text{chunks})$ the relative error of a mean over records, every gradient is off by
    $e = \rho L_{gy} + 8 u \beta r$ at most. Steps of the accelerated method add up to
    an error of $4 \sqrt\kappa e / \mu$ in $y$, those of the linear solver to a residual
    of at most $4 \sqrt\kappa (2 \kappa + 1) \rho L_{fy}$, and the last sums to $2 \rho
    \bar L$. No two values in the ball of radius $\bar L$ are further apart than $2 \bar
    L$.

    Args:
        certificate: The bounds.
        sizes: The planned sizes.
        dtype: What the hypergradient is computed in.
        x: The upper variable; by default the worst.

    Returns:
        The sensitivities of a change in either level: on the host without `x`.

    References:
        Schmidt, Le Roux and Bach, "Convergence rates of inexact proximal-gradient
        methods for convex optimization", 2011, Proposition 4, for accumulated errors.
    """
    bounds = certificate.bounds(sizes, x)
    error = _solve_error(bounds, effort(certificate, sizes))
    error += _rounding_error(bounds, sizes, dtype)
    least = jnp.minimum if isinstance(error, jax.Array) else min
    return Levels(
        least(bounds.upper + 2 * error, 2 * bounds.gradient),
        least(bounds.lower + 2 * error, 2 * bounds.gradient),
    )


def check_dtype(certificate: AbstractCertificate, sizes: Sizes, dtype: Any) -> None:
    """Refuses a plan whose rounding the dtype makes a large part of the sensitivity.

    Args:
        certificate: The bounds.
        sizes: The planned sizes.
        dtype: What the hypergradient is computed in.

    Raises:
        ValueError: Rounding would add more than 5 % to the sum of sensitivities.
    """
    bounds = certificate.bounds(sizes)
    added = 4 * _rounding_error(bounds, sizes, dtype)
    if not added <= _ROUNDING * (bounds.upper + bounds.lower):
        raise ValueError(
            f"ImplicitBilevel: in {jnp.dtype(dtype).name}, rounding may move the "
            f"hypergradient by as much as {added / (bounds.upper + bounds.lower):.2g} "
            "of what a record may, so the inner accuracy that the sensitivity needs is "
            "out of reach. Enable 64-bit with jax.config.update('jax_enable_x64', "
            "True) and give float64 records and starting point, or raise the strong "
            "convexity (mu_g) by a larger public penalty."
        )


def certified_hypergradient(
    problem: BilevelProblem,
    data: Levels,
    x: PyTree,
    y0: PyTree,
    sizes: Sizes,
    *,
    precision: Precision,
) -> Bounded:
    r"""The hypergradient at `x`, sealed with the sensitivity that constants prove.

    $$\bar\nabla F(x, y) = \nabla_x F - \nabla_{xy} G\, v, \qquad \nabla_{yy} G\, v
    \approx \nabla_y F, \qquad y \approx y^*(x),$$

    by fixed numbers of accelerated gradient and Chebyshev steps. It is projected onto
    the ball of radius $\bar L$ that holds the exact one, which sets no two values
    further apart; where it is not finite it is zero.

    Args:
        problem: The problem, with a certificate as `constants`.
        data: The records. One with an entry that is not finite is read as all zeros.
        x: The upper variable, released.
        y0: Where the lower solve starts, after projection onto the ball that holds
            all lower solutions; public or already private.
        sizes: The planned sizes.
        precision: `"float"`, or `"grid"`: rounded to a public grid.

    Privacy:
        One query. Its sensitivity under replace-one is `sensitivities` at `x`, and on
        the grid $\sqrt{d_x}$ of its steps more, at most $2^{-24}$ of the smaller role's
        each. It rests on the certificate and, for rounding, on per-record derivatives
        that are exact to 32 units of roundoff. $y$ and $v$ are not private and are not
        returned.
    """
    _checks.strict_floats("certified_hypergradient")
    certificate = certificate_of(problem)
    dtype = jnp.result_type(*jax.tree.leaves((x, y0)))
    check_dtype(certificate, sizes, dtype)
    bounds = certificate.bounds(sizes, x)
    with jax.default_matmul_precision("highest"):
        steps = effort(certificate, sizes)
        value = _hypergradient(problem, data, x, y0, sizes, bounds, steps)
    shares = sensitivities(certificate, sizes, dtype, x)
    shares = jax.tree.map(
        lambda v: jax.lax.stop_gradient(jnp.asarray(v, dtype)), shares
    )
    if precision == "float":
        return Bounded(
            value, _contribution(certificate, shares, sizes), Basis.CONSTANTS
        )
    least = jnp.minimum(shares.upper, shares.lower)
    rounded = math.sqrt(optax.tree.size(value)) * 2.0**-_BITS * least
    shares = jax.tree.map(lambda v: v + rounded, shares)
    grid = _on_grid(value, least)
    return Bounded(grid, _contribution(certificate, shares, sizes), Basis.CONSTANTS)


def certificate_of(problem: BilevelProblem) -> AbstractCertificate:
    """The problem's certificate.

    Raises:
        ValueError: It has none, or one for other functions; its lower level has a set.
    """
    if not isinstance(problem.constants, AbstractCertificate):
        raise ValueError(
            "ImplicitBilevel: its guarantee rests on bounds of the problem's "
            f"functions, but problem.constants is {type(problem.constants).__name__}. "
            "Declare dpbilevel.SecondOrderConstants(...), take a problem that brings "
            "its own, such as dpbilevel.linear_tuning(...), or use PenaltyBilevel, "
            "which clips."
        )
    if not isinstance(problem.y_set, Euclidean):
        raise ValueError(
            "ImplicitBilevel: implicit derivatives are those of an unconstrained lower "
            f"level, got y_set={problem.y_set}. Leave y_set out; the constants' "
            "solution_radius says where the lower solutions are."
        )
    problem.constants.check(problem)
    return problem.constants


def planned(certificate: AbstractCertificate, sizes: Sizes, dtype: Any) -> Levels:
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
    shares = sensitivities(certificate, sizes, dtype)
    if sizes.people is not People.DISJOINT:
        return shares
    ratios = _ratios(certificate, sizes)
    factor = max(shares.upper / ratios.upper, shares.lower / ratios.lower)
    return Levels(factor * ratios.upper, factor * ratios.lower)


def _ratios(certificate, sizes: Sizes) -> Levels:
    """What the listed sensitivities of disjoint people are proportional to."""
    bounds = certificate.bounds(sizes)
    error = 2 * _solve_error(bounds, effort(certificate, sizes))
    upper, lower = float(bounds.upper + error), float(bounds.lower + error)
    # A role whose records move nothing sees but rounding; it must not ask for much.
    least = 1e-3 * max(upper, lower)
    upper, lower = max(upper, least), max(lower, least)
    if certificate.varies:
        upper = lower = max(upper, lower)
    return Levels(upper, lower)


def _contribution(certificate, shares: Levels, sizes: Sizes) -> Float[Array, ""]:
    """Half the sensitivity that the noise is to be relative to, as `planned` has it."""
    if sizes.people is not People.DISJOINT:
        return (shares.upper + shares.lower) / 2
    ratios = _ratios(certificate, sizes)
    factor = jnp.maximum(shares.upper / ratios.upper, shares.lower / ratios.lower)
    return (ratios.upper + ratios.lower) / 2 * factor


def _lower_error(bounds: Bounds, steps: int):
    radius = 2 * bounds.solution_radius
    return certified.accelerated_error(
        bounds.strong_convexity, bounds.smoothness, radius, steps
    )


def _linear_error(bounds: Bounds, steps: int):
    factor = certified.chebyshev_error(
        bounds.strong_convexity, bounds.smoothness, steps
    )
    return factor * bounds.upper_gradient


def _solve_error(bounds: Bounds, effort: Effort):
    return bounds.lower_error * _lower_error(
        bounds, effort.lower_steps
    ) + bounds.linear_error * _linear_error(bounds, effort.linear_steps)


def _rounding_error(bounds: Bounds, sizes: Sizes, dtype):
    unit = float(jnp.finfo(dtype).eps) / 2
    n = max(sizes.upper, sizes.lower)
    mean = unit * (UNITS + min(n, _ROWS) + -(-n // _ROWS))
    kappa = certified.condition_number(bounds.strong_convexity, bounds.smoothness)
    gradient = mean * bounds.lower_gradient
    gradient += 8 * unit * bounds.smoothness * bounds.solution_radius
    lower = 4 * kappa**0.5 * gradient / bounds.strong_convexity
    linear = 4 * kappa**0.5 * (2 * kappa + 1) * mean * bounds.upper_gradient
    return (
        bounds.lower_error * lower
        + bounds.linear_error * linear
        + 2 * mean * bounds.gradient
    )


def _hypergradient(problem, data, x, y0, sizes, bounds: Bounds, steps: Effort):
    ball = Ball(bounds.solution_radius)
    eigenvalues = {
        "smallest": bounds.strong_convexity,
        "largest": bounds.smoothness,
    }
    means = _Means(problem, data, sizes)
    y = certified.accelerated_gradient(
        functools.partial(means.lower_y, x),
        ball.project(y0),
        num_steps=steps.lower_steps,
        **eigenvalues,
    )
    y = ball.project(y)
    direct, right = means.upper(x, y)
    v = certified.chebyshev(
        lambda v: jax.jvp(lambda y: means.lower_y(x, y), (y,), (v,))[1],
        right,
        num_steps=steps.linear_steps,
        **eigenvalues,
    )
    cross = jax.jvp(lambda y: means.lower_x(x, y), (y,), (v,))[1]
    value = optax.tree.sub(direct, cross)
    finite = jnp.stack([jnp.isfinite(v).all() for v in jax.tree.leaves(value)]).all()
    value = jax.tree.map(lambda v: jnp.where(finite, v, 0), value)
    return Ball(bounds.gradient).project(value)


@dataclasses.dataclass(frozen=True)
class _Means:
    """Derivatives of both levels' objectives, public terms included."""

    problem: BilevelProblem
    data: Levels
    sizes: Sizes

    def lower_y(self, x, y) -> PyTree:
        mean = _mean(
            lambda total: jax.grad(lambda y: total(self.problem.lower, x, y))(y),
            self.data.lower,
            self.sizes.lower,
        )
        return _plus(mean, self.problem.lower_public, 1, x, y)

    def lower_x(self, x, y) -> PyTree:
        mean = optax.tree.zeros_like(x)
        if self.problem.reads_x("lower"):
            mean = _mean(
                lambda total: jax.grad(lambda x: total(self.problem.lower, x, y))(x),
                self.data.lower,
                self.sizes.lower,
            )
        return _plus(mean, self.problem.lower_public, 0, x, y)

    def upper(self, x, y) -> tuple[PyTree, PyTree]:
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
    """A derivative summed over the records chunk by chunk, over their planned number.

    `derivative` maps `total(loss, x, y)`, the sum of a loss over the records of a
    chunk, to the derivative of that sum.
    """
    n = _checks.leading_axis("records", records)
    rows = min(n, _ROWS)

    def part(index):
        start = jnp.minimum(index * rows, n - rows)
        # The last chunk reaches back; what others have summed is left out.
        fresh = start + jnp.arange(rows, dtype=index.dtype) >= index * rows
        chunk = jax.tree.map(
            lambda v: jax.lax.dynamic_slice_in_dim(v, start, rows), records
        )
        chunk = jax.vmap(_readable)(chunk)

        def total(loss, x, y):
            losses = jax.vmap(lambda record: loss(x, y, record))(chunk)
            return jnp.sum(jnp.where(fresh, losses, 0))

        return derivative(total)

    indices = jnp.arange(-(-n // rows), dtype=jnp.int32)
    if n == rows:
        total = part(indices[0])
    else:
        empty = optax.tree.zeros_like(jax.eval_shape(part, indices[0]))
        total, _ = jax.lax.scan(
            lambda total, index: (optax.tree.add(total, part(index)), None),
            empty,
            indices,
        )
    return jax.tree.map(lambda v: v / size, total)


def _readable(record: PyTree) -> PyTree:
    """The record, or zeros where one of its numbers is not finite."""
    floats = [
        jnp.isfinite(v).all()
        for v in jax.tree.leaves(record)
        if jnp.issubdtype(v.dtype, jnp.floating)
    ]
    readable = jnp.stack(floats).all() if floats else jnp.asarray(True)
    return jax.tree.map(lambda v: jnp.where(readable, v, jnp.zeros_like(v)), record)


def _on_grid(value: PyTree, least: Float[Array, ""]) -> Grid:
    exponent = floor_log2(least) - _BITS
    dtypes = tuple(v.dtype for v in jax.tree.leaves(value))
    value = jax.lax.stop_gradient(value)
    with wide_integers():

        def count(v):
            steps = jnp.ldexp(v.astype(jnp.float64), -exponent)
            limit = np.float64(2.0**61)
            return jnp.round(jnp.clip(steps, -limit, limit)).astype(jnp.int64)

        counts = jax.tree.map(count, value)
    return Grid(counts, exponent, least / 2, dtypes)
