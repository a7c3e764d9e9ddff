"""Classifiers, linear models on features and a constant, plans of their descents."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
from jaxtyping import Array, Bool, Float, Int
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from .. import _checks
from ..core.levels import Sizes
from ..core.outputs import TailMean
from ..core.plan import calibrated
from ..core.problem import AbstractProblem
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..onelevel.losses import Record, example, logistic_loss, score
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from ..privacy.budget import PrivacyBudget
from ..privacy.ledger import AbstractRelease
from .base import PrivateEstimator
from .beforehand import PublicSize, with_nan
from .declared import Frame, declared, index_of

# Length of a row at the unit and of the constant, together 1. A longer constant leaves
# less clip norm to the features; a shorter one is learned more slowly.
FEATURES, CONSTANT = 0.85**0.5, 0.15**0.5


def softmax_loss(weights: Float[Array, "d k"], record: Record) -> Float[Array, ""]:
    r"""Return $-\log \mathrm{softmax}(W^\top a)_b$ for features $a$ and a class $b$.

    Args:
        weights: $W$, a column for each class.
        record: `{"features": a, "label": b}` or `(a, b)`.
    """
    row, label = example(record)
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        score(weights, row), label.astype(jnp.int32)
    )


@functools.lru_cache(maxsize=64)
def weighted(loss: Any) -> Any:
    """Return a function: a loss times a record's weight; cached, to compile once."""

    def scaled(model: Any, record: Any) -> Float[Array, ""]:
        return record["weight"] * loss(model, record)

    return scaled


def with_constant(
    rows: Float[np.ndarray, "n d"], counts: Bool[np.ndarray, " n"], constant: bool
) -> Float[np.ndarray, "n p"]:
    """Return rows, with a constant if asked; NaN for records that do not count."""
    if constant:
        constants = np.full((len(rows), 1), CONSTANT)
        rows = np.concatenate([FEATURES * rows, constants], axis=1)
    return with_nan(rows, counts)


def split(
    model: Float[np.ndarray, "k p"], constant: bool
) -> tuple[Float[np.ndarray, "k d"], Float[np.ndarray, " k"]]:
    """Split a linear model into coefficients for `Frame` features and constants."""
    if not constant:
        return model, np.zeros(len(model))
    return FEATURES * model[:, :-1], CONSTANT * model[:, -1]


@functools.lru_cache(maxsize=64)
def ridge_on(
    weight: float, constant: bool
) -> Callable[[Float[Array, "d ..."]], Float[Array, ""]] | None:
    """Return a ridge penalty function, not on the constant; `None` if weight is 0."""
    if weight == 0:
        return None

    def penalty(model):
        weights = model[:-1] if constant else model
        return weight * jnp.sum(weights * weights)

    return penalty


class PrivateClassifier(ClassifierMixin, PrivateEstimator, abc.ABC):
    """A private estimator of declared classes."""

    classes: Any
    classes_: np.ndarray  # sorted

    @property
    def constant_accuracy_(self) -> float:
        """Released fraction of the most frequent class; NaN if it was not released.

        It is the accuracy of the best constant answer on records like those of `fit`.
        """
        check_is_fitted(self, "records_check_")
        found = self.records_check_.constant_accuracy
        return math.nan if found is None else found

    def _read_labels(
        self, y: Any, table: Float[np.ndarray, "n d"], name: str = "y"
    ) -> Int[np.ndarray, " n"]:
        """Set the declared classes; return each record's class index, -1 for none."""
        column = self._column(y, table, name)
        example = 'classes=["no", "yes"]'
        self.classes_ = declared(self._owner, "classes", self.classes, example)
        return index_of(self._owner, "classes", self.classes_, column)

    @abc.abstractmethod
    def _scores(self, X: Any) -> Float[np.ndarray, "n k"]:
        """Return the scores of each row, one for each class."""

    def predict(self, X: Any) -> np.ndarray:
        """Return the class with the largest score, for each row.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        scores = self._scores(X)  # refuses an estimator that is not fitted
        return self.classes_[np.argmax(scores, axis=1)]

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n k"]:
        """Return the probabilities of the classes of each row, ordered as `classes_`.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        return scipy.special.softmax(self._scores(X), axis=1)

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n k"]:
        """Return the logarithms of `predict_proba`'s probabilities.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


class LinearClassifier(PrivateClassifier):
    """Base of the linear classifiers, with predictions from coefficients."""

    coef_: Float[np.ndarray, "k d"]  # one row for two classes
    intercept_: Float[np.ndarray, " k"]

    @property
    def _loss(self) -> Any:
        return logistic_loss if len(self.classes_) == 2 else softmax_loss

    def _start(self, width: int | None = None) -> Float[Array, "d ..."]:
        """Return the initial coefficients of so many features, an array of zeros."""
        width = (width or self.n_features_in_) + self._constant
        count = len(self.classes_)
        return jnp.zeros((width,) if count == 2 else (width, count))

    def _records(
        self, rows: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]
    ) -> dict[str, np.ndarray]:
        """Return a dict of features and labels; NaN if a label is not declared."""
        features = with_constant(rows, labels >= 0, self._constant)
        label = np.maximum(labels, 0)
        binary = len(self.classes_) == 2
        label = 2 * label - 1 if binary else label
        return {
            "features": features,
            "label": label.astype(features.dtype if binary else np.int32),
        }

    def _keep(self, model: Float[np.ndarray, "d ..."], units: Frame) -> None:
        """Set `coef_` and `intercept_`, from a fitted model, for original features."""
        model = np.atleast_2d(np.asarray(model, float).T)
        weights, constant = split(model, self._constant)
        self.coef_, self.intercept_ = units.coefficients(weights, constant)

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return `X @ coef_.T + intercept_`; one number a row for two classes.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        check_is_fitted(self)
        scores = self._test_rows(X) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    @override
    def _scores(self, X: Any) -> Float[np.ndarray, "n k"]:
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([np.zeros_like(scores), scores], axis=1)
        return scores


@dataclasses.dataclass(frozen=True)
class Settings:
    r"""Constants from which `plan_descent` finds steps, their size and the clip norm.

    Attributes:
        walk: $a$, about the largest distance that noise alone moves a coordinate.
        longest: $\eta_{\max}$, the step size that the curvature of the loss admits.
        steps: Least number of steps $T$, largest number at the least clip norm, and
            largest number of all.
        clip_norm: Range of the bound $C$ on one record's gradient.
    """

    walk: float
    longest: float
    steps: tuple[int, int, int]
    clip_norm: tuple[float, float]

    def with_parameters(self, owner: str, max_iter: Any, clip_norm: Any) -> "Settings":
        """Return a copy with at most `max_iter` steps and a given `clip_norm`."""
        _checks.count(owner, max_iter=max_iter)
        least, some, most = (min(count, int(max_iter)) for count in self.steps)
        given = self.clip_norm
        if clip_norm != "auto":
            _checks.positive(owner, clip_norm=clip_norm)
            given = (float(clip_norm), float(clip_norm))
        return dataclasses.replace(self, steps=(least, some, most), clip_norm=given)


@functools.lru_cache(maxsize=128)
def plan_descent(
    loss: Any,
    ridge: float,
    constant: bool,
    shape: tuple[int, ...],
    budget: PrivacyBudget,
    public: PublicSize,
    settings: Settings,
    before: tuple[AbstractRelease, ...],
    kind: type[NoisyGD] = NoisyGD,
) -> tuple[FiniteSum, Plan[NoisyGD]]:
    r"""Return a problem, and the `Plan` of a full-batch descent, cached by the sizes.

    A single release has noise of the deviation $s C$, and each of $T$ has $s C \sqrt
    T$, so that steps of size $\eta$ walk by $\eta s C T$ by noise alone. This walk is
    limited to $a$: first for steps of the longest size, then for a larger clip norm,
    which biases the model less, then for more steps. If $a$ is too little for the
    fewest steps and the least clip norm, steps are shorter. A ridge shortens them, too.
    All depend on public numbers alone.

    Args:
        loss: The loss of a record.
        ridge: The weight of the penalty.
        constant: Whether the last row of the model is a constant.
        shape: The shape of the model.
        budget: The budget.
        public: The public number of records and the neighbouring relation.
        settings: The constants of the descent.
        before: As for `calibrate`.
        kind: The class of the solver.
    """

    def plan(steps: int, clip_norm: float, step_size: float, ridge: float) -> Any:
        problem = public.problem(FiniteSum(loss, public=ridge_on(ridge, constant)))
        solver = kind(steps, clip_norm, step_size, output=TailMean())
        solver = solver.with_neighbours(public.relation)
        start = jnp.zeros(shape)
        options: Any = {"sizes": public.size, "w0": start, "before": before}
        found = calibrated(problem, solver, budget, **options)
        # An estimator has no step size to change, so this remark is dropped.
        said = tuple(text for text in found.remarks if not text.startswith("steps"))
        return problem, dataclasses.replace(found, remarks=said)

    noise: Any = plan(1, 1.0, 1.0, 0.0)[1].report.ledger[-1].noise_std  # s
    longest = 1 / (1 / settings.longest + 2 * ridge)
    reach = settings.walk / noise  # of the product of all three
    least, most = settings.clip_norm
    fewest, some, many = settings.steps
    steps = min(max(int(reach / (least * longest)), fewest), some)
    clip_norm = min(max(reach / (longest * steps), least), most)
    steps = min(max(int(reach / (clip_norm * longest)), steps), many)
    return plan(steps, clip_norm, min(longest, reach / (clip_norm * steps)), ridge)


@functools.lru_cache(maxsize=128)
def plan_of(
    problem: AbstractProblem,
    solver: AbstractSolver,
    budget: PrivacyBudget,
    sizes: Sizes | int,
    shapes: tuple[tuple[int, ...], ...],
    before: tuple[AbstractRelease, ...],
) -> Plan[Any]:
    """Return the `Plan` of a calibrated solver, cached for fits of these sizes.

    The shapes are of the leaves of the initial point.
    """
    w0 = tuple(jnp.zeros(shape) for shape in shapes)
    start = w0[0] if len(w0) == 1 else w0
    return calibrated(problem, solver, budget, sizes=sizes, w0=start, before=before)
