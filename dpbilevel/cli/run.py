"""One run of a planned config, in chunks, from records to a result folder."""

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core.loop import all_steps, bound_to, planned_rows
from ..core.shares import Usability
from ..privacy.exact.matmul_check import check_products
from ..privacy.noise import derive, root_key
from ..privacy.per_example.mixing import check_jax
from ..privacy.report import PrivacyReport, rounded_up
from ..runs import checkpoint, lock, spending
from ..runs.checkpoint import Checkpoint
from ..runs.interrupts import uninterruptible
from ..runs.resume import (
    finish_run,
    first_checkpoint,
    resume_run,
    run_in_parts,
    solution_of,
)
from . import evaluation, folder, results
from .columns import Records
from .config import Config
from .data import as_levels, find_files, indicators, load, load_test
from .prepared import Prepared
from .results import Result

Progress = Callable[[int], None]


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
    """Run a planned config and write its result folder.

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
    from . import figure  # needs an extra

    with _opened(out, chunk, resume, restart) as still_locked:
        before = checkpoint.read(out) if resume else None
        levels, rows, test = _load(prepared, data, validation)
        read = levels, rows, None if test is None else test.tree()
        fingerprint = _fingerprint(prepared, read, chunk, before)
        first = first_checkpoint(
            prepared.problem,
            prepared.solver,
            prepared.w0,
            key=root_key(),  # a run that is resumed has its own
            fingerprint=fingerprint,
            with_start=True,
        )
        saved = _begin(first, out) if before is None else resume_run(out, before, first)
        try:
            number = saved.fingerprint["run"]

            def keep(saved):
                still_locked()
                checkpoint.write(out, saved)

            def keep_and_show(saved):
                keep(saved)
                progress(saved.done)

            saved = _checked(prepared, rows, saved, out, keep)
            progress(saved.done)  # a bar begins below the warnings
            saved = _steps(prepared, levels, saved, keep_and_show)
            result = _result(prepared, saved, test)
            picture = figure.png(figure.of_result(result))
            with uninterruptible():
                still_locked()
                results.save(out, result, picture)
                finish_run(out, number)
        except OSError as error:
            raise OSError(
                f"{error}. The last checkpoint is intact: make room, then continue "
                "with --resume."
            ) from error
        return result


def refuse(
    config: Config,
    out: Path,
    *,
    data: Path | None = None,
    validation: Path | None = None,
    chunk: int | None = None,
    resume: bool = False,
    restart: bool = False,
) -> None:
    """Check that `run` would accept these arguments, before anything is planned.

    Raises:
        ValueError: The options exclude each other, the folder holds something else or
            is in use, a file of records is missing, lacks a column or has too few rows,
            delta is not below one over the number of records, or the device computes
            matrix products too coarsely.
        OSError: The folder cannot be made or written to.
    """
    check_products("run")
    check_jax("run")
    check_delta(config)
    with _opened(out, chunk, resume, restart), _data_errors(config):
        _read(config, data, validation)


def check_delta(config: Config) -> None:
    """Refuse a delta that allows the publication of a record, unless that is declared.

    Raises:
        ValueError: Delta is not below one over the number of records of a level.
    """
    privacy, data = config.privacy, config.data
    least = 1 / max(data.training, data.validation)
    if privacy.delta >= least and not privacy.allow_large_delta:
        raise config.place.child("privacy").error(
            f"delta = {privacy.delta:g} is not below one over the number of records, "
            f"{least:.2g}: publishing one record at random would meet the guarantee. "
            "Give a smaller delta, or allow_large_delta = true if that is meant."
        )


@contextlib.contextmanager
def _opened(out: Path, chunk: int | None, resume: bool, restart: bool):
    """Lock the folder of a run, if one may start or go on in it with these options."""
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
    """Name the table `[data]` of the config in errors."""
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
        return all_steps(problem, solver, levels, saved.state, keys, trajectory=True)

    chunk = saved.fingerprint["chunk"]
    return run_in_parts(part, saved, solver.num_steps, keep, chunk=chunk)


def _checked(
    prepared: Prepared,
    rows: dict[str, np.ndarray],
    saved: Checkpoint,
    out: Path,
    keep: Callable[[Checkpoint], None],
) -> Checkpoint:
    """Release the fractions of usable records once, and stop if they are too low.

    Args:
        prepared: The plan.
        rows: The indicators of each level.
        saved: The run so far.
        out: The result folder.
        keep: Called with the run once its check is released.

    Returns:
        The run; its checkpoint holds the released fractions.

    Raises:
        ValueError: Too few of the records of a level can be used, or a declared class,
            group or source seems to be misspelt.

    Warns:
        UserWarning: Columns or values are not what was declared, before the rest of
            the budget is spent.

    Privacy:
        The check alone is on record before it reads a record, and the whole plan before
        training does. A resumed run has the same key for the check until the release is
        in the checkpoint. Afterwards it keeps that release.
    """
    number, report = saved.fingerprint["run"], prepared.report
    first = prepared.report_of_check
    spending.begin(out, number, report, prepared.config.tables, first=first)
    if first is None:
        return saved
    if checkpoint.CHECK not in saved.fingerprint:
        own, rest = derive(saved.key, "usability", "run")
        released = prepared.check.release(rows, key=own, owner="run")
        fingerprint = saved.fingerprint | {
            checkpoint.CHECK: dataclasses.asdict(released)
        }
        saved = dataclasses.replace(saved, key=rest, fingerprint=fingerprint)
        keep(saved)
    found = results.usability_of(saved.fingerprint)
    assert found is not None
    if found.stops:
        with uninterruptible():
            spending.stop(out, number, " ".join(found.remarks))
            checkpoint.remove(out)
        raise ValueError(_stopped(prepared.config, found, first))
    for remark in found.remarks:
        warnings.warn(
            f"{remark} Correct mean and scale, units or spellings in the config; "
            f"dpbilevel check {prepared.config.place} shows you the rows.",
            stacklevel=2,
        )
    spending.charge(out, number, report)
    return saved


def _stopped(config: Config, found: Usability, first: PrivacyReport) -> str:
    """Return the message of a run that stops after its check."""
    return (
        f"{config.place}: the run stopped before training, because records cannot "
        f"be used. {' '.join(found.remarks)} Correct what dpbilevel check "
        f"{config.place} shows you, or set check_records = false in [privacy] if the "
        "records are right, and run again in a new folder, or here with --restart. The "
        f"check cost epsilon = {rounded_up(first.epsilon, 3)}; the rest of the budget "
        "is unspent."
    )


def _begin(first: Checkpoint, out: Path) -> Checkpoint:
    """Return a run with its number, written into its folder; move an earlier result."""
    with uninterruptible():
        number = results.set_aside(out, spending.read(out).last) + 1
        fingerprint = first.fingerprint | {"run": number}
        saved = dataclasses.replace(first, fingerprint=fingerprint)
        checkpoint.write(out, saved)
    return saved


def _result(prepared: Prepared, saved: Checkpoint, test: Records | None) -> Result:
    """Return what the run releases, from its last state and its test records."""
    config = prepared.config
    found = solution_of(prepared.problem, prepared.solver, saved)
    usability = results.usability_of(saved.fingerprint)
    x, y = (found.value, None) if config.task.shows_model else found.value
    tested = None
    if test is not None:
        # The key of the steps after the last one, which a resumed run has as well.
        model = np.asarray(y if config.task.two_levels else x)
        tested = evaluation.evaluate(config, model, test, key=saved.key)
        tested = tested.beside(usability)
    return Result(
        task=config.task.name,
        names=config.model.names(config.data),
        features=config.data.features,
        shown=config.model.shown(found.value),
        x=x,
        y=y,
        trajectory=config.model.shown(saved.path),
        report=prepared.report,
        versions=checkpoint.versions(),
        config=config.tables,
        rejected_updates=int(found.rejected_updates),
        test=tested,
        power=prepared.power,
        usability=usability,
    )


def _read(
    config: Config, data: Path | None, validation: Path | None
) -> tuple[dict[str, Records], Records | None]:
    """Return the records by role, and those of the test file."""
    people, base = config.privacy.people, config.folder
    files = find_files(
        config.data, people, base=base, override=data, validation=validation
    )
    records = load(config.data, people, config.privacy.neighbours, *files)
    return records, load_test(config.data, base, *files)


def _load(
    prepared: Prepared, data: Path | None, validation: Path | None
) -> tuple[PyTree, dict[str, np.ndarray], Records | None]:
    """Return records on the device, indicators of their cells, and test records.

    The indicators say by role how the cells of each record fit the config.
    """
    config = prepared.config
    with _data_errors(config):
        records, test = _read(config, data, validation)
        columns = dict(prepared.check.columns)
        rows = {role: indicators(columns[role], records[role]) for role in columns}
        levels = as_levels(records)
        prepared.problem.check(prepared.w0, levels)
        bound_to(prepared.problem, prepared.solver, levels)
        levels = planned_rows(prepared.solver, levels)  # no shape tells their number
    return jax.tree.map(jnp.asarray, levels), rows, test


def _fingerprint(
    prepared: Prepared, levels: PyTree, chunk: int | None, before: Checkpoint | None
) -> dict[str, Any]:
    """Return what the bits of a run depend on. SECRET: it holds a hash of the records.

    Steps per chunk are as asked, as before, or a divisor giving some 20 chunks.
    """
    if before is not None:
        earlier = before.fingerprint["chunk"]
        if chunk not in (None, earlier):
            raise ValueError(
                f"--chunk {chunk} differs from the interrupted run's {earlier}; leave "
                "it out when resuming."
            )
        chunk = earlier
    if chunk is None:
        steps = prepared.solver.num_steps
        # A divisor: a shorter last chunk would compile the loop a second time.
        chunk = max(c for c in range(1, max(1, steps // 20) + 1) if steps % c == 0)
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
