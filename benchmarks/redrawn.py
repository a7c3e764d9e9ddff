"""Tasks with records drawn anew for every run: `python -m benchmarks redrawn`.

Writes results/redrawn.md; `--task=T1b` prints the tasks that begin so, `--epsilon=1,3`
these budgets. Losses are kept in runs/redrawn. NON-PRIVATE evaluation.
"""

import functools
import pathlib

import jax
import numpy as np

import dpbilevel as dpb

from . import pages, penalties, source_tasks, utility

FOLDER = pathlib.Path("runs/redrawn")
# Draw 0 is that of the other pages. With 1 to 10 of T1b settings were compared.
DRAWS = range(11, 21)
PENALTIES = ("all records", "`ScaledGroups`")  # the best of one and of two levels


def sources(make, draw):
    task = make(seed=draw)
    methods = {n: functools.partial(utility.offered, task, n) for n in utility.BY_HAND}
    return task, methods | {"oracle": functools.partial(utility.oracle, task)}


def penalty_groups(draw):
    columns = penalties.generated_columns(draw + 1)
    task = penalties.noisy("", columns, 10, draw)
    methods = {n: functools.partial(penalties.METHODS[n], task) for n in PENALTIES}
    return task, methods | {"oracle": functools.partial(penalties.oracle, task)}


def tasks():
    maker = functools.partial(sources, source_tasks.generated)
    found = {"generated": (maker, "1,3"), "T3 generated": (penalty_groups, "1")}
    if pages.ADULT.is_file():
        for target in source_tasks.TARGETS:
            make = functools.partial(source_tasks.shifted, target)
            found[f"T1b ({target})"] = functools.partial(sources, make), "1,3"
    return found


def evaluate(make, epsilon, kept):
    budget, plans = dpb.PrivacyBudget(epsilon, utility.DELTA), {}

    def plan(task):
        # Public values, which are the same in all draws but for the order of groups.
        public = task.sizes, tuple(getattr(task, "groups", ()))
        if public not in plans:
            (plans[public],) = utility.planned(task, epsilon)
        return [(task.problem, plans[public], task.data)]

    for place, draw in enumerate(DRAWS):
        task, methods = make(draw)
        methods["`auto`"] = functools.partial(plan, task)
        for name, candidates in methods.items():
            losses = kept.setdefault(name, [])
            if len(losses) <= place:
                runs = [utility.runner(task, budget, c) for c in candidates()]
                losses.append([run(draw)[0] for run in runs])
        jax.clear_caches()  # every draw has problems of its own
        yield draw


def mean_and_error(values):
    return np.mean(values), np.std(values, ddof=1) / np.sqrt(len(values))


def row(name, epsilon, kept):
    # A setting that diverges in some draw is no best one.
    tables = {name: np.nan_to_num(v, nan=np.inf) for name, v in kept.items()}
    losses = {name: v[:, np.argmin(np.mean(v, 0))] for name, v in tables.items()}
    means = {method: np.mean(values) for method, values in losses.items()}
    single = min((m for m in means if m in utility.BASELINES), key=means.__getitem__)
    hand = min(means.keys() - {"`auto`", "oracle"}, key=means.__getitem__)
    gap, error = mean_and_error(losses[single] - losses["oracle"])
    gap = gap if gap > 2 * error else None

    def cell(method, words=""):
        share = "" if gap is None else f"{(means[single] - means[method]) / gap:.2f}"
        inside = ": ".join(filter(None, (words, share)))
        return f"{means[method]:.4f}" + (f" ({inside})" if inside else "")

    regret, error = mean_and_error(losses["`auto`"] - losses[hand])
    behind = f"{regret:.4f} ± {error:.4f}"
    if gap is not None:
        behind += f" ({regret / gap:.2f} ± {error / gap:.2f})"
    cells = [name, f"{epsilon:g}", f"{means[single]:.4f} ({single})"]
    cells += [cell(hand, hand), cell("`auto`"), f"{means['oracle']:.4f}", behind]
    return cells, regret / (gap or np.inf)


def table(results):
    head = ("task", "epsilon", "best of one level", "best by hand", "`auto`", "oracle")
    head += ("`auto` behind the best by hand",)
    rows = sorted((row(*result) for result in results), key=lambda pair: -pair[1])
    return pages.table(head, [cells for cells, _ in rows])


def main():
    options, results = pages.options(), []
    for name in pages.chosen(made := tasks()):
        make, budgets = made[name]
        for epsilon in pages.budgets(budgets):
            file = FOLDER / f"{name}, {epsilon:g}.json"
            kept = pages.kept(file, dict)
            for draw in evaluate(make, epsilon, kept):
                pages.keep(file, kept)
                print(f"{name}, epsilon {epsilon:g}, draw {draw}", flush=True)
            results.append((name, epsilon, kept))
    print(table(results))
    if not options and pages.ADULT.is_file():
        pages.write(pages.RESULTS / "redrawn.md", [table(results)])
