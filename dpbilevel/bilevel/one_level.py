"""One level alone: the baseline of methods of two levels."""

from typing import ClassVar, Literal

import equinox as eqx
from typing_extensions import override

from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from .penalized import PenalizedLevel, ValidationLevel, both_levels
from .runs import AbstractPipeline

MODEL = "model"


class OneLevel(AbstractPipeline):
    r"""Fits $y$ on the records of one level, or of both, and leaves $x$ as it is.

    The baseline of every method of two levels: $\min_y f(x_0, y)$ on the upper
    records, $\min_y g(x_0, y)$ on the lower ones, or on both

    $$\min_y g(x_0, y) + \frac{n_f}{n_g} f(x_0, y),$$

    which is $1 + n_f / n_g$ times the mean over all records, so that each of them
    weighs the same.

    Args:
        model: The one-level solver.
        reads: `"upper"`, `"lower"` or `"both"`. Static.

    Privacy:
        The releases of `model`. Disjoint people of a level that is not read spend no
        budget.
    """

    model: NoisyGD
    reads: Literal["upper", "lower", "both"] = eqx.field(static=True, default="upper")
    stages: ClassVar = {MODEL: AbstractFiniteSum}
    budget_split: ClassVar = (1.0,)
    in_config: ClassVar[bool] = True

    @override
    def level(self, name, problem, w0, found):
        x = w0 and w0[0]
        if self.reads == "upper":
            return ValidationLevel(problem, x)
        if self.reads == "lower":
            return PenalizedLevel(problem, x)
        return both_levels("OneLevel", problem, x, self.sizes, self.model.clip_norm)

    @override
    def forecast(self, problem, sizes, w0):
        """A row where steps overshoot the public terms, at the x that stays."""
        level = self.with_sizes(sizes).level(MODEL, problem, w0, None)
        return self.model.forecast(level, sizes, w0[1])

    @override
    def start(self, name, w0, found):
        return w0[1]

    @override
    def current_solution(self, name, problem, w0, found):
        return w0[0], found[MODEL]
