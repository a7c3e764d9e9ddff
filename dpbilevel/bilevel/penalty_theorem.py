"""Promises of the theorems of the penalty method: public, before any data."""

import dataclasses
import math
from typing import Any, Self

from .. import _checks
from ..core.descent import Rule
from ..core.outputs import SmallestStep
from ..core.proximal import check_smooth
from ..privacy import Ledger
from ..privacy.sampling.base import AbstractSampling
from ..sets import moves_by_entropy
from .certificates.constants import Constants
from .problem import BilevelProblem


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
        """Return a `PenaltyTheorem` for a problem, from checked arguments."""
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
        r"""Smoothness $\ell \kappa^3$ of the penalized hyper-objective."""
        return self.constants.ell * self.constants.kappa**3

    @property
    def outer_lipschitz(self) -> float:
        r"""$\ell \kappa$, which bounds one record's part of the outer gradient."""
        return self.constants.ell * self.constants.kappa

    def batch_error(self, sampling: AbstractSampling, records: float) -> float:
        r"""Return $\ell \kappa \sqrt{1 / b - 1 / n}$, the error of batch gradients."""
        if not self.outer:
            return 0.0
        batch = sampling.denominator(math.ceil(records))
        return self.outer_lipschitz * math.sqrt(max(1 / batch - 1 / records, 0.0))

    def generalization_error(self, records: float) -> float:
        r"""Return $\ell \kappa^3 \sqrt{d_x / n}$; 0 without a population."""
        if not self.population:
            return 0.0
        return self.smoothness * math.sqrt(self.dimension_x / records)

    def bound(self, solver: Any, problem: BilevelProblem) -> float:
        r"""Return the proof's bound on the gradient mapping for any parameters.

        $$\frac{\ell \kappa^3}{\lambda} + \sqrt{\frac{\Delta}{\eta T}} + \sigma
        \sqrt{d_x} + \lambda \kappa\, \sigma_{in} \sqrt{d_y} + \ell \kappa
        \sqrt{\frac1b - \frac1n} + \ell \kappa^3 \sqrt{\frac{d_x}{n}}:$$

        bias of the penalty, steps, noise of the outer gradient, noise of the inner
        solutions, batches, population. Inner solves are taken to be as accurate as
        their noise allows: off by $\sigma_{in} \sqrt{d_y} / \mu_g$.

        Args:
            solver: A calibrated `PenaltyBilevel` that the theorem covers.
            problem: Its problem.
        """
        records = min(solver.sizes.upper, solver.sizes.lower)
        return (
            self.smoothness / float(solver.penalty)
            + math.sqrt(self.initial_gap / (solver.step_size * solver.num_steps))
            + sum(self.noise_terms(solver, problem))
            + self.batch_error(solver.sampling, records)
            + self.generalization_error(records)
        )

    def noise_terms(
        self, solver: Any, problem: BilevelProblem
    ) -> tuple[float, float, float]:
        """Return the terms of lower solves, penalized solves and outer gradients."""
        of_lower, of_penalized, outer = solver.ledgers(problem, solver.sizes)
        scale = float(solver.penalty) * self.constants.kappa
        inner = scale * math.sqrt(self.dimension_y)
        noise = sum(release.noise_std for release in outer.releases)  # at most one
        return (
            inner * averaged_std(of_lower),
            inner * averaged_std(of_penalized),
            noise * math.sqrt(self.dimension_x),
        )

    @property
    def everywhere(self) -> float:
        r"""Bound $L_0^f (1 + L_1^g / \mu_g)$ on the length of every hypergradient."""
        c = self.constants
        return c.upper_lipschitz * (1 + c.lower_smoothness / c.strong_convexity)

    @property
    def least_penalty(self) -> tuple[float, str]:
        """Least penalty that the lemmas of the proof admit, and its name."""
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
        """Raise `ValueError` if no theorem is about a `PenaltyBilevel`."""
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


def averaged_std(ledger: Ledger) -> float:
    """Return the standard deviation of the best weighted mean of a run's noises."""
    releases: Any = ledger.releases
    if any(release.noise_std == 0 for release in releases):
        return 0.0
    return sum(release.count / release.noise_std**2 for release in releases) ** -0.5
