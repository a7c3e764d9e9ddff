"""Private hyperparameter search of scikit-learn estimators."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

try:
    import joblib
    from sklearn.base import (
        BaseEstimator,
        MetaEstimatorMixin,
        clone,
        is_classifier,
        is_regressor,
    )
except ImportError:
    raise ImportError(
        "dpbilevel.PrivateSearch needs scikit-learn: pip install 'dpbilevel[cli]'"
    ) from None

from . import _checks
from .noise import PRNGKey, check_key
from .privacy.budget import PrivacyBudget
from .problems.black_box import BlackBox
from .searching import search
from .sets import Box
from .solvers.asking import AbstractAskingSolver
from .solvers.gibo import GradientInformativeBO

_PROBED = 64  # training rows on which losses must not depend on each other


@dataclasses.dataclass(frozen=True)
class Range:
    """The values a parameter may take: an interval, public and fixed in advance.

    Args:
        low: The smallest value.
        high: The largest one.
        log: Whether the search moves in the value's logarithm.
        size: The length of a vector parameter, searched coordinate by coordinate;
            `None` for a number.

    Raises:
        ValueError: The ends are not finite and increasing, or not positive with `log`.
    """

    low: float
    high: float
    log: bool = False
    size: int | None = None

    def __post_init__(self):
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not (finite and self.low < self.high):
            raise ValueError(
                f"Range: low and high must be finite and increasing, got {self.low!r} "
                f"and {self.high!r}."
            )
        if self.log and self.low <= 0:
            raise ValueError(f"Range: log=True needs low above 0, got {self.low!r}.")
        if self.size is not None:
            _checks.count("Range", size=self.size)

    @property
    def coordinates(self) -> int:
        """How many coordinates of the search it takes."""
        return 1 if self.size is None else self.size

    def value(self, position: Float[np.ndarray, " c"]) -> float | np.ndarray:
        """The parameter at coordinates in [-1, 1].

        Args:
            position: Its coordinates.
        """
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        inner = low + (np.asarray(position, np.float64) + 1) / 2 * (high - low)
        found = np.clip(np.exp(inner) if self.log else inner, self.low, self.high)
        return float(found[0]) if self.size is None else found


class PrivateSearch(MetaEstimatorMixin, BaseEstimator):
    r"""Tunes an estimator on validation records, and hands out a private answer.

    Every evaluation clones the estimator, sets the parameters, fits it to the training
    records and takes each validation record's loss. Only what the solver releases
    leaves: the parameters it passed through.

    Args:
        estimator: A scikit-learn estimator.
        space: A `Range` per parameter, named as in `set_params`
            (`"svr__C": Range(0.1, 10, log=True)`). Continuous parameters only.
        budget: The guarantee for the validation records.
        solver: What searches: `GradientInformativeBO`, `RandomSearch`,
            `RepeatAndSelect` or `NoisyUCB`; its noise is replaced. It moves in
            $[-1, 1]^d$, the space scaled coordinate by coordinate, from its middle. By
            default `GradientInformativeBO` with AdaGrad, 20 steps, for losses of order
            one.
        losses: `losses(estimator, X, y)`, the loss of every row, shape `(n,)`, each
            from its own row alone. By default log loss for classifiers with
            `predict_proba`, else 0-1 loss; for regressors the squared error in units
            of the training targets' variance.

    Attributes:
        best_params_: The released parameters.
        best_estimator_: The estimator fitted to the training records with them.
        report_: The `PrivacyReport`.
        trajectory_: Released points in $[-1, 1]^d$, one a step, where the solver
            releases them.

    Privacy:
        The unit is one validation record, $n$ is public, and the relation is the
        solver's. The training records are NOT protected: parameters, and the fitted
        estimator above all, are functions of them. Nor are they when the estimator
        trains privately, unless that training is accounted for apart, once for every
        evaluation, once to try the losses and once for `best_estimator_`. No validation
        loss is shown, logged or kept; a score of the answer on the same records is
        another release. A record that makes the estimator or the losses raise has the
        loss NaN and stops nothing; their warnings about validation records are silent.
        Records must be read without each other: where a stray text in a column has made
        texts of all its numbers, one record has moved every other.
    """

    def __init__(
        self,
        estimator: Any,
        space: dict[str, Range],
        budget: PrivacyBudget,
        *,
        solver: AbstractAskingSolver | None = None,
        losses: Callable[[Any, Any, Any], Float[np.ndarray, " n"]] | None = None,
    ):
        self.estimator = estimator
        self.space = space
        self.budget = budget
        self.solver = solver
        self.losses = losses

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        validation: tuple[Any, Any],
        key: PRNGKey,
        folder: Any = None,
        progress: bool = False,
    ) -> "PrivateSearch":
        """Searches, then fits the estimator to the training records.

        Args:
            X: Training inputs, not protected.
            y: Training targets, not protected.
            validation: `(X, y)` of the private records.
            key: One typed key.
            folder: Where evaluations are kept, so that a stopped search goes on with
                the same validation records in the same order; it holds losses and is
                secret until the search is done.
            progress: Whether to show a progress bar.

        Returns:
            The fitted search.

        Raises:
            TypeError: The space, the budget or the key is of another kind.
            ValueError: An unknown parameter, rows of different numbers or columns, or
                losses that depend on each other's rows, as tried on training records.
        """
        check_key(key)
        self._check()
        inputs, targets = validation
        if len(inputs) != len(targets):
            raise ValueError(
                f"PrivateSearch.fit: validation has {len(inputs)} inputs and "
                f"{len(targets)} targets."
            )
        _check_alike("inputs", X, inputs)
        _check_alike("targets", y, targets)
        evaluated = _Losses(self, X, y, inputs, targets)
        evaluated.check_rows_apart()
        size = sum(entry.coordinates for entry in self.space.values())
        # Losses of rows in another order, as by a new split, must not join old ones.
        records = "" if folder is None else joblib.hash((inputs, targets))
        problem = BlackBox(evaluated, len(targets), Box(-1.0, 1.0), records)
        solver = _default() if self.solver is None else self.solver
        result = search(
            problem,
            solver,
            jnp.zeros(size),
            key=key,
            budget=self.budget,
            folder=folder,
            progress=progress,
            trajectory=True,
        )
        self.best_params_ = self.parameters(result.value)
        self.trajectory_ = result.trajectory
        self.report_ = result.report
        self.best_estimator_ = evaluated.fitted(result.value)
        return self

    def parameters(self, point: Float[np.ndarray, " d"]) -> dict[str, Any]:
        """The parameters at a point of the search.

        Args:
            point: Coordinates in [-1, 1], in the order of the space.
        """
        found, begin = {}, 0
        for name, entry in self.space.items():
            end = begin + entry.coordinates
            found[name] = entry.value(np.asarray(point)[begin:end])
            begin = end
        return found

    def predict(self, X: Any) -> Any:
        """The prediction of `best_estimator_`.

        Args:
            X: Inputs.
        """
        return self.best_estimator_.predict(X)

    def score(self, X: Any, y: Any) -> float:
        """The estimator's own score of `best_estimator_` on other records.

        Args:
            X: Inputs; those of the private records would be a release nobody counted.
            y: Targets.
        """
        return self.best_estimator_.score(X, y)

    def _check(self) -> None:
        _checks.instance("PrivateSearch", PrivacyBudget, budget=self.budget)
        _checks.instance("PrivateSearch", dict, space=self.space)
        if not self.space:
            raise ValueError("PrivateSearch: space names no parameter.")
        known = self.estimator.get_params()
        for name, entry in self.space.items():
            _checks.instance("PrivateSearch", Range, **{f"space[{name!r}]": entry})
            if name not in known:
                raise ValueError(
                    f"PrivateSearch: {type(self.estimator).__name__} has no parameter "
                    f"{name!r}; it has {sorted(known)}."
                )


class _Losses:
    """The black box: trains at a point and tells the private records' losses."""

    def __init__(self, owner: PrivateSearch, X, y, inputs, targets):
        self.owner, self.training = owner, (X, y)
        self.losses = owner.losses or _default_losses(owner.estimator, y)
        self.inputs, self.targets = inputs, targets

    def __call__(self, point):
        fitted = self.fitted(point)
        # An error or a warning about a record would tell something about it.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return self._readable(fitted, self.inputs, self.targets)

    def fitted(self, point):
        estimator = clone(self.owner.estimator)
        estimator.set_params(**self.owner.parameters(point))
        return estimator.fit(*self.training)

    def check_rows_apart(self):
        """Raises where a row's loss depends on the rows beside it: on public rows."""
        X, y = (v[:_PROBED] for v in self.training)
        fitted = self.fitted(np.zeros(sum(r.coordinates for r in self._ranges())))
        half = len(y) // 2
        apart = self._rows(fitted, X[:half], y[:half])
        together = self._rows(fitted, X, y)[:half]
        if not np.allclose(apart, together, rtol=1e-5, atol=1e-8, equal_nan=True):
            raise ValueError(
                "PrivateSearch: losses of training rows change with the rows beside "
                "them, so one validation record would move the losses of others. "
                "Every row's loss must come from that row and the fitted estimator "
                "alone: no scaling, ranking or mean over the rows given."
            )

    def _ranges(self):
        return self.owner.space.values()

    def _readable(self, fitted, X, y):
        """The losses; rows are halved until those that raise are alone, with NaN."""
        try:
            return self._rows(fitted, X, y)
        except Exception:
            if len(y) == 1:
                return np.full(1, np.nan)
        half = len(y) // 2
        parts = (X[:half], y[:half]), (X[half:], y[half:])
        return np.concatenate([self._readable(fitted, *part) for part in parts])

    def _rows(self, estimator, X, y):
        found = np.asarray(self.losses(estimator, X, y), np.float64)
        if found.shape != (len(y),):
            raise ValueError(
                "PrivateSearch: losses must return one number for each of the "
                f"{len(y)} rows, got shape {found.shape}."
            )
        return found


def _default_losses(estimator, training_targets):
    if is_classifier(estimator):
        if hasattr(estimator, "predict_proba"):
            return _log_loss
        return _zero_one_loss
    if is_regressor(estimator):
        scale = float(np.var(np.asarray(training_targets, np.float64))) or 1.0
        return lambda fitted, X, y: _square(fitted.predict(X), y) / scale
    raise ValueError(
        f"PrivateSearch: {type(estimator).__name__} is no classifier and no regressor; "
        "give losses(estimator, X, y)."
    )


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
    rows = (len(y), -1)
    errors = np.reshape(prediction, rows) - np.asarray(y, np.float64).reshape(rows)
    return np.mean(errors**2, axis=1)


def _check_alike(name, training, validation):
    """Refuses arrays of other columns, which would make a failure of every row."""
    shapes = [v.shape for v in (validation, training) if hasattr(v, "shape")]
    if len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(
            f"PrivateSearch.fit: validation {name} have shape {shapes[0]}, but the "
            f"training ones {shapes[1]}; give both the same columns."
        )


def _default():
    # AdaGrad's first step would be as long for pure noise as for a steep slope, but for
    # its initial accumulator.
    rule = optax.adagrad(0.2, initial_accumulator_value=0.01)
    return GradientInformativeBO(20, 1.0, optimizer=rule, evaluation_noise=0.02)
