"""Rows of the steps of whole solvers, over what they would cost in public."""

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from . import workloads
from .gradients import plain
from .pages import ratios


def weighting(n, d):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, d))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    lower = {"features": features, "label": np.sign(rng.normal(size=n))}
    lower = {name: jnp.asarray(v, jnp.float32) for name, v in lower.items()}
    lower["source"] = jnp.asarray(rng.integers(0, 8, n), jnp.int32)
    upper = {key: lower[key][: n // 4] for key in ("features", "label")}
    return dpb.source_weighting(dpb.logistic_loss, 8), dpb.Levels(upper, lower)


INNER = 10


def row(name, problem, counted, private, public, arguments, seconds):
    candidates = {"step": private, "public": public}
    found = ratios(candidates, *arguments, reference="public", seconds=seconds)
    return {
        "solver": name,
        "problem": problem,
        "measured in": counted,
        "step, ms": 1e3 * found["step"][0],
        "public, ms": 1e3 * found["public"][0],
        "ratio": found["step"][1],
        "compile s": found["step"][2],
        "public, compile s": found["public"][2],
    }


def bilevel_rows(n, d, seconds):
    problem, data = weighting(n, d)
    inner = dpb.NoisyGD(INNER, 1.0, step_size=1.0)
    sizes = {"step_size": 1.0, "lower_step_size": 1.0, "linear_step_size": 1.0}
    start = jnp.zeros(8), jnp.full(d, 0.1)

    def public(state, start, data, key):
        x, y = start
        return y - plain(lambda y, z: problem.lower(x, y, z))(y, data.lower, key)

    text = f"weights of 8 sources, n = {n} and {n // 4}, d = {d}"
    for counted, solver in (
        (
            f"1 gradient (a step has {2 * INNER} inner steps)",
            dpb.PenaltyBilevel(1, 10.0, step_size=1.0, inner=inner),
        ),
        ("1 gradient", dpb.SingleLoopBilevel(1, **sizes)),
    ):
        solver = noisy(solver, problem.sizes_of(data, "disjoint"))
        private = stepped(problem, solver)
        arguments = solver.init(problem, start), start, data, jax.random.key(0)
        name = type(solver).__name__
        yield row(name, text, counted, private, public, arguments, seconds)


def noisy(solver, sizes):
    return solver.with_noise(1.0).with_precision("grid").with_sizes(sizes)


def stepped(problem, solver):
    return lambda state, start, data, key: solver.step(problem, data, state, key=key)


def payoff(x, y, record):
    """Return a logistic loss whose features y shifts, for x at most and y at least."""
    features, label = record
    loss = workloads.logistic_loss(x, (features + y, label))
    return loss - 0.5 * jnp.sum(y**2)


def extragradient_row(n, d, seconds):
    """Both releases of an extragradient step over a public extragradient step."""
    ball = dpb.sets.Ball(1.0)
    problem = dpb.games.SaddleProblem(payoff, x_set=ball, y_set=ball)
    solver = noisy(dpb.games.NoisyExtragradient(1, 1.0, 0.1), n)
    start = jnp.full(d, 0.01), jnp.full(d, 0.01)

    def public(state, start, records, key):
        def moved(at):
            gx, gy = plain(lambda w, z: payoff(*w, z))(at, records, key)
            return start[0] - 0.1 * gx, start[1] + 0.1 * gy

        return moved(moved(start))

    name, text = "NoisyExtragradient", f"shifted features, n = {n}, d = {d}"
    private, records = stepped(problem, solver), workloads.logistic(n, d).records
    arguments = solver.init(problem, start), start, records, jax.random.key(0)
    counted = "1 step (2 operators)"
    return row(name, text, counted, private, public, arguments, seconds)


def epoch_row(n, batches, widths, seconds):
    """Return an epoch of DP-SGD with Poisson batches over an epoch of plain batches."""
    work = workloads.mlp(n, *widths)
    problem, sampling = dpb.FiniteSum(work.loss), dpb.privacy.Poisson(1 / batches)
    solver = dpb.NoisyGD(batches, 1.0, step_size=0.1, sampling=sampling)
    solver = noisy(solver, n)

    def private(p, records, key):
        return dpb.solve(problem, solver, records, p, key=key).value

    def public(p, records, key):
        def step(p, batch):
            gradient = plain(work.loss)(p, batch, key)
            return jax.tree.map(lambda v, g: v - 0.1 * g, p, gradient), None

        shape = batches, n // batches
        batched = jax.tree.map(lambda v: v.reshape(*shape, *v.shape[1:]), records)
        return jax.lax.scan(step, p, batched)[0]

    name, text = (
        f"NoisyGD, {batches} Poisson batches",
        f"MLP {'-'.join(map(str, widths))}, n = {n}",
    )
    arguments = work.parameters, work.records, jax.random.key(0)
    return row(name, text, "1 epoch", private, public, arguments, seconds)
