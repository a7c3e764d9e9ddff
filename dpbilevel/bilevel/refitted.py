"""A bilevel solver, then one run of a one-level solver at what it released."""

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
from ..privacy.ledger import Ledger
from ..privacy.noise import derive
from .levels import Level, equal_weights, lower_objective, queries_of
from .penalty_gradients import rows_of_steps
from .pipeline import AbstractStages, with_prefix
from .problem import BilevelProblem, Sizes

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
        return _State(search, y, SkippedUpdates.none(), jnp.zeros((), jnp.int32))

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
            objective = lower_objective(problem, x, self._penalty(self.sizes))
            level = Level(problem, queries_of(self.refit_reads), objective)
            return (state.search, *inner_solve(level, refit, data, y, key=key_refit))

        # The number of the step is public: both stages always run.
        in_search = state.t < search.num_steps
        inner, y, count = jax.lax.cond(in_search, search_step, refit_run)
        return _State(inner, y, SkippedUpdates(count), state.t + 1)

    def _penalty(self, sizes: Sizes | None) -> float | None:
        """Return the penalty of the refit, or `None` for the lower level alone."""
        return equal_weights(sizes) if self.refit_reads == "both" else None

    @override
    def released(self, state):
        """Return the pair of the search's x, and its y or the refit's."""
        return self.search.released(state.search)[0], state.y

    @override
    def adversary_view(self, state):
        return self.search.adversary_view(state.search), state.y

    @override
    def answer(self, problem, state):
        """Return the x of the search, and the y of the refit."""
        return self.search.answer(problem, state.search)[0], state.y

    @override
    def ledger(self, problem, sizes) -> Ledger:
        level = Level(problem, queries_of(self.refit_reads))
        refit = self.refit.with_sizes(self.sizes).ledger(level, sizes)
        return self.search.ledger(problem, sizes) + refit.named(REFIT)

    @override
    def dimensions(self, w0):
        refit = self.refit.dimensions(w0[1])
        return self.search.dimensions(w0) | with_prefix(REFIT, refit)

    @override
    def forecast(self, problem, sizes, w0):
        """Return `ForecastRow`s of the search, and of overshooting refit steps."""
        steps, penalty = {REFIT: self.refit}, self._penalty(sizes)
        search = self.search.with_sizes(self.sizes).forecast(problem, sizes, w0)
        return (*search, *rows_of_steps(problem, w0, steps, penalty))
