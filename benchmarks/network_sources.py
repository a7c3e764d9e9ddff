"""Sources for a network: images of digits, six sources, some of them wrong.

The network has frozen convolutions with random weights and a last layer that is
trained. Three tasks differ in what is wrong with three of the six sources: labels of
other digits, rotated images, or noise instead of images. Prints the tables of
benchmarks/results/networks.md. Without the file of images nothing is measured.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb
from dpbilevel.applications import MixedSources, SelectedSources
from dpbilevel.bilevel import OneLevel
from dpbilevel.core.outputs import TailMean

from . import pages

SOURCES, UPPER, LOWER, KEYS = 6, 400, 6000, 2
EPSILONS = 1.0, 3.0
WIDTH = 16


def features(images):
    """Frozen convolutions: random patches of 7 x 7, stride 3, and pooling."""
    filters = jax.random.normal(jax.random.key(0), (WIDTH, 1, 7, 7)) / 7
    rows = jax.lax.conv(images[:, None], filters, (3, 3), "VALID")
    rows = jax.lax.reduce_window(
        jax.nn.relu(rows), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
    )
    rows = rows.reshape(len(rows), -1)
    rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    return jnp.concatenate([rows, jnp.full((len(rows), 1), 0.3)], 1)


def task(kind, rng):
    """Return training and test records; half of the sources are wrong."""
    with np.load(pages.MNIST) as file:
        images, labels = (
            file["images"] / np.float32(255),
            file["labels"].astype("int32"),
        )
    order = rng.permutation(len(images))
    images, labels = images[order], labels[order]
    source = rng.integers(0, SOURCES, LOWER).astype("int32")
    wrong = np.append(np.zeros(UPPER, bool), source >= SOURCES // 2)
    wrong = np.append(wrong, np.zeros(len(images) - len(wrong), bool))
    images, labels = images.copy(), labels.copy()
    if kind == "labels":
        labels[wrong] = (labels[wrong] + 1) % 10
    elif kind == "rotated":
        images[wrong] = np.rot90(images[wrong], axes=(1, 2))
    else:
        images[wrong] = rng.random(images[wrong].shape, np.float32)
    rows = features(jnp.asarray(images))
    records = {"features": rows, "label": jnp.asarray(labels)}
    upper, lower, test = (
        jax.tree.map(lambda v, a=a, b=b: v[a:b], records)
        for a, b in ((0, UPPER), (UPPER, UPPER + LOWER), (UPPER + LOWER, None))
    )
    return dpb.Levels(upper, lower | {"source": jnp.asarray(source)}), test


def loss(y, record):
    scores = record["features"] @ y
    label = record["label"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, label)


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


def main():
    if not pages.MNIST.is_file():
        print(f"network_sources: no file {pages.MNIST}; skipped.")
        return
    problem = dpb.source_weighting(loss, SOURCES)
    solve = jax.jit(lambda *run, key: dpb.solve(*run, key=key).value[1])
    print("| wrong sources | epsilon | method | accuracy | gap closed |")
    print("|---|---|---|---|---|")
    for kind in ("labels", "rotated", "noise"):
        data, test = task(kind, np.random.default_rng(0))
        w0 = jnp.zeros(SOURCES), jnp.zeros((data.upper["features"].shape[1], 10))
        good = np.flatnonzero(np.asarray(data.lower["source"]) < SOURCES // 2)
        clean = dpb.Levels(data.upper, jax.tree.map(lambda v, g=good: v[g], data.lower))
        for epsilon in EPSILONS:
            budget, found = dpb.PrivacyBudget(epsilon, 1e-5), {}
            for name, solver in methods().items():
                records = clean if name == "oracle" else data
                sizes = dpb.Sizes(UPPER, len(records.lower["label"]), "disjoint")
                plan = dpb.calibrate(
                    problem, solver, budget, sizes=sizes, precision="float"
                )
                run = problem, plan.solver, records, w0
                keys = jax.random.split(jax.random.key(1), KEYS)
                answers = [solve(*run, key=key) for key in keys]
                right = [
                    jnp.mean(jnp.argmax(test["features"] @ y, 1) == test["label"])
                    for y in answers
                ]
                found[name] = float(np.median(right))
            pooled, oracle = found["one level, all records"], found["oracle"]
            for name, value in found.items():
                closed = (value - pooled) / (oracle - pooled)
                row = kind, f"{epsilon:g}", name, f"{value:.3f}", f"{closed:.2f}"
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
