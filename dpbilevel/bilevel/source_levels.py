"""The one-level problems inside the solvers that choose sources."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from ..privacy.floats import is_finite
from ..sets import AbstractSet, Euclidean
from .penalized import AbstractLevel, PenalizedLevel, levels_queries
from .problem import BilevelProblem, Levels

# The lengths of the two entries of a record in `Scores`.
_OF_SIGN, _OF_SHARE = 0.96, 0.28


class Scores(AbstractLevel):
    r"""The linear problem whose solution after one step of 1 are signs and shares.

    Entry $(0, s)$ is $a = 0.96$ times the mean over all training records of $\pm 1$
    for those of source $s$, plus where the model has a smaller loss than the starting
    point has, and of 0 for others; entry $(1, s)$ is $b = 0.28$ times the share of
    records of source $s$. As $a^2 + b^2 = 1$ a record is a vector of norm 1: the sizes
    of the sources cost the signs 4 % of their precision. A record whose source is not
    known, or whose loss is not finite, is the vector 0.
    """

    problem: BilevelProblem
    model: PyTree
    start: PyTree

    @property
    def w_set(self) -> AbstractSet:
        """All of space."""
        return Euclidean()

    def record_gradients(self, w: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
        """The negative unit vector of a training record."""
        problem: Any = self.problem

        def lower(record):
            index, known = problem.index(record)
            before, after = (problem.loss(y, record) for y in (self.start, self.model))
            sign = jnp.where(after < before, 1, -1)
            row = jnp.stack([_OF_SIGN * sign, jnp.asarray(_OF_SHARE)]).astype(w.dtype)
            # What no model can be fitted to says nothing about its source either.
            counts = known & is_finite(before) & is_finite(after)
            return jnp.where(counts, -jnp.zeros_like(w).at[:, index].set(row), 0)

        return {"lower": lower}

    def public_gradient(self, w: PyTree) -> PyTree:
        """None."""
        return optax.tree.zeros_like(w)

    def queries(self, clip_norm, sampling, sizes):
        """One query on the lower records."""
        return levels_queries(Levels(None, clip_norm), sampling, sizes)


class Kept(PenalizedLevel):
    r"""The mean of $w_{s_i} \ell(y, z'_i)$ plus $\bar w\, r_g(y)$, $w \in \{0, 1\}^k$.

    The weights do not exceed 1, so that the clip norm is that of the model's loss. The
    mean is over all records: $\bar w$, the released share of the records that are kept,
    gives the public terms the weight that they have beside the mean over the kept ones.
    With a penalty $\lambda = n_g / n_f$ validation records are among them, $\bar w$ is
    larger by $n_f / n_g$, and each record that is read weighs the same.
    """

    kept: Float[Array, " k"] | None = None
    kept_share: Float[Array, ""] | None = None

    @property
    def share(self) -> Float[Array, ""]:
        r"""$\bar w$: how many records are read, over the number of lower ones."""
        assert self.kept_share is not None
        return self.kept_share + (0.0 if self.penalty is None else 1 / self.penalty)

    @override
    def public_gradient(self, w: PyTree) -> PyTree:
        """Of the weight that the public terms have on the kept records alone."""
        if self.problem.lower_public is None:
            return optax.tree.zeros_like(w)
        gradient = jax.grad(self.problem.lower_public, 1)(self.x, w)
        return jax.tree.map(lambda v: self.share.astype(v.dtype) * v, gradient)

    @override
    def record_gradients(self, w: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
        problem: Any = self.problem

        def lower(record):
            index, known = problem.index(record)
            assert self.kept is not None
            weight = jnp.where(known, self.kept[index], 0)

            def weighted(y):
                loss = problem.loss(y, record)
                return weight.astype(loss.dtype) * loss

            return jax.grad(weighted)(w)

        return super().record_gradients(w) | {"lower": lower}


def signs_and_shares(
    released: Float[Array, "2 k"],
) -> tuple[Float[Array, " k"], Float[Array, " k"]]:
    """The solution of `Scores` in means of signs and shares of records."""
    signs, shares = released
    return signs / _OF_SIGN, shares / _OF_SHARE
