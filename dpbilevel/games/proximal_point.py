"""Noisy inexact proximal points, and resolvents sealed with a bound on one record.

The values computed inside are not private and stay there; what leaves is sealed.
"""

import dataclasses
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, Positive, check_fields
from ..bilevel.certificates.sensitivities import UNITS, common_dtype, wide
from ..core.descent import SkippedUpdates, add_scaled, finite_or
from ..core.loop import check_planned_dtype
from ..core.plan import least_multiplier
from ..privacy.budget import Neighbours
from ..privacy.exact.floats import all_finite, is_finite
from ..privacy.exact.grid import on_grid
from ..privacy.per_example import clipping
from ..privacy.per_example.clipping import Basis
from ..privacy.queries import RECORDS, AbstractCertifiedQuery, Costs, Query
from ..privacy.releases import CertifiedRelease, Release
from ..privacy.sampling.base import AbstractSampling, Batch
from ..privacy.sampling.fixed_size import FixedSize, SinglePass
from .base import AbstractSaddleSolver, Fields, cheapest, estimated_multiplier, integers
from .problem import AbstractVariationalInequality
from .resolvents import OWNER, Resolvent


@dataclasses.dataclass(frozen=True)
class ResolventQuery(AbstractCertifiedQuery):
    """Query of the approximate resolvent of a batch's operator, and its sensitivity.

    Privacy:
        One query, of sensitivity $s$ as in `Resolvent.contribution`. For one step of
        Picard's iteration it is enforced by clipping; for more it rests on the
        Lipschitz constants, and on operators exact to 32 units of roundoff. Steps are
        not private and are not returned.
    """

    resolvent: Resolvent  # what is computed, and its constants
    size: int  # the planned number of records
    sampling: AbstractSampling

    @override
    def costs(self, precision: clipping.Precision) -> Costs:
        resolvent, dtype = self.resolvent, jnp.result_type(float)
        resolvent.check()
        resolvent.check_numbers(dtype)
        contribution = resolvent.contribution(dtype, precision)
        query = Query.of_contribution(RECORDS, self.size, contribution, self.sampling)
        reach = _checks.number(resolvent.problem.w_set.reach)
        return Costs((query,), resolvent.basis, reach)

    def read(self, point, data, *, precision, key, index=None) -> clipping.Bounded:
        """Return a `Bounded`: a batch's resolvent at a released point, no noise yet.

        Records are read in the dtype of the point; one with an entry that is not finite
        contributes zero.

        Raises:
            ValueError: The point has several dtypes or more coordinates than planned,
                or the batch has more rows.
        """
        _checks.strict_floats(OWNER)
        batch = self.sampling.draw(data, self.size, key=key, index=index)
        resolvent, dtype = self.resolvent, common_dtype(point, OWNER)
        resolvent.check()
        resolvent.check_shapes(batch, optax.tree.size(point))
        # The bound includes floating-point sums, unless clipping enforces it.
        sums = precision if resolvent.basis is clipping.Basis.CLIPPED else "float"
        # All inner steps have the rows of one batch key. That is safe because operators
        # are cut to finite numbers, so that values are formed and no groups are summed.
        with jax.default_matmul_precision("highest"):
            value = approximate_resolvent(resolvent, batch, point, precision=sums)
        contribution = jnp.asarray(resolvent.contribution(dtype, precision), dtype)
        contribution = jax.lax.stop_gradient(contribution)
        if precision == "grid":
            value = on_grid(value, 2 * contribution)
        return clipping.Bounded(value, contribution, resolvent.basis)


def approximate_resolvent(
    resolvent: Resolvent,
    batch: Batch,
    centre: PyTree,
    precision: clipping.Precision = "float",
) -> PyTree:
    """Return a batch's approximate resolvent, or `centre`. NON-PRIVATE: not sealed."""
    problem = resolvent.problem
    dtype = common_dtype(centre, OWNER)
    records = wide(batch.records, dtype)
    mask = jax.vmap(all_finite)(records)  # other records contribute zero
    mask = mask if batch.mask is None else mask & batch.mask
    batch = dataclasses.replace(batch, records=records, mask=mask)

    def operator(u):
        fun, clip_norm = problem.saturated_operator(u), resolvent.clip_norm
        mean = clipping.clipped_mean(
            fun, batch, clip_norm=clip_norm, precision=precision
        )
        return optax.tree.add(clipping.unsealed(mean), _public(problem, u))

    value = _picard(resolvent, operator, centre)
    return optax.tree.where(all_finite(value), value, centre)  # which is public


def _public(problem, u: PyTree) -> PyTree:
    """Return the public operator, clipped to its declared bound."""
    value = problem.public_operator(u)
    if problem.public is None:
        return value
    value = jax.tree.map(lambda v: jnp.where(is_finite(v), v, 0), value)
    bound = jnp.asarray(problem.constant("public_bound"), common_dtype(value, OWNER))
    return optax.projections.projection_l2_ball(value, bound)


def _picard(resolvent: Resolvent, operator, centre: PyTree) -> PyTree:
    """Return the point after the fixed number of Picard steps from `centre`."""
    project = resolvent.problem.w_set.project

    def step(_, u):
        return project(add_scaled(centre, -1 / resolvent.strength, operator(u)))

    if resolvent.steps == 1:
        return step(0, centre)
    return jax.lax.fori_loop(0, resolvent.steps, step, centre)


class _State(eqx.Module):
    w: PyTree  # the last release; may be outside the set
    kept: PyTree  # by the output rule
    rejections: SkippedUpdates
    t: Int[Array, ""]


class InexactProximalPoint(AbstractSaddleSolver[_State]):
    r"""Proximal point method on batches; noise is added to the point, not the operator.

    $$
    v_k = \Pi_W(w_k), \qquad u_{k+1} \approx u: \
    \langle F_{B_k}(u) + \lambda (u - v_k), w - u \rangle \ge 0 \ \forall w \in W,
    \qquad w_{k+1} = u_{k+1} + \mathcal N(0, s^2 I).
    $$

    The answer is the projection of the average of the $w_k$, which may leave the set
    one by one. A round takes $N$ steps $u \leftarrow \Pi_W(v_k - F_{B_k}(u) / \lambda)$
    of Picard's iteration from $u = v_k$, which converge if $\lambda$ exceeds the
    Lipschitz constant of the operator. It reads one batch $N$ times and releases once.
    No inner state survives a step.

    Args:
        num_steps: The number of rounds. Static.
        clip_norm: The bound $C$ on one record's operator in $\ell_2$.
        strength: The weight $\lambda$ of the proximal term: one over a step size.
        inner_steps: The number $N$ of inner steps on one batch. Static.
        sampling: How each round's batch is drawn.
        output: The output rule, whose point is projected: `Mean()`, as in the
            theorems, or for instance `TailMean(0.5)`, which forgets the start and is
            often better, without a `bound`.
        dimension: At least the number of coordinates of $(x, y)$, which the bound on
            rounding grows with. Static.
        dtype: The dtype of resolvents in the plan; set by `calibrate`. Static.

    Privacy:
        `num_steps` Gaussian releases of a point of $W$. With $m$ the batch's
        denominator, a round has $\ell_2$ sensitivity

        $$\frac{2C}{\lambda m} \sum_{j < N} q^j \le \frac{2C}{(\lambda - L) m}, \qquad
        q = \frac{L}{\lambda},$$

        under replace-one. For $N = 1$ that is enforced by clipping, whatever the
        operator is. For $N > 1$ it rests on the Lipschitz constant $L$ of records and
        public term together (status `CONDITIONAL`); monotonicity is not needed and
        clipping keeps $L$. Rounding is added. The projection must be exact, so sets are
        bounded: `Ball`, `Box`, `Simplex` or a `Product`. Only $w_k$ and what follows
        from it is released. Add-or-remove-one is refused.

    References:
        Boob and Guzman, "Optimal algorithms for differentially private stochastic
        monotone variational inequalities and saddle-point problems", 2024, Algorithm 2,
        with three changes: the centre is projected, without which an inner accuracy
        that privacy rests on cannot be guaranteed; the inner solver and its sensitivity
        are derived here; composition is exact.
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    strength: Positive
    inner_steps: Count = eqx.field(static=True)
    dimension: Count = eqx.field(static=True, default=100)
    dtype: str | None = eqx.field(static=True, default=None)
    release_name: ClassVar[str] = "resolvent"

    def __check_init__(self):
        check_fields(self)
        if self.neighbours is not Neighbours.REPLACE_ONE:
            raise ValueError(
                f"{OWNER}: proved under replace-one only. Use NoisyExtragradient."
            )

    @classmethod
    def tuned_fields(cls, constants, budget, passes, most_steps) -> Fields:
        """Return a dict of the fields with the least bound: batch, strength, rounds."""
        n, lipschitz = constants.records, constants.lipschitz
        strength = constants.scale * np.logspace(-2, 5, 211)
        strength = strength[strength > 1.05 * lipschitz]
        if passes == "single":
            batch, strength = np.meshgrid(integers(n, 200), strength)
            rounds = n // batch
            fits = rounds <= most_steps
            batch, rounds, strength = batch[fits], rounds[fits], strength[fits]
            multiplier: Any = least_multiplier(SinglePass(1), 1, n, budget)
        else:
            counts = integers(n // 2, 25), integers(most_steps, 40)
            batch, rounds, strength = np.meshgrid(*counts, strength)
            multiplier = estimated_multiplier(batch / n, rounds, budget)
        steps = constants.picard_steps(strength)
        ratio = lipschitz / strength
        sensitivity = 2 * constants.spread / ((strength - lipschitz) * batch)
        std = multiplier * sensitivity * (1 - ratio**steps)  # a sum of N powers of q
        accuracy = constants.bound * constants.diameter * ratio**steps  # nu
        gap = constants.proximal_gap(rounds, strength, batch, std, accuracy)
        if passes == "multi":
            distance = ratio**steps * constants.bound / strength  # zeta
            moved = constants.proximal_stability(rounds, strength, distance)
            gap += constants.bound * moved
        best = cheapest(gap, rounds * batch * steps)
        kind = SinglePass if passes == "single" else FixedSize
        chosen = kind(int(batch.flat[best]))
        weight = float(strength.flat[best])
        return {
            "num_steps": int(rounds.flat[best]),
            "clip_norm": constants.spread,
            "strength": weight,
            "inner_steps": int(constants.picard_steps(weight)),
            "sampling": chosen,
            "dimension": constants.coordinates,
        }

    @override
    def gap_and_stability(self, problem, constants, batch, std) -> tuple[Any, Any]:
        path = self.num_steps, self.strength
        resolvent = self.resolvent(problem, constants.records)
        gap = constants.proximal_gap(*path, batch, std, resolvent.accuracy)
        return gap, constants.proximal_stability(*path, resolvent.distance)

    @property
    def basis(self) -> Basis:
        """Basis: clipping for one inner step, else constants."""
        return Basis.CLIPPED if self.inner_steps == 1 else Basis.CONSTANTS

    def init(self, problem, w0) -> _State:
        """Return the state at `w0`, projected; refuse a dtype coarser than planned."""
        check_planned_dtype(type(self).__name__, self.dtype, w0)
        w = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        kept = self.output.init(w)
        return _State(w, kept, SkippedUpdates(), jnp.zeros((), jnp.int32))

    @override
    def step(self, problem, data, state, *, key) -> _State:
        assert self.sizes is not None
        release = self.release(problem, self.sizes)
        centre = problem.w_set.project(state.w)  # the noise may have left the set
        w = release.apply(centre, data, key=key, index=state.t)  # (5.1), noised
        w, rejections = finite_or(w, state.w, state.rejections)
        kept = self.remembered(state.kept, w, before=state.w, t=state.t)
        return _State(w, kept, rejections, state.t + 1)

    def answer(self, problem, state) -> PyTree:
        """Return the point of the output rule, projected onto the set."""
        return problem.w_set.project(self.output.answer(state.kept, state.w))

    def resolvent(self, problem: AbstractVariationalInequality, n: int) -> Resolvent:
        """Return the `Resolvent` that a round on `n` records computes."""
        numbers = _checks.number(self.clip_norm), _checks.number(self.strength)
        counts, batch = (self.inner_steps, self.dimension), self.sampling
        return Resolvent(
            problem, *numbers, *counts, batch.rows(n), batch.denominator(n)
        )

    def release(self, problem, sizes) -> Release:
        """Return a step's planned release of a resolvent; reads no records."""
        query = ResolventQuery(self.resolvent(problem, sizes), sizes, self.sampling)
        parts = self.release_name, 1, self.release_noise
        ratio = self.clip_ratio(problem)
        return CertifiedRelease(*parts, query=query, clip_ratio=ratio)

    def with_counts(self, problem, sizes=None) -> Self:
        """Return a copy whose `dtype` is JAX's default for floats."""
        return dataclasses.replace(self, dtype=jnp.result_type(float).name)

    @override
    def assumptions(self, problem, sizes) -> tuple[str, ...]:
        if self.basis is Basis.CLIPPED:
            return ()
        names = ["lipschitz"]
        if problem.public is not None:
            names += ["public_lipschitz", "public_bound"]
        declared = {name: problem.constant(name) for name in names}
        listed = ", ".join(f"{name}={value:.3g}" for name, value in declared.items())
        return (
            "every possible record's operator has the declared constants "
            f"on the set: {listed}",
            f"{self.inner_steps} inner steps per release; their rounding, for "
            f"operators exact to {UNITS} units of roundoff, is part of the sensitivity",
        )
