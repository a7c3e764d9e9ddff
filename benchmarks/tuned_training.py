"""Worth of tuning private training: `python -m benchmarks tuned_training`.

Methods of examples/tuned_training.py at epsilon 1 for everybody, training and
validation people alike, 10 keys, error of the released model on test records. Prints
tables and writes them into docs/tuned_training.md where census and digits are there:
$ADULT or ../shared/data/adult.csv, $MNIST or ../shared/data/mnist_10k.npz.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb
from examples import tuned_training as example

from .paths import ADULT, ROOT
from .quartiles import table
from .utility import MNIST, write

PAGE = ROOT / "docs/tuned_training.md"
KEYS = 10


def digits():
    """Raw pixels of 14 x 14 images, not scaled, and ten labels."""
    with np.load(MNIST) as stored:
        images, label = stored["images"].astype("f4") / 255, stored["labels"]
    pixels = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(len(images), -1)
    return pixels, label


def softmax_loss(model, record):
    """Return the scores of a linear model with a column for each label."""
    label = record["label"].astype(int)
    return optax.softmax_cross_entropy_with_integer_labels(
        record["features"] @ model, label
    )


def softmax_error(model, record):
    """1 where another label has the largest score."""
    found = jnp.argmax(record["features"] @ model)
    return jnp.where(found == record["label"], 0.0, 1.0)


def main():
    logistic = dpb.logistic_loss, example.error
    tasks = {
        "generated, one label in two is 1": (
            example.generated(20_000, offset=0.0),
            logistic,
        ),
        "generated, one label in nine is 1": (
            example.generated(20_000, offset=4.0),
            logistic,
        ),
        "generated, one label in four is 1": (example.generated(20_000), logistic),
    }
    if ADULT.is_file():
        tasks["census"] = example.census(ADULT), logistic
    if MNIST.is_file():
        tasks["digits"] = digits(), (softmax_loss, softmax_error)
    keys = jax.random.split(jax.random.key(0), KEYS)
    tables = []
    for name, (records, functions) in tasks.items():
        data, test = example.split(*records, (2000, 6000))
        start = jnp.zeros(data.lower["features"].shape[1])
        if name == "digits":
            start = jnp.zeros((len(start), 10))
        found = example.compare(data, test, *functions, start, keys)
        tables.append(table(name, found, "test error", higher_is_better=False))
        print(tables[-1], flush=True)
    if ADULT.is_file() and MNIST.is_file():
        write(PAGE, tables)
