"""Models of sources mixed on validation records, and one model of those kept."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Positive, SignedShare
from ..bilevel.levels import lower_objective, queries_of
from ..bilevel.pipeline import Outputs
from ..onelevel.adaptive_clip import NoisyDescent
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from .mixtures import Mixture, mixture_objective, moments_objective
from .source_pipeline import (
    FIT,
    ONE_MEAN,
    SCORE,
    AbstractSourcePipeline,
    dtype_of,
    score_objective,
)
from .sources import mixing_start, source_mixing

MODELS, MOMENTS, MIXTURE = "models", "moments", "mixture"
REMOMENTS, REMIXTURE = "remoments", "remixture"


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
    It is for models that are linear in their parameters. The public terms of the
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
    budget_split: tuple[float, float, float, float, float, float, float] = eqx.field(
        default=(0.25, 0.02, 0.3, 0.03, 0.68, 0.02, 0.7), converter=_checks.floats
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
            return lower_objective(mixing, None)
        if name == SCORE:
            return score_objective(problem, _mixed(outputs), w0[1])
        if name == FIT:
            return self.fit_objective(problem, w0, outputs)
        mixture = self._mixture(name, outputs)
        if name in (MIXTURE, REMIXTURE):
            return mixture_objective(problem, mixture)
        return moments_objective(problem, mixture)

    @override
    def start(self, name, w0, outputs):
        x, y = w0
        if name == MODELS:
            return mixing_start(y, len(x))[1]
        if name == SCORE:
            return self.score_start(w0)
        if name == FIT:
            return self._mean_of_kept(outputs)
        size = len(x) + (1 if name in (MOMENTS, MIXTURE) else 2)
        shape = (size, size) if name in (MOMENTS, REMOMENTS) else size
        return jnp.zeros(shape, dtype_of(y))

    def _mean_of_kept(self, outputs: Outputs) -> PyTree:
        """Return the mean of the models of kept sources, weighted by their sizes."""
        weights = self.kept(outputs) * self.source_fractions(outputs)
        weights = weights / jnp.sum(weights)
        models: Any = outputs[MODELS]
        return jax.tree.map(lambda v: jnp.tensordot(weights, v[:-1], 1), models)

    def _mixture(self, name: str, outputs: Outputs) -> Mixture:
        """Return the mixture of a stage, in coordinates that earlier outputs scale."""
        if name in (MOMENTS, MIXTURE):
            return _of_sources(outputs, outputs[MOMENTS] if name == MIXTURE else None)
        kept, fraction = self.kept(outputs), self.kept_fraction(outputs)

        def stacked(models, mixture, last):
            of_sources = models[:-1] * kept.reshape((-1,) + (1,) * last.ndim)
            return jnp.concatenate([of_sources, mixture[None], last[None]])

        models = jax.tree.map(stacked, outputs[MODELS], _mixed(outputs), outputs[FIT])
        first = jnp.maximum(fraction - 0.5, 0)
        start = jnp.append(jnp.zeros_like(kept), jnp.stack([first, 1 - first]))
        moments = outputs[REMOMENTS] if name == REMIXTURE else None
        return Mixture(models, start, moments)

    @override
    def current_solution(self, name, problem, w0, outputs):
        x, y = w0
        if name in (MIXTURE, SCORE):
            y = _mixed(outputs)
        elif name in (FIT, REMOMENTS):
            y = outputs[FIT]
        elif name == REMIXTURE:
            y = self._mixture(name, outputs).model(outputs[name])
        return x, y


def _of_sources(outputs: Outputs, moments: Array | None) -> Mixture:
    """Return mixtures of the models of the sources, from the common model."""
    first = jax.tree.leaves(outputs[MODELS])[0]
    start = jnp.zeros(len(first), first.dtype).at[-1].set(1.0)
    return Mixture(outputs[MODELS], start, moments)


def _mixed(outputs: Outputs) -> PyTree:
    """Return the model of the mixture of line 3."""
    return _of_sources(outputs, outputs[MOMENTS]).model(outputs[MIXTURE])
