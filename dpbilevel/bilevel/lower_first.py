"""The lower level once, then the upper one: for lower levels that do not read x."""

from typing import ClassVar

from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from ..core.solver import AbstractSolver
from ..onelevel.problem import AbstractFiniteSum
from .levels import lower_objective, queries_of, upper_objective
from .penalty_gradients import row_in_x, rows_of_steps
from .pipeline import AbstractPipeline
from .problem import BilevelProblem, reads_first

LOWER, UPPER = "lower", "upper"


class LowerFirst(AbstractPipeline):
    r"""Solves the lower level, then the upper one at its solution.

    For problems whose lower level does not read $x$, such as `source_mixing`. Their
    $y^*$ is one point, which is solved for once,

    $$
    \hat y \approx \arg\min_y g(y), \qquad
    \hat x \approx \arg\min_x f(x, \hat y),
    $$

    each by a solver of one level. Other solvers read the lower level at every step.
    Disjoint people are read in one of the two runs only, so that with an equal split
    both levels spend the whole budget.

    Args:
        lower: The one-level solver of the lower level.
        upper: The one-level solver of the upper level, in $x$.
        budget_split: The split of the squared budget over lower and upper level.

    Raises:
        ValueError: The lower level reads $x$.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two. Only
        the released $y$ passes from one to the other.

    References:
        Kornowski, "Differentially private bilevel optimization", Remark 6: if $g$
        does not depend on $x$, one lower solve is enough, and the penalty method is
        noisy gradient descent on $f$ in $x$.
    """

    lower: AbstractSolver
    upper: AbstractSolver
    budget_split: tuple[float, float] = _checks.split_field(0.5, 0.5)
    stages: ClassVar = {LOWER: AbstractFiniteSum, UPPER: AbstractFiniteSum}

    @override
    def queries(self, name):
        return queries_of("lower" if name == LOWER else "upper")

    @override
    def objective(self, name, problem, w0, outputs):
        if name == LOWER:
            return lower_objective(problem, w0[0])
        return upper_objective(problem, outputs[LOWER])

    @override
    def forecast(self, problem, sizes, w0):
        """Return `ForecastRow`s if steps overshoot the public terms."""
        of_lower = rows_of_steps(problem, w0, {LOWER: self.lower})
        in_x = row_in_x(problem, getattr(self.upper, "step_size", 0.0), w0)
        return (*of_lower, *in_x)

    @override
    def start(self, name, w0, outputs):
        return w0[0] if name == UPPER else w0[1]

    @override
    def current_solution(self, name, problem, w0, outputs):
        return outputs[UPPER] if name == UPPER else w0[0], outputs[LOWER]

    @override
    def check_problem(self, problem, w0=None):
        """Refuse lower levels that read x, by declaration and tracing.

        Raises:
            ValueError: The solution of the lower level depends on x.
        """
        if problem.reads_x(LOWER):
            raise ValueError(
                "LowerFirst: lower losses read x. Use PenaltyBilevel or bilevel.F2SA."
            )
        if w0 is not None and _public_reads_x(problem, w0):
            raise ValueError("LowerFirst: lower_public reads x; use PenaltyBilevel.")


def lower_ignores_x(problem: BilevelProblem, w0: PyTree) -> bool:
    """Return whether the lower level reads no x, by declaration and tracing."""
    return not (problem.reads_x(LOWER) or _public_reads_x(problem, w0))


def _public_reads_x(problem: BilevelProblem, w0: PyTree) -> bool:
    public = problem.lower_public
    return public is not None and reads_first(public, *w0)
