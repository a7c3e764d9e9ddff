r"""Intervals of coefficients, from the descent and one more release.

Over the last $k$ steps of a descent let $\bar w$ be the mean point and $\bar g$ the
mean released gradient, less the penalty's. With the released mean $H$ of second
derivatives at $\bar w$ the estimate is

$$\hat\theta = \bar w - H^{-1} \bar g,$$

which takes back ridge and incomplete convergence. With the released mean $V$ of squared
gradients, noise $s$ of one gradient and noise $\sigma$ of $H$ its covariance is about

$$H^{-1} \Bigl(\frac{V}{n} + \frac{s^2}{k} I + \frac{\sigma^2}{2} (\|\Delta\|^2 I +
\Delta \Delta^\top)\Bigr) H^{-1}, \qquad \Delta = \hat\theta - \bar w.$$
"""

import dataclasses
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from .. import _checks
from ..core.outputs import TailMean, running_mean
from ..core.usability import released_mean
from ..onelevel.losses import Record, example, score
from ..onelevel.noisy_gd import NoisyGD
from ..privacy.keys import PRNGKey
from ..privacy.records.people import combined, on_rows
from ..privacy.releases import Release
from .beforehand import AbstractBeforehand, Entry, Terms
from .declared import Frame
from .linear import FEATURES, split

Square = Float[np.ndarray, "p p"]
_TAIL = TailMean(0.75)
_PART = 0.05, 0.2  # of the squared budget
# Noise of a second derivative that is worth more budget, and the largest useful noise:
# times a typical eigenvalue over the norm of a matrix of noise.
_WANTED, _MOST_NOISE = 0.16, 0.5
_SQUARES = 0.5  # weight of squared gradients beside second derivatives
_FLAT = 1.0  # noise of a smallest eigenvalue, below which curvature is hidden
_HIDDEN = (
    "the noise hides how the loss curves along some direction, so that intervals are "
    "far too wide and the coefficients predict badly. Use more records, a larger "
    "epsilon or fewer features; to predict, leave out intervals=True."
)


def huber_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    """Return the Huber loss of a residual, which is quadratic up to 1."""
    row, label = example(record)
    return optax.losses.huber_loss(score(weights, row), label)


def of_short_rows(rows: dict[str, Any]) -> dict[str, Any]:
    r"""Return rows, a dict, with a weight $1 / \max(1, \|z\|^2)$ for each row $z$.

    The gradient of a row is then at most 1 long if the derivative of its loss is at
    most 1, so that nothing is clipped. The weight depends on features alone, so a law
    with the declared form keeps its coefficients.
    """
    with np.errstate(all="ignore"):  # a warning would reveal a record
        squared = np.square(rows["features"]).sum(axis=-1)
        return rows | {"weight": 1 / np.maximum(squared, 1)}


class TailDescent(NoisyGD):
    """`NoisyGD` whose answer is a pair of means over the last steps.

    The pair is the point where the gradients were taken, and the released gradient
    without that of a quadratic public term.

    Privacy:
        As `NoisyGD`; both means are of released values.
    """

    @property
    def averaged(self) -> int:
        """Number of steps in the means."""
        return self.num_steps - _TAIL.first(self.num_steps)

    @override
    def init(self, problem, w0):
        state = super().init(problem, w0)
        return dataclasses.replace(state, kept=(state.w, jnp.zeros_like(state.w)))

    @override
    def moved(self, problem, gradient, state, deviation):
        place = jnp.maximum(state.t - _TAIL.first(self.num_steps), 0)
        kept = running_mean(state.kept, (state.w, gradient), place)
        state = dataclasses.replace(state, kept=state.w)  # for the unused output rule
        moved = super().moved(problem, gradient, state, deviation)
        return dataclasses.replace(moved, kept=kept)

    @override
    def answer(self, problem, state):
        point, gradient = state.kept
        return point, gradient - problem.public_gradient(point)


@dataclasses.dataclass(frozen=True)
class Moments(AbstractBeforehand):
    """A planned release of second derivatives and squared gradients of linear models.

    The curvature is the largest second derivative of the loss of a score: 1/4 of the
    logistic one, 1 of the Huber loss. It tells the losses apart, too.
    """

    width: int  # number of features, without a constant
    parameters: int  # their number
    curvature: float
    wanted: bool  # whether there are intervals; all else does nothing without

    @property
    @override
    def terms(self) -> Terms:
        """`Terms` of the release; noise that hides a typical eigenvalue is too much."""
        # A matrix of noise sigma on p parameters has a norm of about sigma sqrt(2 p).
        # It may be half of a typical eigenvalue, of d features .85 max phi'' / d.
        typical = self.curvature * FEATURES**2 / self.width
        unit = typical / math.sqrt(2 * self.parameters)
        norm = self.curvature * math.sqrt(1 + _SQUARES**2)
        of_noise = _PART, _WANTED * unit, _MOST_NOISE * unit
        return Terms("second moments", *of_noise, clip_norm=norm)

    @property
    @override
    def release(self) -> Release | None:
        return super().release if self.wanted else None

    @property
    def kind(self) -> type[NoisyGD]:
        """Class of the descent: `TailDescent` if intervals are wanted, or `NoisyGD`."""
        return TailDescent if self.wanted else NoisyGD

    def with_keys(self, entry: Entry) -> tuple[Entry, PRNGKey | None]:
        """Return the `Entry` with the run's key, and the release's key or `None`."""
        if not self.wanted:
            return entry, None
        first, last = jax.random.split(entry.key)
        return dataclasses.replace(entry, key=first), last

    def shortened(self, records: Any) -> Any:
        """Return records, with weights of `of_short_rows` if intervals are wanted."""
        return on_rows(of_short_rows, records) if self.wanted else records

    def check(self, owner: str) -> None:
        """Raise `ValueError` if delta is 0 or the release would be too noisy."""
        if self.planned is None:
            raise ValueError(f"{owner}: intervals=True needs a delta above 0.")
        if self.release is None:
            times = self.planned.noise_std / self.terms.most_noise
            raise ValueError(
                f"{owner}: intervals=True needs {math.ceil(times * self.public.size)} "
                f"records for {self.width} features at epsilon={self.budget.epsilon:g}."
                " Use a larger epsilon or fewer features, or leave it out."
            )

    def released(
        self, point: Float[np.ndarray, " p"], records: Any, **given: Any
    ) -> tuple[Square, Square]:
        """Release two matrices: mean second derivatives, squared gradients at a point.

        Records have features, label and weight; `given` is a key for this release alone
        and its owner.

        Privacy:
            The one release of `release`. The square is of the gradient of a person.
        """
        release: Any = self.release
        point, scale = point.astype(np.float32), _SQUARES * self.curvature
        unit = self.public.unit
        first = combined(lambda v: self._of_rows(point, v)[0], records, unit)
        second = combined(lambda v: self._of_rows(point, v)[1], records, unit)
        parts = second, scale * squares_of(first)
        rows = np.concatenate(parts, axis=1, dtype=np.float32)
        mean = np.asarray(released_mean(release, rows, **given), float)
        halves = np.split(mean, 2)
        second, squared = (matrix_of(v, self.parameters) for v in halves)
        return second, squared / scale

    def _of_rows(
        self, point: Float[np.ndarray, " p"], rows: dict[str, Any]
    ) -> tuple[Float[np.ndarray, "n p"], Float[np.ndarray, "n q"]]:
        """Return weighted gradients and second derivatives, as `squares_of`, by row."""
        features, label = rows["features"], rows["label"]
        with np.errstate(all="ignore"):  # a warning would reveal a record
            scores = features @ point
            if self.curvature == 1:
                slope = np.clip(scores - label, -1, 1)
                curve = (np.abs(scores - label) < 1).astype(np.float32)
            else:
                chance = 1 / (1 + np.exp(label * scores))
                slope, curve = -label * chance, chance * (1 - chance)
            gradient = (rows["weight"] * slope)[:, None] * features
            return gradient, (rows["weight"] * curve)[:, None] * squares_of(features)

    def estimate(
        self, problem: Any, solver: Any, answer: Any, records: Any, **given: Any
    ) -> tuple[Float[np.ndarray, " p"], Square | None]:
        """Release the moments; return corrected estimate, and covariance or `None`.

        Without intervals it is the solver's answer. The solver is of class `kind`, and
        the other arguments are those of `released`.
        """
        if self.release is None:
            return answer, None
        (of_step,) = solver.ledger(problem, solver.sizes).releases
        point, gradient = (np.asarray(v, float) for v in answer)
        second, squared = self.released(point, records, **given)
        noise = self.release.noise_std
        if np.linalg.eigvalsh(second)[0] < _FLAT * noise:
            _checks.warn(f"{given['owner']}.fit: {_HIDDEN}")
        inverse, unit = np.linalg.pinv(second), np.eye(len(point))
        move = -inverse @ gradient
        of_squares = noise / (_SQUARES * self.curvature)
        inner = shrunk(squared, second, of_squares, noise) / self.public.size
        inner += of_step.noise_std**2 / solver.averaged * unit
        inner += noise**2 / 2 * (move @ move * unit + np.outer(move, move))
        return point + move, inverse @ inner @ inverse


def squares_of(rows: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "n q"]:
    """Return each row's outer product as its upper triangle, with the same norm.

    Entries beside the diagonal are multiplied by the root of 2, so that the length is
    the squared length of the row.
    """
    first, last = np.triu_indices(rows.shape[1])
    factor = np.where(first == last, 1, math.sqrt(2)).astype(np.float32)
    with np.errstate(all="ignore"):  # a warning would reveal a record
        return factor * rows[:, first] * rows[:, last]


def matrix_of(row: Float[np.ndarray, " q"], width: int) -> Square:
    """Return the symmetric matrix whose upper triangle is a row of `squares_of`."""
    first, last = np.triu_indices(width)
    matrix = np.zeros((width, width))
    matrix[first, last] = matrix[last, first] = row
    return matrix * np.where(np.eye(width), 1, math.sqrt(0.5))


def shrunk(squared: Square, second: Square, noise: float, beside: float) -> Square:
    """Return squared gradients, shrunk towards a multiple of second derivatives.

    If the model has the form of the law, they are in proportion. The part of the
    difference that noise does not explain is kept. `noise` and `beside` are standard
    deviations of the noise of diagonal entries of `squared` and `second`.
    """
    width = len(squared)
    ratio = max(np.trace(squared), 0.0) / max(np.trace(second), beside / width)
    beyond = squared - ratio * second
    explained = width * (width + 1) / 2 * (noise**2 + (ratio * beside) ** 2)
    kept = 1 - explained / max(np.square(beyond).sum(), explained)
    values, vectors = np.linalg.eigh(ratio * second + kept * beyond)
    return (vectors * np.maximum(values, 0)) @ vectors.T


class _Deviations:
    # Annotations of `Intervals` itself would be parameters of estimators.
    coef_: Float[np.ndarray, "*k d"]
    intercept_: Any
    coef_std_: Float[np.ndarray, "*k d"]
    intercept_std_: Any


@dataclasses.dataclass(eq=False, repr=False)
class Intervals(_Deviations):
    """A mixin of linear estimators with standard deviations of their coefficients.

    They are `coef_std_` and `intercept_std_`, by sampling and by noise.
    """

    _: dataclasses.KW_ONLY
    fit_intercept: bool = True
    ridge: float = 0.0
    max_iter: int = 3000
    clip_norm: float | str = "auto"
    intervals: bool = False
    bins: int | None = None
    neighbours: str = "replace_one"
    size: int | None = None

    def conf_int(self, level: float = 0.95) -> Float[np.ndarray, "*k d 2"]:
        r"""Return an interval of each coefficient, of the shape of `coef_` and 2.

        Its ends are $\hat\theta_j \pm z\, \sigma_j$ with the normal quantile $z$.

        Args:
            level: The chance that an interval contains the coefficient of the law.

        Raises:
            ValueError: `level` is not between 0 and 1, or `fit` had no
                `intervals=True`.

        Privacy:
            Post-processing of released values: free.
        """
        check_is_fitted(self, "coef_")
        owner = f"{type(self).__name__}.conf_int"
        _checks.proper_fraction(owner, level=level)
        if not hasattr(self, "coef_std_"):
            raise ValueError(f"{owner}: fit with intervals=True first.")
        half = statistics.NormalDist().inv_cdf((1 + level) / 2) * self.coef_std_
        return np.stack([self.coef_ - half, self.coef_ + half], axis=-1)

    def _moments(self, *options: Any) -> Moments:
        """Return the planned `Moments`, which release nothing without intervals."""
        owner = type(self).__name__
        _checks.instance(owner, bool, intervals=self.intervals)
        moments = Moments(*options, wanted=self.intervals)
        if not self.intervals:
            return moments
        plain = {"clip_norm": "auto", "class_weight": None, "bins": None}
        for name, value in plain.items():
            if getattr(self, name, value) != value:
                raise ValueError(f"{owner}: intervals=True needs {name}={value!r}.")
        if len(getattr(self, "classes_", ())) > 2:
            raise ValueError(
                f"{owner}: intervals=True is for two classes. Fit one class against "
                "the others, each at a part of the budget."
            )
        moments.check(owner)
        return moments

    def _keep_deviations(
        self, covariance: Square | None, units: Frame, unit: float = 1.0
    ) -> None:
        """Set the standard deviations, or remove those of an earlier fit.

        The covariance is `None` without intervals; `unit` is that of the target.
        """
        if covariance is None:
            for name in ("coef_std_", "intercept_std_"):
                vars(self).pop(name, None)
            return
        values, vectors = np.linalg.eigh(covariance)
        roots = unit * (vectors * np.sqrt(np.maximum(values, 0))).T
        constant = bool(self.fit_intercept)
        coef, intercept = units.coefficients(*split(roots, constant))
        self.coef_std_ = np.linalg.norm(coef, axis=0).reshape(self.coef_.shape)
        self.intercept_std_ = float(np.linalg.norm(intercept)) + 0 * self.intercept_
