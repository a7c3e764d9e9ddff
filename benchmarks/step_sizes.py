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
import optax

import dpbilevel as dpb
from dpbilevel.onelevel import AdaptiveGD, CorrelatedGD
from dpbilevel.privacy import SinglePass, square_root_feedback

from . import pages

TRAIN, BATCH, STEPS, DELTA = 8_000, 256, 150, 1e-5
SEEDS, FEWER = 5, 3  # keys of the rows to compare, and of the others
LENGTHS, CLIP_NORMS = (0.4, 0.8, 1.6, 3.2, 6.4, 12.8), (1.0, 4.0)
STARTS = {"default": 0.5, "100 times shorter": 0.005, "100 times longer": 50.0}
STRIDES = (3, 2)  # of the two convolutions


@functools.cache
def images():
    pixels, labels = pages.mnist()
    return (pixels[:TRAIN], labels[:TRAIN]), (pixels[TRAIN:], labels[TRAIN:])


def start(name, seed):
    rng = np.random.default_rng(seed)

    def layer(*shape, fan, gain=2.0):
        weights = rng.normal(size=shape) * np.sqrt(gain / fan)
        return jnp.asarray(weights, jnp.float32), jnp.zeros(shape[-1], jnp.float32)

    if name == "mlp":
        return layer(784, 256, fan=784), layer(256, 10, fan=256, gain=1.0)
    first, second = layer(5, 5, 1, 8, fan=25), layer(4, 4, 8, 16, fan=128)
    return first, second, layer(144, 10, fan=144, gain=1.0)


def scores(weights, image):
    *layers, (matrix, shift) = weights
    value = image[None, :, :, None] if len(layers) == 2 else jnp.ravel(image)
    names = ("NHWC", "HWIO", "NHWC")
    for (kernel, bias), stride in zip(layers, STRIDES, strict=False):
        if len(layers) == 2:
            value = jax.lax.conv_general_dilated(
                value, kernel, (stride, stride), "VALID", dimension_numbers=names
            )
        else:
            value = value @ kernel
        value = jax.nn.relu(value + bias)
    return jnp.ravel(value) @ matrix + shift


def loss(weights, record):
    image, label = record
    return -jax.nn.log_softmax(scores(weights, image))[label]


@functools.partial(jax.jit, static_argnums=0)
def accuracy(scores, weights):
    image, label = images()[1]
    found = jax.vmap(scores, (None, 0))(weights, image)
    return jnp.mean(jnp.argmax(found, 1) == label)


PROBLEM = dpb.FiniteSum(loss)
SAMPLING = {
    "sampling": dpb.Poisson(BATCH / TRAIN),
    "neighbours": dpb.Neighbours.ADD_OR_REMOVE_ONE,
}
solve = jax.jit(dpb.solve)


@functools.cache
def planned(kind, epsilon):
    settings = () if kind is AdaptiveGD else (1.0, 0.1)
    solver = kind(STEPS, *settings, **SAMPLING)
    budget = dpb.PrivacyBudget(epsilon, DELTA)
    plan = dpb.calibrate(PROBLEM, solver, budget, sizes=TRAIN, precision="float")
    return plan.solver


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
    return float(accuracy(scores, answer.value))


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


ROWS, HIDDEN, STEP_SIZES = 500, 64, (0.5, 1.0, 2.0)
PASSES = 10 * TRAIN // ROWS  # steps of ten passes


def shuffled_images():
    x, y = pages.mnist()
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].reshape(-1, 784), y[order]
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def logits(w, x):
    first, a, last, b = w
    return jnp.tanh(x @ first + a) @ last + b


def cross_entropy(w, record):
    x, y = record
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, x), y)


def small_network():
    rng = np.random.default_rng(1)
    first = rng.normal(size=(784, HIDDEN)) / 28
    last = rng.normal(size=(HIDDEN, 10)) / 8
    shapes = (first, np.zeros(HIDDEN), last, np.zeros(10))
    return tuple(jnp.asarray(v, jnp.float32) for v in shapes)


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


def best_accuracies(solver, epsilon, training, test):
    problem, budget = dpb.FiniteSum(cross_entropy), dpb.PrivacyBudget(epsilon, DELTA)
    solver, found = dpb.calibrate(problem, solver, budget, sizes=TRAIN).solver, []
    for size in STEP_SIZES:
        sized = dataclasses.replace(solver, step_size=size)
        given, keys = (problem, sized, training, small_network()), range(FEWER)
        answers = [solve(*given, key=jax.random.key(k)).value for k in keys]
        right = [np.argmax(logits(w, test[0]), 1) == test[1] for w in answers]
        found.append(np.mean(right, axis=1))
    return pages.best_of(found, higher_is_better=True)


def correlated_noise():
    """Test accuracy of a network with correlated and with independent noise.

    A network 784-64-10 learns 8 000 images of MNIST, in about as many passes by all
    methods; each is shown at the best of its step sizes, in hindsight.
    """
    training, test = shuffled_images()
    made, epsilons, rows = correlated(), pages.budgets("1,3,8"), []
    for name in pages.chosen(made):
        found = [best_accuracies(made[name], e, training, test) for e in epsilons]
        rows.append([name, *(pages.spread(v, ".3f", (0, 1)) for v in found)])
        print(*rows[-1], flush=True)
    table = pages.table(["method", *(f"epsilon {e:g}" for e in epsilons)], rows)
    print(table)
    if len(rows) == len(made):
        pages.write(pages.RESULTS / "correlated_noise.md", [table])
