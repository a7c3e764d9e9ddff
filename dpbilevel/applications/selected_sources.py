"""Pipelines that score data sources and fit one private model to the kept ones."""

import dataclasses
from typing import Any, ClassVar, Literal
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import SignedShare
from ..bilevel import levels
from ..bilevel.pipeline import AbstractPipeline, Outputs
from ..core.descent import scaled
from ..onelevel.adaptive import NoisyDescent
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.exact.floats import is_finite
from ..sets import Euclidean
from .sources import ModelLoss, SourceWeighting, source_weighting

SCORE, FIT = "score", "fit"
# Lengths of the two entries of a record in `score_objective`; their squares sum to 1.
_OF_SIGN, _OF_FRACTION = 0.96, 0.28
# Logit of a source that is dropped: a weight of about 1e-13.
_DROPPED = -30.0
# Sources below a tenth of the mean size count as of that size: noise is no denominator.
_LEAST_SIZE = 0.1
# If few records are kept, steps as long as on these alone would multiply the noise,
# which is relative to all records. Steps are at most this many times as long.
_LONGEST = 4.0
# One step of descent on a linear function: a noisy mean of vectors of norm 1.
ONE_MEAN = NoisyGD(1, clip_norm=1.0, step_size=1.0)


class AbstractSourcePipeline(AbstractPipeline):
    """Pipeline: a first model, a score for each source, a model of the kept sources.

    Attributes:
        score: The one step that releases the scores.
        fit: The solver of the last model.
        keep_above: The least score of a source that is kept.
        fit_penalty: Penalty of the fit if it reads validation records too, else `None`.
    """

    score: AbstractVar[NoisyDescent]
    fit: AbstractVar[NoisyDescent]
    keep_above: AbstractVar[SignedShare]
    problem_type: ClassVar[type] = SourceWeighting
    in_config: ClassVar[bool] = True
    fit_penalty: ClassVar[float | None] = None

    def kept(self, outputs: Outputs) -> Float[Array, " k"]:
        """Return an array: 1 for each kept source, 0 for others; all 1 if none is."""
        signs, _ = signs_and_fractions(outputs[SCORE])
        score = signs / self.source_fractions(outputs)
        kept = score > self.keep_above
        return jnp.where(jnp.any(kept), kept, True).astype(score.dtype)

    def source_fractions(self, outputs: Outputs) -> Float[Array, " k"]:
        """Return each source's released fraction of records, bounded from below."""
        _, fractions = signs_and_fractions(outputs[SCORE])
        return jnp.clip(fractions, _LEAST_SIZE / len(fractions), 1.0)

    def kept_fraction(self, outputs: Outputs) -> Float[Array, ""]:
        """Return the released fraction of the training records that are kept."""
        kept, (_, fractions) = self.kept(outputs), signs_and_fractions(outputs[SCORE])
        return jnp.clip(jnp.sum(kept * fractions), _LEAST_SIZE / len(kept), 1.0)

    def fit_weight(self, outputs: Outputs) -> Float[Array, ""]:
        """Return the fit's number of records over the number of lower records."""
        penalty = self.fit_penalty
        return self.kept_fraction(outputs) + (0.0 if penalty is None else 1 / penalty)

    @override
    def for_stage(self, name):
        solvers = dict.fromkeys(self.stages, getattr(self, name))
        return dataclasses.replace(self, **solvers)

    @override
    def step_factor(self, name, outputs):
        if name != FIT:
            return None
        # The gradient is a mean over all records: as long a step as on the kept alone.
        return jnp.minimum(1 / self.fit_weight(outputs), _LONGEST)

    @override
    def forecast(self, problem, sizes, w0):
        """Return a tuple of `ForecastRow`s: overshooting steps of the fit, if any."""
        return levels.rows_of_steps(problem, w0, {FIT: self.fit})

    def fit_objective(self, problem: SourceWeighting, w0, outputs) -> levels.Objective:
        r"""Return the `Objective` of the fit: the model's loss on the kept sources.

        It is the mean of $w_{s_i} \ell(y, z'_i)$ plus $\bar w\, r_g(y)$.
        The weights $w \in \{0, 1\}^k$ of kept sources do not exceed 1, so that the clip
        norm is that of the loss of the model. The mean is over all records. The factor
        $\bar w$, the number of records of the fit over that of lower ones, gives the
        public term its weight beside a mean over the records of the fit alone.
        """
        whole = levels.lower_objective(problem, w0[0], self.fit_penalty)
        kept, weight = self.kept(outputs), self.fit_weight(outputs)

        def weighted(y, row):
            index, known = problem.index(row)
            loss = problem.loss(y, row)
            return jnp.where(known, kept[index], 0).astype(loss.dtype) * loss

        def public(w):
            if problem.lower_public is None:
                return optax.tree.zeros_like(w)
            return scaled(weight, jax.grad(problem.lower_public, 1)(w0[0], w))

        lower = jax.grad(problem.of_record(weighted))
        records = {**whole.records, "lower": lower}
        return dataclasses.replace(whole, records=records, public=public)

    def score_start(self, w0: PyTree) -> Float[Array, "2 k"]:
        """Return zeros of shape (2, k), the initial point of the scores."""
        return jnp.zeros((2, len(w0[0])), dtype_of(w0[1]))

    @override
    def answer(self, problem: Any, state):
        """Return the pair (x, y), in which x weighs the kept sources equally."""
        kept = self.kept(state.outputs)
        x = kept / jnp.sum(kept)
        if problem.parametrization == "logits":
            x = jnp.where(kept > 0, 0.0, _DROPPED)
        y = problem.y_set.project(state.solution[1])  # mixtures may lie outside
        return x.astype(state.w0[0].dtype), y


def score_objective(
    problem: SourceWeighting, model: PyTree, start: PyTree
) -> levels.Objective:
    r"""Return the linear `Objective` that one step of size 1 solves for the scores.

    Entry $(0, s)$ is $a = 0.96$ times the mean over all training records of $1$ or $-1$
    for those of source $s$ and $0$ for others. It is $1$ if `model` has a smaller loss
    than `start`. Entry $(1, s)$ is $b = 0.28$ times the fraction of records of source
    $s$. As $a^2 + b^2 = 1$, a record is a vector of norm 1: the sizes of the sources
    cost the signs 4 % of their precision. A record whose source is unknown, or whose
    loss is not finite, is the vector 0.
    """

    def lower(w, row):
        index, known = problem.index(row)
        before, after = (problem.loss(y, row) for y in (start, model))
        sign = jnp.where(after < before, 1, -1)
        row = jnp.stack([_OF_SIGN * sign, jnp.asarray(_OF_FRACTION)]).astype(w.dtype)
        # A record that no model can be fitted to says nothing about its source.
        counts = known & is_finite(before) & is_finite(after)
        return jnp.where(counts, -jnp.zeros_like(w).at[:, index].set(row), 0)

    return levels.Objective(Euclidean(), {"lower": problem.of_record(lower)})


def signs_and_fractions(
    released: Float[Array, "2 k"],
) -> tuple[Float[Array, " k"], Float[Array, " k"]]:
    """Return two arrays by source: the mean sign, and the fraction of records."""
    signs, fractions = released
    return signs / _OF_SIGN, fractions / _OF_FRACTION


def dtype_of(model: PyTree) -> jnp.dtype:
    """Return the dtype of a model's first leaf."""
    return jax.tree.leaves(model)[0].dtype


MODEL = "model"


class ScoringModel(eqx.Module):
    r"""Loss and initial point of a separate model that only scores the sources.

    Args:
        loss: $\ell_1(y, z)$: the loss on one record, as in `source_weighting`. Static.
        start: The initial point, public. `model` of `SelectedSources` solves for it.
    """

    loss: ModelLoss = eqx.field(static=True)
    start: PyTree


class SelectedSources(AbstractSourcePipeline):
    r"""Fits one model to the sources that a model of the validation records fits.

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
        return levels.equal_weights(self.sizes) if self.fit_reads == "both" else None

    @override
    def queries(self, name):
        if name == FIT:
            return levels.queries_of(self.fit_reads)
        return levels.queries_of("upper" if name == MODEL else "lower")

    @override
    def objective(self, name, problem, w0, outputs):
        if name == FIT:
            return self.fit_objective(problem, w0, outputs)
        first, (x, start) = self._first(problem), self._first_w0(w0)
        if name == MODEL:
            return levels.validation_objective(first, x)
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

    @override
    def for_stage(self, name):
        alike = super().for_stage(name)
        return alike if name == FIT else dataclasses.replace(alike, fit_reads="lower")

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
