"""Find the groups of records whose labels can be trusted, and fit a network on them.

Ten groups supply 7 500 images of digits; in five of them labels are random. 1 000 clean
images are at hand, too few for a private network. Every method gets the same guarantee;
the table and the figure show the accuracy of the RELEASED network of 64 units on test
images that nobody trained on.

Images are MNIST's (--mnist NPZ, 28 x 28 `images` and `labels`) at 14 x 14 pixels, or
generated ones of the same shape. `--out` is a new folder for the figure.

The oracle, which knows the clean groups, and the accuracies are NON-PRIVATE.

    python examples/data_cleaning.py [--epsilon 3] [--mnist NPZ] [--out DIR] [--smoke]
"""

import argparse
import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb

GROUPS, PIXELS, UNITS, CLASSES = 10, 196, 64, 10
RANDOM = 5  # the groups whose labels are random come first
TAIL = dpb.outputs.TailMean()


def mnist(file):
    """Images of 14 x 14 means of pixels, and their labels."""
    with np.load(file) as arrays:
        images, label = arrays["images"], arrays["labels"]
    small = images.reshape(-1, 14, 2, 14, 2).mean((2, 4))
    return small.reshape(-1, PIXELS) / 255.0, label


def generated(num_records):
    """Images of two prototypes for each class, with noise."""
    rng = np.random.default_rng(0)
    prototypes = np.maximum(rng.normal(size=(2 * CLASSES, PIXELS)), 0)
    kind = rng.integers(0, 2 * CLASSES, num_records)
    noise = 0.8 * rng.normal(size=(num_records, PIXELS))
    return np.maximum(prototypes[kind] + noise, 0), kind % CLASSES


def records(images, label):
    """Return a tenth as clean records, 15 % for the test, the rest in ten groups."""
    rng = np.random.default_rng(0)
    features = np.concatenate([images, np.ones((len(images), 1))], 1)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    rows = rng.permutation(len(label))
    parts = np.split(rows, [len(rows) // 10, len(rows) // 4])
    clean, test, training = (
        {"features": features[i].astype("f4"), "label": label[i].astype("i4")}
        for i in parts
    )
    group = rng.integers(0, GROUPS, len(training["label"])).astype("i4")
    drawn = rng.integers(0, CLASSES, len(group)).astype("i4")
    training["source"] = group
    training["label"] = np.where(group < RANDOM, drawn, training["label"])
    return jax.tree.map(jnp.asarray, (dpb.Levels(clean, training), test))


def linear(y, features):
    """Return the scores of a softmax regression."""
    return features @ y


def network(y, features):
    """Return the scores of the network that is released."""
    return jax.nn.tanh(features @ y["w1"] + y["b1"]) @ y["w2"] + y["b2"]


def loss_of(scores):
    """Return the cross-entropy of one record."""

    def loss(y, record):
        return optax.softmax_cross_entropy_with_integer_labels(
            scores(y, record["features"]), record["label"]
        )

    return loss


def start():
    """Return a public start of the network."""
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": 2.0 * jax.random.normal(first, (PIXELS + 1, UNITS)),
        "b1": jnp.zeros(UNITS),
        "w2": jax.random.normal(second, (UNITS, CLASSES)) / UNITS**0.5,
        "b2": jnp.zeros(CLASSES),
    }


def descent(num_steps, step_size):
    """Noisy descent on gradients of norm 1, averaged over its second half."""
    return dpb.NoisyGD(num_steps, 1.0, step_size, output=TAIL)


def methods(steps):
    """Solvers by name."""
    one, fit = dpb.bilevel.OneLevel, descent(steps, 2.0)
    scoring = dpb.applications.ScoringModel(
        loss_of(linear), jnp.zeros((PIXELS + 1, CLASSES))
    )
    penalty = dpb.PenaltyBilevel(
        20, 10.0, dpb.NoisyGD(10, 1.0, 0.25), 1.0, upper_clip_norm=0.5, step_size=20.0
    )
    return {
        "clean records alone": one(descent(30, 0.25)),
        "all records": one(fit, reads="both"),
        "two levels (PenaltyBilevel, refitted)": dpb.Refitted(
            penalty, fit, budget_split=(0.5, 0.5)
        ),
        "two stages (SelectedSources)": dpb.applications.SelectedSources(
            descent(10, 0.3),
            fit,
            budget_split=(0.03, 0.02, 0.95),
            fit_reads="both",
            scoring=scoring,
        ),
    }


def oracle(data):
    """Return the clean records and those of the clean groups as one problem."""
    known = data.lower["source"] >= RANDOM
    pooled = {
        name: jnp.concatenate([data.upper[name], data.lower[name][known]])
        for name in data.upper
    }
    return dpb.FiniteSum(loss_of(network)), pooled


def accuracy(y, test):
    """Return the share of test images with the right label."""
    found = jnp.argmax(network(y, test["features"]), 1)
    return float(jnp.mean(found == test["label"]))


def compare(data, test, budget, steps, num_keys):
    """Accuracies by method, one for each key."""
    problem = dpb.source_weighting(loss_of(network), GROUPS, ridge=1e-5)
    sizes = problem.sizes_of(data, "disjoint")
    w0 = jnp.zeros(GROUPS), start()
    run = jax.jit(dpb.solve)
    keys = jax.random.split(dpb.root_key(), num_keys)  # as many runs, as many budgets
    found = {}
    for name, solver in methods(steps).items():
        plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)
        found[name] = [
            accuracy(run(problem, plan.solver, data, w0, key=key).y, test)
            for key in keys
        ]
        print(f"{name}: {np.median(found[name]):.3f}", flush=True)
    print(f"\n{plan.report}\n")  # of the last method
    one, pooled = oracle(data)
    count = len(pooled["label"])
    plan = dpb.calibrate(one, descent(steps, 2.0), budget, sizes=count)
    found["oracle, given the clean groups"] = [
        accuracy(run(one, plan.solver, pooled, w0[1], key=key).value, test)
        for key in keys
    ]
    return found


def show(found):
    """Print a table."""
    width = max(map(len, found))
    print(f"{'method':{width}}  accuracy of the released network")
    for name, values in found.items():
        low, middle, high = np.min(values), np.median(values), np.max(values)
        print(f"{name:{width}}  {middle:.3f}  ({low:.3f} to {high:.3f})")


def draw(found, epsilon, out):
    """Save a figure in a new folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    medians = [np.median(values) for values in found.values()]
    colors = ["#9aa5b1"] * (len(found) - 2) + ["#1f77b4", "#d9b44a"]
    places = np.arange(len(found))[::-1]
    axes.barh(places, medians, color=colors)
    for place, values in zip(places, found.values(), strict=True):
        axes.plot(values, [place] * len(values), ".", color="black", markersize=4)
    axes.set_yticks(places, list(found))
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"accuracy on test images, epsilon = {epsilon:g}")
    out.mkdir(parents=True)
    figure.savefig(out / "figure.png", dpi=150)
    print(f"Figure: {out / 'figure.png'}")


def main() -> None:
    """Run all methods and compare what they release."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--epsilon", type=float, default=3.0, help="of every method")
    parser.add_argument("--mnist", default="", help="the images, if at hand")
    parser.add_argument("--out", type=Path, help="a new folder for the figure")
    smoke = "few images, for tests; no figure without --out"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    arguments = parser.parse_args()
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    out = arguments.out
    if out is None and not arguments.smoke:
        out = Path("runs") / f"data_cleaning-{now}"
    if out is not None and out.exists():
        parser.error(f"{out} exists; give --out the name of a new folder")
    if arguments.mnist and Path(arguments.mnist).is_file():
        print(f"Images: MNIST in {arguments.mnist}.")
        images, label = mnist(Path(arguments.mnist))
    else:
        if arguments.mnist:
            print(f"There is no file {arguments.mnist}.")
        print("Images: generated ones (pass --mnist NPZ for MNIST).")
        images, label = generated(2000 if arguments.smoke else 10_000)
    data, test = records(images, label)
    budget = dpb.PrivacyBudget(arguments.epsilon, delta=1e-5)
    smoke = arguments.smoke
    found = compare(data, test, budget, 5 if smoke else 100, 1 if smoke else 5)
    show(found)
    if out is not None:
        draw(found, arguments.epsilon, out)


if __name__ == "__main__":
    main()
