"""Losses of the rows of a table, each computed from its own row alone."""

import contextlib
import copy
import functools
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from .. import _checks
from ..core.columns import Column
from ..privacy.records.people import PersonRows, PersonUnit, combined
from .loop import Evaluations

_TRIED = 64  # training rows on which losses must not depend on each other
_STEP = 0.3  # of the differences that estimate the slope of a loss
# Clipping at the median would optimize most rows, not the mean.
_GRADIENT_QUANTILE = 0.95
_LOSS_QUANTILE = 0.99
_MASS = 0.5  # fraction of the mean loss that clipping keeps

Losses = Callable[[Any, Any, Any], Float[np.ndarray, " n"]]


class RowLosses:
    """Fits an estimator at a point and evaluates the loss of every row of a table."""

    def __init__(
        self,
        make: Callable[[np.ndarray], Any],  # the unfitted estimator at a point
        X: Any,  # of training rows, as `y`
        y: Any,
        losses: Losses,
        bound: float | None = None,  # on the losses, public
    ):
        self.make, self.losses, self.bound = make, losses, bound
        self.unit = 1.0  # losses are divided by it
        self.quiet = False  # output and warnings about training rows are shown
        self.training = _sliceable(X), _sliceable(y)

    def fit(self, point: Float[np.ndarray, " d"]) -> Any:
        """Return an estimator with a point's parameters, fitted to training rows."""
        table = _rows(self.training, np.arange(count(self.training[-1])))
        with _silence() if self.quiet else contextlib.nullcontext():
            return self.make(point).fit(*table)

    def black_box(
        self, X: Any, y: Any, people: PersonRows | None = None
    ) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from a point to the losses of private rows, or of `people`.

        The function never raises. If the estimator or the losses raise on a row, its
        loss is NaN; if the estimator cannot be fitted, all losses are NaN. Neither
        changes the losses of other rows: every call reads as many rows, each in its
        place, with a fresh copy of the estimator. Privacy: the number of predictions
        depends on the rows, so the time is unprotected.
        """
        private = _sliceable(X), _sliceable(y)
        if people is not None:  # as many rows, in their places, whoever has how many
            private = _rows(private, people.rows.ravel())
        return functools.partial(self._losses_at, private, people)

    def _losses_at(self, private, people, point):
        losses = self._row_losses(private, point)
        if people is None:
            return losses
        unit = PersonUnit(people.present.shape[1])
        return combined(lambda _: losses, people, unit)[:, 0]

    def _row_losses(self, private, point):
        losses = np.full(count(private[-1]), np.nan)
        try:
            fitted = self.fit(point)
        except Exception:  # depends on training rows only
            return losses
        rows = np.arange(len(losses))
        with _silence():  # an output could reveal a row
            values = self._with_copies(fitted, private, rows)
            if values is None:
                rows = self._valid(fitted, private, rows)
                values = self._with_copies(fitted, private, rows) if len(rows) else None
        if values is not None:
            losses[rows] = values[rows]
        return losses

    def check_row_independence(self, point: Float[np.ndarray, " d"]) -> None:
        """Raise `ValueError` if losses of training rows depend on the other rows.

        Other rows are replaced by copies of one row; rows of numbers are also tried
        with missing values, and beside large values.
        """
        table = _rows(self.training, np.arange(count(self.training[-1]))[:_TRIED])
        try:
            fitted = self.fit(point)
            self._losses_of(fitted, *_rows(table, np.arange(count(table[-1]))))
        except Exception as error:
            raise ValueError(
                f"PrivateSearch.fit: in the middle of the space, {self._shown(point)} "
                f"fails on training rows: {str(error).rstrip('.')}. Change the space: "
                "it has integer=True for whole numbers, and when= for conditions."
            ) from error
        X, y = table
        inputs = [X]
        if _is_numeric(X):
            missing, places = np.array(X), np.arange(len(X))
            missing[places, places % missing.shape[1]] = np.nan
            inputs.append(missing)
        with _silence():
            # An estimator may reject missing values, but it accepts the unchanged rows.
            checks = (self._is_independent(fitted, (v, y), v is not X) for v in inputs)
            independent = all(checks)
        if not independent:
            raise ValueError(
                "PrivateSearch: losses of training rows change with the rows beside "
                "them, so one validation record would change the losses of others. "
                "Compute every loss from its own row and the fitted estimator."
            )

    def gradient_scale(self, size: int) -> float:
        """Return the 95 % quantile of training rows' gradient norms; 1 if unknown.

        Gradients are differences in the middle of a space of `size` coordinates. The
        estimator is fitted to every other training row; losses are those of the rest.
        The value is 1, with a warning, if no such quantile can be computed.
        """
        try:
            sides = [
                [self._held_out(s * _STEP * e) for s in (1, -1)] for e in np.eye(size)
            ]
        except Exception as error:  # such as a class that the other half alone has
            return self._unknown(f"fitted to one half: {error}", "gradients")
        slopes = np.asarray([(a - b) / (2 * _STEP) for a, b in sides])
        norms = np.linalg.norm(slopes, axis=0)
        scale = float(np.nanquantile(norms, _GRADIENT_QUANTILE))
        if 1e-6 < scale < 1e6:
            return scale
        return self._unknown(f"most are below {scale:.3g}", "gradients")

    def loss_scale(self, middles: Sequence[np.ndarray]) -> float:
        """Return the bound of the losses if known, else a clip range by training rows.

        The clip range is `clip_range_of` held-out losses in the middle of a branch, the
        median over several branches. It is 1, with a warning, if there is none.
        """
        # Largest losses are those of confident errors: never clip below a bound.
        if self.bound is not None:
            return self.bound
        scales, reason = [], ""
        for middle in middles:
            try:
                scale = clip_range_of(self._held_out(middle))
            except Exception as error:
                reason = f"fitted to one half: {error}"
                continue
            reason = f"most are below {scale:.3g}"
            scales += [scale] * (1e-6 < scale < 1e6)
        if scales:
            return sorted(scales)[(len(scales) - 1) // 2]
        return self._unknown(reason, "losses")

    def held_out_loss(self, point: Float[np.ndarray, " d"], worst: float) -> float:
        """Return the mean loss on half of the training rows, fitted to the other half.

        Losses are limited by `worst`, the loss of rows that have none.
        """
        with _silence():
            try:
                losses = self._held_out(point)
            except Exception:
                return worst
        return float(np.mean(np.clip(np.nan_to_num(losses, nan=worst), 0, worst)))

    def _held_out(self, point):
        everyone = np.arange(count(self.training[-1]))
        fitting, rest = (_rows(self.training, everyone[i::2]) for i in (0, 1))
        return self._losses_of(self.make(point).fit(*fitting), *rest)

    def _shown(self, point):
        try:
            return repr(self.make(point))
        except Exception:  # a parameter that the estimator does not have there
            return "the estimator"

    def _unknown(self, reason, what):
        _checks.warn(
            f"PrivateSearch.fit: training rows give no scale of {what} in the middle "
            f"of the space ({reason}); {what} are clipped at 1. Give solver=."
        )
        return 1.0

    def _is_independent(self, fitted, table, may_fail):
        """Return whether rows keep their losses if other rows change."""
        X, y = table
        everyone = np.arange(count(y))
        losses = self._with_copies(fitted, table, everyone)
        if losses is None:
            return may_fail
        for rows in (everyone[::2], everyone[1::2], everyone[:1]):
            if len(rows):
                others = self._with_copies(fitted, table, rows)
                if others is None or not _close(losses, others, rows):
                    return False
        if not _is_numeric(X):
            return True
        large = X.copy()
        large[1::2] *= 1e6
        others = self._with_copies(fitted, (large, y), everyone)
        return others is None or _close(losses, others, everyone[::2])

    def _valid(self, fitted, table, rows):
        """Return the indices among `rows` on which no loss raises, by bisection."""
        if self._with_copies(fitted, table, rows) is not None:
            return rows
        half = len(rows) // 2
        if half == 0:
            return rows[:0]
        parts = [self._valid(fitted, table, v) for v in (rows[:half], rows[half:])]
        return np.concatenate(parts)

    def _with_copies(self, fitted, table, rows):
        """Return losses with copies of `rows[0]` in all other places; `None` on errors.

        Rounding depends on the number of rows and their places, which stay the same.
        """
        everyone = np.arange(count(table[-1]))
        places = np.where(np.isin(everyone, rows), everyone, rows[0])
        try:
            return self._losses_of(fitted, *_rows(table, places))
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException:  # such as a panic of compiled code
            return None

    def _losses_of(self, fitted, X, y):
        # A copy: an earlier call must not change a later one.
        column = Column.of(self.losses(copy.deepcopy(fitted), X, y))
        if column.kind == "texts":
            raise TypeError("PrivateSearch: losses must return numbers, got texts.")
        losses = column.numbers()
        if losses.shape != (count(y),):
            raise ValueError(
                f"PrivateSearch: losses must return one number for each of {count(y)} "
                f"rows, got shape {losses.shape}."
            )
        return losses / self.unit


def evaluations(losses: Callable[[np.ndarray], Any], n_jobs: int | None) -> Evaluations:
    """Return a function from points to an iterator of losses, by `n_jobs` processes.

    By `n_jobs` processes, -1 for all cores, each with one thread, so that no bit
    depends on the number; `None` evaluates in this one. They are no threads, because
    `_silence` acts on a process.
    """
    if n_jobs is None:
        return lambda points: map(losses, points)

    def evaluate(points):
        # joblib passes large records in files: keep them in a folder that others
        # cannot enter.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            # `loky` even within a caller's `joblib.parallel_config`.
            run: Any = Parallel(
                n_jobs=n_jobs, return_as="generator", temp_folder=folder, backend="loky"
            )
            yield from run(delayed(_by_one_thread)(losses, v) for v in points)

    return evaluate


def _by_one_thread(losses, point):
    with threadpool_limits(1):
        return losses(point)


def check_validation(X: Any, y: Any, validation: Any) -> None:
    """Raise an error if validation has other columns than training, or unequal rows."""
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        what = f"(X, y) or (X, y, groups), got {_checks.shown(validation)}"
        raise TypeError(f"PrivateSearch.fit: validation must be {what}.")
    counts = [count(v) for v in validation]
    if counts[0] != counts[1]:
        raise ValueError(f"PrivateSearch.fit: validation X, y have {counts} rows.")
    for name, public, private in zip("Xy", (X, y), validation, strict=True):
        columns = _columns(public), _columns(private)
        if None not in columns and columns[0] != columns[1]:
            raise ValueError(
                f"PrivateSearch.fit: {name} of validation must have the columns of the "
                f"training {name}, {columns[0]}, got {columns[1]}."
            )


def clip_range_of(losses: Float[np.ndarray, " n"]) -> float:
    """Return a clip range for losses; 0 if all losses are 0 or not finite.

    The clip range is the 99 % quantile, or more if clipping there would remove over
    half of the mean: if nearly all losses are zero, the others matter.
    """
    finite = np.sort(np.maximum(losses[np.isfinite(losses)], 0))
    if not len(finite):
        return 0.0
    quantile = np.quantile(finite, _LOSS_QUANTILE, method="higher")
    sums, above = np.cumsum(finite), np.arange(len(finite))[::-1]
    clipped = sums + above * finite  # the sum of all losses, clipped at each of them
    return float(max(quantile, finite[np.argmax(clipped >= _MASS * sums[-1])]))


def count(table: Any) -> int:
    """Return the number of rows of a table."""
    return table.shape[0] if hasattr(table, "shape") else len(table)


def _columns(table):
    """Return the names or the shape of a table's columns; `None` if unknown."""
    if hasattr(table, "columns"):
        return list(table.columns)
    return tuple(table.shape[1:]) if hasattr(table, "shape") else None


def _is_numeric(X):
    numeric = isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind == "f"
    return numeric and len(X) > 1


def _sliceable(table):
    """Return a sparse matrix in a format that has rows, any other table as it is."""
    return table.tocsr() if hasattr(table, "tocsr") else table


def _close(losses, others, rows):
    """Return whether two arrays of losses agree on `rows`, up to rounding."""
    close = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
    return np.allclose(losses[rows], others[rows], **close)


def _rows(tables, rows):
    """Return a list with a copy of each table's rows, safe to change in place."""
    return [
        [table[row] for row in rows]
        if isinstance(table, list | tuple)
        else getattr(table, "iloc", table)[rows]
        for table in tables
    ]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Enter a context without warnings and without the output of Python."""
    nowhere = io.StringIO()
    with (
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        yield
