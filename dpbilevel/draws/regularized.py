"""The regularized exponential mechanism for convex objectives."""

import dataclasses
import math
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..bilevel.certified import certificate_of
from ..bilevel.problem import BilevelProblem, Sizes
from ..core.levels import people_of
from ..onelevel.problem import FiniteSum
from ..privacy.budget import People, PrivacyBudget
from ..privacy.clipping import Basis
from ..privacy.ledger import Ledger
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.noise import PRNGKey
from .base import DRAW, AbstractDrawSolver, DrawState, feasible_set, queries_of
from .mechanisms import RegularizedExponential, check_continuous
from .release import Draw
from .samplers.base import AbstractSampler, Regularity
from .scores.base import AbstractScore, Facts
from .scores.hyper import HyperObjective
from .scores.mean_loss import MeanLoss


class RegularizedExponentialMechanism(AbstractDrawSolver):
    r"""Draws $x$ with a density $\propto \exp(-k (\Phi(x) + \frac{\mu}{2} \|x\|^2))$.

    For convex $\Phi$: the objective of a one-level problem, which need not be smooth,
    or the hyper-objective of a bilevel one. One draw costs exactly what a Gaussian
    release of multiplier $m = \sqrt{\mu / k} / S$ costs, with $S$ the Lipschitz
    constant of the change that one record makes in $\Phi$. Its expected excess is at
    most $d / k + \frac{\mu}{2} \max \|x\|^2$; by default $\mu$ makes that least, $\mu =
    m S \sqrt{2 d} / D$.

    Args:
        sampler: How to draw: `AlternatingSampler`.
        convex: Must be `True`: that $\Phi$ is convex on the set, for every possible
            dataset. The guarantee rests on it. Static.
        regularizer: $\mu$; `None` for the one above. The quadratic term is about the
            origin, so the set should be.
        strong_convexity: Of $\Phi$, declared; it adds to $\mu$. Static.
        largest_rate: An upper bound on $k$, for the generalization of the answer.
        mechanism: The mechanism and its noise multiplier.
        dimension: $d$, the number of coordinates of $x$. Static.
        dtype: What the plan takes scores to be computed in; set by `calibrate`. Static.
        sizes: The planned sizes; set by `calibrate`. Static.

    Privacy:
        One draw, under replace-one only. $S$ is $2 G / n$ for declared $G$-Lipschitz
        losses, and for two levels the sensitivity of the hypergradient. Status
        `CONDITIONAL`: convexity is an assumption of privacy here, and so are the
        constants. The distance of the sampler's law from the target, and that which
        the errors of computed values make, are counted in delta.

    References:
        Gopi, Lee and Liu, "Private convex optimization via exponential mechanism",
        COLT 2022, Theorems 4, 27 and 29; Lowy and Liu, "Differentially private bilevel
        optimization: efficient algorithms with near-optimal rates", Theorem B.8, with
        the sensitivity of `ImplicitBilevel`.
    """

    sampler: AbstractSampler
    convex: bool = eqx.field(static=True, kw_only=True)
    regularizer: float | Float[Array, ""] | None = None
    strong_convexity: float = eqx.field(static=True, default=0.0)
    largest_rate: float | None = eqx.field(static=True, default=None)
    mechanism: RegularizedExponential = RegularizedExponential()
    dimension: int | None = eqx.field(static=True, default=None)
    dtype: str | None = eqx.field(static=True, default=None)
    sizes: Any = eqx.field(static=True, default=None)

    def __check_init__(self):
        owner = "RegularizedExponentialMechanism"
        _checks.instance(owner, AbstractSampler, sampler=self.sampler)
        _checks.instance(owner, RegularizedExponential, mechanism=self.mechanism)
        check_continuous(self.sampler)
        if self.convex is not True:
            raise ValueError(
                f"{owner}: its privacy rests on convexity of the objective on every "
                "possible dataset, which nobody can check from data. Declare "
                "convex=True if you can prove it; otherwise use ExponentialMechanism."
            )
        if self.regularizer is not None:
            _checks.non_negative(owner, regularizer=self.regularizer)
        _checks.non_negative(owner, strong_convexity=self.strong_convexity)
        if self.largest_rate is not None:
            _checks.positive(owner, largest_rate=self.largest_rate)

    @classmethod
    def from_theorem(
        cls,
        problem: FiniteSum | BilevelProblem,
        budget: PrivacyBudget,
        sizes: int | Sizes,
        *,
        sampler: AbstractSampler,
        dimension: int,
        **fields: Any,
    ) -> Self:
        r"""The parameters for the loss on new records.

        One level, with $G$-Lipschitz losses:

        $$\mu = \frac{G}{D} \sqrt{2 \Bigl(\frac{2 \log(3 / (4 \delta)) d}{\varepsilon^2
        n^2} + \frac{1}{2 n}\Bigr)}, \qquad k \le \frac{2 n d \mu}{G^2}.$$

        Two levels, with $G = S n / 2$ for the sensitivity $S$ of the hypergradient, $n$
        the smaller level and $C = \beta_{gxy} (1 + \beta_{gyy} / \mu_g)$:

        $$\mu = \frac{1}{D} \sqrt{\frac{G L_{fy} C}{\varepsilon n \mu_g} + \frac{G^2 d
        \log(1/\delta)}{\varepsilon^2 n^2} + \frac{G C L_{fy}}{\mu_g \sqrt n} +
        \frac{G \bar L}{n}}.$$

        Privacy may ask for a smaller $k$, which `calibrate` finds.

        Args:
            problem: A problem on a bounded set, with `lipschitz` or a certificate.
            budget: $\varepsilon$, and $\delta$ in (0, 1/10).
            sizes: The planned number of records, or `Sizes`.
            sampler: How to draw.
            dimension: $d$.
            **fields: Further fields, `convex=True` among them.

        Raises:
            TypeError: Another kind of problem, or of sizes.
            ValueError: A number out of range, or constants are missing.

        References:
            Gopi, Lee and Liu, Theorem 29; Lowy and Liu, Theorem B.8, whose $G$ is not
            the sensitivity (docs/privacy.md).
        """
        owner = "RegularizedExponentialMechanism.from_theorem"
        _checks.instance(owner, (FiniteSum, BilevelProblem), problem=problem)
        _checks.instance(owner, PrivacyBudget, budget=budget)
        problem.check_sizes(owner, sizes)
        _checks.count(owner, dimension=dimension)
        epsilon, delta, rate = budget.epsilon, budget.delta, None
        if not 0 < delta < 0.1:
            raise ValueError(f"{owner}: delta must be in (0, 1/10), got {delta}.")
        if isinstance(problem, FiniteSum):
            regularizer, rate = _one_level(problem, sizes, dimension, epsilon, delta)
        else:
            regularizer = _two_levels(problem, sizes, dimension, epsilon, delta)
        defaults = {"regularizer": regularizer, "largest_rate": rate}
        return cls(sampler, dimension=dimension, **(defaults | fields))

    @property
    def basis(self) -> Basis:
        """Constants, and convexity."""
        return Basis.CONSTANTS

    def step(
        self, problem: Any, data: PyTree, state: DrawState, *, key: PRNGKey
    ) -> DrawState:
        """One draw."""
        score = self._score(problem, self.sizes)
        dtype = self.scored_dtype(state.start)
        facts = score.facts(dtype)
        convexity, multiplier = self._convexity(problem, facts)
        mechanism = dataclasses.replace(self.mechanism, noise_multiplier=multiplier)
        x = mechanism.draw(
            score.bounded(data, state.start, dtype),
            self.sampler,
            feasible_set(problem),
            state.x,
            regularizer=convexity - self.strong_convexity,
            convexity=self.strong_convexity,
            key=key,
        )
        return dataclasses.replace(state, x=x)

    def ledger(self, problem: Any, sizes: Any) -> Ledger:
        """One draw.

        Raises:
            ValueError: The problem lacks constants or the solver is not calibrated.
        """
        facts, rate, regularity, multiplier = self._plan(problem, sizes)
        certificate = self.sampler.certificate(regularity, feasible_set(problem))
        draw = Draw(
            DRAW,
            1,
            queries_of(facts, sizes),
            dataclasses.replace(self.mechanism, noise_multiplier=multiplier),
            rate,
            certificate,
            facts.basis,
            # Densities within exp(+-2 z) of each other are tanh(z) apart at most.
            math.tanh(rate * float(facts.error + facts.rounding)),
        )
        convex = "declared: the objective is convex in x on the set, for every dataset"
        if self.strong_convexity:
            convex += f", and {self.strong_convexity:.6g}-strongly convex"
        people = people_of(sizes) or People.OVERLAPPING
        return Ledger((draw,), people, (convex, *facts.assumptions))

    def with_noise(self, scale: float) -> Self:
        """Sets the multiplier to `scale`."""
        mechanism = dataclasses.replace(self.mechanism, noise_multiplier=scale)
        return dataclasses.replace(self, mechanism=mechanism)

    def regularity(self, problem: Any, sizes: Any) -> Regularity:
        """That of the regularized score, times its rate.

        Args:
            problem: The problem.
            sizes: The planned sizes.
        """
        return self._plan(problem, sizes)[2]

    def _plan(self, problem, sizes) -> tuple[Facts, float, Regularity, float]:
        self.check_relation(problem)
        facts = self._score(problem, sizes).facts(self.planned_dtype())
        convexity, multiplier = map(float, self._convexity(problem, facts))
        mechanism = dataclasses.replace(self.mechanism, noise_multiplier=multiplier)
        sensitivity = self._sensitivity(facts) * (1 + ROUNDING_MARGIN)
        rate = float(mechanism.rate(sensitivity, convexity))
        regularity = facts.regularity(self.coordinates(), self.strong_convexity).scaled(
            rate,
            convexity - self.strong_convexity,
            feasible_set(problem).reach,
        )
        return facts, rate, regularity, multiplier

    def _sensitivity(self, facts: Facts) -> Any:
        return self.neighbours.contributions * sum(facts.contributions.values())

    def _convexity(self, problem, facts: Facts) -> tuple[Any, Any]:
        r"""$\mu$ of the regularized objective, and the multiplier that bounds $k$."""
        multiplier = self.mechanism.calibrated()
        sensitivity = self._sensitivity(facts)
        regularizer = self.regularizer
        if regularizer is None:
            diameter = feasible_set(problem).diameter
            regularizer = multiplier * sensitivity * (2 * self.coordinates()) ** 0.5
            regularizer = regularizer / diameter
        convexity = regularizer + self.strong_convexity
        if self.largest_rate is not None:
            least = (convexity / self.largest_rate) ** 0.5 / sensitivity
            multiplier = jnp.maximum(multiplier, least)
        return convexity, multiplier

    def _score(self, problem, sizes) -> AbstractScore:
        if isinstance(problem, FiniteSum):
            return MeanLoss(problem, "slope", sizes)
        return HyperObjective(problem, "slope", sizes, uniform=True)


def _one_level(
    problem: FiniteSum, n: Any, dimension: int, epsilon: float, delta: float
) -> tuple[float, float]:
    facts = MeanLoss(problem, "slope", n).facts(jnp.result_type(float))
    lipschitz, diameter = facts.lipschitz, float(problem.w_set.diameter)
    private = 2 * math.log(3 / (4 * delta)) * dimension / (epsilon * n) ** 2
    regularizer = lipschitz / diameter * math.sqrt(2 * private + 1 / n)
    return regularizer, 2 * n * dimension * regularizer / lipschitz**2


def _two_levels(
    problem: BilevelProblem, sizes: Any, dimension: int, epsilon: float, delta: float
) -> float:
    facts = HyperObjective(problem, "slope", sizes).facts(jnp.result_type(float))
    known = certificate_of(problem).second_order
    n, mu = min(sizes.upper, sizes.lower), known.strong_convexity
    slope = n * sum(map(float, facts.contributions.values()))
    moved = known.upper_y * known.lower_xy * (1 + known.lower_yy / mu) / mu
    square = (
        slope * moved / (epsilon * n)
        + slope**2 * dimension * math.log(1 / delta) / (epsilon * n) ** 2
        + slope * moved / math.sqrt(n)
        + slope * known.upper_total / n
    )
    return math.sqrt(square) / float(problem.x_set.diameter)
