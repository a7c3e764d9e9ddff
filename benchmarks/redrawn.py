"""Tasks with records drawn anew for every run: `python -m benchmarks redrawn`.

The tables of `utility` and `penalties` have one draw of validation and test records, of
which a setting that is chosen in hindsight takes advantage. Here each of ten runs has
its own draw (and its own models, where records are generated). Printed are the means
over the draws: of baselines and methods at the setting of `utility` that is best in the
mean, of `dpb.auto` with no setting, and of the oracle; and how far `auto` is behind the
best of the others, in shares of the gap, with the standard error of that difference.
`--task=T1b` runs the tasks that begin so, `--epsilon=1,3` these budgets. Losses are
kept in runs/redrawn and not measured again, also where settings have changed: remove
that folder first. A call without options writes results/redrawn.md if all tasks ran.
NON-PRIVATE evaluation. Data as in `utility`.
"""

import functools
import json
import pathlib
import sys
import time

import jax
import numpy as np

import dpbilevel as dpb

from . import penalties, utility
from .paths import ADULT, ROOT

PAGE = ROOT / "benchmarks/results/redrawn.md"
FOLDER = pathlib.Path("runs/redrawn")
# Draw 0 is that of the other pages. With 1 to 10 of T1b settings were compared.
DRAWS = range(11, 21)
SOURCES = (*utility.BASELINES, utility.TWO_STAGES, "`MixedSources`")
PENALTIES = ("all records", "`ScaledGroups`")  # the best of one and of two levels


def sources(make, draw):
    """Return a task of sources and the candidates of its methods."""
    task = make(seed=draw)

    def offered(name):
        return [(task.problem, s, task.data) for s in utility.METHODS[name](task)]

    methods = {name: functools.partial(offered, name) for name in SOURCES}
    methods["oracle"] = lambda: utility.oracle(task)[0]
    return task, methods


def penalty_groups(draw):
    """Return the generated task of penalties and the candidates of its methods."""
    columns = penalties.generated_columns(draw + 1)
    task = penalties.noisy("", columns, 10, draw)
    methods = {n: functools.partial(penalties.METHODS[n], task) for n in PENALTIES}
    methods["oracle"] = lambda: penalties.oracle(task)
    return task, methods


def tasks():
    """Return the maker and the budgets of each task of one draw, by name."""
    found = {"generated": (functools.partial(sources, utility.generated), (1.0, 3.0))}
    found["T3 generated"] = penalty_groups, (1.0,)
    if ADULT.is_file():
        for target in utility.TARGETS:
            make = functools.partial(sources, utility.TASKS[f"T1b-{target}"])
            found[f"T1b ({target})"] = make, (1.0, 3.0)
    return found


def evaluate(make, epsilon, kept):
    """Add the losses of all settings of each method, and yield draw after draw.

    Args:
        make: What makes the task of a draw.
        epsilon: Of the budget.
        kept: Those that are there, by method.
    """
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


def best_losses(kept):
    """Return the losses of each method at the best of its settings, by draw."""
    # A setting that diverges in some draw is no best one.
    tables = {name: np.nan_to_num(v, nan=np.inf) for name, v in kept.items()}
    return {name: v[:, np.argmin(np.mean(v, 0))] for name, v in tables.items()}


def standard_error(values):
    """Return the standard error of a mean over the draws."""
    return np.std(values, ddof=1) / np.sqrt(len(values))


def row(name, epsilon, kept):
    """Return the cells of a task, and how far `auto` is behind the best by hand."""
    losses = best_losses(kept)
    means = {method: np.mean(values) for method, values in losses.items()}
    single = min((m for m in means if m in utility.BASELINES), key=means.__getitem__)
    hand = min(means.keys() - {"`auto`", "oracle"}, key=means.__getitem__)
    gaps = losses[single] - losses["oracle"]
    gap = np.mean(gaps) if np.mean(gaps) > 2 * standard_error(gaps) else None

    def cell(method, words=""):
        share = "" if gap is None else f"{(means[single] - means[method]) / gap:.2f}"
        inside = ": ".join(filter(None, (words, share)))
        return f"{means[method]:.4f}" + (f" ({inside})" if inside else "")

    regret = losses["`auto`"] - losses[hand]
    spread = standard_error(regret)
    behind = f"{np.mean(regret):.4f} ± {spread:.4f}"
    if gap is not None:
        behind += f" ({np.mean(regret) / gap:.2f} ± {spread / gap:.2f})"
    cells = [name, f"{epsilon:g}", f"{means[single]:.4f} ({single})"]
    cells += [cell(hand, hand), cell("`auto`"), f"{means['oracle']:.4f}", behind]
    return f"| {' | '.join(cells)} |", np.mean(regret) / (gap or np.inf)


def table(results):
    """Sort rows: first those in which `auto` is farthest behind."""
    heads = ("task", "epsilon", "best of one level", "best by hand", "`auto`", "oracle")
    heads += ("`auto` behind the best by hand",)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    rows = (row(*result) for result in results)
    rows = sorted(rows, key=lambda pair: pair[1], reverse=True)
    return "\n".join([*lines, *(text for text, _ in rows)])


def main():
    options = dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)
    prefix = options.get("task", "")
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = []
    for name, (make, budgets) in tasks().items():
        if not name.startswith(prefix):
            continue
        chosen = options.get("epsilon", ",".join(map(str, budgets)))
        for epsilon in map(float, chosen.split(",")):
            file = FOLDER / f"{name}, {epsilon:g}.json"
            kept = json.loads(file.read_text()) if file.is_file() else {}
            start = time.perf_counter()
            for draw in evaluate(make, epsilon, kept):
                file.write_text(json.dumps(kept))
                seconds = time.perf_counter() - start
                text = f"{name}, epsilon {epsilon:g}, draw {draw}, {seconds:.0f} s"
                print(text, flush=True)
            results.append((name, epsilon, kept))
    print(table(results))
    if not options and ADULT.is_file():
        utility.write(PAGE, [table(results)])
