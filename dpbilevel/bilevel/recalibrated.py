"""A few numbers of a model, fitted to the upper records."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from .applications import SourceWeighting
from .penalized import UpperLevel, noise_std
from .problem import BilevelProblem, Sizes
from .refitted import AbstractSearchThenFit
from .runs import AbstractRuns

RATE = "rate"
# The ridge in squares of the noise of one long release: the best one if each number
# improves the loss by .04, which is h u^2 / 2 for a curvature of h.
_RIDGE = 12.0


class _Span(eqx.Module):
    r"""Models $y + \sum_j u_j b_j$, with a ridge $\rho \|u\|^2 / 2$.

    Args:
        x: The upper variable; released.
        y: One array; released.
        directions: The $b_j$, along the leading axis; released, or public.
        ridge: $\rho$; public.
    """

    x: PyTree
    y: Array
    directions: Array
    ridge: float | Float[Array, ""] = 0.0

    def at(self, u: Float[Array, " k"]) -> Array:
        """Return the model at `u`."""
        return self.y + jnp.tensordot(u, self.directions, 1).astype(self.y.dtype)


def _level(problem: BilevelProblem, span: _Span | None) -> UpperLevel:
    """Return the upper level in the coordinates of a span."""
    public = problem.upper_public

    def upper(u, span, record):
        return problem.upper(span.x, span.at(u), record)

    def upper_public(u, span):
        own = 0.0 if public is None else public(span.x, span.at(u))
        return own + span.ridge / 2 * jnp.sum(u * u)

    inside = BilevelProblem(upper, problem.lower, upper_public=upper_public)
    return UpperLevel(inside, span)


def _with_ridge(
    problem: BilevelProblem, span: _Span | None, solver: NoisyGD, sizes: Sizes | None
) -> UpperLevel:
    """Return this level with a ridge that follows from the noise of its release."""
    bare = _level(problem, None)
    if span is None:
        return bare
    ridge = _RIDGE * noise_std(solver, bare, sizes) ** 2 / solver.num_steps
    return _level(problem, dataclasses.replace(span, ridge=ridge))


def is_array(y: PyTree) -> bool:
    """Whether a model is one array, or its shape."""
    return hasattr(y, "shape") and hasattr(y, "dtype")


def constants_of(owner: str, y: PyTree, intercept: int | None) -> Array:
    """Return the directions of the constant, one for each score.

    Raises:
        ValueError: The model is not one array, or has no such feature.
    """
    if not is_array(y) or jnp.ndim(y) > 2:
        raise ValueError(
            f"{owner}: y must be one array of shape (d,) or (d, k), coefficients of d "
            f"features, got {_checks.shown(y)}. Use OneLevel for other models."
        )
    if intercept is None:
        return jnp.zeros((0, *y.shape), y.dtype)
    rows = jnp.atleast_1d(y)  # a number is the coefficient of one feature
    if type(intercept) is not int or not -len(rows) <= intercept < len(rows):
        raise ValueError(
            f"{owner}: intercept must be the place of a feature in y of shape "
            f"{y.shape}, got {_checks.shown(intercept)}."
        )
    each = jnp.eye(rows[0].size, dtype=y.dtype).reshape(-1, *rows.shape[1:])
    directions = jnp.zeros((len(each), *rows.shape), y.dtype)
    return directions.at[:, intercept].set(each).reshape(-1, *y.shape)


class BaseRate(AbstractRuns):
    r"""Fits the coefficients of a constant feature on the upper records.

    All other coefficients stay as they are, and so does $x$. From $y_0 = 0$ the answer
    is a private estimate of the best constant prediction: of two classes, of the rate
    of the positive ones. The baseline that every model has to beat. A ridge as in
    `Recalibrated` keeps noise from moving the answer far.

    Args:
        rate: The one-level solver of the coefficients.
        intercept: The place of the feature that is the same for all records, along the
            leading axis of y. Static.
        sizes: The planned sizes; set by `calibrate`. Static.

    Raises:
        ValueError: y is not one array of shape (d,) or (d, k), or has no such feature.

    Privacy:
        The releases of `rate`. Disjoint people of the lower level spend no budget.
    """

    rate: NoisyGD
    intercept: int = eqx.field(static=True, default=-1)
    sizes: Sizes | None = eqx.field(static=True, default=None)
    stages: ClassVar = {RATE: AbstractFiniteSum}
    budget_split: ClassVar = (1.0,)
    in_config: ClassVar[bool] = True

    @override
    def level(self, name, problem, w0, found):
        return _with_ridge(problem, w0 and self._span(w0), self.rate, self.sizes)

    @override
    def start(self, name, w0, found):
        size = len(constants_of("BaseRate", w0[1], self.intercept))
        return jnp.zeros(size, w0[1].dtype)

    @override
    def pair(self, name, problem, w0, found):
        y = self._span(w0).at(found[RATE])
        return w0[0], problem.y_set.project(y)  # the span may leave the set

    def _span(self, w0: PyTree) -> _Span:
        x, y = w0
        return _Span(x, y, constants_of("BaseRate", y, self.intercept))


class Recalibrated(AbstractSearchThenFit):
    r"""Runs a solver, then fits slope and constant of its model on the upper records.

    With $\hat y$ the released model, the last run fits $u$ on the upper records in

    $$\min_u \frac{1}{n_f} \sum_i f(x, y; z_i) + \frac{\rho}{2} \|u\|^2, \qquad
    y = \hat y + u_0\, \hat y / \|\hat y\| + \sum_j u_j e_j,$$

    with $e_j$ the coefficient of a constant feature, one for each score. A model of the
    lower records, of which there are many, thereby has the base rate of the upper ones,
    and coefficients as long as its predictions deserve. The ridge $\rho = 12 s^2$
    follows from $s = \sigma / \sqrt T$, the noise that a mean gradient would have if
    the whole run released one: if noise hides $u$, the model stays as it is. With $h$
    the curvature along $u_j$ the best ridge is $s^2 / (h u_j^2)$. The factor 12 stands
    for numbers that improve the loss by $h u_j^2 / 2 = .04$.

    Args:
        search: The solver of the model: `OneLevel(model, reads="lower")`, or a method
            that chooses sources.
        calibration: The one-level solver of the last run. Gradients in $u$ are about
            as long as those of the model: clip norm and step size have the same units.
        intercept: The place of the feature that is the same for all records, along the
            leading axis of y; `None` if there is none. Static.
        budget_split: How the squared budget is split over search and calibration. With
            disjoint people and a search that reads lower records alone the default
            spends the whole budget of both; a search that reads both levels needs a
            larger part.
        sizes: The planned sizes; set by `calibrate`. Static.

    Raises:
        ValueError: y is not one array of shape (d,) or (d, k), or has no such feature.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two.

    References:
        Platt, "Probabilistic outputs for support vector machines", 1999, for slope and
        constant.
    """

    search: AbstractRuns
    calibration: NoisyGD
    intercept: int | None = eqx.field(static=True, default=None)
    budget_split: tuple[float, float] = eqx.field(
        default=(1.0, 1.0), converter=_checks.floats
    )
    sizes: Sizes | None = eqx.field(static=True, default=None)
    stages: ClassVar = {"search": SourceWeighting, "calibration": AbstractFiniteSum}
    in_config: ClassVar[bool] = True

    @override
    def ledger(self, problem, sizes):
        _checks.instance("Recalibrated", self.search.problem_type, problem=problem)
        return super().ledger(problem, sizes)

    @override
    def level(self, problem, pair, sizes) -> UpperLevel:
        span = None if pair[1] is None else self._span(pair)
        return _with_ridge(problem, span, self.calibration, sizes)

    @override
    def start(self, y):
        size = 1 + len(self._directions(y))
        return jnp.zeros(size, y.dtype)

    @override
    def model(self, problem, pair, w):
        return problem.y_set.project(self._span(pair).at(w))

    def _directions(self, y: PyTree) -> Array:
        return constants_of("Recalibrated", y, self.intercept)

    def _span(self, pair: PyTree) -> _Span:
        length = jnp.linalg.norm(pair[1])
        slope = pair[1] / jnp.where(length > 0, length, 1)
        directions = jnp.concatenate([slope[None], self._directions(pair[1])])
        return _Span(pair[0], pair[1], directions)
