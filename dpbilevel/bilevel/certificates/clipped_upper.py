"""A certificate of lower records alone, for upper records that are clipped."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from typing_extensions import override

from ... import _checks
from ...core.levels import Sizes
from .bounds import Bounds
from .constants import AbstractCertificate, SecondOrderConstants


@dataclasses.dataclass(frozen=True)
class ClippedUpper(AbstractCertificate):
    r"""A certificate of another one's lower records, where upper records are clipped.

    With $u_z(x) = \nabla_x f_z - \nabla_{xy} G\, [\nabla_{yy} G]^{-1} \nabla_y f_z$ at
    $y^*(x)$, where $f_z$ is the loss of upper record $z$ with the public term, a
    hypergradient is the mean of the records' contributions $u_z$. What is released is

    $$\frac{1}{n_f} \sum_z \mathrm{clip}_{C(x)}(u_z(x)), \qquad C(x) = \min(C, \bar
    L(x)).$$

    - *An upper record* moves neither $y^*$ nor a derivative of $G$: $S_{up} = 2 C(x) /
      n_f$, whatever the losses are.
    - *A lower record* moves all contributions. $u_z$ is the hypergradient of $n_f$
      copies of the record $z$, of which the certificate holds too, so that each of them
      moves by at most $S_{low}$. Clipping is a projection onto a ball and sets no two
      of them further apart, nor does their mean: it moves by at most $\min(S_{low}, 2
      C(x))$. The constants of numerical errors carry over by the same argument.

    Args:
        certificate: The one of the problem.
        clip_norm: $C > 0$.
    """

    certificate: AbstractCertificate
    clip_norm: float

    def __post_init__(self):
        _checks.positive("ClippedUpper", clip_norm=self.clip_norm)

    @property
    def varies(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the bounds of the problem's certificate depend on x."""
        return self.certificate.varies

    @override
    def bounds(self, sizes, x=None) -> Bounds:
        bounds = self.certificate.bounds(sizes, x)
        least = jnp.minimum if isinstance(bounds.gradient, jax.Array) else min
        clip = least(self.clip_norm, bounds.gradient)  # C(x)
        return dataclasses.replace(bounds, upper=2 * clip / sizes.upper, clip=clip)

    @override
    def metric(self, problem: Any, sizes: Sizes, x: PyTree | None, y: PyTree):
        return self.certificate.metric(problem, sizes, x, y)

    @override
    def check(self, problem: Any) -> None:
        self.certificate.check(problem)

    @property
    @override
    def second_order(self) -> SecondOrderConstants:
        return self.certificate.second_order

    @property
    @override
    def assumptions(self) -> tuple[str, ...]:
        return (
            "the guarantee of upper records rests on clipping: each one's contribution "
            f"is clipped at {self.clip_norm:.6g}, whatever the losses are; that of "
            "lower records rests on the constants of both levels' losses",
            *self.certificate.assumptions,
        )
