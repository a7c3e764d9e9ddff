"""Worth of tuning private training: `python -m benchmarks tuned_training`.

Writes tables into results/tuned_training.md if census and digits are there.
"""

import jax
import jax.numpy as jnp

import dpbilevel as dpb
from examples import tuned_training as example

from . import pages
from .source_tasks import linear, mnist, of_classes

KEYS = 10
LOGISTIC = dpb.logistic_loss, example.error
SOFTMAX = of_classes(linear)


def softmax_loss(model, record):
    return SOFTMAX["loss"](model, record | {"label": record["label"].astype(int)})


def softmax_error(model, record):
    return 1.0 - SOFTMAX["correct"](model, record)


def main():
    tasks = {
        "generated, one label in two is 1": example.generated(20_000, offset=0.0),
        "generated, one label in nine is 1": example.generated(20_000, offset=4.0),
        "generated, one label in four is 1": example.generated(20_000),
    }
    if pages.ADULT.is_file():
        tasks["census"] = example.census(pages.ADULT)
    if pages.MNIST.is_file():
        tasks["digits"] = mnist(pages.MNIST)
    keys = jax.random.split(jax.random.key(0), KEYS)
    tables = []
    for name, records in tasks.items():
        data, test = example.split(*records, (2000, 6000))
        width, functions = data.lower["features"].shape[1], LOGISTIC
        start = jnp.zeros(width)
        if name == "digits":
            functions, start = (softmax_loss, softmax_error), jnp.zeros((width, 10))
        found = example.compare(data, test, *functions, start, keys)
        tables.append(
            pages.by_median(name, found, "test error", higher_is_better=False)
        )
        print(tables[-1], flush=True)
    if pages.ADULT.is_file() and pages.MNIST.is_file():
        pages.write(pages.RESULTS / "tuned_training.md", tables)
