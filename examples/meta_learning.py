"""Meta-learning where a record is a person: learn to learn from two labelled images.

A person has 20 images of two classes and a labelling of their own: which classes, and
which of the two counts as positive. What all people share is a representation,
`features @ W`, in which one step of gradient descent on a new person's two labelled
images makes a classifier of the others. `NoisyGD` learns W: the loss of one record
contains that step, and its gradient, through the step, is clipped person by person, so
that whole people are protected, at epsilon = 3.

Compared with: no representation at all (the new person from scratch); descent on the
images of all people; one private release of scatter matrices, which whitens or projects
features; and the same meta-learning without noise, which is NOT private.

With digits (--mnist NPZ, arrays `images` of 28 x 28 and `labels`) no two people share
an image; otherwise the people are generated.

    python examples/meta_learning.py [--smoke]
"""

import argparse
import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

BUDGET = dpb.PrivacyBudget(epsilon=3.0, delta=1e-5)
IMAGES, SUPPORT, TEST = 20, 2, 100  # of a person; labelled by a new one; test people
RATE = 20.0  # of the step on the support


def digits(file, side=7):
    """People with two digits each; nobody shares an image with anybody."""
    rng = np.random.default_rng(0)
    with np.load(file) as stored:
        images, digit = stored["images"].astype("f4") / 255, stored["labels"]
    pixels = images.reshape(-1, side, 28 // side, side, 28 // side).mean((2, 4))
    features = pixels.reshape(len(pixels), -1) - 0.13  # about the mean of all pixels
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    left = [rng.permutation(np.flatnonzero(digit == c)) for c in range(10)]
    half, pairs = IMAGES // 2, []
    while True:
        sizes = np.array([len(rows) * (len(rows) >= half) for rows in left], float)
        if np.count_nonzero(sizes) < 2:
            break
        pair = rng.choice(10, 2, replace=False, p=sizes / sizes.sum())
        pairs.append(np.stack([left[c][:half] for c in pair], axis=1).ravel())
        for c in pair:
            left[c] = left[c][half:]
    return people(features[rng.permutation(np.array(pairs))])


def generated(count, seed=0, size=40, shared=5):
    """Two centres a person, which differ in a few directions that all people share."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.normal(size=(size, shared)))[0]
    centres = rng.normal(size=(count, 1, 2, shared)) @ directions.T
    noise = rng.normal(size=(count, IMAGES // 2, 2, size))
    features = (1.2 * centres + noise).reshape(count, IMAGES, size)
    features /= np.linalg.norm(features, axis=2, keepdims=True)
    return people(features)


def people(features):
    """Training and test people; images alternate between the two classes."""
    label = np.tile([1.0, -1.0], (len(features), IMAGES // 2))
    data = {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(label, jnp.float32),
    }
    return tuple(jax.tree.map(lambda v, r=r: v[r], data) for r in np.s_[TEST:, :TEST])


# ------------------------------------------------------------------- the representation


def adapted(w, features, label):
    """Return the head of a person: one step from the shared start on the support."""

    def loss(head):
        return jnp.mean(jnp.logaddexp(0.0, -label * (features @ w["W"] @ head)))

    return w["head"] - RATE * jax.grad(loss)(w["head"])


def margins(w, person):
    """Return margins of the other images, for every support of two neighbours."""

    def one(shift):
        features, label = (
            jnp.roll(person[k], -shift, 0) for k in ("features", "label")
        )
        head = adapted(w, features[:SUPPORT], label[:SUPPORT])
        return label[SUPPORT:] * (features[SUPPORT:] @ w["W"] @ head)

    return jax.vmap(one)(jnp.arange(0, IMAGES, SUPPORT))


def meta_loss(w, person):
    """Return the loss after the step, which gradients pass through."""
    return jnp.mean(jnp.logaddexp(0.0, -margins(w, person)))


def pooled_loss(head, person):
    """Return the loss of one model for all people."""
    return jnp.mean(jnp.logaddexp(0.0, -person["label"] * (person["features"] @ head)))


def scatter(person):
    """Scatter within the two classes, and between their means."""
    classes = person["features"].reshape(IMAGES // 2, 2, -1)
    means = jnp.mean(classes, axis=0)
    inside = (classes - means).reshape(IMAGES, -1)
    gap = means[0] - means[1]
    return jnp.stack([inside.T @ inside / IMAGES, jnp.outer(gap, gap) / 4])


def scatter_loss(w, person):
    """Linear: one step of 1 from zero leads to the mean of the matrices."""
    return -jnp.vdot(w, scatter(person))


@jax.jit
def accuracy(w, test):
    """Return the share of images that test people's heads label correctly."""
    return jnp.mean(jax.vmap(lambda person: margins(w, person) > 0)(test))


# ------------------------------------------------------------------- the methods


def identity(data):
    """Return the start: features as they are, a head of zeros."""
    size = data["features"].shape[-1]
    return {"W": jnp.eye(size), "head": jnp.zeros(size)}


def planned(loss, solver, data, start):
    """Return problem and plan of a run on all training people."""
    problem, count = dpb.FiniteSum(loss), len(data["label"])
    return problem, dpb.calibrate(problem, solver, BUDGET, sizes=count, w0=start)


def private(loss, solver, data, start, key):
    """Return what such a run releases."""
    problem, plan = planned(loss, solver, data, start)
    return jax.jit(dpb.solve)(problem, plan.solver, data, start, key=key).value


def from_scratch(data, key):
    """No use of other people's records."""
    return identity(data)


def pooled(data, key, step=1.0):
    """Return a start of the head from all people's images."""
    start = identity(data)
    solver = dpb.NoisyGD(10, clip_norm=0.1, step_size=step)
    return start | {"head": private(pooled_loss, solver, data, start["head"], key)}


def scatters(data, key, clip):
    """Return the means of both scatter matrices, in one release."""
    size = data["features"].shape[-1]
    start = jnp.zeros((2, size, size))
    solver = dpb.NoisyGD(1, clip_norm=clip, step_size=1.0)
    found = private(scatter_loss, solver, data, start, key)
    return (found + jnp.swapaxes(found, 1, 2)) / 2


def root(matrix, power, floor):
    """Return a power of a symmetric matrix whose eigenvalues are at least `floor`."""
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * (jnp.maximum(values, 0.0) + floor) ** power) @ vectors.T


def whitened(data, key, clip=0.15, ridge=0.01):
    """Features divided by their spread within classes."""
    within, _ = scatters(data, key, clip)
    return identity(data) | {"W": root(within, -0.5, ridge)}


def projected(data, key, clip=0.15, ridge=0.01, kept=8):
    """Whitened, and of that the directions in which the classes differ most."""
    within, between = scatters(data, key, clip)
    whiten = root(within, -0.5, ridge)
    _, vectors = jnp.linalg.eigh(whiten @ between @ whiten)
    W = whiten @ vectors[:, -kept:]
    return {"W": W, "head": jnp.zeros(kept)}


DESCENT = dpb.NoisyGD(8, clip_norm=0.5, step_size=4.0)


def meta_learned(data, key, solver=DESCENT):
    """Descent on the loss after a step, clipped person by person."""
    return private(meta_loss, solver, data, identity(data), key)


def without_noise(data, key, steps=30):
    """Return the same at no privacy, with more steps, which noise would not allow."""
    solver = dpb.NoisyGD(steps, clip_norm=0.5, step_size=4.0).with_noise(1e-6)
    run = jax.jit(dpb.solve)
    return run(dpb.FiniteSum(meta_loss), solver, data, identity(data), key=key).value


METHODS = {
    "new person from scratch": from_scratch,
    "descent on all people's images": pooled,
    "scatter within classes, whitened": whitened,
    "scatter within and between, projected": projected,
    "meta-learning": meta_learned,
    "meta-learning without noise (NOT private)": without_noise,
}


def show(found, out):
    """Print a table, and save a figure in a new folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = max(map(len, found))
    print(f"\n{'method':{width}}  accuracy on new people's images, two labelled")
    for name, values in found.items():
        low, middle, high = np.min(values), np.median(values), np.max(values)
        print(f"{name:{width}}  {middle:.3f}  ({low:.3f} to {high:.3f})")
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    places = np.arange(len(found))[::-1]
    medians = [np.median(values) for values in found.values()]
    colors = ["#9aa5b1"] * (len(found) - 2) + ["#1f77b4", "#d9b44a"]
    axes.barh(places, medians, color=colors)
    for place, values in zip(places, found.values(), strict=True):
        axes.plot(values, [place] * len(values), ".", color="black", markersize=4)
    axes.set_yticks(places, list(found))
    axes.set_xlim(min(medians) - 0.03, max(medians) + 0.02)
    axes.set_xlabel("accuracy on test people, epsilon = 3 for a person")
    out.mkdir(parents=True)
    figure.savefig(out / "figure.png", dpi=150)
    print(f"Figure: {out / 'figure.png'}")


def main() -> None:
    """Run all methods on the same people and compare what they are worth."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--mnist", default="", help="the digits as NPZ, if at hand")
    parser.add_argument("--out", type=Path, help="a new folder for the figure")
    parser.add_argument("--smoke", action="store_true", help="few people, for tests")
    arguments = parser.parse_args()
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    out = arguments.out or Path("runs") / f"meta-learning-{now}"
    if out.exists():
        parser.error(f"{out} exists; give --out the name of a new folder")
    if arguments.mnist and Path(arguments.mnist).is_file():
        data, test = digits(arguments.mnist)
    else:
        data, test = generated(700 if arguments.smoke else 3000)
    print(f"{len(data['label'])} training people, {len(test['label'])} test people.")
    print(planned(meta_loss, DESCENT, data, identity(data))[1].report)
    keys = jax.random.split(dpb.root_key(), 2 if arguments.smoke else 5)
    found = {
        name: [float(accuracy(method(data, key), test)) for key in keys]
        for name, method in METHODS.items()
    }
    show(found, out)
    scratch, learned = (
        np.median(found[name]) for name in ("new person from scratch", "meta-learning")
    )
    assert learned > scratch + 0.02


if __name__ == "__main__":
    main()
