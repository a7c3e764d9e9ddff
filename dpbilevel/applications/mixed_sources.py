"""`MixedSources`: mixes the sources' models, then fits one model to kept sources."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Positive, SignedShare
from ..bilevel.levels import Objective, lower_objective, queries_of
from ..bilevel.pipeline import Outputs
from ..onelevel.adaptive import NoisyDescent
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.exact.floats import is_finite
from ..sets import Euclidean
from .selected_sources import (
    FIT,
    ONE_MEAN,
    SCORE,
    AbstractSourcePipeline,
    dtype_of,
    score_objective,
)
from .sources import SourceWeighting, mixing_start, source_mixing

MODELS, MOMENTS, MIXTURE = "models", "moments", "mixture"
REMOMENTS, REMIXTURE = "remoments", "remixture"

# Least fractions of the norms of second moments and of products of models in every
# direction: smaller parts are noise, and would be magnified.
_LEAST_MOMENT, _LEAST_PRODUCT = 0.2, 0.01
# Enough for matrices whose eigenvalues are 1e3 apart.
_ITERATIONS = 15


class Mixture(eqx.Module):
    r"""Mixture of models by coordinates $u$: $y_0 + \sum_s c_s d_s + \sum_j u_j b_j$.

    The $b_j$ span the same space as the differences $d_s = y_s - y_0$ of the models
    from their initial point. They are the rows of $(Y Y^\top + \ell \|Y Y^\top\|
    I)^{-1/2}\, Y$, with the differences the rows of $Y$. They are nearly
    orthonormal, so that gradients in $u$ are not longer than those of a model.
    `moments` are the released second moments $M$ of the directions of these gradients.
    With them the rows are multiplied by $(M^2 + \phi^2 \|M^2\| I)^{-1/4}$. Steps are
    then longer along directions that change the predictions of few records.

    Args:
        models: The $y_s$, along the leading axes of the leaves; released.
        start: The coefficients $c$.
        moments: $M$, released, with noise that need not be symmetric.
        origin: $y_0$, the point that all models were fitted from: differences from it
            are mixed. `None` stands for zero.
    """

    models: PyTree
    start: Float[Array, " k"]
    moments: Float[Array, "k k"] | None = None
    origin: PyTree = None

    def model(self, u: Float[Array, " k"]) -> PyTree:
        """Return the parameters of the mixture at `u`."""
        rows = jax.vmap(lambda model: ravel_pytree(model)[0])(self.models)
        unravel = ravel_pytree(jax.tree.map(lambda v: v[0], self.models))[1]
        origin = 0.0
        if self.origin is not None:
            origin = ravel_pytree(self.origin)[0]
            rows = rows - origin[None]
        basis, _ = _scaled(rows)
        basis = roots(basis @ basis.T, _LEAST_PRODUCT)[1] @ basis
        if self.moments is not None:
            scaled, largest = _scaled(self.moments)
            symmetric = (scaled + scaled.T) / 2
            # No negative eigenvalues, whatever the noise.
            size, _ = roots(symmetric @ symmetric, _LEAST_MOMENT**2)
            basis = roots(size)[1] @ basis / jnp.sqrt(largest)
        return unravel(origin + self.start @ rows + u @ basis)


def _scaled(matrix: Array) -> tuple[Array, Array]:
    """Return a matrix divided by its largest absolute entry, and that entry."""
    largest = jnp.max(jnp.abs(matrix))
    largest = jnp.where(largest > 0, largest, 1)
    return matrix / largest, largest


@jax.default_matmul_precision("highest")
def roots(
    matrix: Float[Array, "k k"], least: float = 0.0
) -> tuple[Float[Array, "k k"], Float[Array, "k k"]]:
    r"""Return the root of `matrix` + `least` |`matrix`| I, and the inverse root.

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
    r"""Return the `Objective` that a unit step from 0 solves for the moment matrix.

    It is the mean of $g g^\top / \|g\|^2$ over the training records, with $g$ the
    gradient in the coordinates of a mixture at its start. A record is a matrix of norm
    1, or the matrix 0 if its gradient is 0 or not finite, or its source is unknown.
    """

    def lower(w, row):
        def loss(u):
            return problem.loss(mixture.model(u), row)

        gradient = jax.grad(loss)(jnp.zeros(len(w), w.dtype))
        length = jnp.linalg.norm(gradient)
        _, known = problem.index(row)
        counts = known & is_finite(length) & (length > 0)
        direction = gradient / jnp.where(counts, length, 1)
        return jnp.where(counts, -jnp.outer(direction, direction), 0)

    return Objective(Euclidean(), {"lower": problem.of_record(lower)})


class MixedSources(AbstractSourcePipeline):
    r"""Mixes models of the sources and drops sources that the mixture does not fit.

    1. `models` fits one model for each source and a common one, `source_mixing`.
    2. `moments` releases the second moments of the directions of the training records'
       gradients with respect to mixtures of these models, at the common one.
    3. `mixture` fits a mixture on the validation records, from the common model, in
       coordinates that the models and their second moments scale.
    4. `score` releases the sources' scores under the mixture, as `SelectedSources`.
    5. `fit` fits one model of the sources with a score above `keep_above`. It starts at
       the mean of their models, weighted by their released sizes.
    6. `remoments` and `remixture` repeat lines 2 and 3 with that model, the mixture of
       line 3 and the models of the kept sources. If no record is dropped, no one model
       may suit the population, and the start is halfway between the first two. If half
       of the records are dropped, the start is the model of line 5.

    Validation losses have gradients in the $k + 2$ numbers of a mixture only, so that a
    few hundred validation records are enough under noise. The models are alike, and few
    directions change most predictions. Steps in the coefficients themselves would be
    too long along these and too short along all others; the coordinates prevent that.
    What is mixed are differences from the common initial point, which is public. Of a
    model that is linear in its parameters, such as a last layer or adapters on a frozen
    network, a mixture of parameters is one of predictions. The public terms of the
    problem are part of line 5 alone. The released mixture is projected onto the set of
    y.

    Args:
        models: The one-level solver of line 1.
        mixture: The one-level solver of line 3. Gradients in its coordinates are about
            as long as those of a model: clip norms and step sizes have the same units.
        fit: The one-level solver of line 5. A step size that is a number refers to the
            mean over the records that are kept. Steps are at most four times as long as
            on all records.
        remixture: The one-level solver of line 6.
        shared: $a > 0$, the weight of the common model, as in `source_mixing`.
        keep_above: As in `SelectedSources`.
        budget_split: The split of the squared budget over `models`, `moments`,
            `mixture`, `score`, `fit`, `remoments` and `remixture`. With disjoint people
            the two mixtures are charged to upper records, the others to lower ones. The
            default uses the whole budget of both.
        moments: The one step that releases the second moments.
        score: The one step that releases the scores.
        remoments: The one step that releases the second moments of line 6.

    Privacy:
        The releases of seven runs. Only released values pass from one to the next. A
        training record is a matrix of norm 1 in `moments` and `remoments`.

    References:
        Breiman, "Stacked regressions", 1996; here each model is fitted on one source.
    """

    models: NoisyDescent
    mixture: NoisyDescent
    fit: NoisyDescent
    remixture: NoisyDescent
    shared: Positive = 0.5
    keep_above: SignedShare = 0.1
    budget_split: tuple[float, float, float, float, float, float, float] = (
        _checks.split_field(0.25, 0.02, 0.3, 0.03, 0.68, 0.02, 0.7)
    )
    moments: NoisyGD = ONE_MEAN
    score: NoisyGD = ONE_MEAN
    remoments: NoisyGD = ONE_MEAN
    stages: ClassVar = dict.fromkeys(
        (MODELS, MOMENTS, MIXTURE, SCORE, FIT, REMOMENTS, REMIXTURE), AbstractFiniteSum
    )

    @override
    def queries(self, name):
        return queries_of("upper" if name in (MIXTURE, REMIXTURE) else "lower")

    @override
    def objective(self, name, problem, w0, outputs):
        if name == MODELS:
            shared, source = self.shared, problem.source
            count = problem.num_sources
            mixing = source_mixing(problem.loss, count, shared=shared, source=source)
            return lower_objective(problem.on_same_records(mixing), None)
        if name == SCORE:
            return score_objective(problem, _mixed(w0, outputs), w0[1])
        if name == FIT:
            return self.fit_objective(problem, w0, outputs)
        mixture = self._mixture(name, w0, outputs)
        if name in (MOMENTS, REMOMENTS):
            return moments_objective(problem, mixture)

        def loss(u, row):  # of validation records, in coordinates u
            return problem.loss(mixture.model(u), row)

        return Objective(Euclidean(), {"upper": jax.grad(problem.of_record(loss))})

    @override
    def start(self, name, w0, outputs):
        x, y = w0
        if name == MODELS:
            return mixing_start(y, len(x))[1]
        if name == SCORE:
            return self.score_start(w0)
        if name == FIT:  # the mean of the models of kept sources, by their sizes
            weights = self.kept(outputs) * self.source_fractions(outputs)
            weights, models = weights / jnp.sum(weights), outputs[MODELS]
            return jax.tree.map(lambda v: jnp.tensordot(weights, v[:-1], 1), models)
        size = len(x) + (1 if name in (MOMENTS, MIXTURE) else 2)
        shape = (size, size) if name in (MOMENTS, REMOMENTS) else size
        return jnp.zeros(shape, dtype_of(y))

    def _mixture(self, name: str, w0: PyTree, outputs: Outputs) -> Mixture:
        """Return a stage's `Mixture`, with coordinates scaled by earlier outputs."""
        if name in (MOMENTS, MIXTURE):
            moments = outputs[MOMENTS] if name == MIXTURE else None
            return _of_sources(w0, outputs, moments)
        kept, fraction = self.kept(outputs), self.kept_fraction(outputs)

        def stacked(origin, models, mixture, last):
            weight = kept.reshape((-1,) + (1,) * last.ndim)
            of_sources = origin[None] + (models[:-1] - origin[None]) * weight
            return jnp.concatenate([of_sources, mixture[None], last[None]])

        fitted = outputs[MODELS], _mixed(w0, outputs), outputs[FIT]
        models = jax.tree.map(stacked, w0[1], *fitted)
        first = jnp.maximum(fraction - 0.5, 0)
        start = jnp.append(jnp.zeros_like(kept), jnp.stack([first, 1 - first]))
        moments = outputs[REMOMENTS] if name == REMIXTURE else None
        return Mixture(models, start, moments, w0[1])

    @override
    def current_solution(self, name, problem, w0, outputs):
        x, y = w0
        if name in (MIXTURE, SCORE):
            y = _mixed(w0, outputs)
        elif name in (FIT, REMOMENTS):
            y = outputs[FIT]
        elif name == REMIXTURE:
            y = self._mixture(name, w0, outputs).model(outputs[name])
        return x, y


def _of_sources(w0: PyTree, outputs: Outputs, moments: Array | None) -> Mixture:
    """Return the `Mixture` of all sources' models, initially at the common model."""
    first = jax.tree.leaves(outputs[MODELS])[0]
    start = jnp.zeros(len(first), first.dtype).at[-1].set(1.0)
    return Mixture(outputs[MODELS], start, moments, w0[1])


def _mixed(w0: PyTree, outputs: Outputs) -> PyTree:
    """Return the model of the sources' `Mixture` at the released coordinates."""
    return _of_sources(w0, outputs, outputs[MOMENTS]).model(outputs[MIXTURE])
