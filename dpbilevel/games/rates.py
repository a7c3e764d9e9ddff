"""Bounds of the theorems on saddle points, explicit and without hidden constants.

All of it is on the host and public: no data, no solver state. Bounds take numbers or
arrays of candidates.
"""

import dataclasses
import math
from typing import Self

import numpy as np
import scipy

from ..privacy.accounting import profiles
from ..privacy.budget import PrivacyBudget
from ..sets import Simplex
from .problem import AbstractVariationalInequality
from .resolvents import parts


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
        """Return the constants of a problem that declares them.

        Raises:
            ValueError: A constant is missing, or the set is unbounded or one point.
        """
        diameter = float(problem.w_set.diameter)
        if not 0 < diameter < math.inf:
            raise ValueError(
                "the theorems on saddle points need a bounded set of more than one "
                f"point, got one of diameter {diameter}."
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

    def privacy_dimension(self, budget: PrivacyBudget) -> float:
        r"""Return $a = \sqrt{d \log(1 / \delta)} / \varepsilon$."""
        return math.sqrt(self.dimension * math.log(1 / budget.delta)) / budget.epsilon

    @property
    def largest_step(self) -> float:
        r"""Largest step size of the extragradient theorems, $1 / (\sqrt3 L)$."""
        return 1 / (math.sqrt(3) * self.lipschitz) if self.lipschitz else math.inf

    @property
    def scale(self) -> float:
        r"""Unit of proximal strengths, $\max(M / D, L)$."""
        return max(self.bound / self.diameter, self.lipschitz)

    def extragradient_gap(self, steps, step_size, batch, std):
        r"""Bound the strong gap of extragradient steps on fresh batches.

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
        r"""Bound how far one replaced record moves the answer, in expectation.

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
        r"""Bound the strong gap of inexact proximal point steps on fresh batches.

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
        r"""Bound how far one replaced record moves the answer, in expectation.

        $\delta = R (2 M / (n \lambda) + 2 \zeta)$ with $\zeta$ the `distance` of every
        inner solution from the exact one.

        References:
            Boob and Guzman, Theorem 6, by the recursion without Young's inequality.
        """
        moved = 2 * self.spread / (self.records * strength)
        return rounds * (moved + 2 * distance)

    def picard_steps(self, strength):
        r"""Return $N = \lceil \log(2 n) / \log(\lambda / L) \rceil$.

        For $\lambda > L$.
        """
        if self.lipschitz == 0:
            return np.ones_like(strength, int)
        counts = np.log(2 * self.records) / np.log(strength / self.lipschitz)
        return np.maximum(np.ceil(counts), 1).astype(int)


def cheapest(gap: np.ndarray, cost: np.ndarray) -> int:
    """Return the cheapest candidate with a gap within 5 % of the least."""
    return int(np.argmin(np.where(gap <= 1.05 * np.min(gap), cost, np.inf)))


def integers(most: int, count: int) -> np.ndarray:
    """Return at most `count` integers from 1 to `most`, evenly spread in logarithms."""
    return np.unique(np.round(np.geomspace(1, max(most, 1), count)).astype(int))


def estimated_multiplier(
    rate: np.ndarray, count: np.ndarray, budget: PrivacyBudget
) -> np.ndarray:
    r"""Estimate the multiplier by the central limit, to compare candidates only.

    $\mu = q \sqrt{k (e^{1 / z^2} - 1)}$ for $k$ releases on a fraction $q$ of records.
    """

    def excess(log_mu: float) -> float:
        delta = profiles.gaussian_delta(math.exp(log_mu), budget.epsilon)
        return float(delta) - budget.delta

    mu = math.exp(scipy.optimize.brentq(excess, -20.0, 5.0))
    return 1 / np.sqrt(np.log1p((mu / rate) ** 2 / count))
