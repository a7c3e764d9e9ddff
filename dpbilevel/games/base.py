"""Base class of solvers of saddle points, and the bounds of their theorems."""

import abc
import dataclasses
import math
import typing
from typing import Any, ClassVar, Literal, Self
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import numpy as np
import scipy
from equinox import AbstractVar  # noqa: F811
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from ..core.outputs import AbstractOutput, Mean
from ..core.plan import check_promise, least_multiplier
from ..core.solver import AbstractIterative, AbstractNoisySolver, State
from ..privacy.accounting import profiles
from ..privacy.budget import PrivacyBudget
from ..sets import Simplex, moves_by_entropy, parts
from .problem import AbstractVariationalInequality

Passes = Literal["single", "multi"]
Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TheoremConstants:
    r"""Constants of a problem that the theorems depend on.

    Bounds take $T$ `steps` of size $\gamma$ or $R$ `rounds` of the `strength`
    $\lambda$, on a `batch` of $B$ records, and `std`, the $\sigma$ of the noise per
    coordinate of what is released.
    """

    diameter: float  # D of the set
    dimension: int  # d of its affine hull; noise across it is projected away
    lipschitz: float  # L, of records and public term together
    spread: float  # M of the records alone, which sampling and stability depend on
    bound: float  # M of records and public term together
    records: int  # n
    coordinates: int  # at least the number of coordinates of a point

    @classmethod
    def of(
        cls, problem: AbstractVariationalInequality, dimension: int, records: int
    ) -> Self:
        """Return `TheoremConstants`; raise unless declared and the set is bounded.

        The set must have more than a point, too.
        """
        diameter = float(problem.w_set.diameter)
        if not 0 < diameter < math.inf:
            raise ValueError(
                "the theorems need a bounded set of more than a point, got "
                f"{problem.w_set}."
            )
        spread = problem.constant("bound")
        return cls(
            diameter,
            dimension,
            problem.constant("lipschitz") + problem.constant("public_lipschitz"),
            spread,
            spread + problem.constant("public_bound"),
            records,
            # The affine hull of a simplex has a dimension less.
            dimension + sum(isinstance(p, Simplex) for p in parts(problem.w_set)),
        )

    @property
    def largest_step(self) -> float:
        """Largest step size of extragradient theorems; infinite if `lipschitz` is 0."""
        return 1 / (math.sqrt(3) * self.lipschitz) if self.lipschitz else math.inf

    @property
    def scale(self) -> float:
        """Unit of proximal strengths: bound / diameter, or `lipschitz` if larger."""
        return max(self.bound / self.diameter, self.lipschitz)

    def extragradient_gap(self, steps, step_size, batch, std):
        r"""Return a bound on the strong gap of extragradient steps on fresh batches.

        $$\frac{D^2}{\gamma T} + \frac72 \gamma \Bigl(\frac{M^2}{B} + d \sigma^2\Bigr),
        \qquad \gamma \le \frac{1}{\sqrt3 L}.$$

        With batches from one dataset it bounds the gap on that dataset.

        References:
            Boob and Guzman, Theorem 2, with the noise term halved and the batch's
            variance in place of a record's.
        """
        noise = self.spread**2 / batch + self.dimension * std**2
        return self.diameter**2 / (step_size * steps) + 3.5 * step_size * noise

    def extragradient_stability(self, steps, step_size, std):
        r"""Bound how far one record moves the extragradient answer in expectation.

        $$\delta = T \bigl((4 M + 2 L D + 4 \sqrt d \sigma) L \gamma^2 + \tfrac{2 M
        L}{n} \gamma^2 + \tfrac{2 M}{n} \gamma\bigr) + \bigl(\tfrac{2 M}{n} + 2 L
        D\bigr) \gamma.$$

        References:
            Boob and Guzman, Theorem 3, with its last bracket corrected.
        """
        lipschitz, pull = self.lipschitz, self.lipschitz * self.diameter
        moved = 2 * self.spread / self.records
        noise = 4 * self.bound + 2 * pull + 4 * math.sqrt(self.dimension) * std
        a_step = (noise * lipschitz + moved * lipschitz) * step_size**2
        a_step += moved * step_size
        return steps * a_step + (moved + 2 * pull) * step_size

    def proximal_gap(self, rounds, strength, batch, std, accuracy):
        r"""Return a bound on the strong gap of proximal point steps on fresh batches.

        $$\nu + \frac{3 \lambda D^2}{2 R} + \frac{2 M^2 / B + 3 L^2 D^2}{\lambda} +
        \lambda d \sigma^2 + M \sigma \sqrt{d / R},$$

        $\nu$ being the `accuracy` of every inner solution as one of the inequality.

        References:
            Boob and Guzman, Theorem 5, with projected centres and the batch's variance.
        """
        start = accuracy + 1.5 * strength * self.diameter**2 / rounds
        curvature = 3 * (self.lipschitz * self.diameter) ** 2
        sampled = (2 * self.spread**2 / batch + curvature) / strength
        noise = strength * self.dimension * std**2
        average = self.bound * std * np.sqrt(self.dimension / rounds)
        return start + sampled + noise + average

    def proximal_stability(self, rounds, strength, distance):
        r"""Bound how far one record moves the proximal point answer in expectation.

        $\delta = R (2 M / (n \lambda) + 2 \zeta)$ with $\zeta$ the `distance` of every
        inner solution from the exact one.

        References:
            Boob and Guzman, Theorem 6, by the recursion without Young's inequality.
        """
        moved = 2 * self.spread / (self.records * strength)
        return rounds * (moved + 2 * distance)

    def picard_steps(self, strength):
        r"""Return the Picard steps of a round for each strength, an integer array.

        They are $N = \lceil \log(2 n) / \log(\lambda / L) \rceil$, for $\lambda > L$.
        """
        if self.lipschitz == 0:
            return np.ones_like(strength, int)
        counts = np.log(2 * self.records) / np.log(strength / self.lipschitz)
        return np.maximum(np.ceil(counts), 1).astype(int)


def cheapest(gap: np.ndarray, cost: np.ndarray) -> int:
    """Return the flat index of the cheapest candidate within 5 % of the least gap."""
    return int(np.argmin(np.where(gap <= 1.05 * np.min(gap), cost, np.inf)))


def integers(most: int, count: int) -> np.ndarray:
    """Return up to `count` integers in [1, `most`], evenly spaced in logarithms."""
    return np.unique(np.round(np.geomspace(1, max(most, 1), count)).astype(int))


def estimated_multiplier(
    rate: np.ndarray, count: np.ndarray | int, budget: PrivacyBudget
) -> np.ndarray:
    r"""Return rough noise multipliers by a central limit, to compare candidates.

    $\mu = q \sqrt{k (e^{1 / z^2} - 1)}$ for $k$ releases on a fraction $q$ of records.
    """

    def excess(log_mu: float) -> float:
        delta = profiles.gaussian_delta(math.exp(log_mu), budget.epsilon)
        return float(delta) - budget.delta

    mu = math.exp(scipy.optimize.brentq(excess, -20.0, 5.0))
    return 1 / np.sqrt(np.log1p((mu / rate) ** 2 / count))


class AbstractSaddleSolver(
    AbstractNoisySolver[AbstractVariationalInequality, State], AbstractIterative
):
    r"""Solver of saddle points with bounds that choose its parameters without data.

    Attributes:
        clip_norm: The bound on one record's operator in $\ell_2$.
        output: The output rule; the theorems are about `Mean()`.
    """

    problem_type: ClassVar[type] = AbstractVariationalInequality

    clip_norm: AbstractVar[float]
    output: AbstractOutput = eqx.field(default=Mean(), kw_only=True)
    numbers_batches: ClassVar[bool] = True

    @classmethod
    def tuned(
        cls,
        problem: AbstractVariationalInequality,
        budget: PrivacyBudget,
        sizes: int,
        *,
        dimension: int,
        passes: Passes,
        most_steps: int | None = None,
        **fields: Any,
    ) -> Self:
        r"""Return an uncalibrated solver of least `bound`, within `most_steps` steps.

        Exact noise multipliers decide for a single pass. For several, candidates are
        compared by a central limit theorem and the one with the fewest operator values
        is taken among those within 5 % of the least bound.

        Args:
            problem: A problem with declared constants on a bounded set.
            budget: $\varepsilon$ and $\delta$ of the run.
            sizes: $n \ge 2$.
            dimension: $d$; `problem.w_set.dimension(w0)`.
            passes: `"single"` or `"multi"`.
            most_steps: The most steps, $n$ by default.
            **fields: Further fields.

        Returns:
            A solver without noise, for `calibrate`.

        Raises:
            ValueError: A constant is not declared, the set is unbounded, there are
                fewer than two records, or without `fields` the `bound` is not below the
                problem's `largest_gap`. The message has the number of records from
                which on it is; for several passes it is an estimate.
        """
        owner = f"{cls.__name__}.tuned"
        _checks.instance(owner, AbstractVariationalInequality, problem=problem)
        _checks.instance(owner, PrivacyBudget, budget=budget)
        _checks.count(owner, sizes=sizes, dimension=dimension)
        _checks.one_of(owner, "passes", passes, typing.get_args(Passes))
        _checks.fraction(owner, delta=budget.delta)  # Gaussian noise needs one
        if sizes < 2:
            raise ValueError(f"{owner}: needs at least two records, got sizes={sizes}.")

        constants = TheoremConstants.of(problem, dimension, sizes)

        def made(n: int, fields: Fields) -> Self:
            most = n if most_steps is None else most_steps
            _checks.count(owner, most_steps=most)
            planned = dataclasses.replace(constants, records=n)
            return cls(**(cls.tuned_fields(planned, budget, passes, most) | fields))

        solver = made(sizes, fields)

        def bound(n: int) -> float:  # without fields, which may be outside the theorem
            given = solver if n == sizes and not fields else made(n, {})
            given = given.with_sizes(n).with_precision("float")
            count, sampling = given.releases_per_step * given.num_steps, given.sampling
            if n == sizes or sampling.numbered:
                multiplier = least_multiplier(sampling, count, n, budget)
            else:  # exact ones of many sampled releases take seconds
                rate = np.asarray(sampling.denominator(n) / n)
                multiplier = float(estimated_multiplier(rate, count, budget))
            given = dataclasses.replace(given, noise_multiplier=multiplier)
            return given.bound(problem, dimension=dimension)

        trivial = problem.largest_gap or constants.bound * constants.diameter
        check_promise(owner, bound, trivial, sizes, most=10**7)
        return solver

    @classmethod
    @abc.abstractmethod
    def tuned_fields(
        cls,
        constants: TheoremConstants,
        budget: PrivacyBudget,
        passes: Passes,
        most_steps: int,
    ) -> Fields:
        """Return a dict of the solver's fields that `tuned` sets."""

    def bound(self, problem: AbstractVariationalInequality, *, dimension: int) -> float:
        """Return a bound on the expected gap of the answer, known before any data.

        For a single pass over fresh records it is that of `TheoremConstants` on the
        strong gap on the population. For several passes that, plus $M$ times the
        stability of the answer, bounds the weak gap. It holds for monotone operators
        within the declared constants and a clip norm of at least `bound`.

        Args:
            problem: A problem with declared constants on a bounded set.
            dimension: $d$; `problem.w_set.dimension(w0)`.

        Raises:
            ValueError: The solver is not calibrated or bound to sizes, or no theorem
                covers it: it averages another part of its path, clips below the bound,
                goes over disjoint batches several times, moves by the entropy, or takes
                steps too large.
        """
        owner = f"{type(self).__name__}.bound"
        if self.sizes is None:
            raise ValueError(f"{owner}: no planned sizes; calibrate the solver first.")
        constants = TheoremConstants.of(problem, dimension, self.sizes)
        release: Any = self.ledger(problem, self.sizes).releases[0]
        passes = self.sampling.charged(release.count, self.sizes)
        outside = []
        if type(self.output) is not Mean:
            outside = [f"output={type(self.output).__name__}; use output=Mean()"]
        elif moves_by_entropy(problem.w_set):
            outside = ["steps of the entropy"]
        elif self.clip_norm < constants.spread:
            outside = [f"clip_norm={self.clip_norm:.3g} below {constants.spread:.3g}"]
        elif self.sampling.numbered and passes > 1:
            outside = [f"{passes} passes over disjoint batches"]
        if outside:
            raise ValueError(f"{owner}: no theorem covers {outside[0]}.")
        batch = self.sampling.denominator(self.sizes)
        std = release.noise_std
        gap, moved = self.gap_and_stability(problem, constants, batch, std)
        # A numbered batch is a fresh sample of the population; others are not.
        return float(gap if self.sampling.numbered else gap + constants.bound * moved)

    @abc.abstractmethod
    def gap_and_stability(
        self,
        problem: AbstractVariationalInequality,
        constants: TheoremConstants,
        batch: float,
        std: float,
    ) -> tuple[Any, Any]:
        """Return bounds on the strong gap and on one record's effect on the answer."""

    @override
    def remembered(self, memory, w, *, before, t) -> PyTree:
        """Return the output rule's memory; step numbers restart after `num_steps`."""
        return super().remembered(memory, w, before=before, t=t % self.num_steps)

    def clip_ratio(self, problem: AbstractVariationalInequality) -> float | None:
        """Return the clip norm over the problem's bound, `None` if undeclared."""
        bound = problem.bound
        return None if bound is None else self.clip_norm / bound
