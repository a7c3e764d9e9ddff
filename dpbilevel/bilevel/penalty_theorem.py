"""Promises of the theorems of the penalty method: public, before any data."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Self

from .. import _checks
from ..core.descent import Rule
from ..core.outputs import SmallestStep
from ..core.proximal import check_smooth
from ..privacy import FullBatch, Ledger, Poisson, PrivacyBudget
from ..privacy.sampling.base import AbstractSampling
from .certificates.constants import Constants
from .problem import BilevelProblem, Sizes

Batches = AbstractSampling | Literal["theorem"]


@dataclasses.dataclass(frozen=True)
class PenaltyTheorem:
    r"""Rates of the penalty method, every hidden constant and logarithm set to 1.

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
        constants = problem.constants
        _checks.instance(owner, Constants, constants=constants)
        assert isinstance(constants, Constants)
        check_smooth(owner, problem)
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

    def empirical(self, epsilon: float, records: float) -> float:
        r"""Return $\alpha_0$, the accuracy of full batches on the records."""
        ell, kappa, gap = self.constants.ell, self.constants.kappa, self.initial_gap
        outer = gap**0.25 * ell**0.75 * kappa**1.25  # K_1
        outer *= math.sqrt(math.sqrt(self.dimension_x) / (epsilon * records))
        inner = gap ** (1 / 6) * ell ** (5 / 6) * kappa ** (11 / 6)  # K_2
        inner *= (math.sqrt(self.dimension_y) / (epsilon * records)) ** (1 / 3)
        return inner + (outer if self.outer else 0.0)

    def outer_sampling(
        self, epsilon: float, records: float, sampling: Batches
    ) -> AbstractSampling:
        """Return the sampling of the outer gradient's batches.

        A batch has at most all records. If the outer gradient is free there is none.
        """
        if not isinstance(sampling, str):
            return sampling
        batch = (self.outer_lipschitz / self.empirical(epsilon, records)) ** 2  # b_out
        everything = not self.outer or batch >= records
        return FullBatch() if everything else Poisson(batch / records)

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

    def accuracy(self, epsilon: float, records: float, sampling: Batches) -> float:
        r"""Return the accuracy $\alpha$ that the theorem promises of its parameters."""
        batches = self.outer_sampling(epsilon, records, sampling)
        found = self.empirical(epsilon, records) + self.batch_error(batches, records)
        return found + self.generalization_error(records)

    def bound(self, solver: Any, records: int, inner: float, outer: float) -> float:
        r"""Return the proof's bound on the gradient mapping for any parameters.

        $$\frac{\ell \kappa^3}{\lambda} + \sqrt{\frac{\Delta}{\eta T}} + \sigma
        \sqrt{d_x} + \lambda \kappa\, \sigma_{in} \sqrt{d_y} + \ell \kappa
        \sqrt{\frac1b - \frac1n} + \ell \kappa^3 \sqrt{\frac{d_x}{n}}:$$

        bias of the penalty, steps, noise of the outer gradient, noise of the inner
        solutions, batches, population. Inner solves are taken to be as accurate as
        their noise allows: off by $\sigma_{in} \sqrt{d_y} / \mu_g$.

        Args:
            solver: A calibrated `PenaltyBilevel`.
            records: $n$.
            inner: $\sigma_{in}$, the `averaged_std` of both inner runs, added up.
            outer: $\sigma$ of one outer gradient.
        """
        penalty, kappa = float(solver.penalty), self.constants.kappa
        return (
            self.smoothness / penalty
            + math.sqrt(self.initial_gap / (solver.step_size * solver.num_steps))
            + outer * math.sqrt(self.dimension_x)
            + penalty * kappa * inner * math.sqrt(self.dimension_y)
            + self.batch_error(solver.sampling, records)
            + self.generalization_error(records)
        )

    @property
    def limits(self) -> dict[str, float]:
        r"""Upper limits of $\alpha$, by the reason for each.

        The penalty $\ell \kappa^3 / \alpha$ has to be at least $2 \kappa$, $L_0^f /
        L_0^g$, $L_1^f / L_1^g$ and $\ell \kappa / \Delta$, and $\|\nabla F\| \le L_0^f
        (1 + L_1^g / \mu_g)$ everywhere.
        """
        c, smoothness = self.constants, self.smoothness
        least = {
            "2 kappa": 2 * c.kappa,
            "upper_lipschitz / lower_lipschitz": c.upper_lipschitz / c.lower_lipschitz,
            "upper_smoothness / lower_smoothness": (
                c.upper_smoothness / c.lower_smoothness
            ),
            "ell kappa / initial_gap": c.ell * c.kappa / self.initial_gap,
        }
        everywhere = c.upper_lipschitz * (1 + c.lower_smoothness / c.strong_convexity)
        limits = {"no hypergradient is longer by the constants": everywhere}
        for name, value in least.items():
            why = f"the penalty has to be at least {name} = {value:.4g}"
            limits[why] = smoothness / value if value else math.inf
        return limits

    def promised(
        self,
        owner: str,
        problem: BilevelProblem,
        budget: PrivacyBudget,
        sizes: Sizes,
        sampling: Batches,
    ) -> float:
        r"""Return the accuracy $\alpha$; raise if it is not below all `limits`.

        Raises:
            ValueError: With the number of records and the epsilon that it takes.
        """
        _checks.instance(owner, PrivacyBudget, budget=budget)
        problem.check_sizes(owner, sizes)
        epsilon, records = budget.epsilon, min(sizes.upper, sizes.lower)
        if isinstance(sampling, str):
            _checks.one_of(owner, "sampling", sampling, ("theorem",))
        else:
            _checks.instance(owner, AbstractSampling, sampling=sampling)
        promised = self.accuracy(epsilon, records, sampling)
        why, limit = min(self.limits.items(), key=lambda item: item[1])
        if promised < limit:
            return promised
        more = _least(lambda n: self.accuracy(epsilon, n, sampling) < limit, records)
        larger = _least(lambda e: self.accuracy(e, records, sampling) < limit, epsilon)
        ways = [] if more is None else [f"{math.ceil(more)} records at this epsilon"]
        ways += [] if larger is None else [f"epsilon {larger:.4g} with these records"]
        raise ValueError(
            f"{owner}: hopeless: the theorem promises {promised:.4g} with {records} "
            f"records at epsilon {epsilon:.4g}, not below {limit:.4g}: {why}. Use "
            f"{', or '.join(ways) or 'larger batches, or a problem of smaller kappa'}."
        )

    def check_covers(self, owner: str, solver: Any) -> None:
        """Raise `ValueError` if no theorem is about a `PenaltyBilevel`."""
        c, fault = self.constants, None
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
        elif solver.penalty < (1 - 1e-6) * 2 * c.kappa:
            fault = f"use penalty of at least 2 kappa = {2 * c.kappa:.4g}"
        if fault is not None:
            raise ValueError(f"{owner}: no theorem covers this solver; {fault}.")


def theorem_accuracy(
    problem: BilevelProblem,
    budget: PrivacyBudget,
    sizes: Sizes,
    *,
    dimension_x: int,
    dimension_y: int,
    initial_gap: float,
    sampling: Batches = FullBatch(),
    population: bool = False,
) -> float:
    r"""Return the accuracy $\alpha$ that `PenaltyBilevel.from_theorem` plans for.

    The theorem bounds the norm of the gradient mapping at the answer by $\alpha$, up to
    absolute constants and logarithms. `PenaltyBilevel.bound` is the bound with the
    noise of a plan instead.

    Args:
        problem: A problem with declared `Constants`.
        budget: $\varepsilon$ of the whole run.
        sizes: $n$ is the smaller of the two levels.
        dimension_x: $d_x$.
        dimension_y: $d_y$.
        initial_gap: $\Delta \ge F(x_0) - \inf F$.
        sampling: The batches of the outer gradient, or `"theorem"`.
        population: Whether $\alpha$ is to hold for the population of the records.

    Raises:
        ValueError: As `PenaltyBilevel.from_theorem`.
        TypeError: The problem has one level, or declares no `Constants`.

    Privacy:
        Touches no data.

    References:
        Kornowski, "Differentially private bilevel optimization", Theorems 4, 11 and 13.
    """
    owner = "theorem_accuracy"
    _checks.instance(owner, BilevelProblem, problem=problem)
    theorem = PenaltyTheorem.of(
        owner, problem, dimension_x, dimension_y, initial_gap, population
    )
    return theorem.promised(owner, problem, budget, sizes, sampling)


def averaged_std(ledger: Ledger) -> float:
    """Return the standard deviation of the best weighted mean of a run's noises."""
    releases: Any = ledger.releases
    if any(release.noise_std == 0 for release in releases):
        return 0.0
    return sum(release.count / release.noise_std**2 for release in releases) ** -0.5


def _least(holds: Callable[[float], bool], start: float) -> float | None:
    """Return about the least number above `start` where `holds` is true, or `None`."""
    high = next((2.0**k for k in range(1, 100) if holds(start * 2.0**k)), None)
    if high is None:
        return None
    low = high / 2
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(start * middle) else (middle, high)
    return start * high * 1.001  # below it even when it is printed with four digits
