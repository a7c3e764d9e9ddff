"""The one-level problems inside the solvers that choose sources."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from ..bilevel.penalized import (
    AbstractLevel,
    PenalizedLevel,
    UpperLevel,
    levels_queries,
)
from ..bilevel.problem import BilevelProblem, Levels
from ..privacy.exact.floats import is_finite
from ..sets import AbstractSet, Euclidean

# The lengths of the two entries of a record in `Scores`.
_OF_SIGN, _OF_SHARE = 0.96, 0.28
# Shares of the norms of second moments and of products of models that every direction
# has at the least: what is smaller is noise, and would be magnified.
_LEAST_MOMENT, _LEAST_PRODUCT = 0.2, 0.01
# Enough for matrices whose eigenvalues are 1e3 apart.
_ITERATIONS = 15


class _LowerMean(AbstractLevel):
    """A linear problem whose solution after one step of 1 is a mean of lower records.

    `record_gradients` are the negative values of records, of norm 1 at most.
    """

    @property
    def w_set(self) -> AbstractSet:
        """All of space."""
        return Euclidean()

    def public_gradient(self, w: PyTree) -> PyTree:
        """None."""
        return optax.tree.zeros_like(w)

    def queries(self, clip_norm, sampling, sizes):
        """One query on the lower records."""
        return levels_queries(Levels(None, clip_norm), sampling, sizes)


class Scores(_LowerMean):
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


class Mixture(eqx.Module):
    r"""Mixtures $\sum_s c_s y_s + \sum_j u_j b_j$ in coordinates that suit descent.

    The $b_j$ span what the models $y_s$ span, so that every mixture has a $u$. They are
    nearly orthonormal, so that gradients in $u$ are not longer than those of a model:
    the rows of $(Y Y^\top + \ell \|Y Y^\top\| I)^{-1/2}\, Y$, with the models the rows
    of $Y$. With `moments`, the released second moments $M$ of the directions of these
    gradients, they are multiplied by $(M^2 + \phi^2 \|M^2\| I)^{-1/4}$: where most
    records have much the same predictions, steps along what is left are longer.

    Args:
        models: The $y_s$, along the leading axes of the leaves; released.
        start: The coefficients $c$.
        moments: $M$, released; its noise need not be symmetric.
    """

    models: PyTree
    start: Float[Array, " k"]
    moments: Float[Array, "k k"] | None = None

    def model(self, u: Float[Array, " k"]) -> PyTree:
        """The parameters of a mixture."""
        rows = jax.vmap(lambda model: ravel_pytree(model)[0])(self.models)
        unravel = ravel_pytree(jax.tree.map(lambda v: v[0], self.models))[1]
        basis, _ = _scaled(rows)
        basis = roots(basis @ basis.T, _LEAST_PRODUCT)[1] @ basis
        if self.moments is not None:
            scaled, largest = _scaled(self.moments)
            symmetric = (scaled + scaled.T) / 2
            # Not negative, whatever the noise.
            size, _ = roots(symmetric @ symmetric, _LEAST_MOMENT**2)
            basis = roots(size)[1] @ basis / jnp.sqrt(largest)
        return unravel(self.start @ rows + u @ basis)


def _scaled(matrix: Array) -> tuple[Array, Array]:
    """A matrix over its largest entry, so that no product overflows, and that entry."""
    largest = jnp.max(jnp.abs(matrix))
    largest = jnp.where(largest > 0, largest, 1)
    return matrix / largest, largest


@jax.default_matmul_precision("highest")
def roots(
    matrix: Float[Array, "k k"], least: float = 0.0
) -> tuple[Float[Array, "k k"], Float[Array, "k k"]]:
    r"""The root of $A + \ell \|A\| I$ and its inverse, for $A$ without negative parts.

    By Newton and Schulz's coupled iteration: products of matrices, which run in batches
    on every backend; in full precision.

    Args:
        matrix: $A$.
        least: $\ell$.
    """
    size = jnp.linalg.norm(matrix)
    size = jnp.where(size > 0, size, 1) * (1 + least)
    eye = jnp.eye(len(matrix), dtype=matrix.dtype)
    scaled = matrix / size + least / (1 + least) * eye

    def iterate(_, pair):
        root, inverse = pair
        change = (3 * eye - inverse @ root) / 2
        return root @ change, change @ inverse

    root, inverse = jax.lax.fori_loop(0, _ITERATIONS, iterate, (scaled, eye))
    return root * jnp.sqrt(size), inverse / jnp.sqrt(size)


class Moments(_LowerMean):
    r"""The linear problem whose solution after one step of 1 is $M$.

    $M$ is the mean of $g g^\top / \|g\|^2$ over the training records, with $g$ the
    gradient in a mixture's coordinates at its start: a record is a matrix of norm 1. It
    is the matrix 0 where its gradient is 0 or not finite, or its source is not known.
    """

    problem: BilevelProblem
    mixture: Mixture

    def record_gradients(self, w: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
        """Minus the second moments of one training record."""
        problem: Any = self.problem
        start = jnp.zeros(len(w), w.dtype)

        def lower(record):
            def loss(u):
                return problem.loss(self.mixture.model(u), record)

            gradient = jax.grad(loss)(start)
            length = jnp.linalg.norm(gradient)
            _, known = problem.index(record)
            counts = known & is_finite(length) & (length > 0)
            direction = gradient / jnp.where(counts, length, 1)
            return jnp.where(counts, -jnp.outer(direction, direction), 0)

        return {"lower": lower}


def mixing_level(problem: BilevelProblem, mixture: Mixture) -> UpperLevel:
    """The mean loss of a mixture over the validation records, in its coordinates."""
    problem_: Any = problem

    def upper(u, mixture, record):
        return problem_.loss(mixture.model(u), record)

    return UpperLevel(BilevelProblem(upper, problem.lower), mixture)
