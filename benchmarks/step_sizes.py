"""Networks trained with a step size that is found, tuned by hand, or badly chosen.

`--task=mlp` or `--task=cnn` runs one network, `--epsilon=1,3,8` some budgets, and
`--saved=FILE` keeps accuracies and goes on from them. The hand-tuned settings are
chosen by test accuracy, which is NON-PRIVATE: first by one key, then two by five.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.onelevel import AdaptiveGD, CorrelatedGD
from dpbilevel.privacy import SinglePass, square_root_feedback

from . import pages, workloads

TRAIN, BATCH, STEPS, DELTA = 8_000, 256, 150, 1e-5
SEEDS, FEWER = 5, 3  # keys of the rows to compare, and of the others
LENGTHS, CLIP_NORMS = (0.4, 0.8, 1.6, 3.2, 6.4, 12.8), (1.0, 4.0)
STARTS = {"default": 0.5, "100 times shorter": 0.005, "100 times longer": 50.0}
STRIDES = (3, 2)  # of the two convolutions


@functools.cache
def images(*, shuffled_rows=False):
    """Return training and test images and labels, as rows of pixels if asked."""
    pixels, labels = pages.mnist()
    if shuffled_rows:
        order = np.random.default_rng(0).permutation(len(labels))
        pixels, labels = pixels[order].reshape(-1, 784), labels[order]
    return (pixels[:TRAIN], labels[:TRAIN]), (pixels[TRAIN:], labels[TRAIN:])


def start(name, seed):
    rng = np.random.default_rng(seed)

    def layer(*shape, fan, gain=2.0):
        weights = rng.normal(size=shape) * np.sqrt(gain / fan)
        return jnp.asarray(weights, jnp.float32), jnp.zeros(shape[-1], jnp.float32)

    if name == "mlp":
        return layer(784, 256, fan=784), layer(256, 10, fan=256, gain=1.0)
    if name == "small":
        return layer(784, 64, fan=784, gain=1.0), layer(64, 10, fan=64, gain=1.0)
    first, second = layer(5, 5, 1, 8, fan=25), layer(4, 4, 8, 16, fan=128)
    return first, second, layer(144, 10, fan=144, gain=1.0)


def scores(weights, image):
    if len(weights) == 2:
        return workloads.dense_scores(weights, jnp.ravel(image))
    return workloads.convolved_scores(weights, image[..., None], STRIDES, "VALID")


def loss(weights, record):
    return workloads.cross_entropy(scores(weights, record[0]), record[1])


@functools.partial(jax.jit, static_argnums=0)
def accuracy(scores, weights, test):
    image, label = test
    found = jax.vmap(scores, (None, 0))(weights, image)
    return jnp.mean(jnp.argmax(found, 1) == label)


PROBLEM = dpb.FiniteSum(loss)
SAMPLING = {
    "sampling": dpb.Poisson(BATCH / TRAIN),
    "neighbours": dpb.Neighbours.ADD_OR_REMOVE_ONE,
}
solve = jax.jit(dpb.solve)


def calibrated(problem, solver, epsilon, **options):
    budget = dpb.PrivacyBudget(epsilon, DELTA)
    return dpb.calibrate(problem, solver, budget, sizes=TRAIN, **options).solver


@functools.cache
def planned(kind, epsilon):
    settings = () if kind is AdaptiveGD else (1.0, 0.1)
    solver = kind(STEPS, *settings, **SAMPLING)
    return calibrated(PROBLEM, solver, epsilon, precision="float")


def trained(name, epsilon, setting, seed):
    kind, length, norm = setting
    if kind == "adaptive":
        plan, rule = planned(AdaptiveGD, epsilon), "first_step"
    else:
        plan, rule, length = planned(dpb.NoisyGD, epsilon), "step_size", length / norm
    # Numbers are leaves: one program serves all settings of a network.
    where = [(rule, length), ("clip_norm", norm)]
    fields = {k: jnp.asarray(v, jnp.float32) for k, v in where}
    solver = dataclasses.replace(plan, **fields)
    key = jax.random.key(seed)
    answer = solve(PROBLEM, solver, images()[0], start(name, seed), key=key)
    return float(accuracy(scores, answer.value, images()[1]))


@functools.cache
def one(*run):
    return pages.once(pages.saved(), repr(run), lambda: trained(*run))


def runs(name, epsilon, setting, seeds):
    return [one(name, epsilon, setting, seed) for seed in range(seeds)]


def tuned(name, epsilon):
    grid = [("plain", v, c) for c in CLIP_NORMS for v in LENGTHS]
    grid.sort(key=lambda s: -np.mean(runs(name, epsilon, s, 1)))
    full = {s: runs(name, epsilon, s, SEEDS) for s in grid[:2]}
    return max(full.items(), key=lambda item: np.median(item[1]))


def rows(name, epsilon):
    found = {}
    (_, length, norm), best = tuned(name, epsilon)
    found[f"`NoisyGD`, tuned: length {length:g}, clip norm {norm:g}"] = best
    for text, length in STARTS.items():
        setting = ("adaptive", length, 1.0)
        seeds = SEEDS if text == "default" else FEWER
        found[f"`AdaptiveGD`, {text}"] = runs(name, epsilon, setting, seeds)
    setting = ("plain", STARTS["default"], 1.0)
    same = "`NoisyGD`, length and clip norm of the default"
    found[same] = runs(name, epsilon, setting, FEWER)
    return [[f"{epsilon:g}", k, pages.spread(v)] for k, v in found.items()]


def main():
    head = ["epsilon", "method", "accuracy [quartiles]"]
    for name in pages.chosen(["mlp", "cnn"]):
        body = [r for e in pages.budgets("1,3,8") for r in rows(name, e)]
        print(pages.table(head, body, name), flush=True)


ROWS, STEP_SIZES = 500, (0.5, 1.0, 2.0)
PASSES = 10 * TRAIN // ROWS  # steps of ten passes


def small_scores(weights, row):
    return workloads.dense_scores(weights, row, jnp.tanh)


def small_loss(weights, record):
    return workloads.cross_entropy(small_scores(weights, record[0]), record[1])


def correlated():
    def passes(*feedback):
        sampling = SinglePass(ROWS)
        return CorrelatedGD(PASSES, 1.0, 1.0, feedback, sampling=sampling)

    sampled = dpb.NoisyGD(PASSES, 1.0, 1.0, sampling=dpb.Poisson(ROWS / TRAIN))
    return {
        "passes, independent noise": passes(0.0),
        "passes, lambda = 0.5": passes(0.5),
        "passes, lambda = 0.9": passes(0.9),
        "passes, 4 bands": passes(*square_root_feedback(4)),
        "Poisson batches, independent noise": sampled,
    }


SMALL_PROBLEM = dpb.FiniteSum(small_loss)


def best_accuracies(train):
    """Return accuracies at the best step size; `train` takes a step size and a seed."""
    found, test = [], images(shuffled_rows=True)[1]
    for size in STEP_SIZES:
        trained = [train(size, seed) for seed in range(FEWER)]
        found.append([float(accuracy(small_scores, w, test)) for w in trained])
        print(f"  step size {size:g}: {pages.spread(found[-1], '.3f', (0, 1))}")
    return pages.spread(pages.best_of(found, higher_is_better=True), ".3f", (0, 1))


def trained_small(solver, epsilon):
    solver = calibrated(SMALL_PROBLEM, solver, epsilon)
    training, weights = images(shuffled_rows=True)[0], start("small", 1)

    def train(size, seed):
        sized = dataclasses.replace(solver, step_size=size)
        key = jax.random.key(seed)
        return solve(SMALL_PROBLEM, sized, training, weights, key=key).value

    return train


def correlated_noise():
    """Test accuracy of a network with correlated and with independent noise.

    A network 784-64-10 learns 8 000 images of MNIST, in about as many passes by all
    methods; each is shown at the best of its step sizes, in hindsight.
    """
    made, epsilons, rows = correlated(), pages.budgets("1,3,8"), []
    for name in pages.chosen(made):
        found = (best_accuracies(trained_small(made[name], e)) for e in epsilons)
        rows.append([name, *found])
        print(*rows[-1], flush=True)
    table = pages.table(["method", *(f"epsilon {e:g}" for e in epsilons)], rows)
    print(table)
    if len(rows) == len(made):
        pages.write(pages.RESULTS / "correlated_noise.md", [table])
