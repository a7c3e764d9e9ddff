"""One run of a planned config, in chunks, from records to a result folder."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import _checks
from ..core.levels import check_disjoint_ids
from ..core.loop import all_steps, bound_to, check_device, planned_rows
from ..privacy.noise import derive, root_key, step_keys
from ..privacy.report import rounded_up
from ..runs import checkpoint, lock, spending
from ..runs.checkpoint import Checkpoint, hashed
from ..runs.interrupts import uninterruptible
from . import evaluation, loading, results
from .columns import Records
from .config import Config
from .plans import Prepared
from .results import Result

Keep = Callable[[Checkpoint], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `dpbilevel run`.

    Attributes:
        data: A file of records instead of the config's.
        validation: A file of validation records instead of the config's.
        resume: Whether to go on from the folder's checkpoint.
        restart: Whether to run again in a folder of earlier runs: a new release, added
            to the folder's spending record. An earlier result moves to `run-N`; an
            earlier checkpoint is deleted.
    """

    data: Path | None = None
    validation: Path | None = None
    resume: bool = False
    restart: bool = False


def run(
    prepared: Prepared,
    out: Path,
    *,
    progress: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> Result:
    """Run a planned config, write its result folder and return the `Result`.

    Args:
        prepared: The plan.
        out: The result folder; new or empty, unless `resume` or `restart`.
        progress: Called after every checkpoint with the number of steps done.
        **options: The fields of `Options`.

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
    given = Options(**options)
    with _opened(out, given) as still_locked:
        before = checkpoint.read(out) if given.resume else None
        levels, rows, test = _load(prepared, given)
        read = levels, rows, None if test is None else (test.tree(), test.ids)
        first = checkpoint.first_checkpoint(
            prepared.problem,
            prepared.solver,
            prepared.w0,
            # A run that is resumed has its own key.
            key=root_key(prepared.config.privacy.randomness),
            fingerprint=_fingerprint(prepared, read),
            with_start=True,
        )
        if before is None:
            saved = _begin(first, out)
        else:
            saved = checkpoint.resume_run(out, before, first)

        def keep(saved):
            still_locked()
            checkpoint.write(out, saved)

        try:
            saved = checked = _checked(prepared, rows, saved, out, keep)
            progress(saved.done)  # a bar begins below the warnings
            for saved in _steps(prepared, levels, checked):
                keep(saved)
                progress(saved.done)
            result = _result(prepared, saved, test)
            with uninterruptible():
                still_locked()
                results.save(out, result)
                spending.finish(out, saved.fingerprint["run"])
        except OSError as error:
            raise OSError(f"{error}. Make room, then use --resume.") from error
        return result


def refuse(config: Config, out: Path, **options: Any) -> None:
    """Check that `run` would accept these arguments, before anything is planned.

    Raises:
        ValueError: The options exclude each other, the folder holds something else or
            is in use, a file of records is missing, lacks a column or has too few rows,
            delta is not below one over the number of records, or the device computes
            matrix products too coarsely.
        OSError: The folder cannot be made or written to.
    """
    check_device("run")
    config.check_delta()
    given = Options(**options)
    with _opened(out, given), config.place.child("data").named_in_errors():
        _read(config, given)


@contextlib.contextmanager
def _opened(out: Path, options: Options):
    """Lock the folder of a run if the options allow it; yield a check of the lock."""
    if options.resume and options.restart:
        raise ValueError("give --resume (the same release) or --restart (a new one).")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a new folder.")
    if jax.process_count() > 1:
        raise ValueError("the command line needs one process; use dpbilevel.fit.")
    with lock.held(out) as still_locked:
        results.check_folder(out, options.resume, options.restart)
        yield still_locked


def _steps(
    prepared: Prepared, levels: PyTree, saved: Checkpoint
) -> Iterator[Checkpoint]:
    """Yield the `Checkpoint` after each chunk; no bit depends on interruptions."""
    problem, solver = prepared.problem, prepared.solver
    while saved.done < solver.num_steps:
        count = min(saved.fingerprint["chunk"], solver.num_steps - saved.done)
        # The next checkpoint holds `key`, from which earlier noise cannot be computed.
        key, keys = step_keys(saved.key, count)
        state, rows = all_steps(
            problem, solver, levels, saved.state, keys, trajectory=True
        )
        saved = checkpoint.after(saved, key, len(keys), state, rows)
        yield saved


def _checked(
    prepared: Prepared,
    rows: dict[str, np.ndarray],
    saved: Checkpoint,
    out: Path,
    keep: Keep,
) -> Checkpoint:
    """Check the records once, raise if too few fit, and return the `Checkpoint`.

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
    first, place = prepared.report_of_check, prepared.config.place
    spending.begin(out, number, report, prepared.config.tables, first=first)
    if first is None:
        return saved
    if checkpoint.CHECK not in saved.fingerprint:
        own, rest = derive(saved.key, "usability", "run")
        released = prepared.check.release(rows, key=own, owner="run")
        found = {checkpoint.CHECK: dataclasses.asdict(released)}
        fingerprint = saved.fingerprint | found
        saved = dataclasses.replace(saved, key=rest, fingerprint=fingerprint)
        keep(saved)
    found = results.usability_of(saved.fingerprint)
    assert found is not None
    if found.stops:
        why = " ".join(found.remarks)
        with uninterruptible():
            spending.stop(out, number, why)
            checkpoint.remove(out)
        raise ValueError(
            f"{place}: the run stopped before training: records cannot be used. {why} "
            f"Correct what dpbilevel check {place} shows, or set check_records = false "
            "in [privacy]; then run with --restart. Only the check is spent, epsilon = "
            f"{rounded_up(first.epsilon, 3)}."
        )
    for remark in found.remarks:
        _checks.warn(
            f"{remark} Correct mean and scale, units or spellings in the config; "
            f"dpbilevel check {place} shows you the rows."
        )
    spending.charge(out, number, report)
    return saved


def _begin(first: Checkpoint, out: Path) -> Checkpoint:
    """Return a run's `Checkpoint`, numbered and written; move an earlier result."""
    with uninterruptible():
        number = results.set_aside(out, spending.read(out).last) + 1
        fingerprint = first.fingerprint | {"run": number}
        saved = dataclasses.replace(first, fingerprint=fingerprint)
        checkpoint.write(out, saved)
    return saved


def _result(prepared: Prepared, saved: Checkpoint, test: Records | None) -> Result:
    """Return the `Result` of a run, from its last state and its test records."""
    config = prepared.config
    found = checkpoint.solution_of(prepared.problem, prepared.solver, saved)
    usability = results.usability_of(saved.fingerprint)
    x, y = (found.value, None) if config.task.shows_model else found.value
    tested = None
    if test is not None:
        # The key of the steps after the last one, which a resumed run has as well.
        model = np.asarray(y if config.task.two_levels else x)
        tested = evaluation.evaluate(config, model, test, key=saved.key)
        tested = tested.beside(usability)
    return Result(
        config=config,
        shown=config.model.shown(found.value),
        x=x,
        y=y,
        trajectory=config.model.shown(saved.path),
        report=prepared.report,
        versions=checkpoint.versions(),
        rejected_updates=int(found.rejected_updates),
        test=tested,
        power=prepared.power,
        usability=usability,
    )


def _read(
    config: Config, options: Options
) -> tuple[dict[str, Records], Records | None]:
    """Return the records by role, and those of the test file or `None`."""
    files = loading.find_files(config, options.data, options.validation)
    records, test = loading.load(config, *files), loading.load_test(config, *files)
    if config.data.counts_test and test is not None:
        for level in records.values():  # their people are in no other file
            remedy = "Correct the test file, or its accuracy."
            check_disjoint_ids(test.ids, level.ids, f"{loading.IN_BOTH} {remedy}")
    return records, test


def _load(
    prepared: Prepared, options: Options
) -> tuple[PyTree, dict[str, np.ndarray], Records | None]:
    """Return records on the device, indicators of their cells, and test records.

    The indicators say by role how the cells of each record fit the config.
    """
    problem, solver, config = prepared.problem, prepared.solver, prepared.config
    with config.place.child("data").named_in_errors():
        records, test = _read(config, options)
        columns = dict(prepared.check.columns)
        numbers = config.data.label.numbers
        rows = {
            r: loading.indicators(v, records[r], numbers) for r, v in columns.items()
        }
        levels = loading.as_levels(records, problem.unit)
        problem.check(prepared.w0, levels)
        bound_to(problem, solver, levels)
        levels = planned_rows(solver, levels)  # no shape tells their number
    return jax.tree.map(jnp.asarray, levels), rows, test


def _fingerprint(prepared: Prepared, read: PyTree) -> dict[str, Any]:
    """Return what the bits of a run depend on. SECRET: it holds a hash of the records.

    A chunk is a divisor of the number of steps that gives some 20 chunks: a shorter
    last chunk would compile the loop a second time.
    """
    steps = prepared.solver.num_steps
    chunk = max(c for c in range(1, max(1, steps // 20) + 1) if steps % c == 0)
    return {
        "config": json.loads(json.dumps(prepared.config.tables)),  # as it reads back
        "software": checkpoint.software(),
        "plan": json.loads(prepared.report.to_json()),
        "chunk": chunk,
        "records": hashed(jax.tree.leaves(read)),
    }
