"""The figure of results/utility.md, drawn from the tables of that page."""

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
# Methods that are drawn, with their color and marker. One level is the zero line.
SHOWN = {
    "`auto`": ("#d62728", "D"),
    "`MixedSources`": ("#1f77b4", "o"),
    TWO_STAGES: ("#2ca02c", "s"),
    "`PenaltyBilevel`, refitted": ("#9467bd", "^"),
    "`SingleLoopBilevel`, refitted": ("#8c8c8c", "v"),
    "`FiniteDifferenceBilevel`, refitted": ("#ff7f0e", "<"),
}
NO_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # behind text
LEAST, MOST = -1.0, 1.6  # of the axis; what lies outside is drawn at its end


def gaps(rows):
    base = min(rows[name][0] for name in BASELINES)
    room = base - rows["oracle"][0]
    return {name: (base - np.asarray(losses)) / room for name, losses in rows.items()}


def main():
    found = []
    for part in TABLE.finditer(PAGE.read_text()):
        rows = {name: tuple(map(float, v)) for name, *v in ROW.findall(part["rows"])}
        found.append((f"{part['task']}, epsilon {part['epsilon']}", gaps(rows)))
    plt.rcParams.update({"svg.hashsalt": "utility", "svg.fonttype": "none"})
    # Narrow enough to be read on a phone, so that names stand above their lines.
    figure, axes = plt.subplots(figsize=(4.8, 2 + 0.8 * len(found)))
    offsets = np.linspace(0.08, -0.4, len(SHOWN))
    for (method, (color, marker)), offset in zip(SHOWN.items(), offsets, strict=True):
        there = [(i, v[method]) for i, (_, v) in enumerate(found) if method in v]
        places = np.array([i for i, _ in there]) - offset
        middle, low, high = np.clip([v for _, v in there], LEAST, MOST).T
        axes.hlines(places, high, low, color=color, alpha=0.6, linewidth=2)
        label = method.replace("`", "")
        axes.plot(middle, places, marker, color=color, markersize=6, label=label)
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(1, color="black", linewidth=1, linestyle="--")
    for i, (name, _) in enumerate(found):
        axes.text(LEAST, i - 0.28, name, va="center", bbox=NO_LINES)
        if i:
            axes.axhline(i - 0.5, color="#dddddd", linewidth=0.8)
    axes.set(yticks=[], ylim=(len(found) - 0.5, -0.5), xlim=(LEAST - 0.05, MOST + 0.05))
    axes.xaxis.set_major_locator(MultipleLocator(0.5))
    axes.set_xlabel(
        "share of the gap closed:\n0 is the best of one level, 1 the oracle"
    )
    figure.legend(loc="outside upper left", frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(FIGURE, metadata={"Date": None})
    print(f"Figure: {FIGURE}")
