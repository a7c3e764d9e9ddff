"""Folder of a search: its evaluations, checkpoint and result."""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from ..core.solution import Solution
from ..privacy.budget import PrivacyBudget
from ..privacy.report import PrivacyReport
from ..runs import checkpoint, spending
from ..runs.checkpoint import Checkpoint
from ..runs.interrupts import uninterruptible
from .base import BlackBox

_PATTERN = "evaluation-*.SECRET"
_NOTICE = (
    b"dpbilevel search 2. SECRET: it holds the key of future noise and may hold losses "
    b"of single records without noise. Keep it, or delete it; do not share it.\n"
)
# Number of the only search of a folder in the spending record.
_NUMBER = 1

Point = Float[np.ndarray, " d"]
Losses = Float[np.ndarray, " n"]  # of all records at a point
# Released points, one a row, and the noisy mean losses there.
NoisyLosses = tuple[Float[np.ndarray, "k d"], Float[np.ndarray, " k"]]
Result = tuple[Solution, NoisyLosses]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder with every evaluation and a checkpoint of every step. SECRET."""

    path: Path  # its lock is held
    check: Callable[[], None]  # raises if the lock was lost
    report: PrivacyReport
    first: Checkpoint  # before the first step

    @property
    def _public(self) -> dict[str, Any]:
        return self.first.fingerprint["run"]

    def result(self) -> Result | None:
        """Return the `Solution` and the noisy losses of a finished run, or `None`.

        Raises:
            ValueError: Another run finished here, or its result is damaged.
        """
        file = self.path / checkpoint.SEARCH
        if not file.is_file():
            return None
        try:
            page = json.loads(file.read_bytes())
            value, path = np.asarray(page["value"]), np.asarray(page["trajectory"])
            rejected = int(page.get("rejected_updates", 0))
            noisy = page["noisy_losses"]
            at, values = np.asarray(noisy["points"]), np.asarray(noisy["values"])
            checkpoint.check_same_run(self.path, page, {"run": self._public})
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{file} is damaged or of another version: {error}. Give a new folder."
            ) from error
        self._close()
        points = at.reshape(-1, value.size)  # also where there is none
        return Solution(value, path, rejected), (points, values)

    def begin(self) -> Checkpoint:
        """Record the spending of a run, and return its `Checkpoint`, resumed or new.

        Raises:
            ValueError: The folder holds another run or something else, or the total
                spending would exceed a limit of a folder above it.
            OSError: The disk refuses.
        """
        saved = self._resume()
        self._forget(saved.done)
        try:
            spending.begin(self.path, _NUMBER, self.report, self._public)
        except ValueError:
            begun = spending.read(self.path).runs or list(self.path.glob(_PATTERN))
            if saved.done == 0 and not begun:  # nothing was evaluated
                checkpoint.remove(self.path)
            raise
        return saved

    def losses(self, step: int, number: int, point: Point) -> Losses | None:
        """Return the stored losses of all records at a point, or `None`.

        Raises:
            ValueError: The stored evaluation is damaged, or from another point; or the
                lock of the folder was lost.
            OSError: The disk refuses.
        """
        self.check()
        file = self._evaluation(step, number)
        return _parse(file, point) if file.is_file() else None

    def keep_losses(self, step: int, number: int, point: Point, losses: Losses) -> None:
        """Store all records' losses at a point.

        Raises:
            ValueError: The lock of the folder was lost.
            OSError: The disk refuses.
        """
        self.check()
        content = checkpoint.npz({"point": point, "losses": losses})
        checkpoint.replace(self._evaluation(step, number), content, mode=0o600)

    def keep(self, saved: Checkpoint) -> None:
        """Replace the checkpoint, then delete the evaluations of finished steps.

        Raises:
            ValueError: The lock of the folder was lost.
            OSError: The disk refuses; the previous checkpoint is intact.
        """
        self.check()
        checkpoint.write(self.path, saved, notice=_NOTICE)
        self._forget(saved.done)

    def finish(self, solution: Solution, noisy: NoisyLosses) -> None:
        """Write the result: released values and public ones only.

        Args:
            solution: The released solution.
            noisy: The released noisy losses, with their points.

        Raises:
            ValueError: The lock of the folder was lost.
            OSError: The disk refuses; the last checkpoint is intact.
        """
        page = {
            "format": 1,
            "value": np.asarray(solution.value).tolist(),
            "trajectory": np.asarray(solution.trajectory).tolist(),
            "rejected_updates": solution.rejected_updates,
            "noisy_losses": {"points": noisy[0].tolist(), "values": noisy[1].tolist()},
            "run": self._public,
        }
        with uninterruptible():
            self.check()
            checkpoint.replace_json(self.path / checkpoint.SEARCH, page)
            self._close()

    def _evaluation(self, step: int, number: int) -> Path:
        return self.path / f"evaluation-{step}-{number}.SECRET"

    def _resume(self) -> Checkpoint:
        """Return the `Checkpoint` of the run, written first if there is none."""
        file = self.path / checkpoint.NAME
        if not file.is_file():
            checkpoint.check_empty("folder", self.path)
            checkpoint.write(self.path, self.first, notice=_NOTICE)
        try:
            saved = checkpoint.read(self.path, notice=_NOTICE)
        except ValueError:
            raise ValueError(
                f"{file} is damaged or of another version. Give a new folder."
            ) from None
        records = (
            "the records, their order, or their evaluation (in a PrivateSearch also "
            "the estimator, its losses, the space and the training records)"
        )
        return checkpoint.resume_run(self.path, saved, self.first, records)

    def _forget(self, done: int) -> None:
        """Delete the evaluations of steps before `done`."""
        for file in self.path.glob(_PATTERN):
            if int(file.name.split("-")[1]) < done:
                file.unlink()

    def _close(self) -> None:
        """End a run whose result is written."""
        spending.finish(self.path, _NUMBER)
        for file in self.path.glob(f"{_PATTERN}*"):
            file.unlink()


def _parse(file: Path, point: Point) -> Losses:
    """Read a file of all records' losses, checked to be those at `point`."""
    content = io.BytesIO(file.read_bytes())
    try:
        with np.load(content, allow_pickle=False) as arrays:
            stored, losses = arrays["point"], arrays["losses"]
    except Exception:
        raise ValueError(f"{file} is damaged. Delete it to evaluate again.") from None
    if not np.array_equal(stored, point):  # bit for bit
        raise ValueError(
            f"{file} holds losses at another point. Continue on the machine of the run."
        )
    return losses


def fingerprint(
    problem: BlackBox, solver, w0, budget: PrivacyBudget | None, report
) -> dict[str, Any]:
    """Return a dict of what a resumed run must not change: `run` and `records`."""
    public = {
        "budget": budget and {"epsilon": budget.epsilon, "delta": budget.delta},
        "solver": solver,
        "box": problem.w_set,
        "records": problem.num_records,
        "evaluates": problem.evaluates,
        "w0": w0,
        "software": checkpoint.software(),
        "report": report and json.loads(report.to_json()),
    }
    page = json.dumps(public, default=checkpoint.as_json)
    return {"run": json.loads(page), "records": problem.records}
