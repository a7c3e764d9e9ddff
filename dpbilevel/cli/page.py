"""Certificate and figures of a result folder; needs jinja2 and matplotlib."""

import dataclasses
import io
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import colormaps, rc_context
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from typing_extensions import override

from ..audit.certificate import Certificate
from . import environment
from .results import MOST_NAMED, Result, largest

# Colors of everything but bars and lines, which a page replaces on a dark screen.
INK, RULE = "#222222", "#dddddd"
# Okabe and Ito's colors, which color-blind readers distinguish; the ink comes last.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
_COLORS += ("#56B4E9", "#CC79A7", "#B59F00", INK)
_INKED = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
_STYLE: Any = dict.fromkeys(_INKED, INK)
# Sizes in inches, then in points.
_LEAST_HEIGHT, _AROUND, _BAR = 4.2, 1.5, 0.39
_NARROW = 3.7  # width of a telephone, to which a page scales the figure
_SMALL, _LABEL = 8, 9
_NAME_WIDTH, _NAME_LINES = 24, 2
_ON_PAGE = {INK: "var(--ink)", RULE: "var(--rule)"}
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
            names = result.config.data.coefficients
            coefficients = _rows(names, np.ravel(result.model))
        return self.render(
            "page.html",
            environment(),
            result=result,
            drawings={k: _recolored(k, v) for k, v in drawings(result).items()},
            shown=_rows(result.names, result.shown),
            coefficients=coefficients,
            config=_lines(result.config.tables),
        )


def certificate_of(
    result: Result, spent: str, title: str, total: tuple[int, float, float]
) -> RunCertificate:
    """Return the certificate of a run; `spent` is the text on all runs of its folder.

    Privacy:
        A function of released and public values: free. The page loads nothing from the
        network, so that no server learns who reads it.
    """
    task, columns = result.config.task, ", ".join(result.config.data.coefficients)
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
    for color, variable in _ON_PAGE.items():
        drawing = drawing.replace(color, variable)
    label = f'<svg role="img" aria-label="{escape(title)}"'
    return Markup(drawing.replace("<svg", label, 1))  # matplotlib escapes its texts


def _lines(value: Any, key: str = "") -> str:
    """Return a config, or the part of it below a key, as TOML text, one key a line."""
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


def drawings(result: Result) -> dict[str, str]:
    """Return a dict by title: `figures` as SVG texts without background."""
    found = {}
    for title, figure in figures(result).items():
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        # The salt makes the names of elements the same every time.
        with rc_context({**_STYLE, "svg.hashsalt": title}):
            figure.savefig(buffer, format="svg", metadata=metadata)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        found[title] = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return found


def figures(result: Result) -> dict[str, Figure]:
    """Return a dict by title: figures of released trajectory, answer and model.

    Privacy:
        A function of released values: free.
    """
    found = {}

    def add(title: str, draw: Callable[[Any, Result], None], bars: int) -> None:
        height = max(_LEAST_HEIGHT, _AROUND + _BAR * min(MOST_NAMED, bars))
        with rc_context(_STYLE):
            figure = Figure((_NARROW, height), layout="constrained", facecolor="none")
            axes: Any = figure.subplots()
            axes.set_facecolor("none")
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=_SMALL)
            draw(axes, result)
        found[title] = figure

    task, model = result.config.task, result.model
    if len(result.trajectory) > 2 and np.ptp(result.trajectory, axis=0).any():
        add(f"{task.label} at every step", _draw_path, 0)
    if not task.shows_model and result.has_moved:
        add("the released answer", _draw_bars, len(result.names))
    title = "coefficients of the released model"
    if model.size > MOST_NAMED:
        title = f"the {MOST_NAMED} largest of {model.size} coefficients"
    add(title, _draw_model, model.size)
    return found


def _draw_path(axes: Any, result: Result) -> None:
    steps = np.arange(len(result.trajectory))
    for values, color in zip(result.trajectory.T, _colors(result), strict=True):
        axes.plot(steps, values, color=color, linewidth=1.6)
    steps_are = "outer step" if result.config.task.two_levels else "step"
    if "refit" in result.config.tables:
        steps_are = "step (the last one refits the model)"
    text = textwrap.fill(f"{steps_are}; colors as of the bars", _NAME_WIDTH)
    axes.set_xlabel(text, fontsize=_LABEL)
    axes.set_ylabel(f"released {result.config.task.label}", fontsize=_LABEL)
    axes.set_xlim(0, max(len(steps) - 1, 1))  # no empty axis if there is no step
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color=RULE)


def _draw_bars(axes: Any, result: Result) -> None:
    task, count = result.config.task, len(result.names)
    settings = result.config.model
    low, high = 0.0, float(np.max([*result.shown, *settings.marks]))
    if settings.axis is not None:  # public, so that figures of two runs compare
        low, high = settings.axis
    end = high + 0.25 * (high - low)  # with room for the values
    bars: Any = {"left": low, "color": _colors(result), "height": 0.7}
    axes.barh(range(count), result.shown - low, **bars)
    axes.set_xlim(low, end)
    what = f"released {task.label}"
    if settings.marks:
        marks = {"color": INK, "marker": "|", "markersize": 16, "linestyle": ""}
        axes.plot(settings.marks, range(count), **marks)
        what += f"; marks: {task.marked}"
    if count <= MOST_NAMED:  # more would overlap
        _name(axes, [*result.names])
        for i, value in enumerate(result.shown):  # beyond all bars and marks
            axes.text(end, i, f"{value:.3f}", ha="right", va="center", fontsize=_SMALL)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"each {task.of} ({count})", fontsize=_LABEL)
    axes.set_ylim(count - 0.4, -0.6)  # from top to bottom
    axes.set_xlabel(textwrap.fill(what, _NAME_WIDTH), fontsize=_LABEL)


def _draw_model(axes: Any, result: Result) -> None:
    """Draw the largest coefficients with their names."""
    model = np.ravel(result.model)
    kept, colors = largest(model), "#737373"
    if result.config.task.shows_model:
        colors = np.asarray(_colors(result))[kept]
    axes.barh(range(len(kept)), model[kept], color=colors, height=0.7)
    axes.axvline(0, color=INK, linewidth=1)
    names = result.config.data.coefficients
    _name(axes, [names[i] for i in kept])
    axes.set_ylim(len(kept) - 0.4, -0.6)
    axes.grid(axis="x", color=RULE)
    axes.set_axisbelow(True)
    axes.set_xlabel("released coefficient", fontsize=_LABEL)


def _name(axes: Any, names: list[str]) -> None:
    """Label the bars of a chart with their names."""
    axes.set_yticks(range(len(names)), map(_wrapped, names), fontsize=_SMALL)


def _wrapped(name: str) -> str:
    """Return a name in at most two lines; no character of it begins a formula."""
    lines = textwrap.wrap(name, _NAME_WIDTH)
    if len(lines) > _NAME_LINES:
        lines = lines[:_NAME_LINES]
        lines[-1] = f"{lines[-1][: _NAME_WIDTH - 1]}…"
    return "\n".join(lines).replace("$", r"\$")


def _colors(result: Result) -> list[str]:
    count = len(result.names)
    if count <= len(_COLORS):
        return list(_COLORS[:count])
    # More colors cannot be distinguished: a scale from the first to the last.
    return [to_hex(c) for c in colormaps["viridis"](np.linspace(0, 0.95, count))]
