"""Solutions read back: those that were saved, and those of the command line."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from ..core import saved
from ..core.solution import Solution
from ..privacy.report import PrivacyReport
from . import checkpoint


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
    if (folder / saved.PAGE).is_file():
        parts, facts = saved.read(folder, like)
    elif (folder / checkpoint.RESULT).is_file():
        parts, facts = _of_command(folder)
    else:
        names = f"{saved.PAGE} or {checkpoint.RESULT}"
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
        raise saved.unreadable(folder, error) from error


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
        raise saved.unreadable(folder, error) from error
