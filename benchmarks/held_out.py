"""`dpb.auto` on tasks not used to choose any rule: `python -m benchmarks held_out`.

Nine tasks of sources beside those of `utility`, judged in the same way: the mean loss
of the released model on test records, baselines and methods at the best of their
settings in hindsight, `auto` with no setting. Printed are the losses at one budget for
each task and what `auto` plans; a call without options writes results/held_out.md.
`--task=MNIST` runs the tasks that begin so. NON-PRIVATE evaluation.
"""

import functools

import numpy as np

import dpbilevel as dpb

from . import pages, source_tasks, utility


def evaluate(make, seed, epsilon):
    """Return the losses of all methods on one task, and what `auto` plans."""
    task = make(np.random.default_rng(seed))
    facts = {"sizes": task.sizes, "w0": task.w0}
    facts |= {"clip_norm": task.clip, "records": task.records}
    budget = dpb.PrivacyBudget(epsilon, utility.DELTA)
    plan = dpb.auto(task.problem, budget, **facts).trials[0]
    methods = {n: functools.partial(utility.offered, task, n) for n in utility.BY_HAND}
    methods["`auto`"] = lambda: [(task.problem, plan.solver, task.data)]
    methods["oracle"] = functools.partial(utility.oracle, task)
    result = utility.judged(task, epsilon, methods, utility.BASELINES)
    losses = {name: row["loss"] for name, row in result["rows"].items()}
    start = utility.tested(task, task.model)[0]
    return result | {"plan": plan.method, "start": start, "losses": losses}


def table(results):
    """Sort rows: first those in which `auto` is farthest behind the best method."""

    def behind(result):
        losses = result["losses"]
        best = min(losses[name] for name in utility.BY_HAND)
        return (losses["`auto`"] - best) / (result["start"] - best)

    rows = []
    for result in sorted(results, key=behind, reverse=True):
        losses = result["losses"]
        shown = [result["start"], min(losses[name] for name in utility.BASELINES)]
        shown += [losses[n] for n in (*utility.BY_HAND[3:], "oracle", "`auto`")]
        cells = [result["task"], f"{result['epsilon']:g}"]
        cells += [f"{loss:.4f}" for loss in shown]
        rows.append([*cells, f"{max(behind(result), 0):.0%}", result["plan"]])
    head = ("task", "epsilon", "start", "best of one level", "two stages")
    head += ("`MixedSources`", "oracle", "`auto`", "behind the best", "planned")
    return pages.table(head, rows)


def main():
    prefix = pages.options().get("task", "")
    tasks = source_tasks.held_out().items()
    found = table([evaluate(*v) for name, v in tasks if name.startswith(prefix)])
    print(found)
    if not pages.options():
        pages.write(pages.RESULTS / "held_out.md", [found])
