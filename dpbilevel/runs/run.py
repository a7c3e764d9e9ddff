"""Runs step by step: advanced, looked at, saved and resumed between steps."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import _checks
from ..core import process_spending
from ..core.descent import rejected_updates
from ..core.loop import arrays, check_run, planned_rows
from ..core.problem import AbstractProblem, Lifted, StaticLeaves, arrays_of, lifted
from ..core.solution import Plan, Solution
from ..privacy.jaxprs import constants
from ..privacy.keys import PRNGKey, check_shared, step_keys
from ..privacy.records.disk import OnDisk
from . import checkpoint
from .checkpoint import FIRST_KEY, Checkpoint, hashed
from .guards import step_bar


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A run of a plan between two steps, as `start`, `advance` and `resume` return it.

    It is never changed: `advance` returns another run.

    Attributes:
        problem: The problem.
        plan: The plan, for one run.
        data: The records in a public number of rows, as `solver.step` takes them in a
            loop of your own.
        done: Number of steps done.
        state: The state of the solver. It may hold more than is released.
        key: The key of the steps to come. Secret.
        path: Room for the released iterates of all steps, or `None`.
        leaves: The leaves of the initial point that are no arrays, if any.
        name: A hash that identifies the run, for its checkpoints. Secret.

    Privacy:
        Only `value`, `solution`, `done` and `epsilon` of a run may be published.
    """

    problem: AbstractProblem
    plan: Plan
    data: PyTree
    done: int
    state: PyTree
    key: PRNGKey
    path: PyTree | None = None
    leaves: StaticLeaves | None = None
    name: str = ""

    def __repr__(self) -> str:
        """Return the progress and the plan; never the key, nor a record."""
        return f"Run({self.done} of {self.num_steps} steps of {self.plan!r})"

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.plan.solver.num_steps

    @property
    def value(self) -> PyTree:
        """The released answer after the steps done."""
        return self.solution.value

    @property
    def solution(self) -> Solution:
        """The `Solution` after the steps done, with the report of the whole plan."""
        path = jax.tree.map(lambda v: v[: self.done], self.path)
        value = self.plan.solver.answer(self.problem, self.state)
        rejected = rejected_updates(self.state)
        report = self.plan.report.with_generator(jax.random.key_impl(self.key))
        solution = Solution(value, path, rejected, report)
        return solution if self.leaves is None else solution.with_leaves(self.leaves)

    @cached_property
    def epsilon(self) -> float:
        """Epsilon of the steps done, at the delta of the plan.

        Releases that `calibrate` took as `before` count in the epsilon of the whole run
        only. The value holds if the number of steps was chosen before the run. A run
        that ends early because of a released value costs the epsilon of the plan.
        """
        solver, report = self.plan.solver, self.plan.report
        if self.done == 0 or self.done == self.num_steps:
            return report.epsilon if self.done else 0.0
        ledger = solver.ledger_of_steps(self.problem, solver.sizes, self.done)
        return min(ledger.epsilon(report.delta), report.epsilon)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint into a folder, from which `resume` goes on.

        The file `checkpoint.SECRET`, readable by its owner alone, replaces an earlier
        one of the same run. It holds the state of the solver, the released iterates and
        the key of the noise still to come, with `CorrelatedGD` keys of the last noise
        too, but no record; whoever has it can subtract that noise. It is not part of
        what may be published: delete it when the run has ended.

        Raises:
            OSError: The disk refuses; an earlier checkpoint is intact.
            ValueError: The folder holds the checkpoint of another run.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file, then = folder / checkpoint.NAME, None
        if file.exists():
            with contextlib.suppress(ValueError):  # damaged
                then = checkpoint.read(folder).fingerprint.get(FIRST_KEY)
            if then != self.name:
                text = f"save: {file} is of another run; give another folder."
                raise ValueError(text)
        checkpoint.write(folder, checkpoint_of(self, facts_of(self)))


def start(
    problem: AbstractProblem,
    plan: Plan,
    data: PyTree,
    w0: PyTree,
    *,
    key: PRNGKey,
    trajectory: bool = False,
    trainable: PyTree = None,
) -> Run:
    """Return a `Run` before its first step, and count it as spent in this process.

    Steps by `advance` are those of `solve` with the same key, bit for bit on the same
    device, however they are divided.

    Args:
        problem: The problem of the plan.
        plan: The plan, as returned by `calibrate`.
        data: The records, as in `solve`. Under add-or-remove-one they are padded to the
            rows of the plan.
        w0: The initial point.
        key: One typed key; consumed by this run.
        trajectory: Whether `Run.solution` has the released iterates.
        trainable: As in `fit`.

    Raises:
        TypeError: As in `solve`, or `plan` is not a plan.
        ValueError: As in `solve`.

    Warns:
        PrivacyWarning: As `fit`.

    Privacy:
        Advanced to its end or not, one run of the plan. Reads no record yet.

    Example:
        >>> import jax, jax.numpy as jnp, dpbilevel as dpb
        >>> problem = dpb.FiniteSum(dpb.logistic_loss)
        >>> solver = dpb.NoisyGD(10, clip_norm=1.0, step_size=0.5)
        >>> budget = dpb.PrivacyBudget(1.0, 1e-5)
        >>> plan = dpb.calibrate(problem, solver, budget, sizes=100)
        >>> data = {"features": jnp.ones((100, 3)), "label": jnp.ones(100)}
        >>> run = dpb.start(problem, plan, data, jnp.zeros(3), key=dpb.root_key())
        >>> while run.done < run.num_steps:
        ...     run = dpb.advance(run, 5)
        ...     print(run.done, round(run.epsilon, 2))
        5 0.68
        10 1.0
    """
    data = arrays(data)
    run = _checked("start", problem, plan, data, w0, key, trajectory, trainable)
    name, report = f"start: {type(plan.solver).__name__}", plan.report
    costs, sizes = process_spending.costs_by(report), plan.solver.sizes
    process_spending.begun(name, report.relation, costs, sizes, data, key)()
    return run


def _checked(owner, problem, plan, data, w0, key, trajectory, trainable) -> Run:
    """Return a `Run` before its first step; its arguments are checked here."""
    _checks.instance(owner, Plan, plan=plan)
    problem, w0, leaves = arrays_of(owner, problem, w0, trainable)
    check_run(owner, problem, plan.solver, data, w0, key)
    options: Any = {"key": key, "trajectory": trajectory, "leaves": leaves}
    return first_run(owner, problem, plan, data, w0, **options)


def first_run(owner, problem, plan, data, w0, *, key, trajectory, leaves) -> Run:
    """Return a `Run` before its first step; arguments are checked before the call."""
    solver = plan.solver
    data = _checks.on_device(data)
    check_shared(key, data)
    data = planned_rows(solver, data, owner)
    state = solver.init(problem, w0)

    def room(v):
        return jnp.zeros((solver.num_steps, *v.shape), v.dtype)

    path = jax.tree.map(room, solver.released(state)) if trajectory else None
    # It is as hard to invert as the keys of later steps, which a checkpoint holds.
    name = hashlib.sha256(np.asarray(jax.random.key_data(key)).tobytes()).hexdigest()
    return Run(problem, plan, data, 0, state, key, path, leaves, name)


def advance(run: Run, steps: int | None = None) -> Run:
    """Return the `Run` after further steps; by default after all that are left.

    One program is compiled, for any number of steps.

    Args:
        run: The run so far. Advanced twice, it makes the same steps twice.
        steps: The number of steps, at least 1; the run ends with the last of its plan.

    Raises:
        TypeError: `run` is not a run.
        ValueError: `steps` is not a positive integer.

    Privacy:
        The releases that the ledger counts for these steps.
    """
    _checks.instance("advance", Run, run=run)
    if steps is not None:
        _checks.count("advance", steps=steps)
    left = run.num_steps - run.done
    count = left if steps is None else min(steps, left)
    if count == 0:
        return run
    state, path, key = _steps(*_arguments(run), count)
    done = run.done + count
    return dataclasses.replace(run, state=state, path=path, key=key, done=done)


def is_true(answer: object) -> bool:
    """Return whether an answer of a callback is `True`; a loss or a list is not."""
    if isinstance(answer, np.ndarray | jax.Array) and answer.shape == ():
        answer = answer.item()
    return isinstance(answer, bool | np.bool_) and bool(answer)


def run_watched(
    run: Run,
    count: Callable[[], None],
    *,
    progress: bool,
    callback: Callable[[Run], object] | None,
    every: int | None,
    keep: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Advance a `Run` to its end, or until `callback` is true; return the last `Run`.

    `count` is called before `callback` sees anything, `keep` after it: a run that is
    killed between them calls it once more, with the same values.
    """
    part = every or max(1, run.num_steps // 20)
    with step_bar(run.num_steps, "fit", shown=progress) as show:
        show(run.done)
        while run.done < run.num_steps:
            run = advance(run, part)
            jax.block_until_ready(run.state)
            show(run.done)
            if callback is not None:
                count()
                if is_true(callback(run)):
                    break
            keep(run)
    count()
    return run


def resume(
    folder: str | Path,
    problem: AbstractProblem,
    plan: Plan,
    data: PyTree,
    w0: PyTree,
    *,
    trainable: PyTree = None,
) -> Run:
    """Return the `Run` that `Run.save` wrote into a folder.

    It goes on with the noise that it would have had: the same release, bit for bit on
    the same device.

    Args:
        folder: The folder.
        problem: The same problem; its losses are compared by the compiled program.
        plan: The same plan; calibrate again with the same arguments.
        data: The same records; a hash of them is compared.
        w0: The initial point; only its shape and the arrays that are not trained are
            read.
        trainable: As in `fit`.

    Raises:
        TypeError: As in `start`.
        ValueError: The folder holds no checkpoint, or something that the run depends on
            has changed. The same noise on other records or losses would reveal both.
    """
    saved = checkpoint.read(Path(folder))
    # This continues a release that was counted when it began.
    has_path = len(saved.path) > 0
    data = arrays(data)
    run = _checked("resume", problem, plan, data, w0, saved.key, has_path, trainable)
    first = checkpoint_of(run, facts_of(run))
    return resumed(run, checkpoint.resume_run(Path(folder), saved, first))


def resumed(run: Run, saved: Checkpoint) -> Run:
    """Return the `Run` with the state, key and trajectory of its `Checkpoint`."""
    state, path = jax.tree.map(jnp.asarray, (saved.state, saved.path))
    name = saved.fingerprint.get(FIRST_KEY, run.name)
    parts: Any = {"done": saved.done, "key": saved.key, "name": name}
    return dataclasses.replace(run, state=state, path=path, **parts)


@jax.jit
def _steps(problem, solver, data, state, path, key, done, count):
    """Make `count` steps; return state, path and key. One program serves any count."""
    if isinstance(problem, Lifted):
        problem = problem.lowered()

    def one_step(i, carry):
        state, path, key = carry
        key, (own,) = step_keys(key, 1)
        state = solver.step(problem, data, state, key=own)
        if path is not None:
            new = solver.released(state)
            path = jax.tree.map(lambda rows, row: rows.at[done + i].set(row), path, new)
        return state, path, key

    return jax.lax.fori_loop(0, count, one_step, (state, path, key))


def _arguments(run: Run) -> tuple[Any, ...]:
    program = lifted(run.problem), run.plan.solver
    return *program, run.data, run.state, run.path, run.key, run.done


def facts_of(run: Run) -> dict[str, Any]:
    """Return a dict of the public facts that decide a run's bits."""
    traced = _steps.trace(*_arguments(run), 1)
    program = traced.lower().as_text().encode()
    # Numbers that the text of the program may leave out.
    numbers = jax.tree.leaves((lifted(run.problem), run.plan.solver))
    return {
        "plan": json.loads(run.plan.report.to_json()),
        "software": checkpoint.software(),
        "program": hashed([program, *constants(traced.jaxpr), *numbers]),
    }


def checkpoint_of(run: Run, facts: dict[str, Any]) -> Checkpoint:
    """Return the `Checkpoint` of a run with these public facts. SECRET."""
    stored = jax.tree.leaves(run.data, is_leaf=lambda v: isinstance(v, OnDisk))
    records = hashed(v.store.digest if isinstance(v, OnDisk) else v for v in stored)
    fingerprint = facts | {"records": records, FIRST_KEY: run.name}
    return Checkpoint(run.done, run.key, run.state, run.path, fingerprint)
