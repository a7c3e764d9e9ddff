"""Places, options of the command line, tables, pages and times: what benchmarks share.

The census (Adult) is read from $ADULT or ../shared/data/adult.csv, MNIST (`images` and
`labels` of an npz file) from $MNIST or ../shared/data/mnist_10k.npz.
"""

import datetime
import json
import math
import os
import pathlib
import sys
import time

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
ADULT = pathlib.Path(os.environ.get("ADULT", ROOT / "../shared/data/adult.csv"))
MNIST = pathlib.Path(os.environ.get("MNIST", ROOT / "../shared/data/mnist_10k.npz"))
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def options():
    """Return the values of the options `--name=value` of the command line."""
    return dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)


def chosen(names):
    """Return the names that begin like the option `--task`."""
    return [name for name in names if name.startswith(options().get("task", ""))]


def budgets(default):
    """Return the epsilons of the option `--epsilon`, such as `1,3`."""
    return [float(text) for text in options().get("epsilon", default).split(",")]


def table(head, rows, title=None):
    """Return rows of texts as a table in Markdown, below its title if there is one."""
    lines = [f"#### {title}", ""] if title else []
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def spread(values, form=".4f", ends=(0.25, 0.75)):
    """Return the median and two quantiles as a text."""
    middle, low, high = np.quantile(values, (0.5, *ends))
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def compare(name, tasks, measure, unit, *, higher_is_better, complete):
    """Print a table for each task, the worst method first; write them if complete.

    `tasks` has the arguments of `measure`, which returns the values of each method.
    """
    tables, head = [], ["method", f"{unit} [quartiles]"]
    for title, task in tasks.items():
        print(title, flush=True)
        found = sorted(measure(*task).items(), key=lambda row: np.median(row[1]))
        rows = [[method, spread(values)] for method, values in found]
        tables.append(table(head, rows if higher_is_better else rows[::-1], title))
        print(tables[-1], flush=True)
    if complete:
        write(RESULTS / f"{name}.md", tables)


def best_of(settings, *, higher_is_better):
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
    page.write_text(written(page.read_text(), [measured_today(), *parts]))


def kept(file, empty=list):
    return json.loads(file.read_text()) if file.is_file() else empty()


def keep(file, results):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results))


def once(file, name, measure):
    """Return what a file has under a name, or a new value, which it then has."""
    found = kept(file, dict) if file else {}
    if name not in found:
        found[name] = measure()
        if file:
            keep(file, found)
    return found[name]


def saved():
    """Return the file of the option `--saved`, if there is one."""
    return pathlib.Path(options()["saved"]) if "saved" in options() else None


def mnist():
    """Return images of 28 x 28 pixels in [0, 1], and their labels."""
    with np.load(MNIST) as file:
        return file["images"] / np.float32(255), file["labels"].astype(np.int32)


def texts(records, column):
    return np.array([str(value).strip() for value in records.column(column)])


def ratios(candidates, *arguments, reference, builds=1, **settings):
    """Return (seconds, ratio to the reference, seconds to compile) by name, medians.

    Candidates are jitted here, and compiled `builds` times with nothing traced before.
    """
    clock = settings.get("clock", time.perf_counter)
    compiled, built = {}, {name: [] for name in candidates}
    for _ in range(builds):
        for name, fun in candidates.items():
            jax.clear_caches()
            start = clock()
            compiled[name] = jax.jit(fun).lower(*arguments).compile()
            built[name].append(clock() - start)

    def timed(run):
        return lambda: jax.block_until_ready(run(*arguments))

    runs = {name: timed(run) for name, run in compiled.items()}
    times = interleaved(runs, reference, **settings)
    return {
        name: (*measured, np.median(built[name])) for name, measured in times.items()
    }


def memory(fun, *arguments):
    """Return the bytes of results and temporary values, by the compiler's account."""
    found = jax.jit(fun).lower(*arguments).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


def interleaved(runs, reference, repeats=50, seconds=math.inf, clock=time.perf_counter):
    """Return median time and ratio to the reference of the same round, by name.

    Every round times each function once, but not one that ran for `seconds` and three
    times. The clock `time.process_time` leaves out other jobs and counts all cores.
    """
    for run in runs.values():
        run()
    times = {name: [] for name in runs}
    order = np.random.default_rng(0)
    for _ in range(repeats):
        fresh = [n for n, t in times.items() if len(t) < 3 or sum(t) < seconds]
        if not fresh:
            break
        # Each finds in the caches what its predecessor left there.
        for name in order.permutation(sorted({*fresh, reference})):
            start = clock()
            runs[name]()
            times[name].append(clock() - start)
    base = np.asarray(times[reference])
    return {
        name: (np.median(t), np.median(np.asarray(t) / base[: len(t)]))
        for name, t in times.items()
    }
