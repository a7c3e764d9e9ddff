r"""Declared bounds on the functions of a bilevel problem, and what follows from them.

`Constants` chooses parameters. A certificate carries a guarantee: from it follow the
sensitivity of a hypergradient, and the numbers of steps that make its numerical error
a small part of that.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from typing_extensions import override

from ... import _checks
from ...core.levels import Sizes
from .fixed_count import Bounds, Metric

# Bounds on sums of records and a public term that must hold for a record alone.
_PER_RECORD = ("upper_x", "upper_y", "lower_xy", "lower_yy")


@dataclasses.dataclass(frozen=True)
class Constants:
    r"""Declared bounds on the functions of a bilevel problem.

    Used to choose step sizes, penalties and iteration counts by a theorem. The
    guarantee of the solvers that clip does not rest on them.

    Args:
        strong_convexity: $\mu_g$ of $g(x, \cdot)$.
        upper_lipschitz: $L_0^f$, the Lipschitz constant of $f$.
        upper_smoothness: $L_1^f$, that of its gradient.
        lower_lipschitz: $L_0^g$, that of $g(x, \cdot; z)$.
        lower_smoothness: $L_1^g$, that of its gradient.
        lower_hessian_lipschitz: $L_2^g$, that of its Hessian.
    """

    strong_convexity: float
    upper_lipschitz: float
    upper_smoothness: float
    lower_lipschitz: float
    lower_smoothness: float
    lower_hessian_lipschitz: float

    def __post_init__(self):
        _checks.positive("Constants", strong_convexity=self.strong_convexity)
        _checks.non_negative("Constants", **vars(self))

    @property
    def ell(self) -> float:
        """Largest of the constants, the strong convexity left out."""
        return max(v for name, v in vars(self).items() if name != "strong_convexity")

    @property
    def kappa(self) -> float:
        """Condition number: `ell` over `strong_convexity`."""
        return self.ell / self.strong_convexity


class AbstractCertificate(abc.ABC):
    """Bounds that hold for every record, from which sensitivities are proved.

    Hashable: a part of the problem that every program is compiled for.

    Attributes:
        varies: Whether the bounds depend on `x`.
        largest_loss: Bound on an upper record's loss beyond the range over which it
            varies.
    """

    varies: bool
    largest_loss: ClassVar[float] = 0.0

    @abc.abstractmethod
    def bounds(self, sizes: Sizes, x: PyTree | None = None) -> Bounds:
        """Return the `Bounds` at `x`, or for all x of the set.

        Args:
            sizes: The planned `Sizes`.
            x: The upper variable, released; by default the worst one is taken.

        Returns:
            Numbers on the host without `x`, arrays in its dtype with it.
        """

    def metric(self, problem: Any, sizes: Sizes, x: PyTree | None, y: PyTree) -> Metric:
        """Return the `Metric` in which the lower level is solved, by default Euclidean.

        Args:
            problem: The problem that holds the certificate.
            sizes: The planned sizes.
            x: The upper variable; `None` for the numbers of the worst one.
            y: A lower variable, for its shape.
        """
        bounds = self.bounds(sizes, x)
        ones = jax.tree.map(jnp.ones_like, y)
        return Metric(ones, 1.0, bounds.spectrum, bounds.solution_radius)

    @abc.abstractmethod
    def check(self, problem: Any) -> None:
        """Raise `ValueError` if the certificate is visibly for another problem."""

    def on_records_of(self, problem: Any) -> "AbstractCertificate":
        """Return the certificate for rows; by default raise for records of people.

        Args:
            problem: The problem, without a certificate.

        Raises:
            ValueError: It might not hold: the loss of a person without rows is 0.
        """
        if problem.unit is None:  # those of people, of whom each may have one row
            return self
        raise ValueError(
            f"per_person: {type(self).__name__} is declared for rows. Declare it for "
            "people, by dataclasses.replace(problem.per_person(...), constants=...)."
        )

    @property
    @abc.abstractmethod
    def second_order(self) -> "SecondOrderConstants":
        """`SecondOrderConstants` for all x and records, which theorems need."""

    @property
    @abc.abstractmethod
    def assumptions(self) -> tuple[str, ...]:
        """Tuple of sentences for the report: what the guarantee assumes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondOrderConstants(AbstractCertificate):
    r"""Declared bounds up to third derivatives, for every record and all $x \in X$.

    They hold for $\|y\| \le$ `solution_radius`, those of $\nabla_{yy} G$ for all $y$.
    $F$ and $G$ are the mean losses with their public terms, $f$ and $g$ the losses of
    one record. A `_spread` is half the largest distance between the values of two
    records, at most the largest norm of one: what all records have in common, and
    public terms, cancel between neighbours. Where it is omitted it is the bound on the
    whole.

    Rounding does not cancel. So `upper_x`, `upper_y`, `lower_xy` and `lower_yy` must
    bound the same derivative of every single record's loss too. Without a public term
    they do: a mean over copies of one record is its loss. With one you have to check
    it, and to declare it by `per_record` where a spread is smaller than the whole.

    Args:
        strong_convexity: $\mu_g$ of $G(x, \cdot)$.
        solution_radius: $r \ge \|y^*(x)\|$.
        upper_x: $L_{fx} \ge \|\nabla_x F\|$.
        upper_y: $L_{fy} \ge \|\nabla_y F\|$.
        upper_xx: $\beta_{fxx} \ge \|\nabla_{xx} F\|$.
        upper_xy: $\beta_{fxy} \ge \|\nabla_{xy} F\|$.
        upper_yy: $\beta_{fyy} \ge \|\nabla_{yy} F\|$.
        lower_y: $L_{gy} \ge \|\nabla_y g\|$, and of the gradient of the public term.
        lower_xy: $\beta_{gxy} \ge \|\nabla_{xy} G\|$.
        lower_yy: $\beta_{gyy} \ge \|\nabla_{yy} G\|$.
        lower_xy_in_x: $M_{gxy}$, the Lipschitz constant of $\nabla_{xy} G$ in $x$.
        lower_yy_in_x: $M_{gyy}$, that of $\nabla_{yy} G$ in $x$.
        lower_xy_in_y: $C_{gxy}$, that of $\nabla_{xy} G$ in $y$.
        lower_yy_in_y: $C_{gyy}$, that of $\nabla_{yy} G$ in $y$.
        upper_x_spread: $L^d_{fx}$.
        upper_y_spread: $L^d_{fy}$.
        lower_y_spread: $L^d_{gy}$.
        lower_xy_spread: $\beta^d_{gxy}$.
        lower_yy_spread: $\beta^d_{gyy}$.
        per_record: Whether, beside public terms, the four bounds above hold for every
            single record too.
        terms: The problem's `upper`, `lower`, `upper_public` and `lower_public`, if the
            constants are to be refused for any others.

    Privacy:
        A guarantee that rests on them is void if a single possible record, also one
        whose numbers are all zero, violates one. A loss that is not finite for some
        record violates them.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", Assumptions 2.1 and 2.2.
    """

    strong_convexity: float
    solution_radius: float
    upper_x: float
    upper_y: float
    upper_xx: float
    upper_xy: float
    upper_yy: float
    lower_y: float
    lower_xy: float
    lower_yy: float
    lower_xy_in_x: float
    lower_yy_in_x: float
    lower_xy_in_y: float
    lower_yy_in_y: float
    upper_x_spread: float | None = None
    upper_y_spread: float | None = None
    lower_y_spread: float | None = None
    lower_xy_spread: float | None = None
    lower_yy_spread: float | None = None
    per_record: bool = False
    terms: tuple[Any, ...] | None = dataclasses.field(default=None, repr=False)
    varies: ClassVar[bool] = False

    def __post_init__(self):
        owner = "SecondOrderConstants"
        _checks.positive(owner, strong_convexity=self.strong_convexity)
        _checks.positive(owner, solution_radius=self.solution_radius)
        for name, value in self._numbers().items():
            whole = name.removesuffix("_spread")
            value = getattr(self, whole) if value is None else value
            _checks.non_negative(owner, **{name: value})
            # Plain numbers: they are compared and hashed.
            object.__setattr__(self, name, float(value))
        if self.lower_yy < self.strong_convexity:
            raise ValueError(f"{owner}: lower_yy must be at least strong_convexity.")

    @property
    def upper_total(self) -> float:
        """Bound on the hypergradient's norm at every x, from the constants."""
        return self.upper_x + self.lower_xy * self.upper_y / self.strong_convexity

    @property
    def error_constant(self) -> float:
        r"""Bound on the hypergradient's error per distance of y from the solution.

        $$C = \beta_{fxy} + \frac{\beta_{fyy} \beta_{gxy}}{\mu} + L_{fy} \Bigl(
        \frac{C_{gxy}}{\mu} + \frac{C_{gyy} \beta_{gxy}}{\mu^2} \Bigr).$$

        References:
            Lowy and Liu, equation (11).
        """
        mu, cross = self.strong_convexity, self.lower_xy
        turned = self.lower_xy_in_y / mu + self.lower_yy_in_y * cross / mu**2
        return self.upper_xy + self.upper_yy * cross / mu + self.upper_y * turned  # C

    @property
    def sensitivity_constant(self) -> float:
        r"""Paper's $K$: its sensitivity for n records is 4 K / n; ours up to K / n.

        $$K = 2 \Bigl[ \frac{\beta_{fxy} L_{gy}}{\mu} + 2 \bar L + \frac{\beta_{gxy}
        \beta_{fyy} L_{gy}}{\mu^2} + \frac{L_{fy} C_{gxy} L_{gy}}{\mu^2} + \frac{L_{fy}
        \beta_{gxy} L_{gy} C_{gyy}}{\mu^3} + \frac{L_{fy} \beta_{gyy}
        \beta_{gxy}}{\mu^2} \Bigr]$$

        with the parts of $L_{gy}$ and $\beta_{gyy}$ that depend on records.

        References:
            Lowy and Liu, equation (12).
        """
        mu, cross = self.strong_convexity, self.lower_xy
        moved = self._spread("lower_y") / mu  # n d / 2
        return 2 * (
            self.upper_xy * moved
            + 2 * self.upper_total
            + cross * self.upper_yy * moved / mu
            + self.upper_y * self.lower_xy_in_y * moved / mu
            + self.upper_y * cross * moved * self.lower_yy_in_y / mu**2
            + self.upper_y * self._spread("lower_yy") * cross / mu**2
        )

    @property
    def smoothness(self) -> float:
        r"""Bound on the Lipschitz constant of the hypergradient in x.

        $$\beta_\Phi = \beta_{fxx} + \frac{2 \beta_{fxy} \beta_{gxy}}{\mu} +
        \frac{\beta_{gxy}^2 \beta_{fyy}}{\mu^2} + \frac{L_{fy} \beta_{gxy}}{\mu^2}
        \Bigl(M_{gyy} + \frac{C_{gyy} \beta_{gxy}}{\mu}\Bigr) + \frac{L_{fy} C_{gxy}
        \beta_{gxy}}{\mu^2} + \frac{L_{fy} M_{gxy}}{\mu}.$$

        References:
            Lowy and Liu, equation (28).
        """
        mu, moves = self.strong_convexity, self.lower_xy / self.strong_convexity
        slope = self.upper_y / mu
        return (
            self.upper_xx
            + 2 * self.upper_xy * moves
            + moves**2 * self.upper_yy
            + slope * moves * (self.lower_yy_in_x + self.lower_yy_in_y * moves)
            + slope * (self.lower_xy_in_y * moves + self.lower_xy_in_x)
        )

    def bounds(self, sizes: Sizes, x: PyTree | None = None) -> Bounds:
        r"""Return the `Bounds`, which are the same for all x.

        A replaced lower record changes $\nabla_y G$ by at most $2 L^d_{gy} / n_g$, so
        $y^*$ by at most $d = 2 L^d_{gy} / (\mu n_g)$. The hypergradient at the new
        data and solution differs by $C d$ through the solution, and at a fixed $y$
        through the two Hessian blocks:

        $$S_{low} = C d + L_{fy} \Bigl[ \frac{2 \beta_{gxy} \beta^d_{gyy}}{\mu^2 n_g} +
        \frac{2 \beta^d_{gxy}}{\mu n_g} \Bigr], \qquad S_{up} = \frac{2}{n_f} \Bigl(
        L^d_{fx} + \frac{\beta_{gxy} L^d_{fy}}{\mu} \Bigr).$$

        A public term is the whole less a mean over records, so at most twice the bound
        that holds for both: the parts of a sum are at most three times its bound. For
        $\|y\| \le 3 r$ the gradient of a record is at most $L_{gy} + 2 \beta_{gyy} r$,
        that of the public term $L_{gy} + 4 \beta_{gyy} r$.
        """
        mu, cross = self.strong_convexity, self.lower_xy
        moved = 2 * self._spread("lower_y") / (mu * sizes.lower)  # d
        hessian = cross * self._spread("lower_yy") / mu**2  # through v
        blocks = hessian + self._spread("lower_xy") / mu
        record = self._spread("upper_x") + cross * self._spread("upper_y") / mu
        return Bounds(
            strong_convexity=mu,
            smoothness=self.lower_yy,
            solution_radius=self.solution_radius,
            solution_shift=moved,
            upper=2 * record / sizes.upper,
            lower=self.error_constant * moved + 2 * self.upper_y * blocks / sizes.lower,
            lower_error=self.error_constant,
            linear_error=cross / mu,
            gradient=self.upper_total,
            upper_gradient=self.upper_y,
            lower_gradient=2 * self.lower_y + 6 * self.lower_yy * self.solution_radius,
            parts=3.0,
        )

    def check(self, problem: Any) -> None:
        """Raise unless functions are `terms` and spreads fit the public terms.

        A spread that is smaller than the whole needs `per_record` beside public terms.
        """
        for name in () if self.per_record else _PER_RECORD:
            public = f"{name.split('_')[0]}_public"
            beside = getattr(problem, public) is not None
            if beside and self._spread(name) < getattr(self, name):
                raise ValueError(
                    f"SecondOrderConstants: with {public}, {name} bounds no record. "
                    f"Leave out {name}_spread, or declare per_record=True if it does."
                )
        if self.terms is not None:
            check_terms("SecondOrderConstants", problem, self.terms)

    def _numbers(self) -> dict[str, Any]:
        others = ("terms", "per_record")
        return {k: v for k, v in vars(self).items() if k not in others}

    @property
    @override
    def second_order(self) -> "SecondOrderConstants":
        return self

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Tuple of one sentence, which lists every declared constant."""
        declared = ", ".join(f"{k} = {v:.6g}" for k, v in self._numbers().items())
        also = ", of single records too" if self.per_record else ""
        start = "declared for every possible record and all x of the set"
        return (f"{start}{also}: {declared}",)

    def _spread(self, name: str) -> float:
        return getattr(self, f"{name}_spread")


def terms_of(problem: Any) -> tuple[Any, ...]:
    """Return a tuple of a `BilevelProblem`'s losses and public terms."""
    return problem.upper, problem.lower, problem.upper_public, problem.lower_public


def check_terms(owner: str, problem: Any, terms: tuple[Any, ...]) -> None:
    """Raise `ValueError` if the certificate is for a problem with other terms."""
    if terms_of(problem) != terms:
        raise ValueError(
            f"{owner}: a loss or a public term was exchanged. Declare constants anew."
        )
