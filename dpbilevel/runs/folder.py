"""Folder of a run of `fit`: its checkpoint, its spending record and its solution."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.solution import Solution
from . import checkpoint, lock, spending
from .checkpoint import SOLUTION, Checkpoint
from .interrupts import uninterruptible
from .run import NAME, Run, facts_of, hashed, records_of, run_watched
from .saved import load

_NUMBER = 1  # of the only run of a folder in the spending record
# Facts that change with the versions of JAX and others.
_OF_SOFTWARE = ("plan", "software", "program")


def run_in_folder(
    folder: Path,
    run: Run,
    settings: dict[str, Any],
    begun: Callable[[], Callable[[], None]],
    **watched: Any,
) -> Solution:
    """Make a run in a folder, or what is left of it; return its `Solution`.

    A finished run is read back, and its records are not compared.

    Args:
        folder: The folder; created if need be.
        run: The run before its first step.
        settings: Further public facts that a later call must not change.
        begun: Called if the run begins; returns what `run_watched` calls as `count`.
        **watched: Further arguments of `run_watched`.

    Raises:
        ValueError: The folder holds another run or something else, is in use, or has a
            limit that the run would exceed; or JAX runs in several processes.
        OSError: The disk refuses; the last checkpoint is intact.
    """
    if jax.process_count() > 1:
        raise ValueError("fit: folder= needs one process. Use start and Run.save.")
    start = hashed(jax.tree.leaves(run.state))
    settings = settings | {"start": start, "trajectory": run.path is not None}
    facts = json.loads(json.dumps(settings, default=checkpoint.as_json))
    facts |= facts_of(run)
    with lock.held(folder) as still_locked:
        if (folder / SOLUTION).is_dir():
            return _finished(folder, run, facts)
        saved = _begin(folder, run, facts)
        fingerprint = saved.fingerprint
        state, path = jax.tree.map(jnp.asarray, (saved.state, saved.path))
        parts: Any = {"state": state, "path": path, "key": saved.key}
        count = begun() if saved.done == 0 else lambda: None

        def counted():  # before anything is shown
            still_locked()
            count()

        def keep(run):
            still_locked()
            parts = run.done, run.key, run.state, run.path, fingerprint
            checkpoint.write(folder, Checkpoint(*parts))

        run = dataclasses.replace(run, done=saved.done, **parts)
        run = run_watched(run, counted, keep=keep, **watched)
        with uninterruptible():
            checkpoint.replace_json(folder / checkpoint.RUN, facts)
            run.solution.save(folder / SOLUTION, overwrite=True)
            spending.finish(folder, _NUMBER)
        return run.solution


def _begin(folder: Path, run: Run, facts: dict[str, Any]) -> Checkpoint:
    """Record the run's spending, and return its `Checkpoint`, resumed or new."""
    fingerprint = facts | {"records": records_of(run), NAME: run.name}
    saved = Checkpoint(0, run.key, run.state, run.path, fingerprint)
    if (folder / checkpoint.NAME).is_file():
        before = checkpoint.read(folder)
        fingerprint[NAME] = before.fingerprint.get(NAME)  # its key goes on
        saved = checkpoint.resume_run(folder, before, saved)
    else:
        checkpoint.check_empty("fit: folder", folder)
        checkpoint.write(folder, saved)
    for leftover in folder.glob(".save-*"):  # of a crash
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        spending.begin(folder, _NUMBER, run.plan.report, facts)
    except ValueError:
        if saved.done == 0 and not spending.read(folder).runs:  # nothing was released
            checkpoint.remove(folder)
        raise
    return saved


def _finished(folder: Path, run: Run, facts: dict[str, Any]) -> Solution:
    """Return the `Solution` of a finished folder, checked to be of this run."""
    try:
        then = json.loads((folder / checkpoint.RUN).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"fit: {folder} holds no run of fit, or a damaged one. Give a new folder."
        ) from error
    if then.get("software") != facts["software"]:  # on which the others depend
        facts = {k: v for k, v in facts.items() if k not in _OF_SOFTWARE}
    checkpoint.check_same_run(folder, then, facts)
    spending.finish(folder, _NUMBER)
    found = load(folder, like=run.solution.value)

    def on_device(leaf):
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    value, path = jax.tree.map(on_device, (found.value, found.trajectory))
    return dataclasses.replace(found, value=value, trajectory=path)
