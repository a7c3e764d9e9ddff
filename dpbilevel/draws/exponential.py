"""The exponential mechanism: one private draw instead of many noisy steps."""

from typing import Literal

import equinox as eqx
from typing_extensions import override

from .._checks import Positive
from ..onelevel.problem import FiniteSum
from ..privacy.per_example.clipping import Basis
from .base import AbstractDrawSolver, DrawPlan
from .mechanisms import Exponential
from .scores.base import AbstractScore
from .scores.hyper import GradientNorm, HyperObjective
from .scores.mean_loss import MeanLoss


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
        if self.clip_range is not None:
            if self.score == "gradient_norm":
                raise ValueError(
                    "ExponentialMechanism: clip_range is for losses, and the score is "
                    "gradient_norm. Leave clip_range out."
                )
            if self.convex:
                raise ValueError(
                    "ExponentialMechanism: a loss clipped at clip_range is not convex "
                    "in general. Leave out clip_range, or convex=True."
                )

    @property
    @override
    def basis(self) -> Basis:
        """Constants, unless clipping enforces the range and the draw is exact."""
        enforced = self.clip_range is not None and not self.sampler.continuous
        return Basis.CLIPPED if enforced else Basis.CONSTANTS

    @property
    @override
    def declared_convexity(self) -> float | None:
        return 0.0 if self.convex else None

    @override
    def density(self, problem, sensitivity) -> tuple[Exponential, float]:
        return self.mechanism, 0.0

    @override
    def declarations(self, plan: DrawPlan) -> tuple[str, ...]:
        lipschitz = f"{plan.regularity.lipschitz:.6g}-Lipschitz"
        texts = {
            "declared: the score is convex on the set, for every dataset": self.convex,
            f"the sampler rests on a score that is {lipschitz} on the set, for every "
            "dataset": self.sampler.continuous,
        }
        return tuple(text for text, applies in texts.items() if applies)

    @override
    def score_of(self, problem, sizes) -> AbstractScore:
        """Return the score; problems of one level have no gradient norm."""
        one_level = isinstance(problem, FiniteSum)
        if self.score == "gradient_norm":
            if one_level:
                raise ValueError(
                    "ExponentialMechanism: a gradient_norm needs a BilevelProblem."
                )
            return GradientNorm(problem, "spread", sizes)
        if one_level:
            return MeanLoss(problem, "spread", sizes, self.clip_range)
        uniform = self.sampler.continuous  # the points of a walk depend on records
        return HyperObjective(problem, "spread", sizes, self.clip_range, uniform)
