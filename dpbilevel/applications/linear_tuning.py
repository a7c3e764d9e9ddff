r"""Tuning the penalties of linear models, with constants that are proved, not declared.

Records are features $a$ and a label $b$, losses $\varphi(\langle a, y \rangle, b)$. The
rows are rescaled to a public norm $R$ inside the loss, so that the bounds hold for
every record there can be.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from ..bilevel import AbstractCertificate, BilevelProblem, SecondOrderConstants
from ..bilevel.certificates.constants import check_terms, terms_of
from ..bilevel.certificates.fixed_count import Bounds, Metric, Spectrum
from ..core.levels import Sizes
from ..onelevel.losses import AbstractLinearModel, linear_loss, module_of
from ..sets import Box
from .penalties import penalty_tuning

# Refinements of the bound on the solution's norm; each one is valid.
_REFINEMENTS = 8


def linear_tuning(
    model: AbstractLinearModel,
    groups: Sequence[int] | Int[Array, " d"],
    *,
    bounds: tuple[float, float],
    row_norm: float = 1.0,
) -> BilevelProblem:
    r"""Return the `penalty_tuning` problem of a linear model, with its certificate.

    `penalty_tuning` of $\varphi(\langle \bar a, y \rangle, b)$, where $\bar a$ is the
    row $a$, shortened to the norm $R$ if it is longer. The features of a record with an
    entry that is not finite are read as zeros.

    Args:
        model: `Logistic()` or `PseudoHuber(width)`.
        groups: The group of each coefficient, integers in $[0, k)$; public.
        bounds: $(l, u)$, the box of the log-penalties. The sensitivity grows like
            $e^{-l}$ and faster: choose $l$ no smaller than a penalty worth trying.
        row_norm: $R$ in [1e-15, 1e15]; public.

    Returns:
        A problem over `Levels(upper=validation, lower=training)` of records
        `{"features": a, "label": b}` or `(a, b)`, with $x$ of $k$ log-penalties and
        `constants`.

    Raises:
        ValueError: As `penalty_tuning`; a norm out of range; groups that are not one
            vector, or of another length than y.
        TypeError: `model` is no linear model.
    """
    _checks.instance("linear_tuning", AbstractLinearModel, model=model)
    _checks.row_norm("linear_tuning", row_norm=row_norm)
    groups = jnp.asarray(groups)
    if groups.ndim != 1:
        raise ValueError(f"linear_tuning: groups must be a vector, got {groups.shape}.")
    loss = linear_loss(model, row_norm)
    problem = penalty_tuning(loss, groups, bounds=bounds)
    low, high = map(float, bounds)
    proved = model, float(row_norm), low, high, terms_of(problem)
    certificate = TuningCertificate(*proved)
    return dataclasses.replace(problem, constants=certificate)


@dataclasses.dataclass(frozen=True)
class TuningCertificate(AbstractCertificate):
    r"""Proved bounds for penalty tuning of a linear model, at the current $x$.

    Let $\Lambda = \mathrm{diag}(e^{x_{g(j)}})$ with least and largest entry $\mu$ and
    $\bar\lambda$, $A = \|\nabla_y F\| \le p_1 R$, $H = \Lambda + \frac{1}{n_g} \sum_i
    \varphi''_i a_i a_i^T$ and $v = H^{-1} \nabla_y F$. The hypergradient sums, group by
    group, the entries of $-(\Lambda y^*) \circ v$, so that with $\hat s =
    \Lambda^{1/2} y^*$ and $\hat v = \Lambda^{1/2} v$ its norm is at most $\|\hat s\|
    \|\hat v\|$.

    - *Stationarity*: $\Lambda y^* = -\frac{1}{n_g} \sum_i \varphi'_i a_i$, hence
      $\|\hat s\| \le p_1 R / \sqrt\mu$ and $\|y^*\| \le p_1 R / \mu$. And $G(x, y^*)
      \le G(x, 0)$, hence $\|\hat s\| \le \sqrt{2 \varphi_0}$ and $\|y^*\| \le \sqrt{2
      \varphi_0 / \mu}$. Let $S$ and $r$ be the smaller ones. On the ball of radius $r$
      margins are at most $R r$, so $p_1$ is the slope there; repeating this keeps a
      bound.
    - $\|\hat v\| \le \|\Lambda^{-1/2} \nabla_y F\| \le p_1 R / \sqrt\mu$, as
      $\Lambda^{1/2} H^{-1} \Lambda^{1/2} \preceq I$.
    - *An upper record*: $\nabla_y F$ moves by at most $2 p_1 R / n_f$, so
      $S_{up} = S \cdot 2 p_1 R / (n_f \sqrt\mu)$.
    - *A lower record*, between data $Z$ and $Z'$: strong convexity in the norm of
      $\Lambda$ gives $\|\Delta \hat s\| \le 2 p_1 R / (n_g \sqrt\mu)$ and $\|\Delta
      y\| \le d = 2 p_1 R / (n_g \mu)$. From $H' \Delta v = \Delta \nabla_y F -
      (H' - H) v$,

      $$\|\Delta \hat v\| \le \frac{1}{\sqrt\mu} \Bigl[ p_2 R^2 d + \Bigl( t +
      \frac{p_2 R^2}{n_g \mu} \Bigr) p_1 R \Bigr].$$

      The exchanged record's share of $H' - H$ is a difference of two semidefinite
      matrices of norm at most $p_2 R^2 / n_g$, so of no larger norm. The others move
      theirs by at most $p_3 R^3 d$, or lie within $\pm s R d e^{s R d} H'$ and the same
      multiple of $H$: $t = \min(p_3 R^3 d / \mu, s R d e^{s R d})$. Then $S_{low} \le
      \|\Delta \hat s\| \|\hat v'\| + \|\hat s\| \|\Delta \hat v\|$.
    - *Parts*: both terms of $H$ are semidefinite, $F$ has no public term and
      $\nabla_{xy} G$ no records, so nothing cancels but in $\nabla_y G$. For $\|y\| \le
      3 r$ its parts are at most $(p_1 + 2 p_2 R r) R$ and $3 \bar\lambda r$ long.
    - *An inexact* $y$ with $\|y\| \le r$ has $\|\Lambda^{1/2} y\| \le r
      \sqrt{\bar\lambda}$, which gives $C$ and $c$ the same way.

    Everything is evaluated at the current $x$, which is released: the noise follows the
    sensitivity there, and its ratio to it, all that the ledger counts, stays.

    Args:
        model: The loss.
        row_norm: $R$.
        low: $l$, the least log-penalty.
        high: $u$, the largest one.
        terms: The problem's losses and public terms, which it was proved for.

    Privacy:
        Proved for every record, because the loss shortens its rows; the status is
        `CONDITIONAL` nevertheless, since it rests on a proof and not on clipping.
    """

    model: AbstractLinearModel
    row_norm: float
    low: float
    high: float
    terms: tuple[Callable | None, ...] = dataclasses.field(repr=False)
    varies: ClassVar[bool] = True

    def check(self, problem: BilevelProblem) -> None:
        """Refuse a problem with another box or other functions than those proved."""
        box: Any = problem.x_set
        holds = isinstance(box, Box)
        # Inside a program the box has no values; then it was checked when planned.
        if holds and not any(isinstance(v, Tracer) for v in jax.tree.leaves(box)):
            low, high = np.asarray(box.lower).min(), np.asarray(box.upper).max()
            # The box is in the dtype of x.
            slack = 1e-6 * max(1.0, abs(self.low), abs(self.high))
            holds = low >= self.low - slack and high <= self.high + slack
        if not holds:
            raise ValueError(
                f"linear_tuning: log-penalties must be in [{self.low:.6g}, "
                f"{self.high:.6g}]. Call it with the bounds you want."
            )
        check_terms("linear_tuning", problem, self.terms)

    @override
    def on_records_of(self, problem):
        # Every bound is one on derivatives of single losses, or on a mean of them that
        # is convex, and the public term alone is strongly convex: means of losses, and
        # the loss 0, have the same bounds.
        return dataclasses.replace(self, terms=terms_of(problem))

    def bounds(self, sizes: Sizes, x: PyTree | None = None) -> Bounds:
        """Return `Bounds` at log-penalties `x`, or at the worst point of the box."""
        if x is None:
            mu, top = (np.exp(np.float64(v)) for v in (self.low, self.high))
        else:
            mu, top = jnp.exp(jnp.min(x)), jnp.exp(jnp.max(x))
        slope, radius, energy = self._solution(mu)  # p_1, r and S
        p1, p2 = slope * self.row_norm, self.model.curvature * self.row_norm**2
        p3, n = self.model.third * self.row_norm**3, sizes.lower
        moved = 2 * p1 / (n * mu)  # d
        root, reach = mu**0.5, radius * top**0.5
        concordant = self.model.concordance * self.row_norm * moved  # s R d
        module = module_of(mu)
        # If s R d exceeds 1, the first bound is by far the smaller one.
        exponential = module.exp(module.minimum(concordant, 1.0))
        turned = module.minimum(  # t
            p3 * moved / mu,
            module.where(concordant < 1, concordant * exponential, math.inf),
        )
        others = p2 * moved + (turned + p2 / (n * mu)) * p1  # in the brackets above
        return Bounds(
            strong_convexity=mu,
            smoothness=p2 + top,
            solution_radius=radius,
            solution_shift=moved,
            upper=energy * 2 * p1 / (root * sizes.upper),  # S_up
            lower=2 * p1 / (n * root) * (p1 / root) + energy * others / root,  # S_low
            lower_error=top**0.5 * p1 / root + reach * (p2 + p1 * p3 / mu) / root,  # C
            linear_error=reach / root,  # c
            gradient=energy * p1 / root,
            upper_gradient=p1,
            lower_gradient=p1 + (2 * p2 + 3 * top) * radius,
        )

    def metric(self, problem, sizes, x, y) -> Metric:
        """Return the penalties' `Metric` at `x`; without `x` the worst, no diagonal."""
        diagonal, mu = None, np.exp(np.float64(self.low))
        if x is not None:
            assert problem.lower_public is not None
            ones = jax.tree.map(jnp.ones_like, y)
            pull = jax.grad(problem.lower_public, 1)
            _, diagonal = jax.jvp(lambda y: pull(x, y), (y,), (ones,))
            mu = jnp.exp(jnp.min(x))
        curvature = self.model.curvature * self.row_norm**2
        energy = self._solution(mu)[2]
        return Metric(diagonal, mu, Spectrum(1.0, 1 + curvature / mu), energy)

    @property
    def second_order(self) -> SecondOrderConstants:
        r"""`SecondOrderConstants` of the paper that hold on the whole box.

        $\beta_{gxy} = e^u r$, $C_{gxy} = e^u$, $M_{gyy} = e^u$, $M_{gxy} = e^u r$;
        half of $p_2 R^2$ is the spread of a record's Hessian, which is semidefinite.
        """
        mu, top = math.exp(self.low), math.exp(self.high)  # the worst x
        slope, radius, _ = self._solution(np.float64(mu))
        p1, p2 = slope * self.row_norm, self.model.curvature * self.row_norm**2
        return SecondOrderConstants(
            strong_convexity=mu,
            solution_radius=radius,
            upper_x=0.0,
            upper_y=p1,
            upper_xx=0.0,
            upper_xy=0.0,
            upper_yy=p2,
            lower_y=max(p1, top * radius),
            lower_xy=top * radius,
            lower_yy=p2 + top,
            lower_xy_in_x=top * radius,
            lower_yy_in_x=top,
            lower_xy_in_y=top,
            lower_yy_in_y=self.model.third * self.row_norm**3,
            lower_y_spread=p1,
            lower_xy_spread=0.0,
            lower_yy_spread=p2 / 2,
            per_record=True,
        )

    @property
    def largest_loss(self) -> float:
        """Bound on an upper record's loss at margin 0; its range comes on top."""
        return self.model.largest

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Tuple of one sentence: the proved constants, and what they rest on."""
        mu, model = math.exp(self.low), self.model
        slope, radius, _ = self._solution(np.float64(mu))
        return (
            f"proved for {model} on rows shortened to norm {self.row_norm:.6g} and "
            f"log-penalties in [{self.low:.6g}, {self.high:.6g}]: slope <= "
            f"{slope:.6g}, curvature <= {model.curvature:.6g}, third derivative <= "
            f"{model.third:.6g} and <= {model.concordance:.6g} times the curvature, "
            f"strong convexity >= {mu:.6g}, lower solutions within {radius:.6g} of the "
            "origin",
        )

    def _solution(self, mu: Any) -> tuple[Any, Any, Any]:
        """Return bounds on the loss's slope, the solution's norm, its weighted norm."""
        module, energy = module_of(mu), (2 * self.model.start) ** 0.5
        radius = module.inf + 0 * mu  # of the dtype of mu
        slope = self.model.slope(radius)
        for _ in range(_REFINEMENTS):
            radius = module.minimum(slope * self.row_norm / mu, energy / mu**0.5)
            slope = self.model.slope(self.row_norm * radius)
        by_slope = slope * self.row_norm / mu**0.5
        return slope, radius, module.minimum(by_slope, energy)
