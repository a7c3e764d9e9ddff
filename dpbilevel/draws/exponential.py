"""The exponential mechanism: one private draw instead of many noisy steps."""

import dataclasses
from typing import Any, Literal, Self

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from .. import _checks
from .._fields import Number
from ..core.levels import people_of
from ..onelevel.problem import FiniteSum
from ..privacy.budget import People
from ..privacy.clipping import Basis
from ..privacy.ledger import Ledger
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.noise import PRNGKey
from .base import DRAW, AbstractDrawSolver, DrawState, feasible_set, queries_of
from .mechanisms import Exponential
from .release import Draw
from .samplers.base import AbstractSampler, Regularity
from .scores.base import AbstractScore, DrawProblem, Facts
from .scores.hyper import GradientNorm, HyperObjective
from .scores.mean_loss import MeanLoss


class ExponentialMechanism(AbstractDrawSolver):
    r"""Draws $x$ with a density $\propto \exp(-k \Phi(x))$; releases $x$ only.

    Pure differential privacy where the sampler is exact. The score $\Phi$ is the
    objective of a one-level problem, the hyper-objective $F(x, y^*(x))$ of a bilevel
    one, or the norm of its gradient. No convexity is needed. One step: the whole budget
    buys one draw.

    Args:
        sampler: How to draw: `Grid`, `GridWalk`.
        score: `"value"`, or `"gradient_norm"`, the norm of the gradient mapping, for
            stationary points. Static.
        clip_range: $B$: losses of single (upper-level) records are clipped to $[0, B]$:
            below 0 they count as 0, above $B$ as $B$, in silence; shift scores that are
            negative. Without it their range follows from declared constants.
        convex: Whether the score is declared convex on the set for every possible
            dataset. The mechanism does without, but the number of steps that walks are
            certified for rests on it. Static.
        mechanism: The mechanism and its epsilon.
        dimension: The number of coordinates of $x$, which samplers on continuous sets
            must know before data is seen. Static.
        dtype: What the plan takes scores to be computed in; set by `calibrate`. Static.
        sizes: The planned sizes; set by `calibrate`. Static.

    Privacy:
        One draw, with $k = \varepsilon / o$, where $o$ bounds how far apart one record
        can move the scores of two points. One level with `clip_range`: $o = 2 B / n$
        under replace-one and $B / n$ under add-or-remove-one, enforced. Two levels:
        replace-one only; the share of an upper record is enforced by `clip_range` or
        follows from the constants, that of a lower record follows from the constants
        (status `CONDITIONAL`); the errors of the inner solves are part of $o$. A person
        in both levels is charged the sum. A sampler that is not exact adds to epsilon
        or delta what is proved of it.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", equation (4) and Appendix C.3. There $k =
        \varepsilon / (2 s)$ with $s$ our $o$: half of what is safe.
    """

    sampler: AbstractSampler
    score: Literal["value", "gradient_norm"] = eqx.field(static=True, default="value")
    clip_range: float | Float[Array, ""] | None = None
    convex: bool = eqx.field(static=True, default=False, kw_only=True)
    mechanism: Exponential = Exponential()
    dimension: int | None = eqx.field(static=True, default=None)
    dtype: str | None = eqx.field(static=True, default=None)
    sizes: Any = eqx.field(static=True, default=None)

    def __check_init__(self):
        owner = "ExponentialMechanism"
        _checks.instance(owner, AbstractSampler, sampler=self.sampler)
        _checks.instance(owner, Exponential, mechanism=self.mechanism)
        _checks.one_of(owner, "score", self.score, ("value", "gradient_norm"))
        if self.clip_range is not None:
            _checks.positive(owner, clip_range=self.clip_range)
            if self.score == "gradient_norm":
                raise ValueError(
                    f"{owner}: clip_range is for losses; the sensitivity of the "
                    "gradient norm follows from the problem's constants."
                )
            if self.convex:
                raise ValueError(
                    f"{owner}: a loss that is cut at clip_range is not convex in "
                    "general; leave out clip_range, or convex=True."
                )

    @property
    def basis(self) -> Basis:
        """Constants, unless clipping enforces the range and the draw is exact."""
        enforced = self.clip_range is not None and not self.sampler.continuous
        return Basis.CLIPPED if enforced else Basis.CONSTANTS

    def step(
        self, problem: DrawProblem, data: PyTree, state: DrawState, *, key: PRNGKey
    ) -> DrawState:
        """One draw."""
        dtype = self.scored_dtype(state.start)
        score = self._score(problem, self.sizes).bounded(data, state.start, dtype)
        x = self.mechanism.draw(
            score, self.sampler, feasible_set(problem), state.x, key=key
        )
        return dataclasses.replace(state, x=x)

    def ledger(self, problem: DrawProblem, sizes: Any) -> Ledger:
        """One draw.

        Raises:
            ValueError: The problem lacks constants, the solver is not calibrated, or
                the default floating-point dtype is too coarse.
        """
        facts, rate, regularity = self._plan(problem, sizes)
        certificate = self.sampler.certificate(regularity, feasible_set(problem))
        queries = queries_of(facts, sizes)
        basis = facts.basis.worse(self.basis)
        draw = Draw(DRAW, 1, queries, self.mechanism, rate, certificate, basis)
        declared = []
        if self.convex:
            declared.append(
                "declared: the score is convex on the set, for every dataset"
            )
        if self.sampler.continuous:
            declared.append(
                f"the sampler rests on a score that is {float(facts.lipschitz):.6g}-"
                "Lipschitz on the set, for every dataset"
            )
        assumptions = (*declared, *facts.assumptions)
        return Ledger((draw,), people_of(sizes) or People.OVERLAPPING, assumptions)

    def with_noise(self, scale: Number) -> Self:
        r"""Sets $\varepsilon$ to `2 / scale`.

        A draw of bounded range $\varepsilon$ has the zero-concentrated privacy of a
        Gaussian release of multiplier $2 / \varepsilon$.
        """
        mechanism = dataclasses.replace(self.mechanism, epsilon=2 / scale)
        return dataclasses.replace(self, mechanism=mechanism)

    def regularity(self, problem: DrawProblem, sizes: Any) -> Regularity:
        r"""That of $k \Phi$.

        Args:
            problem: The problem.
            sizes: The planned sizes.
        """
        return self._plan(problem, sizes)[-1]

    def _plan(self, problem, sizes) -> tuple[Facts, float, Regularity]:
        self.check_relation(problem)
        facts = self._score(problem, sizes).facts(self.planned_dtype())
        share = sum(map(float, facts.contributions.values()))
        sensitivity = self.neighbours.contributions * share * (1 + ROUNDING_MARGIN)
        rate = float(self.mechanism.rate(sensitivity))
        convexity = 0.0 if self.convex else None
        regularity = facts.regularity(self.coordinates(), convexity)
        return facts, rate, regularity.scaled(rate, 0.0, 0.0)

    def _score(self, problem, sizes) -> AbstractScore:
        if self.score == "gradient_norm":
            if isinstance(problem, FiniteSum):
                raise ValueError(
                    'ExponentialMechanism: score="gradient_norm" is for bilevel '
                    "problems."
                )
            return GradientNorm(problem, "spread", sizes)
        if isinstance(problem, FiniteSum):
            return MeanLoss(problem, "spread", sizes, self.clip_range)
        uniform = self.sampler.continuous
        return HyperObjective(problem, "spread", sizes, self.clip_range, uniform)
