"""Worth of meta-learning person by person: `python -m benchmarks meta_learning`.

Baselines have the best of their settings ON THE TEST PEOPLE, meta-learning one that was
found on training people. Writes results/meta_learning.md if the digits are there.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

import dpbilevel as dpb
from examples import meta_learning as example
from examples import tuned_training as tuning

from . import pages
from .source_tasks import linear, mnist, of_classes

KEYS = 10
RIDGES, CLIPS = (0.003, 0.01, 0.03), (0.1, 0.15)
SETTINGS = {
    "new person from scratch": [example.from_scratch],
    "descent on all people's images": [
        functools.partial(example.pooled, step=step) for step in (0.1, 0.3, 1.0, 3.0)
    ],
    "scatter within classes, whitened": [
        functools.partial(example.whitened, clip=clip, ridge=ridge)
        for clip, ridge in itertools.product(CLIPS, RIDGES)
    ],
    "scatter within and between, projected": [
        functools.partial(example.projected, clip=clip, ridge=ridge, kept=kept)
        for clip, (ridge, kept) in itertools.product(
            (0.15, 0.3), ((0.01, 5), (0.01, 8), (0.03, 16))
        )
    ],
    "meta-learning, one setting": [example.meta_learned],
    "meta-learning without noise (not private)": [
        functools.partial(example.without_noise, steps=steps) for steps in (8, 30)
    ],
}


def evaluate(data, test):
    keys = jax.random.split(jax.random.key(0), KEYS)
    found = {}
    for name, methods in SETTINGS.items():
        runs = [
            [float(example.accuracy(method(data, key), test)) for key in keys]
            for method in methods
        ]
        found[name] = pages.best_of(runs, higher_is_better=True)
        print(f"  {name}: done", flush=True)
    return found


def main():
    tasks = {
        f"generated, {count} training people": example.generated(count + example.TEST)
        for count in (3000, 1000, 400)  # those that a baseline wins first
    }
    if complete := pages.MNIST.is_file():
        data, test = example.digits(pages.MNIST)
        name = f"digits, nobody shares an image: {len(data['label'])} training people"
        tasks[name] = data, test
    settings = {"higher_is_better": True, "complete": complete}
    pages.compare("meta_learning", tasks, evaluate, "accuracy", **settings)


LOGISTIC = dpb.logistic_loss, tuning.error
SOFTMAX = of_classes(linear)


def softmax_loss(model, record):
    return SOFTMAX["loss"](model, record | {"label": record["label"].astype(int)})


def softmax_error(model, record):
    return 1.0 - SOFTMAX["correct"](model, record)


def tuning_errors(features, label, classes=0):
    """Return test errors of all methods; 0 `classes` is logistic regression."""
    data, test = tuning.split(features, label, (2000, 6000))
    width = data.lower["features"].shape[1]
    functions = (softmax_loss, softmax_error) if classes else LOGISTIC
    start = jnp.zeros((width, classes) if classes else width)
    keys = jax.random.split(jax.random.key(0), KEYS)
    return tuning.compare(data, test, *functions, start, keys)


def tuned_training():
    """Worth of tuning private training: `python -m benchmarks tuned_training`.

    Writes tables into results/tuned_training.md if census and digits are there.
    """
    tasks = {
        "generated, one label in two is 1": tuning.generated(20_000, offset=0.0),
        "generated, one label in nine is 1": tuning.generated(20_000, offset=4.0),
        "generated, one label in four is 1": tuning.generated(20_000),
    }
    if pages.ADULT.is_file():
        tasks["census"] = tuning.census(pages.ADULT)
    if pages.MNIST.is_file():
        tasks["digits"] = *mnist(pages.MNIST), 10
    complete = {"census", "digits"} <= set(tasks)
    settings = {"higher_is_better": False, "complete": complete}
    pages.compare("tuned_training", tasks, tuning_errors, "test error", **settings)
