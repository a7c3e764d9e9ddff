"""Rounds of a search: points, all records' losses there, and a release."""

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
from jaxtyping import Float

from .. import _checks
from ..core.columns import Column, elements
from ..core.solution import Solution, divergence
from ..core.spent import begun
from ..privacy.exact.floats import double_precision
from ..privacy.noise import PRNGKey, derive, follows, step_keys
from ..privacy.report import PrivacyReport
from ..runs import lock
from ..runs.checkpoint import Checkpoint, after, solution_of
from .base import Proposal
from .folder import Folder, NoisyLosses
from .run import Run

# Limit of the size of the state times the number of steps below which the optimization
# of a program takes longer than it saves: on one core both were equal at 3e7.
_SHORT = 20_000_000


@dataclasses.dataclass(repr=False)
class _Round:
    """A step with proposed points; `losses` are SECRET."""

    next_key: PRNGKey  # of the steps after this one
    key: PRNGKey  # of the releases of this step
    proposal: Proposal
    points: Float[np.ndarray, "q d"]
    losses: Float[np.ndarray, "q n"]
    open: list[int]  # indices of the points without losses
    after: Checkpoint | None = None  # the run after the release of this step


class Rounds:
    """A search in progress on the host. SECRET: it holds losses and future keys.

    It holds the lock of its folder until it is closed, finished or deleted. A step must
    not be made twice, because both releases would have the same noise: a closed search,
    a copy and a forked process are refused.

    Args:
        run: The plan.
        folder: Folder of evaluations, checkpoint and result; `None` keeps them in
            memory.

    Attributes:
        solution: The released solution; `None` until the search is finished.
        done: Number of steps made.

    Raises:
        ValueError: The folder holds something else or a run on other records.
        OSError: The disk refuses.
    """

    def __init__(self, run: Run, folder: Path | str | None):
        self.solution: Solution | None = None
        self._noisy: NoisyLosses | None = None  # set if an earlier run finished
        self._run, self._saved = run, run.first
        self._round: _Round | None = None
        self._folder: Folder | None = None
        self._end = contextlib.ExitStack()
        self._process, self._turn = os.getpid(), threading.Lock()
        self._closed = False
        if folder is not None:
            with contextlib.ExitStack() as end:
                check = end.enter_context(lock.held(Path(folder)))
                self._open(Path(folder), check)
                if self.solution is None:
                    self._end = end.pop_all()  # the lock stays
        if self.solution is not None:
            return
        name = f"{run.owner}: {type(run.solver).__name__}"
        size, relation = run.problem.num_records, run.solver.neighbours.value
        self._count = begun(name, relation, run.costs, size, None)
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
        self.solution = dataclasses.replace(solution, report=run.report)
        _checks.warn(
            f"{run.owner}: {path} holds a finished run, whose result is returned "
            "without any evaluation. Give a new folder for a second release."
        )

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder, so that another object can continue the search."""
        self._closed = self._folder is not None
        self._end.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise `TypeError`: a copy would use the same noise."""
        raise TypeError(
            f"{self._run.owner}: a search in progress cannot be copied or pickled, "
            "because the copies would have the same noise. Continue it by folder=."
        )

    @property
    def report(self) -> PrivacyReport | None:
        """Guarantee of the run; `None` without a budget."""
        return self._run.report

    @property
    def done(self) -> int:
        """Number of steps made."""
        return self._saved.done

    @property
    def noisy_losses(self) -> NoisyLosses:
        """Points whose noisy mean losses were released so far, and these losses."""
        if self._noisy is not None:
            return self._noisy
        with double_precision():
            state = jax.tree.map(jnp.asarray, self._saved.state)
            points, values = map(np.asarray, self._run.solver.noisy_losses(state))
        (path,) = jax.tree.leaves(self._run.first.path)
        return points.reshape(-1, path.shape[-1]), values

    def ask(self) -> Float[np.ndarray, "k d"]:
        """Return the points of this round without losses; none after the last round.

        Raises:
            ValueError: The search was closed, or belongs to another process.
        """
        with self._exclusive():
            return self._ask()

    def _ask(self) -> Float[np.ndarray, "k d"]:
        while self.solution is None:
            if self.done == self._run.solver.num_steps:
                self._finish()
                break
            if self._round is None:
                self._round = self._begin()
            if self._round.open:
                return self._round.points[self._round.open]
            self._release(self._round)  # a step without points, or after a disk error
        (start,) = jax.tree.leaves(self._run.first.path)
        return np.zeros((0, start.shape[-1]))

    def tell(self, losses: Sequence[Any]) -> None:
        """Take losses at the first points of `ask`, and release after the last of them.

        Args:
            losses: One vector for each point, with the loss of every record.

        Raises:
            TypeError: The losses are no real numbers.
            ValueError: Their shapes do not fit, no points were asked for, or as
                `ask`. Nothing is kept then.
            OSError: The disk refuses.
        """
        with self._exclusive():
            self._tell(losses)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Admit one thread at a time, and no closed or forked search."""
        owner = self._run.owner
        if os.getpid() != self._process:
            raise ValueError(
                f"{owner}: this search belongs to process {self._process}, from which "
                "this one was forked. Call ask and tell there."
            )
        with self._turn:
            if self._closed and self.solution is None:
                raise ValueError(
                    f"{owner}: the search was closed. Make another object with the "
                    "same arguments and folder, which continues it."
                )
            yield

    def _tell(self, losses: Sequence[Any]) -> None:
        current = self._round
        if current is None or self.solution is not None:
            raise ValueError(f"{self._run.owner}: no points to evaluate; call ask().")
        owner, n = self._run.owner, self._run.problem.num_records
        try:
            vectors = elements(losses)
            vectors = list(losses) if vectors is None else vectors
        except (TypeError, ValueError):
            raise TypeError(
                f"{owner}: tell takes one row of {n} losses for each point, got "
                f"{type(losses).__name__}. Give a list of rows or an array."
            ) from None
        rows = [_check_losses(owner, row, n) for row in vectors]
        if not 0 < len(rows) <= len(current.open):
            raise ValueError(
                f"{owner}: got losses at {len(rows)} points, but ask() returns "
                f"{len(current.open)}. Give one row for each, or for the first ones."
            )
        for row in rows:
            index = current.open[0]
            if self._folder is not None:
                point = current.points[index]
                row = self._folder.keep_losses(self.done, index, point, row)
            current.losses[index] = row
            del current.open[0]
        if not current.open:
            self._release(current)

    def _begin(self) -> _Round:
        """Return the next step's points, with the losses that a folder has."""
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
        """End a round, and after the last one the search."""
        if current.after is None:  # otherwise writing an earlier release failed
            self._count()
            current.after = self._after(current)
        if self._folder is not None:
            self._folder.keep(current.after)
        self._saved, self._round = current.after, None
        if self.done == self._run.solver.num_steps:
            self._finish()

    def _after(self, current: _Round) -> Checkpoint:
        """Return the run after the release of a round."""
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
        self.solution = dataclasses.replace(solution, report=run.report)
        self.close()
        remarks = run.solver.remark(state), divergence(int(solution.rejected_updates))
        for remark in remarks:
            if remark is not None:  # a function of released values
                _checks.warn(f"{run.owner}: {remark}")


def _check_losses(owner: str, value: Any, n: int) -> Float[np.ndarray, " n"]:
    """Return the losses at a point; errors name shapes and types, never a value."""
    try:
        column = Column.of(value)  # entry by entry: one may be no number
    except (TypeError, ValueError):
        column = None
    if column is None or column.kind == "texts" or _is_object(column):
        raise TypeError(
            f"{owner}: the losses at a point must be a vector of {n} real numbers, got "
            f"{type(value).__name__} of {getattr(value, 'dtype', 'objects')}. Give "
            "numpy.asarray(..., float)."
        )
    losses = column.numbers()
    if losses.shape != (n,):
        raise ValueError(
            f"{owner}: the losses at a point must be one per record, shape ({n},), got "
            f"shape {losses.shape}. Give no mean over records, and NaN for all records "
            "if training on unprotected data fails."
        )
    # Under jax_debug_nans JAX would raise because of one record's NaN.
    return np.where(np.isnan(losses), np.inf, losses)


def _is_object(column: Column) -> bool:
    """Return whether the value was one object, and no column."""
    return column.kind == "objects" and column.entries.ndim == 0


@jax.jit
def _keys(key):
    """Return the key of later steps, and the keys of one step, as in `solve`."""
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
