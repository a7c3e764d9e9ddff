"""One run of a config: planned, in chunks, resumable, ending in a result folder."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core import checkpoint, lock, odometer, spending
from ..core.checkpoint import Checkpoint
from ..core.interrupts import whole
from ..core.loop import advance, bound_to, planned_rows
from ..core.plan import calibrate
from ..core.resume import (
    finish_run,
    first_checkpoint,
    resume_run,
    run_in_parts,
    solution_of,
)
from ..core.solver import AbstractSolver
from ..privacy.ledger import Ledger
from ..privacy.noise import root_key
from ..privacy.products import check_products
from ..privacy.report import PrivacyReport
from ..privacy.untested import check_release
from . import attack, evaluation, figure, folder, results
from .columns import Records
from .config import Config
from .data import check_files, load_levels, load_records, load_test
from .results import Result
from .task import Problem

Progress = Callable[[int], None]

# At the top, so that all chunks of one length run one compiled program.
_advance = jax.jit(advance, static_argnames="trajectory")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that is planned and has not touched data."""

    config: Config
    problem: Problem
    solver: AbstractSolver  # calibrated
    w0: PyTree  # public
    report: PrivacyReport  # of one run


def prepare(config: Config) -> Prepared:
    """Plans a run from the config alone.

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
    report = evaluation.reported(plan.report, config)
    return Prepared(config, problem, plan.solver, w0, report)


def run(
    prepared: Prepared,
    out: Path,
    *,
    data: Path | None = None,
    validation: Path | None = None,
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
        validation: A file of validation records instead of the config's.
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
            it, its lock file was deleted during the run, the records do not fit the
            plan, or what is resumed is not this run.
        OSError: The disk refuses; a checkpoint that was written is intact.

    Privacy:
        One run under the plan's budget. Every run draws a fresh key from the operating
        system; a resumed run continues the interrupted one bit for bit (on the same
        hardware), so it spends nothing more. The spending record counts a run before
        its first step reads a record, so a run that never ends is counted too. The
        checkpoint is secret and is deleted at the end.
    """
    with _opened(out, chunk, resume, restart) as still_locked:
        before = checkpoint.read(out) if resume else None
        levels, test = _load(prepared, data, validation)
        read = levels if test is None else (levels, test.tree())
        fingerprint = _fingerprint(prepared, read, _chunk(prepared, chunk, before))
        first = first_checkpoint(
            prepared.problem,
            prepared.solver,
            prepared.w0,
            key=root_key(),  # a run that is resumed has its own
            fingerprint=fingerprint,
            with_start=True,
        )
        saved = _begin(first, out) if before is None else resume_run(out, before, first)
        progress(saved.done)
        try:
            number = saved.fingerprint["run"]
            odometer.begin(out, number, prepared.report, prepared.config.tables)

            def keep(saved):
                still_locked()
                checkpoint.write(out, saved)
                progress(saved.done)

            saved = _steps(prepared, levels, saved, keep)
            result = _result(prepared, saved, test)
            picture = figure.draw(result)
            with whole():
                still_locked()
                results.save(out, result, picture)
                finish_run(out, number)
        except OSError as error:
            raise OSError(
                f"{error}. The last checkpoint is intact: make room, then continue "
                "with --resume."
            ) from error
        return result


def check(
    config: Config,
    out: Path,
    *,
    data: Path | None = None,
    validation: Path | None = None,
    chunk: int | None = None,
    resume: bool = False,
    restart: bool = False,
) -> None:
    """Refuses what `run`, with these arguments, would refuse before it plans anything.

    Raises:
        ValueError: The options exclude each other, the folder holds something else or
            is in use, a file of records is missing, lacks a column or has too few rows,
            or the device computes matrix products too coarsely.
        OSError: The folder cannot be made or written to.
    """
    check_products("run")
    check_release("run")
    with _opened(out, chunk, resume, restart), _data_errors(config):
        privacy = config.privacy
        places = _places(config, data, validation)
        check_files(config.data, privacy.people, privacy.neighbours, **places)


@contextlib.contextmanager
def _opened(out: Path, chunk: int | None, resume: bool, restart: bool):
    """Locks the folder of a run with these options, if one may go on or start in it."""
    if resume and restart:
        raise ValueError("give --resume (the same release) or --restart (a new one).")
    if chunk is not None and chunk < 1:
        raise ValueError(f"--chunk must be at least 1, got {chunk}.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a new folder.")
    if jax.process_count() > 1:
        raise ValueError(
            "the command line is for programs of one process, this is one of "
            f"{jax.process_count()}. Start it without jax.distributed, or use "
            "dpbilevel.fit, which takes records spread over processes."
        )
    with lock.held(out) as still_locked:
        folder.check(out, resume, restart)
        yield still_locked


@contextlib.contextmanager
def _data_errors(config: Config):
    """Errors name the table of the config that says where the records are."""
    try:
        yield
    except ValueError as error:
        raise config.place.child("data").error(str(error)) from error


def _steps(
    prepared: Prepared,
    levels: PyTree,
    saved: Checkpoint,
    keep: Callable[[Checkpoint], None],
) -> Checkpoint:
    """Run chunk after chunk, and call `keep` after each."""
    problem, solver = prepared.problem, prepared.solver

    def part(saved, keys):
        return _advance(problem, solver, levels, saved.state, keys, trajectory=True)

    chunk = saved.fingerprint["chunk"]
    return run_in_parts(part, saved, solver.num_steps, keep, chunk=chunk)


def _begin(first: Checkpoint, out: Path) -> Checkpoint:
    """Numbers a run and writes it into its folder; an earlier result moves away."""
    with whole():
        number = results.set_aside(out, spending.read(out).last) + 1
        fingerprint = first.fingerprint | {"run": number}
        saved = dataclasses.replace(first, fingerprint=fingerprint)
        checkpoint.write(out, saved)
    return saved


def _result(prepared: Prepared, saved: Checkpoint, test: Records | None) -> Result:
    """What the run releases, from its last state, and on its test records."""
    config = prepared.config
    found = solution_of(prepared.problem, prepared.solver, saved)
    x, y = (found.value, None) if config.task.shows_model else found.value
    tested = None
    if test is not None:
        # The key of the steps after the last one, which a resumed run has as well.
        model = np.asarray(y if config.task.two_levels() else x)
        tested = evaluation.evaluate(config, model, test, key=saved.key)
    return Result(
        task=config.task_name,
        label=config.task.label,
        names=config.task.names(config.data),
        features=config.data.features,
        shown=config.task.shown(found.value),
        x=x,
        y=y,
        trajectory=config.task.shown(saved.path),
        report=prepared.report,
        versions=checkpoint.versions(),
        config=config.tables,
        rejected_updates=int(found.rejected_updates),
        test=tested,
        power=attack.largest_power(*_ledgers(prepared)),
    )


def _ledgers(prepared: Prepared) -> Iterator[Ledger]:
    """What people are charged: those of the run, and those of a counted test file."""
    config = prepared.config
    yield prepared.solver.ledger(prepared.problem, config.sizes)
    if config.data.test is not None and config.data.test.accuracy == "counted":
        yield evaluation.ledger_of(config)


def _places(
    config: Config, data: Path | None, validation: Path | None
) -> dict[str, Any]:
    return {"base": config.folder, "override": data, "validation": validation}


def _load(
    prepared: Prepared, data: Path | None, validation: Path | None
) -> tuple[PyTree, Records | None]:
    """The records on the device, checked against the plan, and those of the test."""
    config = prepared.config
    neighbours, people = config.privacy.neighbours, config.privacy.people
    places = _places(config, data, validation)
    with _data_errors(config):
        levels: PyTree
        if people is None:
            levels = load_records(config.data, neighbours, **places)
        else:
            levels = load_levels(config.data, people, neighbours, **places)
        test = load_test(config.data, **places)
        prepared.problem.check(prepared.w0, levels)
        bound_to(prepared.problem, prepared.solver, levels)
        levels = planned_rows(prepared.solver, levels)  # no shape tells their number
    return jax.tree.map(jnp.asarray, levels), test


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


def _fingerprint(prepared: Prepared, levels: PyTree, chunk: int) -> dict[str, Any]:
    """What the bits of a run depend on. SECRET: it holds a hash of the records."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(levels):
        digest.update(np.asarray(leaf).tobytes())
    return {
        "config": json.loads(json.dumps(prepared.config.tables)),  # as it reads back
        "software": checkpoint.software(),
        "plan": json.loads(prepared.report.to_json()),
        "chunk": chunk,
        "records": digest.hexdigest(),
    }
