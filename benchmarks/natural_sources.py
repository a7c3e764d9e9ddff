"""Sources of real tables: `python -m benchmarks natural_sources`.

A column of a table divides its records into sources; the population is one value of
that column, which no source has, with 300 validation records. Printed are the mean
losses of released models on the other records of the population, medians of 10 keys:
of the candidates of `auto`, each at its best setting in hindsight, of the plan of
`auto`, with the worst of its 20 runs, and of the constant answer, which knows the test
labels. A call without options writes results/natural_sources.md; `--task=union` runs
the tasks that begin so, `--epsilon=1,3` these budgets. Rows are kept in
runs/natural_sources/rows.json and not measured again. NON-PRIVATE evaluation.
Environments of `benchmarks.table_tasks` are needed.
"""

import dataclasses
import json
import pathlib
import sys
import time

import jax
import numpy as np

import dpbilevel as dpb
from dpbilevel.planning.candidates import candidates

from . import declared_tables, held_out, utility
from .paths import ROOT
from .table_tasks import check_environments, load

PAGE = ROOT / "benchmarks/results/natural_sources.md"
ROWS = pathlib.Path("runs/natural_sources/rows.json")
EPSILONS = (0.3, 1.0, 3.0)
VALIDATION, SEED = 300, 0
RUNS = 20  # of the plan, for the worst one
RATE, AUTO, CONSTANT = "base rate", "`auto`", "constant answer"
SHOWN = (
    RATE,
    "upper level only",
    "both levels' records",
    "lower level, recalibrated",
    "SelectedSources, recalibrated",
    "MixedSources, recalibrated",
)


@dataclasses.dataclass(frozen=True)
class Split:
    """How a table becomes a task of sources.

    Attributes:
        table: Its name among the declared tables.
        column: What divides the records.
        population: The value of that column in the population.
        bands: Where a column of numbers is cut; values are the numbers of the bands.
    """

    table: str
    column: str
    population: str | int
    bands: tuple[float, ...] = ()


# The kinds of synthetic records and the candidates were changed with these in sight.
CHOSEN_ON = {
    "union, workers in factories": Split("union", "industry", "Manufacturing"),
    "crashes, at 55 miles and more": Split("crashes", "dvcat", "55+"),
    "smoke ban, graduates": Split("smoke ban", "education", "college"),
    "flchain, people of 75 and older": Split("flchain", "age", 4, (57, 63, 69, 75)),
    "churn, contracts of a year": Split("churn", "contract", "One year"),
    "health insurance, bachelors": Split("health insurance", "education", "bachelor"),
    "affairs, occupation 4": Split("affairs", "occupation", "4.0"),
}
# Added after the last setting was chosen.
NEVER_USED = {
    "part time, west": Split("part time", "region", "west"),
    "hospital stays, west": Split("hospital stays", "region", "west"),
}
# Kinds and candidates were not changed with these in sight, the settings of
# `Recalibration` were.
HELD_OUT = {
    "credit, tenants": Split("credit", "Home", "rent"),
    "arrests, people under 18": Split("arrests", "age", 0, (18, 21, 25, 32)),
    "doctor visits, people of 60 and older": Split(
        "doctor visits", "age", 4, (0.22, 0.27, 0.4, 0.6)
    ),
    "heart attacks, former smokers": Split("heart attacks", "smstat", "x"),
    "youth risk, last grade": Split("youth risk", "grade", 3, (9.5, 10.5, 11.5)),
}


def made(name, split, table, records):
    """Return a task of sources from the records of a table."""
    if split.bands:
        place = [*table.numbers].index(split.column)
        group = np.digitize(records.numbers[:, place], split.bands)
        population = split.population
        dropped = np.arange(records.X.shape[1]) == place
    else:
        place = [*table.categories].index(split.column)
        group = records.codes[:, place]
        population = table.categories[split.column].index(split.population)
        dropped = np.zeros(records.X.shape[1], bool)
        widths = [size - (size == 2) for size in records.sizes]
        start = records.numbers.shape[1] + sum(widths[:place])
        dropped[start : start + widths[place]] = True
    features = held_out.unit(records.centered[:, ~dropped])
    label = np.where(records.y > 0, 1.0, -1.0).astype("f4")
    rng = np.random.default_rng(SEED)
    people = rng.permutation(np.flatnonzero(group == population))
    lower = np.flatnonzero(group != population)
    source = np.unique(group[lower], return_inverse=True)[1]
    rows = people[:VALIDATION], lower, people[VALIDATION:]
    return held_out.task(name, features, label, rows, source)


def evaluate(task, epsilon):
    """Return the row of a task: losses of all methods, and what `auto` plans."""
    start = time.perf_counter()
    budget = dpb.PrivacyBudget(epsilon, utility.DELTA)
    plan = dpb.auto(task.problem, budget, sizes=task.sizes, w0=task.w0)
    seconds = time.perf_counter() - start
    offered = {
        method.name: method.solvers
        for method in candidates(task.problem, task.w0, 1.0, None, -1)
        if method.name in SHOWN
    }
    losses = {CONSTANT: utility.constant_answer(task.test)}
    for name, solvers in offered.items():
        triples = [(task.problem, solver, task.data) for solver in solvers]
        losses[name] = float(utility.row(utility.best(task, budget, triples))["loss"])
    run = utility.runner(task, budget, (task.problem, plan.trials[0].solver, task.data))
    found = [run(key)[0] for key in range(RUNS)]
    losses[AUTO] = float(np.median(found[: utility.KEYS]))
    row = {"task": task.name, "epsilon": epsilon, "plan": plan.trials[0].method}
    row |= {"records": task.sizes.lower, "sources": task.num_sources, "losses": losses}
    row["worst"] = max(found)
    shown = {k: round(v, 4) for k, v in losses.items()}
    took = time.perf_counter() - start
    print(f"{task.name}, {epsilon:g}: {shown}; {row['plan']}", flush=True)
    print(f"  {seconds:.0f} s for the plan, {took:.0f} s", flush=True)
    return row


def behind(row):
    """Return how far the plan is above the best candidate, in shares of the gap.

    The gap is that between the constant answer or the base rate, the better of both,
    and the best candidate, and at least a hundredth of the better of both.
    """
    losses = row["losses"]
    best = min(v for k, v in losses.items() if k not in (CONSTANT, AUTO))
    trivial = min(losses[CONSTANT], losses[RATE])
    return (losses[AUTO] - best) / max(trivial - best, 0.01 * trivial)


def table(rows):
    """Return the rows as a table, those first where the plan is farthest behind."""
    heads = ("task", "epsilon", CONSTANT, RATE, "validation records only")
    heads += ("best candidate in hindsight", AUTO, "worst of 20", "behind the best")
    heads += ("planned",)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in sorted(rows, key=behind, reverse=True):
        losses = row["losses"]
        best = min((v, k) for k, v in losses.items() if k not in (CONSTANT, AUTO))
        cells = [f"{row['task']} ({row['sources']} sources, {row['records']} records)"]
        cells += [f"{row['epsilon']:g}", f"{losses[CONSTANT]:.4f}"]
        cells += [f"{losses[RATE]:.4f}", f"{losses['upper level only']:.4f}"]
        cells += [f"{best[0]:.4f} ({best[1]})", f"{losses[AUTO]:.4f}"]
        cells += [f"{row['worst']:.4f}"]
        cells += [f"{behind(row):.2f}", row["plan"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def methods(rows):
    """Return medians over tasks of losses in shares of the constant answer's."""
    names = (*SHOWN, AUTO)
    lines = ["| method | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " |"]
    lines.append("|" + "---|" * (len(EPSILONS) + 1))
    for name in names:
        cells = [name]
        for epsilon in EPSILONS:
            chosen = [row["losses"] for row in rows if row["epsilon"] == epsilon]
            ratios = [losses[name] / losses[CONSTANT] for losses in chosen]
            cells.append(f"{np.median(ratios):.3f}" if ratios else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    check_environments()
    options = dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)
    prefix = options.get("task", "")
    budgets = [float(v) for v in options.get("epsilon", "0.3,1,3").split(",")]
    tables = declared_tables.CHOSEN_ON | declared_tables.HELD_OUT
    tables |= declared_tables.OF_SOURCES
    groups = {"tasks that were never used": NEVER_USED}
    groups |= {"tasks that kinds of records were not chosen on": HELD_OUT}
    groups["tasks that kinds and candidates were chosen on"] = CHOSEN_ON
    splits = NEVER_USED | HELD_OUT | CHOSEN_ON
    needed = {split.table: tables[split.table] for split in splits.values()}
    records = load(needed)
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else []
    done = {(row["task"], row["epsilon"]) for row in rows}
    for name, split in splits.items():
        jax.clear_caches()  # programs of many shapes fill the memory
        for epsilon in budgets:
            if name.startswith(prefix) and (name, epsilon) not in done:
                task = made(name, split, tables[split.table], records[split.table])
                rows.append(evaluate(task, epsilon))
                ROWS.write_text(json.dumps(rows))
    parts = []
    for title, chosen in groups.items():
        found = [row for row in rows if row["task"] in chosen]
        parts += [f"## {title.capitalize()}", table(found), methods(found)]
    print(*parts, sep="\n\n")
    if not options:
        utility.write(PAGE, parts)
