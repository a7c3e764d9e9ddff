"""Resolvents, sealed with a bound on how far one record moves them.

The values computed inside are not private and stay there; what leaves is sealed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree
from typing_extensions import override

from .. import _checks
from ..bilevel.certificates.derivatives import common_dtype, wide
from ..privacy.exact.floats import all_finite, is_finite
from ..privacy.exact.grid import on_grid
from ..privacy.per_example import clipping
from ..privacy.queries import RECORDS, AbstractCertifiedQuery, Costs, Query
from ..privacy.sampling.base import AbstractSampling, Batch
from .resolvents import OWNER, Number, Resolvent


@dataclasses.dataclass(frozen=True)
class ResolventQuery(AbstractCertifiedQuery):
    r"""Approximate resolvent of a batch's operator, with its sensitivity.

    Privacy:
        One query, of sensitivity $s$ as in `Resolvent.contribution`. For one step of
        Picard's iteration it is enforced by clipping; for more it rests on the
        Lipschitz constants, and for operator extrapolation on monotonicity and the
        bound too, and on operators exact to 32 units of roundoff. Steps are not
        private and are not returned.
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
        """Compute the resolvent at a released point of the set, as a `Bounded`.

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
    """Return a batch's approximate resolvent, not sealed. NON-PRIVATE."""
    problem = resolvent.problem
    dtype = common_dtype(centre, OWNER)
    records = wide(batch.records, dtype)
    mask = _readable(records)  # others contribute zero
    mask = mask if batch.mask is None else mask & batch.mask
    batch = dataclasses.replace(batch, records=records, mask=mask)

    def operator(u):
        fun, clip_norm = problem.saturated_operator(u), resolvent.largest_clip
        mean = clipping.clipped_mean(
            fun, batch, clip_norm=clip_norm, precision=precision
        )
        return optax.tree.add(clipping.unsealed(mean), _public(problem, u))

    picard = resolvent.inner == "picard"
    solver = _picard if picard else _operator_extrapolation
    value = solver(resolvent, operator, centre)
    finite = all_finite(value)  # else the centre, which is public
    return optax.tree.where(finite, value, centre)


def _public(problem, u: PyTree) -> PyTree:
    """Return the public operator, clipped to its declared bound."""
    value = problem.public_operator(u)
    if problem.public is None:
        return value
    value = jax.tree.map(lambda v: jnp.where(is_finite(v), v, 0), value)
    bound = jnp.asarray(problem.constant("public_bound"), common_dtype(value, OWNER))
    return optax.projections.projection_l2_ball(value, bound)


def _picard(resolvent: Resolvent, operator, centre: PyTree) -> PyTree:
    r"""Iterate $u^{j+1} = \Pi_W(v - (F_B(u^j) + P(u^j)) / \lambda)$ from $u^0 = v$."""
    project = resolvent.problem.w_set.project

    def step(_, u):
        return project(_less(centre, 1 / resolvent.strength, operator(u)))

    if resolvent.steps == 1:
        return step(0, centre)
    return jax.lax.fori_loop(0, resolvent.steps, step, centre)


def _operator_extrapolation(resolvent: Resolvent, operator, centre: PyTree) -> PyTree:
    r"""Iterate $x_{j+1} = \Pi_W(x_j - g (G_j + \theta (G_j - G_{j-1})))$ from $v$.

    $G_j = F_B(x_j) + P(x_j) + \lambda (x_j - v)$ and $g = 1 / (2 (L + \lambda))$.
    """
    project = resolvent.problem.w_set.project
    size = 1 / (2 * (resolvent.lipschitz + resolvent.strength))

    def regularized(u):
        pull = optax.tree.sub(u, centre)
        return _less(operator(u), -resolvent.strength, pull)

    def step(_, state):
        x, before = state
        now = regularized(x)
        change = optax.tree.sub(now, before)
        direction = _less(now, -resolvent.extrapolation, change)
        return project(_less(x, size, direction)), now

    start = centre, regularized(centre)  # x_0 = x_1: no extrapolation at first
    return jax.lax.fori_loop(0, resolvent.steps, step, start)[0]


def _less(a: PyTree, factor: Number, b: PyTree) -> PyTree:
    """Return `a - factor * b` in the dtype of `a`."""
    return jax.tree.map(lambda v, w: v - jnp.asarray(factor, v.dtype) * w, a, b)


def _readable(records: PyTree) -> Bool[Array, " n"]:
    """Return a mask of the rows that hold finite numbers only."""
    leaves = jax.tree.leaves(records)
    rows = [
        is_finite(v).reshape(len(v), -1).all(axis=1)
        for v in leaves
        if jnp.issubdtype(v.dtype, jnp.floating)
    ]
    everything = jnp.ones(len(leaves[0]), bool)
    return functools.reduce(jnp.logical_and, rows, everything)
