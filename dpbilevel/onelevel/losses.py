r"""Losses of one record, and linear models: losses and risks with bounds.

A record is `{"features": a, "label": b}`, with further entries or without, or the pair
`(a, b)`: records are then a dict of arrays `X`, shape `(n, d)`, and `y`, shape `(n,)`,
or `(X, y)`. If labels are classes, 0 means what -1 does, so that 0 and 1, `False`
and `True`, -1 and 1 are the same classes.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Number
from ..sets import Ball
from .problem import FiniteSum

Scalar = Float[Array, ""]
Record = Mapping[str, Array] | tuple[Array, Array]


def logistic_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""Return $\log(1 + e^{-b \langle a, w \rangle})$ for features $a$ and $b = \pm 1$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}` or `(a, b)`; a label of 0 is read as -1.
            Rows of norm at most 1 make every gradient at most 1 long.

    Raises:
        TypeError: The record is neither.
        ValueError: Its shapes are not those of a vector and a number.
    """
    margin, label = _margin(weights, record)
    return jnp.logaddexp(0.0, -signed(label) * margin)


def squared_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""Return $\frac12 (\langle a, w \rangle - b)^2$ for features $a$ and target $b$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}` or `(a, b)`.

    Raises:
        TypeError: The record is neither.
        ValueError: Its shapes are not those of a vector and a number.
    """
    margin, label = _margin(weights, record)
    return 0.5 * (margin - label) ** 2


def hinge_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""Return $\max(0, 1 - b \langle a, w \rangle)$ for features $a$ and $b = \pm 1$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}` or `(a, b)`; a label of 0 is read as -1.

    Raises:
        TypeError: The record is neither.
        ValueError: Its shapes are not those of a vector and a number.
    """
    margin, label = _margin(weights, record)
    return jnp.maximum(0.0, 1 - signed(label) * margin)


def absolute_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""Return $|\langle a, w \rangle - b|$ for features $a$ and target $b$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}` or `(a, b)`.

    Raises:
        TypeError: The record is neither.
        ValueError: Its shapes are not those of a vector and a number.
    """
    margin, label = _margin(weights, record)
    # The derivative of an absolute value is finite even if the value is not.
    return jnp.abs(margin - label) * jnp.where(jnp.isfinite(label), 1, jnp.nan)


def signed(label: Scalar) -> Scalar:
    """Return the label, or -1 if it is 0: classes 0 and 1 mean what -1 and 1 do.

    A label that is not finite stays as it is, so that its record is left out where
    records are clipped.
    """
    return jnp.where(label == 0, -jnp.ones_like(label), label)


def example(record: Record) -> tuple[Float[Array, " d"], Array]:
    """Return the pair of one record's features and label; refuse other shapes.

    Raises:
        TypeError: The record is neither a mapping with both nor a pair.
        ValueError: Its shapes are not those of a vector and a number.
    """
    parts: tuple | list = ()  # stays empty where the record is neither
    if isinstance(record, Mapping) and {"features", "label"} <= set(record):
        parts = record["features"], record["label"]
    elif isinstance(record, tuple | list) and len(record) == 2:
        parts = record
    if not parts or not all(
        hasattr(v, "shape") or isinstance(v, int | float) for v in parts
    ):
        raise TypeError(
            'linear model: records must be {"features": X, "label": y} or (X, y), with '
            f"arrays X of shape (n, d) and y of shape (n,), got {_kind(record)}."
        )
    row, label = parts
    if jnp.ndim(row) - 1 != jnp.ndim(label):
        raise ValueError(
            "linear model: a record must have a vector of features and one number as "
            f"label, got shapes {jnp.shape(row)} and {jnp.shape(label)}."
        )
    return row, label


def bounded(
    record: Record, norm: float, dtype: DTypeLike
) -> tuple[Float[Array, " d"], Scalar]:
    """Return features at most `norm` long, and the label; zeros if not finite.

    The public norm is between 1e-15 and 1e15. The row is zeros where the label is not
    finite either, so that such a record has no influence on a linear model.
    """
    row, label = example(record)
    row, label = shortened(row, norm).astype(dtype), jnp.asarray(label).astype(dtype)
    finite = jnp.isfinite(label)
    zeros = jnp.zeros_like(row), jnp.zeros_like(label)
    return jnp.where(finite, row, zeros[0]), jnp.where(finite, label, zeros[1])


def score(weights: Float[Array, " d"], row: Float[Array, " d"]) -> Float[Array, ""]:
    r"""Return the score $\langle a, w \rangle$ of a row $a$, one per column of $w$.

    Raises:
        ValueError: Their lengths differ.
    """
    if np.shape(row)[-1:] != np.shape(weights)[:1]:
        raise ValueError(
            "linear model: needs one coefficient per feature, got shapes "
            f"{np.shape(weights)} and {np.shape(row)}. Start from jnp.zeros(d)."
        )
    return row @ weights


def _margin(
    weights: Float[Array, " d"], record: Record
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the score of a record, and its label in the same precision."""
    row, label = example(record)
    margin = jnp.asarray(score(weights, row))
    return margin, jnp.asarray(label).astype(margin.dtype)


def _kind(record: PyTree) -> str:
    """Return text on the structure of a record for a message; never a value."""
    if isinstance(record, Mapping):
        return f"{{{', '.join(f'{k!r}: {_kind(v)}' for k, v in record.items())}}}"
    if isinstance(record, tuple | list) and len(record) <= 4:
        return f"({', '.join(map(_kind, record))})"
    shape = getattr(record, "shape", None)
    return type(record).__name__ if shape is None else f"array of shape {shape}"


def shortened(row: Float[Array, " d"], norm: float) -> Float[Array, " d"]:
    """Return the row, at most `norm` long after rounding; zeros if it is not finite.

    The public norm is between 1e-15 and 1e15; the result is in single precision at
    least.
    """
    wide = jnp.issubdtype(row.dtype, jnp.floating) and jnp.finfo(row.dtype).bits > 32
    row = row if wide else row.astype(jnp.float32)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(row), initial=0))
    finite = jnp.isfinite(largest)
    # Squares of the entries themselves would underflow, or overflow.
    scale = jnp.where(finite & (largest > 0), largest, 1)
    unit = jnp.where(finite, row, jnp.zeros_like(row)) / scale
    square = jnp.sum(unit * unit)
    # Zero has no derivative under the root.
    length = jnp.sqrt(jnp.where(square > 0, square, 1))
    # Worst-case relative rounding of the norm, as where records are clipped.
    length = length * (1 + (row.size + 32) * float(jnp.finfo(row.dtype).eps) / 4)
    return unit * jnp.where(square > 0, jnp.minimum(scale, norm / length), scale)


# In widths of a pseudo-Huber loss: far beyond, a loss is linear to 12 digits.
_LARGEST_LABEL = 1e6


class AbstractLinearModel(abc.ABC):
    r"""A convex loss $\varphi(t, b)$ of a margin $t = \langle a, y \rangle$.

    Attributes:
        curvature: $p_2 \ge \varphi''$.
        third: $p_3 \ge |\varphi'''|$.
        concordance: $s$ with $|\varphi'''| \le s \varphi''$.
        start: $\varphi_0 \ge \varphi(0, b)$; infinite where labels are not bounded.
    """

    curvature: float
    third: float
    concordance: float
    start: float

    @property
    def largest(self) -> float:
        """Bound on the loss at margin 0; by default `start`, maybe infinite."""
        return self.start

    @abc.abstractmethod
    def slope(self, margin: Number) -> Number:
        r"""Return a bound on the loss's absolute slope at margins up to `margin`.

        It does not decrease in `margin`.
        """

    @abc.abstractmethod
    def loss(self, margin: Scalar, label: Scalar) -> Scalar:
        r"""Return the loss $\varphi(t, b)$ of one record, for every finite label."""


@dataclasses.dataclass(frozen=True)
class Logistic(AbstractLinearModel):
    r"""Logistic loss $\log(1 + e^{-b t})$; labels are cut to $[-1, 1]$, 0 means -1.

    With $\sigma$ the logistic function, $|\varphi'| \le \sigma(|t|)$, $\varphi'' = b^2
    \sigma (1 - \sigma) \le 1/4$ and $|\varphi'''| = |b| \varphi'' |1 - 2 \sigma| \le 1
    / (6 \sqrt 3)$.
    """

    curvature: ClassVar[float] = 0.25
    third: ClassVar[float] = 1 / (6 * math.sqrt(3))
    concordance: ClassVar[float] = 1.0
    start: ClassVar[float] = math.log(2)

    @override
    def slope(self, margin: Number) -> Number:
        return 1 / (1 + module_of(margin).exp(-margin))

    @override
    def loss(self, margin: Scalar, label: Scalar) -> Scalar:
        return _softplus(-jnp.clip(signed(label), -1.0, 1.0) * margin)


@dataclasses.dataclass(frozen=True)
class PseudoHuber(AbstractLinearModel):
    r"""Pseudo-Huber loss $\delta^2 (\sqrt{1 + u^2} - 1)$ of $u = (t - b) / \delta$.

    $|\varphi'| \le \delta$, $\varphi'' = (1 + u^2)^{-3/2} \le 1$, and $|\varphi'''| = 3
    |u| (1 + u^2)^{-5/2} / \delta$ is largest at $u = 1/2$; over $\varphi''$ it is $3
    |u| / (1 + u^2) / \delta \le 3 / (2 \delta)$.

    Args:
        width: $\delta > 0$: residuals well below it count squared, others by amount.
    """

    width: float = 1.0
    curvature: ClassVar[float] = 1.0
    start: ClassVar[float] = math.inf

    def __post_init__(self):
        _checks.positive("PseudoHuber", width=self.width)
        object.__setattr__(self, "width", float(self.width))  # hashed: no array

    @property
    def third(self) -> float:
        """Largest absolute third derivative, attained at half the width."""
        return 1.5 * 1.25**-2.5 / self.width

    @property
    def concordance(self) -> float:
        """Largest ratio of third to second derivative, attained at the width."""
        return 1.5 / self.width

    @property
    def largest(self) -> float:
        """Bound on the loss at margin 0 of the largest label that is not cut."""
        return _LARGEST_LABEL * self.width**2

    def slope(self, margin: Number) -> float:
        """Return the width, which bounds the slope at every margin."""
        return self.width

    def loss(self, margin: Scalar, label: Scalar) -> Scalar:
        """Return the loss by a quotient without cancellation; huge labels are cut."""
        limit = _LARGEST_LABEL * self.width
        label = jnp.clip(label, -limit, limit)  # so that no square overflows
        u = (margin - label) / self.width
        return self.width**2 * u * (u / (1 + jnp.sqrt(1 + u * u)))


def linear_loss(
    model: AbstractLinearModel, row_norm: float
) -> Callable[[Float[Array, " d"], Record], Scalar]:
    """Return the function (weights, record) of a model's loss, rows cut to a norm."""

    def loss(weights: Float[Array, " d"], record: Record) -> Scalar:
        row, label = bounded(record, row_norm, weights.dtype)
        return model.loss(score(weights, row), label)

    return loss


@jax.custom_jvp
def _softplus(value: Scalar) -> Scalar:
    return jnp.logaddexp(0.0, value)


@_softplus.defjvp
def _softplus_jvp(primals, tangents):
    # One exponential; the derivative of logaddexp takes two and a logarithm.
    return _softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]


def module_of(value: Any) -> Any:
    """Return `jax.numpy` for arrays of JAX, else `numpy`."""
    return jnp if isinstance(value, jax.Array) else np


# A loss, its curvature in the margin where it is smooth, and whether the label
# multiplies the margin.
_LOSSES = {
    "hinge": (hinge_loss, None, True),
    "absolute": (absolute_loss, None, False),
    "logistic": (logistic_loss, 0.25, True),
}


def linear_risk(
    loss: Literal["hinge", "absolute", "logistic"],
    *,
    radius: float,
    row_norm: float = 1.0,
) -> FiniteSum:
    r"""Return the `FiniteSum` of a linear model's mean convex loss over a ball.

    Rows longer than $R$ are shortened to it, labels of classes cut to $[-1, 1]$, with 0
    read as -1, and targets to the largest margin there is, which moves no minimizer, so
    that every record's loss is $R$-Lipschitz in $w$. The features of a record with an
    entry that is not finite are read as zeros.

    Args:
        loss: `"hinge"` (support vector machine), `"absolute"` (median regression) or
            `"logistic"`.
        radius: Of the ball of weights about the origin.
        row_norm: $R$; public.

    Returns:
        A problem over records `{"features": a, "label": b}` or `(a, b)` with
        `lipschitz` set, and `smoothness` where the loss is smooth.

    Raises:
        ValueError: An unknown loss or a number out of range.
    """
    owner = "linear_risk"
    _checks.one_of(owner, "loss", loss, tuple(_LOSSES))
    _checks.positive(owner, radius=radius)
    _checks.row_norm(owner, row_norm=row_norm)
    fun, curvature, is_signed = _LOSSES[loss]

    def record_loss(w: Float[Array, " d"], record: Record) -> Scalar:
        row, label = bounded(record, row_norm, w.dtype)
        # Beyond the largest margin a label changes an absolute loss by a constant.
        limit = 1.0 if is_signed else radius * row_norm
        label = jnp.clip(label, -limit, limit)
        return fun(w, (row, label))

    smoothness = None if curvature is None else curvature * row_norm**2
    w_set, lipschitz = Ball(float(radius)), float(row_norm)
    return FiniteSum(record_loss, None, w_set, lipschitz, smoothness)
