"""Hypergradients, sealed with the sensitivity that a certificate proves.

A hypergradient is not a sum over records, so clipping does not bound the effect of one
record. A certificate does, and errors of the computation are part of the bound.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree
from typing_extensions import override

from ... import _checks
from ..._checks import Number
from ...privacy.budget import People
from ...privacy.exact.floats import all_finite
from ...privacy.exact.grid import ROUNDED_BITS, on_grid
from ...privacy.per_example.clipping import Basis, Bounded, Precision
from ...privacy.queries import LEVELS, AbstractCertifiedQuery, Costs, Query
from ...sets import Ball, Euclidean
from ..problem import BilevelProblem, Levels, Sizes
from . import sensitivities
from .constants import AbstractCertificate, SecondOrderConstants
from .fixed_count import Bounds
from .sensitivities import Means, common_dtype, readable


@dataclasses.dataclass(frozen=True)
class Adapted(AbstractCertificate):
    r"""A problem's certificate for records of many rows, or for clipped upper records.

    **Rows.** Sums have the rows of people as terms, and round more.

    **Clipping.** With $u_z(x) = \nabla_x f_z - \nabla_{xy} G\, [\nabla_{yy} G]^{-1}
    \nabla_y f_z$ at $y^*(x)$, where $f_z$ is the loss of upper record $z$ with the
    public term, a hypergradient is the mean of the records' contributions $u_z$. What
    is released is

    $$\frac{1}{n_f} \sum_z \mathrm{clip}_{C(x)}(u_z(x)), \qquad C(x) = \min(C, \bar
    L(x)).$$

    - *An upper record* moves neither $y^*$ nor a derivative of $G$: $S_{up} = 2 C(x) /
      n_f$, whatever the losses are.
    - *A lower record* moves all contributions. $u_z$ is the hypergradient of $n_f$
      copies of the record $z$, of which the certificate holds too, so that each of them
      moves by at most $S_{low}$. Clipping is a projection onto a ball and sets no two
      of them further apart, nor does their mean: it moves by at most $\min(S_{low}, 2
      C(x))$. The constants of numerical errors carry over by the same argument.
    """

    certificate: AbstractCertificate  # of the problem
    clip_norm: float | None = None  # C > 0; `None` without clipping
    rows: int = 1  # of a record, at most

    def __post_init__(self):
        if self.clip_norm is not None:
            _checks.positive("Adapted", clip_norm=self.clip_norm)

    @property
    def varies(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the bounds of the problem's certificate depend on x."""
        return self.certificate.varies

    @override
    def bounds(self, sizes, x=None) -> Bounds:
        bounds = self.certificate.bounds(sizes, x)
        bounds = dataclasses.replace(bounds, rows=max(bounds.rows, self.rows))
        if self.clip_norm is None:
            return bounds
        least = jnp.minimum if isinstance(bounds.gradient, jax.Array) else min
        clip = least(self.clip_norm, bounds.gradient)  # C(x)
        return dataclasses.replace(bounds, upper=2 * clip / sizes.upper, clip=clip)

    @override
    def metric(self, problem: Any, sizes: Sizes, x: PyTree | None, y: PyTree):
        return self.certificate.metric(problem, sizes, x, y)

    @override
    def check(self, problem: Any) -> None:
        self.certificate.check(problem)

    @property
    @override
    def second_order(self) -> SecondOrderConstants:
        return self.certificate.second_order

    @property
    @override
    def largest_loss(self) -> float:
        return self.certificate.largest_loss

    @property
    @override
    def assumptions(self) -> tuple[str, ...]:
        if self.clip_norm is None:
            return self.certificate.assumptions
        return (
            "the guarantee of upper records rests on clipping: each one's contribution "
            f"is clipped at {self.clip_norm:.6g}, whatever the losses are; that of "
            "lower records rests on the constants of both levels' losses",
            *self.certificate.assumptions,
        )


@dataclasses.dataclass(frozen=True)
class HypergradientQuery(AbstractCertifiedQuery):
    r"""Query of the hypergradient, with the sensitivity that constants prove.

    $$\bar\nabla F(x, y) = \nabla_x F - \nabla_{xy} G\, v, \qquad \nabla_{yy} G\, v
    \approx \nabla_y F, \qquad y \approx y^*(x),$$

    by fixed numbers of accelerated gradient and Chebyshev steps. It is projected onto
    the ball of radius $\bar L$ that holds the exact one, which sets no two values
    further apart; where it is not finite it is zero.

    With `clip_norm` it is instead the mean of the upper records' contributions, each
    clipped; see `Adapted`. A contribution has the public term of the upper level.

    Privacy:
        One query. Its sensitivity under replace-one is `hypergradient_sensitivity`.
        Without a clip each role's grows by $\sqrt{d_x}$ grid steps on the grid; a step
        is at most $2^{-24}$ of the smaller role's. It rests on the certificate and, for
        rounding, on derivatives exact to 32 units of roundoff. With `clip_norm` what
        upper records are charged rests on clipping alone. $y$ and $v$ are not private
        and are not returned.
    """

    problem: BilevelProblem
    sizes: Sizes
    clip_norm: float | None = None

    @property
    def certificate(self) -> AbstractCertificate:
        """Certificate that proves the sensitivity, with the clip norm if any."""
        return certificate_of(self.problem, self.clip_norm)

    @override
    def costs(self, precision: Precision) -> Costs:
        certificate, sizes = self.certificate, self.sizes
        dtype = jnp.result_type(float)
        sensitivities.check_dtype(certificate, sizes, dtype)
        shares = sensitivities.ledger_sensitivity(certificate, sizes, dtype)

        def query(role):
            contribution = float(getattr(shares, role)) / 2
            return Query.of_contribution(role, getattr(sizes, role), contribution)

        queries = tuple(map(query, LEVELS))
        largest = float(certificate.bounds(sizes).largest)
        joint = sizes.people is People.SHARED
        return Costs(queries, Basis.CONSTANTS, largest, joint)

    @override
    def read(self, point, data, *, precision, key, index=None) -> Bounded:
        """Return a `Bounded`: the noiseless hypergradient at a point, its sensitivity.

        The point is the upper variable, released, and where the lower solve starts
        after projection onto the ball that holds all lower solutions: public or already
        private. Records are read in its dtype; one with an entry that is not finite in
        it is read as all zeros.
        """
        _checks.strict_floats("ImplicitBilevel")
        (x, y0), sizes = point, self.sizes
        for role in LEVELS:  # constants bound means of so many records at most
            rows = _checks.leading_axis(role, getattr(data, role))
            if rows > getattr(sizes, role):
                what = f"{rows} {role} records exceed the plan"
                raise ValueError(f"ImplicitBilevel: {what}.")
        certificate, dtype = self.certificate, common_dtype(point)
        sensitivities.check_dtype(certificate, sizes, dtype)
        bounds = certificate.bounds(sizes, x)
        counts = sensitivities.step_counts(certificate, sizes)
        dimensions = optax.tree.size(x), optax.tree.size(y0)
        shares = sensitivities.hypergradient_sensitivity(
            certificate, sizes, dtype, x, dimensions
        )
        # The noise is a constant of derivatives through released values.
        shares = jax.tree.map(lambda v: jnp.asarray(v, dtype), shares)
        shares = jax.lax.stop_gradient(shares)
        lower = LowerLevel(self.problem, data, x, y0, sizes, bounds, counts)
        with jax.default_matmul_precision("highest"):
            if bounds.clip is None:
                value, shares = _rounded(lower.hypergradient(), shares, precision)
            else:
                query = Query(LEVELS[0], sizes.upper, bounds.clip)
                fun = lower.upper_contribution()
                value = query.read(fun, data.upper, precision=precision, key=None)
                value, shares = _with_lower(value, x, shares, bounds.clip, precision)
        ratios, factor = sensitivities.multiple_of_ratios(certificate, sizes, shares)
        contribution = (ratios.upper + ratios.lower) / 2 * factor
        return dataclasses.replace(value, contribution=contribution)


def _rounded(
    value: PyTree, shares: Levels, precision: Precision
) -> tuple[Bounded, Levels]:
    """Return a hypergradient as `Bounded`, and sensitivities with its grid rounding."""
    if precision == "grid":
        least = jnp.minimum(shares.upper, shares.lower)
        rounded = math.sqrt(optax.tree.size(value)) * 2.0**-ROUNDED_BITS * least
        shares = jax.tree.map(lambda v: v + rounded, shares)
        value = on_grid(value, least)
    return Bounded(value, math.inf, Basis.CONSTANTS), shares


def _with_lower(
    clipped: Bounded, x: PyTree, shares: Levels, clip: Number, precision: Precision
) -> tuple[Bounded, Levels]:
    r"""Return a clipped mean with the lower records' bound, and both sensitivities.

    A lower record changes every upper record's contribution, so on the grid every one
    may round differently: by at most $\sqrt{d_x} 2^{-24} C / n_f$ in each data set.
    """
    nothing = optax.tree.zeros_like(x)
    lower = shares.lower
    if precision == "grid":
        lower += math.sqrt(optax.tree.size(x)) * 2.0**-23 * clip
        nothing = on_grid(nothing, lower)
    moved = Bounded(nothing, lower / 2, Basis.CONSTANTS)
    return clipped + moved, Levels(shares.upper, lower)


def certificate_of(
    problem: BilevelProblem, clip_norm: float | None = None
) -> AbstractCertificate:
    """Return the problem's certificate, adapted to people and `clip_norm`, or raise.

    A `ValueError` says that there is none, it does not fit, or y has a set.
    """
    if not isinstance(problem.constants, AbstractCertificate):
        none = problem.constants is None
        kind = None if none else f"of type {type(problem.constants).__name__}"
        raise ValueError(
            f"BilevelProblem: constants must bound the losses, got {kind}. Give "
            "dpbilevel.bilevel.SecondOrderConstants(...), or use PenaltyBilevel."
        )
    if not isinstance(problem.y_set, Euclidean):
        raise ValueError(
            "BilevelProblem: implicit derivatives take no y_set; leave it out."
        )
    problem.constants.check(problem)
    if problem.unit is None and clip_norm is None:
        return problem.constants
    rows = 1 if problem.unit is None else problem.unit.most_rows
    return Adapted(problem.constants, clip_norm, rows)


class LowerLevel(NamedTuple):
    """The lower level at an upper variable, solved inexactly. NON-PRIVATE."""

    problem: BilevelProblem
    data: Levels
    x: PyTree
    y0: PyTree  # where the lower solve starts
    sizes: Sizes
    bounds: Bounds  # of the certificate at x
    counts: sensitivities.StepCounts

    def hypergradient(self) -> PyTree:
        """Return the hypergradient, cut to its bound, 0 if not finite. NON-PRIVATE."""
        means, y, solve = self._solved()
        direct, right = means.upper(self.x, y)  # the right-hand side of the system
        lower_x = functools.partial(means.lower_x, self.x)
        cross = jax.jvp(lower_x, (y,), (solve(right),))[1]
        value = optax.tree.sub(direct, cross)
        finite = all_finite(value)
        value = jax.tree.map(lambda v: jnp.where(finite, v, 0), value)
        return Ball(self.bounds.gradient).project(value)  # the ball of the exact one

    def upper_contribution(self) -> Callable[[PyTree], PyTree]:
        r"""Return a function of an upper record: its hypergradient part. NON-PRIVATE.

        $\nabla_x f + J^T \nabla_y f$ with $J \approx -[\nabla_{yy} G]^{-1} \nabla_{yx}
        G$, the derivative of the lower solution. As Chebyshev's steps apply a
        polynomial of the symmetric $\nabla_{yy} G$, this is the `hypergradient` of
        copies of the record, in exact arithmetic.
        """
        (means, y, solve), x = self._solved(), self.x
        flat, unravel = ravel_pytree(x)
        mixed = functools.partial(means.lower_yx, x, y)  # of a direction of x
        basis = jnp.eye(flat.size, dtype=flat.dtype)
        jacobian = jax.vmap(lambda e: solve(mixed(unravel(-e))))(basis)  # rows: J^T

        def fun(record: PyTree) -> PyTree:
            record = readable(record, flat.dtype)

            def loss(x, y):
                public = self.problem.upper_public
                own = self.problem.upper(x, y, record)
                return own if public is None else own + public(x, y)

            direct, slope = jax.grad(loss, (0, 1))(x, y)
            rows = jax.vmap(functools.partial(optax.tree.vdot, slope))(jacobian)
            value = optax.tree.add(direct, unravel(jnp.asarray(rows)))
            return jax.lax.optimization_barrier(value)  # formed, as rounding assumes

        return fun

    def _solved(self) -> tuple[Means, PyTree, Callable[[PyTree], PyTree]]:
        """Return `Means`, lower solution, and its inverse Hessian as a function."""
        ball = Ball(self.bounds.solution_radius)
        spectrum = self.bounds.spectrum
        means = Means(self.problem, self.data, self.sizes)
        lower_y = functools.partial(means.lower_y, self.x)
        start = ball.project(self.y0)
        y = spectrum.accelerated_gradient(lower_y, start, self.counts.lower)
        y = ball.project(y)  # where the bounds hold

        def hessian(v):
            return jax.jvp(lower_y, (y,), (v,))[1]

        return means, y, lambda b: spectrum.chebyshev(hessian, b, self.counts.linear)
