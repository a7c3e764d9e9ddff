"""Losses of an estimator's validation rows, each from its own row alone."""

import contextlib
import copy
import functools
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..core.columns import Column
from .refusals import Refusals

_PROBED = 64  # training rows on which losses must not depend on each other
_STEP = 0.3  # of the differences that tell the slope of a loss
# Clipping at the median would ask what is better for most rows, not on average.
_USUAL = 0.95
_MOST = 0.99  # of losses that are not cut off
_MASS = 0.5  # of the mean loss that is not

Losses = Callable[[Any, Any, Any], Float[np.ndarray, " n"]]


class RowLosses:
    """Trains an estimator at a point and evaluates the loss of every row of others.

    Args:
        make: The estimator with the parameters at a point, not fitted.
        X: Training inputs.
        y: Training targets.
        losses: `losses(estimator, X, y)`, the loss of every row.
        middle: The middle of the branch of a point: estimators of one branch refuse the
            same numbers.
        largest: What no loss is above, where that is known.
    """

    def __init__(
        self,
        make: Callable[[np.ndarray], Any],
        X: Any,
        y: Any,
        losses: Losses,
        middle: Callable[[np.ndarray], np.ndarray] = np.zeros_like,
        largest: float | None = None,
    ):
        self.make, self.losses, self.middle = make, losses, middle
        self.largest = largest
        self.unit = 1.0  # what losses are divided by
        self.training = _sliceable(X), _sliceable(y)
        self._refusals: dict[bytes, Refusals] = {}
        self._tries = False  # numbers that are refused, on training rows
        self.quiet = False  # whether nothing is printed of training rows either

    def fit(self, point: Float[np.ndarray, " d"]) -> Any:
        """The estimator fitted to the training rows."""
        table = _parts(self.training, _all(self.training))
        with _silence() if self.quiet else contextlib.nullcontext():
            return self.make(point).fit(*table)

    def black_box(self, X: Any, y: Any) -> Callable[[np.ndarray], np.ndarray]:
        """The losses of private rows as a function of the point, which never raises.

        A row that the estimator or the losses refuse has the loss NaN, and where the
        estimator cannot be fitted all have. Neither changes what others are computed
        with: always as many rows, each in its place, by an estimator that saw none yet.
        Nor do rows with numbers that are refused change how often there is a
        prediction, once `check_row_independence` has tried them.
        """
        private, judged = (_sliceable(X), _sliceable(y)), {}
        return functools.partial(self._losses_at, private, judged)

    def _losses_at(self, private, judged, point):
        """The losses of private rows; `judged` keeps which are judged in a branch."""
        middle = self.middle(point)
        try:
            fitted = self.fit(point)
        except Exception:  # of the training rows, whatever the private ones are
            return np.full(count(private[-1]), np.nan)
        # What is said about a row would tell something about it.
        with _silence():
            branch = middle.tobytes()
            if branch not in judged:
                refused = self._refused(middle).rows(private)
                judged[branch] = np.setdiff1d(_all(private), refused)
            return self._judge(fitted, private, judged[branch])

    def _refused(self, middle):
        """The numbers that are refused in a branch, by its middle."""
        branch = middle.tobytes()
        if branch not in self._refusals:
            self._refusals[branch] = Refusals.untried()
            if self._tries:
                with contextlib.suppress(Exception):  # cannot be fitted there
                    self._try_numbers(middle, self.fit(middle))
        return self._refusals[branch]

    def check_row_independence(self, point: Float[np.ndarray, " d"]) -> None:
        """Raises where a row's loss depends on the rows beside it: on training rows.

        Each is judged beside others and beside copies of one; where they are numbers,
        also with holes, and beside large ones. Then finds out what numbers are refused.

        Raises:
            ValueError: It does, or the estimator or the losses fail there.
        """
        everyone = _all(self.training)[:_PROBED]
        table = _parts(self.training, everyone)
        try:
            fitted = self.fit(point)
            losses = self._losses_of(fitted, *_parts(table, everyone))
        except Exception as error:
            raise ValueError(
                f"PrivateSearch.fit: in the middle of the space, {self._shown(point)} "
                f"fails on training rows: {str(error).rstrip('.')}. Where a parameter "
                "is a whole number, give Range(..., integer=True), and where one has "
                "a meaning with some categories only, when={...}."
            ) from error
        with _silence():
            same = all(
                _equal(losses, self._beside(fitted, table, kept), kept)
                for kept in (everyone[::2], everyone[1::2], everyone[:1])
            ) and all(self._same_beside(fitted, *table))
        if not same:
            raise ValueError(
                "PrivateSearch: losses of training rows change with the rows beside "
                "them, so one validation record would move the losses of others. "
                "Every row's loss must come from that row and the fitted estimator "
                "alone: no scaling, ranking or mean over the rows given, and no random "
                "numbers that rows share."
            )
        self._tries = True
        with _silence():
            self._try_numbers(self.middle(point), fitted)

    def _shown(self, point):
        try:
            return repr(self.make(point))
        except Exception:  # a parameter that the estimator does not have there
            return "the estimator"

    def _try_numbers(self, middle, fitted):
        """Finds out what numbers are refused in a branch, on training rows."""
        everyone = _all(self.training)[:_PROBED]
        table = _parts(self.training, everyone)
        self._refusals[middle.tobytes()] = Refusals.tried(
            lambda n: _parts(table, np.resize(everyone, max(n, len(everyone)))),
            lambda tables: self._try(fitted, *tables) is not None,
        )

    def usual_slope(self, size: int) -> float:
        """What the gradient of a training row's loss is shorter than, 95 in 100.

        In the middle of a space of `size` parameters, by differences, with the
        estimator fitted to every other training row and losses of the rest; 1 where
        there is nothing to estimate it from.
        """
        everyone = _all(self.training)

        def at(point):
            known, held = (_parts(self.training, everyone[i::2]) for i in (0, 1))
            return self._losses_of(self.make(point).fit(*known), *held)

        try:
            sides = [[at(s * _STEP * e) for s in (1, -1)] for e in np.eye(size)]
        except Exception as error:  # such as a class that only the other half has
            return self._unknown(f"fitted to one half: {error}", "steep", "gradients")
        slopes = np.asarray([(a - b) / (2 * _STEP) for a, b in sides])
        found = float(np.nanquantile(np.linalg.norm(slopes, axis=0), _USUAL))
        if 1e-6 < found < 1e6:
            return found
        return self._unknown(
            f"most have slopes below {found:.3g}", "steep", "gradients"
        )

    def usual_loss(self, middles: Sequence[np.ndarray]) -> float:
        """The known bound of the loss, or the 99 % quantile of training rows' losses.

        Of losses with a bound nothing is cut off: the few largest ones are those of
        wrong predictions that are sure, and without them such models seem good.
        More where less than half of the mean loss is below that: where nearly all rows
        have no loss, the few others are what counts. In the middle of a branch, with
        the estimator fitted to every other training row and losses of the rest; of
        several branches the median, and 1 where there is none.

        Args:
            middles: The middles of the branches.
        """
        if self.largest is not None:
            return self.largest
        everyone = _all(self.training)
        known, held = (_parts(self.training, everyone[i::2]) for i in (0, 1))
        found, why = [], ""
        for middle in middles:
            try:
                fitted = self.make(middle).fit(*known)
                losses = self._losses_of(fitted, *held)
            except Exception as error:
                why = f"fitted to one half: {error}"
                continue
            usual = _cut(losses)
            why = f"most are below {usual:.3g}"
            found += [usual] * (1e-6 < usual < 1e6)
        if found:
            return sorted(found)[(len(found) - 1) // 2]
        return self._unknown(why, "large", "losses")

    def held_out(self, point: Float[np.ndarray, " d"], most: float) -> float:
        """The mean loss of every other training row, fitted to the rest.

        Args:
            point: Where.
            most: Losses count as this where they are above, or where there is none.
        """
        everyone = _all(self.training)
        known, held = (_parts(self.training, everyone[i::2]) for i in (0, 1))
        with _silence():
            try:
                losses = self._losses_of(self.make(point).fit(*known), *held)
            except Exception:
                return most
        return float(np.mean(np.clip(np.nan_to_num(losses, nan=most), 0, most)))

    def _unknown(self, why, how, what):
        warnings.warn(
            f"PrivateSearch.fit: it is not known from training rows how {how} losses "
            f"are in the middle of the space ({why}); {what} are clipped at 1. Give "
            "solver=, or a space around the values that are likely.",
            stacklevel=5,
        )
        return 1.0

    def _same_beside(self, fitted, X, y):
        """Whether every other row keeps its loss beside holes and large values."""
        numbers = isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind == "f"
        if not numbers or len(X) < 2:
            return
        everyone, evens = np.arange(len(X)), np.arange(0, len(X), 2)
        holed = X.copy()
        holed[everyone, everyone % X.shape[1]] = np.nan
        for own in (X, holed):
            large = own.copy()
            large[1::2] *= 1e6
            losses = self._beside(fitted, (own, y), everyone)
            if losses is None:  # no row can be judged with a hole
                continue
            yield _equal(losses, self._beside(fitted, (own, y), evens), evens)
            beside = self._beside(fitted, (large, y), everyone)
            # Rows that are refused stand for nothing here.
            yield beside is None or _equal(losses, beside, evens)

    def _judge(self, fitted, private, judged):
        """The losses, with NaN for rows that raise or are not judged."""

        def refused(kept):
            if self._beside(fitted, private, kept) is not None:
                return []
            half = len(kept) // 2
            return refused(kept[:half]) + refused(kept[half:]) if half else [kept[0]]

        everyone = _all(private)
        found = self._beside(fitted, private, judged if len(judged) else everyone)
        if found is None and len(judged):
            judged = np.setdiff1d(judged, refused(judged))
            found = self._beside(fitted, private, judged) if len(judged) else None
        losses = np.full(len(everyone), np.nan)
        if found is not None:
            losses[judged] = found[judged]
        return losses

    def _beside(self, fitted, table, kept):
        """The losses with all other rows replaced by the first that is kept.

        Neither the place of a row nor the number of rows, with which rounding changes,
        depends on which are kept.
        """
        everyone = _all(table)
        rows = np.where(np.isin(everyone, kept), everyone, kept[0])
        return self._try(fitted, *_parts(table, rows))

    def _try(self, fitted, X, y):
        """The losses, or `None` where some row raises."""
        try:
            return self._losses_of(fitted, X, y)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException:  # such as a panic of compiled code
            return None

    def _losses_of(self, fitted, X, y):
        # By an estimator that no earlier call can have changed.
        column = Column.of(self.losses(copy.deepcopy(fitted), X, y))
        if column.kind == "texts":
            raise TypeError("PrivateSearch: losses must return numbers, got texts.")
        found = column.numbers()
        if found.shape != (count(y),):
            raise ValueError(
                "PrivateSearch: losses must return one number for each of the "
                f"{count(y)} rows, got shape {found.shape}."
            )
        return found / self.unit


def check_validation(X: Any, y: Any, validation: Any) -> None:
    """Raises unless the private records look like the training ones: shapes only.

    Raises:
        TypeError: `validation` is no pair.
        ValueError: Its parts have different numbers of rows, or other columns than the
            training ones.
    """
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        many = f" of {len(validation)}" if isinstance(validation, tuple | list) else ""
        raise TypeError(
            "PrivateSearch.fit: validation must be (X, y) of the private records, a "
            f"tuple of 2, got {type(validation).__name__}{many}."
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


def _cut(losses: Float[np.ndarray, " n"]) -> float:
    """A loss that most are below, and that half of the mean is below; 0 if all are."""
    finite = np.sort(np.maximum(losses[np.isfinite(losses)], 0))
    if not len(finite):
        return 0.0
    most = np.quantile(finite, _MOST, method="higher")
    sums, above = np.cumsum(finite), np.arange(len(finite))[::-1]
    kept = sums + above * finite  # the sum of all, clipped at each of them
    return float(max(most, finite[np.argmax(kept >= _MASS * sums[-1])]))


def count(table: Any) -> int:
    """The number of rows; sparse matrices have no length."""
    return table.shape[0] if hasattr(table, "shape") else len(table)


def _columns(table):
    """What a table's columns are: names or a shape; `None` where nothing is known."""
    if hasattr(table, "columns"):
        return list(table.columns)
    return tuple(table.shape[1:]) if hasattr(table, "shape") else None


def _sliceable(table):
    """A sparse matrix in a format that has rows; anything else as it is."""
    return table.tocsr() if hasattr(table, "tocsr") else table


def _equal(losses, others, rows):
    """Whether these rows have the same losses, up to rounding."""
    close = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
    return others is not None and np.allclose(losses[rows], others[rows], **close)


def _all(tables):
    """The numbers of all rows."""
    return np.arange(count(tables[-1]))


def _parts(tables, rows):
    """Copies of rows by number, of data frames as well: some code works in place."""
    return [
        [table[row] for row in rows]
        if isinstance(table, list | tuple)
        else getattr(table, "iloc", table)[rows]
        for table in tables
    ]


@contextlib.contextmanager
def _silence():
    """No warning, no output of Python."""
    nowhere = io.StringIO()
    with (
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        yield
