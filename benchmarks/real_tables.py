"""Answers on real tables: `python -m benchmarks real_tables`.

Log loss, accuracy, AUC and calibration error (or R²) on test records, medians of 5 keys
and splits, of the estimators, of other private methods and of fits without privacy.
NON-PRIVATE evaluation. Environments of `benchmarks.table_tasks` are needed.

`--task=churn` runs tables whose names begin so. Results are kept in runs/real_tables
and measured again only for a method that is named, as by `--method=NoisyGD`.
results/real_tables.md is written if every result is there.
"""

import pathlib
import sys
import time
import warnings

import numpy as np

from . import pages, real_labels, real_targets, table_tasks
from .table_tasks import EPSILONS

ROWS = pathlib.Path("runs/real_tables/rows.json")
# The groups of tables.toml, with their titles and their methods and measures.
GROUPS = {
    "never used": ("tables never used to choose a setting", real_labels),
    "chosen on": ("tables that settings were chosen on", real_labels),
    "numbers": ("tables whose targets are numbers", real_targets),
}
WORSE = 0.005  # than the constant answer, in log loss


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


def by_case(rows, names, kind):
    """Return the rows of each table and epsilon by method, the losing cases first."""
    cases = {}
    for row in rows:
        if row["table"] in names:
            place = row["table"], row["epsilon"]
            cases.setdefault(place, {})[row["method"]] = row
    return dict(sorted(cases.items(), key=lambda item: -kind.behind(item[1])))


def cases_table(cases, measure, kind):
    """Return the table of one measure, a row for each table and epsilon."""
    head, rows = ["table", "epsilon", *kind.METHODS], []
    decides = measure == kind.MEASURES[0]
    for (name, epsilon), case in cases.items():
        values = [case[method][measure] for method in kind.METHODS]
        cells = [f"{v:z.3f}" if abs(v) < 1e3 else f"{v:.1e}" for v in values]
        more = [f"{kind.behind(case):+.3f}"] if decides else []
        rows.append([name, f"{epsilon:g}", *cells, *more])
    return pages.table([*head, "behind"] if decides else head, rows)


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
    return pages.table(head, rows)


def _summary_of(method, cases):
    """Return the three texts of one method."""
    compared = method, real_labels.CONSTANT, real_labels.PLAIN
    losses = [[case[m]["log loss"] for m in compared] for case in cases]
    worse = sum(own > base + WORSE for own, base, _ in losses)
    relative = [(own - best) / (base - best) for own, base, best in losses]
    errors = [case[method]["calibration error"] for case in cases]
    middle = f"{np.median(relative):.2f}", f"{np.median(errors):.3f}"
    return f"{worse} of {len(cases)}", *middle


def page(rows, names):
    """Return the generated parts of the page."""
    found = {g: by_case(rows, names[g], kind) for g, (_, kind) in GROUPS.items()}
    two = {group: found[group] for group in ("never used", "chosen on")}
    parts = ["## Summary", summary(two)]
    for group, cases in found.items():
        title, kind = GROUPS[group]
        for measure in kind.MEASURES:
            heading = f"## {measure[0].upper() + measure[1:]}, {title}"
            parts += [heading, cases_table(cases, measure, kind)]
    return parts


def main():
    warnings.simplefilter("ignore")
    table_tasks.check_environments()
    options = pages.options()
    named, prefix = options.get("method"), options.get("task", "")
    known = [*real_labels.METHODS, *real_targets.METHODS]
    if named not in (None, *known):
        sys.exit(f"real_tables: unknown method {named!r}; choose from {known}.")
    rows, names, expected = pages.kept(ROWS), {}, 0
    declared = table_tasks.declared()
    for group, (_, kind) in GROUPS.items():
        names[group] = [n for n, table in declared.items() if table.group == group]
        expected += len(names[group]) * len(kind.METHODS) * len(EPSILONS)
        chosen = {n: declared[n] for n in names[group] if n.startswith(prefix)}
        for name, task in table_tasks.load(chosen).items():
            for method in kind.METHODS:
                place = name, method
                others = [r for r in rows if (r["table"], r["method"]) != place]
                if named == method or (named is None and len(others) == len(rows)):
                    rows = [*others, *rows_of(name, task, method, kind)]
                    pages.keep(ROWS, rows)
    if len(rows) == expected and pages.ADULT.is_file():
        pages.write(pages.RESULTS / "real_tables.md", page(rows, names))
