"""Private hyperparameter search of scikit-learn estimators."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

try:
    from sklearn.base import (
        BaseEstimator,
        MetaEstimatorMixin,
        clone,
        is_classifier,
        is_regressor,
    )
    from sklearn.utils.validation import check_is_fitted
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
        ends = (self.low, self.high)
        finite = all(_checks.concrete(v) and math.isfinite(v) for v in ends)
        if not (finite and self.low < self.high):
            raise ValueError(
                "Range: low and high must be finite and increasing numbers, got "
                f"{self.low!r} and {self.high!r}."
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

        training_mu: Declared, for an estimator that trains privately: one `fit` is
            `training_mu`-GDP towards the training records at any point of the space.
            The report then says what all fits together are, that of `best_estimator_`
            included.

    Attributes:
        best_params_: The released parameters.
        best_estimator_: The estimator fitted to the training records with them.
        report_: The `PrivacyReport`.
        trajectory_: Released points in $[-1, 1]^d$, one a step, where the solver
            releases them.

    Privacy:
        The unit is one validation record, $n$ is public, and the relation is the
        solver's. The training records are NOT protected: parameters, and the fitted
        estimator above all, are functions of them. Where the estimator trains
        privately, `training_mu` declares it. No validation loss is shown, logged
        or kept; a score of the answer on the same records is another release.
    """

    def __init__(
        self,
        estimator: Any,
        space: dict[str, Range],
        budget: PrivacyBudget,
        *,
        solver: AbstractAskingSolver | None = None,
        losses: Callable[[Any, Any, Any], Float[np.ndarray, " n"]] | None = None,
        training_mu: float | None = None,
    ):
        self.estimator = estimator
        self.space = space
        self.budget = budget
        self.solver = solver
        self.losses = losses
        self.training_mu = training_mu

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

        Where the estimator refuses a validation row, that row counts for nothing, and
        where it cannot be fitted at some parameters, all rows do.

        Args:
            X: Training inputs, not protected: an array, a sparse matrix or a data
                frame.
            y: Training targets, not protected.
            validation: `(X, y)` of the private records, of the kinds and columns of
                the training ones.
            key: One typed key.
            folder: Where evaluations are kept, so that a stopped search goes on; it
                holds losses and is secret until the search is done.
            progress: Whether to show a progress bar.

        Returns:
            The fitted search.

        Raises:
            TypeError: The estimator, the space, the budget, the losses or the key is of
                another kind.
            ValueError: An unknown parameter, rows of different numbers or columns, or
                losses that depend on each other's rows, as tried on training records.
        """
        check_key(key)
        self._check()
        _check_validation(X, y, validation)
        evaluated = _Losses(self, X, y, *validation)
        evaluated.check_rows_apart()
        size = sum(entry.coordinates for entry in self.space.values())
        problem = BlackBox(
            evaluated,
            evaluated.size,
            Box(-1.0, 1.0),
            training_mu=self.training_mu,
            trainings_after=2,  # the trial of rows, and `best_estimator_`
        )
        solver = _default(size) if self.solver is None else self.solver
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

        Raises:
            NotFittedError: There was no `fit` yet.
        """
        check_is_fitted(self)
        return self.best_estimator_.predict(X)

    def score(self, X: Any, y: Any) -> float:
        """The estimator's own score of `best_estimator_` on other records.

        Args:
            X: Inputs; those of the private records would be a release nobody counted.
            y: Targets.

        Raises:
            NotFittedError: There was no `fit` yet.
        """
        check_is_fitted(self)
        return self.best_estimator_.score(X, y)

    def _check(self) -> None:
        _checks.instance("PrivateSearch", PrivacyBudget, budget=self.budget)
        _checks.instance("PrivateSearch", dict, space=self.space)
        if not self.space:
            raise ValueError("PrivateSearch: space names no parameter.")
        if isinstance(self.estimator, type) or not hasattr(
            self.estimator, "get_params"
        ):
            raise TypeError(
                "PrivateSearch: estimator must be a scikit-learn estimator such as "
                f"Ridge(), an instance, got {self.estimator!r}."
            )
        if self.losses is not None and not callable(self.losses):
            raise TypeError(
                "PrivateSearch: losses must be a function of (estimator, X, y) that "
                f"returns every row's loss, got {self.losses!r}."
            )
        known = self.estimator.get_params()
        for name, entry in self.space.items():
            if not isinstance(entry, Range):
                raise TypeError(
                    f"PrivateSearch: space[{name!r}] must be a Range, such as "
                    "Range(0.1, 10, log=True), got an instance of "
                    f"{type(entry).__name__}. Lists of candidates are not searched."
                )
            if name not in known:
                raise ValueError(
                    f"PrivateSearch: {type(self.estimator).__name__} has no parameter "
                    f"{name!r}; it has {sorted(known)}."
                )


class _Losses:
    """The black box: trains at a point and tells the private records' losses."""

    def __init__(self, owner: PrivateSearch, X, y, inputs, targets):
        self.owner, self.training = owner, (_sliceable(X), y)
        self.losses = owner.losses or _default_losses(owner.estimator, y)
        self.size, self.usable = _count(inputs), _finite_rows(inputs)
        self.inputs = _sliceable(_without(inputs, self.usable))
        self.targets = targets

    def __call__(self, point):
        try:
            fitted = self.fitted(point)
        except Exception:  # of the training records, whatever the private ones are
            return np.full(self.size, np.nan)
        # A warning would tell something about a value.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self._apart(fitted, self.inputs, self.targets)
        # What cannot be read counts for nothing, and says so to nobody.
        return np.where(self.usable, found, np.nan)

    def fitted(self, point):
        estimator = clone(self.owner.estimator)
        estimator.set_params(**self.owner.parameters(point))
        return estimator.fit(*self.training)

    def check_rows_apart(self):
        """Raises where a row's loss depends on the rows beside it: on public rows."""
        X, y = (_part(v, slice(_PROBED)) for v in self.training)
        fitted = self.fitted(np.zeros(sum(r.coordinates for r in self._ranges())))
        half = len(y) // 2
        apart = self._rows(fitted, *(_part(v, slice(half)) for v in (X, y)))
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

    def _apart(self, estimator, X, y):
        """The losses of rows; NaN for those that the estimator refuses.

        An exception would tell something about a record, and the others go on.
        """
        try:
            return self._rows(estimator, X, y)
        except Exception:
            if len(y) == 1:
                return np.full(1, np.nan)
        half = len(y) // 2
        parts = [
            [_part(v, s) for v in (X, y)] for s in (slice(half), slice(half, None))
        ]
        return np.concatenate([self._apart(estimator, *part) for part in parts])

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
        if np.ndim(training_targets) != 1:
            raise ValueError(
                "PrivateSearch: the default losses of a classifier need one label per "
                f"row, got y of shape {np.shape(training_targets)}. Ravel a column, or "
                "give losses(estimator, X, y)."
            )
        if hasattr(estimator, "predict_proba"):
            return _log_loss
        return lambda fitted, X, y: (fitted.predict(X) != np.asarray(y)).astype(float)
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
    hits = np.asarray(y)[:, None] == np.asarray(fitted.classes_)[None, :]
    return -np.log(np.maximum(np.sum(chances * hits, axis=1), 1e-7))


def _square(prediction, y):
    errors = (np.asarray(prediction) - np.asarray(y, np.float64)) ** 2
    return errors.reshape(len(errors), -1).mean(1)


def _check_validation(X, y, validation):
    """Raises unless the private records look like the training ones: shapes only."""
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise TypeError(
            "PrivateSearch.fit: validation must be (X, y) of the private records, got "
            f"{type(validation).__name__}"
            + (
                f" of {len(validation)}."
                if isinstance(validation, tuple | list)
                else "."
            )
        )
    counts = [_count(v) for v in validation]
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


def _columns(table):
    """What a table's columns are: names or a shape; `None` where nothing is known."""
    names = getattr(table, "columns", None)
    if names is not None:
        return list(names)
    shape = getattr(table, "shape", None)
    return None if shape is None else tuple(shape[1:])


def _count(table):
    """The number of rows; sparse matrices have no length."""
    return table.shape[0] if hasattr(table, "shape") else len(table)


def _sliceable(table):
    """A sparse matrix in a format that has rows; anything else as it is."""
    return table.tocsr() if hasattr(table, "tocsr") else table


def _part(table, rows):
    """Rows by position, of a data frame as well."""
    return getattr(table, "iloc", table)[rows]


def _finite_rows(inputs):
    """Which rows of a numeric array hold finite numbers alone; all rows of others."""
    dense = isinstance(inputs, np.ndarray | jax.Array)
    if not (dense and np.issubdtype(inputs.dtype, np.number)):
        return np.ones(_count(inputs), bool)
    return np.isfinite(inputs).reshape(len(inputs), -1).all(1)


def _without(inputs, usable):
    """The inputs with zeros in place of rows that are not usable."""
    if usable.all():
        return inputs
    mask = usable.reshape(-1, *[1] * (np.ndim(inputs) - 1))
    return np.where(mask, inputs, np.zeros((), inputs.dtype))


def _default(size):
    # AdaGrad's first step would be as long for pure noise as for a steep slope, but for
    # its initial accumulator.
    rule = optax.adagrad(0.2, initial_accumulator_value=0.01)
    return GradientInformativeBO(
        20, 1.0, optimizer=rule, evaluation_noise=0.02, max_batch=2 * size + 16
    )
