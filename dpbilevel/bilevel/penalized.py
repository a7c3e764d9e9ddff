"""Queries that read both levels, and the one-level problems inside a bilevel one."""

from typing import Any

import jax
import optax
from jaxtyping import Array, Float, PyTree

from ..onelevel.problem import AbstractFiniteSum, batch_mean
from ..privacy.budget import People
from ..privacy.clipping import Bounded, Precision
from ..privacy.noise import PRNGKey, derive
from ..privacy.releases import Query
from ..privacy.sampling import AbstractSampling
from ..sets import AbstractSet
from .problem import ROLES, BilevelProblem, Levels, Sizes

Scalar = Float[Array, ""]


def levels_mean(
    funs: Levels,
    data: Levels,
    sizes: Sizes,
    *,
    clip_norms: Levels,
    sampling: AbstractSampling,
    precision: Precision,
    key: PRNGKey,
) -> Bounded:
    r"""The sum of one clipped mean per level.

    Args:
        funs: Per-record functions; `None` for a level that is not read.
        data: The records.
        sizes: The planned sizes.
        clip_norms: Clip norms $C_f$ and $C_g$.
        sampling: How each level's batch is drawn, independently of the other's.
        precision: How the records are summed, as in `clipped_mean`.
        key: A typed key for the draws.

    Returns:
        The sum, sealed. Where the records are shared, both functions are evaluated on
        one batch and their sum is clipped once, at $C_f + C_g$: the same bound with
        less distortion.

    Privacy:
        One query whose contribution is the sum of the levels' clip norms over their
        public denominators, matched by `levels_queries`.
    """
    key_upper, key_lower = derive(key, "upper", "lower")
    if sizes.people is People.SHARED and None not in (funs.upper, funs.lower):

        def both(record):
            return optax.tree.add(funs.upper(record), funs.lower(record))

        return batch_mean(
            both,
            data.lower,
            sizes.lower,
            clip_norm=clip_norms.upper + clip_norms.lower,
            sampling=sampling,
            precision=precision,
            key=key_lower,
        )
    total = None
    for role, subkey in (("upper", key_upper), ("lower", key_lower)):
        fun = getattr(funs, role)
        if fun is not None:
            mean = batch_mean(
                fun,
                getattr(data, role),
                getattr(sizes, role),
                clip_norm=getattr(clip_norms, role),
                sampling=sampling,
                precision=precision,
                key=subkey,
            )
            total = mean if total is None else total + mean
    assert total is not None
    return total


def levels_queries(
    clip_norms: Levels, sampling: AbstractSampling, sizes: Sizes
) -> tuple[tuple[Query, ...], bool]:
    """What `levels_mean` reads: its queries, and whether they share one batch.

    Args:
        clip_norms: Clip norms; `None` for a level that is not read.
        sampling: How the batches are drawn.
        sizes: The planned sizes.
    """
    queries = tuple(
        Query(role, getattr(sizes, role), float(getattr(clip_norms, role)), sampling)
        for role in ROLES
        if getattr(clip_norms, role) is not None
    )
    return queries, sizes.people is People.SHARED and len(queries) > 1


class PenalizedLevel(AbstractFiniteSum):
    r"""The one-level problems inside a bilevel one, at a fixed $x$.

    $\min_y g(x, y)$ when `penalty` is `None`, else $\min_y g(x, y) + f(x, y) /
    \lambda$, which has the minimizer of $f + \lambda g$ and gradients of order one.

    Args:
        problem: The bilevel problem.
        x: The upper variable, already private.
        penalty: $\lambda$, or `None` for the lower level alone.
        upper_clip_norm: The clip norm of $\nabla_y f(x, y; z)$, before $1/\lambda$.
    """

    problem: BilevelProblem
    x: PyTree
    penalty: float | Scalar | None = None
    upper_clip_norm: float | Scalar | None = None

    @property
    def w_set(self) -> AbstractSet:
        """The feasible set of y."""
        return self.problem.y_set

    def clipped_gradient(
        self,
        w: PyTree,
        data: Levels,
        sizes: Sizes,
        *,
        clip_norm: float | Scalar,
        sampling: AbstractSampling,
        precision: Precision,
        key: PRNGKey,
    ) -> Bounded:
        r"""The clipped mean of $\nabla_y g$, plus that of $\nabla_y f / \lambda$."""

        def lower(record):
            return jax.grad(self.problem.lower, 1)(self.x, w, record)

        def upper(record):
            gradient = jax.grad(self.problem.upper, 1)(self.x, w, record)
            return jax.tree.map(lambda v: v / self.penalty, gradient)

        funs = Levels(upper if self.penalty is not None else None, lower)
        clip_norms = self._clip_norms(clip_norm)
        return levels_mean(
            funs,
            data,
            sizes,
            clip_norms=clip_norms,
            sampling=sampling,
            precision=precision,
            key=key,
        )

    def public_gradient(self, w: PyTree) -> PyTree:
        r"""$\nabla_y r_g$, plus $\nabla_y r_f / \lambda$."""
        total = optax.tree.zeros_like(w)
        if self.problem.lower_public is not None:
            total = jax.grad(self.problem.lower_public, 1)(self.x, w)
        if self.problem.upper_public is not None and self.penalty is not None:
            upper = jax.grad(self.problem.upper_public, 1)(self.x, w)
            total = jax.tree.map(lambda a, b: a + b / self.penalty, total, upper)
        return total

    def queries(
        self, clip_norm: float, sampling: AbstractSampling, sizes: Sizes
    ) -> tuple[tuple[Query, ...], bool]:
        """One query on the lower records, and one on the upper ones if penalized."""
        return levels_queries(self._clip_norms(clip_norm), sampling, sizes)

    def sizes_of(self, data: Levels, people: People | str | None = None) -> Sizes:
        """The sizes of both levels."""
        return self.problem.sizes_of(data, people)

    def check_sizes(self, owner: str, sizes: Any) -> None:
        """Those of both levels."""
        self.problem.check_sizes(owner, sizes)

    def check_people(self, data: Levels, people: People) -> None:
        """As for the bilevel problem."""
        self.problem.check_people(data, people)

    def check(self, w0: PyTree, data: Levels) -> None:
        """Nothing to check: the bilevel problem was checked as a whole."""

    def _clip_norms(self, clip_norm) -> Levels:
        if self.penalty is None or self.upper_clip_norm is None:
            return Levels(None, clip_norm)
        return Levels(self.upper_clip_norm / self.penalty, clip_norm)
