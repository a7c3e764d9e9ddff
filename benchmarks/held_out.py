"""`dpb.auto` on tasks not used to choose any rule: `python -m benchmarks held_out`.

Nine tasks of sources beside those of `utility`, judged in the same way: the mean loss
of the released model on test records, baselines and methods at the best of their
settings in hindsight, `auto` with no setting. Printed are the losses at one budget for
each task and what `auto` plans; a call without options writes results/held_out.md.
`--task=MNIST` runs the tasks that begin so. NON-PRIVATE evaluation. Data as in
`utility`; the packaged records of scikit-learn are always there.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import dpbilevel as dpb
from dpbilevel.cli.files import read_csv

from . import utility
from .paths import ADULT, ROOT

PAGE = ROOT / "benchmarks/results/held_out.md"
SHOWN = (*utility.BASELINES, utility.TWO_STAGES, "`MixedSources`")


def task(name, features, label, rows, source, *, training=None, classes=0, **more):
    """Return a task of rows for validation, training and test.

    Args:
        name: As in the table.
        features: Of all records.
        label: Likewise.
        rows: The places of the three parts.
        source: That of each training record.
        training: The labels of training records, where they are not the true ones.
        classes: Of softmax regression; 0 for logistic regression.
        **more: Further fields of the task.
    """
    upper, lower, test = rows
    wrong = label[lower] if training is None else training
    held, tested = (
        {"features": features[part], "label": label[part]} for part in (upper, test)
    )
    records = {"features": features[lower], "label": wrong.astype(label.dtype)}
    records["source"] = source.astype(np.int32)
    width = features.shape[1]
    model = jnp.zeros((width, classes) if classes else width)
    loss, correct = dpb.logistic_loss, utility.classified
    if classes:
        loss = utility.cross_entropy(utility.scored)
        more |= {"ridge": 1e-5, "step": 2.0}

        def correct(y, record):
            return jnp.argmax(record["features"] @ y) == record["label"]

    return utility.Task(
        name,
        loss,
        int(source.max()) + 1,
        utility.levels(held, records),
        jax.tree.map(jnp.asarray, tested),
        model,
        None,
        correct,
        **more,
    )


def unit(features):
    """Rows of norm 1 with a constant."""
    rows = np.concatenate([features, np.ones((len(features), 1))], 1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype("f4")


def texts(table, column):
    return np.array([str(value).strip() for value in table.column(column)])


def graded(rng):
    """Six sources whose labels, married or not, are flipped with rising probability."""
    table = read_csv(ADULT)
    features, _ = utility.encoded(table, utility.WORK)
    married = np.char.startswith(texts(table, "marital-status"), "Married")
    label = np.where(married, 1, -1).astype("f4")
    order = rng.permutation(len(label))
    rows = order[:300], order[300:12_300], order[20_000:]
    source = rng.integers(0, 6, 12_000)
    flips = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.45])[source]
    flipped = np.where(rng.random(12_000) < flips, -1, 1) * label[rows[1]]
    name = "census, married, labels flipped more from source to source"
    return task(name, features, label, rows, source, training=flipped)


def self_employed(table):
    """Make sources by class of work and education; the population is self-employed."""
    work = texts(table, "workclass")
    years = np.array(table.column("education-num")).astype(float)
    band = (years > 9).astype(int) + (years >= 13)
    group = np.where(work == "?", 6, np.where(work == "Private", 0, 3) + band)
    return np.char.startswith(work, "Self"), group


def old(table):
    """Make sources by age; the population is 58 and older."""
    age = np.array(table.column("age")).astype(float)
    return age >= 58, np.digitize(age, [25, 32, 39, 47])


def abroad(table):
    """Make sources by race and sex of people born in the USA, for the others."""
    born, race = texts(table, "native-country"), texts(table, "race")
    group = np.where(race == "White", 0, np.where(race == "Black", 1, 2))
    group = group * 2 + (texts(table, "sex") == "Male")
    return (born != "United-States") & (born != "?"), group


def grouped(name, split, rng):
    """Return the income of a group that no source has."""
    table = read_csv(ADULT)
    kept = ("marital-status", "occupation", "race", "relationship")
    features, label = utility.encoded(table, kept)
    wanted, group = split(table)
    people, lower = rng.permutation(np.flatnonzero(wanted)), np.flatnonzero(~wanted)
    rows = people[:300], lower, people[300:]
    return task(f"census, income of {name}", features, label, rows, group[lower])


def images(wrong, count, held, shifted, rng):
    """Make groups of images, some of them with wrong labels."""
    with np.load(utility.MNIST) as file:
        pixels, label = file["images"], file["labels"].astype(np.int32)
    pixels = pixels.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196) / 255.0
    order = rng.permutation(len(label))
    rows = order[:held], order[held + 1500 :], order[held : held + 1500]
    source, true = rng.integers(0, count, len(rows[1])), label[rows[1]]
    other = (true + 1) % 10 if shifted else rng.integers(0, 10, len(true))
    training = np.where(source < wrong, other, true)
    words = "of the next digit" if shifted else "at random"
    name = f"MNIST, labels of {wrong} of {count} sources {words}"
    more = {"training": training, "classes": 10}
    return task(name, unit(pixels), label, rows, source, **more)


def small_digits(rng):
    """1 197 images in four groups, two of them with wrong labels."""
    pixels, label = datasets.load_digits(return_X_y=True)
    label = label.astype(np.int32)
    order = rng.permutation(len(label))
    rows = order[:200], order[600:], order[200:600]
    source, true = rng.integers(0, 4, len(rows[1])), label[rows[1]]
    other = (true + rng.integers(1, 10, len(true))) % 10
    more = {"training": np.where(source < 2, other, true), "classes": 10}
    return task(
        "digits of 8 x 8 pixels", unit(pixels / 16), label, rows, source, **more
    )


def wide(rng):
    """100 features of decaying scale, three sources shifted and two opposite."""
    scale = np.arange(1, 101) ** -0.5
    model = rng.normal(size=100)
    models = [model] * 5 + [model + 0.7 * rng.normal(size=100) for _ in range(3)]
    models = np.stack([*models, -model, -model])

    def records(source):
        x = rng.normal(size=(len(source), 100)) * scale
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        margin = 3 * np.sum(x * models[source], 1) + rng.logistic(size=len(x))
        return x.astype("f4"), np.sign(margin).astype("f4")

    source = rng.integers(0, 10, 8000)
    pairs = records(source), records(np.zeros(10_500, int))
    features, label = map(np.concatenate, zip(*pairs, strict=True))
    places = np.arange(18_500)
    rows = places[8000:8500], places[:8000], places[8500:]
    return task("generated, 100 features", features, label, rows, source)


def cancer(rng):
    """339 records of breast cancer in three groups, one with opposite labels."""
    table, label = datasets.load_breast_cancer(return_X_y=True)
    label = (2 * label - 1).astype("f4")
    columns = np.clip((table - table.mean(0)) / table.std(0), -3, 3) / 3
    order = rng.permutation(len(label))
    rows = order[:80], order[230:], order[80:230]
    source = rng.integers(0, 3, len(rows[1]))
    opposite = np.where(source == 0, -1, 1) * label[rows[1]]
    return task("breast cancer", unit(columns), label, rows, source, training=opposite)


def tasks():
    """Return maker, seed and epsilon of each task, by the first word of its name."""
    found = {
        "breast cancer": (cancer, 6, 3.0),
        "digits": (small_digits, 4, 3.0),
        "generated": (wide, 5, 1.0),
    }
    if ADULT.is_file():
        found["census, married"] = graded, 1, 1.0
        groups = {"the self-employed": self_employed, "people of 58 and older": old}
        groups["people born abroad"] = abroad
        for name, split in groups.items():
            made = functools.partial(grouped, name, split)
            found[f"census, income of {name}"] = made, 2, 1.0
    if utility.MNIST.is_file():
        for kind in ((3, 6, 500, True), (2, 10, 1000, False)):
            made = functools.partial(images, *kind)
            found[f"MNIST, labels of {kind[0]}"] = made, 3, 1.0
    return found


def evaluate(make, seed, epsilon):
    """Return the losses of all methods on one task, and what `auto` plans."""
    start = time.perf_counter()
    budget = dpb.PrivacyBudget(epsilon, utility.DELTA)
    made = make(np.random.default_rng(seed))
    options = {"clip_norm": made.clip, "records": made.records}
    plan = dpb.auto(made.problem, budget, sizes=made.sizes, w0=made.w0, **options)
    candidates = {
        name: [(made.problem, s, made.data) for s in utility.METHODS[name](made)]
        for name in SHOWN
    }
    candidates["`auto`"] = [(made.problem, plan.trials[0].solver, made.data)]
    candidates["oracle"] = utility.oracle(made)[0]
    rows = {}
    for name, solvers in candidates.items():
        rows[name] = utility.row(utility.best(made, budget, solvers))["loss"]
        jax.clear_caches()
    seconds = time.perf_counter() - start
    print(f"{made.name}: {rows}, {plan.trials[0].method}, {seconds:.0f} s", flush=True)
    return {
        "task": made.name,
        "epsilon": epsilon,
        "plan": plan.trials[0].method,
        "start": utility.tested(made, made.model)[0],
        "rows": rows,
    }


def table(results):
    """Sort rows: first those in which `auto` is farthest behind the best method."""
    heads = ("task", "epsilon", "start", "best of one level", "two stages")
    heads += ("`MixedSources`", "oracle", "`auto`", "behind the best", "planned")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]

    def behind(result):
        rows = result["rows"]
        best = min(rows[name] for name in SHOWN)
        return (rows["`auto`"] - best) / (result["start"] - best)

    for result in sorted(results, key=behind, reverse=True):
        rows = result["rows"]
        losses = [result["start"], min(rows[name] for name in utility.BASELINES)]
        losses += [rows[name] for name in (*SHOWN[3:], "oracle", "`auto`")]
        cells = [result["task"], f"{result['epsilon']:g}"]
        cells += [f"{loss:.4f}" for loss in losses]
        cells += [f"{max(behind(result), 0):.0%}", result["plan"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    options = dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)
    prefix = options.get("task", "")
    chosen = {n: v for n, v in tasks().items() if n.startswith(prefix)}
    results = [evaluate(*values) for values in chosen.values()]
    print(table(results))
    if not options:
        utility.write(PAGE, [table(results)])
