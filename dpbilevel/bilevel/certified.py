"""Hypergradients, sealed with the sensitivity that a certificate proves.

A hypergradient is no sum over records, so clipping does not bound what one of them
does. A certificate does, and whatever is computed here inexactly is part of the bound.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from ..privacy.budget import People
from ..privacy.certified import AbstractCertifiedQuery, Costs
from ..privacy.clipping import Basis, Bounded, Precision
from ..privacy.floats import all_finite
from ..privacy.grid import ROUNDED_BITS, on_grid
from ..privacy.queries import LEVELS, Query
from ..sets import Ball, Euclidean
from . import sensitivities
from .bounds import Bounds
from .constants import AbstractCertificate
from .problem import BilevelProblem, Levels, Sizes


@dataclasses.dataclass(frozen=True)
class HypergradientQuery(AbstractCertifiedQuery):
    r"""The hypergradient, with the sensitivity that constants prove.

    $$\bar\nabla F(x, y) = \nabla_x F - \nabla_{xy} G\, v, \qquad \nabla_{yy} G\, v
    \approx \nabla_y F, \qquad y \approx y^*(x),$$

    by fixed numbers of accelerated gradient and Chebyshev steps. It is projected onto
    the ball of radius $\bar L$ that holds the exact one, which sets no two values
    further apart; where it is not finite it is zero.

    Args:
        problem: The problem, with a certificate as `constants`.
        sizes: The planned sizes.

    Privacy:
        One query. Its sensitivity under replace-one is `hypergradient_sensitivity` at
        the point, and on the grid $\sqrt{d_x}$ of its steps more, at most $2^{-24}$ of
        the smaller role's each. It rests on the certificate and, for rounding, on
        per-record derivatives that are exact to 32 units of roundoff. $y$ and $v$ are
        not private and are not returned.
    """

    problem: BilevelProblem
    sizes: Sizes

    @override
    def costs(self, precision: Precision) -> Costs:
        certificate, sizes = certificate_of(self.problem), self.sizes
        dtype = jnp.result_type(float)
        sensitivities.check_dtype(certificate, sizes, dtype)
        shares = sensitivities.ledger_sensitivity(certificate, sizes, dtype)

        def query(role):
            contribution = float(getattr(shares, role)) / 2
            return Query.of_contribution(role, getattr(sizes, role), contribution)

        queries = tuple(map(query, LEVELS))
        largest = float(certificate.bounds(sizes).gradient)
        joint = sizes.people is People.SHARED
        return Costs(queries, Basis.CONSTANTS, largest, joint)

    @override
    def read(self, point, data, *, precision, key, index=None) -> Bounded:
        """The hypergradient at a point, sealed with its sensitivity there.

        The point is the upper variable, released, and where the lower solve starts
        after projection onto the ball that holds all lower solutions: public or already
        private. Records are read in its dtype; one with an entry that is not finite in
        it is read as all zeros.
        """
        _checks.strict_floats("ImplicitBilevel")
        (x, y0), sizes = point, self.sizes
        _check_rows(data, sizes)
        certificate = certificate_of(self.problem)
        dtype = common_dtype(point)
        sensitivities.check_dtype(certificate, sizes, dtype)
        bounds = certificate.bounds(sizes, x)
        counts = sensitivities.step_counts(certificate, sizes)
        with jax.default_matmul_precision("highest"):
            value = hypergradient(self.problem, data, x, y0, sizes, bounds, counts)
        shares = sensitivities.hypergradient_sensitivity(certificate, sizes, dtype, x)
        # The noise is a constant of derivatives through released values.
        shares = jax.lax.stop_gradient(
            jax.tree.map(lambda v: jnp.asarray(v, dtype), shares)
        )
        if precision == "grid":
            least = jnp.minimum(shares.upper, shares.lower)
            rounded = math.sqrt(optax.tree.size(value)) * 2.0**-ROUNDED_BITS * least
            shares = jax.tree.map(lambda v: v + rounded, shares)
            value = on_grid(value, least)
        ratios, factor = sensitivities.multiple_of_ratios(certificate, sizes, shares)
        contribution = (ratios.upper + ratios.lower) / 2 * factor
        return Bounded(value, contribution, Basis.CONSTANTS)


def _check_rows(data: Levels, sizes: Sizes) -> None:
    """Refuses more records than planned: constants bound means of so many at most."""
    for role in LEVELS:
        rows = _checks.leading_axis(role, getattr(data, role))
        if rows > getattr(sizes, role):
            raise ValueError(
                f"ImplicitBilevel: {rows} records of the {role} level, but planned for "
                f"{getattr(sizes, role)}; calibrate for the sizes of the data."
            )


def common_dtype(w: PyTree, owner: str = "ImplicitBilevel") -> jnp.dtype:
    """The one dtype of all variables `w`, which the bound on rounding refers to.

    Raises:
        ValueError: There are several dtypes, or one of half precision.
    """
    dtypes = {jnp.dtype(v.dtype) for v in jax.tree.leaves(w)}
    if len(dtypes) != 1 or not dtypes <= {jnp.dtype("f4"), jnp.dtype("f8")}:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        raise ValueError(
            f"{owner}: all variables must be of one dtype, float32 or float64, since "
            f"the sensitivity includes its rounding; got {names}. Convert the starting "
            "point, as in jax.tree.map(lambda v: v.astype(jnp.float64), w0)."
        )
    return dtypes.pop()


def certificate_of(problem: BilevelProblem) -> AbstractCertificate:
    """The problem's certificate.

    Raises:
        ValueError: It has none, or one for other functions; its lower level has a set.
    """
    if not isinstance(problem.constants, AbstractCertificate):
        none = problem.constants is None
        kind = None if none else f"of type {type(problem.constants).__name__}"
        raise ValueError(
            "BilevelProblem: this solver's guarantee rests on bounds of the problem's "
            f"functions, but problem.constants is {kind}. "
            "Declare dpbilevel.bilevel.SecondOrderConstants(...), take a problem that "
            "brings its own, such as dpbilevel.linear_tuning(...), or use "
            "PenaltyBilevel, which clips."
        )
    if not isinstance(problem.y_set, Euclidean):
        raise ValueError(
            "BilevelProblem: implicit derivatives are those of an unconstrained lower "
            f"level, got y_set={problem.y_set}. Leave y_set out; the constants' "
            "solution_radius says where the lower solutions are."
        )
    problem.constants.check(problem)
    return problem.constants


def hypergradient(
    problem: BilevelProblem,
    data: Levels,
    x: PyTree,
    y0: PyTree,
    sizes: Sizes,
    bounds: Bounds,
    counts: sensitivities.StepCounts,
) -> PyTree:
    """The hypergradient of `HypergradientQuery`, not sealed. NON-PRIVATE.

    The lower solve starts at `y0`; `bounds` are the certificate's at `x`.
    """
    ball = Ball(bounds.solution_radius)
    spectrum, means = bounds.spectrum, Means(problem, data, sizes)
    lower_y, lower_x = (functools.partial(f, x) for f in (means.lower_y, means.lower_x))
    y = spectrum.accelerated_gradient(lower_y, ball.project(y0), counts.lower)
    y = ball.project(y)  # where the bounds hold

    def hessian(v):
        return jax.jvp(lower_y, (y,), (v,))[1]

    direct, right = means.upper(x, y)  # the right-hand side of the system
    v = spectrum.chebyshev(hessian, right, counts.linear)
    cross = jax.jvp(lower_x, (y,), (v,))[1]
    value = optax.tree.sub(direct, cross)
    finite = all_finite(value)
    value = jax.tree.map(lambda v: jnp.where(finite, v, 0), value)
    return Ball(bounds.gradient).project(value)  # the ball of the exact one


@dataclasses.dataclass(frozen=True)
class Means:
    """Derivatives of both levels' objectives, public terms included. NON-PRIVATE."""

    problem: BilevelProblem
    data: Levels
    sizes: Sizes

    def lower_y(self, x: PyTree, y: PyTree) -> PyTree:
        r"""$\nabla_y G$ at `x` and `y`."""
        return self._lower(1, x, y)

    def lower_x(self, x: PyTree, y: PyTree) -> PyTree:
        r"""$\nabla_x G$ at `x` and `y`."""
        if self.problem.reads_x("lower"):
            return self._lower(0, x, y)
        return _plus(optax.tree.zeros_like(x), self.problem.lower_public, 0, x, y)

    def _lower(self, argument: int, x: PyTree, y: PyTree) -> PyTree:
        def gradient(total):
            loss = functools.partial(total, self.problem.lower)
            return jax.grad(loss, argument)(x, y)

        mean = _mean(gradient, self.data.lower, self.sizes.lower)
        return _plus(mean, self.problem.lower_public, argument, x, y)

    def upper(self, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
        r"""$\nabla_x F$ and $\nabla_y F$ at `x` and `y`."""

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
    rows = min(n, sensitivities.ROWS)

    def part(index):
        start = jnp.minimum(index * rows, n - rows)
        # The last chunk reaches back; what others have summed is left out.
        fresh = start + jnp.arange(rows, dtype=index.dtype) >= index * rows
        piece = jax.tree.map(
            lambda v: jax.lax.dynamic_slice_in_dim(v, start, rows), records
        )

        def total(loss, x, y):
            dtype = common_dtype((x, y))
            chunk = jax.vmap(lambda record: readable(record, dtype))(piece)
            losses = jax.vmap(lambda record: loss(x, y, record))(chunk)
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
    """One or many records with their floating-point entries in a dtype."""
    return jax.tree.map(
        lambda v: v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v,
        records,
    )


def readable(record: PyTree, dtype: jnp.dtype) -> PyTree:
    """The record in a dtype, or zeros where one of its numbers is not finite."""
    record = wide(record, dtype)
    readable = all_finite(record)
    return jax.tree.map(lambda v: jnp.where(readable, v, jnp.zeros_like(v)), record)
