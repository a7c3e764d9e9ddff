r"""Sensitivity of a resolvent that is computed inexactly.

The resolvent of an operator $F$ at $v$ solves $\langle F(u) + \lambda (u - v), w - u
\rangle \ge 0$ for all $w$ in a set. It is no sum over records, but every step of a
contraction towards it moves by a bounded amount. Rounding is part of the bound.
Everything here is known before any data is seen.
"""

import dataclasses
import math

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

OWNER = "InexactProximalPoint"
_ROUNDING = 0.05  # the fraction of the sensitivity that rounding may add
# Sets whose projection is exact and nonexpansive, up to the rounding in the bound.
_SETS = (Ball, Box, Simplex)


@dataclasses.dataclass(frozen=True)
class Resolvent:
    """Plan of a resolvent by Picard's iteration: its sensitivity and public bounds."""

    problem: AbstractVariationalInequality  # with its constants
    clip_norm: Number  # C, of one record's operator
    strength: Number  # lambda
    steps: int  # N, the fixed number of steps of the iteration
    dimension: int  # at least the number of coordinates of a point
    rows: int  # the most records that a batch holds
    denominator: float  # m, what sums over a batch are divided by

    @property
    def basis(self) -> Basis:
        """Basis: clipping for one step, else constants."""
        return Basis.CLIPPED if self.steps == 1 else Basis.CONSTANTS

    @property
    def _fullest(self) -> float:
        """Most records of a batch over the denominator of its sum, at least 1."""
        return max(1.0, self.rows / self.denominator)

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of a batch's operator plus the public one."""
        records = self.problem.constant("lipschitz") * self._fullest
        return records + self.problem.constant("public_lipschitz")

    @property
    def contraction(self) -> Number:
        """Contraction factor of a step: `lipschitz` over `strength`."""
        return self.lipschitz / self.strength

    def contribution(self, dtype: DTypeLike, precision: Precision) -> Number:
        r"""Return half a bound on how far a replaced record moves the resolvent.

        With $\omega$ a bound on the rounding of a step to first order in the unit
        roundoff, $N$ steps have

        $$\frac{s}{2} = \Bigl(\frac{C}{\lambda m} + 2 \omega\Bigr) \sum_{j < N} q^j,$$

        since neighbours $u, u'$ move apart by a nonexpansive projection of $F_B(u) -
        F_{B'}(u')$ over $\lambda$: $2 C / m$ for the record, $L \|u - u'\|$ for all
        others. A record less moves the value by $s / 2$ at most. The precision `"grid"`
        adds the rounding of the value to a grid.
        """
        ratio = 0.0 if self.steps == 1 else self.contraction
        series: Number = 0.0
        for _ in range(self.steps):
            series = 1 + ratio * series
        moved = self.clip_norm / self.strength / self.denominator
        value = (moved + 2 * self.step_rounding(dtype)) * series
        if precision == "grid":
            value = value * (1 + 2 * math.sqrt(self.dimension) * 2.0**-ROUNDED_BITS)
        return value

    @property
    def distance(self) -> Number:
        """Bound on the distance of the last iterate from the exact resolvent."""
        return self.contraction**self.steps * self._largest / self.strength

    @property
    def accuracy(self) -> Number:
        """Bound on how far the last iterate violates the resolvent's inequality."""
        diameter = self.problem.w_set.diameter
        return self._largest * diameter * self.contraction**self.steps

    def step_rounding(self, dtype: DTypeLike) -> Number:
        """Return a bound on the rounding error of one step of the iteration.

        To first order in the unit roundoff it bounds how far one computed step is from
        the exact one. It counts the operators of records, exact to 32 units, the margin
        of the clip, sums, the public operator, the step and the projection.
        """
        unit, public = unit_roundoff(dtype), self.problem.constant("public_bound")
        records = self._largest - public
        if self.steps == 1:
            # Neighbours read the same point, where all records but one have the same
            # computed operators: only sums and means differ by their rounding.
            operator = unit * (2 * records + 3 * self._largest)
        else:
            mean = 2 * units_of(self.problem) + self.dimension + 32 + GROUP + 8
            operator = unit * (mean * records + UNITS * public + 3 * self._largest)
        # The threshold of a simplex is a sum over all coordinates.
        units = UNITS + self.dimension**1.5
        moved = self._largest / self.strength
        projection = unit * units * (2 * self.problem.w_set.reach + moved)
        return operator / self.strength + projection

    @property
    def _largest(self) -> Number:
        """Largest norm of a batch's operator plus the public one."""
        return self.clip_norm * self._fullest + self.problem.constant("public_bound")

    def check(self) -> None:
        """Raise `ValueError` for problems without a known sensitivity.

        The set may be unbounded or have another projection than the library's, or a
        constant may be missing. No number of the solver is read.
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
        if self.steps > 1:
            needed += ["lipschitz", "public_lipschitz"]
        for name in needed:
            self.problem.constant(name)

    def check_shapes(self, batch: Batch, size: int) -> None:
        """Raise `ValueError` for a batch or a number of coordinates beyond the plan."""
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
        """Raise `ValueError` if the iteration does not contract or rounds too coarsely.

        Rounding may add 5 % to the sensitivity. Nothing is refused inside a program,
        if numbers are not known.
        """
        farthest = self.problem.w_set.reach + self._largest / self.strength
        if not _checks.concrete(farthest):
            return
        if self.steps > 1 and self.contraction >= 1:
            raise ValueError(
                f"{OWNER}: Picard's iteration needs a strength above the Lipschitz "
                f"constant {self.lipschitz:.3g}, got strength={self.strength:.3g}."
            )
        if not float(farthest) ** 2 < float(jnp.finfo(dtype).max) / 4:
            raise ValueError(
                f"{OWNER}: norms of {farthest:.3g} overflow {jnp.dtype(dtype).name}. "
                "Change the units of the problem."
            )
        check_rounding(
            OWNER,
            "roundings of a resolvent",
            2 * self.step_rounding(dtype),
            self.clip_norm / self.strength / self.denominator,
            dtype,
            allowed=_ROUNDING,
            remedy=f"use a smaller set, or a dimension= below {self.dimension} if w0 "
            "has fewer coordinates",
        )
