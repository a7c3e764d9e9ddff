"""Training with privately selected settings, which protects records of both levels."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, Number, Positive, check_fields
from ..bilevel.levels import lower_level
from ..bilevel.problem import BilevelProblem, Sizes
from ..core.descent import SkippedUpdates
from ..core.loop import inner_solve
from ..core.solver import AbstractGaussianSolver
from ..onelevel.adaptive import NoisyDescent
from ..privacy.accounting.repetitions import Repetitions
from ..privacy.budget import People
from ..privacy.keys import derive
from ..privacy.ledger import Ledger
from ..privacy.queries import Query
from ..privacy.sampling.base import FullBatch
from .losses import clip_and_center
from .repeat_and_select import BestRun, Selection, check_enough

BEST = "model of the least validation loss"


class Trained(eqx.Module):
    """Outcome of one training: the pair (x, y) and the index of its candidate."""

    pair: PyTree  # (x, y)
    setting: Int[Array, ""]  # index of the candidate, -1 for the initial point
    rejected: Int[Array, ""]  # number of skipped updates


class TuningState(eqx.Module):
    """State after some runs; skipped updates are those of the released run."""

    runs: BestRun
    rejections: SkippedUpdates


class TunedTraining(AbstractGaussianSolver[BilevelProblem, TuningState]):
    r"""The best of $K$ private trainings by their noisy validation losses.

    One run, which is a step:

    1. draw a candidate $j$ uniformly, without data;
    2. train $y \approx \arg\min_y g(x_0, y)$ by it on the lower records;
    3. compute $f(x_0, y)$: the mean of the upper records' losses, clipped to $[0, B]$,
       with noise, plus $r_f$.

    Of $K$ runs, $K$ random, only the best is released: model, candidate and noisy loss,
    at a privacy cost little above that of one run, for any number of candidates. There
    are always `num_steps` runs; those after the first $K$ are ignored. If $K$ is zero,
    which a Poisson distribution allows, the answer is the initial point.

    If the losses read no $x$, let the initial point be `(None, y)`: the answer's `x` is
    then the index of the selected candidate, -1 if $K$ is zero.

    Args:
        candidates: The trainings to select from, on full batches: step sizes, clip
            norms, numbers of steps. Choose them without looking at the records.
        num_steps: The number of runs; far above `mean`, as in `RepeatAndSelect`.
            Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        mean: The expected $K$, above 1. Static.
        shape: Shape of the distribution of $K$, as in `RepeatAndSelect`. Static.
        budget_split: Parts of the squared budget of one run for training and loss. Use
            equal parts for disjoint people, who are charged for one of them only.

    Raises:
        ValueError: There is no candidate, one samples batches, or runs are too few.

    Privacy:
        One selection among runs of Gaussian releases: gradients of sensitivity $2C/n_g$
        and a loss of sensitivity $B/n_f$ under replace-one, half of that under
        add-or-remove-one, enforced by clipping. Training is part of the selection, so
        one guarantee protects training and validation records: a person with records in
        both levels is charged for both, disjoint people for one. The models, losses and
        counts of all other runs are secret, and so are their candidates: if these are
        different programs, time is unprotected.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022, Theorems 2 and 6; Koskela, Redberg and Wang, "Privacy profiles for
        private selection", ICML 2024, of whose bound the profile here is a variant; the
        proof for both levels is in `docs/tuned_training.md`.
    """

    candidates: tuple[NoisyDescent, ...]
    num_steps: Count = eqx.field(static=True)
    clip_range: Positive
    mean: float = eqx.field(static=True)
    shape: float = eqx.field(static=True, default=1.0)
    budget_split: tuple[float, float] = eqx.field(
        default=(1.0, 1.0), converter=_checks.floats
    )
    problem_type: ClassVar[type] = BilevelProblem
    in_config: ClassVar[bool] = False

    def __check_init__(self):
        check_fields(self)
        owner = "TunedTraining"
        if not self.candidates:
            raise ValueError(f"{owner}: candidates is empty.")
        for number, candidate in enumerate(self.candidates):
            named = {f"candidates[{number}]": candidate}
            _checks.instance(owner, NoisyDescent, **named)
            if not isinstance(candidate.sampling, FullBatch):
                raise ValueError(
                    f"{owner}: candidates[{number}] samples by {candidate.sampling}, "
                    "which private selection does not support. Use FullBatch()."
                )
        _checks.budget_split(owner, self.budget_split, "training", "loss")
        check_enough(owner, self.repetitions, self.num_steps)

    @property
    def repetitions(self) -> Repetitions:
        """Distribution of the number of runs that count."""
        return Repetitions(self.mean, self.shape)

    @override
    def init(self, problem: BilevelProblem, w0: PyTree) -> TuningState:
        x, y = jax.tree.map(jnp.asarray, tuple(w0))
        pair = problem.x_set.project(x), problem.y_set.project(y)
        none = jnp.zeros((), jnp.int32)
        start = Trained(pair, none - 1, none)
        dtype = jnp.result_type(*jax.tree.leaves(y))
        return TuningState(BestRun.start(start, dtype), SkippedUpdates())

    def step(self, problem, data, state, *, key) -> TuningState:
        """Make one run, keep it if it is the best so far, and return the state."""
        names = "setting", "model", "value", "repeats"
        key_setting, key_model, key_value, key_repeats = derive(key, *names)
        # Nothing but the initial point is shown before the end.
        x, y0 = state.runs.w.pair
        level = lower_level(problem, x)

        def train(candidate):
            solver = candidate.with_sizes(self.sizes)
            return inner_solve(level, solver, data, y0, key=key_model)

        count = len(self.candidates)
        setting = jax.random.randint(key_setting, (), 0, count, jnp.int32)  # line 1
        y, rejected = _train_one(self.candidates, setting, train)  # line 2
        center = clip_and_center(self.clip_range)  # line 3
        losses = {"upper": lambda record: center(problem.upper(x, y, record))}
        release = self._selection(problem, self.sizes)
        value = release.apply(losses, data, key=key_value)
        value += jnp.asarray(self.clip_range, value.dtype) / 2  # back in [0, B]
        if problem.upper_public is not None:
            value += jnp.asarray(problem.upper_public(x, y), value.dtype)
        value = value.astype(state.runs.value.dtype)
        trained = Trained((x, y), setting, rejected)
        planned = self.repetitions, self.num_steps
        runs = state.runs.after(trained, value, *planned, key=key_repeats)
        return TuningState(runs, SkippedUpdates(runs.w.rejected))

    def released(self, state: TuningState) -> tuple[Trained, Float[Array, ""]]:
        """Return the best `Trained` and its loss; before the last run `w0` and 0."""
        return state.runs.w, state.runs.value

    @override
    def answer(self, problem: BilevelProblem, state: TuningState) -> PyTree:
        """Return the released pair (x, y); without x, the candidate's index and y."""
        x, y = state.runs.w.pair
        return state.runs.w.setting if x is None else x, y

    @override
    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        people = getattr(sizes, "people", People.OVERLAPPING)
        level = lower_level(problem, None)
        ledgers = [c.ledger(level, sizes) for c in self.candidates]
        assumptions = [text for ledger in ledgers for text in ledger.assumptions]
        if len(set(map(jax.tree.structure, self.candidates))) > 1:
            assumptions.append(
                "unprotected: the time of the runs and the number of their passes over "
                "records on disk, which reveal the candidates of runs that are not "
                "released"
            )
        selection = self._selection(problem, sizes)
        return Ledger((selection,), people, tuple(dict.fromkeys(assumptions)))

    def _selection(self, problem, sizes) -> Selection:
        level = lower_level(problem, None)
        queries = (Query("upper", sizes.upper, self.clip_range / 2),)
        runs = tuple(c.ledger(level, sizes).releases for c in self.candidates)
        parts = BEST, 1, queries, self.release_noise, self.repetitions, self.num_steps
        return Selection(*parts, trainings=runs)

    def with_noise(self, scale: Number) -> Self:
        """Return a copy with 1/scale-GDP runs for people that are in both levels."""
        training, loss = (part / sum(self.budget_split) for part in self.budget_split)
        candidates = (c.with_noise(scale / training**0.5) for c in self.candidates)
        changes = {"candidates": tuple(candidates)}
        changes["noise_multiplier"] = scale / loss**0.5
        return dataclasses.replace(self, **changes)

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        return {BEST: 1}


def _train_one(
    candidates: tuple[NoisyDescent, ...],
    setting: Int[Array, ""],
    train: Callable[[NoisyDescent], PyTree],
) -> PyTree:
    """Train the candidate of index `setting`, and return what `train` returns.

    Candidates that differ in numbers alone share one program.
    """
    leaves, kinds = zip(*map(jax.tree.flatten, candidates), strict=True)
    programs = list(dict.fromkeys(kinds))

    def run(kind):
        first = kinds.index(kind)
        rows = [
            row if same == kind else leaves[first]
            for row, same in zip(leaves, kinds, strict=True)
        ]
        numbers = [jnp.asarray(column)[setting] for column in zip(*rows, strict=True)]
        return train(jax.tree.unflatten(kind, numbers))

    number = jnp.asarray([programs.index(kind) for kind in kinds])[setting]
    return jax.lax.switch(number, [functools.partial(run, k) for k in programs])
