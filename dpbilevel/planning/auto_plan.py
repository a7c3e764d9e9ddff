"""`auto`: the call that compares methods and returns the best one's `AutoPlan`."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key, PyTree
from typing_extensions import override

from .. import _checks
from .._extras import check_installed
from ..applications.penalties import PenaltyTuning, penalty_start
from ..applications.sources import SourceWeighting
from ..bilevel.problem import BilevelProblem, Sizes
from ..core.levels import check_pair
from ..core.plan import calibrated
from ..core.problem import AbstractProblem, arrays_of
from ..core.proximal import check_smooth
from ..core.solution import Plan
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.ledger import AbstractRelease
from ..privacy.per_example.clipping import Precision
from ..runs.guards import step_bar
from .candidates import candidates, longest_gradient, toml_of
from .conclusions import (
    Trial,
    estimate_of,
    excess_of,
    improves,
    outlook_of,
    ranked_best,
    reason_of,
)
from .dry_runs import Workers
from .methods import constant_feature, is_linear, model_of
from .populations import Alike, GoodOrBad, Shifted, populations
from .race import DryRuns, Effort, advantage, race, rounds_of
from .synthetic import AbstractPopulation, FunctionPopulation

# If a step reads more numbers than these, in records times parameters, every second
# setting and fewer runs are tried with little effort: two minutes allow no more.
_LARGE = 5e6
# Networks that read more than these make dry runs on fewer records, with the noise of
# all: a quarter of them at least.
_HUGE, _MOST_THINNING = 2e7, 4
_CONSTANT = "constant answer"
# Default populations for a network on sources with little effort: each run takes long.
_OF_NETWORKS = GoodOrBad, Shifted, Alike
Draw: TypeAlias = Callable[[Key, Any], PyTree]


@dataclasses.dataclass(frozen=True, repr=False)
class AutoPlan(Plan[Any]):
    """A `Plan` that `auto` chose, with the reason and the results of dry runs.

    Attributes:
        reason: Why, in a few sentences.
        trials: Best setting of each method, best method first.
        populations: Names of the populations that the losses refer to.
        start_losses: Test losses of the best constant answers on the populations, or of
            the initial point if it is better.
        assumed: Assumptions about the records that follow from the arguments.
        left_out: Methods without a trial, and why: the budget, the relation or the
            problem does not admit them, or the dry runs were stopped before.
    """

    reason: str
    trials: tuple[Trial, ...]
    populations: tuple[str, ...]
    start_losses: tuple[float, ...]
    assumed: str
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def two_levels(self) -> bool:
        """Whether the planned method uses two levels."""
        return self.trials[0].levels == 2

    @override
    def rows(self) -> dict[str, object]:
        compared = ", ".join(trial.method for trial in self.trials)
        found = {"reason": self.reason, "assumed": self.assumed, "compared": compared}
        return found | super().rows()

    def to_toml(self) -> str:
        """Return the settings as text: tables `[solver]` and `[refit]` of a config.

        They may be edited: `dpbilevel run` calibrates them anew to the budget of the
        config that they are put into.

        Raises:
            ValueError: A config cannot hold the solver, which is for Python alone.
        """
        return toml_of(self.trials[0].solver)

    def __str__(self) -> str:
        """Return the reason, the table of methods, the settings and the guarantee."""
        width = max(len(_CONSTANT), *(len(trial.method) for trial in self.trials))
        wide = [max(10, len(name)) for name in self.populations]

        def row(name: str, values: Sequence[float | str]) -> str:
            cells = [v if isinstance(v, str) else f"{v:.4f}" for v in values]
            pairs = zip(cells, wide, strict=True)
            return f"  {name:{width}}  {'  '.join(f'{v:>{w}}' for v, w in pairs)}"

        lines = [self.reason, self.assumed, "", "test loss on synthetic data:"]
        lines.append(row("", self.populations))
        most = max(trial.runs for trial in self.trials)
        for trial in self.trials:
            # Losses of fewer runs, on other records, are not comparable.
            behind = f"    behind, left out after {trial.runs} runs"
            full = trial.runs == most
            name = f"  {trial.method:{width}}"
            lines.append(row(trial.method, trial.losses) if full else name + behind)
        lines.append(row(_CONSTANT, self.start_losses))
        lines += [f"  {name}: left out. {why}" for name, why in self.left_out.items()]
        lines += ["", f"solver: {self.trials[0].solver}", "", str(self.report)]
        return "\n".join(lines)


def auto(
    problem: AbstractProblem,
    budget: PrivacyBudget,
    *,
    sizes: Sizes | int,
    w0: PyTree,
    clip_norm: float | None = None,
    records: PyTree = None,
    intercept: int | None = -1,
    synthetic: AbstractPopulation | Draw | Sequence[AbstractPopulation] | None = None,
    effort: Effort = "fast",
    neighbours: Neighbours = Neighbours.REPLACE_ONE,
    precision: Precision = "grid",
    seed: int = 0,
    time_limit: float | None = None,
    progress: bool | Callable[[int, int], None] = False,
    before: tuple[AbstractRelease, ...] = (),
) -> AutoPlan:
    """Return an `AutoPlan`: solver and settings chosen by dry runs on synthetic data.

    Every candidate, plain descent on one level among them, is calibrated to the budget
    and runs on synthetic records of the same sizes; the released model is evaluated on
    further synthetic records. Settings are dropped by successive halving. Methods that
    the budget or the relation does not admit are left out.

    About 150 short runs are made on each population of sources, fewer for other
    problems, so time grows with the sizes. On two cores it takes about a minute for
    linear models of two classes and 10 000 to 50 000 records. If the number of records
    times that of parameters is above 5 million, `effort="fast"` tries every second
    setting and makes a third of the runs.

    Methods are compared by their regret, the fraction of the achievable improvement
    that they lack. The score of a method is three quarters of the mean regret over the
    populations and a quarter of the worst one. The least score is planned; a method of
    one level is preferred if its score is within 3 percentage points of the least.
    Dry runs with larger budgets then estimate from which epsilon on two levels would be
    planned.

    Args:
        problem: A `FiniteSum`, a `BilevelProblem`, or the problem of
            `source_weighting`.
        budget: The guarantee to reach.
        sizes: As for `calibrate`.
        w0: The initial point.
        clip_norm: The largest norm of a record's gradient in a linear model, from
            public knowledge. By default that of features of norm at most 1: 1 in a
            logistic regression, the square root of 2 in a softmax one. Most candidates
            clip at 0.7 of it, with three classes and more at 0.4. Features of default
            populations are as long as it admits. For a network the clip norm, by
            default 1; the default features then have norm 1.
        records: The description of a record, for models other than one vector or one
            matrix: a pytree of shapes with `planning.Classes` for the label, such as
            `{"features": jax.ShapeDtypeStruct((784,), "float32"), "label":
            dpb.planning.Classes(10)}`. Public; without the source of a record.
        intercept: The index of a feature that is the same for all records, along the
            leading axis of a linear model; by default the last one, `None` if there is
            none, as in other models. Methods are compared with the best constant
            answer, and two candidates fit the constant anew on the upper records.
        synthetic: Synthetic data from public knowledge alone, never from a statistic of
            the records; the more they are like the records, the better is the choice.
            Either `AbstractPopulation`s, by default those of
            `planning.populations(problem, records)`. Or a function of a typed key and
            sizes that returns as many records, as `solve` takes them, with fields of
            any names: `Levels` for two levels. Its sizes include the test records:
            twice the records, of two levels twice the upper ones.
        effort: `"fast"` or `"thorough"`, which makes more dry runs.
        neighbours: The neighbouring relation of the guarantee. Under
            add-or-remove-one methods that rest on a certificate are left out.
        precision: As for `calibrate`. Dry runs are in `"float"`.
        seed: The seed of the synthetic records and their noise, which protect nothing.
        time_limit: Seconds after which no further dry run begins; the best plan so far
            is returned. Every method makes one first; calibration comes on top. An
            interrupt ends them at once if one is finished.
        progress: `True` shows an estimate of the time and a bar, which needs tqdm. Or a
            function of the numbers of runs done and planned so far, for every run.
        before: As for `calibrate`.

    Returns:
        The plan. `plan.solver` is an ordinary calibrated solver; its settings are
        written out in `plan.trials[0].solver`.

    Warns:
        UserWarning: The plan may be worse than a constant answer, or the dry runs were
            stopped.

    Raises:
        TypeError: No candidates or populations are known for the problem, or
            `synthetic` is none of the above.
        ValueError: `intercept` is no index of a feature, `records` and `synthetic` are
            missing for a model that is not linear, the loss cannot read the synthetic
            records, or no noise reaches the budget.

    Privacy:
        Touches no records of people; spends nothing. The guarantee is that of one run
        of `plan.solver`. The choice rests on public values alone, so that it may be
        repeated, and edited. Dry runs are public, and so is their time: what a time
        limit or an interrupt chooses tells nothing about records.

    References:
        Hodges and Lehmann, "The use of previous experience in reaching statistical
        decisions", 1952 (the score);
        Jamieson and Talwalkar, "Non-stochastic best arm identification and
        hyperparameter optimization", AISTATS 2016 (successive halving).
    """
    owner = "auto"
    _checks.instance(owner, AbstractProblem, problem=problem)
    _checks.instance(owner, PrivacyBudget, budget=budget)
    _checks.one_of(owner, "effort", effort, get_args(Effort))
    if progress is True:
        check_installed(f"{owner}: progress=True", "tqdm")
    problem.check_sizes(owner, sizes)
    check_smooth(owner, problem)
    if isinstance(problem, BilevelProblem):
        check_pair(owner, w0)
    # A person of one row is as likely as any, and the rows of dry runs are generated.
    records_problem, _, _ = arrays_of(owner, problem, w0)
    problem, w0, _ = arrays_of(owner, _of_rows(problem), w0)
    if clip_norm is None:
        clip_norm = round(longest_gradient(model_of(problem, w0)), 6)
    _checks.positive(owner, clip_norm=clip_norm)
    drawn_from = _populations(problem, w0, clip_norm, records, synthetic, effort)
    w0 = jax.tree.map(jnp.asarray, w0)
    intercept = constant_feature(owner, model_of(problem, w0), intercept)
    methods = candidates(problem, w0, clip_norm, records, intercept)
    large = effort == "fast" and _numbers_read(sizes, w0) > _LARGE
    if large:
        methods = [dataclasses.replace(m, solvers=m.solvers[::2]) for m in methods]
    options: Any = {"sizes": sizes, "before": before}
    # Without w0, because a forecast is for the plan alone.
    dry_options = options | {"precision": "float"}
    workers = Workers(time_limit)
    dry = DryRuns(problem, w0, drawn_from, seed, intercept, dry_options, workers)
    if large and not is_linear(model_of(problem, w0)):
        thinning = min(_MOST_THINNING, max(1, _numbers_read(sizes, w0) // _HUGE))
        dry = dataclasses.replace(dry, thinning=int(thinning))
    rounds = rounds_of(effort, len(drawn_from), large=large)
    compared = dry, methods, neighbours, budget, rounds, progress
    trials, starts, outlook, left_out = _trials(*compared)
    if workers.stopped:
        outlook = f" {workers.stopped} after {trials[0].runs} runs of this method."
        _checks.warn(f"{owner}: {workers.stopped}; the plan is the best so far.")
    names = tuple(population.name for population in drawn_from)
    reason = reason_of(trials, budget, names, starts, default=synthetic is None)
    reason += outlook
    options |= {"w0": w0, "precision": precision}
    plan = calibrated(records_problem, trials[0].solver, budget, **options)
    plan.warn(owner)
    if not improves(trials[0], starts):
        _checks.warn(f"{owner}: {reason}")
    reason += _remark_on(problem, w0)
    assumed = _assumptions(model_of(problem, w0), clip_norm, intercept)
    found = reason, trials, names, starts, assumed, left_out
    return AutoPlan(plan.solver, plan.report, *found)


def _of_rows(problem: Any) -> Any:
    """Undo `per_person`: return the problem on single rows, for dry runs alone.

    Declared constants stay; for sums over rows they need not hold.
    """
    if problem.unit is None:
        return problem
    fields = {name: getattr(problem, name).fun for name in problem.record_functions}
    return problem.with_functions(fields, None)


def _trials(
    dry: DryRuns, methods, neighbours, budget, rounds, progress
) -> tuple[tuple[Trial, ...], tuple[float, ...], str, dict[str, str]]:
    """Make dry runs; return trials, constant losses, an outlook, and methods left out.

    The trials are the best setting of each method.
    """
    entries, solvers, left_out = dry.feasible(methods, neighbours, budget)
    tried = [method for method, _ in entries]
    offered = dict.fromkeys(method.name for method in tried)

    def dry_run(index: int, run: int) -> list[float]:
        return dry.losses(solvers[index], run)

    def shown(done: int, total: int) -> None:
        dry.workers.finished = done >= len(offered)  # the first runs: one of each
        at(done, total)

    if progress is True:
        numbers = _numbers_read(dry.options["sizes"], dry.w0) / dry.thinning
        line = estimate_of(methods, rounds, len(dry.populations), numbers)
        print(line, file=sys.stderr, flush=True)
    with step_bar(0, "dry runs", shown=progress is True) as bar:
        at = progress if callable(progress) else bar
        runs = dry_run, dry.constant_losses, shown, dry.workers.each
        outcomes, constants = race(tried, rounds, *runs)
    starts = tuple(np.mean(constants, 0).tolist())
    trials, losses = {}, {}
    for index, made, regret in outcomes:
        method, solver = entries[index]
        losses[index], runs = made, len(made) * len(starts)
        excess = excess_of(made, constants[: len(made)])
        found = tuple(np.mean(made, 0).tolist()), regret, runs, excess
        trials[index] = Trial(method.name, solver, method.levels, *found)
    ranked = ranked_best(trials, starts)
    first = losses[ranked[0]]
    for i in ranked:
        # One run on every population says nothing about a method dropped after it.
        if len(losses[i]) > 1:
            ahead = advantage(losses[i], first, starts)
            trials[i] = dataclasses.replace(trials[i], advantage=ahead)
    best = tuple(trials[i] for i in ranked)
    for name in offered.keys() - {trial.method for trial in best}:
        left_out[name] = "No dry run was made before the stop."
    if dry.workers.stopped:
        return best, starts, "", left_out
    outlook = outlook_of(best, starts, budget, dry.losses_within, constants[0])
    return best, starts, outlook, left_out


def _populations(
    problem: AbstractProblem, w0, clip_norm, records, synthetic, effort: Effort = "fast"
) -> tuple[AbstractPopulation, ...]:
    """Return a tuple of the populations that were passed, or of the default ones."""
    if synthetic is None:
        linear = is_linear(model := model_of(problem, w0))
        norm = clip_norm / longest_gradient(model) if linear else 1.0
        found = populations(problem, records, norm)
        if linear or effort != "fast" or not isinstance(problem, SourceWeighting):
            return found
        return tuple(v for v in found if isinstance(v, _OF_NETWORKS))
    if isinstance(synthetic, AbstractPopulation):
        return (synthetic,)
    if callable(synthetic):
        return (FunctionPopulation(synthetic),)
    found = tuple(synthetic) if isinstance(synthetic, Sequence) else (synthetic,)
    if not found:
        raise ValueError("auto: synthetic must have at least one population, got none.")
    for population in found:
        if not isinstance(population, AbstractPopulation):
            raise TypeError(
                "auto: synthetic must be a function(key, sizes) or AbstractPopulations."
            )
    return found


def _assumptions(model: PyTree, clip_norm: float, intercept: int | None) -> str:
    """Return a sentence on what the plan assumes, unchecked, about the records."""
    if not is_linear(model):
        return f"Assumed: gradients of a network may be clipped at {clip_norm:g}."
    constant = "no feature is the same for all records"
    if intercept is not None:
        constant = f"feature {intercept} is the same for all records"
    return f"Assumed: gradients have norm {clip_norm:g} at most, and {constant}."


def _numbers_read(sizes: Sizes | int, w0: PyTree) -> int:
    """Return the number of records times the number of parameters."""
    records = sizes.upper + sizes.lower if isinstance(sizes, Sizes) else sizes
    return records * sum(leaf.size for leaf in jax.tree.leaves(w0))


def _remark_on(problem: AbstractProblem, w0: PyTree) -> str:
    """Return a sentence on what to change about the initial point, or no text."""
    if not isinstance(problem, PenaltyTuning):
        return ""
    least, _ = penalty_start(problem, None)
    if not np.any(w0[0] > least):
        return ""
    return (
        " x starts above the least penalties, which makes most methods worse: start at "
        "applications.penalty_start(problem, model)."
    )
