"""Declared facts about records, and rows in units that follow from them.

Everything here works on one record at a time. Exceptions depend on shapes, types and
declared facts alone. A row with an entry that is no finite number becomes a row of NaN,
and a label that is not declared has the index -1: such records have no influence.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from .. import _checks
from ..core.columns import Column

_ROUNDED = 1.001  # times the norm; rows divided by their length are not too long
# Mean square of a feature that is uniform in its bounds.
_UNIFORM = 1 / 3


@dataclasses.dataclass(frozen=True)
class Frame:
    r"""Conversion of rows to units of length about 1, and of coefficients back.

    With bounds an entry is cut to them, and $z = (x - c) / h \cdot \sqrt{3 / d}$. Here
    $c = 0$ if 0 is within the bounds, else $c$ is their middle, and $h$ is the distance
    of the farther bound from $c$. With a norm $z = x / R$, and longer rows are
    shortened to 1. Models without a constant have $c = 0$.

    Attributes:
        lower: Lower bounds of the features, or `None`.
        upper: Upper bounds of the features, or `None`.
        center: $c$.
        scale: Divisor of each feature.
        norm: $R$, or `None`.
        bins: Number of bins of a numeric feature; `None` for the numbers themselves.
    """

    lower: Any
    upper: Any
    center: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]
    norm: float | None
    bins: int | None = None

    @property
    def longest(self) -> float:
        """Largest possible length of a row in these units."""
        if self.bins is not None:
            return float(len(self.numeric) ** 0.5 / self.scale[0])
        return 1.0 if self.norm is not None else _UNIFORM**-0.5

    @property
    def numeric(self) -> Bool[np.ndarray, " d"]:
        """Mask of the features that are not indicators with the bounds 0 and 1."""
        return (self.lower != 0) | (self.upper != 1)

    @property
    def numbers(self) -> float:
        """Fraction of columns that are not indicators, whose bounds are 0 and 1.

        Most indicators of a row are 0, whatever else is declared.
        """
        return 1.0 if self.lower is None else float(np.mean(self.numeric))

    def rows(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Return rows in the `Frame`'s units; all NaN if an entry is not finite."""
        finite = np.isfinite(X).all(axis=1, keepdims=True)
        rows = (self.cut(np.where(finite, X, 0)) - self.center) / self.scale
        return np.where(finite, rows, np.nan)

    def cut(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Return rows of finite entries, cut to the bounds or shortened to the norm.

        With bins a numeric feature becomes an indicator of each bin.
        """
        if self.bins is not None:
            return self._binned(np.clip(X, self.lower, self.upper))
        if self.norm is None:
            return np.clip(X, self.lower, self.upper)
        # Squares of huge entries would overflow.
        largest = np.maximum(np.abs(X).max(axis=1, keepdims=True), self.norm)
        unit = X / largest
        length = np.linalg.norm(unit, axis=1, keepdims=True)
        with np.errstate(all="ignore"):  # a warning would reveal a record
            rows = unit * np.minimum(largest, self.norm / length)
        return np.where(length > 0, rows, 0)

    def _binned(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n w"]:
        """Return rows with each numeric feature replaced by indicators of its bins."""
        bins: Any = self.bins
        place = bins * (X - self.lower) / (self.upper - self.lower)
        place = np.minimum(place, bins - 1).astype(int)
        one_hot = (place[:, :, None] == np.arange(bins)).astype(float)
        columns = [
            one_hot[:, j] if numeric else X[:, j : j + 1]
            for j, numeric in enumerate(self.numeric)
        ]
        return np.concatenate(columns, axis=1)

    def outside(self, X: Float[np.ndarray, "n d"]) -> Bool[np.ndarray, "n d"]:
        """Return a mask of the entries that `rows` cuts; with a norm, of whole rows."""
        if self.norm is not None:
            with np.errstate(all="ignore"):  # a warning would reveal a record
                length = np.linalg.norm(X, axis=1, keepdims=True)
            return np.broadcast_to(length > _ROUNDED * self.norm, X.shape)
        return (X < self.lower) | (X > self.upper)

    def coefficients(
        self, weights: Float[np.ndarray, "k d"], intercept: Float[np.ndarray, " k"]
    ) -> tuple[Float[np.ndarray, "k d"], Float[np.ndarray, " k"]]:
        """Return coefficients and constants, converted to features in original units.

        The arguments are for features in the units of the `Frame`.
        """
        weights = weights / self.scale
        return weights, intercept - weights @ self.center


def frame(
    owner: str,
    width: int,
    bounds: Any,
    data_norm: Any,
    centered: bool = True,
    bins: Any = None,
) -> Frame:
    """Return the `Frame` of records with declared bounds or a declared norm.

    Entries may be moved if `centered`, for models with a constant.
    """
    if (bounds is None) == (data_norm is None):
        raise ValueError(
            f"{owner}: declare bounds=(lower, upper) or data_norm=, and not both. Take "
            "them from public knowledge: extremes of the records would reveal these."
        )
    if bins is not None:
        _checks.count(owner, bins=bins)
        if bounds is None or bins < 2:
            raise ValueError(f"{owner}: bins must be at least 2, and need bounds=.")
    if bounds is None:
        _checks.positive(owner, data_norm=data_norm)
        norm = float(data_norm)
        return Frame(None, None, np.zeros(width), np.full(width, norm), norm)
    lower, upper = interval(owner, "bounds", bounds, width)
    if bins is not None:
        numeric = (lower != 0) | (upper != 1)
        length = np.sqrt(np.where(numeric, 1, _UNIFORM).sum())
        scale = np.full(np.where(numeric, bins, 1).sum(), length)
        return Frame(lower, upper, np.zeros(len(scale)), scale, None, int(bins))
    inside = (lower <= 0) & (upper >= 0)
    center = np.where(inside | (not centered), 0.0, lower + (upper - lower) / 2)
    reach = np.maximum(upper - center, center - lower)
    return Frame(lower, upper, center, reach * np.sqrt(width * _UNIFORM), None)


def interval(
    owner: str, name: str, bounds: Any, width: int
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Return arrays of `width` lower and upper bounds; refuse infinite or equal ones.

    Those that may be pairs of the two features are refused.
    """
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        got = _checks.shown(bounds)
        raise ValueError(f"{owner}: {name} must be a pair (lower, upper), got {got}.")
    try:
        lower, upper = (np.asarray(v, float) for v in bounds)
        lower, upper = (np.broadcast_to(v, (width,)).copy() for v in (lower, upper))
    except (TypeError, ValueError):
        raise ValueError(
            f"{owner}: {name} must be two numbers, or two lists of {width} numbers."
        ) from None
    with np.errstate(over="ignore"):
        widths = upper - lower
    wrong = np.flatnonzero(~(np.isfinite(widths) & (widths > 0)))
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"{owner}: {name} must be finite, the lower end below the upper one; "
            f"number {first} has {lower[first]:g} and {upper[first]:g}."
        )
    pairs = isinstance(bounds, list) or isinstance(bounds[0], tuple)
    square = all(np.shape(v) == (2,) for v in bounds)
    if pairs and square and np.all(np.diff((lower, upper)) > 0):
        (a, b), (c, d) = bounds
        raise ValueError(
            f"{owner}: {name}={bounds} is ambiguous. Write the lower ends first, these "
            f"pairs as ([{a}, {c}], [{b}, {d}])."
        )
    return lower, upper


def declared(owner: str, name: str, values: Any, example: str) -> np.ndarray:
    """Return declared values as a sorted array; refuse one value or mixed kinds."""
    if values is None or isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{owner}: declare a public {name}=, such as {example}.")
    listed = [v.item() if isinstance(v, np.generic) else v for v in values]
    texts = [isinstance(v, str) for v in listed]
    if any(texts) and not all(texts):
        raise ValueError(f"{owner}: {name} must be all texts or all numbers.")
    array = np.asarray(listed)
    if array.ndim != 1 or len(set(listed)) != len(listed) or len(listed) < 2:
        got = "one class" if len(listed) == 1 else _checks.shown(values)
        raise ValueError(
            f"{owner}: {name} must be at least two distinct values, got {got}."
        )
    return np.sort(array)


def weights_of(
    owner: str, classes: np.ndarray, weights: Any
) -> Float[np.ndarray, " k"] | None:
    """Return an array: each class's declared weight over the largest; `None` if none.

    Classes that the dict of weights lacks have weight 1.
    """
    if weights is None:
        return None
    if isinstance(weights, str):
        raise ValueError(
            f"{owner}: class_weight={weights!r} would read the records. Declare a dict "
            "of public numbers, such as {'no': 1, 'yes': 5}."
        )
    listed = classes.tolist()
    if not isinstance(weights, Mapping) or not set(weights) <= set(listed):
        raise ValueError(f"{owner}: class_weight must be a dict of declared classes.")
    for weight in weights.values():
        _checks.positive(owner, class_weight=weight)
    found = np.asarray([float(weights.get(label, 1)) for label in listed])
    return found / found.max()


def index_of(
    owner: str, name: str, declared: np.ndarray, column: Column
) -> Int[np.ndarray, " n"]:
    """Return an array: each entry's index among declared values, -1 if undeclared."""
    own = "texts" if declared.dtype.kind == "U" else "numbers"
    if column.kind not in (own, "objects"):
        raise ValueError(f"{owner}: {name} holds {own}, the records {column.kind}.")
    places = {value: place for place, value in enumerate(declared.tolist())}

    def place(value: Any) -> int:
        try:
            return places.get(value, -1)
        except Exception:  # another object may raise anything
            return -1

    entries = column.entries
    return np.fromiter(map(place, entries.tolist()), np.int32, len(entries))
