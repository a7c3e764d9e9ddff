"""Sources chosen by a first model, and one private model of those that are kept."""

from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from .._checks import SignedShare
from ..bilevel.levels import equal_weights, queries_of, validation_objective
from ..onelevel.adaptive_clip import NoisyDescent
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from .source_pipeline import (
    FIT,
    ONE_MEAN,
    SCORE,
    AbstractSourcePipeline,
    score_objective,
)
from .sources import ModelLoss, SourceWeighting, source_weighting

MODEL = "model"


class ScoringModel(eqx.Module):
    r"""Model that scores sources and is not released.

    Args:
        loss: $\ell_1(y, z)$: the loss on one record, as in `source_weighting`. Static.
        start: The initial point, public. `model` of `SelectedSources` solves for it.
    """

    loss: ModelLoss = eqx.field(static=True)
    start: PyTree


class SelectedSources(AbstractSourcePipeline):
    r"""Keeps the sources that a model of the validation records fits.

    1. `model` fits $y_1$ on the validation records.
    2. `score` releases, for each source $s$, the means of $\pm 1_{s_i = s}$ and of
       $1_{s_i = s}$ over the training records. The sign is plus if the model is better
       than the start, $\ell(y_1, z'_i) < \ell(y_0, z'_i)$. The score of a source is the
       ratio of both means.
    3. `fit` fits $y$ on the records of the sources with a score above `keep_above`, or
       on these and the validation records, with the same weight for each.

    A heuristic of two stages, not a method of bilevel optimization. If every source is
    either good or bad, few methods are better.

    Args:
        model: The one-level solver of the validation records.
        fit: The one-level solver of the training records. A step size that is a number
            refers to the mean over the records that are kept. Steps are at most four
            times as long as on all records.
        keep_above: The least score of a source that is kept, in [-1, 1]: the fraction
            of its records on which the model is better, less the fraction of the
            others. A source below a tenth of the mean size counts as of that size.
        budget_split: The split of the squared budget over model, score and fit. With
            disjoint people the first is charged to upper records only, the others to
            lower ones. With `fit_reads="both"` the fit is charged to both levels, and
            disjoint people are charged a quarter of its part. `(0.03, 0.02, 0.95)` then
            spends about a tenth on the model.
        score: The one step that releases the scores.
        fit_reads: The levels that `fit` reads, `"lower"` or `"both"`. `"both"` is
            better if validation records are not much fewer than those of a source.
            Static.
        scoring: Another model for lines 1 and 2, with its own loss and initial point. A
            private fit of few validation records is better with few parameters: a
            linear model finds the sources for a network. `None` takes the model of the
            problem.

    Privacy:
        The releases of three runs. Only released values pass from one to the next.
    """

    model: NoisyDescent
    fit: NoisyDescent
    keep_above: SignedShare = 0.1
    budget_split: tuple[float, float, float] = _checks.split_field(1.0, 0.05, 0.95)
    score: NoisyGD = ONE_MEAN
    fit_reads: Literal["lower", "both"] = eqx.field(static=True, default="lower")
    scoring: ScoringModel | None = None
    stages: ClassVar = dict.fromkeys((MODEL, SCORE, FIT), AbstractFiniteSum)

    @property
    @override
    def fit_penalty(self) -> float | None:
        return equal_weights(self.sizes) if self.fit_reads == "both" else None

    @override
    def queries(self, name):
        if name == FIT:
            return queries_of(self.fit_reads)
        return queries_of("upper" if name == MODEL else "lower")

    @override
    def objective(self, name, problem, w0, outputs):
        if name == FIT:
            return self.fit_objective(problem, w0, outputs)
        first, (x, start) = self._first(problem), self._first_w0(w0)
        if name == MODEL:
            return validation_objective(first, x)
        return score_objective(first, outputs[MODEL], start)

    @override
    def start(self, name, w0, outputs):
        if name == SCORE:
            return self.score_start(w0)
        return self._first_w0(w0)[1] if name == MODEL else w0[1]

    @override
    def current_solution(self, name, problem, w0, outputs):
        if name == FIT:
            return w0[0], outputs[FIT]
        return w0 if self.scoring else (w0[0], outputs[MODEL])

    def _first(self, problem: SourceWeighting) -> SourceWeighting:
        """Return the `SourceWeighting` problem whose model scores the sources."""
        if self.scoring is None:
            return problem
        loss, count = self.scoring.loss, problem.num_sources
        first = source_weighting(loss, count, source=problem.source)
        return problem.on_same_records(first)

    def _first_w0(self, w0: PyTree) -> PyTree:
        """Return the initial (x, y) of the problem whose model scores the sources."""
        if self.scoring is None:
            return w0
        return w0[0], jax.tree.map(jnp.asarray, self.scoring.start)
