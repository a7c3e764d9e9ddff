"""One dry run, compiled stage by stage, and the threads that make several."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key, PyTree

from .. import _checks
from ..applications.selected_sources import AbstractSourcePipeline
from ..applications.warm_start import FIRST, THEN, WarmStarted
from ..bilevel.pipeline import AbstractPipeline, OneLevel, Outputs, PipelineState
from ..core.descent import SkippedUpdates
from ..core.loop import planned_rows, scan_steps
from ..core.solver import AbstractSolver
from ..privacy.keys import PRNGKey, derive, step_keys

Item = TypeVar("Item")
Result = TypeVar("Result")

# Runs of small models keep one core busy, and so does a compilation.
_MOST_THREADS = 4
# Fields of solvers whose plain steps count as accelerated ones without momentum.
_FITS = ("model", "fit", "models")
# Compiler options for programs that take longer to compile than to run.
_O0 = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Numbers that a stage reads, in steps times records times parameters.
_LONG = 1e6
# At module level, so that runs of the same shapes share one compiled program.
_step_keys = jax.jit(lambda key, count: step_keys(key, count)[1], static_argnums=1)


def released(
    problem: Any, solver: AbstractSolver, data: PyTree, w0: PyTree, *, key: PRNGKey
) -> PyTree:
    """Return the answer that `solve` releases at this key, without its checks.

    Compiling takes most of the time of short runs. So a stage of a pipeline is a
    program of its own: pipelines that have it in common compile it once.
    """
    data = planned_rows(solver, data, "auto")
    keys = _step_keys(key, solver.num_steps)
    return _answer(problem, solver, data, w0, keys)


def accelerated(solver: Any) -> Any:
    """Return the solver with `momentum=None` of its fits replaced by 0.

    Plain and accelerated steps then share a program. Momentum 0 changes plain steps in
    one respect: a step that was too long is not taken back. The candidates' plain steps
    are too short for that.
    """
    if isinstance(solver, WarmStarted):
        return dataclasses.replace(solver, first=accelerated(solver.first))
    if not isinstance(solver, OneLevel | AbstractSourcePipeline):
        return solver
    plain: dict[str, Any] = {
        name: dataclasses.replace(getattr(solver, name), momentum=0.0)
        for name in solver.stages
        if name in _FITS and getattr(getattr(solver, name), "momentum", 0) is None
    }
    return dataclasses.replace(solver, **plain)


def _answer(problem: Any, solver: Any, data, w0, keys: Key[Array, " steps"]) -> PyTree:
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
        run = _stage if _is_long(stage, name, w0) else _short_stage
        outputs = outputs | {name: run(name, problem, stage, data, w0, outputs, key)}
    last = [*solver.stages][-1]
    return _last(last, problem, solver.for_stage(last), w0, outputs)


@jax.jit
def _both_keys(keys: Key[Array, " steps"]) -> Key[Array, "steps 2"]:
    return jax.vmap(lambda key: derive(key, FIRST, THEN))(keys)


@jax.jit
def _whole_run(problem, solver, data, w0, keys) -> PyTree:
    state, _ = scan_steps(problem, solver, data, solver.init(problem, w0), keys)
    return solver.answer(problem, state)


def _run_stage(name, problem, stage, data, w0, outputs, key) -> PyTree:
    return stage.run_stage(name, problem, data, w0, outputs, key=key)[0]


_stage = jax.jit(_run_stage, static_argnums=0)
_short_stage = jax.jit(_run_stage, static_argnums=0, compiler_options=_O0)


def _is_long(stage: AbstractPipeline, name: str, w0: PyTree) -> bool:
    """Return whether a stage reads so much that it is worth an optimized program."""
    solver = getattr(stage, name)
    queries, _ = stage.queries(name)(1.0, solver.sampling, stage.sizes)
    rows = sum(query.size for query in queries)
    return solver.num_steps * rows * optax.tree.size(w0) > _LONG


@functools.partial(jax.jit, static_argnums=0, compiler_options=_O0)
def _last(name, problem, stage, w0, outputs) -> PyTree:
    """Return the answer of a pipeline after its last stage."""
    solution = stage.current_solution(name, problem, w0, outputs)
    done = jnp.int32(len(outputs))
    state = PipelineState(w0, outputs, solution, SkippedUpdates(), done)
    return stage.answer(problem, state)


class Stopped(Exception):
    """Ends dry runs: the time limit has passed, or there was an interrupt."""


class Workers:
    """Threads for dry runs, which a time limit or an interrupt stops.

    No further run begins `time_limit` seconds after the start, if `finished` is set.
    """

    def __init__(self, time_limit: float | None = None):
        self._end = None
        if time_limit is not None:
            _checks.positive("auto", time_limit=time_limit)
            self._end = time.monotonic() + time_limit
        self.finished = False
        self.stopped = ""

    def check(self) -> None:
        """Raise `Stopped` if the time limit has passed, or there was an interrupt."""
        if self.finished and self._end is not None and time.monotonic() > self._end:
            self.stopped = self.stopped or "Stopped by the time limit"
        if self.stopped:
            raise Stopped

    def each(
        self, fun: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield `fun(item)` in the order of items; an interrupt stops all threads."""
        config: Any = jax.config
        # Settings that a `with` statement sets for one thread alone.
        settings = [
            (jax.enable_x64, config.jax_enable_x64),
            (jax.default_device, config.jax_default_device),
            (jax.default_matmul_precision, config.jax_default_matmul_precision),
            (jax.numpy_dtype_promotion, config.jax_numpy_dtype_promotion),
        ]

        def call(item):
            self.check()
            with contextlib.ExitStack() as stack:
                for context, value in settings:
                    stack.enter_context(context(value))
                return fun(item)

        count = min(_MOST_THREADS, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(call, item) for item in items]
            try:
                for future in futures:
                    yield future.result()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self.stopped = "Stopped by an interrupt"
                pool.shutdown(wait=False, cancel_futures=True)
                raise
