"""A bilevel solver, then one run of a one-level solver at what it released."""

from typing import Any, ClassVar, Literal

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
from .penalized import PenalizedLevel, both_levels, rows_of_steps
from .problem import BilevelProblem, Sizes
from .stages import AbstractStages

REFIT = "refit"


class _State(eqx.Module):
    search: PyTree
    y: PyTree
    last: SkippedUpdates
    t: Int[Array, ""]


class Refitted(AbstractStages[_State]):
    r"""Runs a bilevel solver, then solves the lower level again at the chosen $x$.

    The search spends most of its budget on finding $x$ and its $y$ is rough. The refit
    starts there and solves $\min_y g(x, y)$ with a reserved share of the budget. It is
    the run's last step. Where the search releases no $y$, the refit starts at the given
    one, and its budget is the cost of a private $y$.

    With `refit_reads="both"` the refit solves $\min_y g(x, y) + \frac{n_f}{n_g} f(x,
    y)$, so that a record of either level weighs the same. Disjoint people of the upper
    level spend little in most searches, and the refit then spends the rest: better
    where upper records are not much fewer than the lower ones that $x$ leaves in.

    Args:
        search: The bilevel solver.
        refit: The one-level solver of the last run.
        budget_split: How the squared budget is split over search and refit.
        refit_reads: The levels that `refit` reads, `"lower"` or `"both"`. Gradients of
            upper records are then clipped at the clip norm of `refit`, too. Static.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two. A refit
        of both levels is charged to the people of both.
    """

    search: AbstractSolver
    refit: AbstractSolver
    budget_split: tuple[float, float] = eqx.field(
        default=(0.8, 0.2), converter=_checks.floats
    )
    refit_reads: Literal["lower", "both"] = eqx.field(static=True, default="lower")
    stages: ClassVar = {"search": BilevelProblem, "refit": AbstractFiniteSum}

    @property
    def num_steps(self) -> int:
        """Number of steps of the search, and one for the refit."""
        return self.search.num_steps + 1

    def level(
        self, problem: BilevelProblem, x: PyTree, sizes: Sizes | None
    ) -> PenalizedLevel:
        """The one-level problem of the refit.

        Args:
            problem: The bilevel problem.
            x: The released one, or `None` if only the queries matter.
            sizes: The planned sizes.
        """
        if self.refit_reads == "lower":
            return PenalizedLevel(problem, x)
        refit: Any = self.refit
        return both_levels("Refitted", problem, x, sizes, refit.clip_norm)

    @override
    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        search = self.parts[0].init(problem, w0)
        _, y = self.search.released(search)
        # A search that releases no y leaves the given one to the refit.
        y = jax.tree.map(jnp.asarray, w0[1]) if y is None else y
        return _State(search, y, SkippedUpdates.none(), jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """Return the state after one step of the search, or after the refit."""
        keys = derive(key, *self.stages)
        first, then = self.parts

        def search():
            new = first.step(problem, data, state.search, key=keys[0])
            y = self.search.released(new)[1]
            return new, state.y if y is None else y, state.last.count

        def last():
            x, y = self.search.answer(problem, state.search)
            y = state.y if y is None else y
            level = self.level(problem, x, self.sizes)
            y, count = inner_solve(level, then, data, y, key=keys[1])
            return state.search, y, count

        # The step count is public: both runs always happen.
        inner, y, count = jax.lax.cond(state.t < self.search.num_steps, search, last)
        return _State(inner, y, SkippedUpdates(count), state.t + 1)

    def released(self, state: _State) -> PyTree:
        """Return the search's `x`, and its `y` or that of the refit."""
        return self.search.released(state.search)[0], state.y

    def adversary_view(self, state: _State) -> PyTree:
        """Return what the search shows, and the `y` of the refit."""
        return self.search.adversary_view(state.search), state.y

    def answer(self, problem: BilevelProblem, state: _State) -> PyTree:
        """Return the search's answer with the `y` of the refit."""
        return self.search.answer(problem, state.search)[0], state.y

    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        """Return the releases of the search, then those of the refit."""
        (_, name), (_, then) = self.stages, self.parts
        level = self.level(problem, None, sizes)
        last = then.ledger(level, sizes).named(name)
        return self.search.ledger(problem, sizes) + last

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        (_, name), (_, then) = self.stages, self.parts
        sizes = then.dimensions(w0[1])
        last = {f"{name}: {release}": size for release, size in sizes.items()}
        return self.search.dimensions(w0) | last

    @override
    def forecast(self, problem, sizes, w0):
        """Of the search; and a row where steps of the refit overshoot."""
        penalty = self.level(problem, None, sizes).penalty
        rows = rows_of_steps(problem, w0, {REFIT: self.refit}, penalty)
        return (*super().forecast(problem, sizes, w0), *rows)
