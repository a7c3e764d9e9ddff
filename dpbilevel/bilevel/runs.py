"""Solvers made of whole runs of one-level solvers, one after the other."""

import abc
import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from ..core.descent import Rule, SkippedUpdates
from ..core.loop import inner_solve
from ..core.solver import AbstractSolver
from ..onelevel.problem import AbstractFiniteSum
from ..privacy.ledger import Ledger
from ..privacy.noise import derive
from .problem import BilevelProblem, Sizes
from .stages import AbstractStages


class RunState(eqx.Module):
    """What a chain of runs has released so far.

    Attributes:
        w0: The starting point.
        found: The answers of the runs, zeros for those still to come.
        shown: The current pair (x, y).
        rejections: The updates that were left out.
        t: The number of finished runs.
    """

    w0: PyTree
    found: dict[str, PyTree]
    shown: PyTree
    rejections: SkippedUpdates
    t: Int[Array, ""]


class AbstractPipeline(AbstractStages[RunState]):
    """Stages that are whole runs of one-level solvers; a step is one of them."""

    @property
    def num_steps(self) -> int:
        """One for each run."""
        return len(self.stages)

    @abc.abstractmethod
    def level(
        self, name: str, problem: Any, w0: PyTree, found: dict | None
    ) -> AbstractFiniteSum:
        """The one-level problem of a run.

        Args:
            name: The run, a key of `stages`.
            problem: The bilevel problem.
            w0: The starting point.
            found: The answers of earlier runs, or `None` where only the queries are
                asked for.
        """

    @abc.abstractmethod
    def start(self, name: str, w0: PyTree, found: dict) -> PyTree:
        """Where a run starts; arguments are those of `level`."""

    @abc.abstractmethod
    def current_solution(
        self, name: str, problem: Any, w0: PyTree, found: dict
    ) -> PyTree:
        """The pair (x, y) once a run is finished; arguments are those of `level`."""

    def run(self, name: str, found: dict) -> AbstractSolver:
        """The solver of a run; arguments are those of `level`."""
        solver = getattr(self, name).with_sizes(self.sizes)
        factor = self.step_factor(name, found)
        step_size: Any = getattr(solver, "step_size", None)
        if factor is None or isinstance(step_size, Rule):
            return solver
        return dataclasses.replace(solver, step_size=factor * step_size)

    def step_factor(self, name: str, found: dict) -> Array | None:
        """Return by what the step size of a run is multiplied, or `None`.

        An optax rule is taken as it is. Arguments are those of `level`.
        """
        del name, found
        return None

    @override
    def init(self, problem: BilevelProblem, w0: PyTree) -> RunState:
        w0 = jax.tree.map(jnp.asarray, tuple(w0))
        found = self._zeros(w0)
        return RunState(w0, found, w0, SkippedUpdates.none(), jnp.zeros((), jnp.int32))

    def _zeros(self, w0: PyTree) -> dict[str, PyTree]:
        """Answers of zeros: those of a run have the shapes of its start."""
        found = {}
        for name in self.stages:
            found[name] = optax.tree.zeros_like(self.start(name, w0, found))
        return found

    def step(self, problem, data, state, *, key) -> RunState:
        """The next run, from its start to its answer."""
        keys = dict(zip(self.stages, derive(key, *self.stages), strict=True))

        def whole(name):
            level = self.level(name, problem, state.w0, state.found)
            start = self.start(name, state.w0, state.found)
            solver = self.run(name, state.found)
            w, count = inner_solve(level, solver, data, start, key=keys[name])
            found = state.found | {name: w}
            return found, self.current_solution(name, problem, state.w0, found), count

        # The step count is public: every run happens.
        runs = [functools.partial(whole, name) for name in self.stages]
        found, shown, count = jax.lax.switch(state.t, runs)
        rejections = state.rejections.plus(count)
        return RunState(state.w0, found, shown, rejections, state.t + 1)

    def released(self, state: RunState) -> PyTree:
        """The current pair: the start where nothing is found yet."""
        return state.shown

    def adversary_view(self, state: RunState) -> PyTree:
        """The current pair, and the answers of all runs."""
        return state.shown, state.found

    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        """The releases of every run."""
        bound = self.with_sizes(sizes)
        runs = [
            part.ledger(bound.level(name, problem, None, None), sizes).named(name)
            for name, part in zip(bound.stages, bound.parts, strict=True)
        ]
        return functools.reduce(Ledger.__add__, runs)

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        shapes = jax.eval_shape(self._zeros, w0)
        return {
            f"{name}: {release}": size
            for name, part in zip(self.stages, self.parts, strict=True)
            for release, size in part.dimensions(_sized(shapes[name])).items()
        }


def _sized(shapes: PyTree) -> PyTree:
    """Arrays of these shapes that take no memory."""
    return jax.tree.map(lambda v: np.broadcast_to(np.float32(0), v.shape), shapes)
