"""Scores of a bilevel problem: its hyper-objective, and the norm of its gradient."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .._checks import Number
from ..bilevel.certificates import certified, sensitivities
from ..bilevel.certificates.constants import AbstractCertificate
from ..bilevel.certificates.fixed_count import Bounds, Metric
from ..bilevel.problem import BilevelProblem, Levels, Sizes
from ..privacy.per_example.clipping import clipped_mean, unsealed
from ..sets import Ball, Euclidean
from .mean_loss import SOLVES, AbstractScore, check_error, check_loss_dtype
from .samplers.base import AbstractPotential, Regularity

_COMPUTED = (
    "upper losses and upper_public, which has no large offset, are computed to "
    f"{sensitivities.UNITS} units of roundoff of the range that the constants give them"
)


@dataclasses.dataclass(frozen=True)
class HyperObjective(AbstractScore):
    r"""Score $\Phi(x) = F(x, y^*(x))$: the upper objective at the lower solution.

    One upper record moves the differences $\Phi(x) - \Phi(x')$ by at most $S_{up} D$
    and by $2 B / n_f$, where one loss changes by at most $B$ between two points, by
    constants or by clipping to $[0, B]$. A lower record moves them by at most $S_{low}
    D$ and by $2 L_{fy} d$, where it moves $y^*$ by at most $d$. The error $e$ of a
    computed value, from the inner solve and from rounding, adds $4 e$ to each.
    """

    clip_range: Any = None  # B, or `None`
    # Whether the lower level is solved by as many steps at every point as at the worst
    # one. Points that depend on records must not show in a trip count.
    uniform: bool = False

    @override
    def contributions(self, dtype: DTypeLike) -> dict[str, Any]:
        self._most_steps(dtype)  # refuses constants that ask for too many
        if self.measure == "slope":
            bounds = self._bounds()
            return {"upper": bounds.upper / 2, "lower": bounds.lower / 2}
        error, (upper, lower) = self._error(dtype), self.spreads()
        remedy = "raise the strong convexity (mu_g) by a larger public penalty"
        check_error(error, upper + lower, dtype, remedy)
        return {"upper": (upper + 4 * error) / 2, "lower": (lower + 4 * error) / 2}

    @override
    def regularity(self, dtype: DTypeLike, dimension: int) -> Regularity:
        certificate, gradient_error = self._certificate(), 0.0
        if self.measure == "slope":
            of = certificate, self.sizes, dtype
            gradient_error = sensitivities.hypergradient_error(*of)
        lipschitz: Any = self._bounds().gradient  # in x, of clipped losses too
        if self.clip_range is not None and self.problem.upper_public is not None:
            lipschitz = 3 * certificate.second_order.upper_total
        return Regularity(
            dimension,
            float(lipschitz),
            smoothness=float(certificate.second_order.smoothness),
            error=float(self._error(dtype)),
            gradient_error=float(gradient_error),
        )

    @property
    @override
    def assumptions(self) -> tuple[str, ...]:
        return (*self._certificate().assumptions, _COMPUTED)

    def potential(self, data: Levels, start: PyTree) -> AbstractPotential:
        """Return a potential that solves the lower level anew at every point."""
        x, y = start
        dtype = sensitivities.common_dtype((x, y))
        records = sensitivities.wide(data.upper, dtype)
        check_loss_dtype(self.problem.upper, (x, y), records)
        y = Ball(self._bounds().solution_radius).project(y)
        steps = self._most_steps(dtype) if self.uniform else None
        parts = self.problem, data, y, self.sizes, (x, y), self._half()
        return _Objective(*parts, self.clip_range is None, self._target(dtype), steps)

    def _error(self, dtype: DTypeLike) -> Number:
        """Return a bound on the error of a computed score."""
        largest = 2 * self._half() + self._certificate().largest_loss
        if self.problem.upper_public is not None:
            largest += 2 * self._change()
        solved = sensitivities.solution_rounding(self._bounds(), self.sizes, dtype)
        units = sensitivities.units_of(self.problem)
        rounding = units * float(jnp.finfo(dtype).eps) * largest
        return self._slope() * (self._target(dtype) + solved) + rounding

    def _certificate(self) -> AbstractCertificate:
        return certified.certificate_of(self.problem)

    def _bounds(self) -> Bounds:
        return self._certificate().bounds(self.sizes)

    def spreads(self) -> tuple[Any, Any]:
        """Return bounds on an upper, a lower record's effect on score differences."""
        bounds = self._bounds()
        # This holds for clipped losses, too: clipping moves no two values apart.
        n = self.sizes.upper
        lower = 2 * self._slope() * bounds.solution_shift
        if self.clip_range is not None:
            return 2 * self.clip_range / n, lower
        diameter = self.problem.x_set.diameter
        upper = _least(bounds.upper * diameter, 2 * self._change(of_spread=True) / n)
        return upper, _least(bounds.lower * diameter, lower)

    def _half(self) -> Number:
        """Return half the length of the interval that upper losses are clipped to."""
        # The reference may be at either end of their range.
        return self._change() if self.clip_range is None else self.clip_range / 2

    def _change(self, *, of_spread: bool = False) -> Number:
        """Return a bound on a loss's change over the set, or half a difference's."""
        second = self._certificate().second_order
        slope_x: Any = second.upper_x_spread if of_spread else second.upper_x
        slope_y: Any = second.upper_y_spread if of_spread else second.upper_y
        change = 2 * slope_y * second.solution_radius
        return change + slope_x * self.problem.x_set.diameter if slope_x else change

    def _slope(self) -> float:
        """Return the Lipschitz constant in y of the computed upper objective.

        Clipping keeps the constant of every record, but not what cancels in a mean. A
        public term is at most twice as steep as the bound on the sum.
        """
        slope = self._certificate().second_order.upper_y
        return slope if self.problem.upper_public is None else 3 * slope

    def _target(self, dtype: DTypeLike) -> float:
        """Return the error that the lower solve may leave in y, besides rounding."""
        bounds = self._bounds()
        rounding = float(sensitivities.solution_rounding(bounds, self.sizes, dtype))
        if self.measure == "slope":
            return rounding
        # Half of the error that is allowed beside the spread of a lower record.
        return max(rounding, float(SOLVES / 4 * bounds.solution_shift))

    def _most_steps(self, dtype: DTypeLike) -> int:
        """Return the lower-level steps at the worst point, or raise. On the host."""
        metric = self._certificate().metric(self.problem, self.sizes, None, None)
        count = _steps(metric, self._target(dtype))
        if not count <= sensitivities.MOST_STEPS:
            raise ValueError(
                f"ExponentialMechanism: the lower level needs {count:.3g} steps at a "
                "point. Raise the strong convexity (mu_g) by a larger public penalty."
            )
        return int(count)


def _least(first: Any, second: Any) -> Number:
    """Return the smaller of two numbers, on the host or in a program."""
    known = not isinstance(first, jax.Array) and not isinstance(second, jax.Array)
    return min(first, second) if known else jnp.minimum(first, second)


def _hypergradient(potential: "_Objective | _Norm", x: PyTree) -> PyTree:
    """Return the hypergradient at `x`, by a new lower solve from `potential.y0`."""
    problem, sizes = potential.problem, potential.sizes
    certificate = certified.certificate_of(problem)
    bounds = certificate.bounds(sizes, x)
    steps = sensitivities.step_counts(certificate, sizes)
    arguments = problem, potential.data, x, potential.y0, sizes
    return certified.LowerLevel(*arguments, bounds, steps).hypergradient()


class _Objective(AbstractPotential):
    problem: BilevelProblem
    data: Levels
    y0: PyTree
    sizes: Sizes = eqx.field(static=True)
    reference: PyTree
    half: Any
    centered: bool = eqx.field(static=True)  # about the losses at the reference
    target: float = eqx.field(static=True)
    num_steps: int | None = eqx.field(static=True)  # by default what a point needs

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        y = self._solution(x)
        upper, half = self.problem.upper, jnp.asarray(self.half)
        dtype, (x0, y0) = sensitivities.common_dtype((x, y)), self.reference

        def centered(record):
            record = sensitivities.readable(record, dtype)
            value = upper(x, y, record)
            if not self.centered:
                return value - half.astype(value.dtype)
            return value - upper(x0, y0, record)

        n = float(self.sizes.upper)
        mean = clipped_mean(
            centered, self.data.upper, clip_norm=half, denominator=n, precision="float"
        )
        value = unsealed(mean)
        public = self.problem.upper_public
        if public is not None:
            value = value + jnp.subtract(public(x, y), public(x0, y0))
        return value

    @override
    def many(self, xs: PyTree) -> Float[Array, " m"]:
        # Points are sorted by their steps, as those of one batch wait for the longest.
        order = jnp.argsort(jax.vmap(self._steps)(xs))
        values = super().many(jax.tree.map(lambda v: v[order], xs))
        return jnp.zeros_like(values).at[order].set(values)

    @override
    def value_and_gradient(self, x: PyTree) -> tuple[Float[Array, ""], PyTree]:
        return self(x), _hypergradient(self, x)

    def _solution(self, x: PyTree) -> PyTree:
        """Return the lower solution, from zero on, in the certificate's metric."""
        metric = self._metric(x)
        means = sensitivities.Means(self.problem, self.data, self.sizes)
        roots = jax.tree.map(jnp.sqrt, metric.diagonal)

        def gradient(s):
            y = jax.tree.map(jnp.divide, s, roots)
            return jax.tree.map(jnp.divide, means.lower_y(x, y), roots)

        start = optax.tree.zeros_like(self.y0)
        s = metric.spectrum.accelerated_gradient(gradient, start, self._steps(x))
        bounds = certified.certificate_of(self.problem).bounds(self.sizes, x)
        y = jax.tree.map(jnp.divide, s, roots)
        return Ball(bounds.solution_radius).project(y)

    def _steps(self, x: PyTree) -> Int[Array, ""]:
        count = self.num_steps
        if count is None:
            count = _steps(self._metric(x), self.target)
        return jnp.asarray(count).astype(jnp.int32)

    def _metric(self, x: PyTree) -> Metric:
        certificate = certified.certificate_of(self.problem)
        return certificate.metric(self.problem, self.sizes, x, self.y0)


def _steps(metric: Metric, target: float) -> Number:
    """Return a number of lower-level steps that leave an error of `target` in y."""
    error = target * metric.least**0.5
    return metric.spectrum.accelerated_steps(metric.radius, error)


@dataclasses.dataclass(frozen=True)
class GradientNorm(AbstractScore):
    r"""Score $\|x - \Pi_X(x - \nabla \Phi(x))\|$, the norm of the gradient mapping.

    It is zero at stationary points, and the norm of the hypergradient where a unit step
    stays in the set; it is smaller if the set's boundary holds a step back. A
    record of level $r$ moves the hypergradient by at most $S_r$, so, projections not
    setting points further apart, the score by as much, and the differences between two
    points by $2 S_r$; the errors of the inner solves are part of $S_r$.
    """

    @override
    def contributions(self, dtype: DTypeLike) -> dict[str, Any]:
        certificate, rounding = self._certificate(), self._rounding(dtype)
        sensitivities.check_dtype(certificate, self.sizes, dtype)
        halves = sensitivities.hypergradient_sensitivity(certificate, self.sizes, dtype)
        return {"upper": halves.upper + rounding, "lower": halves.lower + rounding}

    @override
    def regularity(self, dtype: DTypeLike, dimension: int) -> Regularity:
        certificate = self._certificate()
        of = certificate, self.sizes, dtype
        error = sensitivities.hypergradient_error(*of) + self._rounding(dtype)
        lipschitz = float(certificate.second_order.smoothness + 2)  # 1 + (1 + beta)
        return Regularity(dimension, lipschitz, error=float(error))

    @property
    @override
    def assumptions(self) -> tuple[str, ...]:
        return self._certificate().assumptions

    def potential(self, data: Levels, start: PyTree) -> AbstractPotential:
        """Return the score as a potential, by a new hypergradient at every point."""
        return _Norm(self.problem, data, start[1], self.sizes)

    def _certificate(self) -> AbstractCertificate:
        return certified.certificate_of(self.problem)

    def _rounding(self, dtype: DTypeLike) -> Number:
        """Return a bound on the rounding of projecting a step; 0 without a set."""
        if isinstance(self.problem.x_set, Euclidean):
            return 0.0
        reach = self.problem.x_set.reach
        if isinstance(reach, float) and math.isinf(reach):
            raise ValueError(
                "ExponentialMechanism: gradient_norm needs a bounded set, or "
                f"Euclidean(), got x_set={self.problem.x_set}."
            )
        gradient = self._certificate().bounds(self.sizes).gradient
        return 8 * float(jnp.finfo(dtype).eps) * (reach + gradient)


class _Norm(AbstractPotential):
    problem: BilevelProblem
    data: Levels
    y0: PyTree
    sizes: Sizes = eqx.field(static=True)

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        value = _hypergradient(self, x)
        step = optax.tree.sub(x, value)
        back = optax.tree.sub(step, self.problem.x_set.project(step))
        return optax.tree.norm(optax.tree.add(value, back))
