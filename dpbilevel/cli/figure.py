"""The figure of a result folder: released values over the steps, and at the end."""

import io

import numpy as np

from .results import Result
from .tasks import TASKS

# Okabe and Ito's colors, told apart by color-blind readers; black comes last.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
_COLORS += ("#56B4E9", "#CC79A7", "#B59F00", "#000000")
_MOST_NAMED = 16


def draw(result: Result) -> bytes:
    """Draws the released trajectory and the released values, as PNG.

    Privacy:
        A function of released values: free.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    figure.suptitle(_title(result), fontsize=11)
    path, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = _colors(len(result.names))
    _draw_path(path, result, colors)
    _draw_bars(bars, result, colors)
    for axes in (path, bars):
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _draw_path(axes, result: Result, colors) -> None:
    steps = np.arange(len(result.trajectory))
    # In the colors of the bars, which have the names.
    for values, color in zip(result.trajectory.T, colors, strict=True):
        axes.plot(steps, values, color=color, linewidth=1.6)
    if "refit" in result.config:
        steps_are = "step (the last one refits the model)"
    else:
        steps_are = "outer step" if TASKS[result.task].two_levels() else "step"
    axes.set_xlabel(steps_are)
    axes.set_ylabel(f"released {result.label}")
    axes.set_xlim(0, max(len(steps) - 1, 1))  # no empty axis where nothing was done
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("at every step", fontsize=10, loc="left")
    axes.grid(axis="y", color="0.9")


def _draw_bars(axes, result: Result, colors) -> None:
    count = len(result.names)
    low, high = _range(result)
    bars = axes.barh(
        range(count), result.shown - low, left=low, color=colors, height=0.7
    )
    axes.set_xlim(low, high)
    places = TASKS[result.task].places
    if places == "sources":  # where they all count alike
        axes.axvline(1 / count, color="0.4", linestyle="--", linewidth=1)
        axes.text(1 / count, -0.75, " uniform", color="0.4", fontsize=8, va="center")
    if places == "groups":
        shares = result.config["model"]["shares"]
        marks = {"color": "0.2", "marker": "|", "markersize": 16, "linestyle": ""}
        axes.plot(shares, range(count), **marks, label="declared share")
        axes.legend(fontsize=8, frameon=False, loc="upper right")
    if count <= _MOST_NAMED:  # more would overlap
        labels = [_labelled(result, i) for i in range(count)]
        axes.set_yticks(range(count), labels, fontsize=8)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line
        texts = [f"{v:.3f}" for v in result.shown]
        axes.bar_label(bars, texts, padding=4, fontsize=8, bbox=box)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{count} groups of coefficients")
    # From top to bottom, with room for the word above the first bar.
    axes.set_ylim(count - 0.4, -1.1 if places == "sources" else -0.6)
    axes.set_xlabel(f"released {result.label}")
    axes.set_title("the released answer", fontsize=10, loc="left")


def _range(result: Result) -> tuple[float, float]:
    """The axis of the bars, with room for their values."""
    model = result.config["model"]
    bounds = model.get("bounds", getattr(TASKS[result.task], "bounds", None))
    if bounds is not None:  # public, so that figures of two runs compare
        low, high = bounds
        return low, high + 0.15 * (high - low)
    return 0.0, 1.15 * float(np.max([*result.shown, *model.get("shares", ())]))


def _labelled(result: Result, index: int) -> str:
    """The name, with the corruption that the config put there, or the group's value."""
    data, name = result.config["data"], result.names[index]
    values = data.get("groups", {}).get("values")
    flip = data.get("sources", {}).get("flip")
    if values:
        return str(values[index])
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


def _colors(count: int) -> list:
    if count <= len(_COLORS):
        return list(_COLORS[:count])
    # More cannot be told apart by name: a scale from the first to the last.
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.95, count)))
