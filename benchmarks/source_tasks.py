"""Tasks of sources, of `utility` and others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.cli.config import read_config
from dpbilevel.cli.loading import without_sources
from dpbilevel.cli.tables import read_csv
from examples.data_cleaning import linear, loss_of, mnist, network, start

from .pages import ADULT, MNIST, ROOT, texts

FLIPS = np.array([0, 0, 0, 0.5, 0.5, 0.9, 0.9, 0.9])
WORK = ("workclass", "education", "occupation", "race")
TARGETS = {
    "a": {"Div-Male": 2000},
    "b": {"Never-Male": 2500, "Married-Female": 800},
    "c": {"Married-Female": 1200},
}
IMAGE = {
    "features": jax.ShapeDtypeStruct((197,), jnp.float32),
    "label": dpb.planning.Classes(10),
}


@dataclasses.dataclass
class Task:
    """A problem of sources, its records, and what only an oracle knows."""

    name: str
    loss: object  # of the model on one record
    num_sources: int
    data: dpb.Levels  # validation and training records
    test: dict
    model: object  # where the model starts
    correct: object  # whether a model labels a record correctly
    clean: np.ndarray | None = None  # sources; None: the oracle finds weights itself
    linear: bool = True  # models, in their parameters
    step: float = 1.0  # the unit of step sizes
    clip: float = 1.0  # the largest norm of a gradient, or the clip norm of a network
    ridge: float = 1e-4  # of the lower level
    scoring: dpb.applications.ScoringModel | None = None  # instead of the model
    records: object = None  # what one looks like, where the model does not say it

    @functools.cached_property
    def problem(self):
        """The problem of two levels."""
        return self.penalized(0.0)

    def penalized(self, weight_penalty):
        """Return the same with a public penalty of unequal weights."""
        ridges = {"ridge": self.ridge, "weight_penalty": weight_penalty}
        return dpb.applications.source_weighting(self.loss, self.num_sources, **ridges)

    @property
    def sizes(self):
        """Nobody has records in both levels."""
        return self.problem.sizes_of(self.data, "disjoint")

    @property
    def facts(self):
        """Arguments of `auto`, for features of norm 1."""
        return {"sizes": self.sizes, "records": self.records}

    @property
    def w0(self):
        """Equal weights and the model's start."""
        return jnp.zeros(self.num_sources), self.model


def classified(y, record):
    return jnp.sign(record["features"] @ y) == record["label"]


def of_classes(scores):
    def correct(y, record):
        return jnp.argmax(scores(y, record["features"])) == record["label"]

    return {"loss": loss_of(scores), "correct": correct, "ridge": 1e-5}


def parts(features, label, rows):
    return [
        {"features": jnp.asarray(features[r]), "label": jnp.asarray(label[r])}
        for r in rows
    ]


def made(name, features, label, rows, source, *, training=None, classes=0, **more):
    """Return a task of rows for validation, training and test.

    `source` and `training` are sources and labels of the training records; 0 `classes`
    stands for logistic regression.
    """
    upper, lower, test = parts(features, label, rows)
    if training is not None:
        lower["label"] = jnp.asarray(training.astype(label.dtype))
    lower["source"] = jnp.asarray(source.astype(np.int32))
    width = features.shape[1]
    fields = {"loss": dpb.logistic_loss, "correct": classified}
    fields["model"] = jnp.zeros((width, classes) if classes else width)
    if classes:
        fields |= of_classes(linear) | {"step": 2.0}
    data, count = dpb.Levels(upper, lower), int(source.max()) + 1
    fields |= {"num_sources": count, "data": data, "test": test}
    return Task(name, **(fields | more))


def unit(features):
    rows = np.concatenate([features, np.ones((len(features), 1))], 1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype("f4")


def encoded(table, kept=None):
    data = without_sources(read_config(ROOT / "configs/census.toml").data)
    if kept is not None:
        numeric = []
        for block in data.numeric:  # without fnlwgt, a weight of the survey
            places = [i for i, c in enumerate(block.columns) if c != "fnlwgt"]
            picked = {
                field: tuple(getattr(block, field)[i] for i in places)
                for field in ("columns", "mean", "scale")
            }
            numeric.append(dataclasses.replace(block, **picked))
        columns = tuple(c for c in data.categorical if c.column in kept)
        data = dataclasses.replace(data, numeric=tuple(numeric), categorical=columns)
    records = data.encode(table)
    return np.asarray(records.features), np.asarray(records.label)


def flipped(name, clean_records):
    """T1: eight sources, five of them with labels that are flipped at random."""
    features, label = encoded(read_csv(ADULT))
    rng = np.random.default_rng(0)
    order = rng.permutation(len(label))
    rows = order[20_000 : 20_000 + clean_records], order[:20_000], order[26_000:]
    source = rng.integers(0, 8, len(rows[1]))
    signs = np.where(rng.random(len(source)) < FLIPS[source], -1, 1)
    wrong = {"training": label[rows[1]] * signs, "clean": FLIPS == 0}
    return made(name, features, label, rows, source, **wrong)


def shifted(target, seed=0):
    """T1b: the population is a group that is not among the sources."""
    table, wanted = read_csv(ADULT), TARGETS[target]
    features, label = encoded(table, WORK)
    married = texts(table, "marital-status")
    status = np.full(len(married), "Div", dtype="<U8")
    status[np.char.startswith(married, "Married")] = "Married"
    status[married == "Never-married"] = "Never"
    status[married == "Widowed"] = "Wid"
    group = np.char.add(np.char.add(status, "-"), texts(table, "sex"))
    rng = np.random.default_rng(seed)
    people = [
        rng.permutation(np.flatnonzero(group == name))[:count]
        for name, count in wanted.items()
    ]
    people = rng.permutation(np.concatenate(people))
    lower = np.flatnonzero(~np.isin(group, [*wanted]))
    source = np.unique(group[lower], return_inverse=True)[1]
    rows = people[:300], lower, people[300:]
    return made(f"T1b ({target})", features, label, rows, source)


def softmax():
    pixels, label = mnist(MNIST)
    label, rng = label.astype(np.int32), np.random.default_rng(0)
    order = rng.permutation(len(label))
    rows = order[:1000], order[2500:], order[1000:2500]
    source, true = rng.integers(0, 10, len(rows[1])), label[rows[1]]
    training = np.where(source < 5, rng.integers(0, 10, len(true)), true)
    more = {"training": training, "classes": 10, "clean": np.arange(10) >= 5}
    return made("T2, softmax", unit(pixels), label, rows, source, **more)


def of_network():
    task = softmax()
    scoring = dpb.applications.ScoringModel(task.loss, np.zeros((197, 10), "f4"))
    more = {"name": "T2, network of 64 units", "model": start(), "linear": False}
    more |= {"step": 0.25, "scoring": scoring, "records": IMAGE}
    return dataclasses.replace(task, **more, **of_classes(network))


def generated(seed=0):
    """Five sources of generated records, two of them of other models."""
    rng = np.random.default_rng(seed)
    models = rng.normal(size=(5, 20))
    models[1:3] = models[0] + 0.3 * rng.normal(size=(2, 20))
    models[3:] = -models[0] + rng.normal(size=(2, 20))
    lower, upper, pairs = 20_000, 300, []
    source = rng.integers(0, len(models), lower)
    for of_record in (source, np.zeros(upper + 20_000, int)):
        x = rng.normal(size=(len(of_record), models.shape[1]))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        margin = 3 * np.sum(x * models[of_record], 1) + rng.logistic(size=len(x))
        pairs.append((x.astype("f4"), np.sign(margin).astype("f4")))
    features, label = map(np.concatenate, zip(*pairs, strict=True))
    training, held, test = np.split(np.arange(len(label)), [lower, lower + upper])
    return made("generated", features, label, (held, training, test), source)


TASKS = {
    **{
        f"T1-{count}": functools.partial(flipped, f"T1, {count} clean records", count)
        for count in (200, 1000, 6000)
    },
    **{f"T1b-{target}": functools.partial(shifted, target) for target in TARGETS},
    "T2-softmax": softmax,
    "T2-network": of_network,
    "generated": generated,
}
NEEDS = {"T1": ADULT, "T2": MNIST}


def there(name):
    return name[:2] not in NEEDS or NEEDS[name[:2]].is_file()
