"""Answers on real tables: `python -m benchmarks real_tables`.

Tables of packages with two classes: log loss, accuracy, area under the ROC curve and
calibration error on test records, the medians of 5 keys, each with a split of its own.
Beside the estimator are DP-EBM, diffprivlib, `NoisyGD` with settings by hand, a fit
without privacy and constant answers. NON-PRIVATE evaluation.

`DPRidge` is compared on three tables whose targets are numbers.

Environments of `benchmarks.table_tasks` are needed. The census is read from $ADULT or
../shared/data/adult.csv; without it that table is left out, and no page is written.

`--task=churn` runs the tables whose names begin so. Results are kept in
runs/real_tables/rows.json and not measured again, except for a method that is named,
as by `--method=NoisyGD`. results/real_tables.md is written if every result is there.
"""

import json
import pathlib
import sys
import time
import warnings

import numpy as np

from . import declared_tables, real_labels, real_targets, utility
from .paths import ADULT, ROOT
from .table_tasks import EPSILONS, check_environments, load

PAGE = ROOT / "benchmarks/results/real_tables.md"
ROWS = pathlib.Path("runs/real_tables/rows.json")
TARGETS = "tables whose targets are numbers"
WORSE = 0.005  # than the constant answer, in log loss


def declared():
    """Return the declared tables of each group, the title of the group first."""
    chosen_on = dict(declared_tables.CHOSEN_ON)
    if ADULT.is_file():
        chosen_on["census"] = declared_tables.census(str(ADULT.resolve()))
    return {
        "tables never used to choose a setting": declared_tables.HELD_OUT,
        "tables that settings were chosen on": chosen_on,
        TARGETS: declared_tables.NUMBERS,
    }


def kind_of(group):
    """Return the module with the methods and measures of a group."""
    return real_targets if group == TARGETS else real_labels


def rows_of(name, task, method, kind):
    """Return a row for each epsilon: medians over keys."""
    start = time.perf_counter()
    predicted = kind.METHODS[method](task)
    true = [task.y[order[task.cut :]] for order in task.orders]
    rows = []
    for epsilon, of_keys in zip(EPSILONS, predicted, strict=True):
        each = [kind.measured(y, z) for y, z in zip(true, of_keys, strict=True)]
        medians = {m: float(np.median([v[m] for v in each])) for m in kind.MEASURES}
        rows.append({"table": name, "method": method, "epsilon": epsilon} | medians)
    shown = [round(row[kind.MEASURES[0]], 4) for row in rows]
    print(f"{name}, {method}: {shown}, {time.perf_counter() - start:.0f} s", flush=True)
    return rows


def losing_first(cases, behind):
    """Return the cases in order, the one that is farthest behind first."""
    return dict(sorted(cases.items(), key=lambda item: -behind(item[1])))


def by_case(rows, names, kind):
    """Return for each table and epsilon the row of each method, by `losing_first`."""
    cases = {}
    for row in rows:
        if row["table"] in names:
            place = row["table"], row["epsilon"]
            cases.setdefault(place, {})[row["method"]] = row
    return losing_first(cases, kind.behind)


def lines(head, rows):
    """Return a table of the page."""
    texts = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in texts)


def cases_table(cases, measure, kind):
    """Return the table of one measure, a row for each table and epsilon."""
    head, rows = ["table", "epsilon", *kind.METHODS], []
    decides = measure == kind.MEASURES[0]
    for (name, epsilon), case in cases.items():
        values = [case[method][measure] for method in kind.METHODS]
        cells = [f"{v:z.3f}" if abs(v) < 1e3 else f"{v:.1e}" for v in values]
        more = [f"{kind.behind(case):+.3f}"] if decides else []
        rows.append([name, f"{epsilon:g}", *cells, *more])
    return lines([*head, "behind"] if decides else head, rows)


def summary(groups):
    """Return the table of each method and epsilon over groups of cases."""
    head = ["method", "epsilon"]
    for words in ("worse than constant", "relative log loss", "calibration error"):
        head += [f"{words}, {short}" for short in groups]
    rows = []
    for method in real_labels.METHODS:
        same = method in (real_labels.CONSTANT, real_labels.PLAIN)
        for epsilon in EPSILONS[:1] if same else EPSILONS:
            parts = [
                _summary_of(method, [c for (_, e), c in cases.items() if e == epsilon])
                for cases in groups.values()
            ]
            columns = [cell for cells in zip(*parts, strict=True) for cell in cells]
            rows.append([method, "any" if same else f"{epsilon:g}", *columns])
    return lines(head, rows)


def _summary_of(method, cases):
    """Return the three texts of one method."""
    compared = method, real_labels.CONSTANT, real_labels.PLAIN
    losses = [[case[m]["log loss"] for m in compared] for case in cases]
    worse = sum(own > base + WORSE for own, base, _ in losses)
    relative = [(own - best) / (base - best) for own, base, best in losses]
    errors = [case[method]["calibration error"] for case in cases]
    middle = f"{np.median(relative):.2f}", f"{np.median(errors):.3f}"
    return f"{worse} of {len(cases)}", *middle


def page(rows):
    """Return the generated parts of the page."""
    groups = declared()
    found = {g: by_case(rows, names, kind_of(g)) for g, names in groups.items()}
    unused, chosen_on, _ = found.values()
    parts = ["## Summary", summary({"never used": unused, "chosen on": chosen_on})]
    for group, cases in found.items():
        kind = kind_of(group)
        for measure in kind.MEASURES:
            title = measure[0].upper() + measure[1:]
            parts += [f"## {title}, {group}", cases_table(cases, measure, kind)]
    return parts


def main():
    warnings.simplefilter("ignore")
    check_environments()
    options = dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)
    named, prefix = options.get("method"), options.get("task", "")
    known = [*real_labels.METHODS, *real_targets.METHODS]
    if named not in (None, *known):
        sys.exit(f"real_tables: unknown method {named!r}; choose from {known}.")
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(ROWS.read_text()) if ROWS.is_file() else []
    expected = 0
    for group, tables in declared().items():
        kind = kind_of(group)
        expected += len(tables) * len(kind.METHODS) * len(EPSILONS)
        chosen = {n: table for n, table in tables.items() if n.startswith(prefix)}
        for name, task in load(chosen).items():
            for method in kind.METHODS:
                others = [
                    r for r in rows if (r["table"], r["method"]) != (name, method)
                ]
                if named == method or (named is None and len(others) == len(rows)):
                    rows = [*others, *rows_of(name, task, method, kind)]
                    ROWS.write_text(json.dumps(rows))
    if len(rows) == expected and ADULT.is_file():
        utility.write(PAGE, page(rows))
