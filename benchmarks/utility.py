"""Worth of released models: every method beside baselines and an oracle.

Run by `python -m benchmarks utility`, with names of tasks for some of them, such as
`--task=T1b` (all that begin so). Prints tables and writes results/utility.md if
all tasks ran.

A method is judged by the mean loss of the model that it releases on test records that
nobody trained on, at one budget for all. Every method runs with six settings, the
oracle and baselines of training records with eight, for 4 keys each; the setting with
the best median loss ON THE TEST RECORDS then runs for 10 keys, so that baselines and
oracles are tuned as well as methods of two levels are. Rows marked "one setting" ran
with the same setting on all tasks; those of `auto` with what `dpb.auto` chose.
NON-PRIVATE evaluation.

The Adult CSV is read from $ADULT or ../shared/data/adult.csv, MNIST (28 x 28 images and
labels as arrays `images` and `labels` of an npz file) from $MNIST or
../shared/data/mnist_10k.npz. Tasks whose data are missing are left out; those on
generated records always run.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb
from dpbilevel.cli.config import read_config
from dpbilevel.cli.files import read_csv

from .paths import ADULT, ROOT

PAGE = ROOT / "benchmarks/results/utility.md"
FOLDER = pathlib.Path("runs/utility")
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
MNIST = pathlib.Path(os.environ.get("MNIST", ROOT / "../shared/data/mnist_10k.npz"))
DELTA = 1e-5
KEYS, TRIALS = 10, 4
FLIPS = np.array([0, 0, 0, 0.5, 0.5, 0.9, 0.9, 0.9])
WORK = ("workclass", "education", "occupation", "race")
TARGETS = {
    "a": {"Div-Male": 2000},
    "b": {"Never-Male": 2500, "Married-Female": 800},
    "c": {"Married-Female": 1200},
}
TAIL = dpb.outputs.TailMean()
IMAGE = {
    "features": jax.ShapeDtypeStruct((197,), jnp.float32),
    "label": dpb.planning.Classes(10),
}


@dataclasses.dataclass
class Task:
    """A problem of sources, its records, and what only an oracle knows.

    Attributes:
        name: As in the tables.
        loss: The model's loss on one record.
        num_sources: The number of sources.
        data: Validation and training records.
        test: Test records.
        model: Where the model starts.
        clean: Which sources are clean, or `None`: then the oracle's weights are those
            found without privacy.
        correct: Whether a model labels a record correctly.
        linear: Whether models are linear in their parameters.
        step: The unit of step sizes.
        clip: The largest norm of a record's gradient, or the clip norm of a network.
        ridge: The ridge penalty of the lower level.
        scoring: What scores sources instead of the model, or `None`.
        records: What a record looks like, for `auto`, where the model does not say it.
    """

    name: str
    loss: object
    num_sources: int
    data: dpb.Levels
    test: dict
    model: object
    clean: np.ndarray | None
    correct: object
    linear: bool = True
    step: float = 1.0
    clip: float = 1.0
    ridge: float = 1e-4
    scoring: dpb.applications.ScoringModel | None = None
    records: object = None

    @functools.cached_property
    def problem(self):
        """The problem of two levels."""
        return self.penalized(0.0)

    def penalized(self, weight_penalty):
        """Return the same with a public penalty of unequal weights."""
        return dpb.applications.source_weighting(
            self.loss,
            self.num_sources,
            ridge=self.ridge,
            weight_penalty=weight_penalty,
        )

    @property
    def sizes(self):
        """Nobody has records in both levels."""
        return self.problem.sizes_of(self.data, "disjoint")

    @property
    def w0(self):
        """Equal weights and the model's start."""
        return jnp.zeros(self.num_sources), self.model


# ---------------------------------------------------------------------- the records


def encoded(table, kept=None):
    """Return unit rows of census features, and labels of -1 and 1."""
    data = read_config(ROOT / "configs/census.toml").data
    if kept is not None:
        numeric = []
        for block in data.numeric:  # without fnlwgt, a weight of the survey
            places = [i for i, c in enumerate(block.columns) if c != "fnlwgt"]
            picked = {
                field: tuple(getattr(block, field)[i] for i in places)
                for field in ("columns", "mean", "scale")
            }
            numeric.append(dataclasses.replace(block, **picked))
        categorical = tuple(c for c in data.categorical if c.column in kept)
        data = dataclasses.replace(
            data, numeric=tuple(numeric), categorical=categorical
        )
    records = data.encode(table)
    return np.asarray(records.features), np.asarray(records.label)


def levels(upper, lower):
    return dpb.Levels(*jax.tree.map(jnp.asarray, (upper, lower)))


def classified(y, record):
    return jnp.sign(record["features"] @ y) == record["label"]


def census(clean_records):
    """T1: eight sources, five of them with labels that are flipped at random."""
    features, label = encoded(read_csv(ADULT))
    rng = np.random.default_rng(0)
    order = rng.permutation(len(label))
    lower, upper = order[:20_000], order[20_000 : 20_000 + clean_records]
    test = order[26_000:]
    source = rng.integers(0, 8, len(lower)).astype(np.int32)
    flipped = np.where(rng.random(len(lower)) < FLIPS[source], -1, 1)
    flipped = (label[lower] * flipped).astype(label.dtype)
    training = {"features": features[lower], "label": flipped, "source": source}
    held, tested = (
        {"features": features[rows], "label": label[rows]} for rows in (upper, test)
    )
    return Task(
        f"T1, {clean_records} clean records",
        dpb.logistic_loss,
        8,
        levels(held, training),
        jax.tree.map(jnp.asarray, tested),
        jnp.zeros(features.shape[1]),
        FLIPS == 0,
        classified,
    )


def shifted(target, seed=0):
    """T1b: the population is a group that is not among the sources."""
    table = read_csv(ADULT)
    features, label = encoded(table, WORK)
    married = np.array([str(v).strip() for v in table.column("marital-status")])
    status = np.full(len(married), "Div", dtype="<U8")
    status[np.char.startswith(married, "Married")] = "Married"
    status[married == "Never-married"] = "Never"
    status[married == "Widowed"] = "Wid"
    sex = np.array([str(v).strip() for v in table.column("sex")])
    group = np.char.add(np.char.add(status, "-"), sex)
    rng = np.random.default_rng(seed)
    wanted = TARGETS[target]
    people = [
        rng.permutation(np.flatnonzero(group == name))[:count]
        for name, count in wanted.items()
    ]
    people = rng.permutation(np.concatenate(people))
    names = [name for name in np.unique(group) if name not in wanted]
    source = np.full(len(group), -1, np.int32)
    for index, name in enumerate(names):
        source[group == name] = index
    rows = np.flatnonzero(source >= 0)
    training = {
        "features": features[rows],
        "label": label[rows],
        "source": source[rows],
    }
    held, tested = (
        {"features": features[rows], "label": label[rows]}
        for rows in (people[:300], people[300:])
    )
    return Task(
        f"T1b ({target})",
        dpb.logistic_loss,
        len(names),
        levels(held, training),
        jax.tree.map(jnp.asarray, tested),
        jnp.zeros(features.shape[1]),
        None,
        classified,
    )


def scored(y, features):
    return features @ y


def network(y, features):
    hidden = jax.nn.tanh(features @ y["w1"] + y["b1"])
    return hidden @ y["w2"] + y["b2"]


def cross_entropy(scores):
    def loss(y, record):
        return optax.softmax_cross_entropy_with_integer_labels(
            scores(y, record["features"]), record["label"]
        )

    return loss


SOFTMAX = dpb.applications.ScoringModel(
    cross_entropy(scored), np.zeros((197, 10), "f4")
)


def digits(kind):
    """T2: ten groups of images, five of them with random labels."""
    with np.load(MNIST) as file:
        images, label = file["images"], file["labels"].astype(np.int32)
    images = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196) / 255.0
    features = np.concatenate([images, np.ones((len(images), 1))], 1)
    features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype("f4")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(label))
    upper, test, lower = order[:1000], order[1000:2500], order[2500:]
    source = rng.integers(0, 10, len(lower)).astype(np.int32)
    random = rng.integers(0, 10, len(lower)).astype(np.int32)
    training = {
        "features": features[lower],
        "label": np.where(source < 5, random, label[lower]),
        "source": source,
    }
    held, tested = (
        {"features": features[rows], "label": label[rows]} for rows in (upper, test)
    )
    data, tested = levels(held, training), jax.tree.map(jnp.asarray, tested)
    first, second = jax.random.split(jax.random.key(0))
    units = {
        "w1": 2.0 * jax.random.normal(first, (197, 64)),  # of features of norm 1
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(second, (64, 10)) / 8,
        "b2": jnp.zeros(10),
    }
    name, scores, start, more = {
        "softmax": ("softmax", scored, jnp.zeros((197, 10)), {"step": 2.0}),
        "network": (
            "network of 64 units",
            network,
            units,
            {"linear": False, "step": 0.25, "scoring": SOFTMAX, "records": IMAGE},
        ),
    }[kind]
    loss = cross_entropy(scores)

    def correct(y, record):
        return jnp.argmax(scores(y, record["features"])) == record["label"]

    clean = np.arange(10) >= 5
    return Task(
        f"T2, {name}", loss, 10, data, tested, start, clean, correct, ridge=1e-5, **more
    )


def generated(seed=0):
    """Five sources of generated records, two of them of other models."""
    rng = np.random.default_rng(seed)
    models = rng.normal(size=(5, 20))
    models[1:3] = models[0] + 0.3 * rng.normal(size=(2, 20))
    models[3:] = -models[0] + rng.normal(size=(2, 20))

    def records(n, source):
        x = rng.normal(size=(n, 20))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        margin = 3 * np.sum(x * models[source], 1) + rng.logistic(size=n)
        return {"features": x.astype("f4"), "label": np.sign(margin).astype("f4")}

    source = rng.integers(0, 5, 20_000).astype(np.int32)
    training = records(20_000, source) | {"source": source}
    zero = np.zeros(20_300, int)
    clean = records(20_300, zero)
    held = jax.tree.map(lambda v: v[:300], clean)
    tested = jax.tree.map(lambda v: jnp.asarray(v[300:]), clean)
    return Task(
        "generated",
        dpb.logistic_loss,
        5,
        levels(held, training),
        tested,
        jnp.zeros(20),
        None,
        classified,
    )


TASKS = {
    "T1-200": functools.partial(census, 200),
    "T1-1000": functools.partial(census, 1000),
    "T1-6000": functools.partial(census, 6000),
    "T1b-a": functools.partial(shifted, "a"),
    "T1b-b": functools.partial(shifted, "b"),
    "T1b-c": functools.partial(shifted, "c"),
    "T2-softmax": functools.partial(digits, "softmax"),
    "T2-network": functools.partial(digits, "network"),
    "generated": generated,
}
NEEDS = {"T1": ADULT, "T2": MNIST}


# ---------------------------------------------------------------------- the methods


def descent(task, steps, size, clip=None):
    """Noisy descent, averaged over its second half; sizes in units of the task.

    Gradients of linear models are clipped at 0.7 of the largest norm by default: at all
    of it the losses of T1, T2 softmax and generated are larger, those of T1b (b)
    smaller. Those of a network, which have no largest norm, at the task's norm.
    """
    clip = clip or (0.7 if task.linear else 1.0)
    return dpb.NoisyGD(steps, clip * task.clip, size * task.step, output=TAIL)


def one_level(reads):
    """Noisy descent; what reads training records is also clipped at the task's norm."""
    settings = {
        "upper": ((10, 2), (10, 4), (30, 1), (100, 0.5), (100, 2), (100, 8)),
        "lower": (
            *((100, 2), (100, 4), (100, 8), (100, 16), (100, 32), (100, 64)),
            *((100, 16, 1.0), (100, 32, 1.0)),
        ),
    }
    chosen = settings["upper" if reads == "upper" else "lower"]

    def solvers(task):
        # The clip norm of a network is the task's norm in all settings.
        settings = [s for s in chosen if task.linear or len(s) == 2]
        return [
            dpb.bilevel.OneLevel(descent(task, *setting), reads=reads)
            for setting in settings
        ]

    return solvers


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
    mixture = descent(task, steps, size, clip=clip)
    both = descent(task, 50, models, clip=0.78)
    return dpb.applications.MixedSources(
        both, mixture, descent(task, 100, fit), mixture
    )


def mixtures(task):
    grid = [(30.0, 16.0, 0.35, 10, 4.0), (30.0, 16.0, 0.7, 10, 4.0)]
    grid += [(30.0, 32.0, 0.7, 20, 2.0), (30.0, 8.0, 0.1, 10, 512.0)]
    grid += [(15.0, 4.0, 0.2, 10, 4.0), (15.0, 8.0, 0.35, 10, 2.0)]
    return [mixed(task, *settings) for settings in grid]


def refitted(search, sizes=(5.0, 20.0, 50.0)):
    """Return settings and their problems: two penalize unequal weights."""

    def pairs(task):
        def solver(size, fit):
            fit = descent(task, 100, fit)
            return dpb.bilevel.Refitted(
                search(task, size), fit, budget_split=(0.5, 0.5)
            )

        plain = [(task.problem, solver(a, b)) for a in sizes for b in (8.0, 16.0)]
        problem = task.penalized(0.1)
        return plain + [(problem, solver(size, 16.0)) for size in (5.0, 20.0)]

    return pairs


def penalty(task, size):
    return dpb.PenaltyBilevel(
        20,
        10.0,
        dpb.NoisyGD(10, task.clip, task.step),
        clip_norm=task.clip,
        upper_clip_norm=0.5 * task.clip,
        step_size=size,
    )


def single(task, size):
    """Fields of the methods of one loop."""
    return {
        "step_size": size,
        "lower_step_size": task.step,
        "cross_clip_norm": 0.5,
        "upper_clip_norm": 0.5 * task.clip,
        "output": TAIL,
    }


def single_loop(task, size):
    return dpb.SingleLoopBilevel(50, linear_step_size=task.step, **single(task, size))


def finite_difference(task, size):
    return dpb.bilevel.FiniteDifferenceBilevel(50, **single(task, size))


def planned(task, epsilon=1.0):
    """Return the plan of `auto`, whose dry runs know the sizes of the task alone."""
    start = time.perf_counter()
    budget = dpb.PrivacyBudget(epsilon, DELTA)
    plan = dpb.auto(
        task.problem,
        budget,
        sizes=task.sizes,
        w0=task.w0,
        clip_norm=task.clip,
        records=task.records,
    )
    seconds = time.perf_counter() - start
    print(
        f"  auto: {plan.trials[0].method}, {seconds:.0f} s; {plan.reason}", flush=True
    )
    return [plan.trials[0].solver]


METHODS = {
    "validation records only": one_level("upper"),
    "training records only": one_level("lower"),
    "all records": one_level("both"),
    "two stages (`SelectedSources`)": selected,
    "`PenaltyBilevel`, refitted": refitted(penalty),
    "`SingleLoopBilevel`, refitted": refitted(single_loop, (2.0, 5.0, 20.0)),
    "`FiniteDifferenceBilevel`, refitted": refitted(
        finite_difference, (2.0, 5.0, 20.0)
    ),
    "`MixedSources`": mixtures,
    "`MixedSources`, one setting": lambda task: [mixed(task)],
    "`auto`": planned,
}
BASELINES = tuple(METHODS)[:3]
TWO_STAGES, LINEAR = tuple(METHODS)[3], tuple(METHODS)[7:9]
ONE_SETTING = tuple(METHODS)[8]


# ---------------------------------------------------------------------- the oracle


def oracle_weights(task):
    """Weights in [0, 1] that no private method knows."""
    if task.clean is not None:
        return task.clean.astype("f4")

    with jax.enable_x64(True):
        task = dataclasses.replace(
            task,
            data=jax.tree.map(
                lambda v: v.astype(float) if v.dtype == jnp.float32 else v, task.data
            ),
        )
        x, y = jax.tree.map(lambda v: v.astype(float), task.w0)
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


def _ridge(weight, y):
    return weight * optax.tree.norm(y, squared=True)


def oracle(task):
    """Return the private fits of the lower level with the oracle's weights."""
    weights = jnp.asarray(oracle_weights(task))
    upper, lower = task.data.upper, task.data.lower
    of_record = weights[lower["source"]]

    def loss(y, record):
        return record["weight"] * task.loss(y, record)

    candidates = []
    for with_validation in (0.0, 1.0):
        ones = jnp.full(len(upper["label"]), with_validation)
        records = {
            name: jnp.concatenate([lower[name], upper[name]])
            for name in ("features", "label")
        } | {"weight": jnp.concatenate([of_record, ones])}
        share = float(jnp.mean(records["weight"]))
        # The ridge of the lower level, whose losses have weights of mean 1.
        ridge = functools.partial(_ridge, share * task.ridge)
        problem = dpb.FiniteSum(loss, public=ridge)
        for size in (8.0, 15.0, 30.0, 60.0):
            solver = descent(task, 100, size / share)
            candidates.append((problem, solver, records))
    return candidates, weights


# ---------------------------------------------------------------------- evaluation

RUN = jax.jit(lambda problem, solver, data, w0, key: (
    dpb.solve(problem, solver, data, w0, key=key).value
))  # fmt: skip


def constant_answer(test):
    """Return the entropy of test labels, the loss of their best constant answer."""
    rates = np.unique(np.asarray(test["label"]), return_counts=True)[1]
    rates = rates / np.sum(rates)
    return float(-np.sum(rates * np.log(rates)))


def tested(task, y):
    losses = jax.vmap(task.loss, (None, 0))(y, task.test)
    correct = jax.vmap(task.correct, (None, 0))(y, task.test)
    return float(jnp.mean(losses)), float(jnp.mean(correct))


def runner(task, budget, candidate):
    """Return the test losses of a candidate's runs, by their seeds."""
    problem, solver, data = candidate
    two = isinstance(data, dpb.Levels)
    w0 = task.w0 if two else task.model
    sizes = task.sizes if two else len(data["label"])
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)

    def run(seed):
        value = RUN(problem, plan.solver, data, w0, jax.random.key(seed))
        return tested(task, value[1] if two else value)

    return run


def best(task, budget, candidates):
    """Losses and accuracies of the setting with the best median, for all keys."""
    runs = [runner(task, budget, candidate) for candidate in candidates]
    found = [[run(key) for key in range(TRIALS)] for run in runs]
    medians = [np.median([loss for loss, _ in rows]) for rows in found]
    chosen = int(np.argmin(np.nan_to_num(medians, nan=np.inf)))
    rows = found[chosen] + [runs[chosen](key) for key in range(TRIALS, KEYS)]
    return np.asarray(rows)


def row(values):
    low, middle, high = np.quantile(values[:, 0], [0.25, 0.5, 0.75])
    return {
        "loss": middle,
        "quartiles": (low, high),
        "accuracy": float(np.median(values[:, 1])),
        "finite": bool(np.isfinite(values).all()),
    }


def judged(task, epsilon, oracle, methods, baselines):
    """Return a row per method on one task, with the share of the gap that it closes.

    Args:
        task: The task.
        epsilon: Of the budget.
        oracle: The candidates of the oracle: problems, solvers and data.
        methods: What gives the candidates of each method, by name.
        baselines: The names of the methods of one level.
    """
    start = time.perf_counter()
    budget = dpb.PrivacyBudget(epsilon, DELTA)
    rows = {}
    for method, candidates in {"oracle": lambda: oracle, **methods}.items():
        rows[method] = row(best(task, budget, candidates()))
        print(f"{task.name}, epsilon {epsilon:g}, {method}: {rows[method]}", flush=True)
    base = min(rows[method]["loss"] for method in baselines)
    for values in rows.values():
        values["gap"] = (base - values["loss"]) / (base - rows["oracle"]["loss"])
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    return {"task": task.name, "epsilon": epsilon, "rows": rows}


def evaluate(name, epsilon):
    """Return the rows of all methods for sources."""
    task = TASKS[name]()
    candidates, weights = oracle(task)
    print(f"{task.name}: weights of the oracle {np.round(np.asarray(weights), 2)}")

    def offered(solvers):
        more = {"epsilon": epsilon} if solvers is planned else {}
        found = solvers(task, **more)
        pairs = (v if isinstance(v, tuple) else (task.problem, v) for v in found)
        return [(problem, solver, task.data) for problem, solver in pairs]

    methods = {
        method: functools.partial(offered, solvers)
        for method, solvers in METHODS.items()
        # Mixtures of networks are no mixtures of predictions.
        if task.linear or method not in LINEAR
    }
    return judged(task, epsilon, candidates, methods, BASELINES)


# ---------------------------------------------------------------------- the page


def table(result, *, worst_first=False):
    lines = [
        f"#### {result['task']}, epsilon {result['epsilon']:g}",
        "",
        "| method | test loss [quartiles] | accuracy | gap closed |",
        "|---|---|---|---|",
    ]
    rows = sorted(result["rows"].items(), key=lambda item: item[1]["loss"])
    for method, values in reversed(rows) if worst_first else rows:
        low, high = values["quartiles"]
        lines.append(
            f"| {method} | {values['loss']:.4f} [{low:.4f}, {high:.4f}] "
            f"| {values['accuracy']:.3f} | {values['gap']:.2f} |"
        )
    return "\n".join(lines)


def best_of(rows, names):
    there = [(rows[name]["loss"], name) for name in names if name in rows]
    return min(there)[1] if there else None


def summary(results):
    """One line per task, those first on which no method of two levels is best."""
    heads = ("task", "epsilon", "best of one level", "two stages")
    heads += ("best of two levels", "`MixedSources`, one setting", "`auto`", "oracle")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]

    def two_levels(rows):
        others = (*BASELINES, TWO_STAGES, "`auto`", "oracle")  # auto may take one level
        return [name for name in rows if name not in others]

    def margin(result):
        rows = result["rows"]
        others = [rows[name]["loss"] for name in (*BASELINES, TWO_STAGES)]
        return rows[best_of(rows, two_levels(rows))]["loss"] - min(others)

    def cell(rows, name, words=""):
        if name not in rows:
            return ""
        return f"{rows[name]['loss']:.4f} ({words}{rows[name]['gap']:.2f})"

    for result in sorted(results, key=margin, reverse=True):
        rows = result["rows"]
        plain, ours = best_of(rows, BASELINES), best_of(rows, two_levels(rows))
        cells = (
            result["task"],
            f"{result['epsilon']:g}",
            f"{rows[plain]['loss']:.4f} ({plain})",
            cell(rows, TWO_STAGES),
            cell(rows, ours, f"{ours}: "),
            cell(rows, ONE_SETTING),
            cell(rows, "`auto`"),
            f"{rows['oracle']['loss']:.4f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(page, parts):
    """Put what was measured today between the marks of a page."""
    today = f"Measured on {datetime.date.today().isoformat()}."
    inside = "\n\n".join([BEGIN, today, *parts, END])
    text = re.sub(f"{BEGIN}.*?{END}", lambda _: inside, page.read_text(), flags=re.S)
    page.write_text(text)


def main():
    options = dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)
    prefix = options.get("task", "")
    results = []
    for name in TASKS:
        needed = NEEDS.get(name[:2])
        if not name.startswith(prefix):
            continue
        if needed is not None and not needed.is_file():
            print(f"{name}: left out, there is no {needed.name}.")
            continue
        three = name.startswith("T1-")  # where methods still differ at 0.3
        budgets = options.get("epsilon", "0.3,1,3" if three else "1,3")
        for epsilon in map(float, budgets.split(",")):
            results.append(evaluate(name, epsilon))
            FOLDER.mkdir(parents=True, exist_ok=True)
            saved = FOLDER / f"results-{prefix or 'all'}.json"
            saved.write_text(json.dumps(results))
    print(summary(results))
    print(*map(table, results), sep="\n\n")
    if not options and len({result["task"] for result in results}) == len(TASKS):
        write(PAGE, [summary(results), *map(table, results)])
