"""The figure of results/utility.md, drawn from the tables of that page.

Run by `python -m benchmarks utility_figure`: reads every table of the page and writes
results/utility.svg beside it, so that the figure shows what the page says.
"""

import re

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MultipleLocator

from .utility import BASELINES, PAGE, TWO_STAGES

FIGURE = PAGE.with_suffix(".svg")
TABLE = re.compile(
    r"^#### (?P<task>[^\n]*), epsilon (?P<epsilon>\S+)\n(?P<rows>.*?)(?=\n#|\Z)",
    re.M | re.S,
)
ROW = re.compile(r"^\| (.*?) \| (\S+) \[(\S+), (\S+)\] \|", re.M)
# Methods that are drawn, with the words of the legend. One level is the zero line.
SHOWN = {
    "`auto`": ("auto", "#d62728", "D"),
    "`MixedSources`": ("MixedSources", "#1f77b4", "o"),
    TWO_STAGES: ("two stages (SelectedSources)", "#2ca02c", "s"),
    "`PenaltyBilevel`, refitted": ("PenaltyBilevel, refitted", "#9467bd", "^"),
    "`SingleLoopBilevel`, refitted": ("SingleLoopBilevel, refitted", "#8c8c8c", "v"),
    "`FiniteDifferenceBilevel`, refitted": (
        "FiniteDifferenceBilevel, refitted",
        "#ff7f0e",
        "<",
    ),
}
NO_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # behind text
LEAST, MOST = -1.0, 1.6  # of the axis; what lies outside is drawn at its end


def tables(text):
    """Read the tables of the page: task, epsilon, losses and quartiles."""
    for found in TABLE.finditer(text):
        rows = {name: tuple(map(float, v)) for name, *v in ROW.findall(found["rows"])}
        yield found["task"], found["epsilon"], rows


def gaps(rows):
    """Median and quartiles of the share of the gap that each method closes."""
    base = min(rows[name][0] for name in BASELINES)
    room = base - rows["oracle"][0]
    return {name: (base - np.asarray(losses)) / room for name, losses in rows.items()}


def main():
    """Draws one line per task and one mark per method."""
    found = [(t, e, gaps(rows)) for t, e, rows in tables(PAGE.read_text())]
    plt.rcParams.update({"svg.hashsalt": "utility", "svg.fonttype": "none"})
    # Narrow enough to be read on a phone, so that names stand above their lines.
    figure, axes = plt.subplots(figsize=(4.8, 2 + 0.8 * len(found)))
    offsets = np.linspace(0.08, -0.4, len(SHOWN))
    for (method, (label, color, marker)), offset in zip(
        SHOWN.items(), offsets, strict=True
    ):
        there = [(i, v[method]) for i, (_, _, v) in enumerate(found) if method in v]
        places = np.array([i for i, _ in there]) - offset
        middle, low, high = np.clip([v for _, v in there], LEAST, MOST).T
        axes.hlines(places, high, low, color=color, alpha=0.6, linewidth=2)
        axes.plot(middle, places, marker, color=color, markersize=6, label=label)
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(1, color="black", linewidth=1, linestyle="--")
    for edge in np.arange(len(found) - 1) + 0.5:
        axes.axhline(edge, color="#dddddd", linewidth=0.8)
    several = len({e for _, e, _ in found}) > 1
    for i, (task, epsilon, _) in enumerate(found):
        name = f"{task}, epsilon {epsilon}" if several else task
        axes.text(LEAST, i - 0.28, name, va="center", bbox=NO_LINES)
    axes.set_yticks([])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(LEAST - 0.05, MOST + 0.05)
    axes.xaxis.set_major_locator(MultipleLocator(0.5))
    axes.set_xlabel(
        "share of the gap closed:\n0 is the best of one level, 1 the oracle"
    )
    figure.legend(loc="outside upper left", frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(FIGURE, metadata={"Date": None})
    print(f"Figure: {FIGURE}")
