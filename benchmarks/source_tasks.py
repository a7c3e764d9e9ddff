"""Tasks of sources: those of `utility` and those of `held_out`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import dpbilevel as dpb
from dpbilevel.cli.config import read_config
from dpbilevel.cli.csv_files import read_csv
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
    """A problem of sources, its records, and what only an oracle knows.

    Attributes:
        name: As in the tables.
        loss: The model's loss on one record.
        num_sources: The number of sources.
        data: Validation and training records.
        test: Test records.
        model: Where the model starts.
        correct: Whether a model labels a record correctly.
        clean: Which sources are clean, or `None`: then the oracle's weights are those
            found without privacy.
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
    correct: object
    clean: np.ndarray | None = None
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
        ridges = {"ridge": self.ridge, "weight_penalty": weight_penalty}
        return dpb.applications.source_weighting(self.loss, self.num_sources, **ridges)

    @property
    def sizes(self):
        """Nobody has records in both levels."""
        return self.problem.sizes_of(self.data, "disjoint")

    @property
    def w0(self):
        """Equal weights and the model's start."""
        return jnp.zeros(self.num_sources), self.model


def classified(y, record):
    return jnp.sign(record["features"] @ y) == record["label"]


def of_classes(scores):
    """Return the cross entropy of these scores, and whether the largest is right."""

    def correct(y, record):
        return jnp.argmax(scores(y, record["features"])) == record["label"]

    return {"loss": loss_of(scores), "correct": correct, "ridge": 1e-5}


def parts(features, label, rows):
    """Return the records of some rows, for each part of a task."""
    return [
        {"features": jnp.asarray(features[r]), "label": jnp.asarray(label[r])}
        for r in rows
    ]


def made(name, features, label, rows, source, *, training=None, classes=0, **more):
    """Return a task of rows for validation, training and test.

    Args:
        name: As in the table.
        features: Features of all records.
        label: Labels of all records.
        rows: The places of the three parts.
        source: The source of each training record.
        training: The labels of training records, where they are not the true ones.
        classes: The number of classes of softmax regression; 0: logistic regression.
        **more: Further fields of the task.
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
    """Rows of norm 1 with a constant."""
    rows = np.concatenate([features, np.ones((len(features), 1))], 1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype("f4")


# -------------------------------------------------------------------- census records


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


def graded(rng):
    """Six sources whose labels, married or not, are flipped with rising probability."""
    table = read_csv(ADULT)
    features, _ = encoded(table, WORK)
    married = np.char.startswith(texts(table, "marital-status"), "Married")
    label = np.where(married, 1, -1).astype("f4")
    order = rng.permutation(len(label))
    rows = order[:300], order[300:12_300], order[20_000:]
    source = rng.integers(0, 6, 12_000)
    flips = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.45])[source]
    training = np.where(rng.random(12_000) < flips, -1, 1) * label[rows[1]]
    name = "census, married, labels flipped more from source to source"
    return made(name, features, label, rows, source, training=training)


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
    features, label = encoded(table, kept)
    wanted, group = split(table)
    people, lower = rng.permutation(np.flatnonzero(wanted)), np.flatnonzero(~wanted)
    rows = people[:300], lower, people[300:]
    return made(f"census, income of {name}", features, label, rows, group[lower])


# ---------------------------------------------------------------------------- images


def images(name, wrong, count, held, shift, rng, **more):
    """Make groups of images, some with labels at random or of the next digit."""
    pixels, label = mnist(MNIST)
    label = label.astype(np.int32)
    order = rng.permutation(len(label))
    rows = order[:held], order[held + 1500 :], order[held : held + 1500]
    source, true = rng.integers(0, count, len(rows[1])), label[rows[1]]
    other = (true + 1) % 10 if shift else rng.integers(0, 10, len(true))
    more |= {"training": np.where(source < wrong, other, true), "classes": 10}
    return made(name, unit(pixels), label, rows, source, **more)


def softmax():
    """T2: ten groups of images, five of them with random labels."""
    rng, clean = np.random.default_rng(0), np.arange(10) >= 5
    return images("T2, softmax", 5, 10, 1000, False, rng, clean=clean)


def of_network():
    """T2 with a network."""
    task = softmax()
    scoring = dpb.applications.ScoringModel(task.loss, np.zeros((197, 10), "f4"))
    more = {"name": "T2, network of 64 units", "model": start(), "linear": False}
    more |= {"step": 0.25, "scoring": scoring, "records": IMAGE}
    return dataclasses.replace(task, **more, **of_classes(network))


def small_digits(rng):
    """1 197 images in four groups, two of them with wrong labels."""
    features, label = datasets.load_digits(return_X_y=True)
    label = label.astype(np.int32)
    order = rng.permutation(len(label))
    rows = order[:200], order[600:], order[200:600]
    source, true = rng.integers(0, 4, len(rows[1])), label[rows[1]]
    other = (true + rng.integers(1, 10, len(true))) % 10
    more = {"training": np.where(source < 2, other, true), "classes": 10}
    name = "digits of 8 x 8 pixels"
    return made(name, unit(features / 16), label, rows, source, **more)


# -------------------------------------------------------------------- other records


def drawn(name, models, sizes, rng, scale=1.0):
    """Draw unit rows with labels by the model of their source, the population's first.

    Args:
        name: The name of the task.
        models: Coefficients, a row for each source.
        sizes: How many training, validation and test records there are.
        rng: Draws sources, then training records, then the others.
        scale: The scale of each feature before rows are cut to norm 1.
    """
    lower, held, test = sizes
    source = rng.integers(0, len(models), lower)
    pairs = []
    for of_record in (source, np.zeros(held + test, int)):
        x = rng.normal(size=(len(of_record), models.shape[1])) * scale
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        margin = 3 * np.sum(x * models[of_record], 1) + rng.logistic(size=len(x))
        pairs.append((x.astype("f4"), np.sign(margin).astype("f4")))
    features, label = map(np.concatenate, zip(*pairs, strict=True))
    training, upper, tested = np.split(np.arange(len(label)), [lower, lower + held])
    return made(name, features, label, (upper, training, tested), source)


def generated(seed=0):
    """Five sources of generated records, two of them of other models."""
    rng = np.random.default_rng(seed)
    models = rng.normal(size=(5, 20))
    models[1:3] = models[0] + 0.3 * rng.normal(size=(2, 20))
    models[3:] = -models[0] + rng.normal(size=(2, 20))
    return drawn("generated", models, (20_000, 300, 20_000), rng)


def wide(rng):
    """100 features of decaying scale, three sources shifted and two opposite."""
    model = rng.normal(size=100)
    models = [model] * 5 + [model + 0.7 * rng.normal(size=100) for _ in range(3)]
    models, scale = np.stack([*models, -model, -model]), np.arange(1, 101) ** -0.5
    return drawn("generated, 100 features", models, (8000, 500, 10_000), rng, scale)


def cancer(rng):
    """339 records of breast cancer in three groups, one with opposite labels."""
    table, label = datasets.load_breast_cancer(return_X_y=True)
    label = (2 * label - 1).astype("f4")
    columns = np.clip((table - table.mean(0)) / table.std(0), -3, 3) / 3
    order = rng.permutation(len(label))
    rows = order[:80], order[230:], order[80:230]
    source = rng.integers(0, 3, len(rows[1]))
    opposite = np.where(source == 0, -1, 1) * label[rows[1]]
    return made("breast cancer", unit(columns), label, rows, source, training=opposite)


# --------------------------------------------------------------------------- the lists

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
    """Tell if the file that a task of `TASKS` needs is there."""
    return name[:2] not in NEEDS or NEEDS[name[:2]].is_file()


def held_out():
    """Return maker, seed and epsilon of tasks that chose no rule, by name."""
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
            maker = functools.partial(grouped, name, split)
            found[f"census, income of {name}"] = maker, 2, 1.0
    if MNIST.is_file():
        for wrong, words, *kind in (
            (3, "of 6 sources of the next digit", 6, 500, True),
            (2, "of 10 sources at random", 10, 1000, False),
        ):
            name = f"MNIST, labels of {wrong}"
            maker = functools.partial(images, f"{name} {words}", wrong, *kind)
            found[name] = maker, 3, 1.0
    return found
