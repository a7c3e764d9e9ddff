r"""Linear models: losses $\varphi(\langle a, y \rangle, b)$ and risks, with bounds."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from typing_extensions import override

from .. import _checks
from .._checks import Number
from ..sets import Ball
from .losses import Record, absolute_loss, bounded, hinge_loss, logistic_loss, signed
from .problem import FiniteSum

Scalar = Float[Array, ""]
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
        """Bound on a loss at margin 0: `start`, if that is finite."""
        return self.start

    @abc.abstractmethod
    def slope(self, margin: Number) -> Number:
        r"""Return $p_1 \ge |\varphi'(t, b)|$ for all $|t| \le$ `margin`.

        It does not decrease in `margin`.
        """

    @abc.abstractmethod
    def loss(self, margin: Scalar, label: Scalar) -> Scalar:
        r"""Return the loss $\varphi(t, b)$ of one record, for every finite label."""


@dataclasses.dataclass(frozen=True)
class Logistic(AbstractLinearModel):
    r"""$\log(1 + e^{-b t})$; labels are cut to $[-1, 1]$, and 0 is read as -1.

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
    r"""$\delta^2 (\sqrt{1 + u^2} - 1)$ with $u = (t - b) / \delta$: smooth, any label.

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
        """Loss of the largest label that is not cut."""
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
