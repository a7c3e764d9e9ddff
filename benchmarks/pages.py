"""Places, options of the command line, tables and pages, which benchmarks share.

The census (Adult) is read from $ADULT or ../shared/data/adult.csv, MNIST (`images` and
`labels` of an npz file) from $MNIST or ../shared/data/mnist_10k.npz.
"""

import datetime
import json
import os
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
ADULT = pathlib.Path(os.environ.get("ADULT", ROOT / "../shared/data/adult.csv"))
MNIST = pathlib.Path(os.environ.get("MNIST", ROOT / "../shared/data/mnist_10k.npz"))
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def options():
    """Return the values of the options `--name=value` of the command line."""
    return dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)


def table(head, rows, title=None):
    """Return rows of texts as a table in Markdown, below its title if there is one."""
    lines = [f"#### {title}", ""] if title else []
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def spread(values, form=".4f", ends=(0.25, 0.75)):
    """Return the median and two quantiles as a text."""
    middle, low, high = np.quantile(values, (0.5, *ends))
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def by_median(title, found, unit, *, higher_is_better):
    """Return a table of methods with medians and quartiles, the worst method first."""
    rows = sorted(found.items(), key=lambda row: np.median(row[1]))
    rows = [[method, spread(values)] for method, values in rows]
    head = ["method", f"{unit} [quartiles]"]
    return table(head, rows if higher_is_better else rows[::-1], title)


def best_of(settings, *, higher_is_better):
    """Return the setting of the best median, in hindsight, each one number a key."""
    return (max if higher_is_better else min)(settings, key=np.median)


def measured_today():
    return f"Measured on {datetime.date.today().isoformat()}."


def written(text, parts):
    """Return the text of a page with these parts between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page needs the lines {BEGIN} and {END}.")
    return before + "\n\n".join([BEGIN, *parts, END]) + after


def write(page, parts):
    """Put what was measured today between the marks of a page."""
    page.write_text(written(page.read_text(), [measured_today(), *parts]))


def kept(file, empty=list):
    """Return the results that earlier calls left in a file."""
    return json.loads(file.read_text()) if file.is_file() else empty()


def keep(file, results):
    """Leave results for later calls."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results))


def texts(records, column):
    """Return the stripped texts of a column of a CSV file."""
    return np.array([str(value).strip() for value in records.column(column)])
