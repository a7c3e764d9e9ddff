"""Recalibration: slope and constants of a model's scores, fitted to upper records."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from ..bilevel.levels import Objective, noise_std, queries_of
from ..bilevel.pipeline import AbstractPipeline, Outputs
from ..bilevel.problem import BilevelProblem
from ..core.outputs import TailMean
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from ..sets import Euclidean
from .sources import SourceWeighting

CURVATURE, FIT = "curvature", "fit"
# Ridge in squares of the noise of one long release. It is the best one if each number
# improves the loss by .02, which is u^2 / 2 in coordinates of curvature 1.
_RIDGE = 24.0
# Curvature of a logistic loss between the model and zero, relative to that at zero.
_LESS_CURVED = 0.7
# Curvatures below this fraction of the middle of their range are noise.
_LEAST = 0.08
# The fit starts at half of the model, or at less if its scores are large: few steps
# would not change these. benchmarks/results/constants.md names the tasks.
_START = 0.5
_LONGEST = 1.8


class _Span(eqx.Module):
    r"""Models $y + \sum_j u_j b_j$ by coordinates $u$, with a ridge $\rho \|u\|^2 / 2$.

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
        """Return the model of the span that has the coordinates `u`."""
        return self.y + jnp.tensordot(u, self.directions, 1).astype(self.y.dtype)


def _fit_objective(problem: BilevelProblem, span: _Span) -> Objective:
    """Return the `Objective` of the upper level in the coordinates of a span."""

    def upper(w, record):
        return jax.grad(lambda u: problem.upper(span.x, span.at(u), record))(w)

    def term(u):
        public = problem.upper_public
        own = 0.0 if public is None else public(span.x, span.at(u))
        return own + span.ridge / 2 * jnp.sum(u * u)

    return Objective(Euclidean(), {"upper": upper}, jax.grad(term))


def _curvature_objective(problem: BilevelProblem, span: _Span) -> Objective:
    r"""Return an `Objective` whose minimizer is the mean Hessian of lower losses.

    The minimizer of $\frac{1}{2 n_g} \sum_i \|H - H_i\|^2$ is the mean of the $H_i$:
    the Hessian of the loss of a lower record along the directions, at $y = 0$.
    """
    from_zero = dataclasses.replace(span, y=jnp.zeros_like(span.y))
    weighting = problem if isinstance(problem, SourceWeighting) else None

    def loss(u, record):
        y = from_zero.at(u)
        # Records of sources that the search dropped count too.
        if weighting is None:
            return problem.lower(span.x, y, record)
        return weighting.loss(y, record)

    def lower(w, record):
        distance = w - jax.hessian(loss)(jnp.zeros_like(w[0]), record)
        # A record of no known source has no influence.
        known = True if weighting is None else weighting.index(record)[1]
        return jnp.where(known, distance, jnp.zeros_like(distance))

    # The lower losses of a problem on people are those of people already.
    of_record = lower if weighting is None else weighting.of_record(lower)
    return Objective(Euclidean(), {"lower": of_record})


def is_array(y: PyTree) -> bool:
    """Return whether a model is a single array, or the `ShapeDtypeStruct` of one."""
    return hasattr(y, "shape") and hasattr(y, "dtype")


def constants_of(owner: str, y: PyTree, intercept: int | None) -> Array:
    """Return stacked unit vectors like y along the intercept; 0 of them for `None`.

    A `ValueError` refuses models that are not one array, or have no such feature.
    """
    if not is_array(y) or jnp.ndim(y) > 2:
        raise ValueError(
            f"{owner}: y must be one array of shape (d,) or (d, k), got "
            f"{_checks.shown(y)}. Use OneLevel for other models."
        )
    if intercept is None:
        return jnp.zeros((0, *y.shape), y.dtype)
    rows = jnp.atleast_1d(y)  # a number is the coefficient of one feature
    if type(intercept) is not int or not -len(rows) <= intercept < len(rows):
        raise ValueError(
            f"{owner}: intercept must be a place in y, got {_checks.shown(intercept)}."
        )
    each = jnp.eye(rows[0].size, dtype=y.dtype).reshape(-1, *rows.shape[1:])
    directions = jnp.zeros((len(each), *rows.shape), y.dtype)
    return directions.at[:, intercept].set(each).reshape(-1, *y.shape)


class Recalibration(AbstractPipeline):
    r"""Fits slope and constant of the initial model on the upper records.

    With $\hat y$ the given model, the run fits $u$ on the upper records in

    $$\min_u \frac{1}{n_f} \sum_i f(x, y; z_i) + \frac{\rho}{2} \|u\|^2, \qquad
    y = \frac{\hat y}{2} + B \, (0.7 H)^{-1/2} u,$$

    with orthonormal columns of $B$: $\hat y$ without the coefficients of the constant
    feature, over its norm, and the $e_j$, these coefficients, one for each score. A
    model of many lower records thereby gets the base rate of the upper ones, and the
    length that its predictions deserve: `WarmStarted(search, Recalibration())`. From a
    model of zeros the answer is the base rate, a private estimate of the best constant
    prediction.

    $H$ is the Hessian of the mean loss of the lower records along $B$, at $y = 0$,
    released, symmetrized, with eigenvalues of at least .08 of the middle of their
    range. For `SourceWeighting` all known sources count alike. In these coordinates the
    curvature of the upper loss is about 1, so that a step of size 1 is about a Newton
    step, and lengths of gradients do not depend on the features. A `step_size` that is
    a number is divided by $1 + \rho$, for the curvature of the ridge.

    The ridge $\rho = 24 s^2$ follows from $s = \sigma / \sqrt T$, the noise that a mean
    gradient would have if the whole run released one. The best ridge is $s^2 / u_j^2$.
    The factor 24 stands for numbers that improve the loss by $u_j^2 / 2 = .02$. If
    noise hides $u$, the answer is half of the model. That loses little if the model is
    right, and little if the upper records have another base rate. Of a long model it is
    less: the half is divided by $\sqrt{v^\top H v} / 1.8$ if that is above 1, with $v$
    the model in the basis $B$. For two classes that is 0.28 times the root mean square
    of a score.

    Args:
        fit: The one-level solver of $u$, with settings for gradients whose typical
            length at $y = 0$ is about 1 in each direction. The default clip norm clips
            gradients of a class of less than a quarter of the records, whose rate comes
            out too low, by a fifth at 8 %. From epsilon 3 on, `clip_norm=2.4` avoids
            that.
        curvature: The one-level solver of $H$: one step of size 1. It starts in the
            middle of the range of curvatures. Its clip norm $c$ is the largest distance
            from there, in the Frobenius norm: with $k$ columns of $B$ a Hessian of rank
            one is not clipped if its eigenvalue is in $[0, 2 c / \sqrt k]$. The
            default admits $[0, 1/4]$, for features of norm 1 at most and two classes;
            for norm $r$ multiply it by $r^2$.
        intercept: The index of the feature that is the same for all records, along the
            leading axis of y; `None` if there is none. Static.
        budget_split: The split of the squared budget over curvature and fit. Disjoint
            people of the lower level spend budget on the curvature alone.

    Raises:
        ValueError: y is not one array of shape (d,) or (d, k), or has no such feature.

    Privacy:
        The releases of `curvature`, which read lower records alone, and those of `fit`,
        which read upper ones.

    References:
        Platt, "Probabilistic outputs for support vector machines", 1999, for slope and
        constant.
    """

    fit: NoisyGD = NoisyGD(5, 1.75, 1.0, output=TailMean(0.8))
    curvature: NoisyGD = NoisyGD(1, 0.177, 1.0)
    intercept: int | None = eqx.field(static=True, default=None)
    budget_split: tuple[float, float] = _checks.split_field(0.05, 1.0)
    stages: ClassVar = {CURVATURE: AbstractFiniteSum, FIT: AbstractFiniteSum}
    in_config: ClassVar[bool] = True

    @override
    def queries(self, name):
        return queries_of("lower" if name == CURVATURE else "upper")

    @override
    def objective(self, name, problem, w0, outputs):
        if name == CURVATURE:
            return _curvature_objective(problem, self._span(w0)[0])
        span = self.scaled_span(w0, outputs)
        return _fit_objective(problem, dataclasses.replace(span, ridge=self._ridge()))

    @override
    def start(self, name, w0, outputs):
        y = w0[1]
        size = 1 + len(constants_of("Recalibration", y, self.intercept))
        if name == FIT:
            return jnp.zeros(size, y.dtype)
        return self.curvature.clip_norm / size**0.5 * jnp.eye(size, dtype=y.dtype)

    @override
    def step_factor(self, name, outputs):
        return 1 / (1 + self._ridge()) if name == FIT else None

    @override
    def current_solution(self, name, problem, w0, outputs):
        if name == CURVATURE:
            return w0
        y = self.scaled_span(w0, outputs).at(outputs[FIT])
        return w0[0], problem.y_set.project(y)  # the span may leave the set

    def _ridge(self) -> Array:
        """Return the ridge coefficient of the fit, in proportion to noise variance."""
        noise = noise_std(self.fit, self.queries(FIT), self.sizes)
        return _RIDGE * noise**2 / self.fit.num_steps

    def _span(self, w0: PyTree) -> tuple[_Span, Array]:
        """Return a `_Span` of orthonormal directions, and the model's coordinates."""
        x, y = w0
        constants = constants_of("Recalibration", y, self.intercept)
        shifts = jnp.tensordot(constants, y, jnp.ndim(y))
        slope = y - jnp.tensordot(shifts, constants, 1)
        length = jnp.linalg.norm(slope)
        slope = slope / jnp.where(length > 0, length, 1)
        directions = jnp.concatenate([slope[None], constants])
        return _Span(x, _START * y, directions), jnp.append(length, shifts)

    def scaled_span(self, w0: PyTree, outputs: Outputs) -> _Span:
        """Return a `_Span` with directions along which the curvature is about 1."""
        span, model = self._span(w0)
        middle = self.start(CURVATURE, w0, {})[0, 0]
        noisy: Any = outputs[CURVATURE]
        values, vectors = jnp.linalg.eigh((noisy + noisy.T) / 2)
        values = jnp.maximum(values, _LEAST * middle)
        root = vectors @ jnp.diag((_LESS_CURVED * values) ** -0.5) @ vectors.T
        directions = jnp.tensordot(root, span.directions, 1)
        # The root mean square of half a score, for two classes.
        length = jnp.linalg.norm(jnp.sqrt(values) * (vectors.T @ model))
        shorter = jnp.minimum(1, _LONGEST / jnp.maximum(length, _LONGEST))
        return dataclasses.replace(span, y=shorter * span.y, directions=directions)
