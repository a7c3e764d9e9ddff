"""The figure of a result folder: released values over the steps, and at the end."""

import io

import numpy as np

from .results import Result
from .tasks import TASKS, GroupTask, PenaltyTuningTask

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
        steps_are = "outer step" if TASKS[result.task].two_levels else "step"
    axes.set_xlabel(steps_are)
    axes.set_ylabel(f"released {result.label}")
    axes.set_xlim(0, max(len(steps) - 1, 1))
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
    if result.task == "source_weighting":
        axes.axvline(1 / count, color="0.4", linestyle="--", linewidth=1)
        axes.text(1 / count, -0.75, " uniform", color="0.4", fontsize=8, va="center")
    if _has_groups(result):
        shares = result.config["model"]["shares"]
        marks = {"color": "0.2", "marker": "|", "markersize": 16, "linestyle": ""}
        axes.plot(shares, range(count), **marks, label="declared share")
        axes.legend(fontsize=8, frameon=False, loc="upper right")
    if count <= _MOST_NAMED:
        labels = [_labelled(result, i) for i in range(count)]
        axes.set_yticks(range(count), labels, fontsize=8)
        axes.bar_label(bars, [f"{v:.3f}" for v in result.shown], padding=4, fontsize=8)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{count} groups of coefficients")
    axes.set_ylim(count - 0.4, -1.1 if result.task == "source_weighting" else -0.6)
    axes.set_xlabel(f"released {result.label}")
    axes.set_title("the released answer", fontsize=10, loc="left")


def _has_groups(result: Result) -> bool:
    return issubclass(TASKS[result.task], GroupTask)


def _range(result: Result) -> tuple[float, float]:
    """The axis of the bars, with room for their values."""
    model = result.config["model"]
    if result.task == "penalty_tuning":
        low, high = model.get("bounds", PenaltyTuningTask.bounds)
        return low, high + 0.15 * (high - low)
    shares = model["shares"] if _has_groups(result) else ()
    return 0.0, 1.15 * float(np.max([*result.shown, *shares]))


def _labelled(result: Result, index: int) -> str:
    """The name, with the corruption that the config put there, or the group's value."""
    data = result.config.get("data", {})
    if _has_groups(result):
        values = data["groups"].get("values")
        return str(values[index]) if values else result.names[index]
    sources = data.get("sources", {})
    flip = sources.get("flip") if result.task == "source_weighting" else None
    name = result.names[index]
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
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.95, count)))
