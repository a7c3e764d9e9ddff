"""Losses of an estimator's validation rows, each from its own row alone."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import is_classifier, is_regressor

_PROBED = 64  # training rows on which losses must not depend on each other
_STEP = 0.3  # of the differences that tell the slope of a loss
# Clipping at the median would ask what is better for most rows, not on average.
_USUAL = 0.9

Losses = Callable[[Any, Any, Any], Float[np.ndarray, " n"]]


class RowLosses:
    """Trains an estimator at a point and tells the loss of every row of others.

    Args:
        made: The estimator with the parameters at a point, not fitted.
        X: Training inputs.
        y: Training targets.
        losses: `losses(estimator, X, y)`, the loss of every row.
    """

    def __init__(
        self, made: Callable[[np.ndarray], Any], X: Any, y: Any, losses: Losses
    ):
        self.made, self.losses = made, losses
        self.training = _sliceable(X), _sliceable(y)

    def fitted(self, point: Float[np.ndarray, " d"]) -> Any:
        """The estimator fitted to the training rows.

        Args:
            point: The point.
        """
        return self.made(point).fit(*self.training)

    def black_box(self, X: Any, y: Any) -> Callable[[np.ndarray], np.ndarray]:
        """The losses of private rows as a function of the point, which never raises.

        A row that the estimator or the losses refuse has the loss NaN, and where the
        estimator cannot be fitted all have.

        Args:
            X: Private inputs.
            y: Private targets.
        """
        private = _sliceable(X), _sliceable(y)

        def evaluated(point):
            try:
                fitted = self.fitted(point)
            except Exception:  # of the training rows, whatever the private ones are
                return np.full(count(y), np.nan)
            # An error or a warning about a row would tell something about it.
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return self._readable(fitted, *private)

        return evaluated

    def check_apart(self, point: Float[np.ndarray, " d"]) -> None:
        """Raises where a row's loss depends on the rows beside it: on training rows.

        Args:
            point: Where to fit the estimator.

        Raises:
            ValueError: It does, or there is not one loss per row.
        """
        fitted = self.fitted(point)
        few = _parts(self.training, slice(_PROBED))
        half = count(few[1]) // 2
        apart = self._rows(fitted, *_parts(few, slice(half)))
        together = self._rows(fitted, *few)[:half]
        if not np.allclose(apart, together, rtol=1e-5, atol=1e-8, equal_nan=True):
            raise ValueError(
                "PrivateSearch: losses of training rows change with the rows beside "
                "them, so one validation record would move the losses of others. "
                "Every row's loss must come from that row and the fitted estimator "
                "alone: no scaling, ranking or mean over the rows given."
            )

    def usual_slope(self, size: int) -> float:
        """What the gradient of a training row's loss is shorter than, nine in ten.

        In the middle, by differences, with the estimator fitted to every other training
        row and losses of the rest; 1 where that tells nothing.

        Args:
            size: The number of parameters.
        """
        known, held = (_parts(self.training, slice(i, None, 2)) for i in (0, 1))

        def at(point):
            return self._rows(self.made(point).fit(*known), *held)

        try:
            sides = [[at(s * _STEP * e) for s in (1, -1)] for e in np.eye(size)]
        except Exception:  # such as a class that only the other half has
            return 1.0
        slopes = np.asarray([(a - b) / (2 * _STEP) for a, b in sides])
        found = float(np.nanquantile(np.linalg.norm(slopes, axis=0), _USUAL))
        return found if 1e-6 < found < 1e6 else 1.0

    def _readable(self, fitted, X, y):
        """The losses; rows are halved until those that raise are alone, with NaN."""
        try:
            return self._rows(fitted, X, y)
        except Exception:
            if count(y) == 1:
                return np.full(1, np.nan)
        half = count(y) // 2
        parts = [_parts((X, y), rows) for rows in (slice(half), slice(half, None))]
        return np.concatenate([self._readable(fitted, *part) for part in parts])

    def _rows(self, fitted, X, y):
        found = np.asarray(self.losses(fitted, X, y), np.float64)
        if found.shape != (count(y),):
            raise ValueError(
                "PrivateSearch: losses must return one number for each of the "
                f"{count(y)} rows, got shape {found.shape}."
            )
        return found


def default_losses(estimator: Any, training_targets: Any) -> Losses:
    """Log loss or 0-1 loss of a classifier, squared error of a regressor.

    Args:
        estimator: The estimator.
        training_targets: Their variance is the unit of squared errors.

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
        return _log_loss if hasattr(estimator, "predict_proba") else _zero_one_loss
    if is_regressor(estimator):
        scale = float(np.var(np.asarray(training_targets, np.float64))) or 1.0
        return lambda fitted, X, y: _square(fitted.predict(X), y) / scale
    raise ValueError(
        f"PrivateSearch: {type(estimator).__name__} is no classifier and no regressor; "
        "give losses(estimator, X, y)."
    )


def check_validation(X: Any, y: Any, validation: Any) -> None:
    """Raises unless the private records look like the training ones: shapes only.

    Args:
        X: Training inputs.
        y: Training targets.
        validation: What was given as the private records.

    Raises:
        TypeError: It is no pair.
        ValueError: Its parts have different numbers of rows, or other columns than the
            training ones.
    """
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise TypeError(
            "PrivateSearch.fit: validation must be (X, y) of the private records, a "
            f"tuple of 2, got {_kind(validation)}."
        )
    counts = [count(v) for v in validation]
    if counts[0] != counts[1]:
        raise ValueError(
            f"PrivateSearch.fit: validation has {counts[0]} inputs and {counts[1]} "
            "targets."
        )
    for name, public, private in zip("Xy", (X, y), validation, strict=True):
        kinds = _columns(public), _columns(private)
        if None not in kinds and kinds[0] != kinds[1]:
            raise ValueError(
                f"PrivateSearch.fit: {name} of validation must have the columns of the "
                f"training {name}, {kinds[0]}, got {kinds[1]}."
            )


def _kind(value):
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, tuple | list) else name


def count(table: Any) -> int:
    """The number of rows; sparse matrices have no length.

    Args:
        table: An array, a list, a sparse matrix or a data frame.
    """
    return table.shape[0] if hasattr(table, "shape") else len(table)


def _columns(table):
    """What a table's columns are: names or a shape; `None` where nothing is known."""
    names = getattr(table, "columns", None)
    if names is not None:
        return list(names)
    shape = getattr(table, "shape", None)
    return None if shape is None else tuple(shape[1:])


def _sliceable(table):
    """A sparse matrix in a format that has rows; anything else as it is."""
    return table.tocsr() if hasattr(table, "tocsr") else table


def _parts(tables, rows):
    """Rows by position, of data frames as well."""
    return [getattr(table, "iloc", table)[rows] for table in tables]


def _log_loss(fitted, X, y):
    """The log loss of each row; a class that training did not know counts as p = 0."""
    chances = fitted.predict_proba(X)
    hits = _labels(y)[:, None] == np.asarray(fitted.classes_)[None, :]
    return -np.log(np.maximum(np.sum(chances * hits, axis=1), 1e-7))


def _zero_one_loss(fitted, X, y):
    return (_labels(fitted.predict(X)) != _labels(y)).astype(float)


def _labels(y):
    """Labels as they are: in one array one of them could change the type of all."""
    found = np.empty(len(y), object)
    for row, label in enumerate(y if isinstance(y, list | tuple) else np.asarray(y)):
        found[row] = label
    return found


def _square(prediction, y):
    # Row by row: (n,) less (n, 1) would be all pairs of records.
    rows = (count(y), -1)
    errors = np.reshape(prediction, rows) - np.asarray(y, np.float64).reshape(rows)
    return np.mean(errors**2, axis=1)
