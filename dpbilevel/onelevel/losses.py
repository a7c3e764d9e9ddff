"""Ready-made per-record losses: linear models on one record.

A record is `{"features": a, "label": b}`, with further entries or without, or the pair
`(a, b)`: records are then a dict of arrays `X`, shape `(n, d)`, and `y`, shape `(n,)`,
or `(X, y)`. If labels are classes, 0 means what -1 does, so that 0 and 1, `False`
and `True`, -1 and 1 are the same classes.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

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
    """Return the features and the label of one record.

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
    r"""Return $\langle a, w \rangle$; $w$ may be a matrix with a column per class.

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
