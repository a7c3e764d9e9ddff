"""Which solver of a bilevel problem promises most, before any data is seen."""

import dataclasses
import math
from typing import Any

import scipy

from .. import _checks
from ..bilevel import certified
from ..bilevel.constants import SecondOrderConstants
from ..bilevel.implicit import ImplicitBilevel
from ..bilevel.problem import BilevelProblem, Sizes
from ..bilevel.warm_start import WarmStarted
from ..core.plan import calibrate
from ..core.solver import AbstractSolver
from ..privacy import accounting
from ..privacy.budget import People, PrivacyBudget
from .exponential import ExponentialMechanism
from .samplers.base import AbstractSampler
from .samplers.grid import Grid
from .scores.hyper import HyperObjective


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to run, and what each method promises.

    Attributes:
        choice: `"implicit"`, `"warm_started"`, `"gradient_norm"` or `"trivial"`.
        solver: To be calibrated for the budget; `None` for the trivial answer, the
            public starting point.
        bounds: The expected norm of the hypergradient at the answer that each method
            promises; infinite where it does not serve the budget, the set, the dtype or
            the sampler.
        reason: Why, in a sentence.
    """

    choice: str
    solver: AbstractSolver | None
    bounds: dict[str, float]
    reason: str

    def __str__(self) -> str:
        """The reason and a table of the bounds."""
        rows = [f"  {name}: {bound:.3g}" for name, bound in self.bounds.items()]
        return "\n".join([self.reason, "expected hypergradient norm, at most:", *rows])


def recommend(
    problem: BilevelProblem,
    budget: PrivacyBudget,
    *,
    sizes: Sizes,
    dimension_x: int,
    initial_gap: float,
    sampler: AbstractSampler,
) -> Recommendation:
    r"""Picks the solver with the smallest predicted hypergradient norm.

    With $S$ the sensitivity of the hypergradient, $m$ the multiplier of a single
    Gaussian release within the budget, $d = d_x$ and $\beta = \beta_\Phi$:

    - *trivial*: $\bar L$, at any public point, for free.
    - *implicit*: $T$ steps of size $1 / (2 \beta)$ with noise of variance $T m^2 S^2$
      promise $\frac{1}{T} \sum_t E \|\nabla \Phi(x_t)\|^2 \le \frac{8 \beta \Delta}{3
      T} + \frac{d T m^2 S^2}{3}$; the best $T$ makes the root of it $\bigl(\tfrac23
      \sqrt{8 \beta \Delta d}\, m S\bigr)^{1/2}$.
    - *gradient_norm*: the exponential mechanism on the norm of the gradient mapping,
      which is zero somewhere on a compact set, with $k = \varepsilon / (2 S)$. A score
      that is $L$-Lipschitz on a convex set of diameter $D$ exceeds its minimum in
      expectation by at most $\frac{d}{k} \bigl(1 + \log(1 + \frac{k L D}{d})\bigr)$,
      as comparing with the uniform law on the set shrunk towards the minimum shows;
      here $L = \beta + 2$.
    - *warm_started*: the exponential mechanism on $\Phi$ with half of the budget makes
      $\Delta$ as small as that bound with $L = \bar L$; then implicit steps.

    Args:
        problem: A problem with a certificate.
        budget: The guarantee to reach.
        sizes: The planned sizes.
        dimension_x: $d$.
        initial_gap: $\Delta \ge \Phi(x_0) - \inf \Phi$; public.
        sampler: What would draw. The bounds are those of exact draws from the whole
            set: for a `Grid`, of one that is fine enough.

    Returns:
        The choice, its solver and all bounds. They rest on the worst case that the
        constants allow: in practice every method does better, and the order may differ.

    Raises:
        ValueError: The problem has no certificate, or the candidates of a `Grid` have
            another dimension.
        TypeError: The problem has one level.

    Privacy:
        Reads no data.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", bound (3) and Appendix C.3.
    """
    owner = "recommend"
    _checks.instance(owner, BilevelProblem, problem=problem)
    _checks.instance(owner, PrivacyBudget, budget=budget)
    _checks.instance(owner, Sizes, sizes=sizes)
    _checks.instance(owner, AbstractSampler, sampler=sampler)
    _checks.count(owner, dimension_x=dimension_x)
    _checks.positive(owner, initial_gap=initial_gap)
    if isinstance(sampler, Grid) and sampler.dimension != dimension_x:
        raise ValueError(
            f"{owner}: dimension_x={dimension_x}, but the candidates have "
            f"{sampler.dimension} coordinates."
        )
    certificate = certified.certificate_of(problem)
    bounds = certificate.bounds(sizes)
    case = _Case(
        certificate.second_order,
        _total((bounds.upper, bounds.lower), sizes),
        _total(HyperObjective(problem, "spread", sizes).spreads(), sizes),
        dimension_x,
        float(problem.x_set.diameter),
        budget,
    )
    steepest = case.constants.smoothness + 2  # of the norm of the gradient mapping
    promises = {
        "trivial": float(bounds.gradient),
        "implicit": case.implicit(initial_gap),
        "warm_started": case.implicit(case.gap_after_draw(), 0.5),
        "gradient_norm": case.excess(steepest, 2 * case.sensitivity),
    }
    for name in ("warm_started", "gradient_norm"):
        solver = case.solver(name, initial_gap, sampler)
        if not _serves(problem, solver, budget, sizes):
            promises[name] = math.inf
    choice = min(promises, key=promises.__getitem__)
    solver = case.solver(choice, initial_gap, sampler)
    return Recommendation(choice, solver, promises, _REASONS[choice])


@dataclasses.dataclass(frozen=True)
class _Case:
    constants: SecondOrderConstants
    sensitivity: float  # of the hypergradient
    spread: float  # of the hyper-objective
    dimension: int
    diameter: float
    budget: PrivacyBudget

    def implicit(self, gap: float, share: float = 1.0) -> float:
        if self.budget.delta == 0:  # which no Gaussian noise reaches
            return math.inf
        drop = math.sqrt(8 * self.constants.smoothness * gap * self.dimension)
        noise = self._multiplier(share) * self.sensitivity
        return math.sqrt(2 / 3 * drop * noise)

    def gap_after_draw(self) -> float:
        return self.excess(self.constants.upper_total, self.spread, 0.5)

    def excess(self, lipschitz: float, spread: float, share: float = 1.0) -> float:
        if math.isinf(self.diameter):
            return math.inf
        temperature = self.dimension * spread / (share * self.budget.epsilon)
        return temperature * (1 + math.log1p(lipschitz * self.diameter / temperature))

    def steps(self, gap: float, share: float = 1.0) -> int:
        noise = self._multiplier(share) * self.sensitivity
        drop = 8 * self.constants.smoothness * gap / self.dimension
        return max(1, round(math.sqrt(drop) / noise))

    def solver(self, choice: str, gap: float, sampler: AbstractSampler) -> Any:
        if choice == "trivial":
            return None
        draw = ExponentialMechanism(sampler, dimension=self.dimension)
        if choice == "gradient_norm":
            return dataclasses.replace(draw, score=choice)
        step_size = 1 / (2 * self.constants.smoothness)
        if choice == "implicit":
            return ImplicitBilevel(self.steps(gap), step_size=step_size)
        steps = self.steps(self.gap_after_draw(), 0.5)
        return WarmStarted(draw, ImplicitBilevel(steps, step_size=step_size))

    def _multiplier(self, share: float) -> float:
        epsilon, delta = share * self.budget.epsilon, self.budget.delta

        def excess(log_mu: float) -> float:
            return accounting.gaussian_delta(math.exp(log_mu), epsilon) - delta

        return math.exp(-scipy.optimize.brentq(excess, -30.0, 10.0))


def _serves(problem, solver: AbstractSolver, budget, sizes: Sizes) -> bool:
    """Whether the sampler, the dtype and the accountant can do it."""
    try:
        calibrate(problem, solver, budget, sizes=sizes)
    except ValueError:
        return False
    return True


def _total(shares: tuple[Any, Any], sizes: Sizes) -> float:
    upper, lower = map(float, shares)
    return max(upper, lower) if sizes.people is People.DISJOINT else upper + lower


_REASONS = {
    "trivial": "No method promises more than the public starting point: keep it, "
    "and the budget. More records, a larger epsilon or a stronger convexity of the "
    "lower level would change that.",
    "implicit": "Noisy implicit steps promise most: the dimension is large or the "
    "start is good enough for descent.",
    "warm_started": "A draw by the hyper-objective, then noisy implicit steps, "
    "promises most: in this dimension a draw brings the start close.",
    "gradient_norm": "A draw by the norm of the hypergradient promises most: the "
    "dimension is small for this many records.",
}
