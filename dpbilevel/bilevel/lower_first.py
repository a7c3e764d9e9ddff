"""The lower level once, then the upper one: for lower levels that do not read x."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from ..core.descent import Rejections
from ..core.loop import inner_solve
from ..core.solver import AbstractSolver
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.ledger import Ledger
from ..privacy.noise import derive
from .penalized import PenalizedLevel, UpperLevel
from .problem import BilevelProblem, Sizes, reads_first
from .stages import AbstractTwoStages

LOWER, UPPER = "lower", "upper"


class _State(eqx.Module):
    x: PyTree  # the state of the upper solver
    y: PyTree
    lower: Rejections
    t: Int[Array, ""]


class LowerFirst(AbstractTwoStages[_State]):
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
        sizes: The planned sizes; set by `calibrate`. Static.

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
    sizes: Sizes | None = eqx.field(static=True, default=None)
    stages: ClassVar = {LOWER: AbstractFiniteSum, UPPER: AbstractFiniteSum}

    @property
    def num_steps(self) -> int:
        """One for the lower level, and the steps of the upper solver."""
        return 1 + self.upper.num_steps

    @override
    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        _check_apart(problem, w0)
        x, y = jax.tree.map(jnp.asarray, tuple(w0))
        x = self.parts[1].init(UpperLevel(problem, y), x)
        start = problem.y_set.project(y)
        return _State(x, start, Rejections.none(), jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """The whole run on the lower level, or one step of the upper one."""
        key_lower, key_upper = derive(key, LOWER, UPPER)
        lower, upper = self.parts

        def solve_lower():
            level = PenalizedLevel(problem, upper.released(state.x))
            y, count = inner_solve(level, lower, data, state.y, key=key_lower)
            return state.x, y, count

        def step_upper():
            level = UpperLevel(problem, state.y)
            x = upper.step(level, data, state.x, key=key_upper)
            return x, state.y, state.lower.count

        # The step count is public: both runs always happen.
        x, y, count = jax.lax.cond(state.t == 0, solve_lower, step_upper)
        return _State(x, y, Rejections(count), state.t + 1)

    def released(self, state: _State) -> PyTree:
        """The current pair."""
        return self.upper.released(state.x), state.y

    def adversary_view(self, state: _State) -> PyTree:
        """What the upper solver shows, and the lower level's solution."""
        return self.upper.adversary_view(state.x), state.y

    @override
    def answer(self, problem: BilevelProblem, state: _State) -> PyTree:
        return self.upper.answer(UpperLevel(problem, state.y), state.x), state.y

    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        """The releases of the lower level, then those of the upper one."""
        _check_records(problem)
        lower = self.lower.ledger(PenalizedLevel(problem, None), sizes).named(LOWER)
        upper = self.upper.ledger(UpperLevel(problem, None), sizes)
        return lower + upper.named(UPPER)

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        return {
            f"{name}: {key}": value
            for name, part, w in (
                (LOWER, self.lower, w0[1]),
                (UPPER, self.upper, w0[0]),
            )
            for key, value in part.dimensions(w).items()
        }


def _check_apart(problem: BilevelProblem, w0: PyTree) -> None:
    """Refuses lower levels that read x, by tracing: then y* is no single point."""
    _check_records(problem)
    if problem.lower_public is not None and reads_first(problem.lower_public, *w0):
        raise ValueError(
            "LowerFirst: lower_public reads x, so the solution of the lower level "
            "depends on x. Use PenaltyBilevel, SingleLoopBilevel or bilevel.F2SA."
        )


def _check_records(problem: BilevelProblem) -> None:
    if problem.reads_x(LOWER):
        raise ValueError(
            "LowerFirst: the lower level's records meet x (x_in_records="
            f"{problem.x_in_records}), so its solution depends on x. Use "
            "PenaltyBilevel, SingleLoopBilevel or bilevel.F2SA; or declare "
            'x_in_records="upper" where lower does not read x.'
        )
