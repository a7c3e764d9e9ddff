"""Hyper-data-cleaning without privacy: a weight sigmoid(x_i) for each training record.

4 000 training images, half of whose labels are drawn anew, 3 000 validation and 3 000
test images, in the proportions of which the digits of scikit-learn stand in for MNIST.
A linear softmax regression beside JAXopt, in turns: accuracy on test records, the F1
score of the cleaner, and processor seconds. `python -m benchmarks data_cleaning`.
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
from .hypergradient import jaxopt, objectives
from .source_tasks import linear, loss_of, parts

OPTIMIZER = optax.adam(0.3)
TARGET, RIDGE = 0.895, 1e-3


def images():
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


def weighted():
    """Return the bilevel problem: a weight for each record, read by its index."""
    loss = loss_of(linear)
    return dpb.BilevelProblem(
        lambda _, y, record: loss(y, record),
        lambda x, y, record: jax.nn.sigmoid(x[record["index"]]) * loss(y, record),
        lower_public=lambda _, y: RIDGE * optax.tree.norm(y, squared=True),
        x_in_records=("lower",),
    )


def moved(x, gradient, state):
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


def scores(x, y, task):
    found = jnp.argmax(linear(y, task.test["features"]), 1)
    dropped = np.asarray(x) < 0  # a weight below 1/2
    both = np.sum(dropped & task.wrong)
    f1 = 2 * both / (np.sum(dropped) + np.sum(task.wrong))
    return float(jnp.mean(found == task.test["label"])), float(f1)


def compare(task, methods, num_steps):
    """Every method in turns, step by step, so that other jobs slow all alike."""
    x, y = jnp.zeros(len(task.wrong)), jnp.zeros((task.test["features"].shape[1], 10))
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
            found[name].append((seconds, *scores(*states[name][:2], task)))
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
    compare(cleaning(seed=0), candidates(weighted()), 40)
