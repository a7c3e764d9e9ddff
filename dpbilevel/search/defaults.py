"""Default losses and default solver of a search of estimators."""

import functools
from typing import Any

import numpy as np
import optax
from jaxtyping import Float
from sklearn.base import is_classifier, is_regressor

from ..core.columns import Column, elements, table_of
from ..privacy.budget import PrivacyBudget
from .base import AbstractAskTellSolver
from .gibo import GradientInformativeBO
from .random_search import Portfolio, RandomSearch
from .row_losses import Losses, RowLosses, count, evaluations
from .space import Categorical, Space

_FEW = 3  # coordinates up to which uniform points do as well as descent
_TRIED = 6  # points tried on training rows for each that is chosen
_STARTS = 60  # chosen initial points of a descent
# Without the initial accumulator, AdaGrad's first step is as long for pure noise as for
# a steep slope. One object: another one would compile every search anew.
_RULE = optax.adagrad(0.2, initial_accumulator_value=0.01)


def default_losses(
    estimator: Any, training_targets: Any
) -> tuple[Losses, float | None]:
    """Return the pair of an estimator's default loss function, and bound or `None`.

    The loss is half the Brier score or the 0-1 loss of classifiers, and the squared
    error of regressors in units of the variance of the training targets.
    """
    if is_classifier(estimator):
        if np.ndim(training_targets) != 1:
            raise ValueError(
                "PrivateSearch: y must have shape (n,) here; ravel it or give losses=."
            )
        probabilities = hasattr(estimator, "predict_proba")
        return _brier_loss if probabilities else zero_one_loss, 1.0
    if is_regressor(estimator):
        scale = float(np.var(np.asarray(training_targets, np.float64))) or 1.0
        return lambda fitted, X, y: _square(fitted.predict(X), y) / scale, None
    name = type(estimator).__name__
    raise ValueError(f"PrivateSearch: {name} has no default loss; give losses=.")


def _brier_loss(fitted, X, y):
    """Return half the Brier score of each row, in [0, 1].

    It is proper like the log loss, and bounded: clipping a log loss, which few rows
    dominate, can reverse an order of means.
    """
    probabilities = fitted.predict_proba(X)  # zero for a class without training rows
    matches = _labels(y)[:, None] == np.asarray(fitted.classes_)[None, :]
    unknown = ~np.any(matches, axis=1)
    return np.sum((probabilities - matches) ** 2, axis=1) / 2 + unknown / 2


def zero_one_loss(fitted: Any, X: Any, y: Any) -> Float[np.ndarray, " n"]:
    """Return an array: 1 for rows whose predicted class is wrong, else 0."""
    return (_labels(fitted.predict(X)) != _labels(y)).astype(float)


def _labels(y):
    """Return labels as an array of objects, so that none changes the type of all."""
    return Column.of(y).entries.astype(object)


def _square(prediction, y):
    # Row by row: shapes (n,) and (n, 1) would broadcast to all pairs of records.
    shape = (count(y), -1)
    rows = elements(y)
    table = None if rows is None else table_of(rows)
    targets = Column.of(y) if table is None else Column(table, "objects")
    errors = np.reshape(prediction, shape) - targets.numbers().reshape(shape)
    return np.mean(errors**2, axis=1)


def default_solver(
    space: Space,
    budget: PrivacyBudget,
    rows: RowLosses,
    starts: Float[np.ndarray, "k d"],
    n_jobs: int | None = None,
) -> AbstractAskTellSolver:
    """Return the default solver for a space, and set the unit of the losses in `rows`.

    Unit and likely points besides `starts` follow from training rows, on which `n_jobs`
    processes train.
    """
    size, entries = space.coordinates, space.entries.values()
    flat = any(isinstance(v, Categorical) or v.integer for v in entries)
    flat |= rows.losses is zero_one_loss  # without slopes
    scale = rows.loss_scale(space.middles())
    held_out = evaluations(functools.partial(rows.held_out_loss, worst=scale), n_jobs)

    def likely(number):
        """Return the best `number` of uniform points, judged on training rows alone."""
        # Independent of the key, so that a stopped search can continue.
        points = np.random.default_rng(0).uniform(-1, 1, (_TRIED * number, size))
        losses = np.fromiter(held_out(points), np.float64)
        return points[np.argsort(losses, kind="stable")[:number]]

    if size <= _FEW or flat or budget.delta == 0:
        number = 30 + 10 * size
        if size > _FEW:
            starts = np.concatenate([starts, likely(number // 2)])
        rows.unit = scale
        return RandomSearch(max(number, len(starts)), 1.0, starts=starts)
    starts = np.concatenate([starts, likely(_STARTS)])
    rows.unit = rows.gradient_scale(size)
    return _descent(size, starts, scale / rows.unit)


def _descent(
    size: int, starts: Float[np.ndarray, "k d"], clip_range: float
) -> GradientInformativeBO:
    """Return a `GradientInformativeBO` that starts from a draw among `starts` and more.

    No others are added: more points that are worse make the best one less likely.
    """
    return GradientInformativeBO(
        21,
        1.0,
        step_size=_RULE,
        evaluation_noise=0.02,
        max_batch=2 * size + 16,
        keep=max(128, 4 * size),  # older points add little to the gradient
        polish=0,
        portfolio=Portfolio(21 + len(starts), starts, clip_range=clip_range),
    )
