"""The command `dpbilevel predict`: answers of a released model for new people."""

import csv
import io
from pathlib import Path

import numpy as np
import scipy.special

from ..runs import checkpoint
from . import results
from .columns import Label, named, positions
from .tables import MALFORMED, existing, read_table


def predict(
    folder: Path, file: Path, person: str | None = None
) -> tuple[dict[str, list[str]], str]:
    """Return a model's answers for the rows of a file, as columns, and a summary.

    Args:
        folder: The folder of a finished run.
        file: A file with the columns of the features; it needs no label.
        person: A column that is copied beside the answers, by default that of the
            people of the config if the file has it.

    Returns:
        Columns by name, with a text for each row, and a text for the readers: the
        number of rows, and of those without an answer or with a cell that the config
        does not declare.

    Privacy:
        Post-processing of the released model: costs nothing. The answers are as
        private as the rows of `file`.
    """
    result = results.load(folder)
    data = result.config.data
    existing(file, "new records", "give its path")
    table = read_table(file, data.separator, data.missing)
    numeric = [name for block in data.numeric for name in block.columns]
    needed = [*numeric, *(b.column for b in data.categorical), *filter(None, [person])]
    lacking = [name for name in needed if name not in table.columns]
    if lacking:
        raise ValueError(f"{file} lacks columns that the predictions need: {lacking}.")
    features, _ = data.design(table)
    margin = features.astype(np.float64) @ np.asarray(result.model)
    columns = {"row": [str(i) for i in range(1, table.rows + 1)]}
    own = result.config.privacy.person
    if person or own in table.columns:
        columns[person or own] = list(table.column(person or own))
    columns |= _answers(
        margin, data.label, getattr(result.config.model, "loss", "logistic")
    )
    malformed = table.column(needed[0]).count(MALFORMED)
    empty = int(np.sum(np.isnan(np.atleast_2d(margin.T)).any(axis=0)))
    counts = {
        "without an answer: more or fewer cells than the header has names": malformed,
        "without an answer: text in the place of a number": empty - malformed,
    }
    for name in numeric:
        middle = "taken as the middle of the declared range"
        what = f"without a number in {name!r}, {middle}"
        counts[what] = table.column(name).count("")
    for block in data.categorical:
        unlisted = int(np.sum(positions(table.column(block.column), block.values) < 0))
        what = f"with a value of {block.column!r} that the config does not list"
        counts[what] = unlisted - malformed
    said = [f"{count} {what}" for what, count in counts.items() if count > 0]
    return columns, "; ".join([f"{table.rows} rows", *said])


def write(out: Path, columns: dict[str, list[str]]) -> None:
    """Write predictions as a comma-separated file, completely or not at all."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(zip(*columns.values(), strict=True))
    checkpoint.replace(out, text.getvalue().encode())


def check_new(out: Path, option: str = "--out") -> None:
    """Raise `ValueError` if a file exists, or the folder for it does not."""
    if out.exists():
        raise ValueError(f"{out} exists; give {option} the name of a new file.")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} for {option} {out}.")


def _answers(margin: np.ndarray, label: Label, loss: str) -> dict[str, list[str]]:
    known = np.isfinite(margin)
    if label.mean is not None and label.scale is not None:
        values = label.mean + label.scale * label.clip * np.clip(margin, -1, 1)
        values = np.expm1(values) if label.transform == "log1p" else values
        return {label.column: _texts(values, known)}
    classes = [named(values[0]) for values in label.of_classes.values()]
    if label.classes:
        known, best = np.all(known, axis=-1), np.argmax(margin, axis=1)
        chances = scipy.special.softmax(margin, axis=1).T
    else:
        best, chances = (margin >= 0).astype(int), [scipy.special.expit(margin)]
    found = [classes[i] if k else "" for i, k in zip(best, known, strict=True)]
    columns = {label.column: found}
    if loss != "squared":
        pairs = zip(classes[-len(chances) :], chances, strict=True)
        columns |= {f"probability of {c}": _texts(v, known) for c, v in pairs}
    return columns


def _texts(values: np.ndarray, known: np.ndarray) -> list[str]:
    return [f"{v:.6g}" if k else "" for v, k in zip(values, known, strict=True)]
