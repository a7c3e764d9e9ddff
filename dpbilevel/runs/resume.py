"""Runs in parts: how they begin, go on from a checkpoint, and end."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from ..core.descent import rejected_updates
from ..core.problem import AbstractProblem
from ..core.solution import Solution
from ..core.solver import AbstractSolver
from ..privacy.noise import PRNGKey, step_keys
from . import checkpoint, lock, spending
from .checkpoint import Checkpoint


def first_checkpoint(
    problem: AbstractProblem,
    solver: AbstractSolver,
    w0: PyTree,
    *,
    key: PRNGKey,
    fingerprint: dict[str, Any],
    with_start: bool,
) -> Checkpoint:
    """Return a run before its first step.

    `fingerprint` holds the facts that must not change between the parts of the run.
    With `with_start` the initial point is row 0 of its path.
    """
    state = _on_host(solver.init(problem, w0))
    start = _on_host(solver.released(state))
    path = jax.tree.map(lambda v: v[None] if with_start else v[None][:0], start)
    return Checkpoint(0, key, state, path, fingerprint)


def run_in_parts(
    part: Callable[[Checkpoint, Key[Array, " steps"]], tuple[PyTree, PyTree]],
    saved: Checkpoint,
    num_steps: int,
    keep: Callable[[Checkpoint], None],
    *,
    chunk: int = 1,
) -> Checkpoint:
    """Run the steps that are left; the bits do not depend on interruptions.

    Args:
        part: Maps the run so far and one key for each of the next steps to the state
            after them and the iterates that they released, one a row.
        saved: The run so far.
        num_steps: Number of steps of a whole run.
        keep: Called with the run after each part.
        chunk: Number of steps of a part; the last part may have fewer.
    """
    while saved.done < num_steps:
        # The next checkpoint holds `key`, from which earlier noise cannot be computed.
        key, keys = step_keys(saved.key, min(chunk, num_steps - saved.done))
        saved = after(saved, key, len(keys), *part(saved, keys))
        keep(saved)
    return saved


def after(
    saved: Checkpoint, key: PRNGKey, steps: int, state: PyTree, rows: PyTree
) -> Checkpoint:
    """Return the run after further steps.

    Args:
        saved: The run before these steps.
        key: The key of the steps to come.
        steps: Number of steps made.
        state: The state after the steps.
        rows: The iterates that they released, one a row.
    """
    # Through the host each time, as after a resume, so that no bit can differ.
    state, rows = _on_host(state), _on_host(rows)
    path = jax.tree.map(lambda *v: np.concatenate(v), saved.path, rows)
    return Checkpoint(saved.done + steps, key, state, path, saved.fingerprint)


def resume_run(
    folder: Path, saved: Checkpoint, first: Checkpoint, records: str = "the records"
) -> Checkpoint:
    """Return an interrupted run, checked to be the same as at its beginning.

    Args:
        folder: Its folder.
        saved: Its checkpoint, as read.
        first: The same run before its first step, as it would begin now.
        records: Name of what `fingerprint["records"]` identifies, for a message.

    Raises:
        ValueError: Something that the run depends on has changed.
    """
    check_same_run(folder, saved.fingerprint, first.fingerprint)
    if saved.fingerprint["records"] != first.fingerprint["records"]:
        raise ValueError(
            f"cannot resume {folder}: {records} are not those the run began with. Give "
            "the same ones, or a new folder for a second release."
        )
    state, path = (
        jax.tree.unflatten(jax.tree.structure(tree), leaves)
        for tree, leaves in ((first.state, saved.state), (first.path, saved.path))
    )
    return dataclasses.replace(saved, state=state, path=path)


def check_same_run(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that two fingerprints agree in all but `records`, whose hash is SECRET.

    Raises:
        ValueError: The message says what changed.
    """
    for part in [k for k in now if k != "records"]:
        changed = _differences(then[part], now[part], part)
        if changed and part == "program":  # it is a hash
            changed = ["the loss or the solver has changed"]
        if changed:
            raise ValueError(
                f"cannot resume {folder}: {'; '.join(changed[:3])}. Change it back, or "
                "give a new folder for a second release."
            )


def solution_of(
    problem: AbstractProblem, solver: AbstractSolver, saved: Checkpoint
) -> Solution:
    """Return what a run released, by its last checkpoint, as NumPy arrays."""
    state = jax.tree.map(jnp.asarray, saved.state)
    value = _on_host(solver.answer(problem, state))
    return Solution(value, saved.path, int(rejected_updates(state)))


def check_empty(name: str, folder: Path) -> None:
    """Raise `ValueError` if a folder has more than a limit, a lock or a leftover."""
    ours = (checkpoint.TEMPORARY, lock.NAME, spending.LIMIT)
    others = sorted(p.name for p in folder.glob("*") if p.name not in ours)
    if others:
        raise ValueError(
            f"{name} {folder} is not empty (it holds {others[0]!r}) and has no run to "
            "go on with; give a new folder."
        )


def finish_run(folder: Path, number: int) -> None:
    """End a run whose result is written; raise `OSError` if the disk refuses."""
    spending.finish(folder, number)
    checkpoint.remove(folder)


def _on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, jax.device_get(tree))


def _differences(then: Any, now: Any, name: str) -> list[str]:
    """Return the differences between two nested values, in words."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            difference
            for key in then | now
            for difference in _differences(then.get(key), now.get(key), f"{name}.{key}")
        ]
    return [] if then == now else [f"{name} was {_brief(then)}, is {_brief(now)}"]


def _brief(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
