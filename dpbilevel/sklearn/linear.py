"""Linear classifiers: losses, records and predictions."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from ..onelevel.losses import Record, example, logistic_loss, score
from .base import PrivateClassifier
from .declared import Frame
from .public_size import with_nan

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
    """Return a loss times the public weight of a record; cached, to compile once."""

    def scaled(model: Any, record: Any) -> Float[Array, ""]:
        return record["weight"] * loss(model, record)

    return scaled


def with_constant(
    rows: Float[np.ndarray, "n d"], counts: Bool[np.ndarray, " n"], constant: bool
) -> Float[np.ndarray, "n p"]:
    """Return rows with a constant feature; NaN for records that do not count.

    Args:
        rows: Features in the units of a `Frame`.
        counts: Which records have a target.
        constant: Whether the model has a constant.
    """
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
    """Return the penalty function, not on the constant; `None` if `weight` is 0.

    It is cached, and so compiled once.
    """
    if weight == 0:
        return None

    def penalty(model):
        weights = model[:-1] if constant else model
        return weight * jnp.sum(weights * weights)

    return penalty


class LinearClassifier(PrivateClassifier):
    """Base of the linear classifiers, with predictions from coefficients.

    Attributes:
        coef_: Of shape `(1, d)` for two classes, else `(k, d)`.
        intercept_: Of shape `(1,)` or `(k,)`.
    """

    coef_: Float[np.ndarray, "k d"]
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
        """Set coefficients and intercept, in units of the features as they came."""
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
