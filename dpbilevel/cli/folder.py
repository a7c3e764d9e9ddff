"""Checks of what a result folder holds before a run starts in it."""

from pathlib import Path

from ..runs import checkpoint, spending
from ..runs.resume import check_empty
from . import results


def check(out: Path, resume: bool, restart: bool) -> None:
    """Refuse folders that hold something else, before anything is spent; under a lock.

    Raises:
        ValueError: The folder does not fit; the message says what to do.
    """
    record = spending.read(out)
    finished = (out / results.RESULT).exists()
    interrupted = (out / checkpoint.NAME).exists()
    if finished:
        _settle(out)
    elif resume:
        checkpoint.read(out)
        return
    if spending.is_lost(out) and (finished or restart or not interrupted):
        raise ValueError(
            f"--out {out} holds {'a finished' if finished else 'an earlier'} run, but "
            f"no spending record that can be read ({spending.NAME}): what earlier "
            "runs cost is unknown. Put back a copy of the record, or give a new folder "
            "for a second release on top of that cost."
        )
    if not restart:
        _check_unused(out, finished, interrupted, len(record.runs))
    if not (record.runs or interrupted):
        check_empty("--out", out)


def spent(out: Path) -> str:
    """Return what the runs of a folder cost, as text; empty if none was started."""
    record = spending.read(out)
    if spending.is_moved(out.resolve()):  # by a later run
        above = out.resolve().parent
        return f"spending: in the record of its folder: dpbilevel report {above}"
    return str(record) if record.runs or spending.is_lost(out) else ""


def _settle(out: Path) -> None:
    """End a finished run that was killed in its last moment."""
    if (out / checkpoint.NAME).exists():
        try:
            spending.finish(out, checkpoint.read(out).fingerprint["run"])
        except (ValueError, KeyError):
            pass  # damaged: its owner is unknown, and it is deleted all the same
    checkpoint.remove(out)


def _check_unused(out: Path, finished: bool, interrupted: bool, spent: int) -> None:
    """Refuse a folder of earlier runs, and say how to go on."""
    again = "give a new folder"
    if spent:
        again += ", or --restart to add it to this folder's spending record"
    if finished:
        raise ValueError(
            f"--out {out} holds a finished run (see it with: dpbilevel report {out}). "
            "For a second release, which spends the privacy budget a second time, "
            f"{again}."
        )
    if interrupted:
        raise ValueError(
            f"--out {out} holds an interrupted run. Continue it with --resume (same "
            f"bits, no further budget), or, for a new release, {again}."
        )
    if spent:
        raise ValueError(
            f"--out {out} holds the spending record of earlier runs ({spent}), and "
            f"nothing to resume. For a new release {again}."
        )
