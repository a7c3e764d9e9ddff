"""The worst of twenty runs: `python -m benchmarks worst_runs`.

One plan for every task and budget, by `dpb.auto` or with the settings that an example
has, then a run for each of 20 keys. Printed are the median and the worst of the
released models' losses on test records beside those of the starting point and of the
best constant answer, and how many runs released a number that is not finite.
`--task=T1b` runs the tasks that begin so, `--epsilon=1,3` these budgets. Rows are kept
in runs/worst_runs/rows.json and not measured again; a call without options writes
results/worst_runs.md. NON-PRIVATE evaluation. Data as in `benchmarks utility`.
"""

import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from examples import (
    data_cleaning,
    demo,
    meta_learning,
    source_reweighting,
    tuned_training,
)

from . import games, penalties, utility
from .paths import ADULT, ROOT

PAGE = ROOT / "benchmarks/results/worst_runs.md"
ROWS = pathlib.Path("runs/worst_runs/rows.json")
EPSILONS = (0.3, 1.0, 3.0, 10.0)
KEYS = 20
WIDE = (-8.0, 2.0)  # the default bounds of `penalty_tuning`
MIDDLE = -3.0  # of these


def values(problem, solver, budget, sizes, data, w0):
    """Return the released values of runs with all keys."""
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)
    run = jax.jit(lambda key: dpb.solve(problem, plan.solver, data, w0, key=key).value)
    return [run(key) for key in jax.random.split(jax.random.key(0), KEYS)]


def mean_loss(loss, test):
    return jax.jit(lambda w: jnp.mean(jax.vmap(loss, (None, 0))(w, test)))


def planned(task, problem, w0, budget, **options):
    """Releases of the plan of `auto` for a task of two levels, and their losses.

    Then those of the start and of the constant answer.
    """
    plan = dpb.auto(problem, budget, sizes=task.sizes, w0=w0, **options)
    solver = plan.trials[0].solver
    found = values(problem, solver, budget, task.sizes, task.data, w0)
    loss = mean_loss(task.loss, task.test)
    starts = loss(w0[1]), utility.constant_answer(task.test)
    return plan.trials[0].method, found, [loss(y) for _, y in found], starts


def sources(name, budget):
    task = utility.TASKS[name]()
    options = {"clip_norm": task.clip, "records": task.records}
    return planned(task, task.problem, task.w0, budget, **options)


def groups_of_features(bounds, start, make, budget):
    """T3 by the plan of `auto`, for penalties that all start at one place."""
    task = penalties.noisy("", make(), 10)
    problem = dpb.penalty_tuning(dpb.logistic_loss, task.groups, bounds=bounds)
    w0 = jnp.full_like(task.w0[0], start), task.model
    return planned(task, problem, w0, budget, clip_norm=task.clip)


def unset_penalties(make, budget):
    """T3 by `PenaltyBilevel` with settings by hand."""
    task = penalties.noisy("", make(), 10)
    problem = dpb.penalty_tuning(dpb.logistic_loss, task.groups)
    inner = dpb.NoisyGD(8, 1.0, 1.0)
    solver = dpb.PenaltyBilevel(15, 10.0, step_size=5.0, inner=inner)
    w0 = (jnp.full_like(task.w0[0], MIDDLE), task.model)
    found = values(problem, solver, budget, task.sizes, task.data, w0)
    loss = mean_loss(task.loss, task.test)
    starts = loss(w0[1]), utility.constant_answer(task.test)
    return "PenaltyBilevel", found, [loss(y) for _, y in found], starts


def worst_group(name, budget):
    """T4, the loss of the group that is worst off."""
    data, test, shares = games.TASKS[name]()
    zeros = jnp.zeros(data["features"].shape[1])
    problem = dpb.games.group_fair(dpb.Logistic(), shares, radius=games.RADIUS)
    start = dpb.games.group_start(problem, zeros, shares)
    solver, size = dpb.games.GroupDescent(), len(data["label"])
    found = values(problem, solver, budget, size, data, start)

    @jax.jit
    def worst(x):
        groups = len(shares)
        return jnp.max(dpb.debug.group_losses(dpb.logistic_loss, x, test, groups))

    return "GroupDescent", found, [worst(x) for x, _ in found], (worst(zeros),)


def new_people(people, budget):
    """T6, by `auto` for one level and by the example's settings."""
    data, test = people()
    start = meta_learning.identity(data)
    problem, size = dpb.FiniteSum(meta_learning.meta_loss), len(data["label"])
    found = values(problem, meta_learning.DESCENT, budget, size, data, start)
    loss = mean_loss(meta_learning.meta_loss, test)
    return "NoisyGD", found, [loss(w) for w in found], (loss(start),)


def training(records, budget):
    """T7, the error of the released model."""
    data, test = tuned_training.split(*records(), (2000, 6000))
    model = jnp.zeros(data.lower["features"].shape[1])
    problem = tuned_training.problem_of(dpb.logistic_loss, tuned_training.error)
    sizes, w0 = problem.sizes_of(data, "disjoint"), (jnp.zeros(0), model)
    found = values(problem, tuned_training.TUNED, budget, sizes, data, w0)
    error = mean_loss(tuned_training.error, test)
    return "TunedTraining", found, [error(y) for _, y in found], (error(model),)


def all_settings(problem, solvers, data, test, w0, budget):
    """All methods of an example, each with every key, as one row."""
    sizes = problem.sizes_of(data, "disjoint")
    loss = mean_loss(problem.loss, test)
    found = []
    for solver in solvers:
        found += values(problem, solver, budget, sizes, data, w0)
    starts = loss(w0[1]), utility.constant_answer(test)
    return f"{len(solvers)} settings", found, [loss(y) for _, y in found], starts


def wrong_labels(budget):
    """Return the example on sources with wrong labels."""
    data, test = source_reweighting.records(16_000)
    count, size = len(source_reweighting.WRONG), source_reweighting.FEATURES
    problem = dpb.source_weighting(dpb.logistic_loss, count, ridge=1e-4)
    solvers = [*source_reweighting.settings().values()]
    w0 = jnp.zeros(count), jnp.zeros(size)
    return all_settings(problem, solvers, data, test, w0, budget)


def another_group(budget):
    """Return the demo on generated records."""
    names, data, test = demo.generated(30_000)
    problem = dpb.source_weighting(dpb.logistic_loss, len(names), ridge=1e-4)
    solvers = [solver for several in demo.methods().values() for solver in several]
    w0 = jnp.zeros(len(names)), jnp.zeros(test["features"].shape[1])
    return all_settings(problem, solvers, data, test, w0, budget)


def random_labels(budget):
    """Return the example on images with random labels, on generated ones."""
    data, test = data_cleaning.records(*data_cleaning.generated(10_000))
    loss, count = data_cleaning.loss_of(data_cleaning.network), data_cleaning.GROUPS
    problem = dpb.source_weighting(loss, count, ridge=1e-5)
    solvers = [*data_cleaning.methods(100).values()]
    w0 = jnp.zeros(count), data_cleaning.start()
    return all_settings(problem, solvers, data, test, w0, budget)


def tasks():
    """Return functions that evaluate each task, by name."""
    found = {}
    for name in utility.TASKS:
        needed = utility.NEEDS.get(name[:2])
        if needed is None or needed.is_file():
            found[name] = functools.partial(sources, name)
    columns = {"generated": penalties.generated_columns}
    columns |= {"census": penalties.census_columns} if ADULT.is_file() else {}
    for name, make in columns.items():
        low, high = penalties.LOW, penalties.HIGH
        starts = {
            "": ((low, high), low),
            ", default bounds": (WIDE, WIDE[0]),
            ", default bounds, from their middle": (WIDE, MIDDLE),
        }
        for words, place in starts.items():
            found[f"T3 {name}{words}"] = functools.partial(
                groups_of_features, *place, make
            )
        found[f"T3 {name}, default bounds, from their middle, set by hand"] = (
            functools.partial(unset_penalties, make)
        )
    for name in games.TASKS:
        if ADULT.is_file() or name.startswith("generated"):
            found[f"T4 {name}"] = functools.partial(worst_group, name)
    people = functools.partial(meta_learning.generated, 3000 + meta_learning.TEST)
    found["T6 generated"] = functools.partial(new_people, people)
    if utility.MNIST.is_file():
        people = functools.partial(meta_learning.digits, utility.MNIST)
        found["T6 digits"] = functools.partial(new_people, people)
    records = functools.partial(tuned_training.generated, 20_000)
    found["T7 generated"] = functools.partial(training, records)
    if ADULT.is_file():
        records = functools.partial(tuned_training.census, ADULT)
        found["T7 census"] = functools.partial(training, records)
    examples = {
        "source_reweighting": wrong_labels,
        "data_cleaning, generated": random_labels,
        "demo, generated": another_group,
    }
    return found | {f"example {name}": task for name, task in examples.items()}


def evaluate(name, task, epsilon):
    """Return a row of the table."""
    begin = time.perf_counter()
    budget = dpb.PrivacyBudget(epsilon, utility.DELTA)
    method, found, losses, (start, *constant) = task(budget)
    broken = sum(
        not all(np.isfinite(v).all() for v in jax.tree.leaves(value)) for value in found
    )
    row = {
        "task": name,
        "epsilon": epsilon,
        "method": method,
        "median": float(np.median(losses)),
        "worst": float(np.max(losses)),
        "start": float(start),
        "constant answer": constant[0] if constant else None,
        "not finite": broken,
    }
    print(f"{row}, {time.perf_counter() - begin:.0f} s", flush=True)
    return row


def table(rows):
    """Sort rows by the worst run's loss above the constant answer, or the start."""
    heads = ("task", "epsilon", "method", "median", "worst", "start")
    heads += ("constant answer", "not finite")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]

    def gain(row):
        constant = row["constant answer"]
        return (row["start"] if constant is None else constant) - row["worst"]

    def cell(row, head):
        value = row[head]
        if value is None or isinstance(value, str):
            return value or ""
        return f"{value:g}" if head in ("epsilon", "not finite") else f"{value:.3f}"

    for row in sorted(rows, key=gain):
        lines.append(f"| {' | '.join(cell(row, head) for head in heads)} |")
    return "\n".join(lines)


def main():
    options = dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)
    prefix = options.get("task", "")
    chosen = options.get("epsilon", ",".join(map(str, EPSILONS)))
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(ROWS.read_text()) if ROWS.is_file() else []
    for epsilon in map(float, chosen.split(",")):
        for name, task in tasks().items():
            done = any((r["task"], r["epsilon"]) == (name, epsilon) for r in rows)
            if name.startswith(prefix) and not done:
                rows.append(evaluate(name, task, epsilon))
                ROWS.write_text(json.dumps(rows))
                jax.clear_caches()
    print(table(rows))
    if not options:
        utility.write(PAGE, [table(rows)])
