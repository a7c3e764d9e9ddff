"""The loss of a row where none is given: of classifiers and of regressors."""

from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import is_classifier, is_regressor

from ..core.columns import Column, elements, table_of
from .row_losses import Losses, count


def default_losses(
    estimator: Any, training_targets: Any
) -> tuple[Losses, float | None]:
    """Brier or 0-1 loss of a classifier, squared error of a regressor.

    The variance of the training targets is the unit of squared errors.

    Returns:
        The losses, and what none is above, where there is such a number.

    Raises:
        ValueError: The estimator is neither, or targets have a shape that the losses
            of classifiers are not for.
    """
    if is_classifier(estimator):
        if np.ndim(training_targets) != 1:
            raise ValueError(
                "PrivateSearch: the default losses of a classifier need one label per "
                f"row, got y of shape {np.shape(training_targets)}. Ravel a column, or "
                "give losses(estimator, X, y)."
            )
        chances = hasattr(estimator, "predict_proba")
        return _brier_loss if chances else zero_one_loss, 1.0
    if is_regressor(estimator):
        scale = float(np.var(np.asarray(training_targets, np.float64))) or 1.0
        return lambda fitted, X, y: _square(fitted.predict(X), y) / scale, None
    raise ValueError(
        f"PrivateSearch: {type(estimator).__name__} is no classifier and no regressor; "
        "give losses(estimator, X, y)."
    )


def _brier_loss(fitted, X, y):
    """Half the squared distance from each row's chances to its class, in [0, 1].

    Proper as the log loss is, but bounded: where few rows have nearly all of a loss,
    clipping turns its mean around. A class that training did not know has no chance.
    """
    chances = fitted.predict_proba(X)
    hits = _labels(y)[:, None] == np.asarray(fitted.classes_)[None, :]
    known = np.any(hits, axis=1)
    return np.sum((chances - hits) ** 2, axis=1) / 2 + ~known / 2


def zero_one_loss(fitted: Any, X: Any, y: Any) -> Float[np.ndarray, " n"]:
    """1 for rows of another class than is predicted; it has no slopes."""
    return (_labels(fitted.predict(X)) != _labels(y)).astype(float)


def _labels(y):
    """Labels as objects: in one array one of them could change the type of all."""
    return Column.of(y).entries.astype(object)


def _square(prediction, y):
    # Row by row: (n,) less (n, 1) would be all pairs of records.
    rows = (count(y), -1)
    listed = elements(y)
    several = None if listed is None else table_of(listed)
    targets = Column.of(y) if several is None else Column(several, "objects")
    errors = np.reshape(prediction, rows) - targets.numbers().reshape(rows)
    return np.mean(errors**2, axis=1)
