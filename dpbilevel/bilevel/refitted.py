"""A private refit of the lower level at the released upper variable."""

import dataclasses
from typing import ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import _checks
from ..core.descent import Rejections
from ..core.loop import inner_solve
from ..core.solver import AbstractSolver
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.budget import Neighbours
from ..privacy.clipping import Basis
from ..privacy.ledger import Ledger
from ..privacy.noise import PRNGKey, derive
from .penalized import PenalizedLevel
from .problem import BilevelProblem, Levels, Sizes

REFIT = "refit"


class _State(eqx.Module):
    search: PyTree
    y: PyTree
    refit: Rejections
    t: Int[Array, ""]


class Refitted(AbstractSolver[BilevelProblem, _State]):
    r"""Runs a bilevel solver, then solves the lower level again at the chosen $x$.

    The search spends most of its budget on finding $x$ and its $y$ is rough. The refit
    starts there and solves $\min_y g(x, y)$ with a reserved share of the budget. It is
    the run's last step. Where the search releases no $y$, the refit starts at the given
    one and is the price of a private $y$.

    Args:
        search: The bilevel solver.
        refit: The one-level solver of the lower level.
        budget_split: How the squared budget is split over search and refit.
        sizes: The planned sizes; set by `calibrate`. Static.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two.
    """

    search: AbstractSolver
    refit: AbstractSolver
    budget_split: tuple[float, float] = eqx.field(
        default=(0.8, 0.2), converter=_checks.floats
    )
    sizes: Sizes | None = eqx.field(static=True, default=None)
    problem_type: ClassVar[type] = BilevelProblem
    in_config: ClassVar[bool] = False

    def __check_init__(self):
        for name, part, kind in (
            ("search", self.search, BilevelProblem),
            ("refit", self.refit, AbstractFiniteSum),
        ):
            _checks.instance("Refitted", AbstractSolver, **{name: part})
            if not issubclass(kind, part.problem_type):
                raise TypeError(
                    f"Refitted: {name} must solve a {kind.__name__}, but "
                    f"{type(part).__name__} does not."
                )
        _checks.budget_split("Refitted", self.budget_split, "search", "refit")
        if self.search.neighbours is not self.refit.neighbours:
            raise ValueError(
                f"Refitted: search refers to {self.search.neighbours} but refit to "
                f"{self.refit.neighbours}; give both the same relation."
            )

    @property
    def num_steps(self) -> int:
        """The steps of the search, and one for the refit."""
        return self.search.num_steps + 1

    @property
    def neighbours(self) -> Neighbours:
        """The relation of both runs."""
        return self.search.neighbours

    @property
    def basis(self) -> Basis:
        """The worse one's."""
        return self.search.basis.worse(self.refit.basis)

    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        """Starts the search at `w0`."""
        search = self._sized(self.search).init(problem, w0)
        _, y = self.search.released(search)
        # A search that releases no y leaves the given one to start the refit from.
        y = jax.tree.map(jnp.asarray, w0[1]) if y is None else y
        return _State(search, y, Rejections.none(), jnp.zeros((), jnp.int32))

    def step(
        self, problem: BilevelProblem, data: Levels, state: _State, *, key: PRNGKey
    ) -> _State:
        """One step of the search, or the whole refit."""
        key_search, key_refit = derive(key, "search", "refit")

        def search():
            solver = self._sized(self.search)
            new = solver.step(problem, data, state.search, key=key_search)
            y = self.search.released(new)[1]
            return new, state.y if y is None else y, state.refit.count

        def refit():
            x, y = self.search.answer(problem, state.search)
            level = PenalizedLevel(problem, x)
            y = state.y if y is None else y
            solver = self._sized(self.refit)
            return state.search, *inner_solve(level, solver, data, y, key=key_refit)

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
        refit = self.refit.ledger(PenalizedLevel(problem, None), sizes)
        return self.search.ledger(problem, sizes) + refit.named(REFIT)

    def with_noise(self, scale: float | Float[Array, ""]) -> Self:
        """Splits the squared budget by `budget_split`."""
        search, refit = (part / sum(self.budget_split) for part in self.budget_split)
        return dataclasses.replace(
            self,
            search=self.search.with_noise(scale / search**0.5),
            refit=self.refit.with_noise(scale / refit**0.5),
        )

    def with_counts(self, problem: BilevelProblem, sizes: Sizes | None = None) -> Self:
        """Prepares the search.

        Args:
            problem: The problem.
            sizes: The planned sizes; its own by default.
        """
        sizes = self.sizes if sizes is None else sizes
        return dataclasses.replace(self, search=self.search.with_counts(problem, sizes))

    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """Those of both runs."""
        refit = {f"{REFIT}: {k}": v for k, v in self.refit.dimensions(w0[1]).items()}
        return self.search.dimensions(w0) | refit

    def _sized(self, solver: AbstractSolver) -> AbstractSolver:
        return solver.with_sizes(self.sizes)
