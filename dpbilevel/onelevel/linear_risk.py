"""Training a linear model as a one-level problem with a proved Lipschitz constant."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import _checks
from ..sets import Ball
from .losses import Record, absolute_loss, bounded, hinge_loss, logistic_loss
from .problem import FiniteSum

Scalar = Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class _Loss:
    of: Callable[[Array, Record], Scalar]
    curvature: float | None  # of the margin; None where it is not smooth
    signed: bool  # whether the label multiplies the margin


_LOSSES = {
    "hinge": _Loss(hinge_loss, None, signed=True),
    "absolute": _Loss(absolute_loss, None, signed=False),
    "logistic": _Loss(logistic_loss, 0.25, signed=True),
}


def linear_risk(
    loss: Literal["hinge", "absolute", "logistic"],
    *,
    radius: float,
    row_norm: float = 1.0,
) -> FiniteSum:
    r"""Minimize the mean convex loss of a linear model over a ball.

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
    _checks.positive(owner, radius=radius, row_norm=row_norm)
    if not 1e-15 <= row_norm <= 1e15:
        raise ValueError(
            f"{owner}: row_norm must be between 1e-15 and 1e15, got {row_norm}. "
            "Rescale the features by a public number."
        )
    kind = _LOSSES[loss]

    def record_loss(w: Float[Array, " d"], record: Record) -> Scalar:
        row, label = bounded(record, row_norm, w.dtype)
        # Beyond the largest margin a label changes an absolute loss by a constant.
        limit = 1.0 if kind.signed else radius * row_norm
        label = jnp.clip(label, -limit, limit)
        return kind.of(w, (row, label))

    smoothness = None if kind.curvature is None else kind.curvature * row_norm**2
    return FiniteSum(
        record_loss,
        w_set=Ball(float(radius)),
        lipschitz=float(row_norm),
        smoothness=smoothness,
    )
