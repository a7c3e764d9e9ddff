r"""Sensitivity of a resolvent that is computed inexactly.

The resolvent of an operator $F$ at $v$ solves $\langle F(u) + \lambda (u - v), w - u
\rangle \ge 0$ for all $w$ in a set. It is no sum over records, but every step of a
contraction towards it moves by a bounded amount, and so does the exact solution if
the operator is monotone. Rounding is part of the bound. Everything here is known before
any data is seen.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _checks
from .._checks import Number
from ..bilevel.certificates.sensitivities import UNITS, units_of
from ..privacy.exact.floats import check_rounding, unit_roundoff
from ..privacy.exact.grid import ROUNDED_BITS
from ..privacy.per_example.clipping import Basis, Precision
from ..privacy.per_example.factored import GROUP
from ..privacy.sampling.base import Batch
from ..sets import Ball, Box, Simplex, moves_by_entropy, parts
from .problem import AbstractVariationalInequality

Inner = Literal["picard", "operator_extrapolation"]

OWNER = "InexactProximalPoint"
# Fractions of the sensitivity that rounding may add, and the inexact solution of the
# inner problem by operator extrapolation.
_ROUNDING, _SOLVE = 0.05, 0.1
# Sets whose projection is exact and nonexpansive, up to the rounding in the bound.
_SETS = (Ball, Box, Simplex)


@dataclasses.dataclass(frozen=True)
class Resolvent:
    """Approximate resolvent, and what is known about it before any data is seen."""

    problem: AbstractVariationalInequality  # with its constants
    clip_norm: Number  # C, of one record's operator
    strength: Number  # lambda
    inner: Inner  # the inner solver
    steps: int  # N, its fixed number of steps
    dimension: int  # at least the number of coordinates of a point
    rows: int  # the most records that a batch holds
    denominator: float  # m, what sums over a batch are divided by

    @property
    def _one_step(self) -> bool:
        return self.inner == "picard" and self.steps == 1

    @property
    def basis(self) -> Basis:
        """Basis: clipping for one step of Picard's iteration, else constants."""
        return Basis.CLIPPED if self._one_step else Basis.CONSTANTS

    @property
    def _fullest(self) -> float:
        """Largest number of records of a batch, over the denominator of its sum."""
        return max(1.0, self.rows / self.denominator)

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of a batch's operator with the public one."""
        records = self.problem.constant("lipschitz") * self._fullest
        return records + self.problem.constant("public_lipschitz")

    @property
    def contraction(self) -> Number:
        r"""Contraction $q = L / \lambda$ of a step of Picard's iteration."""
        return self.lipschitz / self.strength

    def contribution(self, dtype: DTypeLike, precision: Precision) -> Number:
        r"""Return half of how far replacing one record moves the computed resolvent.

        With $\omega$ a bound on the rounding of a step to first order in the unit
        roundoff, $N$ steps of Picard's iteration have

        $$\frac{s}{2} = \Bigl(\frac{C}{\lambda m} + 2 \omega\Bigr) \sum_{j < N} q^j,$$

        since neighbours $u, u'$ move apart by a nonexpansive projection of $F_B(u) -
        F_{B'}(u')$ over $\lambda$: $2 C / m$ for the record, $L \|u - u'\|$ for all
        others. By operator extrapolation, the exact solutions are $2 M / (\lambda m)$
        apart by strong monotonicity, and the computed ones within $\zeta$ of them:

        $$\frac{s}{2} = \frac{M}{\lambda m} + 2 \zeta.$$

        A record less moves the value by $s / 2$ at most. The precision `"grid"` adds
        the rounding of the value to a grid.
        """
        share = self._norm / self.strength / self.denominator
        if self.inner == "picard":
            ratio = 0.0 if self._one_step else self.contraction
            value = (share + 2 * self.step_rounding(dtype)) * _series(ratio, self.steps)
        else:
            value = share + 2 * (self.solve_error() + self.solve_rounding(dtype))
        if precision == "grid":
            value = value * (1 + 2 * math.sqrt(self.dimension) * 2.0**-ROUNDED_BITS)
        return value

    def solve_error(self) -> Number:
        r"""Bound the distance of operator extrapolation from the solution.

        $\zeta = \sqrt2\, \theta^{N/2} \min(D, M / \lambda)$ with $\theta = (1 +
        \lambda / (L + \lambda))^{-1}$.

        References:
            Kotsalis, Lan and Li, "Simple and optimal methods for stochastic variational
            inequalities, I: operator extrapolation", 2022; constants derived anew.
        """
        first = self._largest / self.strength
        least = jnp.minimum if isinstance(first, jax.Array) else min
        start = least(first, self.problem.w_set.diameter)
        return math.sqrt(2) * self.extrapolation ** (self.steps / 2) * start

    @property
    def extrapolation(self) -> Number:
        r"""Contraction $\theta$ of squared distances by extrapolation."""
        return 1 / (1 + self.strength / (self.lipschitz + self.strength))

    @property
    def distance(self) -> Number:
        r"""Bound on the inner solver's error: $q^N M / \lambda$ or $\zeta$."""
        if self.inner != "picard":
            return self.solve_error()
        return self.contraction**self.steps * self._largest / self.strength

    @property
    def accuracy(self) -> Number:
        r"""Accuracy $\nu$: the inner inequality holds up to it at the last step."""
        diameter = self.problem.w_set.diameter
        if self.inner == "picard":
            return self._largest * diameter * self.contraction**self.steps
        slope = self.lipschitz * diameter + self._largest + 2 * self.strength * diameter
        return slope * self.distance

    def step_rounding(self, dtype: DTypeLike) -> Number:
        r"""Return $\omega$, the rounding of $\Pi_W(v - (F_B(u) + P(u)) / \lambda)$."""
        moved = self._largest / self.strength
        operator = self._operator_rounding(dtype) / self.strength
        return operator + self._projection_rounding(dtype, moved)

    def solve_rounding(self, dtype: DTypeLike) -> Number:
        r"""Bound how far all rounding moves the end of operator extrapolation.

        Operators off by $\epsilon$ and points by $\pi$ in every step add up to $(4 g
        \epsilon + 8 \pi) / (1 - \sqrt\theta)$ with the step size $g$, because the
        root of the method's potential is a norm up to constants and contracts by
        $\sqrt\theta$.
        """
        unit = unit_roundoff(dtype)
        smoothness = self.lipschitz + self.strength
        step = 1 / (2 * smoothness)
        pull = self.strength * self.problem.w_set.diameter
        operator = 4 * self._operator_rounding(dtype) + 20 * unit * pull
        point = self._projection_rounding(dtype, 3 * step * (self._largest + pull))
        return (4 * step * operator + 8 * point) / (1 - self.extrapolation**0.5)

    @property
    def largest_clip(self) -> Number:
        """Clip norm of operators: never below a bound that privacy rests on."""
        if self.inner == "picard":
            return self.clip_norm
        return jnp.maximum(self.clip_norm, self.problem.constant("bound"))

    @property
    def _norm(self) -> Number:
        """Norm of one record's operator in the sensitivity: $C$ or $M$."""
        picard = self.inner == "picard"
        return self.clip_norm if picard else self.problem.constant("bound")

    @property
    def _largest(self) -> Number:
        """Largest norm of a batch's operator with the public one."""
        return self._norm * self._fullest + self.problem.constant("public_bound")

    def _operator_rounding(self, dtype: DTypeLike) -> Number:
        """Bound the rounding of operators, of their clipped mean and of the sum.

        Neighbours of a single step read the same point, where all records but one have
        the same computed operators: then only sums and means differ by their rounding.
        """
        unit, public = unit_roundoff(dtype), self.problem.constant("public_bound")
        records = self._largest - public
        if self._one_step:
            return unit * (2 * records + 3 * self._largest)
        mean = 2 * units_of(self.problem) + self.dimension + 32 + GROUP + 8
        return unit * (mean * records + UNITS * public + 3 * self._largest)

    def _projection_rounding(self, dtype: DTypeLike, moved: Number) -> Number:
        """Bound the rounding of a step of length `moved`, and of its projection.

        The threshold of a simplex is a sum over all coordinates.
        """
        units = UNITS + self.dimension**1.5
        return unit_roundoff(dtype) * units * (2 * self.problem.w_set.reach + moved)

    def check(self) -> None:
        """Refuse problems without a known sensitivity; reads no number of the solver.

        Raises:
            ValueError: An unbounded set, one with another projection than the
                library's, or a missing constant.
        """
        for part in parts(self.problem.w_set):
            bounded = not _checks.concrete(part.reach) or part.reach < math.inf
            # Only these types: a subclass may project otherwise.
            projects = type(part) in _SETS and not moves_by_entropy(part)
            if not projects or not bounded:
                raise ValueError(
                    f"{OWNER}: the set must be a bounded Ball, Box or Simplex without "
                    f"entropy=True, got {part}."
                )
        needed = ["public_bound"]
        if not self._one_step:
            needed += ["lipschitz", "public_lipschitz"]
        if self.inner != "picard":
            needed += ["bound"]
        for name in needed:
            self.problem.constant(name)

    def check_shapes(self, batch: Batch, size: int) -> None:
        """Refuse a batch, or a point of `size` coordinates, other than planned.

        Raises:
            ValueError: The batch has more rows or another denominator, or the point
                more coordinates.
        """
        rows = _checks.leading_axis("records", batch.records)
        rows = rows if batch.size is None else batch.size
        if batch.denominator != self.denominator or rows > self.rows:
            raise ValueError(
                f"{OWNER}: planned for at most {self.rows} rows over "
                f"{self.denominator}, but a batch has {rows} over {batch.denominator}."
            )
        if size > self.dimension:
            raise ValueError(
                f"{OWNER}: w0 has {size} coordinates. Give dimension={size}."
            )

    def check_numbers(self, dtype: DTypeLike) -> None:
        """Refuse a plan whose inner solver does not converge or rounds too coarsely.

        Nothing is refused inside a program, where numbers are not known.

        Raises:
            ValueError: Picard's iteration does not contract, operator extrapolation is
                clipped below the bound or has too few steps, or rounding adds more than
                5 % to the sensitivity.
        """
        farthest = self.problem.w_set.reach + self._largest / self.strength
        if not _checks.concrete(farthest):
            return
        share = self._norm / self.strength / self.denominator
        if self.inner == "picard":
            added = 2 * self.step_rounding(dtype)
            if not self._one_step and self.contraction >= 1:
                raise ValueError(
                    f"{OWNER}: Picard's iteration needs a strength above the Lipschitz "
                    f"constant {self.lipschitz:.3g}, got strength={self.strength:.3g}."
                )
        else:
            self._check_extrapolation(share)
            added = 2 * self.solve_rounding(dtype)
        if not float(farthest) ** 2 < float(jnp.finfo(dtype).max) / 4:
            raise ValueError(
                f"{OWNER}: norms of {farthest:.3g} overflow {jnp.dtype(dtype).name}. "
                "Change the units of the problem."
            )
        check_rounding(
            OWNER,
            "roundings of a resolvent",
            added,
            share,
            dtype,
            allowed=_ROUNDING,
            remedy=f"use a smaller set, or a dimension= below {self.dimension} if w0 "
            "has fewer coordinates",
        )

    def _check_extrapolation(self, share: Number) -> None:
        bound = self.problem.constant("bound")
        if self.clip_norm < bound:
            raise ValueError(
                f"{OWNER}: clip_norm must be {bound:.3g} at least, got "
                f"{self.clip_norm:.3g}."
            )
        if self.solve_error() > _SOLVE * share:
            excess = math.log(self.solve_error() / (_SOLVE * share))
            more = math.ceil(-2 * excess / math.log(self.extrapolation))
            raise ValueError(
                f"{OWNER}: {self.steps} steps of operator extrapolation leave an error "
                f"of {self.solve_error():.2g}. Give inner_steps={self.steps + more}."
            )


def _series(ratio: Number, count: int) -> Number:
    r"""Return $\sum_{j < N} q^j$, for every $q$."""
    total: Number = 0.0
    for _ in range(count):
        total = 1 + ratio * total
    return total
