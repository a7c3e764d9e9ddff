"""Hypergradients against JAXopt and optimistix: time, compile time and error.

Run by `python -m benchmarks hypergradient` on one core; needs the `test` extra. Data
are arguments, candidates are timed in turns in one process, and every time has an error
beside it: relative to a float64 hypergradient by a factored Hessian.
"""

import functools
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.oracles.objectives import lower_objective, upper_objective

from .timing import ratios

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import jaxopt

STEPS = 20


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


def cleaning(n, d, classes, features=None, label=None):
    """Hyper-cleaning: x weighs every training record of a softmax regression."""
    rng = np.random.default_rng(0)
    if features is None:
        features = np.abs(rng.normal(size=(n, d))) * np.exp(-3 * rng.uniform(size=d))
        logits = features @ rng.normal(size=(d, classes))
        label = np.argmax(logits + rng.gumbel(size=(n, classes)), 1)
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


def digits():
    from sklearn.datasets import load_digits

    images = load_digits()
    return cleaning(898, 64, 10, images.data[:898] / 16, images.target[:898])


def widened(tree):
    """The same numbers in float64; other leaves as they are."""
    return jax.tree.map(
        lambda v: v.astype(jnp.float64) if v.dtype == jnp.float32 else v, tree
    )


def reference(problem, x, y0, data):
    """The float64 solution and hypergradient; dense where the Hessian is small."""
    with jax.enable_x64(True):
        x, y0, data = map(widened, (x, y0, data))
        dense = y0.size <= 1000
        solver = (
            dpb.Cholesky()
            if dense
            else dpb.ConjugateGradient(num_steps=5000, tolerance=1e-13)
        )

        @jax.jit
        def run(x, y0, data):
            newton = dpb.NewtonCG(tolerance=1e-11, cg_steps=2000)
            y, info = dpb.lower_solve(problem, x, data, solver=newton, y0=y0)
            gradient, v = dpb.implicit_hypergradient(
                problem, x, y, data, linear_solver=solver
            )
            return y, gradient, info.gradient_norm, v.residual_norm

        y, gradient, *_ = run(x, y0, data)
        return np.asarray(y, np.float32), np.asarray(gradient)


def peer_objectives(problem):
    def lower(y, x, data):
        return mean_loss(problem.lower, problem.lower_public, x, y, data.lower)

    def upper(y, x, data):
        return mean_loss(problem.upper, problem.upper_public, x, y, data.upper)

    return lower, upper


def mean_loss(loss, public, x, y, rows):
    mean = jnp.mean(jax.vmap(lambda row: loss(x, y, row))(rows))
    return mean if public is None else mean + public(x, y)


def jaxopt_at(problem, solve):
    """JAXopt's hypergradient at a given lower solution."""
    lower, upper = peer_objectives(problem)
    keywords = {} if solve is None else {"solve": solve}
    root = jaxopt.implicit_diff.custom_root(jax.grad(lower), **keywords)
    solution = root(lambda y, x, data: y)

    def run(x, y, data):
        return jax.grad(lambda x: upper(solution(y, x, data), x, data))(x)

    return run


def ours_at(problem, linear_solver):
    def run(x, y, data):
        return dpb.implicit_hypergradient(
            problem, x, y, data, linear_solver=linear_solver
        )[0]

    return run


def report(rows, candidates, arguments, exact):
    print(f"{'':40s}{'ms':>10s}{'ratio':>8s}{'compile s':>11s}{'error':>10s}")
    for name, (seconds, ratio, build) in rows.items():
        found = np.asarray(jax.jit(candidates[name])(*arguments), np.float64)
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        print(
            f"{name:40s}{1e3 * seconds:10.3f}{ratio:8.2f}{build:11.2f}{error:10.1e}",
            flush=True,
        )


def at_a_solution(problem, x, y, data, exact, repeats):
    """Equal counts of conjugate gradient steps, and the defaults."""
    fixed = functools.partial(jaxopt.linear_solve.solve_cg, maxiter=STEPS, tol=0.0)
    candidates = {
        f"JAXopt custom_root, solve_cg, {STEPS} steps": jaxopt_at(problem, fixed),
        f"ours, {STEPS} steps": ours_at(
            problem, dpb.ConjugateGradient(num_steps=STEPS, tolerance=None)
        ),
        "JAXopt custom_root, default": jaxopt_at(problem, None),
        "ours, default": ours_at(problem, dpb.ConjugateGradient()),
    }
    first = next(iter(candidates))
    rows = ratios(candidates, x, y, data, reference=first, repeats=repeats)
    report(rows, candidates, (x, y, data), exact)


def products(problem, x, y, data, repeats):
    """A Hessian product next to a plain gradient, both of the mean loss."""

    def gradient(x, y, data):
        rows = data.lower
        return jax.grad(
            lambda y: mean_loss(problem.lower, problem.lower_public, x, y, rows)
        )(y)

    def product(count):
        def run(x, y, data):
            linear = lower_objective(problem, data).linearized(x, y)[-1]
            return jax.lax.fori_loop(0, count, lambda _, v: v + 1e-3 * linear(v), y)

        return run

    def in_pieces(x, y, data):
        return lower_objective(problem, data).gradient(x, y)

    candidates = {
        "gradient": gradient,
        "in pieces": in_pieces,
        "one": product(1),
        "eleven": product(11),
    }
    rows = ratios(candidates, x, y, data, reference="gradient", repeats=repeats)
    cost = (rows["eleven"][0] - rows["one"][0]) / 10
    print(
        f"a Hessian product costs {cost / rows['gradient'][0]:.2f} plain gradients, "
        f"{cost / rows['in pieces'][0]:.2f} of our own"
    )


def whole(problem, x, y0, data, exact, repeats):
    """Inner solve and implicit gradient from a cold start, everybody's defaults."""
    import lineax
    import optimistix

    lower, upper = peer_objectives(problem)

    def through(solve):
        def run(x, y0, data):
            return jax.grad(lambda x: upper(solve(x, y0, data), x, data))(x)

        return run

    def by_jaxopt(x, y0, data, **settings):
        solver = jaxopt.LBFGS(lower, maxiter=500, tol=1e-6, **settings)
        return solver.run(y0, x, data).params

    def by_optimistix(x, y0, data, **settings):
        with jax.numpy_dtype_promotion("standard"):
            return optimistix.minimise(
                lambda y, args: lower(y, *args),
                optimistix.LBFGS(1e-7, 1e-7),
                y0,
                (x, data),
                max_steps=2000,
                **settings,
            ).value

    by_cg = {
        "adjoint": optimistix.ImplicitAdjoint(lineax.CG(1e-5, 1e-5)),
        "tags": frozenset({lineax.positive_semidefinite_tag}),
    }
    candidates = {
        "ours, default (NewtonCG)": through(
            lambda x, y0, data: dpb.lower_solution(problem, x, data, y0=y0)
        ),
        "ours, LBFGS": through(
            lambda x, y0, data: dpb.lower_solution(
                problem, x, data, y0=y0, solver=dpb.LBFGS()
            )
        ),
        "JAXopt LBFGS, default": through(by_jaxopt),
        "JAXopt LBFGS, solve_cg": through(
            functools.partial(
                by_jaxopt, implicit_diff_solve=jaxopt.linear_solve.solve_cg
            )
        ),
        "optimistix LBFGS, default": through(by_optimistix),
        "optimistix LBFGS, lineax.CG": through(
            functools.partial(by_optimistix, **by_cg)
        ),
    }
    if y0.size > 1000:  # its default forms the Hessian
        del candidates["optimistix LBFGS, default"]
    for name, candidate in list(candidates.items()):
        try:
            jax.block_until_ready(jax.jit(candidate)(x, y0, data))
        except jax.errors.JaxRuntimeError:  # optimistix raises what it cannot solve
            print(f"{name}: raises")
            del candidates[name]
    jax.clear_caches()
    first = next(iter(candidates))
    rows = ratios(candidates, x, y0, data, reference=first, repeats=repeats)
    report(rows, candidates, (x, y0, data), exact)


def trajectory(problem, x, y, data, steps=50):
    """Hessian products of outer steps: cold, from the last v, from a guess of the next.

    A step moves no coordinate of x by more than 0.1.
    """
    hypergradient = functools.partial(dpb.implicit_hypergradient, problem)

    @jax.jit
    def step(x, y, before, last, data):
        y, _ = dpb.lower_solve(problem, x, data, y0=y)
        tight = dpb.ConjugateGradient(num_steps=5000, tolerance=1e-7)
        exact, _ = hypergradient(x, y, data, linear_solver=tight, v0=last)
        # v moves along a line for a while: the next is guessed from the last two.
        starts = (None, last, 2 * last - before)
        found = [hypergradient(x, y, data, v0=start) for start in starts]
        errors = [jnp.linalg.norm(g - exact) / jnp.linalg.norm(exact) for g, _ in found]
        counts = [solution.num_products for _, solution in found]
        return exact, y, found[2][1].value, counts, errors

    before = last = jnp.zeros_like(y)
    counts, errors, step_size = [], [], None
    for _ in range(steps):
        gradient, y, v, count, error = step(x, y, before, last, data)
        before, last = (v, v) if step_size is None else (last, v)
        step_size = step_size or 0.1 / jnp.max(jnp.abs(gradient))
        x = x - step_size * gradient
        counts.append(count)
        errors.append(error)
    total, error = np.sum(counts, 0), np.median(errors, 0)
    print(f"{steps} outer steps: Hessian products, of a cold start, median error")
    names = ("cold start", "v0 = last v", "v0 = 2 last v - the one before")
    for name, products, wrong in zip(names, total, error, strict=True):
        print(f"  {name:38s}{products:8d}{products / total[0]:8.2f}{wrong:10.1e}")


def batched(repeats):
    """64 problems by vmap and in a loop."""
    problem, data, _, y0 = logistic(512, 30)
    many = jnp.linspace(-8, -1, 64)[:, None] * jnp.ones((1, 30))

    def one(x, y0, data):
        def objective(x):
            y = dpb.lower_solution(problem, x, data, y0=y0)
            return upper_objective(problem, data).value(x, y)

        return jax.grad(objective)(x)

    candidates = {
        "loop": lambda x, y0, data: jax.lax.map(lambda x: one(x, y0, data), x),
        "vmap": lambda x, y0, data: jax.vmap(lambda x: one(x, y0, data))(x),
    }
    rows = ratios(candidates, many, y0, data, reference="loop", repeats=repeats)
    print(f"64 problems: vmap takes {rows['vmap'][1]:.2f} of the time of a loop")


def main(names=("logistic", "digits", "softmax")):
    cases = {
        "logistic regression, n = 100 000, d = 128": (
            lambda: logistic(100_000, 128),
            7,
        ),
        "digits softmax, p = 640": (digits, 50),
        "softmax, p = 7840": (lambda: cleaning(5000, 784, 10), 7),
    }
    for name, (make, repeats) in cases.items():
        if not name.startswith(tuple(names)):
            continue
        start = time.perf_counter()
        problem, data, x, y0 = make()
        y, exact = reference(problem, x, y0, data)
        y = jnp.asarray(y)
        print(f"\n{name} (prepared in {time.perf_counter() - start:.0f} s)")
        at_a_solution(problem, x, y, data, exact, repeats)
        products(problem, x, y, data, repeats)
        print("from a cold start")
        whole(problem, x, y0, data, exact, max(3, repeats // 5))
        trajectory(problem, x, y, data)
    batched(10)
