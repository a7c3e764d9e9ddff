"""Pipelines: solvers made of whole runs of one-level solvers, one after the other."""

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
from ..privacy.ledger import Ledger
from ..privacy.noise import derive
from .levels import Level, Objective, Queries
from .problem import BilevelProblem, Sizes
from .stages import AbstractStages, with_prefix

Outputs = dict[str, PyTree]


class PipelineState(eqx.Module):
    """Released values of a pipeline.

    Attributes:
        w0: The initial point.
        outputs: The answers of the stages, zeros for those still to come.
        solution: The current pair (x, y).
        rejections: The updates that were left out.
        t: The number of finished stages.
    """

    w0: PyTree
    outputs: Outputs
    solution: PyTree
    rejections: SkippedUpdates
    t: Int[Array, ""]


class AbstractPipeline(AbstractStages[PipelineState]):
    """Stages that are whole runs of one-level solvers; a step is one of them.

    A subclass declares what a stage reads (`queries`), and what it minimizes given the
    outputs of earlier stages (`objective`). Ledger and runs have the same queries.
    """

    @property
    def num_steps(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @abc.abstractmethod
    def queries(self, name: str) -> Queries:
        """Return what a stage reads, which depends on no output of another stage."""

    @abc.abstractmethod
    def objective(
        self, name: str, problem: Any, w0: PyTree, outputs: Outputs
    ) -> Objective:
        """Return the function that a stage minimizes.

        Args:
            name: The stage, a key of `stages`.
            problem: The bilevel problem.
            w0: The initial point.
            outputs: The answers of earlier stages.
        """

    @abc.abstractmethod
    def start(self, name: str, w0: PyTree, outputs: Outputs) -> PyTree:
        """Return the initial point of a stage; arguments as in `objective`."""

    @abc.abstractmethod
    def current_solution(
        self, name: str, problem: Any, w0: PyTree, outputs: Outputs
    ) -> PyTree:
        """Return the pair (x, y) after a stage; arguments as in `objective`."""

    def stage_solver(self, name: str, outputs: Outputs) -> AbstractSolver:
        """Return the solver of a stage; arguments as in `objective`."""
        solver = getattr(self, name).with_sizes(self.sizes)
        factor = self.step_factor(name, outputs)
        step_size: Any = getattr(solver, "step_size", None)
        if factor is None or isinstance(step_size, Rule):
            return solver
        return dataclasses.replace(solver, step_size=factor * step_size)

    def step_factor(self, name: str, outputs: Outputs) -> Array | None:
        """Return the factor of the step size of a stage, or `None`.

        The steps of an optax rule are taken as they are. Arguments as in `objective`.
        """
        del name, outputs
        return None

    @override
    def init(self, problem, w0) -> PipelineState:
        w0 = jax.tree.map(jnp.asarray, tuple(w0))
        self.check_problem(problem, w0)
        none = SkippedUpdates.none()
        return PipelineState(w0, self._zeros(w0), w0, none, jnp.zeros((), jnp.int32))

    def check_problem(self, problem: BilevelProblem, w0: PyTree | None = None) -> None:
        """Refuse problems that the pipeline does not solve; by default none.

        Args:
            problem: The problem.
            w0: The initial point, if it is known.
        """

    def _zeros(self, w0: PyTree) -> Outputs:
        """Return outputs of zeros, each of the shape of the start of its stage."""
        outputs = {}
        for name in self.stages:
            outputs[name] = optax.tree.zeros_like(self.start(name, w0, outputs))
        return outputs

    @override
    def step(self, problem, data, state, *, key) -> PipelineState:
        keys = dict(zip(self.stages, derive(key, *self.stages), strict=True))

        def run(name):
            objective = self.objective(name, problem, state.w0, state.outputs)
            level = Level(problem, self.queries(name), objective)
            solver = self.stage_solver(name, state.outputs)
            start = self.start(name, state.w0, state.outputs)
            w, count = inner_solve(level, solver, data, start, key=keys[name])
            outputs = state.outputs | {name: w}
            solution = self.current_solution(name, problem, state.w0, outputs)
            return outputs, solution, state.rejections.plus(count)

        # The number of the stage is public: every stage runs.
        stages = [functools.partial(run, name) for name in self.stages]
        outputs, solution, rejections = jax.lax.switch(state.t, stages)
        return PipelineState(state.w0, outputs, solution, rejections, state.t + 1)

    @override
    def released(self, state):
        return state.solution

    @override
    def adversary_view(self, state):
        return state.solution, state.outputs

    @override
    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        self.check_problem(problem)
        levels = [Level(problem, self.queries(name)) for name in self.stages]
        stages = zip(self.stages, self.with_sizes(sizes).parts, levels, strict=True)
        runs = [part.ledger(level, sizes).named(n) for n, part, level in stages]
        return functools.reduce(Ledger.__add__, runs)

    @override
    def dimensions(self, w0):
        shapes = jax.eval_shape(self._zeros, w0)
        found = {}
        for name, part in zip(self.stages, self.parts, strict=True):
            found |= with_prefix(name, part.dimensions(_sized(shapes[name])))
        return found


def _sized(shapes: PyTree) -> PyTree:
    """Return arrays of these shapes that take no memory."""
    return jax.tree.map(lambda v: np.broadcast_to(np.float32(0), v.shape), shapes)
