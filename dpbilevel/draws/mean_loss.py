r"""Scores of problems: their interface, how they are sealed, and `MeanLoss`.

The modules here read records: mean losses of clipped range, and objectives of two
levels whose sensitivity constants prove.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Number
from ..bilevel.certificates import sensitivities
from ..bilevel.problem import BilevelProblem
from ..onelevel.problem import FiniteSum
from ..privacy.exact.floats import all_finite, check_rounding, unit_roundoff
from ..privacy.per_example.clipping import Basis, clipped_mean, one_record, unsealed
from ..privacy.per_example.structure import rowwise
from ..privacy.queries import RECORDS
from ..privacy.records.rows import unpacked
from ..privacy.sampling.base import Batch, FullBatch
from .mechanisms import BoundedScore, Measure
from .samplers.base import AbstractPotential, AbstractSumPotential, Regularity

DrawProblem = BilevelProblem | FiniteSum

# The fractions that errors of solves and rounding may add to a spread.
SOLVES, ROUNDING = 0.01, 0.05
# A public term is cut at this many times the range of the losses.
_PUBLIC = 8
_GROUP = 64  # values that are added in any order
# A declared range is enforced beyond it by more than rounding: at the limit itself
# clipping would cut derivatives, too.
_BEYOND = 1 + 2.0**-10


@dataclasses.dataclass(frozen=True)
class AbstractScore(abc.ABC):
    """Score of a problem, with one measure of its sensitivity."""

    problem: Any
    measure: Measure  # as in `BoundedScore`
    sizes: Any
    basis: ClassVar[Basis] = Basis.CONSTANTS  # of the contributions

    @abc.abstractmethod
    def contributions(self, dtype: DTypeLike) -> dict[str, Any]:
        """Return a dict by role of one record's contribution, as in `BoundedScore`.

        A spread counts the errors of scores that are computed in `dtype`; one that is
        too coarse is refused.
        """

    @abc.abstractmethod
    def regularity(self, dtype: DTypeLike, dimension: int) -> Regularity:
        """Return the `Regularity` of the score, besides convexity. On the host."""

    @property
    @abc.abstractmethod
    def assumptions(self) -> tuple[str, ...]:
        """Tuple of sentences for the report: what the guarantee assumes."""

    @abc.abstractmethod
    def potential(self, data: PyTree, start: PyTree) -> AbstractPotential:
        """Return the score as an unsealed `AbstractPotential`. NON-PRIVATE."""

    def bounded(
        self, data: PyTree, start: PyTree, dtype: DTypeLike | None = None
    ) -> BoundedScore:
        """Return the score sealed as a `BoundedScore`; `dtype` is the planned one."""
        if dtype is None:
            dtype = jnp.result_type(*jax.tree.leaves(start))
        contribution = sum(self.contributions(dtype).values())
        raw = self.potential(data, start)
        return BoundedScore(raw, contribution, self.measure, self.basis)


def check_error(error: Any, spread: Any, dtype: DTypeLike, remedy: str) -> None:
    """Refuse a score whose error, times four, exceeds 6 % of a record's effect."""
    owner, what = "ExponentialMechanism", "errors of computed scores"
    limit: Any = {"allowed": SOLVES + ROUNDING, "remedy": remedy}
    check_rounding(owner, what, 4 * error, spread, dtype, **limit)


def check_loss_dtype(loss: Callable, points: tuple, records: PyTree) -> None:
    """Refuse a loss with a coarser dtype at `(*points, record)` than the points."""
    dtype = jax.eval_shape(loss, *points, one_record(records)).dtype
    planned = jnp.result_type(*jax.tree.leaves(points))
    if jnp.finfo(dtype).bits < jnp.finfo(planned).bits:
        raise ValueError(f"the loss is {dtype}, coarser than the planned {planned}.")


@dataclasses.dataclass(frozen=True)
class MeanLoss(AbstractScore):
    r"""Score of a one-level problem: the value of its objective.

    With a range $B$ every loss is clipped to $[0, B]$, so that one record moves the
    mean by less than $B / n$ whatever the loss is. Otherwise $G$, declared, bounds the
    difference between two points by $G D$.
    """

    clip_range: Any = None  # B, or `None`

    def contributions(self, dtype: DTypeLike) -> dict[str, Any]:
        """Return a dict of a record's contribution, by clip range or constants."""
        reach = self._reach()
        if self.measure == "slope":
            return {RECORDS: self._slope() / self.sizes}
        public = self.problem.public is not None
        return {RECORDS: spread_of(reach, self.sizes, dtype, public)[0]}

    @override
    def regularity(self, dtype: DTypeLike, dimension: int) -> Regularity:
        problem, reach = self.problem, self._reach()
        public = problem.public is not None
        error = rounding = gradient_error = 0.0
        if self.measure == "slope":
            # Two losses, and their sum in groups; gradients add up in any order.
            unit, losses = unit_roundoff(dtype), 2 * sensitivities.units_of(problem)
            rounding = (losses + _roundings(self.sizes)) * unit * reach
            gradient_error = (losses + self.sizes) * unit * self._declared()
        else:
            error = spread_of(reach, self.sizes, dtype, public)[1]
        # No constant bounds the slope of a public term.
        lipschitz = None if public else problem.lipschitz
        smoothness = None if public else problem.smoothness
        return Regularity(
            dimension,
            math.inf if lipschitz is None else lipschitz,
            smoothness=math.inf if smoothness is None else smoothness,
            error=float(error),
            gradient_error=float(gradient_error),
            rounding=float(rounding),
            num_terms=self.sizes,
            term_lipschitz=lipschitz,
        )

    @property
    @override
    def basis(self) -> Basis:
        return Basis.CLIPPED if self._clipped else Basis.CONSTANTS

    @property
    @override
    def assumptions(self) -> tuple[str, ...]:
        if self._clipped:
            return ()
        lipschitz = (
            f"declared: the loss of every possible record is {self._declared():.6g}-"
            "Lipschitz on the set, and computed to "
            f"{sensitivities.UNITS} units of roundoff of its range there"
        )
        if self.measure != "slope" or self._slope() == self._declared():
            return (lipschitz,)
        spread = (
            "declared: the difference of the losses of any two possible records is "
            f"{2 * self._slope():.6g}-Lipschitz on the set"
        )
        return lipschitz, spread

    @property
    def _clipped(self) -> bool:
        return self.measure == "spread" and self.clip_range is not None

    def _reach(self) -> Number:
        """Return a bound on a loss's change over the set: clip range or constants."""
        if self._clipped:
            return self.clip_range
        if self.measure == "slope" and self.problem.public is not None:
            raise ValueError(
                "FiniteSum: a regularized draw takes no public term; give regularizer=."
            )
        declared, diameter = self._declared(), self.problem.w_set.diameter
        if isinstance(diameter, float) and math.isinf(diameter):
            got = f"w_set={self.problem.w_set}"
            raise ValueError(f"FiniteSum: a draw needs a bounded set, got {got}.")
        return declared * diameter

    def potential(self, data: PyTree, start: PyTree) -> AbstractPotential:
        """Return the unsealed mean loss: clipped for a spread, else a sum of terms."""
        batch = Batch(*unpacked(data), FullBatch().denominator(self.sizes))
        check_loss_dtype(self.problem.loss, (start,), batch.records)
        reach = self._reach()
        if self.measure == "slope":
            _checks.leading_axis("data", batch.records)
            assert batch.mask is None  # draws on continuous sets are of replace-one
            return _Terms(self.problem, batch.records, start, reach, self.sizes)
        half = reach / 2 if self._clipped else reach
        return _ClippedMean(self.problem, batch, start, half, not self._clipped)

    def _declared(self) -> float:
        if self.problem.lipschitz is None:
            raise ValueError(
                "FiniteSum: a draw needs the range of the loss. Give "
                "FiniteSum(lipschitz=G) or ExponentialMechanism(..., clip_range=B)."
            )
        return self.problem.lipschitz

    def _slope(self) -> float:
        """Return half the Lipschitz constant of the difference of two losses."""
        spread, lipschitz = self.problem.lipschitz_spread, self._declared()
        return lipschitz if spread is None else spread


def spread_of(reach: Any, n: int, dtype: DTypeLike, public: bool) -> tuple[Any, Any]:
    """Return (a record's contribution to a clipped mean, the mean's own error).

    Losses are clipped to an interval of length `reach`; `public` is whether the mean
    has a public term, by `public_part`. A dtype that is too coarse is refused.
    """
    # Clipped values lie on a grid; the mean, its multiple and the draw round.
    rounding = 4 * unit_roundoff(dtype) * (1 + _PUBLIC * public) * reach
    contribution = reach * (1 + 2.0**-20) / n
    # The rounding of four scores is part of the contribution, as a spread is a single
    # contribution under add-or-remove-one.
    check_error(rounding, contribution, dtype, "use fewer records")
    return contribution + 4 * rounding, rounding + 2.0**-24 * reach


def public_part(
    public: Callable[[PyTree], Float[Array, ""]] | None,
    x: PyTree,
    start: PyTree,
    half: Float[Array, ""],
) -> Float[Array, ""]:
    """Return the public term minus its value at `start`, cut at a multiple of `half`.

    It reads no data, so that the cut costs no privacy. Without the cut a large term
    would decide how its sum with a mean loss is rounded. `half` the range is in the
    dtype of the result.
    """
    if public is None:
        return jnp.zeros_like(half)
    limit = _PUBLIC * half
    more = (public(x) - public(start)).astype(half.dtype)
    return jnp.clip(jnp.nan_to_num(more), -limit, limit)


def _sum(values: Float[Array, " n"]) -> Float[Array, ""]:
    """Sum an array in nested groups, so that few additions follow each other."""
    while len(values) > _GROUP:
        padded = jnp.pad(values, (0, -len(values) % _GROUP))
        groups = jnp.sum(padded.reshape(-1, _GROUP), axis=1)
        # Otherwise a compiler may add all of them in an order of its choice.
        values = jax.lax.optimization_barrier(groups)
    return jnp.sum(values)


def _roundings(n: int) -> int:
    """Return how many additions follow each other in `_sum`, at most."""
    count = 0
    while n > _GROUP:
        count, n = count + _GROUP, -(-n // _GROUP)
    return count + n


class _ClippedMean(AbstractPotential):
    problem: FiniteSum
    batch: Batch
    start: PyTree
    half: Any
    centered: bool = eqx.field(static=True)  # about the loss at the start

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        loss = self.problem.loss
        half = jnp.asarray(self.half)

        def value(record):
            at_x = loss(x, record)
            if self.centered:
                return at_x - loss(self.start, record)
            return at_x - half.astype(at_x.dtype)

        mean = clipped_mean(value, self.batch, clip_norm=half, precision="grid")
        total = unsealed(mean)
        public = self.problem.public
        return total + public_part(public, x, self.start, half.astype(total.dtype))


class _Terms(AbstractSumPotential):
    problem: FiniteSum
    data: PyTree
    start: PyTree
    half: Any  # how far a loss is from that at the start, by its constant
    num_terms: int = eqx.field(static=True)
    quadratic: float = 0.0

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        losses = jax.vmap(rowwise("FiniteSum", lambda z: self._loss(x, z)))(self.data)
        return _sum(losses) / self.num_terms

    def value_and_gradient(self, x: PyTree) -> tuple[Float[Array, ""], PyTree]:
        """Return value and gradient of a tangent below the mean loss, both finite.

        A record whose gradient is not finite has no slope, and a value lower by the
        most that its loss may fall.
        """

        def tangent(record):
            value, slope = jax.value_and_grad(self._loss)(x, record)
            finite = all_finite(slope)
            lower = value - jnp.asarray(self.half).astype(value.dtype)
            slope = jax.tree.map(lambda v: jnp.where(finite, v, 0), slope)
            return jnp.where(finite, value, lower), slope

        values, slopes = jax.vmap(rowwise("FiniteSum", tangent))(self.data)
        n = self.num_terms
        return _sum(values) / n, jax.tree.map(lambda v: jnp.sum(v, 0) / n, slopes)

    @override
    def term(self, index: Int[Array, ""], x: PyTree) -> Float[Array, ""]:
        return self._loss(x, jax.tree.map(lambda v: v[index], self.data))

    def _loss(self, x, record):
        value = self.problem.loss(x, record) - self.problem.loss(self.start, record)
        limit = jnp.asarray(_BEYOND * self.half).astype(value.dtype)
        return jnp.clip(jnp.where(jnp.isfinite(value), value, 0), -limit, limit)
