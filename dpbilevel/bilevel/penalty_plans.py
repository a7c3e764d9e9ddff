"""Planner of the penalty method: parameters and promises, public, before any data."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import scipy

from .. import _checks
from ..core.descent import Rule
from ..core.outputs import SmallestStep, TailMean
from ..core.plan import calibrated, check_promise, least_multiplier
from ..core.proximal import check_smooth
from ..core.solver import AbstractSolver
from ..onelevel.localized import LocalizedGD, theorem_radii
from ..onelevel.noisy_gd import NoisyGD
from ..privacy import FullBatch, Gaussian, Ledger, PrivacyBudget
from ..sets import moves_by_entropy
from .certificates.constants import Constants
from .problem import BilevelProblem, Sizes

Inner = AbstractSolver | Literal["localized"]
Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PenaltyTheorem:
    r"""Bound of the penalty method, every hidden constant and logarithm set to 1.

    $n$ is the number of records of the smaller level, `records`.

    References:
        Kornowski, "Differentially private bilevel optimization", Theorems 4, 11 and 13;
        what batches and the population add is derived in docs/mathematics.md.
    """

    constants: Constants
    initial_gap: float  # Delta
    dimension_x: int
    dimension_y: int
    outer: bool  # whether the outer gradient reads records
    population: bool

    @classmethod
    def of(
        cls,
        owner: str,
        problem: BilevelProblem,
        dimension_x: int,
        dimension_y: int,
        initial_gap: float,
        population: bool,
    ) -> Self:
        """Check the arguments; return the `PenaltyTheorem` of the problem."""
        _checks.count(owner, dimension_x=dimension_x, dimension_y=dimension_y)
        _checks.positive(owner, initial_gap=initial_gap)
        constants: Any = problem.constants
        _checks.instance(owner, Constants, constants=constants)
        check_smooth(owner, problem)
        if moves_by_entropy(problem.x_set):
            raise ValueError(f"{owner}: no theorem covers steps of the entropy.")
        needed = "upper_lipschitz", "lower_lipschitz", "lower_smoothness"
        _checks.positive(owner, **{name: getattr(constants, name) for name in needed})
        outer = bool(problem.x_in_records)
        return cls(constants, initial_gap, dimension_x, dimension_y, outer, population)

    @property
    def smoothness(self) -> float:
        """Smoothness of the penalized hyper-objective: ell times kappa cubed."""
        return self.constants.ell * self.constants.kappa**3

    @property
    def outer_lipschitz(self) -> float:
        """Bound on one record's part of the gradient in x: ell times kappa."""
        return self.constants.ell * self.constants.kappa

    def bound(self, solver: Any, problem: BilevelProblem) -> float:
        r"""Return the theorem's bound on the gradient mapping for a solver's settings.

        $$\frac{\ell \kappa^3}{\lambda} + \sqrt{\frac{\Delta}{\eta T}} + \sigma
        \sqrt{d_x} + \lambda \kappa\, \sigma_{in} \sqrt{d_y} + \ell \kappa
        \sqrt{\frac1b - \frac1n} + \ell \kappa^3 \sqrt{\frac{d_x}{n}}:$$

        bias of the penalty, steps, noise of the outer gradient, noise of the inner
        solutions, batches, population. Inner solves are taken to be as accurate as
        their noise allows: off by $\sigma_{in} \sqrt{d_y} / \mu_g$. The solver is a
        calibrated `PenaltyBilevel` that the theorem covers.
        """
        records = min(solver.sizes.upper, solver.sizes.lower)
        batches = population = 0.0
        if self.outer:
            batch = solver.sampling.denominator(math.ceil(records))
            apart = max(1 / batch - 1 / records, 0.0)
            batches = self.outer_lipschitz * math.sqrt(apart)
        if self.population:
            population = self.smoothness * math.sqrt(self.dimension_x / records)
        return (
            self.smoothness / float(solver.penalty)
            + math.sqrt(self.initial_gap / (solver.step_size * solver.num_steps))
            + sum(self.noise_terms(solver, problem))
            + batches
            + population
        )

    def noise_terms(
        self, solver: Any, problem: BilevelProblem
    ) -> tuple[float, float, float]:
        """Return the bound's three noise terms: lower, penalized, outer releases."""

        def averaged_std(ledger: Ledger) -> float:
            releases: Any = ledger.releases
            if any(release.noise_std == 0 for release in releases):
                return 0.0
            # The best weighted mean of a run's noises.
            weights = (release.count / release.noise_std**2 for release in releases)
            return sum(weights) ** -0.5

        *both, outer = solver.ledgers(problem, solver.sizes)
        scale = float(solver.penalty) * self.constants.kappa
        inner = scale * math.sqrt(self.dimension_y)
        noise = sum(release.noise_std for release in outer.releases)  # at most one
        lower, penalized = (inner * averaged_std(ledger) for ledger in both)
        return lower, penalized, noise * math.sqrt(self.dimension_x)

    @property
    def everywhere(self) -> float:
        """Bound on the norm of the hypergradient at every x, from the constants."""
        c = self.constants
        return c.upper_lipschitz * (1 + c.lower_smoothness / c.strong_convexity)

    @property
    def least_penalty(self) -> tuple[float, str]:
        """Pair: the least penalty that the proof admits, and its formula as text."""
        c = self.constants
        lipschitz = c.upper_lipschitz / c.lower_lipschitz
        smoothness = c.upper_smoothness / c.lower_smoothness
        return max(
            (2 * c.kappa, "2 kappa"),
            (lipschitz, "upper_lipschitz / lower_lipschitz"),
            (smoothness, "upper_smoothness / lower_smoothness"),
            (c.ell * c.kappa / self.initial_gap, "ell kappa / initial_gap"),
        )

    def check_covers(self, owner: str, solver: Any) -> None:
        """Raise `ValueError` if no theorem covers the settings of a solver."""
        c, fault, (least, name) = self.constants, None, self.least_penalty
        clip_norms = [getattr(v, "clip_norm", math.inf) for v in solver.inner_solvers]
        if type(solver.output) is not SmallestStep:
            fault = "use output=SmallestStep()"
        elif solver.clip_norm < self.outer_lipschitz * (1 - 1e-6) and self.outer:
            fault = f"use clip_norm of at least ell kappa = {self.outer_lipschitz:.4g}"
        elif solver.upper_clip_norm < c.upper_lipschitz * (1 - 1e-6):
            fault = f"use upper_clip_norm of at least {c.upper_lipschitz:.4g}"
        elif isinstance(solver.step_size, Rule):
            fault = "use a number as step_size"
        elif solver.step_size > (1 + 1e-6) / self.smoothness:
            fault = f"use step_size of at most {1 / self.smoothness:.4g}"
        elif solver.penalty < (1 - 1e-6) * least:
            fault = f"use penalty of at least {name} = {least:.4g}"
        elif min(clip_norms) < c.lower_lipschitz * (1 - 1e-6):
            fault = f"use inner with clip_norm of at least {c.lower_lipschitz:.4g}"
        if fault is not None:
            raise ValueError(f"{owner}: no theorem covers this solver; {fault}.")


class PlannedPenalty:
    """Mixin of `PenaltyBilevel`: planned parameters, and a bound on the answer."""

    @classmethod
    def tuned(
        cls,
        problem: BilevelProblem,
        budget: PrivacyBudget,
        sizes: Sizes,
        *,
        dimension_x: int,
        dimension_y: int,
        initial_gap: float,
        inner: Inner | None = None,
        inner_steps: int | None = None,
        population: bool = False,
        **fields: Any,
    ) -> Self:
        r"""Return a full-batch solver whose parameters minimize the `bound`.

        The least bound is not the least error: steps are as short as the worst problem
        needs, and longer ones without a bound are often better.

        Clip norms are the constants, $\eta = 1 / (\ell \kappa^3)$. For a penalty
        $\lambda$ let $a_i$ be the terms of the bound that lower solves, penalized
        solves and outer gradients would add if each had the whole budget of a run of
        one step. The best split and number of steps are

        $$p_i \propto a_i^{2/3}, \qquad T = \frac{\sqrt{\Delta \ell \kappa^3}}{V},
        \qquad V = \Bigl(\sum_i a_i^{2/3}\Bigr)^{3/2},$$

        and $\lambda$ is found by a search. The bound does not depend on the number of
        inner steps. By default it is twice the least one with which noiseless gradient
        descent from anywhere is as near the solution as the noise allows, and the
        second half is averaged.

        Args:
            problem: A problem with declared `Constants`.
            budget: $\varepsilon$ and $\delta$ of the whole run.
            sizes: The planned sizes; $n$ is the smaller level.
            dimension_x: $d_x$.
            dimension_y: $d_y$.
            initial_gap: $\Delta \ge F(x_0) - \inf F$.
            inner: The inner solver, by default a `NoisyGD`; or `"localized"` for the
                two `LocalizedGD` of the theorem, with $\varepsilon / \sqrt{18 T}$ each:
                strong convexity $\mu_g$ for the lower problem, $\mu_g / 2$ for the
                penalized one.
            inner_steps: The steps of that `NoisyGD`, or per round of `"localized"`, by
                default 100 where the theorem needs $n^2$.
            population: Whether the bound is to hold for the population of the records.
            **fields: Further fields of `PenaltyBilevel`.

        Raises:
            ValueError: The least bound is not below the largest norm of a hypergradient
                by the constants. The message has the number of records from which on
                it is.

        Privacy:
            Touches no data.

        References:
            Kornowski, Theorems 4 (full batch), 11 (batches) and 13 (population), whose
            rates and last two terms are in docs/mathematics.md.
        """
        owner = "PenaltyBilevel.tuned"
        given = problem, dimension_x, dimension_y, initial_gap, population
        theorem = PenaltyTheorem.of(owner, *given)
        planner = PenaltyPlanner(cls, owner, theorem, problem, budget, inner_steps)
        return planner.kept(inner, sizes, fields)

    def bound(
        self: Any,
        problem: BilevelProblem,
        *,
        dimension_x: int,
        dimension_y: int,
        initial_gap: float,
        population: bool = False,
    ) -> float:
        r"""Return the theorems' bound on the gradient mapping's norm at the answer.

        It bounds the norm of the gradient mapping at the answer, up to absolute
        constants and logarithms, with the noise of the plan. It takes for granted that
        $y^*(x)$ is inside `y_set`, and that inner solves are as accurate as their noise
        allows: averages of enough steps are, the last of few steps is not. Arguments
        are those of the same name of `tuned`.

        Raises:
            ValueError: The solver is not calibrated, or no theorem covers it: its
                `x_set` moves by the entropy, its output is not `SmallestStep`, a clip
                norm is below the constants, $\eta$ is no number or above $1 / (\ell
                \kappa^3)$, or $\lambda$ is below the limits of the proof, such as $2
                \kappa$.
        """
        owner = "PenaltyBilevel.bound"
        given = problem, dimension_x, dimension_y, initial_gap, population
        theorem = PenaltyTheorem.of(owner, *given)
        if self.sizes is None:
            raise ValueError(
                f"{owner}: give a solver from dpbilevel.calibrate(...).solver."
            )
        theorem.check_covers(owner, self)
        return theorem.bound(self, problem)


@dataclasses.dataclass(frozen=True)
class PenaltyPlanner:
    """Planner behind `PlannedPenalty.tuned`: it minimizes the theorem's bound."""

    solver: Callable[..., Any]  # the class of the planned solver
    owner: str
    theorem: PenaltyTheorem
    problem: BilevelProblem
    budget: PrivacyBudget
    inner_steps: int | None

    @property
    def common(self) -> Fields:
        """Dict of the planned solver's fields that do not depend on the sizes."""
        return {
            "step_size": 1 / self.theorem.smoothness,  # eta
            "clip_norm": self.theorem.outer_lipschitz,
            "upper_clip_norm": self.theorem.constants.upper_lipschitz,
            "output": SmallestStep(),
        }

    def kept(self, inner: Inner | None, sizes: Sizes, fields: Fields) -> Any:
        """Return the planned solver; raise unless its bound beats the trivial one."""
        _checks.instance(self.owner, PrivacyBudget, budget=self.budget)
        self.problem.check_sizes(self.owner, sizes)
        theorem, records = self.theorem, min(sizes.upper, sizes.lower)
        noise = fields.get("run_noise", Gaussian())

        def with_least_bound(sizes: Sizes) -> Any:
            chosen = self.common | self.least(inner, sizes, noise)
            if inner == "localized":
                chosen |= self.localized(sizes, chosen["num_steps"], chosen["penalty"])
            return self.solver(**(chosen | fields))

        planned = with_least_bound(sizes)

        def bound(n: int) -> float:
            upper, lower = (-(-v * n // records) for v in (sizes.upper, sizes.lower))
            scaled = Sizes(upper, lower, sizes.people)
            found = planned if n == records else with_least_bound(scaled)
            theorem.check_covers(self.owner, found)
            given: Any = {"sizes": scaled, "precision": "float"}
            plan = calibrated(self.problem, found, self.budget, **given)
            return theorem.bound(plan.solver, self.problem)

        check_promise(self.owner, bound, theorem.everywhere, records)
        return planned

    def least(self, inner: Inner | None, sizes: Sizes, noise: Gaussian) -> Fields:
        """Return a dict of steps, penalty, split and inner: those of least bound."""
        theorem = self.theorem
        relation = noise.neighbours
        simple = NoisyGD(1, theorem.constants.lower_lipschitz, 1.0, neighbours=relation)
        given = inner if isinstance(inner, AbstractSolver) else simple
        # One step, in which each part has all of the budget of a run on full batches.
        equal: Fields = {"budget_split": (1.0, 1.0, 1.0), "run_noise": noise}
        equal |= self.common
        one = self.solver(1, 1.0, given, **equal).with_sizes(sizes)
        multiplier = least_multiplier(FullBatch(), 1, 1, self.budget)
        one = one.with_noise(multiplier / math.sqrt(3 if theorem.outer else 2))
        one = one.with_precision("float")  # the grid holds no extreme penalty
        start = math.sqrt(theorem.initial_gap * theorem.smoothness)

        def powers(penalty: float) -> list[float]:
            solver = dataclasses.replace(one, penalty=penalty)
            terms = theorem.noise_terms(solver, self.problem)
            return [term ** (2 / 3) for term in terms]

        def value(log_penalty: float) -> float:
            noise = sum(powers(math.exp(log_penalty))) ** 1.5  # V
            bias = theorem.smoothness / math.exp(log_penalty)
            return bias + 2 * math.sqrt(start * noise)

        low = math.log(theorem.least_penalty[0])
        search: Any = {"bounds": (low, low + 30), "options": {"xatol": 1e-3}}
        penalty = math.exp(scipy.optimize.minimize_scalar(value, **search).x)
        shares = powers(penalty)
        steps = math.ceil(start / sum(shares) ** 1.5)
        lower, penalized, outer = (share / sum(shares) for share in shares)
        chosen: Fields = {"num_steps": steps, "penalty": penalty, "inner": inner}
        # The last part of the budget is not used if the outer gradient is free.
        chosen["budget_split"] = lower, penalized, outer or lower
        if inner is None:
            error = shares[1] ** 1.5 * math.sqrt(steps / penalized)
            chosen["inner"] = self.descent(penalty, error)
        return chosen

    def descent(self, penalty: float, error: float) -> NoisyGD:
        """Return the inner `NoisyGD`; its default steps leave a bias within `error`.

        It does so after half of its steps; the others are averaged against the noise.
        From anywhere in the set of solutions, on g + f / penalty, whose curvature is at
        least half of the strong convexity.
        """
        c = self.theorem.constants
        smoothness = c.lower_smoothness + c.upper_smoothness / penalty
        apart = 2 * c.lower_lipschitz * penalty * c.kappa  # as in the bound
        needed = math.log(max(apart / error, math.e)) * 2 * smoothness
        count = self.inner_steps or 2 * math.ceil(needed / c.strong_convexity)
        given = count, c.lower_lipschitz, 1 / smoothness
        return NoisyGD(*given, output=TailMean(0.5))

    def localized(self, sizes: Sizes, steps: int, penalty: float) -> Fields:
        """Return a dict of `inner` and `penalized_inner`, both `LocalizedGD`.

        The first outer step starts anywhere in the set of solutions. Later ones start
        within the last solve's error and the way that the solution has moved.
        """
        c, theorem = self.theorem.constants, self.theorem
        n = min(sizes.upper, sizes.lower)
        budget = self.budget.epsilon / math.sqrt(18 * steps) * n
        moved = (theorem.outer_lipschitz + theorem.everywhere) / theorem.smoothness
        slope = c.lower_smoothness / c.strong_convexity * moved

        def solver(convexity: float, lipschitz: float, way: float, apart: float):
            ratio, dimension = convexity * budget / lipschitz, theorem.dimension_y
            first = 2 * c.lower_lipschitz / c.strong_convexity + apart
            later = min(first, way + math.sqrt(dimension) / ratio)
            first, later = (
                theorem_radii(self.owner, ratio, dimension, r) for r in (first, later)
            )
            given = later, self.inner_steps or 100, convexity, c.lower_lipschitz
            return LocalizedGD(*given, first_radii=first)

        half, above = c.strong_convexity / 2, c.upper_lipschitz / penalty
        penalized = half, c.lower_lipschitz + above, 4 * slope, above / half
        lower = c.strong_convexity, c.lower_lipschitz, slope, 0.0
        return {"inner": solver(*lower), "penalized_inner": solver(*penalized)}
