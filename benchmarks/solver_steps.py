"""Steps of whole solvers and hypergradients, over what they would cost in public.

Rows are dictionaries from the head of a column to a text, number or None.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from . import workloads
from .timing import ratios


def weighting(n, d):
    """Make source weighting on `n` training and `n / 4` validation records."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, d))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    lower = {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(np.sign(rng.normal(size=n)), jnp.float32),
        "source": jnp.asarray(rng.integers(0, 8, n), jnp.int32),
    }
    upper = {key: lower[key][: n // 4] for key in ("features", "label")}
    return dpb.source_weighting(dpb.logistic_loss, 8), dpb.Levels(upper, lower)


INNER = 10


def row(name, problem, counted, private, public, arguments, seconds):
    """Return a private step beside a public one that it is measured in."""
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
    """Two-level solvers over a plain gradient of the lower level."""
    problem, data = weighting(n, d)
    solvers = {
        "PenaltyBilevel": dpb.PenaltyBilevel(
            1, 10.0, step_size=1.0, inner=dpb.NoisyGD(INNER, 1.0, step_size=1.0)
        ),
        "SingleLoopBilevel": dpb.SingleLoopBilevel(
            1, step_size=1.0, lower_step_size=1.0, linear_step_size=1.0
        ),
    }
    counts = {
        "PenaltyBilevel": f"1 gradient (a step has {2 * INNER} inner steps)",
        "SingleLoopBilevel": "1 gradient",
    }

    start = jnp.zeros(8), jnp.full(d, 0.1)

    def public(state, start, data, key):
        x, y = start

        def mean(y):
            return jnp.mean(jax.vmap(lambda z: problem.lower(x, y, z))(data.lower))

        return y - jax.grad(mean)(y)

    for name, solver in solvers.items():
        solver = solver.with_noise(1.0).with_precision("grid")
        solver = solver.with_sizes(problem.sizes_of(data, "disjoint"))
        yield row(
            name,
            f"weights of 8 sources, n = {n} and {n // 4}, d = {d}",
            counts[name],
            stepped(problem, solver),
            public,
            (solver.init(problem, start), start, data, jax.random.key(0)),
            seconds,
        )


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
    records = workloads.logistic(n, d).records
    solver = dpb.games.NoisyExtragradient(1, 1.0, 0.1).with_noise(1.0)
    solver = solver.with_precision("grid").with_sizes(n)
    start = jnp.full(d, 0.01), jnp.full(d, 0.01)
    state = solver.init(problem, start)

    def operator(x, y, records):
        def mean(x, y):
            return jnp.mean(jax.vmap(lambda z: payoff(x, y, z))(records))

        return jax.grad(mean, (0, 1))(x, y)

    def public(state, start, records, key):
        def moved(at):
            gx, gy = operator(*at, records)
            return start[0] - 0.1 * gx, start[1] + 0.1 * gy

        return moved(moved(start))

    return row(
        "NoisyExtragradient",
        f"shifted features, n = {n}, d = {d}",
        "1 step (2 operators)",
        stepped(problem, solver),
        public,
        (state, start, records, jax.random.key(0)),
        seconds,
    )


def epoch_row(n, batches, widths, seconds):
    """Return an epoch of DP-SGD with Poisson batches over an epoch of plain batches."""
    work = workloads.mlp(n, *widths)
    problem = dpb.FiniteSum(work.loss)
    sampling = dpb.privacy.Poisson(1 / batches)
    solver = dpb.NoisyGD(batches, 1.0, step_size=0.1, sampling=sampling)
    solver = solver.with_noise(1.0).with_precision("grid").with_sizes(n)

    def private(p, records, key):
        return dpb.solve(problem, solver, records, p, key=key).value

    def public(p, records, key):
        batched = jax.tree.map(
            lambda v: v.reshape(batches, n // batches, *v.shape[1:]), records
        )

        def step(p, batch):
            def mean(p):
                return jnp.mean(jax.vmap(lambda z: work.loss(p, z))(batch))

            return jax.tree.map(lambda v, g: v - 0.1 * g, p, jax.grad(mean)(p)), None

        return jax.lax.scan(step, p, batched)[0]

    return row(
        f"NoisyGD, {batches} Poisson batches",
        f"MLP {'-'.join(map(str, widths))}, n = {n}",
        "1 epoch",
        private,
        public,
        (work.parameters, work.records, jax.random.key(0)),
        seconds,
    )


def hypergradient_rows(name, made, seconds):
    """Lower solution and hypergradient from a cold start, by library.

    Args:
        name: Of the problem.
        made: Problem, data, x and start of y, as benchmarks/hypergradient.py makes it.
        seconds: See `ratios`.

    Raises:
        ImportError: JAXopt or optimistix is missing.
    """
    from . import hypergradient, peers

    problem, data, x, y0 = made
    _, exact = hypergradient.reference(problem, x, y0, data)
    candidates = {
        "dpbilevel, NewtonCG": hypergradient.by_ours(problem)
    } | peers.everybody(problem)
    if y0.size > 1000:  # its default forms the Hessian
        del candidates["optimistix LBFGS, default"]
    errors = hypergradient.errors_of(candidates, (x, y0, data), exact)
    first = next(iter(candidates))
    found = ratios(
        {key: candidates[key] for key in errors},
        *(x, y0, data),
        reference=first,
        seconds=seconds,
    )
    rows = []
    for key in candidates:
        time, ratio, build = found.get(key, (None, None, None))
        rows.append(
            {
                "problem": name,
                "by": key,
                "ms": time and 1e3 * time,
                "over dpbilevel": ratio,
                "compile s": build,
                "relative error": f"{errors[key]:.0e}" if key in errors else "raises",
            }
        )
    return rows
