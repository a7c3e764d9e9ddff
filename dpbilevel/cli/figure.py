"""The figure of a result folder: released values over the steps, the model."""

import io
from collections.abc import Callable

import numpy as np

from .results import Result
from .tasks import TASKS

# Okabe and Ito's colors, told apart by color-blind readers; black comes last.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
_COLORS += ("#56B4E9", "#CC79A7", "#B59F00", "#000000")
_MOST_NAMED = 16


def draw(result: Result) -> bytes:
    """Draws the released trajectory, values and coefficients, as PNG.

    Privacy:
        A function of released values: free.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[int, Callable]] = []
    if len(result.trajectory) > 2 and np.ptp(result.trajectory, axis=0).any():
        panels.append((3, _draw_path))
    if result.has_moved or result.model is None:
        panels.append((2, _draw_bars))
    if result.model is not None:
        panels.append((2, _draw_model))
    width = 4.2 * len(panels) + 1.6
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    figure.suptitle(_title(result), fontsize=11)
    ratios = [share for share, _ in panels]
    drawn = figure.subplots(1, len(panels), width_ratios=ratios, squeeze=False)[0]
    for axes, (_, draw_panel) in zip(drawn, panels, strict=True):
        draw_panel(axes, result)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _draw_path(axes, result: Result) -> None:
    steps = np.arange(len(result.trajectory))
    # In the colors of the bars, which have the names.
    for values, color in zip(result.trajectory.T, _colors(result), strict=True):
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


def _draw_bars(axes, result: Result) -> None:
    count = len(result.names)
    low, high = _range(result)
    bars = axes.barh(
        range(count), result.shown - low, left=low, color=_colors(result), height=0.7
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


def _draw_model(axes, result: Result) -> None:
    """The largest coefficients, by name; all of them where they are few."""
    model = np.ravel(result.model)
    names = result.features or [f"coefficient {i}" for i in range(model.size)]
    order = np.argsort(-np.abs(model), kind="stable")[:_MOST_NAMED]
    kept = np.sort(order)  # in the order of the config
    axes.barh(range(len(kept)), model[kept], color="0.45", height=0.7)
    axes.axvline(0, color="0.2", linewidth=1)
    axes.set_yticks(range(len(kept)), [_short(names[i]) for i in kept], fontsize=8)
    axes.set_ylim(len(kept) - 0.4, -0.6)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel("released coefficient")
    few = f"the {len(kept)} largest of {model.size} coefficients"
    every = "coefficients of the released model"
    title = few if len(kept) < model.size else every
    axes.set_title(title, fontsize=10, loc="left")


def _short(name: str) -> str:
    """At most 28 characters, of which none begins a formula."""
    text = name if len(name) <= 28 else f"{name[:27]}…"
    return text.replace("$", r"\$")


def _range(result: Result) -> tuple[float, float]:
    """The axis of the bars, with room for their values."""
    model = result.config["model"]
    bounds = model.get("bounds", getattr(TASKS[result.task], "bounds", None))
    if bounds is not None:  # public, so that figures of two runs compare
        low, high = bounds
        return low, high + 0.15 * (high - low)
    return 0.0, 1.15 * float(np.max([*result.shown, *model.get("shares", ())]))


def _labelled(result: Result, index: int) -> str:
    """The name, with the corruption that the config put there."""
    name = _short(result.names[index])
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
    # More cannot be told apart by name: a scale from the first to the last.
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.95, count)))
