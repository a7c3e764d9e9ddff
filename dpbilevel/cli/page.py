"""Certificate of a result folder; needs jinja2 and matplotlib."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from typing_extensions import override

from ..audit.certificate import Certificate
from . import environment, figure
from .results import Result

_COLORS = {
    figure.INK: "var(--ink)",
    figure.SOFT: "var(--soft)",
    figure.RULE: "var(--rule)",
}
_TUNING = (
    "Columns, bounds, lists of values and scales were declared in the config; the "
    "program computed nothing from the records but the releases of its ledger{}."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCertificate(Certificate):
    """A `Certificate` that shows the released values and the config of a run.

    Attributes:
        result: Result of the run.
    """

    result: Result

    @override
    def html(self) -> str:
        result = self.result
        coefficients = []
        if not result.config.task.shows_model:
            coefficients = _rows(result.features, np.ravel(result.model))
        return self.render(
            "page.html",
            environment(),
            result=result,
            drawings={k: _recolored(k, v) for k, v in figure.drawings(result).items()},
            shown=_rows(result.names, result.shown),
            coefficients=coefficients,
            config=_lines(result.config.tables),
        )


def certificate_of(
    result: Result, spent: str, title: str, total: tuple[int, float, float]
) -> RunCertificate:
    """Return the certificate of a run of the command line.

    Args:
        result: Result of the run.
        spent: What all runs of the folder have spent, as text.
        title: Name of the run.
        total: As in `Certificate`.

    Privacy:
        A function of released and public values: free. The page loads nothing from the
        network, so that no server learns who reads it.
    """
    task, columns = result.config.task, ", ".join(result.features)
    facts = {
        "product": f"the {task.label} of each {task.of}, and a linear model of "
        f"{np.size(result.model)} coefficients; task {task.name}",
        "data": f"all tables of records with the declared columns: {columns}",
        "tuning": _TUNING.format(""),
    }
    if result.test is not None:
        facts["utility"] = str(result.test)
        if result.test.kind == "non_private":
            of = f"the exact {result.test.metric} on {result.test.file}"
            exact = f"{of}, which is NON-PRIVATE"
            facts |= {"exact": exact, "tuning": _TUNING.format(f" and {exact}")}
    more: Any = {"spent": spent, "total": total, "terms": task.terms, "facts": facts}
    return RunCertificate(result.report, title, result.power, **more, result=result)


def _rows(names: tuple[str, ...], values: np.ndarray) -> list[tuple[str, str]]:
    return [(name, f"{v:.4f}") for name, v in zip(names, values, strict=True)]


def _recolored(title: str, drawing: str) -> Markup:
    """Return a drawing in the colors of the page, with a name for screen readers."""
    for color, variable in _COLORS.items():
        drawing = drawing.replace(color, variable)
    label = f'<svg role="img" aria-label="{escape(title)}"'
    return Markup(drawing.replace("<svg", label, 1))  # matplotlib escapes its texts


def _lines(value: Any, key: str = "") -> str:
    """Return a config, or what it has below a key, in TOML, one key a line."""
    if isinstance(value, dict):
        at = f"{key}." if key else ""
        parts = (_lines(part, f"{at}{_key(name)}") for name, part in value.items())
        return "\n".join(filter(None, parts))
    is_local = key.endswith("path") and Path(value).is_absolute()
    return f"{key} = {_inline(Path(value).name if is_local else value)}"


def _inline(value: Any) -> str:
    """Return a value in TOML; a list of tables has one of them a line."""
    if isinstance(value, dict):
        pairs = (f"{_key(name)} = {_inline(part)}" for name, part in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        is_tables = any(isinstance(part, dict) for part in value)
        between = ",\n  " if is_tables else ", "
        return f"[{between.join(map(_inline, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _inline(name)
