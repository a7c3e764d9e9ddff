"""The race of settings: their losses in dry runs, and successive halving by regret."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Key, PyTree

from ..core.levels import Sizes
from ..core.loop import check_run
from ..core.plan import calibrated
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..privacy.budget import Neighbours, PrivacyBudget
from .dry_runs import Stopped, Workers, accelerated, released
from .methods import Candidate, constant_loss, is_vector, mean_loss, model_of
from .synthetic import AbstractPopulation, SyntheticData

Effort = Literal["fast", "thorough"]
Losses = list[list[float]]  # by run and population
Each = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]

# Number of runs that each remaining setting makes, round after round: in the first two
# rounds on every population, then over all populations together. In the last round rare
# failures have to show: sources that are drawn anew may suit a method in four runs and
# not in the fifth.
_ROUNDS = {"fast": ((1, 3), (16, 24)), "thorough": ((2, 6), (64, 64))}
# The same if each run takes long and little effort is wanted.
_FEW_ROUNDS = ((1, 1), (4, 8))
# Fraction of a method's settings that stay after each round but the last, at least one.
# The first time the mean over the populations decides: the worst of few runs is noise.
_STAY = (0.4, 0.25, 0.25)
# A method is dropped if its score is this far above the best one, after each round but
# the last: few runs say little if the budget is small.
_HOPELESS = (0.5, 0.2, 0.1)
# Weight of the worst population in a score; the mean of all has the rest.
_WORST_WEIGHT = 0.25
# The achievable improvement is at least this fraction of the constant answer's loss.
_LEAST = 0.15


class Outcome(NamedTuple):
    """A setting after the race: its index, losses in dry runs, and worst regret."""

    setting: int  # index
    losses: Losses
    # On the worst population; of dropped methods as it was then, from fewer runs.
    regret: float


def rounds_of(effort: Effort, populations: int, *, large: bool) -> tuple[int, ...]:
    """Return a tuple: the number of runs on every population in each round."""
    each, total = _FEW_ROUNDS if large else _ROUNDS[effort]
    return (*each, *(-(-count // populations) for count in total))


def race(
    methods: list[Candidate],
    rounds: tuple[int, ...],
    dry_run: Callable[[int, int], list[float]],
    constant_losses: Callable[[int], list[float]],
    progress: Callable[[int, int], None],
    each: Each = map,
) -> tuple[list[Outcome], Losses]:
    """Run successive halving; return a list of `Outcome`s, and constants' losses.

    The best method of one level stays, for comparison with two levels. If the race is
    stopped, the runs that all remaining settings have made decide; it is raised if
    there are none. `dry_run` returns the losses of a setting on all populations, by the
    index of the setting and of the run, and `constant_losses` those of the best
    constant answers; `progress` takes the numbers of runs done and planned.
    """
    losses: dict[int, Losses] = {index: [] for index in range(len(methods))}
    names = [method.name for method in methods]
    # The first setting of every method comes first.
    left = sorted(losses, key=lambda index: names[:index].count(names[index]))
    dropped, constants, done = {}, [], 0
    try:
        for number, count in enumerate(rounds):
            if number:
                made = {index: losses[index] for index in left}
                left, worst = _survivors(methods, made, constants, number - 1)
                dropped |= worst
            settings = collections.Counter(names[index] for index in left)
            total = done + most_runs(settings, rounds, number)
            for run in range(len(constants), len(constants) + count):
                constants.append(constant_losses(run))
                runs = each(lambda index, run=run: dry_run(index, run), left)
                for index, found in zip(left, runs, strict=True):
                    losses[index].append(found)
                    done += 1
                    progress(done, total)
    except (Stopped, KeyboardInterrupt):
        if not done:
            raise
        least = max(1, min(len(losses[index]) for index in left))
        left = [index for index in left if losses[index]]
        losses |= {index: losses[index][:least] for index in left}
        del constants[least:]
    # Only among settings of equally many runs: few runs depend on their records.
    last = worst_regrets([losses[index] for index in left], constants)
    regret = dict(zip(left, last, strict=True)) | dropped
    return [Outcome(index, losses[index], regret[index]) for index in regret], constants


def most_runs(settings: Mapping[str, int], rounds: tuple[int, ...], number: int) -> int:
    """Return the largest possible number of runs from round `number` on.

    The total that is shown never grows, so the fraction that is done never falls.
    """
    runs = 0
    for later in range(number, len(rounds)):
        if later > number:
            settings = {k: _stay(v, later - 1) for k, v in settings.items()}
        runs += rounds[later] * sum(settings.values())
    return runs


def _stay(settings: int, number: int) -> int:
    return max(1, round(_STAY[number] * settings))


def _survivors(
    methods: list[Candidate], losses: dict[int, Losses], constants: Losses, number: int
) -> tuple[list[int], dict[int, float]]:
    """Return the settings that stay after a round, and worst regrets of the others.

    The latter are a dict of the best setting of each method that is dropped.
    """
    table = regrets([*losses.values()], constants)
    mean, worst, score = (
        dict(zip(losses, values.tolist(), strict=True))
        for values in (np.mean(table, 1), np.max(table, 1), scores(table))
    )
    order = score if number else mean
    by_method: dict[str, list[int]] = {}
    for index in sorted(losses, key=order.__getitem__):
        by_method.setdefault(methods[index].name, []).append(index)
    firsts = [settings[0] for settings in by_method.values()]
    one_level = [index for index in firsts if methods[index].levels == 1]
    single = min(one_level, key=score.__getitem__, default=None)
    limit = min(score.values()) + _HOPELESS[number]
    left, dropped = [], {}
    for first, settings in zip(firsts, by_method.values(), strict=True):
        if first == single or score[first] <= limit:
            left += settings[: _stay(len(settings), number)]
        else:
            dropped[first] = worst[first]
    return left, dropped


def scores(
    regrets: Float[np.ndarray, "settings populations"],
) -> Float[np.ndarray, " settings"]:
    """Return a mean of mean and worst regret for each setting; the smallest is best.

    The weighted mean of the mean regret and the worst one: the restricted Bayes rule of
    Hodges and Lehmann, "The use of previous experience in reaching statistical
    decisions", 1952.
    """
    mean, worst = np.mean(regrets, 1), np.max(regrets, 1)
    return (1 - _WORST_WEIGHT) * mean + _WORST_WEIGHT * worst


def worst_regrets(losses: Sequence[Losses], constants: Losses) -> list[float]:
    """Return a list of each setting's regret on its worst population."""
    return np.max(regrets(losses, constants), 1).tolist()


def regrets(
    losses: Sequence[Losses], constants: Losses
) -> Float[np.ndarray, "settings populations"]:
    """Return an array of regrets, setting by population, from mean losses of runs."""
    # The mean over the runs, because a failure counts by how much it loses.
    table = np.asarray([np.mean(runs, 0) for runs in losses])
    return regret(table, np.mean(constants, 0))


def regret(
    table: Float[np.ndarray, "settings populations"],
    starts: Sequence[float] | Float[np.ndarray, " populations"],
) -> Float[np.ndarray, "settings populations"]:
    """Return the missing fraction of achievable improvement, setting by population.

    From tables of mean losses: of the settings, and of the best constant answers.
    """
    starts = np.asarray(starts)
    best = np.minimum(np.min(table, 0), starts)
    achievable = np.maximum(starts - best, _LEAST * np.abs(starts) + 1e-9)
    return np.minimum((table - best) / achievable, 1e6)


def advantage(losses: Losses, of: Losses, starts: Sequence[float]) -> tuple[float, ...]:
    """Return a tuple: how much better a setting is than another on each population.

    In the runs that both made, in fractions of the achievable improvement; negative if
    the setting is worse. `starts` are mean losses of the best constant answers.
    """
    both = min(len(losses), len(of))
    table = np.asarray([np.mean(runs[:both], 0) for runs in (losses, of)])
    here, there = regret(table, starts)
    return tuple((there - here).tolist())


@dataclasses.dataclass(frozen=True)
class DryRuns:
    """Runs of one problem on synthetic data, from one initial point.

    A run has the same records and noise for all solvers. Other runs have others,
    because a method that needs luck needs it in all of them.
    """

    problem: Any
    w0: PyTree
    populations: tuple[AbstractPopulation, ...]
    seed: int  # of records and noise, which protect nothing
    intercept: int | None  # index of the constant feature
    options: dict[str, Any]  # of `calibrate`
    workers: Workers = dataclasses.field(default_factory=Workers)
    # Numbers of records over those that dry runs draw; noise is that of all records.
    thinning: int = 1
    _last: dict[int, list[SyntheticData]] = dataclasses.field(default_factory=dict)

    def plan(self, solver: AbstractSolver, budget: PrivacyBudget) -> Plan[Any]:
        """Calibrate a solver to a budget, and return the `Plan`."""
        return calibrated(self.problem, solver, budget, **self.options)

    def losses(self, solver: AbstractSolver, number: int) -> list[float]:
        """Return a list, by population, of a calibrated solver's loss in a run."""
        found = []
        for place, drawn in enumerate(self._drawn(number), len(self.populations)):
            self.workers.check()
            key = jax.random.fold_in(self._key(number), place)
            run = self.problem, solver, drawn.data, self.w0
            if not number and not found:
                check_run("auto", *run, key)
            value = released(*run, key=key)
            loss = float(mean_loss(self.problem, value, drawn.test))
            found.append(loss if np.isfinite(loss) else np.inf)
        return found

    def losses_within(
        self, solvers: Sequence[AbstractSolver], budget: PrivacyBudget
    ) -> Losses:
        """Calibrate solvers; return losses of run 0 by solver and population."""
        planned = [self._dry(self.plan(s, budget).solver) for s in solvers]
        self._drawn(0)
        return [*self.workers.each(lambda solver: self.losses(solver, 0), planned)]

    def constant_losses(self, number: int) -> list[float]:
        """Return a list by population: loss of the best constant, or `w0` if less."""
        tests = [drawn.test for drawn in self._drawn(number)]
        problem = self.problem, self.w0
        return [constant_loss(*problem, test, self.intercept) for test in tests]

    def feasible(
        self,
        methods: Sequence[Candidate],
        neighbours: Neighbours,
        budget: PrivacyBudget,
    ) -> tuple[list[tuple[Candidate, AbstractSolver]], list[Any], dict[str, str]]:
        """Calibrate all settings; return (method, solver) pairs, solvers, refusals.

        And the calibrated solvers, and by method why it was left out.
        """
        entries, solvers, refused = [], [], {}
        for method in methods:
            for setting in method.solvers:
                try:
                    solver = setting.with_neighbours(neighbours)
                    plan = self.plan(solver, budget)
                except ValueError as error:
                    refused[method.name] = str(error)
                    continue
                assert plan.report.relation == neighbours.value
                entries.append((method, solver))
                solvers.append(self._dry(plan.solver))
        if not solvers:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            raise ValueError(f"auto: no method reaches the budget. {reasons}")
        there = {method.name for method, _ in entries}
        return entries, solvers, {k: v for k, v in refused.items() if k not in there}

    def _drawn(self, number: int) -> list[SyntheticData]:
        """Return a list, by population, of the `SyntheticData` of a run; cached."""
        if number not in self._last:
            self._last.clear()
            keys = jax.random.split(self._key(number), len(self.populations))

            def draw(pair: tuple[AbstractPopulation, Key]) -> SyntheticData:
                return pair[0].draw(self.problem, self.w0, self._sizes, pair[1])

            pairs = [*zip(self.populations, keys, strict=True)]
            self._last[number] = [*self.workers.each(draw, pairs)]
        return self._last[number]

    @property
    def _sizes(self) -> Sizes | int:
        """Numbers of records in a dry run, as `sizes`: the planned over `thinning`."""
        sizes, factor = self.options["sizes"], self.thinning
        if not isinstance(sizes, Sizes):
            return -(-sizes // factor)
        upper, lower = (-(-n // factor) for n in (sizes.upper, sizes.lower))
        return Sizes(upper, lower, sizes.people)

    def _dry(self, solver: Any) -> Any:
        """Return a calibrated solver for dry runs: fewer records and equal noise."""
        if is_vector(model_of(self.problem, self.w0)):
            solver = accelerated(solver)
        if self.thinning == 1:
            return solver

        def less(path, leaf):
            of_noise = getattr(path[-1], "name", "") == "noise_multiplier"
            return leaf / self.thinning if of_noise else leaf

        # Means of that many times fewer records then have the same noise.
        return jax.tree_util.tree_map_with_path(less, solver.with_sizes(self._sizes))

    def _key(self, number: int) -> Key:
        return jax.random.fold_in(jax.random.key(self.seed), number)
