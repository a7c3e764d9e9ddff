"""Solvers with one extra stage: `Refitted` refits y, `LowerFirst` solves y first."""

from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from ..core.descent import SkippedUpdates
from ..core.loop import inner_solve
from ..core.solver import AbstractSolver
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.keys import derive
from ..privacy.ledger import Ledger
from . import levels
from .levels import Level
from .pipeline import AbstractPipeline, AbstractStages, with_prefix
from .problem import BilevelProblem, Sizes, reads_first

SEARCH, REFIT = "search", "refit"


class _State(eqx.Module):
    search: PyTree
    y: PyTree
    last: SkippedUpdates
    t: Int[Array, ""]


class Refitted(AbstractStages[_State]):
    r"""Runs a bilevel solver, then solves the lower level again at the chosen $x$.

    The search spends most of its budget on $x$, and its $y$ is rough. The refit starts
    there and solves $\min_y g(x, y)$ with a reserved part of the budget. It is the last
    step of the run. If the search releases no $y$, the refit starts at the given one.

    With `refit_reads="both"` the refit solves $\min_y g(x, y) + \frac{n_f}{n_g} f(x,
    y)$, so that every record weighs the same. Disjoint people of the upper level spend
    little in most searches, and the refit spends the rest. That is better if upper
    records are not much fewer than the lower ones with weight.

    Args:
        search: The bilevel solver.
        refit: The one-level solver of the last run.
        budget_split: The split of the squared budget over search and refit.
        refit_reads: The levels that `refit` reads, `"lower"` or `"both"`. Gradients of
            upper records are then clipped at the clip norm of `refit`, too. Static.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two. A refit
        of both levels is charged to the people of both.
    """

    search: AbstractSolver
    refit: AbstractSolver
    budget_split: tuple[float, float] = _checks.split_field(0.8, 0.2)
    refit_reads: Literal["lower", "both"] = eqx.field(static=True, default="lower")
    stages: ClassVar = {SEARCH: BilevelProblem, REFIT: AbstractFiniteSum}
    proximal: ClassVar = ("search", "refit")

    @property
    def num_steps(self) -> int:
        """Number of steps of the search, and one for the refit."""
        return self.search.num_steps + 1

    @override
    def init(self, problem, w0) -> _State:
        search = self.parts[0].init(problem, w0)
        _, y = self.search.released(search)
        # If the search releases no y, the refit starts at the given one.
        y = jax.tree.map(jnp.asarray, w0[1]) if y is None else y
        return _State(search, y, SkippedUpdates(), jnp.zeros((), jnp.int32))

    @override
    def step(self, problem, data, state, *, key) -> _State:
        key_search, key_refit = derive(key, *self.stages)
        search, refit = self.parts

        def search_step():
            new = search.step(problem, data, state.search, key=key_search)
            y = search.released(new)[1]
            return new, state.y if y is None else y, state.last.count

        def refit_run():
            x, y = search.answer(problem, state.search)
            y = state.y if y is None else y
            objective = levels.lower_objective(problem, x, self._penalty(self.sizes))
            level = Level(problem, levels.queries_of(self.refit_reads), objective)
            return (state.search, *inner_solve(level, refit, data, y, key=key_refit))

        # The number of the step is public: both stages always run.
        in_search = state.t < search.num_steps
        inner, y, count = jax.lax.cond(in_search, search_step, refit_run)
        return _State(inner, y, SkippedUpdates(count), state.t + 1)

    def _penalty(self, sizes: Sizes | None) -> float | None:
        """Return lower over upper record count, or `None` for a lower refit."""
        return levels.equal_weights(sizes) if self.refit_reads == "both" else None

    @override
    def released(self, state):
        """Return the pair of the search's x and the latest y, search or refit."""
        return self.search.released(state.search)[0], state.y

    @override
    def adversary_view(self, state):
        return self.search.adversary_view(state.search), state.y

    @override
    def answer(self, problem, state):
        """Return the pair of the search's answer for x and the refit's y."""
        return self.search.answer(problem, state.search)[0], state.y

    @override
    def ledger(self, problem, sizes) -> Ledger:
        level = Level(problem, levels.queries_of(self.refit_reads))
        refit = self.refit.with_sizes(self.sizes).ledger(level, sizes)
        return self.search.ledger(problem, sizes) + refit.named(REFIT)

    @override
    def dimensions(self, w0):
        refit = self.refit.dimensions(w0[1])
        return self.search.dimensions(w0) | with_prefix(REFIT, refit)

    @override
    def forecast(self, problem, sizes, w0):
        """Return `ForecastRow`s of the search and of refit steps that overshoot."""
        steps, penalty = {REFIT: self.refit}, self._penalty(sizes)
        search = self.search.with_sizes(self.sizes).forecast(problem, sizes, w0)
        return (*search, *levels.rows_of_steps(problem, w0, steps, penalty))


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
        return levels.queries_of("lower" if name == LOWER else "upper")

    @override
    def objective(self, name, problem, w0, outputs):
        if name == LOWER:
            return levels.lower_objective(problem, w0[0])
        return levels.upper_objective(problem, outputs[LOWER])

    @override
    def forecast(self, problem, sizes, w0):
        """Return a tuple of `ForecastRow`s: steps that overshoot public terms."""
        of_lower = levels.rows_of_steps(problem, w0, {LOWER: self.lower})
        in_x = levels.row_in_x(problem, getattr(self.upper, "step_size", 0.0), w0)
        return (*of_lower, *in_x)

    @override
    def start(self, name, w0, outputs):
        return w0[0] if name == UPPER else w0[1]

    @override
    def current_solution(self, name, problem, w0, outputs):
        return outputs[UPPER] if name == UPPER else w0[0], outputs[LOWER]

    @override
    def check_problem(self, problem, w0=None):
        """Raise `ValueError` if the lower level reads x; needs `w0` to trace it.

        Raises:
            ValueError: The solution of the lower level depends on x.
        """
        if problem.reads_x(LOWER):
            raise ValueError(
                "LowerFirst: lower losses read x. Use PenaltyBilevel or bilevel.F2SA."
            )
        if w0 is not None and not lower_ignores_x(problem, w0):
            raise ValueError("LowerFirst: lower_public reads x; use PenaltyBilevel.")


def lower_ignores_x(problem: BilevelProblem, w0: PyTree) -> bool:
    """Return whether neither lower losses nor the lower public term read x."""
    public = problem.lower_public
    return not (
        problem.reads_x(LOWER) or (public is not None and reads_first(public, *w0))
    )
