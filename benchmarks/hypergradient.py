"""Hypergradients against JAXopt and optimistix: time, compile time and error.

`python -m benchmarks hypergradient`, on one core, with the `test` extra: candidates in
turns in one process. Errors are relative to a float64 one by a factored Hessian.
"""

import functools
import time
import warnings

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optax
import optimistix
from sklearn.datasets import load_digits

import dpbilevel as dpb

from . import pages
from .source_tasks import linear, loss_of, parts
from .utility import widened

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import jaxopt

STEPS = 20
OPTIMIZER, TARGET, RIDGE = optax.adam(0.3), 0.895, 1e-3  # of data cleaning


def logistic(n, d):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, d)) * np.exp(-np.arange(d) / d * 4)
    signal = features @ rng.normal(size=d)
    label = np.sign(signal + 0.5 * rng.normal(size=n))
    records = features.astype("f4"), label.astype("f4")
    problem = dpb.penalty_tuning(dpb.logistic_loss, jnp.arange(d))
    data = dpb.Levels(*parts(*records, (slice(n // 4), slice(n))))
    return problem, data, jnp.full(d, -6.0), jnp.zeros(d)


def softmax(n, d, classes):
    rng = np.random.default_rng(0)
    features = np.abs(rng.normal(size=(n, d))) * np.exp(-3 * rng.uniform(size=d))
    logits = features @ rng.normal(size=(d, classes))
    return cleaning(features, np.argmax(logits + rng.gumbel(size=(n, classes)), 1))


def digits():
    images = load_digits()
    return cleaning(images.data[:898] / 16, images.target[:898])


def cleaning(features, label):
    (n, d), classes = features.shape, label.max() + 1
    rows = {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(np.eye(classes)[label], jnp.float32),
        "index": jnp.arange(n, dtype=jnp.int32),
    }

    def loss(y, record):
        logits = record["features"] @ y
        return jax.nn.logsumexp(logits) - record["label"] @ logits

    problem, half = weighted_records(loss, 0.5e-3), n // 2
    data = dpb.Levels(jax.tree.map(lambda v: v[:half], rows), rows)
    return problem, data, jnp.zeros(n), jnp.zeros((d, classes))


def weighted_records(loss, ridge, **facts):
    """Return the problem of a weight for each record of the lower level."""
    return dpb.BilevelProblem(
        lambda _, y, record: loss(y, record),
        lambda x, y, record: jax.nn.sigmoid(x[record["index"]]) * loss(y, record),
        lower_public=lambda _, y: ridge * optax.tree.norm(y, squared=True),
        **facts,
    )


def reference(problem, x, y0, data):
    """Return the float64 solution and hypergradient; dense for small Hessians."""
    with jax.enable_x64(True):
        x, y0, data = map(widened, (x, y0, data))
        solver = dpb.oracles.ConjugateGradient(num_steps=5000, tolerance=1e-13)
        solver = dpb.oracles.Cholesky() if y0.size <= 1000 else solver

        @jax.jit
        def run(x, y0, data):
            newton = dpb.oracles.NewtonCG(tolerance=1e-11, cg_steps=2000)
            y, _ = dpb.oracles.lower_solve(problem, x, data, solver=newton, y0=y0)
            return y, ours_at(problem, solver)(x, y, data)

        y, gradient = run(x, y0, data)
        return np.asarray(y, np.float32), np.asarray(gradient)


def objectives(problem):
    """Return the mean losses of the lower and the upper level, y first."""

    def mean_loss(level):
        loss, public = getattr(problem, level), getattr(problem, f"{level}_public")

        def value(y, x, data):
            losses = jax.vmap(lambda row: loss(x, y, row))(getattr(data, level))
            return jnp.mean(losses) + (public(x, y) if public else 0.0)

        return value

    return mean_loss("lower"), mean_loss("upper")


def jaxopt_at(problem, solve=None):
    slope = jax.grad(objectives(problem)[0])
    keywords = {} if solve is None else {"solve": solve}
    root = jaxopt.implicit_diff.custom_root(slope, **keywords)
    solution = root(lambda y, x, data: y)
    return through(problem, lambda x, y, data: solution(y, x, data))


def conjugate_gradients(steps):
    return functools.partial(jaxopt.linear_solve.solve_cg, maxiter=steps, tol=0.0)


def through(problem, solve):
    upper = objectives(problem)[1]

    def run(x, y0, data):
        return jax.grad(lambda x: upper(solve(x, y0, data), x, data))(x)

    return run


def by_jaxopt(problem, **settings):
    lower = objectives(problem)[0]

    def solve(x, y0, data):
        solver = jaxopt.LBFGS(lower, maxiter=500, tol=1e-6, **settings)
        return solver.run(y0, x, data).params

    return through(problem, solve)


def by_optimistix(problem, tolerance=1e-7, **settings):
    lower = objectives(problem)[0]

    def solve(x, y0, data):
        with jax.numpy_dtype_promotion("standard"):
            return optimistix.minimise(
                lambda y, args: lower(y, *args),
                optimistix.LBFGS(tolerance, tolerance),
                y0,
                (x, data),
                max_steps=2000,
                **settings,
            ).value

    return through(problem, solve)


def ours_at(problem, linear_solver):
    def run(x, y, data):
        given = {"linear_solver": linear_solver}
        return dpb.oracles.implicit_hypergradient(problem, x, y, data, **given)[0]

    return run


def by_ours(problem):
    def solve(x, y0, data):
        return dpb.oracles.lower_solution(problem, x, data, y0=y0)

    return through(problem, solve)


def compare(candidates, arguments, exact, **settings):
    errors = {}
    for name, candidate in candidates.items():
        try:
            found = np.asarray(jax.jit(candidate)(*arguments), np.float64)
        except jax.errors.JaxRuntimeError:
            print(f"{name}: raises")
        else:
            errors[name] = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    candidates = {name: candidates[name] for name in errors}
    # On one core the time of the process is the time on the clock, less other jobs.
    settings |= {"reference": next(iter(candidates)), "clock": time.process_time}
    rows = pages.ratios(candidates, *arguments, **settings)
    print(f"{'':40s}{'ms':>10s}{'ratio':>8s}{'compile s':>11s}{'error':>10s}")
    for name, (seconds, ratio, build) in rows.items():
        times = f"{1e3 * seconds:10.3f}{ratio:8.2f}{build:11.2f}"
        print(f"{name:40s}{times}{errors[name]:10.1e}", flush=True)


def at_a_solution(problem, arguments, exact, repeats):
    cg, fixed = dpb.oracles.ConjugateGradient, conjugate_gradients(STEPS)
    ours = cg(num_steps=STEPS, tolerance=None)
    candidates = {
        f"JAXopt custom_root, solve_cg, {STEPS} steps": jaxopt_at(problem, fixed),
        f"ours, {STEPS} steps": ours_at(problem, ours),
        "JAXopt custom_root, default": jaxopt_at(problem),
        "ours, default": ours_at(problem, cg()),
    }
    compare(candidates, arguments, exact, repeats=repeats)


def whole(problem, arguments, exact, repeats):
    """Inner solve and implicit gradient from a cold start, each library's defaults."""
    by_cg = {
        "adjoint": optimistix.ImplicitAdjoint(lineax.CG(1e-5, 1e-5)),
        "tags": frozenset({lineax.positive_semidefinite_tag}),
    }
    solve_cg = jaxopt.linear_solve.solve_cg
    candidates = {
        "ours, default (NewtonCG)": by_ours(problem),
        "JAXopt LBFGS, default": by_jaxopt(problem),
        "JAXopt LBFGS, solve_cg": by_jaxopt(problem, implicit_diff_solve=solve_cg),
        "optimistix LBFGS, default": by_optimistix(problem),
        "optimistix LBFGS, lineax.CG": by_optimistix(problem, **by_cg),
    }
    if arguments[1].size > 1000:  # its default forms the Hessian
        del candidates["optimistix LBFGS, default"]
    compare(candidates, arguments, exact, repeats=repeats, builds=3)


CASES = {
    "logistic regression, n = 20 000, d = 64": (logistic, (20_000, 64), 50),
    "logistic regression, n = 100 000, d = 128": (logistic, (100_000, 128), 7),
    "digits softmax, p = 640": (digits, (), 50),
    "softmax, p = 7840": (softmax, (5000, 784, 10), 7),
}


def main():
    for name, (make, sizes, repeats) in CASES.items():
        start = time.perf_counter()
        problem, data, x, y0 = make(*sizes)
        y, exact = reference(problem, x, y0, data)
        at, cold = (x, jnp.asarray(y), data), (x, y0, data)
        print(f"\n{name} (prepared in {time.perf_counter() - start:.0f} s)")
        at_a_solution(problem, at, exact, repeats)
        print("from a cold start")
        whole(problem, cold, exact, max(5, repeats // 5))


# -------------------------------------------------------------------- data cleaning


def noisy_digits():
    """Return both levels of MNIST, test images, and which training labels are wrong."""
    pixels, label = pages.mnist()
    size = len(label)
    constant = np.ones((size, 1), "f4")
    features = np.concatenate([pixels.reshape(size, -1), constant], 1)
    rng = np.random.default_rng(0)
    rows = np.split(rng.permutation(size), [4 * size // 10, 7 * size // 10])
    lower, upper, test = parts(features, label, rows)
    noisy = label[rows[0]]
    redrawn = rng.permutation(len(noisy))[: len(noisy) // 2]
    noisy[redrawn] = rng.integers(0, 10, len(redrawn))
    lower |= {"label": jnp.asarray(noisy), "index": jnp.arange(len(noisy))}
    return dpb.Levels(upper, lower), test, noisy != label[rows[0]]


def moved(x, gradient, state):
    updates, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(x, updates), state


def outer_step(problem, solver, linear_solver):
    """Return the lower level and v from where the last step left them."""

    def step(x, y, v, state, data):
        y, _ = dpb.oracles.lower_solve(problem, x, data, y0=y, solver=solver)
        # Loose solutions are meant: no check of their gradient.
        given = {"linear_solver": linear_solver, "v0": v, "tolerance": None}
        gradient, v = dpb.oracles.implicit_hypergradient(problem, x, y, data, **given)
        x, state = moved(x, gradient, state)
        return x, y, v.value, state

    return step


def outer_step_by_jaxopt(problem, kind, tolerance, of_system):
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


def outer_steps(problem):
    oracles, found = dpb.oracles, {}
    for pair in ((1e-2, 1e-1), (1e-3, 1e-2)):
        words, (tolerance, of_system) = "{:.0e}, {:.0e}".format(*pair), pair
        newton = oracles.NewtonCG(tolerance=tolerance)
        system = oracles.ConjugateGradient(tolerance=of_system)
        found[f"ours, {words}"] = outer_step(problem, newton, system)
        theirs = outer_step_by_jaxopt(problem, jaxopt.LBFGS, *pair)
        found[f"JAXopt LBFGS, {words}"] = theirs
    plain = outer_step_by_jaxopt(problem, jaxopt.GradientDescent, 1e-2, 1e-1)
    return found | {"JAXopt GradientDescent, 1e-02, 1e-01": plain}


def data_cleaning(num_steps=40):
    """Hyper-data-cleaning without privacy: a weight for each training record.

    `python -m benchmarks data_cleaning`: a linear softmax regression beside JAXopt, in
    turns, on MNIST, half of whose training labels are drawn anew.
    """
    if not pages.MNIST.is_file():
        return print(f"data_cleaning: left out, there is no {pages.MNIST.name}")
    data, test, wrong = noisy_digits()
    problem = weighted_records(loss_of(linear), RIDGE, x_in_records=("lower",))

    def scores(x, y):
        right = jnp.argmax(linear(y, test["features"]), 1) == test["label"]
        dropped = np.asarray(x) < 0  # a weight below 1/2
        f1 = 2 * np.sum(dropped & wrong) / (np.sum(dropped) + np.sum(wrong))
        return float(jnp.mean(right)), float(f1)

    x, y = jnp.zeros(len(wrong)), jnp.zeros((test["features"].shape[1], 10))
    start = x, y, optax.tree.zeros_like(y), OPTIMIZER.init(x)
    steps, states, found = {}, {}, {}
    for name, step in outer_steps(problem).items():
        steps[name] = jax.jit(step).lower(*start, data).compile()
        states[name], found[name] = start, []
    for _ in range(num_steps):  # in turns, so that other jobs slow all alike
        for name, step in steps.items():
            begin = time.process_time()
            states[name] = jax.block_until_ready(step(*states[name], data))
            seconds = time.process_time() - begin
            found[name].append((seconds, *scores(*states[name][:2])))
    rows = []
    for name, values in found.items():
        seconds, accuracies, f1 = np.transpose(values)
        total, reached = np.cumsum(seconds), np.flatnonzero(accuracies >= TARGET)
        when = f"{total[reached[0]]:.1f} ({reached[0] + 1})" if len(reached) else "-"
        cells = [name, f"{accuracies[-1]:.4f}", f"{accuracies.max():.4f}"]
        rows.append([*cells, f"{f1[-1]:.3f}", when, f"{total[-1]:.1f}"])
    head = ("method", "accuracy", "highest", "F1", f"s to {TARGET:g} (steps)")
    print(pages.table([*head, f"s of {num_steps} steps"], rows))
