"""The figure of a result folder: released values over the steps, the model."""

import contextlib
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .results import MOST_NAMED, Result, largest
from .tasks import TASKS

if TYPE_CHECKING:  # an extra
    from matplotlib.figure import Figure

# All that is neither a bar nor a line, so that a page can change it for a dark screen.
INK, SOFT, RULE = "#222222", "#666666", "#dddddd"
# Okabe and Ito's colors, which color-blind readers distinguish; the ink comes last.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
_COLORS += ("#56B4E9", "#CC79A7", "#B59F00", INK)
_INKED = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
_STYLE: Any = dict.fromkeys(_INKED, INK)
# In inches and points.
_PANEL, _LEAST_HEIGHT, _LINE, _AROUND = 4.6, 4.2, 0.165, 1.5
_NARROW = 3.7  # as wide as a telephone, where a page scales it
_SMALL, _MEDIUM = 8, 10
_NAME_WIDTH, _NAME_LINES = 24, 2

Panel = Callable[[Any, Result], None]


def draw(result: Result) -> bytes:
    """Draws the released trajectory, values and coefficients side by side, as PNG.

    Privacy:
        A function of released values: free.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with _style():
        FigureCanvasAgg(whole(result)).print_png(buffer)
    return buffer.getvalue()


def drawings(result: Result) -> dict[str, str]:
    """The same panels as SVG elements, one each, by their titles.

    Without a background; what is not in a color of a bar is in `INK`, `SOFT` and
    `RULE`.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    found = {}
    for title, panel in _panels(result).items():
        with _style(), rc_context({"svg.hashsalt": title}):  # the same every time
            size = _NARROW, _height(result, panel)
            figure = Figure(size, layout="constrained", facecolor="none")
            panel(figure, result)
            buffer = io.StringIO()
            metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)
        text = buffer.getvalue()
        found[title] = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)[
            text.index("<svg") :
        ]
    return found


def whole(result: Result) -> "Figure":
    """The figure of all panels, to be drawn in any format."""
    from matplotlib.figure import Figure

    with _style():
        panels = _panels(result)
        width = _PANEL * len(panels)
        size = width, 0.6 + _height(result, *panels.values())
        figure = Figure(size, layout="constrained")
        title = textwrap.fill(_title(result), int(10 * width))
        figure.suptitle(title, fontsize=_MEDIUM + 1)
        places = np.ravel(figure.subfigures(1, len(panels), squeeze=False))
        for place, (name, panel) in zip(places, panels.items(), strict=True):
            place.suptitle(name, fontsize=_MEDIUM, x=0.02, ha="left")
            panel(place, result)
    return figure


@contextlib.contextmanager
def _style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(_STYLE):
        yield


def _panels(result: Result) -> dict[str, Panel]:
    """What is drawn, by its title."""
    panels: dict[str, Panel] = {}
    moves = len(result.trajectory) > 2 and np.ptp(result.trajectory, axis=0).any()
    if moves:
        panels[f"{result.label} at every step"] = _draw_path
    if not result.shows_model and (result.has_moved or result.model is None):
        panels["the released answer"] = _draw_bars
    if result.model is not None:
        few = result.model.size > MOST_NAMED
        every = "coefficients of the released model"
        largest = f"the {MOST_NAMED} largest of {result.model.size} coefficients"
        panels[largest if few else every] = _draw_model
    return panels


def _height(result: Result, *panels: Panel) -> float:
    """Of these panels: enough for a name of two lines beside every bar."""
    model = 0 if result.model is None else result.model.size
    bars: dict[Panel, int] = {_draw_path: 0, _draw_model: model}
    bars[_draw_bars] = len(result.names)
    count = min(MOST_NAMED, max(bars[panel] for panel in panels))
    return max(_LEAST_HEIGHT, _AROUND + count * (_NAME_LINES * _LINE + 0.06))


def _axes(parent: Any) -> Any:
    axes = parent.subplots()
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=_SMALL)
    return axes


def _draw_path(parent: Any, result: Result) -> None:
    axes = _axes(parent)
    steps = np.arange(len(result.trajectory))
    # In the colors of the bars, which have the names.
    for values, color in zip(result.trajectory.T, _colors(result), strict=True):
        axes.plot(steps, values, color=color, linewidth=1.6)
    if "refit" in result.config:
        steps_are = "step (the last one refits the model)"
    else:
        steps_are = "outer step" if TASKS[result.task].two_levels() else "step"
    axes.set_xlabel(f"{steps_are}; colors as of the bars", fontsize=_SMALL + 1)
    axes.set_ylabel(f"released {result.label}", fontsize=_SMALL + 1)
    axes.set_xlim(0, max(len(steps) - 1, 1))  # no empty axis where nothing was done
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color=RULE)


def _draw_bars(parent: Any, result: Result) -> None:
    axes = _axes(parent)
    count = len(result.names)
    low, high = _range(result)
    widths = result.shown - low
    axes.barh(range(count), widths, left=low, color=_colors(result), height=0.7)
    axes.set_xlim(low, high)
    task, what = TASKS[result.task], f"released {result.label}"
    if task.places == "sources":
        axes.axvline(1 / count, color=SOFT, linestyle="--", linewidth=1)
        what += "; dashed: all alike"
    if task.places == "groups":
        shares = result.config["model"]["shares"]
        marks = {"color": INK, "marker": "|", "markersize": 16, "linestyle": ""}
        axes.plot(shares, range(count), **marks)
        what += "; marks: declared shares"
    if count <= MOST_NAMED:  # more would overlap
        _name(axes, [_labelled(result, i) for i in range(count)])
        at_the_end = {"ha": "right", "va": "center", "fontsize": _SMALL}
        for i, value in enumerate(result.shown):  # where no bar and no mark reaches
            axes.text(high, i, f"{value:.3f}", **at_the_end)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"each {task.of} ({count})", fontsize=_SMALL + 1)
    axes.set_ylim(count - 0.4, -0.6)  # from top to bottom
    axes.set_xlabel(what, fontsize=_SMALL + 1)


def _draw_model(parent: Any, result: Result) -> None:
    """The largest coefficients, by name; all of them where they are few."""
    axes = _axes(parent)
    model = np.ravel(result.model)
    names = result.features or [f"coefficient {i}" for i in range(model.size)]
    kept = largest(model)
    colors = np.asarray(_colors(result))[kept] if result.shows_model else "#737373"
    axes.barh(range(len(kept)), model[kept], color=colors, height=0.7)
    axes.axvline(0, color=INK, linewidth=1)
    _name(axes, [names[i] for i in kept])
    axes.set_ylim(len(kept) - 0.4, -0.6)
    axes.grid(axis="x", color=RULE)
    axes.set_axisbelow(True)
    axes.set_xlabel("released coefficient", fontsize=_SMALL + 1)


def _name(axes: Any, names: list[str]) -> None:
    """Writes names beside the bars, broken into lines."""
    axes.set_yticks(range(len(names)), map(_broken, names), fontsize=_SMALL)


def _broken(name: str) -> str:
    """At most two lines, of which none begins a formula."""
    lines = textwrap.wrap(name, _NAME_WIDTH)
    if len(lines) > _NAME_LINES:
        lines = lines[:_NAME_LINES]
        lines[-1] = f"{lines[-1][: _NAME_WIDTH - 1]}…"
    return "\n".join(lines).replace("$", r"\$")


def _range(result: Result) -> tuple[float, float]:
    """The axis of the bars, with room for their values."""
    model = result.config["model"]
    bounds = model.get("bounds", getattr(TASKS[result.task], "bounds", None))
    if bounds is not None:  # public, so that figures of two runs compare
        low, high = bounds
        return low, high + 0.25 * (high - low)
    return 0.0, 1.25 * float(np.max([*result.shown, *model.get("shares", ())]))


def _labelled(result: Result, index: int) -> str:
    """The name, with the corruption that the config put there."""
    name = result.names[index]
    flip = result.config["data"].get("sources", {}).get("flip")
    return f"{name} ({flip[index]:.0%} flipped)" if flip else name


def _title(result: Result) -> str:
    report = result.report
    what = result.task.replace("_", " ").capitalize()
    relation = report.relation.replace("_", "-")
    people = f", {report.people} people" if report.people else ""
    return (
        f"{what}, private with ε = {report.epsilon:.4g}, δ = {report.delta:.3g} "
        f"({relation}{people})"
    )


def _colors(result: Result) -> list:
    count = len(result.names)
    if count <= len(_COLORS):
        return list(_COLORS[:count])
    # More names cannot be distinguished: a scale from the first to the last.
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(c) for c in colormaps["viridis"](np.linspace(0, 0.95, count))]
