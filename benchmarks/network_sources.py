"""Sources for a network: six sources, three of them wrong, and a last layer to train.

Images of digits go through frozen convolutions with random weights. Three tasks differ
in what is wrong: labels of other digits, rotated images, or noise instead of images. A
fourth task has words that ten people rated as good or bad, the pretrained encoder of
wordllama, and wrong labels; it needs the packages wordllama, vaderSentiment, tokenizers
and safetensors, and no network. Prints the tables of benchmarks/results/networks.md,
without the tasks whose files are missing; `--task=words` measures one.
"""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.applications import MixedSources, SelectedSources
from dpbilevel.bilevel import OneLevel
from dpbilevel.core.outputs import TailMean

from . import pages
from .source_tasks import linear, loss_of, parts

SOURCES, UPPER, KEYS = 6, 400, 2
LOWER = {"labels": 6000, "rotated": 6000, "noise": 6000, "words": 5600}
EPSILONS = 1.0, 3.0
WIDTH = 16


def convolved(images):
    """Return frozen convolutions: random patches of 7 x 7, stride 3, and pooling."""
    filters = jax.random.normal(jax.random.key(0), (WIDTH, 1, 7, 7)) / 7
    rows = jax.lax.conv(images[:, None], filters, (3, 3), "VALID")
    rows = jax.lax.reduce_window(
        jax.nn.relu(rows), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
    )
    return with_constant(rows.reshape(len(rows), -1))


def with_constant(rows):
    rows = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return jnp.concatenate([rows, jnp.full((len(rows), 1), 0.3)], 1)


def images(kind, wrong, rng):
    """Return the features and the labels of images, in random order."""
    pixels, labels = pages.mnist()
    order = rng.permutation(len(pixels))
    pixels, labels = pixels[order], labels[order]
    wrong = np.pad(wrong, (0, len(pixels) - len(wrong)))
    if kind == "labels":
        labels[wrong] = (labels[wrong] + 1) % 10
    elif kind == "rotated":
        pixels[wrong] = np.rot90(pixels[wrong], axes=(1, 2))
    else:
        pixels[wrong] = rng.random(pixels[wrong].shape, np.float32)
    return convolved(jnp.asarray(pixels)), labels


def words(wrong, rng):
    """Return the encoded words and their ratings' signs, in random order."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    model, rated = (
        pathlib.Path(importlib.util.find_spec(name).origin).parent
        for name in ("wordllama", "vaderSentiment")
    )
    tokens = model / "tokenizers/l2_supercat_tokenizer_config.json"
    vectors = load_file(model / "weights/l2_supercat_256.safetensors")
    vectors = vectors["embedding.weight"].astype("float32")
    lines = (rated / "vader_lexicon.txt").read_text(encoding="utf8").splitlines()
    cells = [line.split("\t") for line in lines if line.strip()]
    cells = [cells[i] for i in rng.permutation(len(cells))]
    encoded = Tokenizer.from_file(str(tokens)).encode_batch(
        [word for word, *_ in cells], add_special_tokens=False
    )
    rows = np.stack([vectors[word.ids].mean(0) for word in encoded])
    labels = np.asarray([float(rating) > 0 for _, rating, *_ in cells])
    labels[: len(wrong)] ^= wrong
    return with_constant(jnp.asarray(rows)), labels.astype("int32")


def task(kind, rng):
    """Return training and test records; half of the sources are wrong."""
    last = UPPER + LOWER[kind]
    source = rng.integers(0, SOURCES, LOWER[kind]).astype("int32")
    wrong = np.append(np.zeros(UPPER, bool), source >= SOURCES // 2)
    found = words(wrong, rng) if kind == "words" else images(kind, wrong, rng)
    rows = slice(UPPER), slice(UPPER, last), slice(last, None)
    upper, lower, test = parts(*found, rows)
    return dpb.Levels(upper, lower | {"source": jnp.asarray(source)}), test


def is_there(kind):
    if kind != "words":
        return pages.MNIST.is_file()
    return all(map(importlib.util.find_spec, ("wordllama", "vaderSentiment")))


def fit(steps, size, clip=0.7):
    return dpb.NoisyGD(steps, clip, size, output=TailMean())


def methods():
    first, last = fit(10, 2.0, 0.5), fit(100, 16.0)
    models, mixture = fit(50, 20.0, 0.8), fit(10, 24.0, 0.2)
    return {
        "validation records only": OneLevel(fit(30, 4.0)),
        "one level, all records": OneLevel(last, reads="both"),
        "two stages (SelectedSources)": SelectedSources(fit(10, 8.0), last),
        "two stages, short first steps": SelectedSources(first, last),
        "mixture (MixedSources)": MixedSources(models, mixture, last, mixture),
        "oracle": OneLevel(last, reads="lower"),
    }


def accuracy(problem, solver, records, w0, test):
    """Return the median test accuracy of the released model over keys."""
    solve = jax.jit(lambda *run, key: dpb.solve(problem, *run, key=key).value[1])
    answers = [
        solve(solver, records, w0, key=key)
        for key in jax.random.split(jax.random.key(1), KEYS)
    ]
    right = [jnp.argmax(test["features"] @ y, 1) == test["label"] for y in answers]
    return float(np.median([jnp.mean(v) for v in right]))


def main():
    problem = dpb.source_weighting(loss_of(linear), SOURCES)
    print("| task | epsilon | method | accuracy | gap closed |")
    print("|---|---|---|---|---|")
    plans = {}  # they depend on sizes alone
    for kind in filter(is_there, pages.chosen(LOWER)):
        data, test = task(kind, np.random.default_rng(0))
        classes = 2 if kind == "words" else 10
        w0 = jnp.zeros(SOURCES), jnp.zeros((test["features"].shape[1], classes))
        good = np.flatnonzero(np.asarray(data.lower["source"]) < SOURCES // 2)
        clean = dpb.Levels(data.upper, jax.tree.map(lambda v, g=good: v[g], data.lower))
        for epsilon in EPSILONS:
            budget, found = dpb.PrivacyBudget(epsilon, 1e-5), {}
            for name, solver in methods().items():
                records = clean if name == "oracle" else data
                sizes = problem.sizes_of(records, "disjoint")
                options = {"sizes": sizes, "precision": "float"}
                plan = dpb.calibrate(problem, solver, budget, **options)
                found[name] = accuracy(problem, plan.solver, records, w0, test)
            if (classes, epsilon) not in plans:
                sizes = problem.sizes_of(data, "disjoint")
                options = {"sizes": sizes, "w0": w0, "clip_norm": 1.5}
                plans[classes, epsilon] = dpb.auto(problem, budget, **options)
            plan = plans[classes, epsilon]
            chosen = f"`auto`: {type(plan.solver).__name__}"
            found[chosen] = accuracy(problem, plan.solver, data, w0, test)
            pooled, oracle = found["one level, all records"], found["oracle"]
            for name, value in found.items():
                closed = (value - pooled) / (oracle - pooled)
                row = kind, f"{epsilon:g}", name, f"{value:.3f}", f"{closed:.2f}"
                print(f"| {' | '.join(row)} |", flush=True)
