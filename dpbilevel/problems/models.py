"""Ready-made per-record losses: linear models on one record."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Record = dict[str, Float[Array, "..."]]


def logistic_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""$\log(1 + e^{-b \langle a, w \rangle})$ for features $a$ and label $b = \pm 1$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}`; rows of norm at most 1 make every
            gradient at most 1 long.
    """
    return jnp.logaddexp(0.0, -record["label"] * (score(weights, record["features"])))


def squared_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""$\frac12 (\langle a, w \rangle - b)^2$ for features $a$ and target $b$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}`.
    """
    return 0.5 * (score(weights, record["features"]) - record["label"]) ** 2


def hinge_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""$\max(0, 1 - b \langle a, w \rangle)$ for features $a$ and label $b = \pm 1$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}`.
    """
    return jnp.maximum(0.0, 1 - record["label"] * (score(weights, record["features"])))


def absolute_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""$|\langle a, w \rangle - b|$ for features $a$ and target $b$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}`.
    """
    return jnp.abs(score(weights, record["features"]) - record["label"])


def score(weights: Float[Array, " d"], row: Float[Array, " d"]) -> Float[Array, ""]:
    r"""$\langle a, w \rangle$.

    Args:
        weights: $w$, or a matrix with a column per class.
        row: $a$, one record's features.

    Raises:
        ValueError: Their lengths differ.
    """
    if np.shape(row)[-1:] != np.shape(weights)[:1]:
        raise ValueError(
            "linear model: needs one coefficient per feature, got coefficients of "
            f"shape {np.shape(weights)} for a record with features of shape "
            f"{np.shape(row)}. Start from jnp.zeros(d) with d the number of columns "
            "of the features."
        )
    return row @ weights


def shortened(row: Float[Array, " d"], norm: float) -> Float[Array, " d"]:
    """The row, at most `norm` long after rounding; zeros where an entry is not finite.

    Args:
        row: One record's features.
        norm: The public norm, between 1e-15 and 1e15.

    Returns:
        The row in single precision at least.
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
