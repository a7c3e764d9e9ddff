"""Folder of a run of `fit`, and the solutions that are read back from folders."""

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core.saved import PAGE, read, unreadable
from ..core.solution import Solution
from ..privacy.report import PrivacyReport
from . import checkpoint, lock, spending
from .checkpoint import SOLUTION, Checkpoint
from .interrupts import uninterruptible
from .run import NAME, Run, facts_of, hashed, records_of, run_watched

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


def load(folder: str | Path, *, like: PyTree = None) -> Solution[Any]:
    """Return the `Solution` in a folder: a saved one, or that of a finished run.

    Args:
        folder: A folder that `Solution.save` wrote, the `folder` of a finished `fit`,
            or the result folder of `dpbilevel run`. Of the latter, the value is in the
            units of its config, as `solution.npz` has it, and there is no trajectory.
        like: A value of the same structure and shapes, such as the model before
            training: needed if the value has other nodes than dictionaries, lists and
            tuples, such as Equinox modules and named tuples. Their functions and
            static fields are those of `like`.

    Returns:
        The solution, with its report. Its arrays are NumPy's, equal bit for bit.

    Raises:
        ValueError: The folder holds no solution, a damaged one, or one of another
            version; or `like` is needed or differs.

    Privacy:
        Reads released values: free. No file that it reads can run code.
    """
    folder = Path(folder)
    if (folder / checkpoint.SOLUTION).is_dir():
        folder = folder / checkpoint.SOLUTION
    if (folder / PAGE).is_file():
        parts, facts = read(folder, like)
    elif (folder / checkpoint.RESULT).is_file():
        parts, facts = _of_command(folder)
    else:
        names = f"{PAGE} or {checkpoint.RESULT}"
        raise ValueError(
            f"load: {folder} holds no solution ({names}). Give the folder of "
            "Solution.save, or that of a finished dpbilevel run."
        )
    try:
        rejected = int(facts["rejected_updates"])
        text = json.dumps(facts["report"])
        report = None if text == "null" else PrivacyReport.from_json(text)
        return Solution(parts["value"], parts["trajectory"], rejected, report)
    except Exception as error:  # files of others may raise anything
        raise unreadable(folder, error) from error


def _of_command(folder: Path) -> tuple[dict[str, PyTree], dict[str, Any]]:
    """Return parts and facts of a finished run of the command line."""
    try:
        page = json.loads((folder / checkpoint.RESULT).read_text(encoding="utf-8"))
        content = io.BytesIO((folder / checkpoint.ARRAYS).read_bytes())
        with np.load(content, allow_pickle=False) as arrays:  # a pickle could run code
            x, y = arrays["x"], arrays["y"] if "y" in arrays.files else None
        one_level = y is None and "people" not in page["report"]
        return {"value": x if one_level else (x, y), "trajectory": None}, page
    except Exception as error:  # as above
        raise unreadable(folder, error) from error
