"""The worst of twenty runs: `python -m benchmarks worst_runs`.

One plan for every task and budget, then 20 keys. `--task=T1b` runs the tasks that begin
so, `--epsilon=1,3` these budgets. Rows are kept in runs/worst_runs; a call without
options writes results/worst_runs.md. NON-PRIVATE evaluation.
"""

import functools
import pathlib

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

from . import games, pages, penalties, source_tasks, utility

ROWS = pathlib.Path("runs/worst_runs/rows.json")
KEYS = 20
WIDE = (-8.0, 2.0)  # the default bounds of `penalty_tuning`
MIDDLE = -3.0  # of these


def values(problem, solver, budget, sizes, data, w0):
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)
    run = jax.jit(lambda key: dpb.solve(problem, plan.solver, data, w0, key=key).value)
    return [run(key) for key in jax.random.split(jax.random.key(0), KEYS)]


def mean_loss(loss, test):
    return jax.jit(lambda w: jnp.mean(jax.vmap(loss, (None, 0))(w, test)))


def of_two_levels(name, problem, solvers, data, test, w0, budget, loss=None):
    sizes, found = problem.sizes_of(data, "disjoint"), []
    for solver in solvers:
        found += values(problem, solver, budget, sizes, data, w0)
    loss = mean_loss(loss or problem.loss, test)
    starts = loss(w0[1]), utility.constant_answer(test)
    return name, found, [loss(y) for _, y in found], starts


def of_task(task, name, problem, solver, w0, budget):
    given = name, problem, [solver], task.data, task.test, w0, budget
    return of_two_levels(*given, task.loss)


def planned(task, problem, w0, budget):
    plan = dpb.auto(problem, budget, w0=w0, **task.facts).trials[0]
    return of_task(task, plan.method, problem, plan.solver, w0, budget)


def sources(name, budget):
    task = source_tasks.TASKS[name]()
    return planned(task, task.problem, task.w0, budget)


def groups_of_features(make, bounds, start, by_hand, budget):
    """T3, for penalties that all start at one place, by `auto` or by hand."""
    task = penalties.noisy("", make(), 10)
    problem = dpb.penalty_tuning(dpb.logistic_loss, task.groups, bounds=bounds)
    w0 = jnp.full_like(task.w0[0], start), task.model
    if not by_hand:
        return planned(task, problem, w0, budget)
    inner = dpb.NoisyGD(8, 1.0, 1.0)
    solver = dpb.PenaltyBilevel(15, 10.0, step_size=5.0, inner=inner)
    return of_task(task, "PenaltyBilevel", problem, solver, w0, budget)


def worst_group(name, budget):
    data, test, shares = games.TASKS[name]()
    zeros = jnp.zeros(data["features"].shape[1])
    problem = dpb.games.group_fair(dpb.Logistic(), shares, radius=games.RADIUS)
    start = dpb.games.group_start(problem, zeros, shares)
    solver, size = dpb.games.GroupDescent(), len(data["label"])
    found = values(problem, solver, budget, size, data, start)
    worst = games.worst_loss(test, shares)
    return "GroupDescent", found, [worst(x) for x, _ in found], (worst(zeros),)


def new_people(people, budget):
    data, test = people()
    start = meta_learning.identity(data)
    problem, size = dpb.FiniteSum(meta_learning.meta_loss), len(data["label"])
    found = values(problem, meta_learning.DESCENT, budget, size, data, start)
    loss = mean_loss(meta_learning.meta_loss, test)
    return "NoisyGD", found, [loss(w) for w in found], (loss(start),)


def training(records, budget):
    data, test = tuned_training.split(*records(), (2000, 6000))
    w0 = jnp.zeros(0), jnp.zeros(data.lower["features"].shape[1])
    problem = tuned_training.problem_of(dpb.logistic_loss, tuned_training.error)
    given = "TunedTraining", problem, [tuned_training.TUNED], data, test, w0, budget
    method, found, errors, (start, _) = of_two_levels(*given, tuned_training.error)
    return method, found, errors, (start,)


def all_settings(solvers, count, records, model, budget, loss=None, ridge=1e-4):
    problem = dpb.source_weighting(loss or dpb.logistic_loss, count, ridge=ridge)
    name, w0 = f"{len(solvers)} settings", (jnp.zeros(count), model)
    return of_two_levels(name, problem, solvers, *records, w0, budget)


def wrong_labels(budget):
    solvers = [*source_reweighting.settings().values()]
    count, records = len(source_reweighting.WRONG), source_reweighting.records(16_000)
    model = jnp.zeros(source_reweighting.FEATURES)
    return all_settings(solvers, count, records, model, budget)


def another_group(budget):
    names, *records = demo.generated(30_000)
    solvers = [solver for several in demo.methods().values() for solver in several]
    model = jnp.zeros(records[1]["features"].shape[1])
    return all_settings(solvers, len(names), records, model, budget)


def random_labels(budget):
    records = data_cleaning.records(*data_cleaning.generated(10_000))
    loss, count = data_cleaning.loss_of(data_cleaning.network), data_cleaning.GROUPS
    solvers, model = [*data_cleaning.methods(100).values()], data_cleaning.start()
    return all_settings(solvers, count, records, model, budget, loss, ridge=1e-5)


def tasks():
    partial = functools.partial
    found = {
        name: partial(sources, name)
        for name in source_tasks.TASKS
        if source_tasks.there(name)
    }
    columns = {"generated": penalties.generated_columns}
    people = partial(meta_learning.generated, 3000 + meta_learning.TEST)
    found["T6 generated"] = partial(new_people, people)
    records = partial(tuned_training.generated, 20_000)
    found["T7 generated"] = partial(training, records)
    if pages.ADULT.is_file():
        columns["census"] = penalties.census_columns
        records = partial(tuned_training.census, pages.ADULT)
        found["T7 census"] = partial(training, records)
    if pages.MNIST.is_file():
        people = partial(meta_learning.digits, pages.MNIST)
        found["T6 digits"] = partial(new_people, people)
    for name, make in columns.items():
        for words, *given in (
            ("", (penalties.LOW, penalties.HIGH), penalties.LOW, False),
            (", default bounds", WIDE, WIDE[0], False),
            (", default bounds, from their middle", WIDE, MIDDLE, False),
            (", default bounds, from their middle, set by hand", WIDE, MIDDLE, True),
        ):
            found[f"T3 {name}{words}"] = partial(groups_of_features, make, *given)
    for name in games.TASKS:
        if pages.ADULT.is_file() or name.startswith("generated"):
            found[f"T4 {name}"] = partial(worst_group, name)
    found["example source_reweighting"] = wrong_labels
    found["example data_cleaning, generated"] = random_labels
    return found | {"example demo, generated": another_group}


def evaluate(name, task, epsilon):
    budget = dpb.PrivacyBudget(epsilon, utility.DELTA)
    method, found, losses, (start, *constant) = task(budget)
    finite = [all(np.isfinite(v).all() for v in jax.tree.leaves(w)) for w in found]
    row = {
        "task": name,
        "epsilon": epsilon,
        "method": method,
        "median": float(np.median(losses)),
        "worst": float(np.max(losses)),
        "start": float(start),
        "constant answer": constant[0] if constant else None,
        "not finite": finite.count(False),
    }
    print(row, flush=True)
    return row


def table(rows):
    def gain(row):
        constant = row["constant answer"]
        return (row["start"] if constant is None else constant) - row["worst"]

    def cell(head, value):
        if value is None or isinstance(value, str):
            return value or ""
        return f"{value:g}" if head in ("epsilon", "not finite") else f"{value:.3f}"

    lines = [[cell(*item) for item in row.items()] for row in sorted(rows, key=gain)]
    return pages.table([*rows[0]], lines)


def main():
    options, rows = pages.options(), pages.kept(ROWS)
    for epsilon in pages.budgets("0.3,1,3,10"):
        for name in pages.chosen(made := tasks()):
            if all((r["task"], r["epsilon"]) != (name, epsilon) for r in rows):
                rows.append(evaluate(name, made[name], epsilon))
                pages.keep(ROWS, rows)
                jax.clear_caches()
    print(table(rows))
    if not options:
        pages.write(pages.RESULTS / "worst_runs.md", [table(rows)])
