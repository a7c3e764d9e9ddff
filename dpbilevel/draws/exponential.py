"""Exponential mechanisms: one private draw, with a quadratic term or without."""

import math
from typing import Any, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from typing_extensions import override

from .. import _checks
from .._checks import NonNegative, Number, Positive, check_fields
from ..bilevel.certificates.certified import certificate_of
from ..bilevel.problem import BilevelProblem
from ..onelevel.problem import FiniteSum
from ..privacy.budget import PrivacyBudget
from ..privacy.per_example.clipping import Basis
from .base import AbstractDrawSolver, DrawPlan, feasible_set
from .hyper import GradientNorm, HyperObjective
from .mean_loss import AbstractScore, DrawProblem, MeanLoss
from .mechanisms import Exponential, RegularizedExponential
from .samplers.base import AbstractSampler
from .samplers.grid import Grid


class ExponentialMechanism(AbstractDrawSolver):
    r"""Exponential mechanism of density $\propto \exp(-k \Phi(x))$; releases only $x$.

    Pure differential privacy if the sampler is exact. The score $\Phi$ is the
    objective of a one-level problem, the hyper-objective $F(x, y^*(x))$ of a bilevel
    one, or the norm of its gradient. No convexity is needed. There is one step: the
    budget is used for one draw.

    Args:
        sampler: The sampler: `Grid` or `GridWalk`.
        score: `"value"`, or `"gradient_norm"`, the norm of the gradient mapping, for
            stationary points. Static.
        clip_range: $B$: losses of single (upper-level) records are clipped to $[0, B]$
            without warning. Shift losses so that they are non-negative. By default
            their range follows from declared constants.
        convex: Whether the score is declared convex on the set for every possible
            dataset. The mechanism does not need this, but the certified number of steps
            of a walk depends on it. Static.
        mechanism: The mechanism and its epsilon.
        dimension: The number of coordinates of $x$, which samplers on continuous sets
            must know before data is seen. Static.
        dtype: The dtype of scores in the plan; set by `calibrate`. Static.

    Privacy:
        One draw, with $k = \varepsilon / o$, where $o$ bounds how far apart one record
        can move the scores of two points. One level with `clip_range`: $o = 2 B / n$
        under replace-one and $B / n$ under add-or-remove-one, enforced. Two levels
        need replace-one. The contribution of an upper record is enforced by
        `clip_range` or follows from the constants; that of a lower record follows from
        the constants (status `CONDITIONAL`). The errors of the inner solves are part of
        $o$. A person in both levels is charged the sum. The proved error of a sampler
        that is not exact is added to epsilon or delta.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", equation (4) and Appendix C.3. There $k =
        \varepsilon / (2 s)$ with $s$ our $o$: half of what is safe.
    """

    score: Literal["value", "gradient_norm"] = eqx.field(static=True, default="value")
    clip_range: Positive | None = None
    convex: bool = eqx.field(static=True, default=False, kw_only=True)
    mechanism: Exponential = eqx.field(default=Exponential(), kw_only=True)

    def __check_init__(self):
        alone = self.convex or self.score == "gradient_norm"
        if alone and self.clip_range is not None:
            raise ValueError(
                "ExponentialMechanism: clip_range excludes gradient_norm and convex."
            )

    @property
    def basis(self) -> Basis:
        """Basis: constants, unless clipping enforces the range of an exact draw."""
        enforced = self.clip_range is not None and not self.sampler.continuous
        return Basis.CLIPPED if enforced else Basis.CONSTANTS

    @property
    @override
    def declared_convexity(self) -> float | None:
        return 0.0 if self.convex else None

    @override
    def density(self, problem, sensitivity) -> tuple[Exponential, float]:
        return self.mechanism, 0.0

    def bound(self, problem: DrawProblem) -> float:
        r"""Return a bound on how far the expected score exceeds the least one.

        With $N$ candidates it is $\log(N) / k$ above the best of them. On a convex set
        of diameter $D$ in $d$ dimensions, with $L$ the Lipschitz constant of the
        score, it is above the least value on the set by at most

        $$\frac{d}{k} \Bigl(1 + \log \max\bigl(1, \tfrac{k L D}{d}\bigr)\Bigr), \qquad
        \frac{d}{k} \text{ if the score is convex}, \qquad L D .$$

        Whichever is less is multiplied by $e^{\xi + 2 k e}$, with $\xi$ the log ratio
        of the sampler and $e$ the error of a computed score, and $L D$ times the
        sampler's distance is added. With `clip_range` the score is that of clipped
        losses. The bound is infinite if a Lipschitz constant is needed and not
        declared.

        Args:
            problem: The problem that the solver is calibrated for.

        Raises:
            ValueError: The solver is not calibrated, constants are missing, or a
                problem of one level has a public term.

        References:
            Lowy and Liu, Section C.3 and Theorem 4.3; derived in docs/mathematics.md.
        """
        plan, release = self.planned(problem)
        if getattr(problem, "public", None) is not None:
            owner = "ExponentialMechanism.bound"
            raise ValueError(f"{owner}: does not cover a public term, which is cut.")
        rate, known, size = plan.rate, plan.regularity, self.coordinates()
        reach = math.inf
        if release.failure or not isinstance(self.sampler, Grid):
            reach = known.lipschitz * float(feasible_set(problem).diameter)
        if isinstance(self.sampler, Grid):
            count = len(jax.tree.leaves(self.sampler.candidates)[0])
            excess = math.log(count) / rate
        else:
            ratio = 1.0 if self.convex else max(1.0, rate * reach / size)
            excess = min(size / rate * (1 + math.log(ratio)), reach)
        computed = 2 * rate * (known.error + known.rounding)
        excess *= math.exp(release.guarantee.log_ratio + computed)
        return excess + (release.failure and release.failure * reach)

    @override
    def declarations(self, plan: DrawPlan) -> tuple[str, ...]:
        lipschitz = f"{plan.regularity.lipschitz:.6g}-Lipschitz"
        rests = f"the sampler rests on a score that is {lipschitz} on the set"
        texts = {
            "declared: the score is convex on the set, for every dataset": self.convex,
            f"{rests}, for every dataset": self.sampler.continuous,
        }
        return tuple(text for text, applies in texts.items() if applies)

    def score_of(self, problem, sizes) -> AbstractScore:
        """Return the `AbstractScore`; refuse `"gradient_norm"` on one level."""
        one_level = isinstance(problem, FiniteSum)
        if self.score == "gradient_norm":
            if one_level:
                raise ValueError(
                    "ExponentialMechanism: gradient_norm needs two levels."
                )
            return GradientNorm(problem, "spread", sizes)
        if one_level:
            return MeanLoss(problem, "spread", sizes, self.clip_range)
        uniform = self.sampler.continuous  # the points of a walk depend on records
        return HyperObjective(problem, "spread", sizes, self.clip_range, uniform)


class RegularizedExponentialMechanism(AbstractDrawSolver):
    r"""Draw by score plus quadratic, $\exp(-k (\Phi(x) + \frac{\mu}{2} \|x - c\|^2))$.

    For convex $\Phi$: the objective of a one-level problem, which need not be smooth,
    or the hyper-objective of a bilevel one; $c$ is the start, projected onto the set.
    One draw costs exactly what a Gaussian release of multiplier $m = \sqrt{\mu / k} /
    S$ costs, with $S$ the Lipschitz constant of the change that one record makes in
    $\Phi$. The expected value of $\Phi$ exceeds that at any point $x$ of the set by at
    most $\frac{d}{k} + \frac{\mu}{2} \|x - c\|^2$. For a point at the distance $R$ from
    $c$ this is least at $\mu = m S \sqrt{2 d} / R$.

    Args:
        sampler: The sampler: `AlternatingSampler`.
        convex: Must be `True`: declares that $\Phi$ is convex on the set, for every
            possible dataset. The guarantee depends on it. Static.
        radius: $R$, a guess of the distance of a minimizer from the initial point; by
            default the diameter of the set.
        regularizer: $\mu$; by default the one above.
        strong_convexity: The declared strong convexity of $\Phi$, which adds to $\mu$.
            Static.
        largest_rate: An upper bound on $k$, for the generalization of the answer.
        mechanism: The mechanism and its noise multiplier.
        dimension: $d$, the number of coordinates of $x$. Static.
        dtype: The dtype of scores in the plan; set by `calibrate`. Static.

    Privacy:
        One draw, under replace-one only. $S$ is $2 G / n$ for declared $G$-Lipschitz
        losses, $2 G^d / n$ with a declared `lipschitz_spread`, and for two levels the
        sensitivity of the hypergradient. Status `CONDITIONAL`: convexity is an
        assumption of privacy here, and so are the constants. The distance of the
        sampler's distribution from the target, and that which the errors of computed
        values make, are counted in delta.

    References:
        Gopi, Lee and Liu, "Private convex optimization via exponential mechanism",
        COLT 2022, Theorems 4, 27 and 29; Lowy and Liu, "Differentially private bilevel
        optimization: efficient algorithms with near-optimal rates", Theorem B.8, with
        the sensitivity of `ImplicitBilevel`.
    """

    convex: bool = eqx.field(static=True, kw_only=True)
    radius: Positive | None = eqx.field(default=None, kw_only=True)
    regularizer: NonNegative | None = None
    strong_convexity: NonNegative = eqx.field(static=True, default=0.0)
    largest_rate: Positive | None = eqx.field(static=True, default=None)
    mechanism: RegularizedExponential = eqx.field(
        default=RegularizedExponential(), kw_only=True
    )

    def __check_init__(self):
        check_fields(self)
        self.mechanism.check_sampler(self.sampler)
        if self.convex is not True:
            raise ValueError(
                "RegularizedExponentialMechanism: the objective must be convex on "
                "every possible dataset. Declare convex=True if you can prove it."
            )

    @classmethod
    def from_theorem(
        cls,
        problem: FiniteSum | BilevelProblem,
        budget: PrivacyBudget,
        sizes: Any,
        *,
        sampler: AbstractSampler,
        dimension: int,
        **fields: Any,
    ) -> Self:
        r"""Return the solver with the paper's parameters for the loss on new records.

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
            sampler: The sampler.
            dimension: $d$.
            **fields: Further fields, `convex=True` among them.

        Raises:
            TypeError: Another kind of problem, or of sizes.
            ValueError: A number out of range, or constants are missing.

        References:
            Gopi, Lee and Liu, Theorem 29; Lowy and Liu, Theorem B.8, whose $G$ is not
            the sensitivity (docs/errata.md).
        """
        owner = "RegularizedExponentialMechanism.from_theorem"
        _checks.instance(owner, (FiniteSum, BilevelProblem), problem=problem)
        _checks.instance(owner, PrivacyBudget, budget=budget)
        problem.check_sizes(owner, sizes)
        _checks.count(owner, dimension=dimension)
        epsilon, delta, rate = budget.epsilon, budget.delta, None
        if not 0 < delta < 0.1:
            raise ValueError(f"{owner}: delta must be in (0, 1/10), got {delta}.")
        dtype = jnp.result_type(float)
        if isinstance(problem, FiniteSum):
            score, n = MeanLoss(problem, "slope", sizes), sizes
            lipschitz = score.regularity(dtype, dimension).lipschitz
            diameter = float(problem.w_set.diameter)
            private = 2 * math.log(3 / (4 * delta)) * dimension / (epsilon * n) ** 2
            regularizer = lipschitz / diameter * math.sqrt(2 * private + 1 / n)
            rate = 2 * n * dimension * regularizer / lipschitz**2
        else:
            score = HyperObjective(problem, "slope", sizes)
            contributions = score.contributions(dtype).values()
            constants = certificate_of(problem).second_order
            n, mu = min(sizes.upper, sizes.lower), constants.strong_convexity
            slope = n * sum(map(float, contributions))  # G: these are half of S
            steep = constants.upper_y * constants.lower_xy
            shift = steep * (1 + constants.lower_yy / mu) / mu
            square = (  # Theorem B.8
                slope * shift / (epsilon * n)
                + slope**2 * dimension * math.log(1 / delta) / (epsilon * n) ** 2
                + slope * shift / math.sqrt(n)
                + slope * constants.upper_total / n
            )
            regularizer = math.sqrt(square) / float(problem.x_set.diameter)
        defaults = {"regularizer": regularizer, "largest_rate": rate}
        return cls(sampler, dimension=dimension, **(defaults | fields))

    def bound(
        self,
        problem: DrawProblem,
        *,
        distance: float | None = None,
        population: bool = False,
    ) -> float:
        r"""Return a bound on the expected excess of the answer, known before any data.

        $$\frac{d}{k} + \frac{\mu_0}{2} \|x^* - c\|^2 + t L D$$

        on the records themselves, with $\mu_0$ the quadratic term, $L$ the Lipschitz
        constant of $\Phi$ and $t$ how far the distribution of the draw may be from the
        density in total variation. On the population that independent records are from,
        $n S^2 / \mu$ more, with $\mu$ the convexity of the regularized score.

        Args:
            problem: The problem that the solver is calibrated for.
            distance: An upper bound on the distance of a minimizer $x^*$ from the
                initial point; by default the diameter of the set.
            population: Whether the excess is that on the population; one level only.

        Raises:
            ValueError: The solver is not calibrated, constants are missing, or the
                population of a problem of two levels is asked for.

        References:
            Gopi, Lee and Liu, Theorems 25 and 28, whose $G / (n \mu)$ is to be $G^2 /
            (n \mu)$, as in Theorem 21.
        """
        owner = "RegularizedExponentialMechanism.bound"
        if population and not isinstance(problem, FiniteSum):
            raise ValueError(f"{owner}: population=True is for one level.")
        if distance is not None:
            _checks.non_negative(owner, distance=distance)
        diameter = float(feasible_set(problem).diameter)
        distance = diameter if distance is None else min(distance, diameter)
        noise, mu, error = self.bound_terms(problem)
        if population:
            _, release = self.planned(problem)
            convexity = mu + self.strong_convexity
            error += self.sizes * (2 * release.contribution) ** 2 / convexity
        return noise + mu / 2 * distance**2 + error

    def bound_terms(self, problem: DrawProblem) -> tuple[float, float, float]:
        """Return terms of `bound`: noise, quadratic coefficient, sampling error."""
        plan, draw = self.planned(problem)
        diameter = float(feasible_set(problem).diameter)
        error = draw.failure * plan.regularity.lipschitz * diameter
        mu = plan.potential.quadratic / plan.rate
        return self.coordinates() / plan.rate, mu, error

    @property
    @override
    def declared_convexity(self) -> float:
        return self.strong_convexity

    def density(self, problem, sensitivity) -> tuple[RegularizedExponential, Number]:
        """Return the mechanism, its rate cut to `largest_rate`, and the convexity."""
        multiplier = self.mechanism.calibrated()
        regularizer = self.regularizer
        if regularizer is None:
            diameter = feasible_set(problem).diameter
            regularizer = multiplier * sensitivity * (2 * self.coordinates()) ** 0.5
            radius = diameter if self.radius is None else self.radius
            regularizer = regularizer / radius
        convexity = regularizer + self.strong_convexity
        if self.largest_rate is not None:
            least = (convexity / self.largest_rate) ** 0.5 / sensitivity
            multiplier = jnp.maximum(multiplier, least)  # so that k is no larger
        return self.mechanism.with_multiplier(multiplier), convexity

    @override
    def declarations(self, plan: DrawPlan) -> tuple[str, ...]:
        convex = "declared: the objective is convex in x on the set, for every dataset"
        if self.strong_convexity:
            convex += f", and {self.strong_convexity:.6g}-strongly convex"
        return (convex,)

    @override
    def score_of(self, problem, sizes) -> AbstractScore:
        if isinstance(problem, FiniteSum):
            return MeanLoss(problem, "slope", sizes)
        return HyperObjective(problem, "slope", sizes, uniform=True)
