"""The rounds of a search: points, everyone's losses there, and a release."""

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

from ..core.columns import Column, elements
from ..core.solution import Solution, divergence
from ..core.spent import begun
from ..privacy.exact.floats import double_precision
from ..privacy.noise import PRNGKey, derive, follows, step_keys
from ..privacy.report import PrivacyReport
from ..runs import lock
from ..runs.checkpoint import Checkpoint
from ..runs.resume import after, solution_of
from .base import Proposal
from .folder import Folder, NoisyLosses
from .run import Run

# Numbers of a state times steps below which optimizing a program takes longer than it
# saves in a run: on one core it broke even at 3e7 in 10 and in 60 dimensions.
_SHORT = 20_000_000


@dataclasses.dataclass(repr=False)
class _Round:
    """A step that has asked; `losses` are SECRET."""

    next_key: PRNGKey  # of the steps after this one
    key: PRNGKey  # of what this step releases
    proposal: Proposal
    points: Float[np.ndarray, "q d"]
    losses: Float[np.ndarray, "q n"]
    open: list[int]  # the numbers of points without losses
    after: Checkpoint | None = None  # the run once this step is released


class Rounds:
    """A search in progress on the host. SECRET: it holds losses and keys to come.

    Under the lock of its folder until it is closed, finished or forgotten. Whatever
    else could make a step twice is refused, because both would have the same noise:
    going on after it was closed, in a copy, or in a process that was forked.

    Args:
        run: The plan.
        folder: Where evaluations, checkpoint and result are kept; `None` keeps them in
            memory alone.

    Attributes:
        solution: What was released, once the search is finished; until then `None`.
        remarks: What to warn of then, from released values.
        done: The number of steps made.

    Raises:
        ValueError: The folder holds something else or a run on other records.
        OSError: The disk refuses.
    """

    def __init__(self, run: Run, folder: Path | str | None):
        self.solution: Solution | None = None
        self._noisy: NoisyLosses | None = None  # set if the run was finished before
        self.remarks: list[str] = []
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
            # An earlier step, or the first training, may already have been seen.
            self._count()

    def _open(self, path: Path, check: Callable[[], None]) -> None:
        run = self._run
        assert run.report is not None  # a folder without a budget was refused
        self._folder = Folder(path, check, run.report, run.first)
        found = self._folder.result()
        if found is None:
            self._saved = self._folder.begin()
            if self.done == run.solver.num_steps:  # it stopped in its last moment
                self._finish()
            return
        solution, self._noisy = found
        self.solution = dataclasses.replace(solution, report=run.report)
        self.remarks.append(
            f"{path} holds a finished run, whose result is returned; nothing was "
            "evaluated, whatever the records are now. For a new run, a second "
            "release, give a new folder."
        )

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets the folder go; the search can go on in another object, not in this."""
        self._closed = self._folder is not None
        self._end.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `TypeError`: a copy would use the same noise."""
        raise TypeError(
            f"{self._run.owner}: a search in progress cannot be copied or pickled, "
            "since both would release with the same noise; go on by folder=, in one "
            "object at a time."
        )

    @property
    def report(self) -> PrivacyReport | None:
        """The guarantee; `None` if there was no budget to plan for."""
        return self._run.report

    @property
    def done(self) -> int:
        """The number of steps made."""
        return self._saved.done

    @property
    def noisy_losses(self) -> NoisyLosses:
        """Points and noisy mean losses that were released so far."""
        if self._noisy is not None:
            return self._noisy
        with double_precision():
            state = jax.tree.map(jnp.asarray, self._saved.state)
            points, values = map(np.asarray, self._run.solver.noisy_losses(state))
        (path,) = jax.tree.leaves(self._run.first.path)
        return points.reshape(-1, path.shape[-1]), values

    def ask(self) -> Float[np.ndarray, "k d"]:
        """The points of this round that have no losses yet; at the end of all, none.

        Raises:
            ValueError: It was closed, or is that of another process.
        """
        with self._in_turn():
            return self._asked()

    def _asked(self) -> Float[np.ndarray, "k d"]:
        while self.solution is None:
            if self.done == self._run.solver.num_steps:
                self._finish()
                break
            if self._round is None:
                self._round = self._begin()
            if self._round.open:
                return self._round.points[self._round.open]
            self._release(self._round)  # asks for nothing, or the disk refused
        (start,) = jax.tree.leaves(self._run.first.path)
        return np.zeros((0, start.shape[-1]))

    def tell(self, losses: Sequence[Any]) -> None:
        """Takes losses at the first points of `ask`, and releases at the last of them.

        Args:
            losses: For every point one vector with everyone's loss.

        Raises:
            TypeError: They are no real numbers.
            ValueError: Their shapes do not fit, no points were asked for, or as
                `ask`. Nothing is kept then.
            OSError: The disk refuses.
        """
        with self._in_turn():
            self._told(losses)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One thread at a time, and only where no other object can go on."""
        owner = self._run.owner
        if os.getpid() != self._process:
            raise ValueError(
                f"{owner}: this search is that of process {self._process}, from which "
                "this one was forked; call ask and tell there."
            )
        with self._turn:
            if self._closed and self.solution is None:
                raise ValueError(
                    f"{owner}: the search was closed; make another object with the "
                    "same arguments and folder, which goes on."
                )
            yield

    def _told(self, losses: Sequence[Any]) -> None:
        current = self._round
        if current is None or self.solution is not None:
            raise ValueError(f"{self._run.owner}: no points to evaluate; call ask().")
        owner, n = self._run.owner, self._run.problem.num_records
        try:
            listed = elements(losses)
            given = list(losses) if listed is None else listed
        except (TypeError, ValueError):
            raise TypeError(
                f"{owner}: tell takes one row of {n} losses for each point, got "
                f"{type(losses).__name__}. Give a list of rows or an array."
            ) from None
        rows = [_checked(owner, row, n) for row in given]
        if not 0 < len(rows) <= len(current.open):
            raise ValueError(
                f"{owner}: got the losses at {len(rows)} points, where ask() returns "
                f"{len(current.open)}; give one row for each of them, or for the first "
                "ones."
            )
        for row in rows:
            number = current.open[0]
            if self._folder is not None:
                at = self.done, number, current.points[number]
                row = self._folder.keep_losses(*at, row)
            current.losses[number] = row
            del current.open[0]
        if not current.open:
            self._release(current)

    def _begin(self) -> _Round:
        """The next step's points, with the losses that a folder has."""
        run, saved = self._run, self._saved
        with double_precision():
            next_key, (key_ask, key_tell) = _keys(saved.key)
            ask = _ask if self._is_long else _short_ask
            proposal = ask(run.problem, run.solver, saved.state, key=key_ask)
            points = np.asarray(proposal.points, np.float64)
        losses = np.zeros((len(points), run.problem.num_records))
        missing = []
        for number in range(int(proposal.count)):  # public: by released values alone
            at = saved.done, number, points[number]
            kept = None if self._folder is None else self._folder.losses(*at)
            if kept is None:
                missing.append(number)
            else:
                losses[number] = kept
        return _Round(next_key, key_tell, proposal, points, losses, missing)

    def _release(self, current: _Round) -> None:
        """Ends a round, and after the last one the search."""
        if current.after is None:  # else the disk refused the release that was made
            self._count()
            current.after = self._released(current)
        if self._folder is not None:
            self._folder.keep(current.after)
        self._saved, self._round = current.after, None
        if self.done == self._run.solver.num_steps:
            self._finish()

    def _released(self, current: _Round) -> Checkpoint:
        run, saved = self._run, self._saved
        key, next_key = current.key, current.next_key
        if self._folder is not None:
            # A copy of the folder that is told other losses has other noise.
            told = current.losses.tobytes()
            key, next_key = follows(key, told), follows(next_key, told)
        with double_precision():
            given = saved.state, current.proposal, current.losses.T
            tell = _tell if self._is_long else _short_tell
            state = tell(run.problem, run.solver, *given, key=key)
            rows = run.solver.released(state)[None]
        return after(saved, next_key, 1, state, rows)

    @property
    def _is_long(self) -> bool:
        """Whether optimized programs are worth their time, by public sizes alone."""
        sizes = sum(np.size(v) for v in jax.tree.leaves(self._run.first.state))
        unknown = jax.default_backend() != "cpu"  # not measured
        return unknown or sizes * self._run.solver.num_steps > _SHORT

    def _finish(self) -> None:
        run, state = self._run, self._saved.state
        with double_precision():
            solution = solution_of(run.problem, run.solver, self._saved)
        if self._folder is not None:
            self._folder.finish(solution, self.noisy_losses)
        said = run.solver.remark(state), divergence(int(solution.rejected_updates))
        self.remarks += [remark for remark in said if remark is not None]
        self.solution = dataclasses.replace(solution, report=run.report)
        self.close()


def _checked(owner: str, value: Any, n: int) -> Float[np.ndarray, " n"]:
    """The losses at a point, checked without a word about their values."""
    try:
        column = Column.of(value)  # where the loss of one record may be no number
    except (TypeError, ValueError):
        column = None
    if column is None or column.kind == "texts" or _is_object(column):
        raise TypeError(
            f"{owner}: the losses at a point must be a vector of {n} real numbers, got "
            f"{type(value).__name__} of {getattr(value, 'dtype', 'objects')}; give "
            "numpy.asarray(..., float)."
        )
    found = column.numbers()
    if found.shape != (n,):
        raise ValueError(
            f"{owner}: the losses at a point must be one per record, shape ({n},), got "
            f"shape {found.shape}. Give no mean over records; where training on "
            "data that are not protected fails, give NaN for every record."
        )
    # Under jax_debug_nans JAX would raise where one record's loss is NaN.
    return np.where(np.isnan(found), np.inf, found)


def _is_object(column: Column) -> bool:
    """Whether it is one object, and no column."""
    return column.kind == "objects" and column.entries.ndim == 0


@jax.jit
def _keys(key):
    """The key of the steps after one, and the keys of that one as `solve` has them."""
    following, (own,) = step_keys(key, 1)
    return following, derive(own, "ask", "tell")


def _asked(problem, solver, state, *, key):
    return solver.ask(problem, state, key=key)


def _told(problem, solver, state, asked, losses, *, key):
    return solver.tell(problem, state, asked, losses, key=key)


_ask, _tell = jax.jit(_asked), jax.jit(_told)
_short_ask, _short_tell = (
    jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})
    for fun in (_asked, _told)
)
