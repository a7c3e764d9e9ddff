"""A private refit of the model at the released upper variable."""

from typing import Any, ClassVar, Literal

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
from .penalized import PenalizedLevel, both_levels, rows_of_steps
from .problem import BilevelProblem, Sizes
from .stages import AbstractStages

REFIT = "refit"


class _State(eqx.Module):
    search: PyTree
    y: PyTree
    refit: Rejections
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
        sizes: The planned sizes; set by `calibrate`. Static.

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
    sizes: Sizes | None = eqx.field(static=True, default=None)
    stages: ClassVar = {"search": BilevelProblem, "refit": AbstractFiniteSum}

    @property
    def num_steps(self) -> int:
        """The steps of the search, and one for the refit."""
        return self.search.num_steps + 1

    @override
    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        search = self.parts[0].init(problem, w0)
        _, y = self.search.released(search)
        # A search that releases no y leaves the given one to start the refit from.
        y = jax.tree.map(jnp.asarray, w0[1]) if y is None else y
        return _State(search, y, Rejections.none(), jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """One step of the search, or the whole refit."""
        key_search, key_refit = derive(key, "search", "refit")
        first, then = self.parts

        def search():
            new = first.step(problem, data, state.search, key=key_search)
            y = self.search.released(new)[1]
            return new, state.y if y is None else y, state.refit.count

        def refit():
            x, y = self.search.answer(problem, state.search)
            level = self._level(problem, x, self.sizes)
            y = state.y if y is None else y
            return state.search, *inner_solve(level, then, data, y, key=key_refit)

        # The step count is public: both runs always happen.
        inner, y, count = jax.lax.cond(state.t < self.search.num_steps, search, refit)
        return _State(inner, y, Rejections(count), state.t + 1)

    def released(self, state: _State) -> PyTree:
        """The search's `x`, and its `y` or the refitted one."""
        return self.search.released(state.search)[0], state.y

    def adversary_view(self, state: _State) -> PyTree:
        """What the search shows, and the refitted `y`."""
        return self.search.adversary_view(state.search), state.y

    def answer(self, problem: BilevelProblem, state: _State) -> PyTree:
        """The search's answer with the refitted `y`."""
        return self.search.answer(problem, state.search)[0], state.y

    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        """The releases of the search, then those of the refit."""
        refit = self.refit.ledger(self._level(problem, None, sizes), sizes)
        return self.search.ledger(problem, sizes) + refit.named(REFIT)

    @override
    def forecast(self, problem, sizes, w0):
        """Of the search; and a row where steps of the refit overshoot."""
        penalty = self._level(problem, None, sizes).penalty
        rows = rows_of_steps(problem, w0, {REFIT: self.refit}, penalty)
        return (*super().forecast(problem, sizes, w0), *rows)

    def _level(
        self, problem: BilevelProblem, x: PyTree, sizes: Sizes | None
    ) -> PenalizedLevel:
        """What the refit solves, at the chosen x."""
        if self.refit_reads == "lower":
            return PenalizedLevel(problem, x)
        refit: Any = self.refit
        return both_levels("Refitted", problem, x, sizes, refit.clip_norm)

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        refit = {f"{REFIT}: {k}": v for k, v in self.refit.dimensions(w0[1]).items()}
        return self.search.dimensions(w0) | refit
