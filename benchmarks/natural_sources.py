"""Sources of real tables: `python -m benchmarks natural_sources`.

Writes results/natural_sources.md, which says how losses are measured; `--task=union`
prints the tasks that begin so, `--epsilon=1,3` these budgets. Rows are kept in
runs/natural_sources. Environments of `benchmarks.table_tasks` are needed. NON-PRIVATE
evaluation.
"""

import pathlib

import jax
import numpy as np

import dpbilevel as dpb
from dpbilevel.planning.candidates import candidates

from . import pages, source_tasks, utility
from .table_tasks import check_environments, declared, load

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


# The groups of tasks in tables.toml. The settings of `Recalibration` were changed with
# the second one in sight, kinds of records and candidates with the third one.
GROUPS = {
    "never used": "tasks that were never used",
    "kinds not chosen on": "tasks that kinds of records were not chosen on",
    "kinds and candidates chosen on": "tasks that kinds and candidates were chosen on",
}


def made(name, table, records):
    split = table.split
    dropped = np.zeros(records.X.shape[1], bool)
    if split.bands:
        place, population = [*table.numbers].index(split.column), split.population
        group = np.digitize(records.numbers[:, place], split.bands)
        dropped[place] = True
    else:
        place = [*table.categories].index(split.column)
        group = records.codes[:, place]
        population = table.categories[split.column].index(split.population)
        widths = [size - (size == 2) for size in records.sizes]
        start = records.numbers.shape[1] + sum(widths[:place])
        dropped[start : start + widths[place]] = True
    features = source_tasks.unit(records.centered[:, ~dropped])
    label = np.where(records.y > 0, 1.0, -1.0).astype("f4")
    rng = np.random.default_rng(SEED)
    people = rng.permutation(np.flatnonzero(group == population))
    lower = np.flatnonzero(group != population)
    source = np.unique(group[lower], return_inverse=True)[1]
    rows = people[:VALIDATION], lower, people[VALIDATION:]
    return source_tasks.made(name, features, label, rows, source)


def evaluate(task, epsilon):
    budget = dpb.PrivacyBudget(epsilon, utility.DELTA)
    plan = dpb.auto(task.problem, budget, sizes=task.sizes, w0=task.w0).trials[0]
    losses = {CONSTANT: utility.constant_answer(task.test)}
    for method in candidates(task.problem, task.w0, 1.0, None, -1):
        if method.name in SHOWN:
            triples = [(task.problem, solver, task.data) for solver in method.solvers]
            losses[method.name] = utility.best(task, budget, triples)["loss"]
    run = utility.runner(task, budget, (task.problem, plan.solver, task.data))
    found = [run(key)[0] for key in range(RUNS)]
    losses[AUTO] = float(np.median(found[: utility.KEYS]))
    row = {"task": task.name, "epsilon": epsilon, "plan": plan.method}
    row |= {"records": task.sizes.lower, "sources": task.num_sources, "losses": losses}
    row["worst"] = max(found)
    shown = {k: round(v, 4) for k, v in losses.items()}
    print(f"{task.name}, {epsilon:g}: {shown}; {row['plan']}", flush=True)
    return row


def best_of(losses):
    return min((v, k) for k, v in losses.items() if k not in (CONSTANT, AUTO))


def behind(row):
    """Return how far the plan is above the best candidate, in shares of the gap.

    The gap is that between the constant answer or the base rate, the better of both,
    and the best candidate, and at least a hundredth of the better of both.
    """
    losses = row["losses"]
    best, trivial = best_of(losses)[0], min(losses[CONSTANT], losses[RATE])
    return (losses[AUTO] - best) / max(trivial - best, 0.01 * trivial)


def table_of(rows):
    head = ("task", "epsilon", CONSTANT, RATE, "validation records only")
    head += ("best candidate in hindsight", AUTO, "worst of 20", "behind the best")
    lines = []
    for row in sorted(rows, key=behind, reverse=True):
        losses, (best, name) = row["losses"], best_of(row["losses"])
        plain = [losses[name] for name in (CONSTANT, RATE, "upper level only")]
        cells = [f"{row['task']} ({row['sources']} sources, {row['records']} records)"]
        cells += [f"{row['epsilon']:g}", *map("{:.4f}".format, plain)]
        cells += [f"{best:.4f} ({name})", f"{losses[AUTO]:.4f}", f"{row['worst']:.4f}"]
        lines.append([*cells, f"{behind(row):.2f}", row["plan"]])
    return pages.table([*head, "planned"], lines)


def methods(rows):
    lines = []
    for name in (*SHOWN, AUTO):
        lines.append([name])
        for epsilon in EPSILONS:
            chosen = [row["losses"] for row in rows if row["epsilon"] == epsilon]
            ratios = [losses[name] / losses[CONSTANT] for losses in chosen]
            lines[-1].append(f"{np.median(ratios):.3f}" if ratios else "")
    return pages.table(["method", *(f"epsilon {e:g}" for e in EPSILONS)], lines)


def main():
    check_environments()
    options, rows = pages.options(), pages.kept(ROWS)
    tables = {name: table for name, table in declared().items() if table.split}
    records, groups = load(tables), {group: [] for group in GROUPS}
    done = {(row["task"], row["epsilon"]) for row in rows}
    for table_name, table in tables.items():
        name = f"{table_name}, {table.split.name}"
        groups[table.split.group].append(name)
        jax.clear_caches()  # programs of many shapes fill the memory
        for epsilon in pages.budgets("0.3,1,3"):
            if pages.chosen([name]) and (name, epsilon) not in done:
                rows.append(evaluate(made(name, table, records[table_name]), epsilon))
                pages.keep(ROWS, rows)
    parts = []
    for group, title in GROUPS.items():
        found = [row for row in rows if row["task"] in groups[group]]
        parts += [f"## {title.capitalize()}", table_of(found), methods(found)]
    print(*parts, sep="\n\n")
    if not options:
        pages.write(pages.RESULTS / "natural_sources.md", parts)
