"""Losses of one record, with parameters and records, that gradients are timed on."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """A loss of one record at some parameters, and its records."""

    name: str  # for the tables
    loss: Callable[[Any, Any], Any]  # of parameters and a record
    parameters: Any  # float32
    records: Any  # inputs and targets, leading axis n
    layers: tuple[int, ...] | str | None = None  # widths of dense layers, or a name

    @property
    def size(self):
        """The number of records."""
        return len(self.records[1])

    @property
    def dimension(self):
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.parameters))

    @property
    def formed(self):
        """Bytes of the gradients of all records, if they are formed."""
        return 4 * self.size * self.dimension

    @property
    def read(self):
        """Bytes that one look at all records and parameters reads."""
        return sum(v.nbytes for v in jax.tree.leaves((self.parameters, self.records)))


def named(text):
    name, *sizes = text.split()
    return globals()[name](*map(int, sizes))


def normal(key, *shape):
    return jax.random.normal(jax.random.key(key), shape)


def classes(n):
    return jax.random.randint(jax.random.key(1), (n,), 0, CLASSES)


def logistic_loss(w, record):
    features, label = record
    return jnp.logaddexp(0, -label * (features @ w))


def logistic(n, d):
    records = normal(6, n, d) / d**0.5, jnp.sign(normal(7, n))
    name = f"logistic, n = {n}, d = {d}"
    return Workload(name, logistic_loss, 0.1 * normal(8, d), records)


def cross_entropy(logits, label):
    return -jax.nn.log_softmax(logits)[label]


def dense_scores(layers, value, activation=jax.nn.relu):
    *layers, (weights, bias) = layers
    for inner, shift in layers:
        value = activation(value @ inner + shift)
    return value @ weights + bias


def mlp_loss(layers, record):
    return cross_entropy(dense_scores(layers, record[0]), record[1])


def mlp(n, *widths):
    layers = [
        (normal(number, into, out) / into**0.5, jnp.zeros(out))
        for number, (into, out) in enumerate(itertools.pairwise(widths))
    ]
    name = f"MLP {'-'.join(map(str, widths))}, batch {n}"
    records = normal(5, n, widths[0]), classes(n)
    return Workload(name, mlp_loss, layers, records, widths)


def convolved_by(images, kernel, padding, stride=2):
    names = "NHWC", "HWIO", "NHWC"
    return jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), padding, dimension_numbers=names
    )


def convolved_scores(layers, image, strides=(2, 2), padding="SAME"):
    *layers, (weights, bias) = layers
    value = image[None]
    for (kernel, shift), stride in zip(layers, strides, strict=True):
        value = jax.nn.relu(convolved_by(value, kernel, padding, stride) + shift)
    return value.reshape(-1) @ weights + bias


def cnn_loss(layers, record):
    return cross_entropy(convolved_scores(layers, record[0]), record[1])


def cnn(n):
    shapes = (3, 3, 1, 16), (3, 3, 16, 32), (7 * 7 * 32, CLASSES)
    layers = [
        (normal(k, *shape) / np.prod(shape[:-1]) ** 0.5, jnp.zeros(shape[-1]))
        for k, shape in enumerate(shapes)
    ]
    records = normal(5, n, 28, 28, 1), classes(n)
    name = f"CNN 3x3x16, 3x3x32, dense, batch {n}"
    return Workload(name, cnn_loss, layers, records, "cnn")


# The network of tutorials: two convolutions, each with a pooling, and two dense layers.
CLASSIC = (8, 8, 1, 16), (4, 4, 16, 32), (512, 32), (32, CLASSES)


def classic_scores(weights, image):
    *layers, first, shift, last, bias = weights
    windows, value = ((1, 2, 2, 1), (1, 1, 1, 1), "VALID"), image[None, :, :, None]
    for kernel, moved, pad in ((*layers[:2], 3), (*layers[2:], 0)):
        value = jax.nn.relu(convolved_by(value, kernel, [(pad, pad)] * 2) + moved)
        value = jax.lax.reduce_window(value, -jnp.inf, jax.lax.max, *windows)
    return jax.nn.relu(value.ravel() @ first + shift) @ last + bias


def classic_loss(weights, record):
    return cross_entropy(classic_scores(weights, record[0]), record[1])


def classic(n):
    kernels = [normal(k, *v) / np.prod(v[:-1]) ** 0.5 for k, v in enumerate(CLASSIC)]
    layers = [v for kernel in kernels for v in (kernel, jnp.zeros(kernel.shape[-1]))]
    name, records = f"classic CNN, batch {n}", (normal(5, n, 28, 28), classes(n))
    return Workload(name, classic_loss, layers, records, "classic")


def attention_loss(p, record):
    tokens, label = record
    length, width, heads = len(tokens), p["out"].shape[0], 4
    x = p["embedding"][tokens]
    y = p["scale"] * standardized(x)
    queries, keys, values = (
        (y @ p[name]).reshape(length, heads, width // heads)
        for name in ("queries", "keys", "values")
    )
    scores = jnp.einsum("thd,shd->hts", queries, keys) / (width // heads) ** 0.5
    found = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), values)
    x = x + found.reshape(length, width) @ p["out"]
    x = x + jax.nn.gelu(standardized(x) @ p["up"]) @ p["down"]
    return cross_entropy(x.mean(0) @ p["head"], label)


def standardized(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(n, vocabulary=1000, width=128, length=32):
    shapes = {"embedding": (vocabulary, width)}
    shapes |= dict.fromkeys(("queries", "keys", "values", "out"), (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    shapes["head"] = width, CLASSES
    parameters = {
        name: normal(number, *shape) / width**0.5
        for number, (name, shape) in enumerate(shapes.items())
    }
    parameters["scale"] = jnp.ones(width)
    tokens = jax.random.randint(jax.random.key(2), (n, length), 0, vocabulary)
    name = f"attention block, width {width}, {length} tokens, batch {n}"
    return Workload(name, attention_loss, parameters, (tokens, classes(n)))
