"""Worth of released models: every method beside baselines and an oracle.

`python -m benchmarks utility` writes results/utility.md; `--task=T1b` prints the tasks
that begin so. The setting with the best median of 4 keys ON THE TEST RECORDS runs for
10 keys, that of baselines and oracles, too. NON-PRIVATE evaluation.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb

from . import pages
from .source_tasks import NEEDS, TASKS, there

PAGE = pages.RESULTS / "utility.md"
DELTA = 1e-5
KEYS, TRIALS = 10, 4
TAIL = dpb.outputs.TailMean()

# ---------------------------------------------------------------------- the methods


def descent(task, steps, size, clip=None):
    """Noisy descent, averaged over its second half; sizes in units of the task.

    Gradients of linear models are clipped at 0.7 of the largest norm by default, those
    of a network, which have no largest norm, at the task's norm.
    """
    clip = clip or (0.7 if task.linear else 1.0)
    return dpb.NoisyGD(steps, clip * task.clip, size * task.step, output=TAIL)


def one_level(task, reads):
    """Noisy descent; what reads training records is also clipped at the task's norm."""
    if reads == "upper":
        settings = [(10, 2), (10, 4), (30, 1), (100, 0.5), (100, 2), (100, 8)]
    else:
        settings = [(100, size) for size in (2, 4, 8, 16, 32, 64)]
        # The clip norm of a network is the task's norm in all settings.
        settings += [(100, 16, 1.0), (100, 32, 1.0)] if task.linear else []
    return [dpb.bilevel.OneLevel(descent(task, *s), reads=reads) for s in settings]


def selected(task):
    kind = dpb.applications.SelectedSources
    grid = [(0.5, 8.0), (0.5, 32.0), (0.5, 64.0), (2.0, 16.0)]
    model = functools.partial(descent, task, clip=0.5)  # its signs count alone
    alone = [kind(model(30, a), descent(task, 100, b)) for a, b in grid]
    both = {"fit_reads": "both", "budget_split": (0.03, 0.02, 0.95)}
    both["scoring"] = task.scoring
    first = model(10, 0.5)
    return alone + [kind(first, descent(task, 100, b), **both) for b in (8.0, 32.0)]


def mixed(task, models=30.0, fit=16.0, clip=0.5, steps=10, size=4.0):
    mixture, both = descent(task, steps, size, clip), descent(task, 50, models, 0.78)
    fit = descent(task, 100, fit)
    return dpb.applications.MixedSources(both, mixture, fit, mixture)


def mixtures(task):
    grid = [(30.0, 16.0, 0.35, 10, 4.0), (30.0, 16.0, 0.7, 10, 4.0)]
    grid += [(30.0, 32.0, 0.7, 20, 2.0), (30.0, 8.0, 0.1, 10, 512.0)]
    grid += [(15.0, 4.0, 0.2, 10, 4.0), (15.0, 8.0, 0.35, 10, 2.0)]
    return [mixed(task, *settings) for settings in grid]


def refitted(task, search, sizes=(2.0, 5.0, 20.0)):
    def solver(size, fit):
        fit, halves = descent(task, 100, fit), (0.5, 0.5)
        return dpb.bilevel.Refitted(search(task, size), fit, budget_split=halves)

    plain = [(task.problem, solver(a, b)) for a in sizes for b in (8.0, 16.0)]
    problem = task.penalized(0.1)
    return plain + [(problem, solver(size, 16.0)) for size in (5.0, 20.0)]


def penalty(task, size):
    inner = dpb.NoisyGD(10, task.clip, task.step)
    norms = {"clip_norm": task.clip, "upper_clip_norm": 0.5 * task.clip}
    return dpb.PenaltyBilevel(20, 10.0, inner, step_size=size, **norms)


def single(task, size):
    norms = {"cross_clip_norm": 0.5, "upper_clip_norm": 0.5 * task.clip}
    return norms | {"step_size": size, "lower_step_size": task.step, "output": TAIL}


def single_loop(task, size):
    return dpb.SingleLoopBilevel(50, linear_step_size=task.step, **single(task, size))


def finite_difference(task, size):
    return dpb.bilevel.FiniteDifferenceBilevel(50, **single(task, size))


def planned(task, epsilon=1.0):
    budget = dpb.PrivacyBudget(epsilon, DELTA)
    plan = dpb.auto(task.problem, budget, w0=task.w0, **task.facts)
    print(f"  auto: {plan.trials[0].method}; {plan.reason}", flush=True)
    return [plan.trials[0].solver]


METHODS = {
    "validation records only": functools.partial(one_level, reads="upper"),
    "training records only": functools.partial(one_level, reads="lower"),
    "all records": functools.partial(one_level, reads="both"),
    "two stages (`SelectedSources`)": selected,
    "`PenaltyBilevel`, refitted": lambda t: refitted(t, penalty, (5.0, 20.0, 50.0)),
    "`SingleLoopBilevel`, refitted": lambda t: refitted(t, single_loop),
    "`FiniteDifferenceBilevel`, refitted": lambda t: refitted(t, finite_difference),
    "`MixedSources`": mixtures,
    "`MixedSources`, one setting": lambda task: [mixed(task)],
    "`auto`": planned,
}
BASELINES = tuple(METHODS)[:3]
TWO_STAGES, MIXED, ONE_SETTING = (tuple(METHODS)[place] for place in (3, 7, 8))
BY_HAND = (*BASELINES, TWO_STAGES, MIXED)  # the methods that other pages show, too


def offered(task, method, **more):
    found = METHODS[method](task, **more)
    pairs = (v if isinstance(v, tuple) else (task.problem, v) for v in found)
    return [(problem, solver, task.data) for problem, solver in pairs]


# ---------------------------------------------------------------------- the oracle


def widened(tree):
    """Return the same numbers in float64; other leaves as they are."""
    return jax.tree.map(lambda v: v.astype(float) if v.dtype == "float32" else v, tree)


def oracle_weights(task):
    """Weights in [0, 1] that no private method knows."""
    if task.clean is not None:
        return task.clean.astype("f4")
    with jax.enable_x64(True):
        task = dataclasses.replace(task, data=widened(task.data))
        x, y = widened(task.w0)
        weights = np.asarray(jax.nn.softmax(exact_search(task, x, y, 60)))
    return (weights / weights.max()).astype("f4")


def exact_search(task, x, y, steps):
    """Return x after outer steps along exact hypergradients. NON-PRIVATE."""
    optimizer, problem = optax.adam(0.3), task.problem

    @jax.jit
    def step(x, y, v, state):
        y, _ = dpb.oracles.lower_solve(problem, x, task.data, y0=y)
        gradient, v = dpb.oracles.implicit_hypergradient(problem, x, y, task.data, v0=v)
        updates, state = optimizer.update(gradient, state)
        return problem.x_set.project(x + updates), y, v.value, state

    v, state = jnp.zeros_like(y), optimizer.init(x)
    for _ in range(steps):
        x, y, v, state = step(x, y, v, state)
    return x


def oracle(task):
    weights = jnp.asarray(oracle_weights(task))
    print(f"{task.name}: weights of the oracle {np.round(np.asarray(weights), 2)}")
    upper, lower = task.data.upper, task.data.lower

    def loss(y, record):
        return record["weight"] * task.loss(y, record)

    candidates = []
    for with_validation in (0.0, 1.0):
        ones = jnp.full(len(upper["label"]), with_validation)
        records = {n: jnp.concatenate([lower[n], upper[n]]) for n in upper}
        records["weight"] = jnp.concatenate([weights[lower["source"]], ones])
        share = float(jnp.mean(records["weight"]))

        # The ridge of the lower level, whose losses have weights of mean 1.
        def ridge(y, weight=share * task.ridge):
            return weight * optax.tree.norm(y, squared=True)

        problem = dpb.FiniteSum(loss, public=ridge)
        for size in (8.0, 15.0, 30.0, 60.0):
            solver = descent(task, 100, size / share)
            candidates.append((problem, solver, records))
    return candidates


# ---------------------------------------------------------------------- evaluation

RUN = jax.jit(lambda *given, key: dpb.solve(*given, key=key).value)


def constant_answer(test):
    rates = np.unique(np.asarray(test["label"]), return_counts=True)[1]
    rates = rates / np.sum(rates)
    return float(-np.sum(rates * np.log(rates)))


def tested(task, y):
    losses = jax.vmap(task.loss, (None, 0))(y, task.test)
    correct = jax.vmap(task.correct, (None, 0))(y, task.test)
    return float(jnp.mean(losses)), float(jnp.mean(correct))


def runner(task, budget, candidate):
    problem, solver, data = candidate
    two = isinstance(data, dpb.Levels)
    w0 = task.w0 if two else task.model
    sizes = task.sizes if two else len(data["label"])
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)

    def run(seed):
        value = RUN(problem, plan.solver, data, w0, key=jax.random.key(seed))
        return tested(task, value[1] if two else value)

    return run


def best(task, budget, candidates):
    """Return the row of the setting with the best median, over all keys."""
    runs = [runner(task, budget, candidate) for candidate in candidates]
    found = [[run(key) for key in range(TRIALS)] for run in runs]
    medians = [np.median([loss for loss, _ in rows]) for rows in found]
    chosen = int(np.argmin(np.nan_to_num(medians, nan=np.inf)))
    rows = found[chosen] + [runs[chosen](key) for key in range(TRIALS, KEYS)]
    losses, accuracies = np.transpose(rows)
    return {
        "loss": float(np.median(losses)),
        "losses": pages.spread(losses),
        "accuracy": float(np.median(accuracies)),
    }


def judged(task, epsilon, methods, baselines):
    """Return a row per method on one task; `methods` make candidates by name."""
    jax.clear_caches()  # programs of many tasks fill the memory
    budget, rows = dpb.PrivacyBudget(epsilon, DELTA), {}
    for method, candidates in methods.items():
        rows[method] = best(task, budget, candidates())
        print(f"{task.name}, epsilon {epsilon:g}, {method}: {rows[method]}", flush=True)
    base = min(rows[method]["loss"] for method in baselines)
    for values in rows.values():
        values["gap"] = (base - values["loss"]) / (base - rows["oracle"]["loss"])
    return {"task": task.name, "epsilon": epsilon, "rows": rows}


def evaluate(name, epsilon):
    task = TASKS[name]()
    methods = {"oracle": functools.partial(oracle, task)}
    for method in METHODS:
        # Mixtures of networks are no mixtures of predictions.
        if task.linear or method not in (MIXED, ONE_SETTING):
            more = {"epsilon": epsilon} if method == "`auto`" else {}
            methods[method] = functools.partial(offered, task, method, **more)
    return judged(task, epsilon, methods, BASELINES)


# ---------------------------------------------------------------------- the page


def table(result, *, worst_first=False):
    rows = sorted(result["rows"].items(), key=lambda item: item[1]["loss"])
    cells = []
    for method, values in reversed(rows) if worst_first else rows:
        last = f"{values['accuracy']:.3f}", f"{values['gap']:.2f}"
        cells.append([method, values["losses"], *last])
    head = ["method", "test loss [quartiles]", "accuracy", "gap closed"]
    title = f"{result['task']}, epsilon {result['epsilon']:g}"
    return pages.table(head, cells, title)


def summary(results):
    # The plan of auto may have one level.
    others = (*BASELINES, TWO_STAGES, "`auto`", "oracle")
    chosen = []
    for result in results:
        rows = result["rows"]
        losses = {name: row["loss"] for name, row in rows.items()}
        plain = min(BASELINES, key=losses.__getitem__)
        ours = min((n for n in rows if n not in others), key=losses.__getitem__)
        behind = losses[ours] - min(losses[plain], losses[TWO_STAGES])
        chosen.append((behind, len(chosen), result, plain, ours))

    def cell(rows, name, words=""):
        if name not in rows:
            return ""
        return f"{rows[name]['loss']:.4f} ({words}{rows[name]['gap']:.2f})"

    lines = []
    for *_, result, plain, ours in sorted(chosen, reverse=True):
        rows = result["rows"]
        cells = [result["task"], f"{result['epsilon']:g}"]
        cells += [f"{rows[plain]['loss']:.4f} ({plain})", cell(rows, TWO_STAGES)]
        cells += [cell(rows, ours, f"{ours}: "), cell(rows, ONE_SETTING)]
        cells += [cell(rows, "`auto`"), f"{rows['oracle']['loss']:.4f}"]
        lines.append(cells)
    head = ("task", "epsilon", "best of one level", "two stages")
    head += ("best of two levels", ONE_SETTING, "`auto`", "oracle")
    return pages.table(head, lines)


def main():
    results = []
    for name in pages.chosen(TASKS):
        if not there(name):
            print(f"{name}: left out, there is no {NEEDS[name[:2]].name}.")
            continue
        three = name.startswith("T1-")  # where methods still differ at 0.3
        for epsilon in pages.budgets("0.3,1,3" if three else "1,3"):
            results.append(evaluate(name, epsilon))
    parts = [summary(results), *map(table, results)]
    print(*parts, sep="\n\n")
    if not pages.options() and len({r["task"] for r in results}) == len(TASKS):
        pages.write(PAGE, parts)
