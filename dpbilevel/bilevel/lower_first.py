"""The lower level once, then the upper one: for lower levels that do not read x."""

from typing import ClassVar

import equinox as eqx
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from ..core.solver import AbstractSolver
from ..onelevel.problem import AbstractFiniteSum
from .penalized import PenalizedLevel, UpperLevel, row_in_x, rows_of_steps
from .problem import BilevelProblem, reads_first
from .runs import AbstractPipeline, RunState

LOWER, UPPER = "lower", "upper"


class LowerFirst(AbstractPipeline):
    r"""Solves the lower level, then the upper one at its solution.

    For problems whose lower level does not read $x$, such as `source_mixing`: there
    $y^*$ is one point, and it is solved for once,

    $$
    \hat y \approx \arg\min_y g(y), \qquad
    \hat x \approx \arg\min_x f(x, \hat y),
    $$

    each by a solver of one level. Other solvers read the lower level at every step.
    With disjoint people each level's records are read in one of the two runs only, so
    that at equal shares both spend the whole budget.

    Args:
        lower: The one-level solver of the lower level.
        upper: The one-level solver of the upper level, in $x$.
        budget_split: How the squared budget is split over lower and upper level.

    Raises:
        ValueError: The lower level reads $x$.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two. Only
        the released $y$ passes from one to the other.

    References:
        Kornowski, "Differentially private bilevel optimization", Remark 6: where $g$
        does not depend on $x$, one lower solve is enough, and the penalty method is
        noisy gradient descent on $f$ in $x$.
    """

    lower: AbstractSolver
    upper: AbstractSolver
    budget_split: tuple[float, float] = eqx.field(
        default=(0.5, 0.5), converter=_checks.floats
    )
    stages: ClassVar = {LOWER: AbstractFiniteSum, UPPER: AbstractFiniteSum}

    @override
    def level(self, name, problem, w0, found):
        _check_records(problem)
        if name == UPPER:
            return UpperLevel(problem, found and found[LOWER])
        return PenalizedLevel(problem, w0 and w0[0])

    @override
    def forecast(self, problem, sizes, w0):
        """Rows where steps overshoot the public terms."""
        of_lower = rows_of_steps(problem, w0, {LOWER: self.lower})
        in_x = row_in_x(problem, getattr(self.upper, "step_size", 0.0), w0)
        return (*of_lower, *in_x)

    @override
    def start(self, name, w0, found):
        return w0[0] if name == UPPER else w0[1]

    @override
    def init(self, problem: BilevelProblem, w0: PyTree) -> RunState:
        _check_apart(problem, w0)
        return super().init(problem, w0)

    @override
    def current_solution(self, name, problem, w0, found):
        return found[UPPER] if name == UPPER else w0[0], found[LOWER]


def lower_ignores_x(problem: BilevelProblem, w0: PyTree) -> bool:
    """Whether the lower level reads no x, by its declaration and by tracing."""
    return not (problem.reads_x(LOWER) or _public_reads_x(problem, w0))


def _public_reads_x(problem: BilevelProblem, w0: PyTree) -> bool:
    public = problem.lower_public
    return public is not None and reads_first(public, *w0)


def _check_apart(problem: BilevelProblem, w0: PyTree) -> None:
    """Refuses lower levels that read x, by tracing: then y* is no single point."""
    _check_records(problem)
    if _public_reads_x(problem, w0):
        raise ValueError(
            "LowerFirst: lower_public reads x, so the solution of the lower level "
            "depends on x. Use PenaltyBilevel, SingleLoopBilevel or bilevel.F2SA."
        )


def _check_records(problem: BilevelProblem) -> None:
    if problem.reads_x(LOWER):
        raise ValueError(
            "LowerFirst: the lower level's losses read x (x_in_records="
            f"{problem.x_in_records}), so its solution depends on x. Use "
            "PenaltyBilevel, SingleLoopBilevel or bilevel.F2SA; or declare "
            'x_in_records="upper" where lower does not read x.'
        )
