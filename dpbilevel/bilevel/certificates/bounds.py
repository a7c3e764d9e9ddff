"""Bounds that a certificate proves at a point."""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from ..._checks import Number
from .fixed_count import Spectrum


@dataclasses.dataclass(frozen=True)
class Bounds:
    r"""Bounds that a certificate proves about the hypergradient at one $x$, or all.

    For all records of both levels, so also where all upper ones are copies of one. With
    $y^*$ the lower solution, $H = \nabla_{yy} G$ and $v = H^{-1} \nabla_y F$:

    Attributes:
        strong_convexity: $\mu_g$, the least eigenvalue of $H$ anywhere.
        smoothness: $\beta$, the largest one.
        solution_radius: $r \ge \|y^*\|$.
        solution_shift: $d$, how far one replaced lower record moves $y^*$.
        upper: $S_{up}$, how far one replaced upper record moves the hypergradient.
        lower: $S_{low}$, how far one replaced lower record does.
        lower_error: $C$: $\|\bar\nabla F(x, y) - \nabla \Phi(x)\| \le C \|y - y^*\|$
            for $\|y\| \le r$.
        linear_error: $c$: a $v$ with $\|v - H^{-1} \nabla_y F\|_H \le \tau / \sqrt
            \mu_g$ moves the hypergradient by at most $c \tau$.
        gradient: $\bar L \ge \|\nabla \Phi(x)\|$.
        upper_gradient: $L_{fy} \ge \|\nabla_y F\|$ for $\|y\| \le r$.
        lower_gradient: A bound on the parts of $\nabla_y G$, a record's and the public
            one together, for $\|y\| \le 3 r$.
        parts: The same for the other sums, as a multiple of the bounds above: more than
            1 where records and a public term may cancel.
        clip: The norm at which contributions of upper records are clipped, where they
            are.
    """

    strong_convexity: Number
    smoothness: Number
    solution_radius: Number
    solution_shift: Number
    upper: Number
    lower: Number
    lower_error: Number
    linear_error: Number
    gradient: Number
    upper_gradient: Number
    lower_gradient: Number
    parts: float = 1.0
    clip: Number | None = None

    @property
    def largest(self) -> Number:
        """The largest norm of what is computed."""
        return self.gradient if self.clip is None else self.clip

    @property
    def spectrum(self) -> Spectrum:
        """The eigenvalues of $H$."""
        return Spectrum(self.strong_convexity, self.smoothness)


@dataclasses.dataclass(frozen=True)
class Metric:
    r"""A public diagonal $M$ in which the lower level is better conditioned.

    Attributes:
        diagonal: $M$, positive, a pytree like $y$.
        least: Its least entry.
        spectrum: Of $M^{-1/2} H M^{-1/2}$.
        radius: At least $\|M^{1/2} y^*\|$.
    """

    diagonal: PyTree
    least: Any
    spectrum: Spectrum
    radius: Any
