"""Sources chosen by a first model, and one private model of those that are kept."""

from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import AbstractVar, Positive, SignedShare
from ..bilevel.penalized import (
    PenalizedLevel,
    ValidationLevel,
    equal_weights,
    rows_of_steps,
)
from ..bilevel.runs import AbstractPipeline, RunState
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from .base import (
    ModelLoss,
    SourceWeighting,
    mixing_start,
    source_mixing,
    source_weighting,
)
from .source_levels import (
    Kept,
    Mixture,
    Moments,
    Scores,
    mixing_level,
    signs_and_shares,
)

MODEL, MODELS, MOMENTS, MIXTURE = "model", "models", "moments", "mixture"
SCORE, FIT, REMOMENTS, REMIXTURE = "score", "fit", "remoments", "remixture"
# The logit of a source that is dropped: a weight of about 1e-13.
_DROPPED = -30.0
# Sources below a tenth of the mean size count as of that size: noise is no denominator.
_LEAST_SIZE = 0.1
# Where few records are kept, steps as long as on these alone would multiply the noise,
# which is that of all records: at most so many times as long as on all of them.
_LONGEST = 4.0
# A noisy mean of vectors of norm 1 as one step of descent on a linear function.
_ONE_MEAN = NoisyGD(1, clip_norm=1.0, step_size=1.0)


class _AbstractSourceRuns(AbstractPipeline):
    """A first model, a score for each source, a model of the sources that are kept."""

    score: AbstractVar[NoisyGD]
    fit: AbstractVar[NoisyGD]
    keep_above: AbstractVar[SignedShare]
    problem_type: ClassVar[type] = SourceWeighting
    in_config: ClassVar[bool] = True

    @property
    def fits_both(self) -> bool:
        """Whether `fit` reads the validation records, too."""
        return False

    def kept(self, found: dict) -> Float[Array, " k"]:
        """1 for the sources that are kept, all of them where none passes, else 0."""
        signs, _ = signs_and_shares(found[SCORE])
        score = signs / self.source_shares(found)
        kept = score > self.keep_above
        return jnp.where(jnp.any(kept), kept, True).astype(score.dtype)

    def source_shares(self, found: dict) -> Float[Array, " k"]:
        """The released shares of the sources, as denominators and weights."""
        _, shares = signs_and_shares(found[SCORE])
        return jnp.clip(shares, _LEAST_SIZE / len(shares), 1.0)

    def kept_share(self, found: dict) -> Float[Array, ""]:
        """The released share of the training records whose sources are kept."""
        kept, (_, shares) = self.kept(found), signs_and_shares(found[SCORE])
        return jnp.clip(jnp.sum(kept * shares), _LEAST_SIZE / len(kept), 1.0)

    @override
    def step_factor(self, name, found):
        if name != FIT:
            return None
        # The gradient is a mean over all records: as long a step as on the kept alone.
        return jnp.minimum(1 / self.of_kept(None, None, found).share, _LONGEST)

    @override
    def forecast(self, problem, sizes, w0):
        """A row where steps of the fit, which alone meets them, overshoot the terms."""
        return rows_of_steps(problem, w0, {FIT: self.fit})

    def scored(self, problem, w0, model) -> AbstractFiniteSum:
        """The one-level problem whose answer is the sources' mean scores."""
        return Scores(problem, model, w0 and w0[1])

    def of_kept(self, problem, w0, found) -> Kept:
        """The lower level on the sources that are kept, with the upper one if asked."""
        kept, share = found and self.kept(found), found and self.kept_share(found)
        x, penalty = w0 and w0[0], None
        if self.fits_both:
            penalty = equal_weights(type(self).__name__, self.sizes)
        return Kept(problem, x, penalty, self.fit.clip_norm, kept, share)

    @override
    def start(self, name, w0, found):
        x, y = w0
        return jnp.zeros((2, len(x)), _dtype(y)) if name == SCORE else y

    @override
    def answer(self, problem: Any, state: RunState) -> PyTree:
        """The weights of the kept sources, in the problem's parametrization, and y."""
        kept = self.kept(state.found)
        x = kept / jnp.sum(kept)
        if problem.parametrization == "logits":
            x = jnp.where(kept > 0, 0.0, _DROPPED)
        y = problem.y_set.project(state.shown[1])  # mixtures may lie outside
        return x.astype(state.w0[0].dtype), y


class ScoringModel(eqx.Module):
    r"""The model that scores sources, where it is not the one that is released.

    Args:
        loss: $\ell_1(y, z)$: its loss on one record, as that of `source_weighting`.
            Static.
        start: Where it starts, public; `model` of `SelectedSources` solves for it.
    """

    loss: ModelLoss = eqx.field(static=True)
    start: PyTree


class SelectedSources(_AbstractSourceRuns):
    r"""Keeps the sources that a model of the validation records fits.

    1. `model` fits $y_1$ on the validation records.
    2. `score` releases, for each source $s$, the means of $\pm 1_{s_i = s}$ and of
       $1_{s_i = s}$ over the training records, plus where the model is better than the
       start, $\ell(y_1, z'_i) < \ell(y_0, z'_i)$. The score of a source is their ratio.
    3. `fit` fits $y$ on the records of the sources with a score above `keep_above`,
       or on these and the validation records, each of which weighs the same.

    A heuristic of two stages, not a method of bilevel optimization. Where each source
    is either good or bad, few methods are better.

    Args:
        model: The one-level solver of the validation records.
        fit: That of the training records. A step size that is a number refers to the
            mean over the records that are kept; steps are at most four times as long
            as on all records.
        keep_above: The least score of a source that is kept, in [-1, 1]: the share of
            its records on which the model is better, less the share of the others.
            A source below a tenth of the mean size counts as of that size.
        budget_split: How the squared budget is split over model, score and fit. With
            disjoint people the first is charged to upper records only, the others to
            lower ones. With `fit_reads="both"` the fit is charged to both, and disjoint
            people are charged a quarter of its share, which is that of a person with a
            record in each level: `(0.03, 0.02, 0.95)` spends about a tenth on the
            model.
        score: The one step that releases the scores.
        fit_reads: The levels that `fit` reads, `"lower"` or `"both"`. Both is better
            where validation records are not much fewer than those of a source. Static.
        scoring: Another model for lines 1 and 2, with a loss and a start of its own.
            A private fit of few validation records is better with few parameters: a
            linear model finds the sources for a network. `None` takes the problem's.

    Privacy:
        The releases of three runs. What passes from one to the next is released.
    """

    model: NoisyGD
    fit: NoisyGD
    keep_above: SignedShare = 0.1
    budget_split: tuple[float, float, float] = eqx.field(
        default=(1.0, 0.05, 0.95), converter=_checks.floats
    )
    score: NoisyGD = _ONE_MEAN
    fit_reads: Literal["lower", "both"] = eqx.field(static=True, default="lower")
    scoring: ScoringModel | None = None
    stages: ClassVar = dict.fromkeys((MODEL, SCORE, FIT), AbstractFiniteSum)

    @property
    @override
    def fits_both(self) -> bool:
        return self.fit_reads == "both"

    @override
    def level(self, name, problem, w0, found):
        if name == FIT:
            return self.of_kept(problem, w0, found)
        first, w0 = self._first(problem), w0 and self._first_w0(w0)
        if name == MODEL:
            return ValidationLevel(first, w0 and w0[0])
        return self.scored(first, w0, found and found[MODEL])

    @override
    def start(self, name, w0, found):
        return super().start(name, self._first_w0(w0) if name == MODEL else w0, found)

    @override
    def current_solution(self, name, problem, w0, found):
        if name == FIT:
            return w0[0], found[FIT]
        return w0 if self.scoring else (w0[0], found[MODEL])

    def _first(self, problem: SourceWeighting) -> SourceWeighting:
        """The problem whose model scores the sources."""
        if self.scoring is None:
            return problem
        return source_weighting(
            self.scoring.loss, problem.num_sources, source=problem.source
        )

    def _first_w0(self, w0: PyTree) -> PyTree:
        """The start of that problem."""
        if self.scoring is None:
            return w0
        return w0[0], jax.tree.map(jnp.asarray, self.scoring.start)


class MixedSources(_AbstractSourceRuns):
    r"""Mixes models of the sources, drops sources that the mixture does not fit.

    1. `models` fits one model for each source and a common one, `source_mixing`.
    2. `moments` releases the second moments of the directions of the training records'
       gradients with respect to mixtures of these models, at the common one.
    3. `mixture` fits a mixture on the validation records, from the common model, in
       coordinates that the models and their second moments scale.
    4. `score` releases the sources' scores under the mixture, as `SelectedSources`.
    5. `fit` fits one model of the sources with a score above `keep_above`. It starts at
       the mean of their models, weighted by their released sizes.
    6. `remoments` and `remixture` do as lines 2 and 3 with that model, the mixture of
       line 3 and the models of the kept sources. The start is halfway between the
       first two where no record is dropped, because then no one model of the sources
       may suit the population, and the model of line 5 where half of the records are.

    The validation losses have gradients in mixtures only, $k + 2$ numbers, so that a
    few hundred validation records are enough under noise. The coordinates matter: the
    models are alike, and few directions change most predictions, so that steps in the
    coefficients themselves are too long along these and too short along all others.
    For models that are linear in their parameters. The public terms of the problem are
    part of line 5 alone; the released mixture is projected onto the set of y.

    Args:
        models: The one-level solver of line 1.
        mixture: That of line 3. Gradients in its coordinates are about as long as those
            of a model, so that clip norms and step sizes are in the same units.
        fit: That of line 5. A step size that is a number refers to the mean over the
            records that are kept; steps are at most four times as long as on all
            records.
        remixture: That of line 6.
        shared: $a > 0$, the weight of the common model, as in `source_mixing`.
        keep_above: As in `SelectedSources`.
        budget_split: How the squared budget is split over `models`, `moments`,
            `mixture`, `score`, `fit`, `remoments` and `remixture`. With disjoint people
            the two mixtures are charged to upper records, all else to lower ones; the
            default uses the whole budget of both.
        moments: The one step that releases the second moments.
        score: The one step that releases the scores.
        remoments: The one step that releases the second moments of line 6.

    Privacy:
        The releases of seven runs. What passes from one to the next is released. A
        training record is a matrix of norm 1 in `moments` and `remoments`.

    References:
        Breiman, "Stacked regressions", 1996, of models that are fitted on one source
        each.
    """

    models: NoisyGD
    mixture: NoisyGD
    fit: NoisyGD
    remixture: NoisyGD
    shared: Positive = 0.5
    keep_above: SignedShare = 0.1
    budget_split: tuple[float, float, float, float, float, float, float] = eqx.field(
        default=(0.25, 0.02, 0.3, 0.03, 0.68, 0.02, 0.7), converter=_checks.floats
    )
    moments: NoisyGD = _ONE_MEAN
    score: NoisyGD = _ONE_MEAN
    remoments: NoisyGD = _ONE_MEAN
    stages: ClassVar = dict.fromkeys(
        (MODELS, MOMENTS, MIXTURE, SCORE, FIT, REMOMENTS, REMIXTURE), AbstractFiniteSum
    )

    @override
    def level(self, name, problem, w0, found):
        if name == MODELS:
            mixing = source_mixing(
                problem.loss,
                problem.num_sources,
                shared=self.shared,
                source=problem.source,
            )
            return PenalizedLevel(mixing, None)
        if name == SCORE:
            return self.scored(problem, w0, found and _mixed(found))
        if name == FIT:
            return self.of_kept(problem, w0, found)
        level = Moments if name in (MOMENTS, REMOMENTS) else mixing_level
        mixture: Any = found and self._mixture(name, found)
        return level(problem, mixture)

    @override
    def start(self, name, w0, found):
        x, y = w0
        if name == MODELS:
            return mixing_start(y, len(x))[1]
        if name == SCORE:
            return super().start(name, w0, found)
        if name == FIT:
            return self._mean_of_kept(found)
        size = len(x) + (1 if name in (MOMENTS, MIXTURE) else 2)
        shape = (size, size) if name in (MOMENTS, REMOMENTS) else size
        return jnp.zeros(shape, _dtype(y))

    def _mean_of_kept(self, found: dict) -> PyTree:
        """The mean of the models of the sources that are kept, by their sizes."""
        weights = self.kept(found) * self.source_shares(found)
        weights = weights / jnp.sum(weights)
        return jax.tree.map(lambda v: jnp.tensordot(weights, v[:-1], 1), found[MODELS])

    def _mixture(self, name: str, found: dict) -> Mixture:
        """The mixture of a run, in coordinates that what was found scales."""
        if name in (MOMENTS, MIXTURE):
            return _of_sources(found, found[MOMENTS] if name == MIXTURE else None)
        kept, of_kept = self.kept(found), self.kept_share(found)

        def stacked(models, mixture, last):
            of_sources = models[:-1] * kept.reshape((-1,) + (1,) * last.ndim)
            return jnp.concatenate([of_sources, mixture[None], last[None]])

        models = jax.tree.map(stacked, found[MODELS], _mixed(found), found[FIT])
        first = jnp.maximum(of_kept - 0.5, 0)
        start = jnp.append(jnp.zeros_like(kept), jnp.stack([first, 1 - first]))
        return Mixture(models, start, found[REMOMENTS] if name == REMIXTURE else None)

    @override
    def current_solution(self, name, problem, w0, found):
        x, y = w0
        if name in (MIXTURE, SCORE):
            y = _mixed(found)
        elif name in (FIT, REMOMENTS):
            y = found[FIT]
        elif name == REMIXTURE:
            y = self._mixture(name, found).model(found[name])
        return x, y


def _dtype(model: PyTree) -> jnp.dtype:
    """That of the numbers that are released about a model."""
    return jax.tree.leaves(model)[0].dtype


def _of_sources(found: dict, moments: Array | None) -> Mixture:
    """Mixtures of the models of the sources, from the common model."""
    first = jax.tree.leaves(found[MODELS])[0]
    start = jnp.zeros(len(first), first.dtype).at[-1].set(1.0)
    return Mixture(found[MODELS], start, moments)


def _mixed(found: dict) -> PyTree:
    """The model of the mixture of line 3."""
    return _of_sources(found, found[MOMENTS]).model(found[MIXTURE])
