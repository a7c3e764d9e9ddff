"""Runs on synthetic data, stage by stage, so that candidates share programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from ..applications.warm_start import FIRST, THEN, WarmStarted
from ..bilevel.pipeline import AbstractPipeline, Outputs, PipelineState
from ..core.descent import SkippedUpdates
from ..core.loop import planned_rows, scan_steps
from ..core.solver import AbstractSolver
from ..privacy.noise import PRNGKey, derive, step_keys

# At module level, so that runs of the same shapes share one compiled program.
_step_keys = jax.jit(lambda key, count: step_keys(key, count)[1], static_argnums=1)


def released(
    problem: Any, solver: AbstractSolver, data: PyTree, w0: PyTree, *, key: PRNGKey
) -> PyTree:
    """Return the answer that `solve` releases at this key, without its checks.

    Compiling takes most of the time of short runs. So a stage of a pipeline is a program
    of its own: pipelines that have it in common compile it once.

    Args:
        problem: The problem.
        solver: A solver that is bound to the sizes of the data.
        data: Synthetic records.
        w0: The initial point.
        key: A typed key; it protects nothing.
    """
    data = planned_rows(solver, data, "auto")
    keys = _step_keys(key, solver.num_steps)
    return _answer(problem, solver, data, w0, keys)


def _answer(
    problem: Any,
    solver: AbstractSolver,
    data: PyTree,
    w0: PyTree,
    keys: Key[Array, " steps"],
) -> PyTree:
    """Return the answer of a run with these keys, one for each step."""
    if isinstance(solver, WarmStarted):
        (first, then), parts = solver.parts, _both_keys(keys)
        x, y = _answer(problem, first, data, w0, parts[: first.num_steps, 0])
        start = x, w0[1] if y is None else y
        return _answer(problem, then, data, start, parts[first.num_steps :, 1])
    if not isinstance(solver, AbstractPipeline):
        return _whole_run(problem, solver, data, w0, keys)
    w0 = jax.tree.map(jnp.asarray, tuple(w0))
    outputs: Outputs = {}
    for name, key in zip(solver.stages, keys, strict=True):
        stage = solver.for_stage(name)
        outputs = outputs | {name: _stage(name, problem, stage, data, w0, outputs, key)}
    return _last(name, problem, solver.for_stage(name), w0, outputs)


@jax.jit
def _both_keys(keys: Key[Array, " steps"]) -> Key[Array, "steps 2"]:
    return jax.vmap(lambda key: derive(key, FIRST, THEN))(keys)


@jax.jit
def _whole_run(problem, solver, data, w0, keys) -> PyTree:
    state, _ = scan_steps(problem, solver, data, solver.init(problem, w0), keys)
    return solver.answer(problem, state)


@functools.partial(jax.jit, static_argnums=0)
def _stage(name, problem, stage, data, w0, outputs, key) -> PyTree:
    return stage.run_stage(name, problem, data, w0, outputs, key=key)[0]


@functools.partial(jax.jit, static_argnums=0)
def _last(name, problem, stage, w0, outputs) -> PyTree:
    """Return the answer of a pipeline after its last stage."""
    solution = stage.current_solution(name, problem, w0, outputs)
    done = jnp.int32(len(outputs))
    state = PipelineState(w0, outputs, solution, SkippedUpdates.none(), done)
    return stage.answer(problem, state)
