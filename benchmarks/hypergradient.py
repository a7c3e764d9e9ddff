"""Hypergradients against JAXopt and optimistix: time, compile time and error.

`python -m benchmarks hypergradient`, on one core, with the `test` extra: candidates in
turns in one process. Errors are relative to a float64 one by a factored Hessian.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import dpbilevel as dpb
from dpbilevel.oracles.objectives import lower_objective

from . import peers
from .pages import ratios
from .utility import widened

STEPS = 20

# On one core the time of the process is the time on the clock, less other jobs.
clocked = functools.partial(ratios, clock=time.process_time)


def logistic(n, d):
    """Penalty tuning of a logistic regression with features of unequal scale."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, d)) * np.exp(-np.arange(d) / d * 4)
    signal = features @ rng.normal(size=d)
    label = np.sign(signal + 0.5 * rng.normal(size=n))
    rows = {"features": features, "label": label}
    rows = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), rows)
    problem = dpb.penalty_tuning(dpb.logistic_loss, jnp.arange(d))
    data = dpb.Levels(jax.tree.map(lambda v: v[: n // 4], rows), rows)
    return problem, data, jnp.full(d, -6.0), jnp.zeros(d)


def softmax(n, d, classes):
    """Hyper-cleaning of generated records."""
    rng = np.random.default_rng(0)
    features = np.abs(rng.normal(size=(n, d))) * np.exp(-3 * rng.uniform(size=d))
    logits = features @ rng.normal(size=(d, classes))
    return cleaning(features, np.argmax(logits + rng.gumbel(size=(n, classes)), 1))


def digits():
    images = load_digits()
    return cleaning(images.data[:898] / 16, images.target[:898])


def cleaning(features, label):
    """Hyper-cleaning: x weighs every training record of a softmax regression."""
    (n, d), classes = features.shape, label.max() + 1
    rows = {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(np.eye(classes)[label], jnp.float32),
        "index": jnp.arange(n, dtype=jnp.int32),
    }

    def loss(y, record):
        logits = record["features"] @ y
        return jax.nn.logsumexp(logits) - record["label"] @ logits

    problem = dpb.BilevelProblem(
        lambda x, y, record: loss(y, record),
        lambda x, y, record: jax.nn.sigmoid(x[record["index"]]) * loss(y, record),
        lower_public=lambda x, y: 0.5e-3 * jnp.sum(y**2),
    )
    half = n // 2
    data = dpb.Levels(jax.tree.map(lambda v: v[:half], rows), rows)
    return problem, data, jnp.zeros(n), jnp.zeros((d, classes))


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


def ours_at(problem, linear_solver):
    def run(x, y, data):
        given = {"linear_solver": linear_solver}
        return dpb.oracles.implicit_hypergradient(problem, x, y, data, **given)[0]

    return run


def by_ours(problem, **settings):
    def solve(x, y0, data):
        return dpb.oracles.lower_solution(problem, x, data, y0=y0, **settings)

    return peers.through(problem, solve)


def error_of(found, exact):
    found = np.asarray(found, np.float64)
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def errors_of(candidates, arguments, exact):
    """Return candidates by name, without those that cannot solve the problem."""
    errors = {}
    for name, candidate in candidates.items():
        try:
            errors[name] = error_of(jax.jit(candidate)(*arguments), exact)
        except jax.errors.JaxRuntimeError:
            print(f"{name}: raises")
    return errors


def compare(candidates, arguments, exact, errors=None, **settings):
    """Print times, their ratios to the first one's, builds and errors."""
    errors = errors or errors_of(candidates, arguments, exact)
    candidates = {name: candidates[name] for name in errors}
    rows = clocked(candidates, *arguments, reference=next(iter(candidates)), **settings)
    print(f"{'':40s}{'ms':>10s}{'ratio':>8s}{'compile s':>11s}{'error':>10s}")
    for name, (seconds, ratio, build) in rows.items():
        times = f"{1e3 * seconds:10.3f}{ratio:8.2f}{build:11.2f}"
        print(f"{name:40s}{times}{errors[name]:10.1e}", flush=True)


def at_a_solution(problem, arguments, exact, repeats):
    """Equal counts of conjugate gradient steps, and the defaults."""
    cg, fixed = dpb.oracles.ConjugateGradient, peers.conjugate_gradients(STEPS)
    ours = cg(num_steps=STEPS, tolerance=None)
    candidates = {
        f"JAXopt custom_root, solve_cg, {STEPS} steps": peers.jaxopt_at(problem, fixed),
        f"ours, {STEPS} steps": ours_at(problem, ours),
        "JAXopt custom_root, default": peers.jaxopt_at(problem),
        "ours, default": ours_at(problem, cg()),
    }
    compare(candidates, arguments, exact, repeats=repeats)


def products(problem, arguments, repeats):
    """Print the cost of a Hessian product next to plain gradients of the mean loss."""

    def gradient(x, y, data):
        lower = peers.objectives(problem)[0]
        return jax.grad(lower)(y, x, data)

    def product(count, x, y, data):
        linear = lower_objective(problem, data).linearize(x, y)[-1]
        return jax.lax.fori_loop(0, count, lambda _, v: v + 1e-3 * linear(v), y)

    def in_pieces(x, y, data):
        return lower_objective(problem, data).gradient(x, y)

    candidates = {"gradient": gradient, "in pieces": in_pieces}
    candidates["one"] = functools.partial(product, 1)
    candidates["eleven"] = functools.partial(product, 11)
    rows = clocked(candidates, *arguments, reference="gradient", repeats=repeats)
    cost = (rows["eleven"][0] - rows["one"][0]) / 10
    print(
        f"a Hessian product costs {cost / rows['gradient'][0]:.2f} plain gradients, "
        f"{cost / rows['in pieces'][0]:.2f} of our own"
    )


def whole(problem, arguments, exact, repeats):
    """Inner solve and implicit gradient from a cold start, each library's defaults."""
    ours = {"ours, default (NewtonCG)": by_ours(problem)}
    ours["ours, LBFGS"] = by_ours(problem, solver=dpb.oracles.LBFGS())
    candidates = ours | peers.everybody(problem)
    if arguments[1].size > 1000:  # its default forms the Hessian
        del candidates["optimistix LBFGS, default"]
    errors = errors_of(candidates, arguments, exact)
    compare(candidates, arguments, exact, errors, repeats=repeats, builds=3)
    print("at the accuracy of a peer")
    for name in errors:
        if name.endswith("LBFGS, default"):
            loose, settings = loosened(problem, arguments, exact, errors[name])
            pair = {name: candidates[name], f"ours, {settings}": loose}
            compare(pair, arguments, exact, repeats=repeats)
    if "optimistix LBFGS, default" in errors:
        target = errors[next(iter(ours))]
        optimistix_at_our_accuracy(problem, arguments, exact, target, repeats)


def loosened(problem, arguments, exact, target):
    """Ours with both tolerances multiplied by as much as leaves the error `target`."""
    for factor in (3000, 1000, 300, 100, 70, 50, 30, 10, 3, 1):
        solver = dpb.oracles.NewtonCG(tolerance=1e-6 * factor)
        linear = dpb.oracles.ConjugateGradient(tolerance=1e-5 * factor)
        ours = by_ours(problem, solver=solver, linear_solver=linear)
        if error_of(jax.jit(ours)(*arguments), exact) <= target:
            break
    return ours, f"default tolerances x {factor}"


def optimistix_at_our_accuracy(problem, arguments, exact, target, repeats):
    """Return the loosest tolerance that reaches it, in float32 and in float64."""
    for tolerance in (1e-5, 1e-7, 1e-9, 1e-11):
        found = jax.jit(peers.by_optimistix(problem, tolerance))(*arguments)
        print(f"optimistix, rtol=atol={tolerance:.0e}: {error_of(found, exact):.1e}")
    with jax.enable_x64(True):
        double = tuple(map(widened, arguments))
        for tolerance in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
            run = peers.by_optimistix(problem, tolerance)
            if error_of(jax.jit(run)(*double), exact) <= target:
                break
        pair = {
            "ours, default": lambda single, double: by_ours(problem)(*single),
            f"optimistix, float64, {tolerance:.0e}": lambda single, double: run(
                *double
            ),
        }
        compare(pair, (arguments, double), exact, repeats=repeats)


def trajectory(problem, x, y, data, steps=50, seconds=180):
    """Hessian products of outer steps: cold, from the last v, extrapolated.

    A step moves no coordinate of x by more than 0.1; none starts after `seconds`.
    """
    hypergradient = functools.partial(dpb.oracles.implicit_hypergradient, problem)

    @jax.jit
    def step(x, y, solutions, data):
        y, _ = dpb.oracles.lower_solve(problem, x, data, y0=y)
        starts = [dpb.oracles.extrapolate(solutions[:k]) for k in range(4)]
        tight = dpb.oracles.ConjugateGradient(num_steps=5000, tolerance=1e-7)
        exact, _ = hypergradient(x, y, data, linear_solver=tight, v0=starts[-1])
        found = [hypergradient(x, y, data, v0=start) for start in starts]
        length = jnp.linalg.norm(exact)
        errors = [jnp.linalg.norm(g - exact) / length for g, _ in found]
        counts = [solution.num_products for _, solution in found]
        return exact, y, found[-1][1].value, counts, errors

    # Zeros where there is no solution yet: one program for all steps.
    solutions = 3 * [jnp.zeros_like(y)]
    counts, errors, step_size, start = [], [], None, time.perf_counter()
    while len(counts) < steps and time.perf_counter() - start < seconds:
        gradient, y, v, count, error = step(x, y, solutions, data)
        solutions = [v, *solutions][:3]
        step_size = step_size or 0.1 / jnp.max(jnp.abs(gradient))
        x = x - step_size * gradient
        counts.append(count)
        errors.append(error)
    total, error = np.sum(counts, 0), np.median(errors, 0)
    print(f"{len(counts)} outer steps: products, of a cold start's, median error")
    names = ("cold start", "last solution", "last two", "last three")
    for name, products, wrong in zip(names, total, error, strict=True):
        print(f"  {name:38s}{products:8d}{products / total[0]:8.2f}{wrong:10.1e}")


def batched(repeats):
    """Print what 64 problems take by vmap, over the time of a loop."""
    problem, data, _, y0 = logistic(512, 30)
    many = jnp.linspace(-8, -1, 64)[:, None] * jnp.ones((1, 30))
    one = by_ours(problem)
    candidates = {
        "loop": lambda x, y0, data: jax.lax.map(lambda x: one(x, y0, data), x),
        "vmap": jax.vmap(one, (0, None, None)),
    }
    rows = clocked(candidates, many, y0, data, reference="loop", repeats=repeats)
    print(f"64 problems: vmap takes {rows['vmap'][1]:.2f} of the time of a loop")


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
        products(problem, at, repeats)
        print("from a cold start")
        whole(problem, cold, exact, max(5, repeats // 5))
        trajectory(problem, *at)
    batched(10)
