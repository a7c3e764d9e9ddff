"""Plans by dry runs: which solver, with which settings, and whether it pays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key, PyTree
from typing_extensions import override

from .. import _checks
from ..applications.penalties import PenaltyTuning, penalty_start
from ..bilevel.problem import BilevelProblem, Sizes
from ..core.levels import check_pair
from ..core.loop import solved
from ..core.modules import arrays_of
from ..core.plan import calibrated
from ..core.problem import AbstractProblem
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..privacy.abstract_release import AbstractRelease
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.per_example.clipping import Precision
from .candidates import Candidate, candidates, is_linear
from .conclusions import (
    Trial,
    excess_of,
    improves,
    outlook_of,
    ranked_best,
    reason_of,
)
from .losses import constant_feature, mean_loss, model_of, trivial_loss
from .race import Effort, leads_of, race, rounds_of
from .settings import toml_of
from .synthetic import Synthetic
from .teachers import AbstractTwin, Twin
from .twins import twins as default_twins

# Where a step reads more numbers than these, in records times parameters, every second
# setting and fewer runs are tried with little effort: two minutes allow no more.
_LARGE = 5e6
_CONSTANT = "constant answer"

# At the top, so that settings that differ in numbers share one compiled program.
_solve = jax.jit(lambda *run, key: solved(*run, key=key).value)


@dataclasses.dataclass(frozen=True, repr=False)
class AutoPlan(Plan[Any]):
    """A plan, and why it was chosen.

    Attributes:
        reason: In a few sentences, with the best of one level beside it.
        trials: The best setting of each method, best method first.
        twins: The names of the twins that the losses refer to.
        start_losses: The test losses of the best constant answers on the twins, or of
            the initial point if it is better.
        assumed: What the arguments say about the records, in words.
        left_out: Methods that the budget, the relation or the problem does not admit,
            and why.
    """

    reason: str
    trials: tuple[Trial, ...]
    twins: tuple[str, ...]
    start_losses: tuple[float, ...]
    assumed: str
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def pays(self) -> bool:
        """Whether two levels are better than one in the dry runs."""
        return self.trials[0].levels == 2

    @override
    def rows(self) -> dict[str, object]:
        compared = ", ".join(trial.method for trial in self.trials)
        found = {"reason": self.reason, "assumed": self.assumed, "compared": compared}
        return found | super().rows()

    def to_toml(self) -> str:
        """The settings as the tables `[solver]` and `[refit]` of a config.

        To be kept and edited: `dpbilevel run` calibrates them anew to the budget of
        the config that they are put into.

        Raises:
            ValueError: A config cannot hold the solver, which is for Python alone.
        """
        return toml_of(self.trials[0].solver)

    def __str__(self) -> str:
        """The reason, the table of methods, the settings and the guarantee."""
        width = max(len(trial.method) for trial in self.trials)
        width = max(width, len(_CONSTANT))
        lines = [self.reason, self.assumed, "", "test loss on synthetic twins:"]
        wide = [max(10, len(name)) for name in self.twins]

        def row(values: Sequence[float]) -> str:
            pairs = zip(values, wide, strict=True)
            return "  ".join(f"{v:{w}.4f}" for v, w in pairs)

        names = zip(self.twins, wide, strict=True)
        lines.append(f"  {'':{width}}  " + "  ".join(f"{n:>{w}}" for n, w in names))
        most = max(trial.runs for trial in self.trials)
        for trial in self.trials:
            # Of fewer runs, which had other records, losses are not comparable.
            shown = row(trial.losses)
            if trial.runs < most:
                shown = f"  behind, left out after {trial.runs} runs"
            lines.append(f"  {trial.method:{width}}  {shown}")
        lines.append(f"  {_CONSTANT:{width}}  {row(self.start_losses)}")
        lines += [f"  {name}: left out. {why}" for name, why in self.left_out.items()]
        lines += ["", f"solver: {self.trials[0].solver}", "", str(self.report)]
        return "\n".join(lines)


def auto(
    problem: AbstractProblem,
    budget: PrivacyBudget,
    *,
    sizes: Sizes | int,
    w0: PyTree,
    clip_norm: float = 1.0,
    records: PyTree = None,
    intercept: int | None = -1,
    twins: Sequence[AbstractTwin] | None = None,
    synthetic: Callable[[Key, Any], PyTree] | None = None,
    effort: Effort = "fast",
    neighbours: Neighbours = Neighbours.REPLACE_ONE,
    precision: Precision = "grid",
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    before: tuple[AbstractRelease, ...] = (),
) -> AutoPlan:
    """Plan a run without settings, by dry runs on synthetic records.

    Every candidate, plain descent on one level among them, is calibrated to the budget
    and runs on synthetic twins of the records, of the same sizes; the released model is
    evaluated on further records of the twin. Settings are dropped by successive
    halving. Methods that clip and methods that rest on the certificate of a problem are
    compared in the same way; those that the budget or the relation does not admit are
    left out.

    About 150 short runs are made on each twin of sources, fewer of other problems, so
    time grows with the sizes: on two cores it takes one to two minutes for linear
    models of two classes and 10 000 to 50 000 records. If the number of records
    times that of parameters is above 5 million, `effort="fast"` tries every second
    setting and makes a third of the runs.

    Methods are compared by the missed share of the possible improvement: three quarters
    of the mean over the twins and a quarter of the worst case are the score of a
    method. The least score is planned. A method of one level is preferred if its score
    is within 3 percentage points of the least.
    Dry runs with larger budgets then estimate from which epsilon on two levels would be
    planned.

    Args:
        problem: A `FiniteSum`, a `BilevelProblem`, or the problem of
            `source_weighting`.
        budget: The guarantee to reach.
        sizes: As for `calibrate`.
        w0: The starting point.
        clip_norm: The largest norm of a record's gradient in a linear model, from
            public knowledge: 1 for logistic regression on features of norm at most 1.
            Most candidates clip at 0.7 of it, and the features of the default twins
            have this norm. The clip norm of a network, whose gradients have no largest
            norm; there the features of the twins have norm 1.
        records: What a record looks like, for models other than one vector or one
            matrix: a pytree of shapes with `planning.Classes` for the label, such as
            `{"features": jax.ShapeDtypeStruct((784,), "float32"), "label":
            dpb.planning.Classes(10)}`. Public; without the source of a record.
        intercept: The place of a feature that is the same for all records, along the
            leading axis of a linear model: by default the last one, `None` if there is
            no such feature. Methods are compared with the best constant answer, and two
            candidates fit the constant anew on the upper records. Other models have no
            such feature.
        twins: Public distributions that the records may follow; by default those of
            `dpbilevel.planning.twins(problem, records)`. Twins that are more like the
            records lead to a better choice. They must not be fitted to the records.
        synthetic: In place of `twins`, a function of a typed key and sizes that returns
            that many, as `solve` takes records, `Levels` for two levels: with fields
            of any names. The sizes include the test records: twice the records, of two
            levels twice the upper ones. It must use public knowledge alone.
        effort: `"fast"` or `"thorough"`: how many dry runs.
        neighbours: The neighbouring relation of the guarantee. Under
            add-or-remove-one methods that rest on a certificate are left out.
        precision: As for `calibrate`. Dry runs are in `"float"`: the distribution of
            the noise is the same up to rounding.
        seed: Seed of the synthetic records and their noise, which protect no records.
        progress: Called after every dry run on all twins with the number of runs done
            and the number planned so far.
        before: As for `calibrate`.

    Returns:
        The plan. `plan.solver` is an ordinary calibrated solver; its settings are
        written out in `plan.trials[0].solver`.

    Raises:
        TypeError: No candidates or twins are known for the problem.
        ValueError: `intercept` is no place of a feature, the model is no linear one and
            `records` and `twins` are missing, the loss cannot read the twins, or no
            noise reaches the budget.

    Privacy:
        Touches no records of people; spends nothing. The guarantee is that of one run
        of `plan.solver`. The choice rests on public values alone, so that it may be
        repeated, and edited.

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
    _checks.positive(owner, clip_norm=clip_norm)
    problem.check_sizes(owner, sizes)
    if isinstance(problem, BilevelProblem):
        check_pair(owner, w0)
    problem, w0, _ = arrays_of(owner, problem, w0)
    laws = _laws(problem, w0, clip_norm, records, twins, synthetic)
    w0 = jax.tree.map(jnp.asarray, w0)
    intercept = constant_feature(owner, model_of(problem, w0), intercept)
    offered = candidates(problem, w0, clip_norm, records, intercept)
    large = effort == "fast" and _numbers_read(sizes, w0) > _LARGE
    if large:
        offered = [dataclasses.replace(m, solvers=m.solvers[::2]) for m in offered]
    # A forecast is for the plan alone.
    planned: Any = {"sizes": sizes, "before": before}
    planned_dry = planned | {"precision": "float"}
    dry = _DryRuns(problem, w0, laws, seed, intercept, planned_dry)
    rounds = rounds_of(effort, len(laws), large=large)
    entries, plans, left_out = _feasible(offered, neighbours, dry, budget)
    found, known = race(
        [method for method, _ in entries],
        rounds,
        lambda index, number: dry.losses(plans[index].solver, number),
        dry.answers,
        progress,
    )
    starts = np.mean(known, 0).tolist()
    trials = {i: _trial(*entries[i], runs, regret, known) for i, runs, regret in found}
    ranked = ranked_best(trials, starts)
    runs = {i: losses for i, losses, _ in found}
    first = runs[ranked[0]]
    # One run on every twin says nothing about a method that was left out after it.
    best = tuple(
        dataclasses.replace(trials[i], leads=leads_of(runs[i], first, starts))
        if len(runs[i]) > 1
        else trials[i]
        for i in ranked
    )
    names = [law.name for law in laws]
    reason = reason_of(best, budget, names, starts, own=bool(synthetic))
    reason += outlook_of(best, starts, budget, dry.table, dry.answers(0))
    planned |= {"w0": w0, "precision": precision}
    plan = calibrated(problem, best[0].solver, budget, **planned)
    plan.warn(owner)
    if not improves(best[0], starts):
        _checks.warn(f"{owner}: {reason}")
    return AutoPlan(
        plan.solver,
        plan.report,
        reason + _remark_on(problem, w0),
        best,
        tuple(names),
        tuple(starts),
        _assumed(model_of(problem, w0), clip_norm, intercept),
        left_out,
    )


def _assumed(model: PyTree, clip_norm: float, intercept: int | None) -> str:
    """Say what the plan takes for granted, and nobody checks."""
    if not is_linear(model):
        return f"Assumed: gradients of a network may be clipped at {clip_norm:g}."
    constant = "no feature is the same for all records"
    if intercept is not None:
        constant = f"feature {intercept} is the same for all records"
    return f"Assumed: gradients have norm {clip_norm:g} at most, and {constant}."


def _numbers_read(sizes: Sizes | int, w0: PyTree) -> int:
    """By a step on all records: their number times that of the parameters."""
    records = sizes.upper + sizes.lower if isinstance(sizes, Sizes) else sizes
    return records * sum(leaf.size for leaf in jax.tree.leaves(w0))


def _trial(
    method: Candidate,
    solver: AbstractSolver,
    losses: list[list[float]],
    regret: float,
    answers: list[list[float]],
) -> Trial:
    """Return a trial from losses by run and twin, and those of constant answers."""
    means = tuple(np.mean(losses, 0).tolist())
    runs = len(losses) * len(means)
    excess = excess_of(losses, answers[: len(losses)])
    return Trial(method.name, solver, method.levels, means, regret, runs, excess)


def _laws(
    problem: AbstractProblem,
    w0: PyTree,
    clip_norm: float,
    records: PyTree,
    twins: Sequence[AbstractTwin] | None,
    synthetic: Callable[[Key, Any], PyTree] | None,
) -> tuple[AbstractTwin, ...]:
    """Return the twins that were passed, or the default twins.

    Raises:
        ValueError: None was passed, or both twins and a function.
        TypeError: An argument is no twin, or no function.
    """
    if synthetic is not None:
        _checks.function("auto", synthetic=synthetic)
        if twins is not None:
            raise ValueError("auto: give either synthetic= or twins=, got both.")
        return (Synthetic(synthetic),)
    if twins is None:
        model = model_of(problem, w0)
        # The largest gradient of a linear model is as long as the features.
        norm = clip_norm if is_linear(model) else 1.0
        return default_twins(problem, records, norm)
    laws = tuple(twins)
    if not laws:
        raise ValueError("auto: twins must hold at least one law of records.")
    for law in laws:
        _checks.instance("auto", AbstractTwin, twins=law)
    return laws


def _remark_on(problem: AbstractProblem, w0: PyTree) -> str:
    """What to change about the start."""
    if not isinstance(problem, PenaltyTuning):
        return ""
    least, _ = penalty_start(problem, None)
    if not np.any(w0[0] > least):
        return ""
    return (
        " x starts above the least penalties, where most methods find less: start at "
        "applications.penalty_start(problem, model)."
    )


def _feasible(
    offered: Sequence[Candidate],
    neighbours: Neighbours,
    dry: "_DryRuns",
    budget: PrivacyBudget,
) -> tuple[list[tuple[Candidate, AbstractSolver]], list[Plan[Any]], dict[str, str]]:
    """The settings that can be calibrated, their plans, and what is left out and why.

    Raises:
        ValueError: None can.
    """
    entries, plans, refused = [], [], {}
    for method in offered:
        for setting in method.solvers:
            try:
                solver = setting.with_neighbours(neighbours)
                plan = dry.plan(solver, budget)
            except ValueError as error:
                refused[method.name] = str(error)
                continue
            assert plan.report.relation == neighbours.value
            entries.append((method, solver))
            plans.append(plan)
    if not plans:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ValueError(f"auto: no method reaches the budget. {reasons}")
    there = {method.name for method, _ in entries}
    return entries, plans, {k: v for k, v in refused.items() if k not in there}


@dataclasses.dataclass(frozen=True)
class _DryRuns:
    """Runs on twins: of one problem, from one start.

    Runs of one number have the same records and noise for all solvers, those of another
    have others, because a method that needs luck needs it in both.
    """

    problem: Any
    w0: PyTree
    laws: tuple[AbstractTwin, ...]
    seed: int
    intercept: int | None
    options: dict[str, Any]  # of `calibrate`

    @functools.cached_property
    def twins(self) -> Callable[[int], list[Twin]]:
        """The twins of a run; those of the last one are kept."""

        @functools.lru_cache(maxsize=1)
        def drawn(number: int) -> list[Twin]:
            keys = jax.random.split(self._key(number), len(self.laws))
            sizes = self.options["sizes"]
            return [
                law.draw(self.problem, self.w0, sizes, key)
                for law, key in zip(self.laws, keys, strict=True)
            ]

        return drawn

    @functools.cached_property
    def answers(self) -> Callable[[int], list[float]]:
        """Return the losses of the best constant answers on the twins of a run."""

        @functools.cache
        def found(number: int) -> list[float]:
            return [
                trivial_loss(self.problem, self.w0, twin.test, self.intercept)
                for twin in self.twins(number)
            ]

        return found

    def plan(self, solver: AbstractSolver, budget: PrivacyBudget) -> Plan[Any]:
        return calibrated(self.problem, solver, budget, **self.options)

    def losses(self, solver: AbstractSolver, number: int) -> list[float]:
        """The test losses of a calibrated solver on all twins, in one run."""
        found = []
        for place, twin in enumerate(self.twins(number), len(self.laws)):
            key = jax.random.fold_in(self._key(number), place)
            value = _solve(self.problem, solver, twin.data, self.w0, key=key)
            loss = float(mean_loss(self.problem, value, twin.test))
            found.append(loss if np.isfinite(loss) else np.inf)
        return found

    def _key(self, number: int) -> Key:
        return jax.random.fold_in(jax.random.key(self.seed), number)

    def table(
        self, solvers: Sequence[AbstractSolver], budget: PrivacyBudget
    ) -> list[list[list[float]]]:
        """The losses of solvers within a budget: by solver, run (of one) and twin."""
        return [[self.losses(self.plan(s, budget).solver, 0)] for s in solvers]
