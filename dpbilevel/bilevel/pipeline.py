"""Solvers in stages, each with a part of the budget, and `OneLevel`."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, Self
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Number
from ..core.descent import Rule, SkippedUpdates
from ..core.loop import inner_solve
from ..core.solver import AbstractSolver, State
from ..onelevel.adaptive import NoisyDescent
from ..onelevel.problem import AbstractFiniteSum
from ..privacy import Basis, Ledger, Neighbours
from ..privacy.keys import derive
from . import levels
from .levels import Level, Objective, Queries
from .problem import BilevelProblem, Sizes


class AbstractStages(AbstractSolver[BilevelProblem, State]):
    """Base of solvers that run the solvers in the fields named in `stages` in turn."""

    stages: ClassVar[Mapping[str, type]]  # the problems that these must solve
    budget_split: AbstractVar[tuple[float, ...]]  # of the squared budget
    problem_type: ClassVar[type] = BilevelProblem
    in_config: ClassVar[bool] = False

    def __check_init__(self):
        owner = type(self).__name__
        for name, kind in self.stages.items():
            part = getattr(self, name)
            _checks.instance(owner, AbstractSolver, **{name: part})
            if not issubclass(kind, part.problem_type):
                raise TypeError(
                    f"{owner}: {name} must solve a {kind.__name__}, not a "
                    f"{_checks.names_of(part.problem_type)}."
                )
        _checks.budget_split(owner, self.budget_split, *self.stages)
        relations = {name: getattr(self, name).neighbours for name in self.stages}
        if len(set(relations.values())) > 1:
            named = [f"{name} to {value}" for name, value in relations.items()]
            defaults = [
                f"{field.name}="
                for field in dataclasses.fields(self)
                if field.name in relations and field.default is not dataclasses.MISSING
            ]
            too = f", {', '.join(defaults)} too" if defaults else ""
            raise ValueError(
                f"{owner}: the stages refer to different relations "
                f"({', '.join(named)}). Give all the same relation{too}."
            )

    @property
    def parts(self) -> tuple[AbstractSolver, ...]:
        """Tuple of the stages' solvers, each with the planned sizes."""
        parts = (getattr(self, name) for name in self.stages)
        return tuple(part.with_sizes(self.sizes) for part in parts)

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.parts[0].neighbours

    @property
    def basis(self) -> Basis:
        """Weakest `Basis` of the guarantees of all stages."""
        return functools.reduce(Basis.worse, (part.basis for part in self.parts))

    @override
    def with_noise(self, scale: Number) -> Self:
        total = sum(self.budget_split)
        noisy: dict[str, Any] = {
            name: getattr(self, name).with_noise(scale / (part / total) ** 0.5)
            for name, part in zip(self.stages, self.budget_split, strict=True)
        }
        return dataclasses.replace(self, **noisy)

    @property
    def _bilevel_stages(self) -> list[str]:
        """Names of the stages that solve the bilevel problem itself."""
        stages = self.stages.items()
        return [name for name, kind in stages if issubclass(kind, BilevelProblem)]

    @override
    def forecast(self, problem, sizes, w0):
        """Return a tuple of `ForecastRow`s: those of the bilevel stages."""
        parts = (getattr(self, n).with_sizes(self.sizes) for n in self._bilevel_stages)
        rows = (part.forecast(problem, sizes, w0) for part in parts)
        return tuple(itertools.chain(*rows))

    @override
    def with_counts(self, problem: BilevelProblem, sizes: Sizes | None = None) -> Self:
        sizes = self.sizes if sizes is None else sizes
        # The problem of a refit is known only when x is.
        counted: dict[str, Any] = {
            name: getattr(self, name).with_sizes(sizes).with_counts(problem, sizes)
            for name in self._bilevel_stages
        }
        return dataclasses.replace(self, **counted)


def with_prefix(name: str, dimensions: Mapping[str, int]) -> dict[str, int]:
    """Return the dict `dimensions` with "`name`: " in front of every key."""
    return {f"{name}: {release}": size for release, size in dimensions.items()}


Outputs = dict[str, PyTree]


class PipelineState(eqx.Module):
    """Released outputs of the stages so far, and the current solution."""

    w0: PyTree
    outputs: Outputs  # the answers of the stages, zeros for those still to come
    solution: PyTree  # the current pair (x, y)
    rejections: SkippedUpdates
    t: Int[Array, ""]  # number of finished stages


class AbstractPipeline(AbstractStages[PipelineState]):
    """Solver whose steps are stages: whole runs of one-level solvers.

    A subclass declares what a stage reads (`queries`), and what it minimizes given the
    outputs of earlier stages (`objective`). Ledger and runs have the same queries.
    """

    @property
    def num_steps(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @abc.abstractmethod
    def queries(self, name: str) -> Queries:
        """Return a function from clip norm, sampling, sizes to a stage's queries."""

    @abc.abstractmethod
    def objective(
        self, name: str, problem: Any, w0: PyTree, outputs: Outputs
    ) -> Objective:
        """Return the `Objective` that a stage minimizes.

        `outputs` are the answers of earlier stages.
        """

    @abc.abstractmethod
    def start(self, name: str, w0: PyTree, outputs: Outputs) -> PyTree:
        """Return the initial point of a stage."""

    @abc.abstractmethod
    def current_solution(
        self, name: str, problem: Any, w0: PyTree, outputs: Outputs
    ) -> PyTree:
        """Return the pair (x, y) after a stage."""

    def stage_solver(self, name: str, outputs: Outputs) -> AbstractSolver:
        """Return a stage's solver, a numeric step size times `step_factor`."""
        solver = getattr(self, name).with_sizes(self.sizes)
        factor = self.step_factor(name, outputs)
        step_size: Any = getattr(solver, "step_size", None)
        if factor is None or isinstance(step_size, Rule):
            return solver
        return dataclasses.replace(solver, step_size=factor * step_size)

    def step_factor(self, name: str, outputs: Outputs) -> Array | None:
        """Return a factor for a stage's numeric step size; by default `None`."""
        return None

    @override
    def init(self, problem, w0) -> PipelineState:
        w0 = jax.tree.map(jnp.asarray, tuple(w0))
        self.check_problem(problem, w0)
        none = SkippedUpdates()
        return PipelineState(w0, self._zeros(w0), w0, none, jnp.zeros((), jnp.int32))

    def check_problem(self, problem: BilevelProblem, w0: PyTree | None = None) -> None:
        """Refuse problems that the pipeline does not solve; by default none."""

    def _zeros(self, w0: PyTree) -> Outputs:
        """Return a dict by stage of zeros shaped like the stage's initial point."""
        outputs = {}
        for name in self.stages:
            outputs[name] = optax.tree.zeros_like(self.start(name, w0, outputs))
        return outputs

    def run_stage(
        self,
        name: str,
        problem: Any,
        data: PyTree,
        w0: PyTree,
        outputs: Outputs,
        *,
        key,
    ) -> tuple[PyTree, Array]:
        """Run a stage; return its answer and the number of skipped updates.

        `key` is that of the step, `outputs` are the answers of earlier stages.
        """
        keys = dict(zip(self.stages, derive(key, *self.stages), strict=True))
        objective = self.objective(name, problem, w0, outputs)
        level = Level(problem, self.queries(name), objective)
        solver = self.stage_solver(name, outputs)
        start = self.start(name, w0, outputs)
        return inner_solve(level, solver, data, start, key=keys[name])

    def for_stage(self, name: str) -> Self:
        """Return the pipeline with only one stage's settings; by default itself.

        A subclass may replace settings that the stage does not read, so that pipelines
        which differ in these alone share a compiled program.
        """
        return self

    @override
    def step(self, problem, data, state, *, key) -> PipelineState:
        def run(name):
            known = state.w0, state.outputs
            w, count = self.run_stage(name, problem, data, *known, key=key)
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
        # Arrays of these shapes that take no memory.
        like = jax.tree.map(lambda v: np.broadcast_to(np.float32(0), v.shape), shapes)
        found = {}
        for name, part in zip(self.stages, self.parts, strict=True):
            found |= with_prefix(name, part.dimensions(like[name]))
        return found


MODEL = "model"


class OneLevel(AbstractPipeline):
    r"""Fits $y$ on the records of one level, or of both, and keeps the given $x$.

    The baseline of every method of two levels: $\min_y f(x_0, y)$ on the upper
    records, $\min_y g(x_0, y)$ on the lower ones, or on both

    $$\min_y g(x_0, y) + \frac{n_f}{n_g} f(x_0, y),$$

    which is $1 + n_f / n_g$ times the mean over all records: each of them weighs the
    same.

    Args:
        model: The one-level solver.
        reads: `"upper"`, `"lower"` or `"both"`. Static.

    Privacy:
        The releases of `model`. Disjoint people of a level that is not read spend no
        budget.
    """

    model: NoisyDescent
    reads: levels.Reads = eqx.field(static=True, default="upper")
    stages: ClassVar = {MODEL: AbstractFiniteSum}
    budget_split: ClassVar = (1.0,)
    in_config: ClassVar[bool] = True

    @override
    def queries(self, name):
        return levels.queries_of(self.reads)

    @override
    def objective(self, name, problem, w0, outputs):
        if self.reads == "upper":
            return levels.validation_objective(problem, w0[0])
        penalty = levels.equal_weights(self.sizes) if self.reads == "both" else None
        return levels.lower_objective(problem, w0[0], penalty)

    @override
    def forecast(self, problem, sizes, w0):
        """Return the `ForecastRow`s of `model` on its objective at the given x."""
        objective = self.with_sizes(sizes).objective(MODEL, problem, w0, {})
        level = levels.Level(problem, levels.queries_of(self.reads), objective)
        return self.model.forecast(level, sizes, w0[1])

    @override
    def start(self, name, w0, outputs):
        return w0[1]

    @override
    def current_solution(self, name, problem, w0, outputs):
        return w0[0], outputs[MODEL]
