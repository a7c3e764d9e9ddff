"""The score of a one-level problem: its mean loss."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..clipping import Basis, clipped_mean
from ..privacy.ledger import RECORDS
from ..problems import sensitivities
from ..problems.finite_sum import FiniteSum
from ..samplers.base import AbstractPotential, AbstractSumPotential
from .base import AbstractScore, Facts, batched, check_error


@dataclasses.dataclass(frozen=True)
class MeanLoss(AbstractScore):
    r"""The objective of a one-level problem.

    With a range $B$ every loss is clipped to $[0, B]$, so that one record moves the
    mean by less than $B / n$ whatever the loss is. Otherwise $G$, declared, bounds the
    difference between two points by $G D$.

    Args:
        problem: A `FiniteSum`.
        measure: As in `AbstractScore`.
        sizes: The planned number of records.
        clip_range: $B$, or `None`.
    """

    clip_range: Any = None

    def facts(self, dtype: Any) -> Facts:
        """One record's share is $B / n$ or $G D / n$, as a slope $G / n$."""
        constant, n = self.problem.lipschitz, self.sizes
        unit = float(jnp.finfo(dtype).eps) / 2
        clipped = self.measure == "spread" and self.clip_range is not None
        reach = self.clip_range if clipped else self._declared() * self._diameter()
        if self.measure == "slope":
            share, rounding = constant / n, 2 * sensitivities.UNITS * unit * reach
        else:
            # Clipped values lie on a grid; the mean, its multiple and the draw round.
            share, rounding = reach * (1 + 2.0**-20) / n, 0.0
            check_error(4 * unit * reach, 2 * share, dtype, "use fewer records")
            share += 2 * 4 * unit * reach
        assumptions: tuple[str, ...] = ()
        if not clipped:
            assumptions = (
                f"declared: the loss of every possible record is {constant:.6g}-"
                "Lipschitz on the set, and computed to "
                f"{sensitivities.UNITS} units of roundoff of its range there",
            )
        # A public term may be as steep as it likes.
        public, smoothness = self.problem.public is not None, self.problem.smoothness
        return Facts(
            {RECORDS: share},
            Basis.CLIPPED if clipped else Basis.CONSTANTS,
            math.inf if constant is None or public else constant,
            math.inf if public or smoothness is None else smoothness,
            rounding=rounding,
            num_terms=self.sizes,
            term_lipschitz=None if public else constant,
            assumptions=assumptions,
        )

    def potential(self, data: PyTree, start: PyTree) -> AbstractPotential:
        """A clipped mean for a spread, a sum of terms for a slope."""
        if self.measure == "slope":
            return _Terms(self.problem, data, self.sizes)
        if self.clip_range is not None:
            return _ClippedMean(
                self.problem, data, None, self.clip_range / 2, self.sizes
            )
        half = self._declared() * self._diameter()
        return _ClippedMean(self.problem, data, start, half, self.sizes)

    def _declared(self) -> float:
        if self.problem.lipschitz is None:
            raise ValueError(
                "FiniteSum: an exponential mechanism needs the range of the loss or "
                "its Lipschitz constant. Give ExponentialMechanism(clip_range=B), "
                "which clips losses to [0, B], or declare FiniteSum(lipschitz=G)."
            )
        return self.problem.lipschitz

    def _diameter(self):
        diameter = self.problem.w_set.diameter
        if isinstance(diameter, float) and math.isinf(diameter):
            raise ValueError(
                f"FiniteSum: w_set={self.problem.w_set} is unbounded, so that losses "
                "are; an exponential mechanism draws from a bounded set, such as "
                "dpbilevel.Ball(r)."
            )
        return diameter


class _ClippedMean(AbstractPotential):
    problem: FiniteSum
    data: PyTree
    reference: PyTree | None  # losses are clipped about the one here, or about the half
    half: Any
    n: int = eqx.field(static=True)

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        loss = self.problem.loss
        half = jnp.asarray(self.half)

        def centered(record):
            value = loss(x, record)
            if self.reference is None:
                return value - half.astype(value.dtype)
            return value - loss(self.reference, record)

        mean = clipped_mean(
            centered,
            self.data,
            clip_norm=half,
            denominator=float(self.n),
            precision="grid",
        )
        value = mean.raw.values()
        if self.problem.public is not None:
            value = value + self.problem.public(x)
        return value

    def many(self, xs: PyTree) -> Float[Array, " m"]:
        return batched(self, xs)


class _Terms(AbstractSumPotential):
    problem: FiniteSum
    data: PyTree
    num_terms: int = eqx.field(static=True)
    quadratic: float = 0.0

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        losses = jax.vmap(lambda record: self._loss(x, record))(self.data)
        return jnp.sum(losses) / self.num_terms

    def term(self, index: Int[Array, ""], x: PyTree) -> Float[Array, ""]:
        return self._loss(x, jax.tree.map(lambda v: v[index], self.data))

    def _loss(self, x, record):
        value = self.problem.loss(x, record)
        if self.problem.public is not None:
            value = value + self.problem.public(x)
        return jnp.where(jnp.isfinite(value), value, 0)
