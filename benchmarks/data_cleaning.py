"""Hyper-data-cleaning without privacy: a weight sigmoid(x_i) for each training record.

4 000 training images, half of whose labels are drawn anew, 3 000 validation and 3 000
test images, in the proportions of which the digits of scikit-learn stand in for MNIST.
A linear softmax regression beside JAXopt, in turns, and a network 784-300-10: accuracy
on test records, the F1 score of the cleaner, and processor seconds of the outer steps.
`python -m benchmarks data_cleaning [--model=linear] [--seed=0]`. NON-PRIVATE.
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
from .source_tasks import linear, loss_of, parts

OPTIMIZER = optax.adam(0.3)
TARGET, RIDGE = 0.895, 1e-3


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


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """Records of both levels, test records, and which labels are wrong."""

    data: dpb.Levels
    test: dict
    wrong: np.ndarray


def cleaning(seed):
    """Four tenths for training, three each for validation and test."""
    features, label = images()
    rng = np.random.default_rng(seed)
    size = len(label)
    rows = np.split(rng.permutation(size), [4 * size // 10, 7 * size // 10])
    lower, upper, test = parts(features, label, rows)
    noisy = label[rows[0]]
    redrawn = rng.permutation(len(noisy))[: len(noisy) // 2]
    noisy[redrawn] = rng.integers(0, 10, len(redrawn))
    lower |= {"label": jnp.asarray(noisy), "index": jnp.arange(len(noisy))}
    return Cleaning(dpb.Levels(upper, lower), test, noisy != label[rows[0]])


def network(y, features):
    return jax.nn.relu(features @ y["w1"]) @ y["w2"] + y["b2"]


def start_of(model, size):
    if model is linear:
        return jnp.zeros((size, 10))
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(first, (size, 300)) * (2 / size) ** 0.5,
        "w2": jax.random.normal(second, (300, 10)) / 300**0.5,
        "b2": jnp.zeros(10),
    }


def weighted(model):
    """Return the bilevel problem: a weight for each record, read by its index."""
    loss = loss_of(model)
    return dpb.BilevelProblem(
        lambda _, y, record: loss(y, record),
        lambda x, y, record: jax.nn.sigmoid(x[record["index"]]) * loss(y, record),
        lower_public=lambda _, y: RIDGE * optax.tree.norm(y, squared=True),
        x_in_records=("lower",),
    )


# ---------------------------------------------------------------------- the methods


def moved(x, gradient, state):
    """Return x after a step of the outer optimizer, and its state."""
    updates, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(x, updates), state


def ours(problem, solver, linear_solver):
    """Return the lower level and v from where the last step left them."""

    def step(x, y, v, state, data):
        y, _ = dpb.oracles.lower_solve(problem, x, data, y0=y, solver=solver)
        # Loose solutions are meant: no check of their gradient.
        settings = {"linear_solver": linear_solver, "v0": v, "tolerance": None}
        gradient, solution = dpb.oracles.implicit_hypergradient(
            problem, x, y, data, **settings
        )
        x, state = moved(x, gradient, state)
        return x, y, solution.value, state

    return step


def by_jaxopt(problem, kind, tolerance, of_system):
    """JAXopt's implicit derivative by solve_cg, the lower level from its last y."""
    lower, upper = objectives(problem)
    solve = functools.partial(jaxopt.linear_solve.solve_cg, tol=of_system)
    solver = kind(lower, maxiter=500, tol=tolerance, implicit_diff_solve=solve)

    def step(x, y, v, state, data):
        def outer(x):
            found = solver.run(y, x, data).params
            return upper(found, x, data), found

        (_, y), gradient = jax.value_and_grad(outer, has_aux=True)(x)
        x, state = moved(x, gradient, state)
        return x, y, v, state

    return step


def candidates(problem):
    """Ours and JAXopt's, with loose and tight tolerances of gradient and system."""
    oracles, found = dpb.oracles, {}
    for pair in ((1e-2, 1e-1), (1e-3, 1e-2)):
        words, (tolerance, of_system) = "{:.0e}, {:.0e}".format(*pair), pair
        newton = oracles.NewtonCG(tolerance=tolerance)
        system = oracles.ConjugateGradient(tolerance=of_system)
        found[f"ours, {words}"] = ours(problem, newton, system)
        found[f"JAXopt LBFGS, {words}"] = by_jaxopt(problem, jaxopt.LBFGS, *pair)
    plain = by_jaxopt(problem, jaxopt.GradientDescent, 1e-2, 1e-1)
    return found | {"JAXopt GradientDescent, 1e-02, 1e-01": plain}


def for_networks(problem):
    """Make a fixed number of steps: a network's Hessian may be indefinite."""
    lower = dpb.oracles.AcceleratedGradient(20, 0.1, 0.9, tolerance=None)
    return {"ours": ours(problem, lower, dpb.oracles.Neumann(10, 0.1))}


# ---------------------------------------------------------------------- the runs


def scores(model, x, y, task):
    """Return the accuracy on test records and the F1 score of the cleaner."""
    found = jnp.argmax(model(y, task.test["features"]), 1)
    dropped = np.asarray(x) < 0  # a weight below 1/2
    both = np.sum(dropped & task.wrong)
    f1 = 2 * both / (np.sum(dropped) + np.sum(task.wrong))
    return float(jnp.mean(found == task.test["label"])), float(f1)


def compare(task, model, methods, num_steps):
    """Every method in turns, step by step, so that other jobs slow all alike."""
    x, y = jnp.zeros(len(task.wrong)), start_of(model, task.test["features"].shape[1])
    start = x, y, optax.tree.zeros_like(y), OPTIMIZER.init(x)
    steps, built, states = {}, {}, dict.fromkeys(methods, start)
    for name, step in methods.items():
        begin = time.process_time()
        steps[name] = jax.jit(step).lower(*start, task.data).compile()
        built[name] = time.process_time() - begin
    found = {name: [] for name in methods}
    for _ in range(num_steps):
        for name, step in steps.items():
            begin = time.process_time()
            states[name] = jax.block_until_ready(step(*states[name], task.data))
            seconds = time.process_time() - begin
            found[name].append((seconds, *scores(model, *states[name][:2], task)))
    rows = []
    for name, values in found.items():
        seconds, accuracies, f1 = np.transpose(values)
        total, reached = np.cumsum(seconds), np.flatnonzero(accuracies >= TARGET)
        when = f"{total[reached[0]]:.1f} ({reached[0] + 1})" if len(reached) else "-"
        cells = [name, f"{accuracies[-1]:.4f}", f"{accuracies.max():.4f}"]
        cells += [f"{f1[-1]:.3f}", when, f"{total[-1]:.1f}", f"{built[name]:.1f}"]
        rows.append(cells)
    head = ("method", "accuracy", "highest", "F1", f"s to {TARGET:g} (steps)")
    print(pages.table([*head, f"s of {num_steps} steps", "s to compile"], rows))


def main():
    options = pages.options()
    task = cleaning(int(options.get("seed", 0)))
    if options.get("model", "linear") == "linear":
        compare(task, linear, candidates(weighted(linear)), 40)
    if options.get("model", "network") == "network":
        compare(task, network, for_networks(weighted(network)), 80)
