"""One run of a config: planned, in chunks, resumable, ending in a result folder."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..bilevel.problem import BilevelProblem
from ..core import checkpoint, lock, spending
from ..core.checkpoint import Checkpoint
from ..core.descent import rejected_updates
from ..core.interrupts import whole
from ..core.loop import advance, bound_to, planned_rows
from ..core.plan import calibrate
from ..core.solver import AbstractSolver
from ..games.problem import SaddleProblem
from ..privacy.noise import root_key, step_keys
from ..privacy.report import PrivacyReport
from . import figure, folder, results
from .config import Config
from .data import load_levels, load_records
from .datasets import check_file
from .results import Result

Progress = Callable[[int], None]

_advance = jax.jit(advance, static_argnames="trajectory")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that is planned and has not touched data.

    Attributes:
        config: The config.
        problem: The problem.
        solver: The calibrated solver.
        w0: The public starting point.
        report: The guarantee of one run.
    """

    config: Config
    problem: BilevelProblem | SaddleProblem
    solver: AbstractSolver
    w0: tuple[PyTree, PyTree]
    report: PrivacyReport


def prepare(config: Config) -> Prepared:
    """Plans a run from the config alone.

    Args:
        config: The config.

    Returns:
        The plan, with its report.

    Raises:
        ValueError: No noise reaches the budget with this solver and sampling.

    Privacy:
        Touches no data.
    """
    problem, w0 = config.problem, config.task.start(config.data.blocks)
    try:
        plan = calibrate(
            problem,
            config.solver,
            config.privacy.budget,
            sizes=config.sizes,
            w0=w0,
            precision=config.privacy.precision,
        )
    except ValueError as error:
        raise config.place.error(str(error)) from error
    return Prepared(config, problem, plan.solver, w0, plan.report)


def run(
    prepared: Prepared,
    out: Path,
    *,
    data: Path | None = None,
    chunk: int | None = None,
    resume: bool = False,
    restart: bool = False,
    progress: Progress = lambda done: None,
) -> Result:
    """Runs a planned config and writes its result folder.

    Args:
        prepared: The plan.
        out: The result folder; new or empty, unless `resume` or `restart`.
        data: A file of records instead of the config's.
        chunk: Steps between two checkpoints.
        resume: Whether to go on from the folder's checkpoint.
        restart: Whether to run again in a folder of earlier runs: a new release, added
            to the folder's spending record. An earlier result moves to `run-N`; an
            earlier checkpoint is deleted.
        progress: Called after every checkpoint with the number of steps done.

    Returns:
        The result, as written.

    Raises:
        ValueError: The folder holds something else or another run is in progress in
            it, the records do not fit the plan, or what is resumed is not this run.
        OSError: The disk refuses; a checkpoint that was written is intact.

    Privacy:
        One run under the plan's budget. Every run draws a fresh key from the operating
        system; a resumed run continues the interrupted one bit for bit (on the same
        hardware), so it spends nothing more. The spending record counts a run before
        its first step reads a record, so a run that never ends is counted too. The
        checkpoint is secret and is deleted at the end.
    """
    _check_options(out, chunk, resume, restart)
    with lock.held(out):
        folder.check(out, resume, restart)
        return _run(prepared, out, data, chunk, resume, progress)


def check(
    config: Config,
    out: Path,
    *,
    data: Path | None = None,
    chunk: int | None = None,
    resume: bool = False,
    restart: bool = False,
) -> None:
    """Refuses what `run` would refuse before it plans or reads anything.

    Args:
        config: The config.
        out: As in `run`.
        data: As in `run`.
        chunk: As in `run`.
        resume: As in `run`.
        restart: As in `run`.

    Raises:
        ValueError: The options exclude each other, the folder holds something else or
            is in use, or there is no file of records.
        OSError: The folder cannot be made or written to.
    """
    _check_options(out, chunk, resume, restart)
    with lock.held(out):
        folder.check(out, resume, restart)
    try:
        check_file(config.data, config.folder, data)
    except ValueError as error:
        raise config.place.child("data").error(str(error)) from error


def _run(
    prepared: Prepared,
    out: Path,
    data: Path | None,
    chunk: int | None,
    resume: bool,
    progress: Progress,
) -> Result:
    """Runs in a folder that fits and is locked."""
    saved = checkpoint.read(out) if resume else None
    levels = _load(prepared, data)
    fingerprint = _fingerprint(prepared, levels, _chunk(prepared, chunk, saved))
    if saved is None:
        saved = _begun(prepared, fingerprint, out)
    _check_same_run(saved, fingerprint, out)
    progress(saved.done)
    try:
        number = saved.fingerprint["run"]
        spending.begin(out, number, prepared.report, prepared.config.tables)
        saved = _steps(prepared, levels, saved, out, progress)
        result = _result(prepared, saved)
        picture = figure.draw(result)
        with whole():
            results.save(out, result, picture)
            folder.close(out, number)
    except OSError as error:
        raise OSError(
            f"{error}. The last checkpoint is intact: make room, then continue with "
            "--resume."
        ) from error
    return result


def _steps(
    prepared: Prepared,
    levels: PyTree,
    saved: Checkpoint,
    out: Path,
    progress: Progress,
) -> Checkpoint:
    """Runs chunk after chunk, with a checkpoint after each."""
    solver, chunk = prepared.solver, saved.fingerprint["chunk"]
    structure: Any = jax.tree.structure(solver.init(prepared.problem, prepared.w0))
    while saved.done < solver.num_steps:
        # The next checkpoint holds `key`, which does not tell the noise before it.
        key, keys = step_keys(saved.key, min(chunk, solver.num_steps - saved.done))
        # Through the host each time, as after a resume, so that no bit can differ.
        state = structure.unflatten([jnp.asarray(v) for v in saved.state])
        state, path = _advance(
            prepared.problem, solver, levels, state, keys, trajectory=True
        )
        rows = [
            np.concatenate(pair)
            for pair in zip(saved.path, checkpoint.leaves(path), strict=True)
        ]
        saved = Checkpoint(
            saved.done + len(keys),
            key,
            checkpoint.leaves(state),
            rows,
            saved.fingerprint,
        )
        checkpoint.write(out, saved)
        progress(saved.done)
    return saved


def _begun(prepared: Prepared, fingerprint: dict[str, Any], out: Path) -> Checkpoint:
    """The run before its first step, with a fresh key, written into its folder."""
    state = prepared.solver.init(prepared.problem, prepared.w0)
    start = checkpoint.leaves(prepared.solver.released(state))
    saved = Checkpoint(
        done=0,
        key=root_key(),
        state=checkpoint.leaves(state),
        path=[v[None] for v in start],
        fingerprint=fingerprint,
    )
    with whole():
        earlier = results.set_aside(out, spending.read(out).last)
        saved = dataclasses.replace(
            saved, fingerprint=fingerprint | {"run": earlier + 1}
        )
        checkpoint.write(out, saved)
    return saved


def _result(prepared: Prepared, saved: Checkpoint) -> Result:
    """What the run releases, from its last state."""
    solver, config = prepared.solver, prepared.config
    state = solver.init(prepared.problem, prepared.w0)
    structure: Any = jax.tree.structure(state)
    released: Any = jax.tree.structure(solver.released(state))
    path = released.unflatten(saved.path)
    state = structure.unflatten([jnp.asarray(v) for v in saved.state])
    x, y = solver.answer(prepared.problem, state)
    return Result(
        task=config.task_name,
        label=config.task.label,
        names=config.task.names(config.data.blocks),
        shown=config.task.shown((x, y)),
        x=np.asarray(x),
        y=None if y is None else np.asarray(y),
        trajectory=config.task.shown(path),
        report=prepared.report,
        versions=checkpoint.versions(),
        config=config.tables,
        rejected_updates=int(rejected_updates(state)),
    )


def _load(prepared: Prepared, override: Path | None) -> PyTree:
    """The records on the device, checked against the plan."""
    config = prepared.config
    try:
        levels: PyTree
        places: Any = {"base": config.folder, "override": override}
        neighbours, people = config.privacy.neighbours, config.privacy.people
        if people is None:
            levels = load_records(config.data, neighbours, **places)
        else:
            levels = load_levels(config.data, people, neighbours, **places)
        prepared.problem.check(prepared.w0, levels)
        bound_to(prepared.problem, prepared.solver, levels)
        levels = planned_rows(prepared.solver, levels)
    except ValueError as error:
        raise config.place.child("data").error(str(error)) from error
    return jax.tree.map(jnp.asarray, levels)


def _chunk(prepared: Prepared, chunk: int | None, saved: Checkpoint | None) -> int:
    """Steps per chunk: as asked, as before, or a divisor giving some 20 chunks."""
    if saved is not None:
        before = saved.fingerprint["chunk"]
        if chunk not in (None, before):
            raise ValueError(
                f"--chunk {chunk} differs from the interrupted run's {before}; leave "
                "it out when resuming."
            )
        return before
    if chunk is not None:
        return chunk
    steps = prepared.solver.num_steps
    # A divisor: a shorter last chunk would compile the loop a second time.
    return max(c for c in range(1, max(1, steps // 20) + 1) if steps % c == 0)


def _check_options(out: Path, chunk: int | None, resume: bool, restart: bool) -> None:
    if resume and restart:
        raise ValueError("give --resume (the same release) or --restart (a new one).")
    if chunk is not None and chunk < 1:
        raise ValueError(f"--chunk must be at least 1, got {chunk}.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a new folder.")


def _fingerprint(prepared: Prepared, levels: PyTree, chunk: int) -> dict[str, Any]:
    """What the bits of a run depend on. SECRET: it holds a hash of the records."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(levels):
        digest.update(np.asarray(leaf).tobytes())
    return {
        "config": json.loads(json.dumps(prepared.config.tables)),
        "plan": json.loads(prepared.report.to_json()),
        "software": checkpoint.software(),
        "chunk": chunk,
        "records": digest.hexdigest(),
    }


def _check_same_run(saved: Checkpoint, now: dict[str, Any], out: Path) -> None:
    """Refuses to continue a run whose config, software or records have changed."""
    for part, name in (
        ("config", "the config"),
        ("software", "the software"),
        ("plan", "the plan"),
    ):
        changed = checkpoint.differences(saved.fingerprint[part], now[part])
        if changed:
            raise ValueError(
                f"cannot resume {out}: {name} has changed since the run began: "
                f"{'; '.join(changed[:3])}. Change it back, or give a new folder."
            )
    if saved.fingerprint["records"] != now["records"]:
        raise ValueError(
            f"cannot resume {out}: the records are not those the run began with. Give "
            "the same file, or a new folder."
        )
