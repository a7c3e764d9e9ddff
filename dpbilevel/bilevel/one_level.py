"""One level alone: the baseline of methods of two levels."""

from typing import ClassVar

import equinox as eqx
from typing_extensions import override

from ..onelevel.adaptive_clip import NoisyDescent
from ..onelevel.problem import AbstractFiniteSum
from . import levels
from .pipeline import AbstractPipeline

MODEL = "model"


class OneLevel(AbstractPipeline):
    r"""Fits $y$ on the records of one level, or of both, and keeps the given $x$.

    The baseline of every method of two levels: $\min_y f(x_0, y)$ on the upper
    records, $\min_y g(x_0, y)$ on the lower ones, or on both

    $$\min_y g(x_0, y) + \frac{n_f}{n_g} f(x_0, y),$$

    which is $1 + n_f / n_g$ times the mean over all records: each of them weighs the
    same.

    Args:
        model: The one-level solver.
        reads: `"upper"`, `"lower"` or `"both"`. Static.

    Privacy:
        The releases of `model`. Disjoint people of a level that is not read spend no
        budget.
    """

    model: NoisyDescent
    reads: levels.Reads = eqx.field(static=True, default="upper")
    stages: ClassVar = {MODEL: AbstractFiniteSum}
    budget_split: ClassVar = (1.0,)
    in_config: ClassVar[bool] = True

    @override
    def queries(self, name):
        return levels.queries_of(self.reads)

    @override
    def objective(self, name, problem, w0, outputs):
        if self.reads == "upper":
            return levels.validation_objective(problem, w0[0])
        penalty = levels.equal_weights(self.sizes) if self.reads == "both" else None
        return levels.lower_objective(problem, w0[0], penalty)

    @override
    def forecast(self, problem, sizes, w0):
        """Return `ForecastRow`s if steps overshoot the public terms at the given x."""
        objective = self.with_sizes(sizes).objective(MODEL, problem, w0, {})
        level = levels.Level(problem, levels.queries_of(self.reads), objective)
        return self.model.forecast(level, sizes, w0[1])

    @override
    def start(self, name, w0, outputs):
        return w0[1]

    @override
    def current_solution(self, name, problem, w0, outputs):
        return w0[0], outputs[MODEL]
