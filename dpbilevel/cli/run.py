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
from ..audit.claims import largest_powers
from ..core.levels import check_disjoint_ids
from ..core.loop import all_steps, check_device, check_planned, planned_rows
from ..privacy.keys import derive, root_key, step_keys
from ..privacy.report import rounded_up
from ..runs import checkpoint, guards, spending
from ..runs.checkpoint import Checkpoint, hashed
from ..runs.guards import uninterruptible
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
    given, config = Options(**options), prepared.config
    problem, solver = prepared.problem, prepared.solver
    with _opened(out, given) as still_locked:
        before = checkpoint.read(out) if given.resume else None
        with config.place.child("data").named_in_errors():
            records, test = _read(config, given)
            classes = tuple(config.data.label.of_classes)
            # Indicators of how the cells of each record fit the config, by role.
            rows = {
                role: loading.indicators(own, records[role], classes)
                for role, own in prepared.records_check.columns
                if prepared.records_check.releases
            }
            levels = loading.as_levels(records, problem.unit)
            problem.check(prepared.w0, levels)
            check_planned(problem, solver, levels)
            levels = planned_rows(solver, levels)  # no shape tells their number
        levels = jax.tree.map(jnp.asarray, levels)
        del records  # they need no memory from here on
        read = levels, rows, None if test is None else (test.tree(), test.ids)
        saved = _started(prepared, read, before, out)

        def keep(saved):
            still_locked()
            checkpoint.write(out, saved)

        try:
            saved = checked = _with_records_check(prepared, rows, saved, out, keep)
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
    """Raise an error if `run` would refuse these arguments; the files are read.

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
    """Lock the folder of a run, and yield a function that verifies the lock.

    Options that exclude each other and folders that hold something else are refused,
    before anything is spent.
    """
    if options.resume and options.restart:
        raise ValueError("give --resume (the same release) or --restart (a new one).")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a new folder.")
    if jax.process_count() > 1:
        raise ValueError("the command line needs one process; use dpbilevel.fit.")
    with guards.held(out) as still_locked:
        record, restart = spending.read(out), options.restart
        finished = (out / results.RESULT).exists()
        interrupted = (out / checkpoint.NAME).exists()
        if finished:  # a run may have been killed in its last moment
            with contextlib.suppress(ValueError, KeyError):  # none, or damaged
                spending.finish(out, checkpoint.read(out).fingerprint["run"])
            checkpoint.remove(out)
        elif options.resume and not interrupted:
            raise ValueError(
                f"nothing to resume: {out} holds no checkpoint. Leave out --resume."
            )
        elif options.resume:
            checkpoint.read(out)  # raises if it is damaged
        if spending.is_lost(out) and (finished or restart or not interrupted):
            raise ValueError(
                f"--out {out} holds an earlier run, but no spending record that can "
                f"be read ({spending.NAME}). Put it back, or give a new folder for a "
                "second release on top of an unknown cost."
            )
        again = "give a new folder"
        if record.runs:
            again += ", or --restart to add it to this folder's spending record"
        for found, what in (
            (finished, "a finished run"),
            (interrupted, "an interrupted run. Continue it with --resume"),
            (record.runs, "the record of earlier runs"),
        ):
            if found and not (restart or (options.resume and not finished)):
                what = f"{what}. For a second release, {again}."
                raise ValueError(f"--out {out} holds {what}")
        if not (record.runs or interrupted):
            checkpoint.check_empty("--out", out)
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


def _with_records_check(
    prepared: Prepared,
    rows: dict[str, np.ndarray],
    saved: Checkpoint,
    out: Path,
    keep: Keep,
) -> Checkpoint:
    """Release the records check once; stop the run, or return its `Checkpoint`.

    The checkpoint holds the released fractions; `keep` is called once it does. A
    warning of other columns or values than declared comes before the rest of the budget
    is spent.

    Privacy:
        This release alone counts as spent before it reads a record, and the whole plan
        before training does. A resumed run has the same key for the release until it is
        in the checkpoint. Afterwards the run keeps the release.
    """
    number, report = saved.fingerprint["run"], prepared.report
    first, place = prepared.records_check_report, prepared.config.place
    spending.begin(out, number, report, prepared.config.tables, first=first)
    if first is None:
        return saved
    if checkpoint.CHECK not in saved.fingerprint:
        own, rest = derive(saved.key, "usability", "run")
        released = prepared.records_check.release(rows, key=own, owner="run")
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
            "in [privacy]; then run with --restart. Only the check of records is "
            f"spent, epsilon = {rounded_up(first.epsilon, 3)}."
        )
    for remark in found.remarks:
        _checks.warn(
            f"{remark} Correct mean and scale, units or spellings in the config; "
            f"dpbilevel check {place} shows you the rows."
        )
    spending.charge(out, number, report)
    return saved


def _started(
    prepared: Prepared, read: PyTree, before: Checkpoint | None, out: Path
) -> Checkpoint:
    """Return `before`, if it fits, or write a new run's `Checkpoint`; move old results.

    Its fingerprint, what the bits of a run depend on, is SECRET: it holds a hash of
    the records. A new run is numbered and written, and the result of the last one is
    moved into `run-N`.
    """
    steps = prepared.solver.num_steps
    # A divisor that gives some 20 chunks: a shorter last one would compile again.
    chunk = next(c for c in range(max(1, steps // 20), 0, -1) if steps % c == 0)
    fingerprint = {
        "config": json.loads(json.dumps(prepared.config.tables)),  # as it reads back
        "software": checkpoint.software(),
        "plan": json.loads(prepared.report.to_json()),
        "chunk": chunk,
        "records": hashed(jax.tree.leaves(read)),
    }
    # A run that is resumed has its own key.
    key = root_key(prepared.config.privacy.randomness)
    of_run = prepared.problem, prepared.solver, prepared.w0
    options: Any = {"key": key, "fingerprint": fingerprint, "with_start": True}
    first = checkpoint.first_checkpoint(*of_run, **options)
    if before is not None:
        return checkpoint.resume_run(out, before, first)
    with uninterruptible():
        number = spending.read(out).last
        if (out / results.RESULT).exists():
            # The record has lost some runs if a folder shows them.
            while (out / f"run-{number}" / results.RESULT).exists():
                number += 1
            aside = out / f"run-{number}"
            aside.mkdir(exist_ok=True)
            # `result.json` says that a result is complete, so it goes last here too.
            for name in (results.ARRAYS, results.RESULT):
                if (out / name).exists():
                    (out / name).replace(aside / name)
        numbered = first.fingerprint | {"run": number + 1}
        saved = dataclasses.replace(first, fingerprint=numbered)
        checkpoint.write(out, saved)
    return saved


def _result(prepared: Prepared, saved: Checkpoint, test: Records | None) -> Result:
    """Return the `Result` of a run, from its last state and its test records."""
    config = prepared.config
    found = checkpoint.solution_of(prepared.problem, prepared.solver, saved)
    usability = results.usability_of(saved.fingerprint)
    x, y = (found.value, None) if config.task.shows_model else found.value
    tested, ledgers = None, [prepared.ledger]
    if test is not None:
        # The key of the steps after the last one, which a resumed run has as well.
        model = np.asarray(y if config.task.two_levels else x)
        tested = evaluation.evaluate(config, model, test, key=saved.key)
        tested = tested.beside(usability)
        if config.data.counts_test:  # whose people are charged by a ledger of their own
            ledgers.append(evaluation.ledger_of(config))
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
        # The worst-off person decides, by the whole privacy profile.
        power=largest_powers(*ledgers),
        usability=usability,
    )


def _read(
    config: Config, options: Options
) -> tuple[dict[str, Records], Records | None]:
    """Return the records by role, and those of the test file or `None`."""
    files = loading.find_files(config, options.data, options.validation)
    records = loading.load(config, *files)
    if config.data.test is None:
        return records, None
    test = loading.load_test(config, *files)
    if config.data.counts_test:
        for level in records.values():  # their people are in no other file
            remedy = "Correct the test file, or its accuracy."
            check_disjoint_ids(test.ids, level.ids, f"{loading.IN_BOTH} {remedy}")
    return records, test
