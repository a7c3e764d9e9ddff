"""Hyper-data-cleaning without privacy: one weight for each training record.

4 000 training images, half of whose labels are drawn anew, 3 000 validation and 3 000
test images. The weight of a record is sigmoid(x_i); the outer optimizer is
optax.adam(.3) for everybody. A linear softmax regression beside JAXopt in one process,
in turns, and a network 784-300-10. Prints the accuracy on the test records, the F1
score of the cleaner (found: a weight below 1/2; wrong: a label that differs from the
true one) and the processor's seconds of the outer steps, on all cores and without what
compiles or evaluates: other jobs on the machine do not count.

MNIST is read from $MNIST or ../shared/data/mnist_10k.npz; where it is missing, the
1 797 digits of scikit-learn are used, in the same proportions.

Run by `python -m benchmarks data_cleaning [--model=linear] [--seed=0]`. NON-PRIVATE.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dpbilevel as dpb

from . import pages
from .peers import jaxopt, objectives

OPTIMIZER = optax.adam(0.3)
TARGET = 0.895


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """Records of both levels, test records, and which labels are wrong."""

    data: dpb.Levels
    test: dict
    wrong: np.ndarray

    @property
    def x0(self):
        """Weights of one half."""
        return jnp.zeros(len(self.wrong))


def images():
    """Features in [0, 1] with a constant, and labels."""
    if pages.MNIST.is_file():
        with np.load(pages.MNIST) as file:
            pixels, label = file["images"] / 255.0, file["labels"]
    else:
        digits = load_digits()
        pixels, label = digits.images / 16.0, digits.target
    flat = pixels.reshape(len(pixels), -1)
    features = np.concatenate([flat, np.ones((len(flat), 1))], 1)
    return features.astype("f4"), label.astype("i4")


def cleaning(features, label, seed=0):
    """Four tenths for training, three each for validation and test."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(label))
    training, held, tested = np.split(
        order, [4 * len(order) // 10, 7 * len(order) // 10]
    )
    noisy = label[training]
    redrawn = rng.permutation(len(training))[: len(training) // 2]
    noisy[redrawn] = rng.integers(0, 10, len(redrawn))
    index = np.arange(len(training), dtype=np.int32)
    lower = {"features": features[training], "label": noisy, "index": index}
    upper, test = (
        {"features": features[rows], "label": label[rows]} for rows in (held, tested)
    )
    data, test = jax.tree.map(jnp.asarray, (dpb.Levels(upper, lower), test))
    return Cleaning(data, test, noisy != label[training])


# ---------------------------------------------------------------------- the models


def linear(y, features):
    return features @ y


def network(y, features):
    return jax.nn.relu(features @ y["w1"]) @ y["w2"] + y["b2"]


def start_of(model, num_features):
    if model is linear:
        return jnp.zeros((num_features, 10))
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(first, (num_features, 300)) * (2 / num_features) ** 0.5,
        "w2": jax.random.normal(second, (300, 10)) / 300**0.5,
        "b2": jnp.zeros(10),
    }


def weighted(model, ridge):
    """Return the bilevel problem: a weight for each record, read by its index."""

    def loss(y, record):
        return optax.softmax_cross_entropy_with_integer_labels(
            model(y, record["features"]), record["label"]
        )

    return dpb.BilevelProblem(
        lambda _, y, record: loss(y, record),
        lambda x, y, record: jax.nn.sigmoid(x[record["index"]]) * loss(y, record),
        lower_public=lambda _, y: ridge * optax.tree.norm(y, squared=True),
        x_in_records=("lower",),
    )


# ---------------------------------------------------------------------- the methods


def ours(problem, solver, linear_solver):
    """Return the lower level and v from where the last step left them."""

    def step(x, y, v, state, data):
        y, _ = dpb.oracles.lower_solve(problem, x, data, y0=y, solver=solver)
        gradient, solution = dpb.oracles.implicit_hypergradient(
            problem, x, y, data, linear_solver=linear_solver, v0=v
        )
        updates, state = OPTIMIZER.update(gradient, state)
        return optax.apply_updates(x, updates), y, solution.value, state

    return step


def by_jaxopt(problem, make, tolerance):
    """JAXopt's implicit derivative by solve_cg, the lower level from its last y."""
    lower, upper = objectives(problem)
    solve = functools.partial(jaxopt.linear_solve.solve_cg, tol=tolerance)
    solver = make(lower, implicit_diff_solve=solve)

    def step(x, y, v, state, data):
        def outer(x):
            found = solver.run(y, x, data).params
            return upper(found, x, data), found

        (_, y), gradient = jax.value_and_grad(outer, has_aux=True)(x)
        updates, state = OPTIMIZER.update(gradient, state)
        return optax.apply_updates(x, updates), y, v, state

    return step


def candidates(problem):
    """Ours and JAXopt's, with loose and tight tolerances of gradient and system."""
    oracles, found = dpb.oracles, {}
    for tolerance, of_system in ((1e-2, 1e-1), (1e-3, 1e-2)):
        found[f"ours, {tolerance:.0e}, {of_system:.0e}"] = ours(
            problem,
            oracles.NewtonCG(tolerance=tolerance),
            oracles.ConjugateGradient(tolerance=of_system),
        )
        make = functools.partial(jaxopt.LBFGS, maxiter=500, tol=tolerance)
        found[f"JAXopt LBFGS, {tolerance:.0e}, {of_system:.0e}"] = by_jaxopt(
            problem, make, of_system
        )
    make = functools.partial(jaxopt.GradientDescent, maxiter=500, tol=1e-2)
    found["JAXopt GradientDescent, 1e-02, 1e-01"] = by_jaxopt(problem, make, 1e-1)
    return found


def for_networks(problem):
    """Make a fixed number of steps: a network's Hessian may be indefinite."""
    lower = dpb.oracles.AcceleratedGradient(20, 0.1, 0.9, tolerance=None)
    return {"ours": ours(problem, lower, dpb.oracles.Neumann(10, 0.1))}


# ---------------------------------------------------------------------- the runs


@dataclasses.dataclass
class Run:
    """A method along its outer steps, and its processor's seconds so far."""

    step: object
    state: tuple
    seconds: float = 0.0
    rows: list = dataclasses.field(default_factory=list)

    def advance(self, task, model):
        """One outer step, timed, and what it gives."""
        start = time.process_time()
        self.state = jax.block_until_ready(self.step(*self.state, task.data))
        self.seconds += time.process_time() - start
        x, y = self.state[:2]
        self.rows.append((self.seconds, accuracy(model, y, task.test), f1(x, task)))


def accuracy(model, y, test):
    found = jnp.argmax(model(y, test["features"]), 1)
    return float(jnp.mean(found == test["label"]))


def f1(x, task):
    """Record with a weight below 1/2 against those with a wrong label."""
    found = np.asarray(x) < 0
    both = np.sum(found & task.wrong)
    return float(2 * both / (np.sum(found) + np.sum(task.wrong)))


def show(name, run, compiled):
    seconds, accuracies, scores = map(np.asarray, zip(*run.rows, strict=True))
    reached = np.flatnonzero(accuracies >= TARGET)
    when = f"{seconds[reached[0]]:.1f} ({reached[0] + 1})" if len(reached) else "-"
    print(
        f"| {name} | {accuracies[-1]:.4f} | {accuracies.max():.4f} | {scores[-1]:.3f} "
        f"| {when} | {seconds[-1]:.1f} | {compiled:.1f} |",
        flush=True,
    )


def compare(task, model, methods, num_steps):
    """Every method in turns, step by step, so that other jobs slow all alike."""
    y = start_of(model, task.test["features"].shape[1])
    start = task.x0, y, optax.tree.zeros_like(y), OPTIMIZER.init(task.x0)
    runs, compiled = {}, {}
    for name, step in methods.items():
        begin = time.process_time()
        step = jax.jit(step).lower(*start, task.data).compile()
        compiled[name] = time.process_time() - begin
        runs[name] = Run(step, start)
    for _ in range(num_steps):
        for run in runs.values():
            run.advance(task, model)
    print(
        f"| method | accuracy | highest | F1 | s to {TARGET:g} (steps) "
        f"| s of {num_steps} steps | s to compile |\n|---|---|---|---|---|---|---|"
    )
    for name, run in runs.items():
        show(name, run, compiled[name])


def main():
    options = pages.options()
    features, label = images()
    task = cleaning(features, label, int(options.get("seed", 0)))
    parts = (task.data.upper, task.data.lower, task.test)
    sizes = (len(part["label"]) for part in parts)
    print("validation, training, test records:", *sizes, flush=True)
    if options.get("model", "linear") == "linear":
        compare(task, linear, candidates(weighted(linear, 1e-3)), 40)
    if options.get("model", "network") == "network":
        compare(task, network, for_networks(weighted(network, 1e-3)), 80)
