"""Two bilevel solvers in turn: the released answer of one starts the other."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from ..bilevel.problem import BilevelProblem, Sizes
from ..bilevel.stages import AbstractStages
from ..core.solver import AbstractSolver
from ..privacy.ledger import Ledger
from ..privacy.noise import derive
from .base import SourceWeighting

FIRST, THEN = "first", "then"


class _State(eqx.Module):
    first: PyTree
    then: PyTree
    y0: PyTree  # of the given start, for a first solver that releases no y
    t: Int[Array, ""]


class WarmStarted(AbstractStages[_State]):
    r"""Runs one bilevel solver and starts another one from its released answer.

    Args:
        first: The solver that finds the start, also one of sources alone.
        then: The solver that goes on from there.
        budget_split: How the squared budget is split over both.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two. Only
        released values pass from one to the other: `x`, and `y` where the first
        releases it; otherwise the second starts from the given `y`.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", Algorithm 2, where the first is the
        exponential mechanism.
    """

    first: AbstractSolver[BilevelProblem, Any]
    then: AbstractSolver[BilevelProblem, Any]
    budget_split: tuple[float, float] = eqx.field(
        default=(0.5, 0.5), converter=_checks.floats
    )
    stages: ClassVar = {FIRST: SourceWeighting, THEN: BilevelProblem}
    in_config: ClassVar[bool] = True

    @property
    def num_steps(self) -> int:
        """The steps of both."""
        return self.first.num_steps + self.then.num_steps

    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        """Starts the first at `w0`; the second waits there."""
        first, then = (part.init(problem, w0) for part in self.parts)
        y0 = jax.tree.map(jnp.asarray, w0[1])
        return _State(first, then, y0, jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """One step of the first, or of the second."""
        key_first, key_then = derive(key, FIRST, THEN)
        first, then = self.parts

        def go_first():
            new = first.step(problem, data, state.first, key=key_first)
            x, y = first.answer(problem, new)
            start = then.init(problem, (x, state.y0 if y is None else y))
            return new, start

        def go_then():
            return state.first, then.step(problem, data, state.then, key=key_then)

        # The step count is public: both runs always happen.
        runs = jax.lax.cond(state.t < first.num_steps, go_first, go_then)
        return _State(runs[0], runs[1], state.y0, state.t + 1)

    def released(self, state: _State) -> PyTree:
        """The second's iterate, which is the first's answer so far until it starts."""
        return self.then.released(state.then)

    def adversary_view(self, state: _State) -> PyTree:
        """What each of the two shows."""
        first = self.first.adversary_view(state.first)
        return first, self.then.adversary_view(state.then)

    @override
    def answer(self, problem: BilevelProblem, state: _State) -> PyTree:
        return self.then.answer(problem, state.then)

    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        """The releases of the first, then those of the second."""
        _checks.instance("WarmStarted", self.first.problem_type, problem=problem)
        first = self.first.ledger(problem, sizes).named(FIRST)
        return first + self.then.ledger(problem, sizes).named(THEN)

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        return {
            f"{name}: {key}": value
            for name, part in ((FIRST, self.first), (THEN, self.then))
            for key, value in part.dimensions(w0).items()
        }
