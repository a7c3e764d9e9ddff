"""A run in parts: how it begins, goes on from a checkpoint, and ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from ..privacy.noise import PRNGKey, step_keys
from . import checkpoint, lock, spending
from .checkpoint import Checkpoint
from .problem import AbstractProblem
from .solver import AbstractSolver

Part: TypeAlias = Callable[[Checkpoint, Key[Array, " steps"]], tuple[PyTree, PyTree]]


def first_checkpoint(
    problem: AbstractProblem,
    solver: AbstractSolver,
    w0: PyTree,
    *,
    key: PRNGKey,
    fingerprint: dict[str, Any],
    with_start: bool,
) -> Checkpoint:
    """A run before its first step.

    Args:
        problem: The problem.
        solver: The calibrated solver.
        w0: The starting point.
        key: The key of all steps.
        fingerprint: What must not change between the parts of the run.
        with_start: Whether row 0 of the trajectory is the start.
    """
    state = _on_host(solver.init(problem, w0))
    start = _on_host(solver.released(state))
    path = jax.tree.map(lambda v: v[None] if with_start else v[None][:0], start)
    return Checkpoint(0, key, state, path, fingerprint)


def run_in_parts(
    part: Part,
    saved: Checkpoint,
    num_steps: int,
    keep: Callable[[Checkpoint], None],
    *,
    chunk: int = 1,
) -> Checkpoint:
    """Runs the steps that are left; the bits do not depend on interruptions.

    Args:
        part: Maps the run so far and one key for each of the next steps to the state
            after them and the iterates that they released, one a row.
        saved: The run so far.
        num_steps: The steps of a whole run.
        keep: Called with the run after each part.
        chunk: The steps of a part; the last part may have fewer.

    Returns:
        The run after its last step.
    """
    while saved.done < num_steps:
        # The next checkpoint holds `key`, which does not tell the noise before it.
        key, keys = step_keys(saved.key, min(chunk, num_steps - saved.done))
        # Through the host each time, as after a resume, so that no bit can differ.
        state, rows = map(_on_host, part(saved, keys))
        path = jax.tree.map(lambda *v: np.concatenate(v), saved.path, rows)
        saved = Checkpoint(saved.done + len(keys), key, state, path, saved.fingerprint)
        keep(saved)
    return saved


def resumed(saved: Checkpoint, first: Checkpoint) -> Checkpoint:
    """A checkpoint from a file, as the run that began with `first` goes on from it.

    Args:
        saved: The checkpoint, with lists of leaves.
        first: The checkpoint before the first step, with the pytrees.
    """
    state, path = (
        jax.tree.unflatten(jax.tree.structure(tree), leaves)
        for tree, leaves in ((first.state, saved.state), (first.path, saved.path))
    )
    return Checkpoint(saved.done, saved.key, state, path, saved.fingerprint)


def check_same_run(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises unless what a run depends on is what it was when the run began.

    Args:
        folder: The folder of the run.
        then: What it depended on; public.
        now: What it would depend on; public.

    Raises:
        ValueError: Something changed; the message says what.
    """
    changed = _differences(then, now)
    if changed:
        raise ValueError(
            f"cannot resume {folder}: {'; '.join(changed[:3])}. Change it back, or "
            "give a new folder for a second release."
        )


def check_empty(name: str, folder: Path) -> None:
    """Raises where a folder holds more than its lock and what a crash left.

    Args:
        name: What to call the folder in an error.
        folder: The folder, which may not exist.

    Raises:
        ValueError: It holds something else.
    """
    ours = (checkpoint.TEMPORARY, lock.NAME)
    others = sorted(p.name for p in folder.glob("*") if p.name not in ours)
    if others:
        raise ValueError(
            f"{name} {folder} is not empty (it holds {others[0]!r}) and has no run to "
            "go on with; give a new folder."
        )


def finish_run(folder: Path, number: int) -> None:
    """Ends a run whose result is written.

    Args:
        folder: Its folder.
        number: Its number in the spending record.

    Raises:
        OSError: The disk refuses.
    """
    spending.finish(folder, number)
    checkpoint.remove(folder)


def _on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, jax.device_get(tree))


def _differences(then: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two nested values, in words."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            difference
            for key in then | now
            for difference in _differences(
                then.get(key), now.get(key), f"{name}.{key}" if name else key
            )
        ]
    if then == now:
        return []
    return [f"{name} was {_brief(then)}, is {_brief(now)}"]


def _brief(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
