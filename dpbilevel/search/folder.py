"""Where a search keeps its evaluations: nowhere, or in a folder that outlives it."""

import dataclasses
import enum
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core import checkpoint, lock, spending
from ..core.checkpoint import Checkpoint
from ..privacy.report import PrivacyReport
from .problem import BlackBox

_PATTERN = "evaluation-*.SECRET"
_NOTICE = (
    b"dpbilevel search 2. SECRET: it holds the key of the noise still to come and may "
    b"hold losses of single records without noise. Keep it, or delete it; do not share "
    b"it.\n"
)
# A folder has one search, so that its number in the spending record is this.
_NUMBER = 1


class Memory:
    """Keeps nothing."""

    def losses(
        self,
        step: int,
        number: int,
        point: np.ndarray,
        evaluate: Callable[[], np.ndarray],
    ) -> np.ndarray:
        """The evaluation itself.

        Args:
            step: The number of the step.
            number: The number of the point in it.
            point: The point.
            evaluate: Evaluates the losses there.
        """
        return evaluate()

    def keep(self, saved: Checkpoint) -> None:
        """Keeps nothing.

        Args:
            saved: The run after a step.
        """


@dataclasses.dataclass(frozen=True)
class Folder:
    """Keeps every evaluation as it is made, and a checkpoint after every step. SECRET.

    Args:
        path: The folder, under its lock.
        report: The guarantee of the run.
        public: What must not change between the parts of a run.
        records: What tells its records, and what is evaluated on them, from others;
            nor must that. SECRET.
    """

    path: Path
    report: PrivacyReport
    public: dict[str, Any]
    records: str = dataclasses.field(default="", repr=False)

    def finished(self) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Answer, released iterates and number of rejected updates of a finished run.

        Raises:
            ValueError: Another run finished here, or its result is damaged.
        """
        file = self.path / checkpoint.SEARCH
        if not file.is_file():
            return None
        try:
            page = json.loads(file.read_text(encoding="utf-8"))
            value, path = np.asarray(page["value"]), np.asarray(page["trajectory"])
            found = value, path, int(page.get("rejected_updates", 0))
            self._check_same(page["run"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{file} is damaged or of another version of dpbilevel: {error}. Give "
                "a new folder: a second release, on top of what this one cost."
            ) from error
        self._settle()
        return found

    def begun(self, first: Checkpoint) -> Checkpoint:
        """The interrupted run, or the first checkpoint of a new one; both on record.

        Args:
            first: The run before its first step.

        Raises:
            ValueError: The folder holds another run or something else.
            OSError: The disk refuses.
        """
        if (self.path / checkpoint.NAME).is_file():
            saved = self._interrupted()
        else:
            self._check_unused()
            parts = {"run": self.public, "records": self.records}
            saved = dataclasses.replace(first, fingerprint=parts)
            checkpoint.write(self.path, saved, notice=_NOTICE)
        spending.begin(self.path, _NUMBER, self.report, self.public)
        return saved

    def losses(
        self,
        step: int,
        number: int,
        point: np.ndarray,
        evaluate: Callable[[], np.ndarray],
    ) -> np.ndarray:
        """What was kept of this evaluation, or the evaluation, kept.

        Args:
            step: The number of the step.
            number: The number of the point in it.
            point: The point.
            evaluate: Evaluates the losses there.

        Raises:
            ValueError: What was kept is damaged, or from another point.
            OSError: The disk refuses.
        """
        file = self.path / f"evaluation-{step}-{number}.SECRET"
        if file.is_file():
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    kept, found = arrays["point"], arrays["losses"]
            except Exception:
                raise ValueError(
                    f"{file} is damaged; delete it, and its point is evaluated again."
                ) from None
            if not np.array_equal(kept, point):
                raise ValueError(
                    f"{file} holds the losses at another point than the run asks for, "
                    "as after a change of hardware. Go on where the run began."
                )
            return found
        found, buffer = evaluate(), io.BytesIO()
        np.savez(buffer, point=point, losses=found)
        checkpoint.replace(file, buffer.getvalue(), mode=0o600)
        return found

    def keep(self, saved: Checkpoint) -> None:
        """Replaces the checkpoint, then forgets the evaluations of the steps done.

        Args:
            saved: The run after a step.

        Raises:
            OSError: The disk refuses; the previous checkpoint is intact.
        """
        checkpoint.write(self.path, saved, notice=_NOTICE)
        self._forget(saved.done)

    def finish(self, value: np.ndarray, path: np.ndarray, rejected: int) -> None:
        """Writes the result; released values and public ones only.

        Args:
            value: The answer.
            path: The released iterates.
            rejected: The number of rejected updates.

        Raises:
            OSError: The disk refuses; the last checkpoint is intact.
        """
        page = {
            "format": 1,
            "value": value.tolist(),
            "trajectory": path.tolist(),
            "rejected_updates": rejected,
            "run": self.public,
        }
        text = json.dumps(page, indent=2) + "\n"
        checkpoint.replace(self.path / checkpoint.SEARCH, text.encode())
        self._settle()

    def _interrupted(self) -> Checkpoint:
        try:
            saved = checkpoint.read(self.path, notice=_NOTICE)
        except ValueError:
            raise ValueError(
                f"{self.path / checkpoint.NAME} is damaged or not of a search by this "
                "version of dpbilevel. Give a new folder: a second release, on top of "
                "what this one cost. An older copy would use noise again."
            ) from None
        self._check_same(saved.fingerprint["run"])
        if saved.fingerprint["records"] != self.records:
            raise ValueError(
                f"cannot resume {self.path}: the records, their order, or what is "
                "evaluated on them (in a PrivateSearch also the estimator, its losses, "
                "the space and the training records) are not those the run began with. "
                "Give the same ones, or a new folder for a second release."
            )
        self._forget(saved.done)
        return saved

    def _check_same(self, before: dict[str, Any]) -> None:
        changed = checkpoint.differences(before, self.public)
        if changed:
            raise ValueError(
                f"cannot resume {self.path}: {'; '.join(changed[:3])}. Change it back, "
                "or give a new folder for a second release."
            )

    def _check_unused(self) -> None:
        ours = (checkpoint.TEMPORARY, lock.NAME)
        others = sorted(p.name for p in self.path.iterdir() if p.name not in ours)
        if others:
            raise ValueError(
                f"minimize: folder {self.path} is not empty (it holds {others[0]!r}) "
                "and has no search to go on with; give a new folder."
            )

    def _forget(self, done: int) -> None:
        """Deletes the evaluations of steps before `done`."""
        for file in self.path.glob(_PATTERN):
            if int(file.name.split("-")[1]) < done:
                file.unlink()

    def _settle(self) -> None:
        """Ends a run whose result is written."""
        spending.finish(self.path, _NUMBER)
        checkpoint.remove(self.path)
        for file in self.path.glob(f"{_PATTERN}*"):
            file.unlink()


def described(problem: BlackBox, solver: Any, w0: Any) -> dict[str, Any]:
    """What must not change between the parts of a run; all of it public.

    Args:
        problem: The black box, of which the set, the number of records and what it
            says of itself are read.
        solver: The calibrated solver.
        w0: The start.
    """
    found = {
        "solver": _described(solver),
        "box": _described(problem.w_set),
        "records": problem.num_records,
        "evaluates": problem.evaluates,
        "w0": _described(w0),
        "software": checkpoint.software(),
    }
    return json.loads(json.dumps(found))


def _described(value: Any) -> Any:
    """A value as JSON has it; functions by their name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__} | _described(fields)
    match value:
        case None | bool() | int() | float() | str():
            return value
        case enum.Enum():
            return value.value
        case dict():
            return {str(k): _described(v) for k, v in value.items()}
        case list() | tuple():
            return [_described(v) for v in value]
        case np.ndarray() | np.generic() | jax.Array():
            return np.asarray(value).tolist()
    return getattr(value, "__qualname__", type(value).__qualname__)
