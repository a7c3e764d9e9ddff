"""`AskTell`: a search in rounds, for losses that are evaluated elsewhere."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import _checks
from ..core.columns import elements
from ..core.process_spending import begun
from ..core.solution import Solution, divergence
from ..privacy.budget import PrivacyBudget
from ..privacy.exact.floats import double_precision
from ..privacy.keys import PRNGKey, derive, follows, step_keys
from ..privacy.per_example.clipping import Precision
from ..privacy.report import PrivacyReport
from ..runs import guards
from ..runs.checkpoint import Checkpoint, after, solution_of
from .base import AbstractAskTellSolver, BlackBox, Proposal
from .run import Folder, NoisyLosses, check_losses, plan_run

# Limit of the size of the state times the number of steps below which the optimization
# of a program takes longer than it saves: on one core both were equal at 3e7.
_SHORT = 20_000_000


@dataclasses.dataclass(repr=False)
class _Round:
    """One step of a search: proposed points, and the losses told so far. SECRET."""

    next_key: PRNGKey  # of the steps after this one
    key: PRNGKey  # of the releases of this step
    proposal: Proposal
    points: Float[np.ndarray, "q d"]
    losses: Float[np.ndarray, "q n"]
    open: list[int]  # indices of the points without losses
    after: Checkpoint | None = None  # the run after the release of this step


class AskTell:
    """A search in steps: `ask` returns points, `tell` takes all records' losses there.

    It works like `minimize`, but the evaluations are made elsewhere: on a cluster, by
    another process, days later. With the same losses and the same key it makes the
    releases of `minimize`, bit for bit, if both have a folder or both have none.

    Args:
        problem: The black box; its `losses` may be `None`, and are not called.
        solver: An ask/tell solver: calibrated, or any with `budget`.
        w0: The initial point, one vector, public or already private.
        key: One typed key; consumed by this search.
        budget: The guarantee: the solver is calibrated first.
        precision: As in `calibrate`; used with `budget` only.
        folder: Folder for the losses and for a checkpoint of every step. A later object
            with the same arguments and folder continues the search, in this process or
            another one; after the end it has the result. The folder is locked until the
            search is done, closed or no longer referenced.
        owner: Name for error messages.

    Attributes:
        result: Released solution with its trajectory; `None` until the search is done.
        report: Guarantee, known before the first point; `None` without `budget`.

    Raises:
        TypeError: As `minimize`.
        ValueError: As `minimize`; or the folder is in use.
        OSError: The disk refuses.

    Warns:
        UserWarning: As `minimize`.

    Privacy:
        As `minimize`: one run under the solver's ledger, recorded in the folder before
        the first point is returned, whether or not it is finished. Points and their
        number are functions of released values. With a folder the noise of a step also
        depends on all losses told so far, as in `minimize`. The object is SECRET: it
        holds losses and the key of future noise. It cannot be copied, pickled or used
        after `os.fork`: two objects would release with the same noise. The time of
        evaluations, and other uses of the losses, are not covered.
    """

    def __init__(
        self,
        problem: BlackBox,
        solver: AbstractAskTellSolver,
        w0: Float[np.ndarray | Array, " d"],
        *,
        key: PRNGKey,
        budget: PrivacyBudget | None = None,
        precision: Precision = "grid",
        folder: Path | str | None = None,
        owner: str = "AskTell",
    ):
        run = plan_run(owner, problem, solver, w0, key, budget, precision, folder)
        self.result: Solution | None = None
        self.report: PrivacyReport | None = run.report
        self._noisy: NoisyLosses | None = None  # set if an earlier run finished
        self._run, self._saved = run, run.first
        self._round: _Round | None = None
        self._folder: Folder | None = None
        self._end = contextlib.ExitStack()
        self._process, self._turn = os.getpid(), threading.Lock()
        self._closed = False
        if folder is not None:
            with contextlib.ExitStack() as end:
                self._open(Path(folder), end.enter_context(guards.held(Path(folder))))
                if self.result is None:
                    self._end = end.pop_all()  # the lock stays
        if self.result is not None:
            return
        name, relation = type(run.solver).__name__, run.solver.neighbours.value
        new = None if self.done else key  # a search that goes on has its own
        counted = run.costs, run.problem.num_records, None, new
        self._count = begun(f"{owner}: {name}", relation, *counted)
        if self.done or run.problem.training is not None:
            # An earlier release, or the first training, may have been published.
            self._count()

    def _open(self, path: Path, check: Callable[[], None]) -> None:
        run = self._run
        assert run.report is not None  # a folder needs a budget
        self._folder = Folder(path, check, run.report, run.first)
        result = self._folder.result()
        if result is None:
            self._saved = self._folder.begin()
            if self.done == run.solver.num_steps:  # only the result is missing
                self._finish()
            return
        solution, self._noisy = result
        self.result = dataclasses.replace(solution, report=run.report)
        _checks.warn(
            f"{run.owner}: {path} holds a finished run, whose result is returned "
            "without any evaluation. Give a new folder for a second release."
        )

    def __enter__(self) -> "AskTell":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder, so that another object can continue, and this one cannot.

        Without a folder this does nothing.
        """
        self._closed = self._folder is not None
        self._end.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise `TypeError`: a copy would use the same noise."""
        raise TypeError(f"{self._run.owner}: a search cannot be copied or pickled.")

    @property
    def done(self) -> int:
        """Number of steps made."""
        return self._saved.done

    @property
    def noisy_losses(self) -> NoisyLosses:
        """Pair: points whose noisy mean losses were released so far, and these losses.

        Shapes `(k, d)` and `(k,)`: all points of `NoisyUCB`, one of `RepeatAndSelect`
        after its end, none of solvers that release no loss.
        """
        if self._noisy is not None:
            return self._noisy
        with double_precision():
            state = jax.tree.map(jnp.asarray, self._saved.state)
            points, values = map(np.asarray, self._run.solver.noisy_losses(state))
        (path,) = jax.tree.leaves(self._run.first.path)
        return points.reshape(-1, path.shape[-1]), values

    def ask(self) -> Float[np.ndarray, "k d"]:
        """Return the points to evaluate next, one a row; no rows if the search is done.

        Until `tell` has taken losses, every call returns the same points.

        Raises:
            ValueError: The search was closed, or belongs to the process from which this
                one was forked, or the folder's lock file was deleted or replaced.
            OSError: The disk refuses.
        """
        with self._exclusive():
            while self.result is None:
                if self.done == self._run.solver.num_steps:
                    self._finish()
                    break
                if self._round is None:
                    self._round = self._begin()
                if self._round.open:
                    return self._round.points[self._round.open]
                self._release(self._round)  # without points, or after a disk error
        (start,) = jax.tree.leaves(self._run.first.path)
        return np.zeros((0, start.shape[-1]))

    def tell(self, losses: Sequence[Float[np.ndarray, " n"]]) -> None:
        """Take losses at the points of `ask`; make the step's release after the last.

        When all points have losses, the step is released.

        Args:
            losses: One row for each point, or for the first ones: a table of shape `(k,
                n)`, or a sequence of vectors. A record's loss is at the same place in
                every row. NaN counts as the worst loss.

        Raises:
            TypeError: The losses are no real numbers.
            ValueError: Their shapes do not fit, `ask` was not called, or as in `ask`.
                Nothing is taken then; the message names shapes and no loss.
            OSError: The disk refuses.
        """
        owner, n = self._run.owner, self._run.problem.num_records
        with self._exclusive():
            current = self._round
            if current is None or self.result is not None:
                raise ValueError(f"{owner}: no points to evaluate; call ask().")
            try:
                vectors = elements(losses)
                vectors = list(losses) if vectors is None else vectors
            except (TypeError, ValueError):
                got = type(losses).__name__
                raise TypeError(
                    f"{owner}: tell takes {n} losses for each point, got {got}."
                ) from None
            rows = [check_losses(owner, row, n) for row in vectors]
            if not 0 < len(rows) <= len(current.open):
                given, due = len(rows), len(current.open)
                raise ValueError(
                    f"{owner}: got losses at {given} points, but ask() has {due}."
                )
            for row in rows:
                index = current.open[0]
                if self._folder is not None:
                    point = current.points[index]
                    self._folder.keep_losses(self.done, index, point, row)
                current.losses[index] = row
                del current.open[0]
            if not current.open:
                self._release(current)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Enter a context for one thread; refuse a closed or forked search."""
        owner = self._run.owner
        if os.getpid() != self._process:
            raise ValueError(f"{owner}: the search belongs to process {self._process}.")
        with self._turn:
            if self._closed and self.result is None:
                raise ValueError(f"{owner}: the search was closed; use its folder.")
            yield

    def _begin(self) -> _Round:
        """Return the next step as a `_Round`, with the losses that a folder has."""
        run, saved = self._run, self._saved
        with double_precision():
            next_key, (key_ask, key_tell) = _keys(saved.key)
            ask = _ask if self._is_long else _short_ask
            proposal = ask(run.problem, run.solver, saved.state, key=key_ask)
            points = np.asarray(proposal.points, np.float64)
        losses = np.zeros((len(points), run.problem.num_records))
        missing = []
        for index in range(int(proposal.count)):  # a function of released values
            row = None
            if self._folder is not None:
                row = self._folder.losses(saved.done, index, points[index])
            if row is None:
                missing.append(index)
            else:
                losses[index] = row
        return _Round(next_key, key_tell, proposal, points, losses, missing)

    def _release(self, current: _Round) -> None:
        """Make and store the release of a round; finish the search after the last."""
        if current.after is None:  # otherwise writing an earlier release failed
            self._count()
            current.after = self._after(current)
        if self._folder is not None:
            self._folder.keep(current.after)
        self._saved, self._round = current.after, None
        if self.done == self._run.solver.num_steps:
            self._finish()

    def _after(self, current: _Round) -> Checkpoint:
        """Make the release of a round, and return the `Checkpoint` after it."""
        run, saved = self._run, self._saved
        key, next_key = current.key, current.next_key
        if self._folder is not None:
            # A copy of the folder whose losses differ has other noise.
            losses = current.losses.tobytes()
            key, next_key = follows(key, losses), follows(next_key, losses)
        with double_precision():
            tell = _tell if self._is_long else _short_tell
            inputs = saved.state, current.proposal, current.losses.T
            state = tell(run.problem, run.solver, *inputs, key=key)
            rows = run.solver.released(state)[None]
        return after(saved, next_key, 1, state, rows)

    @property
    def _is_long(self) -> bool:
        """Whether optimized programs save time, by public sizes alone."""
        sizes = sum(np.size(v) for v in jax.tree.leaves(self._run.first.state))
        not_measured = jax.default_backend() != "cpu"
        return not_measured or sizes * self._run.solver.num_steps > _SHORT

    def _finish(self) -> None:
        run, state = self._run, self._saved.state
        with double_precision():
            solution = solution_of(run.problem, run.solver, self._saved)
        if self._folder is not None:
            self._folder.finish(solution, self.noisy_losses)
        self.result = dataclasses.replace(solution, report=run.report)
        self.close()
        remarks = run.solver.remark(state), divergence(int(solution.rejected_updates))
        for remark in remarks:
            if remark is not None:  # a function of released values
                _checks.warn(f"{run.owner}: {remark}")


@jax.jit
def _keys(key):
    """Return the key of later steps, and the pair of keys of this `ask` and `tell`."""
    next_key, (step_key,) = step_keys(key, 1)
    return next_key, derive(step_key, "ask", "tell")


def _solver_ask(problem, solver, state, *, key):
    return solver.ask(problem, state, key=key)


def _solver_tell(problem, solver, state, proposal, losses, *, key):
    return solver.tell(problem, state, proposal, losses, key=key)


_ask, _tell = jax.jit(_solver_ask), jax.jit(_solver_tell)
_short_ask, _short_tell = (
    jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})
    for fun in (_solver_ask, _solver_tell)
)
