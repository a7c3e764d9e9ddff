"""Mixtures of models, and the objectives that fit and scale them."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ..bilevel.levels import Objective
from ..privacy.exact.floats import is_finite
from ..sets import Euclidean
from .sources import SourceWeighting

# Least fractions of the norms of second moments and of products of models in every
# direction: smaller parts are noise, and would be magnified.
_LEAST_MOMENT, _LEAST_PRODUCT = 0.2, 0.01
# Enough for matrices whose eigenvalues are 1e3 apart.
_ITERATIONS = 15


class Mixture(eqx.Module):
    r"""Mixtures $\sum_s c_s y_s + \sum_j u_j b_j$ in coordinates that suit descent.

    The $b_j$ span the same space as the models $y_s$. They are the rows of $(Y Y^\top +
    \ell \|Y Y^\top\| I)^{-1/2}\, Y$, with the models the rows of $Y$. They are nearly
    orthonormal, so that gradients in $u$ are not longer than those of a model.
    `moments` are the released second moments $M$ of the directions of these gradients.
    With them the rows are multiplied by $(M^2 + \phi^2 \|M^2\| I)^{-1/4}$. Steps are
    then longer along directions that change the predictions of few records.

    Args:
        models: The $y_s$, along the leading axes of the leaves; released.
        start: The coefficients $c$.
        moments: $M$, released, with noise that need not be symmetric.
    """

    models: PyTree
    start: Float[Array, " k"]
    moments: Float[Array, "k k"] | None = None

    def model(self, u: Float[Array, " k"]) -> PyTree:
        """Return the parameters of the mixture at `u`."""
        rows = jax.vmap(lambda model: ravel_pytree(model)[0])(self.models)
        unravel = ravel_pytree(jax.tree.map(lambda v: v[0], self.models))[1]
        basis, _ = _scaled(rows)
        basis = roots(basis @ basis.T, _LEAST_PRODUCT)[1] @ basis
        if self.moments is not None:
            scaled, largest = _scaled(self.moments)
            symmetric = (scaled + scaled.T) / 2
            # No negative eigenvalues, whatever the noise.
            size, _ = roots(symmetric @ symmetric, _LEAST_MOMENT**2)
            basis = roots(size)[1] @ basis / jnp.sqrt(largest)
        return unravel(self.start @ rows + u @ basis)


def _scaled(matrix: Array) -> tuple[Array, Array]:
    """Return a matrix over its largest entry, against overflow, and that entry."""
    largest = jnp.max(jnp.abs(matrix))
    largest = jnp.where(largest > 0, largest, 1)
    return matrix / largest, largest


@jax.default_matmul_precision("highest")
def roots(
    matrix: Float[Array, "k k"], least: float = 0.0
) -> tuple[Float[Array, "k k"], Float[Array, "k k"]]:
    r"""Return the square root of $A + \ell \|A\| I$ and its inverse.

    The coupled iteration of Newton and Schulz has products of matrices only, which run
    in batches on every backend.

    Args:
        matrix: $A$, positive semidefinite.
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


def moments_objective(problem: SourceWeighting, mixture: Mixture) -> Objective:
    r"""Return the linear objective whose solution, after one step of 1, is $M$.

    $M$ is the mean of $g g^\top / \|g\|^2$ over the training records, with $g$ the
    gradient in the coordinates of a mixture at its start. A record is a matrix of norm
    1, or the matrix 0 if its gradient is 0 or not finite, or its source is unknown.
    """

    def lower(w, record):
        def loss(u):
            return problem.loss(mixture.model(u), record)

        gradient = jax.grad(loss)(jnp.zeros(len(w), w.dtype))
        length = jnp.linalg.norm(gradient)
        _, known = problem.index(record)
        counts = known & is_finite(length) & (length > 0)
        direction = gradient / jnp.where(counts, length, 1)
        return jnp.where(counts, -jnp.outer(direction, direction), 0)

    return Objective(Euclidean(), {"lower": lower})


def mixture_objective(problem: SourceWeighting, mixture: Mixture) -> Objective:
    """Return the mean validation loss of a mixture, in its coordinates."""

    def upper(w, record):
        return jax.grad(lambda u: problem.loss(mixture.model(u), record))(w)

    return Objective(Euclidean(), {"upper": upper})
