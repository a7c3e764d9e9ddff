"""Time and memory beside plain gradients and other libraries: results/performance.md.

`--quick` prints small tables, and does not write the page. On a GPU the page is
performance_gpu.md; where PyTorch shares it set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import dataclasses
import os
import pathlib
import platform
import re
import sys
import tomllib
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from . import gradients, pages, workloads
from .source_tasks import parts

PAGE = pages.RESULTS / "performance.md"
FILE = pages.ROOT / "benchmarks/performance.toml"
INNER = 10  # steps of the lower level
PEERS = ("optax", "jax-privacy", "torch", "opacus", "jaxopt", "optimistix")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows with a heading and a paragraph on how to read them."""

    title: str
    text: str
    rows: list[dict]

    def __str__(self):
        if not self.rows:
            return f"## {self.title}\n\nNot measured: {self.text}"
        head = list(self.rows[0])
        lines = [[cell(row[name]) for name in head] for row in self.rows]
        return f"## {self.title}\n\n{self.text}\n\n{pages.table(head, lines)}"


def cell(value):
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def weighting(n, d):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, d))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    records = features.astype("f4"), np.sign(rng.normal(size=n)).astype("f4")
    upper, lower = parts(*records, (slice(n // 4), slice(n)))
    lower["source"] = jnp.asarray(rng.integers(0, 8, n), jnp.int32)
    return dpb.source_weighting(dpb.logistic_loss, 8), dpb.Levels(upper, lower)


def row(name, problem, counted, private, public, arguments, seconds):
    candidates = {"step": private, "public": public}
    found = pages.ratios(candidates, *arguments, reference="public", seconds=seconds)
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
        gradient = gradients.plain(lambda y, z: problem.lower(x, y, z))
        return y - gradient(y, data.lower, key)

    text = f"weights of 8 sources, n = {n} and {n // 4}, d = {d}"
    inner_steps = f"1 gradient (a step has {2 * INNER} inner steps)"
    penalty = dpb.PenaltyBilevel(1, 10.0, step_size=1.0, inner=inner)
    single_loop = dpb.SingleLoopBilevel(1, **sizes)
    for counted, solver in ((inner_steps, penalty), ("1 gradient", single_loop)):
        solver = noisy(solver, problem.sizes_of(data, "disjoint"))
        yield step_row(text, counted, problem, solver, public, (start, data), seconds)


def step_row(text, counted, problem, solver, public, arguments, seconds):
    def private(state, start, data, key):
        return solver.step(problem, data, state, key=key)

    arguments = solver.init(problem, arguments[0]), *arguments, jax.random.key(0)
    name = type(solver).__name__
    return row(name, text, counted, private, public, arguments, seconds)


def noisy(solver, sizes):
    return solver.with_noise(1.0).with_precision("grid").with_sizes(sizes)


def payoff(x, y, record):
    features, label = record
    loss = workloads.logistic_loss(x, (features + y, label))
    return loss - 0.5 * jnp.sum(y**2)


def extragradient_row(n, d, seconds):
    ball = dpb.sets.Ball(1.0)
    problem = dpb.games.SaddleProblem(payoff, x_set=ball, y_set=ball)
    solver = noisy(dpb.games.NoisyExtragradient(1, 1.0, 0.1), n)
    start = jnp.full(d, 0.01), jnp.full(d, 0.01)

    def public(state, start, records, key):
        def moved(at):
            gx, gy = gradients.plain(lambda w, z: payoff(*w, z))(at, records, key)
            return start[0] - 0.1 * gx, start[1] + 0.1 * gy

        return moved(moved(start))

    text, counted = f"shifted features, n = {n}, d = {d}", "1 step (2 operators)"
    arguments = start, workloads.logistic(n, d).records
    return step_row(text, counted, problem, solver, public, arguments, seconds)


def epoch_row(n, batches, widths, seconds):
    work = workloads.mlp(n, *widths)
    problem, sampling = dpb.FiniteSum(work.loss), dpb.privacy.Poisson(1 / batches)
    solver = dpb.NoisyGD(batches, 1.0, step_size=0.1, sampling=sampling)
    solver = noisy(solver, n)

    def private(p, records, key):
        return dpb.solve(problem, solver, records, p, key=key).value

    def public(p, records, key):
        def step(p, batch):
            gradient = gradients.plain(work.loss)(p, batch, key)
            return jax.tree.map(lambda v, g: v - 0.1 * g, p, gradient), None

        shape = batches, n // batches
        batched = jax.tree.map(lambda v: v.reshape(*shape, *v.shape[1:]), records)
        return jax.lax.scan(step, p, batched)[0]

    name = f"NoisyGD, {batches} Poisson batches"
    text = f"MLP {'-'.join(map(str, widths))}, n = {n}"
    arguments = work.parameters, work.records, jax.random.key(0)
    return row(name, text, "1 epoch", private, public, arguments, seconds)


def gradient_rows(sizes):
    """Return the workloads without their records, and the row of each."""
    works, rows = [], []
    for name in sizes["gradients"]:
        work = workloads.named(name)
        rows.append(gradients.gradient_row(work, sizes["seconds"]))
        # Without their records, which would fill the memory of all later rows.
        works.append(dataclasses.replace(work, records=(None, range(work.size))))
        print("|", *(f"{cell(v)} |" for v in rows[-1].values()), flush=True)
    return works, rows


def tables(sizes):
    texts = tomllib.loads(FILE.read_text())["texts"]
    works, rows = gradient_rows(sizes)
    bandwidth, rate = (value / 1e9 for value in gradients.hardware())
    facts = {"memory": gradients.memory_limit() / 1e9, "rate": rate}
    text = texts["gradients"].format(bandwidth=bandwidth, **facts)
    yield Table("Clipped gradients", text, gradients.losses_first(rows))
    peers = gradients.torch_table(works, rows, sizes["seconds"])
    text = texts["peers" if peers else "no peers"]
    yield Table("Beside PyTorch", text, gradients.losses_first(peers))
    rows = [gradients.memory_row(workloads.named(name)) for name in sizes["memory"]]
    yield Table("Memory", texts["memory"], rows)
    rows = [*bilevel_rows(*sizes["bilevel"], sizes["seconds"])]
    rows.append(extragradient_row(*sizes["saddle"], sizes["seconds"]))
    rows.append(epoch_row(*sizes["epoch"], sizes["seconds"]))
    yield Table("Solvers", texts["solvers"], rows)


def machine():
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        info = pathlib.Path("/proc/cpuinfo")
        models = info.read_text() if info.is_file() else ""
        named = re.search(r"^model name\s*: (.+)$", models, re.MULTILINE)
        kind = named[1] if named else platform.processor()
    versions = [f"JAX {jax.__version__}", f"Python {platform.python_version()}"]
    for name in PEERS:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"{kind}, {os.cpu_count()} cores, backend {jax.default_backend()}; load "
        f"average at the start {load:.1f}. {', '.join(versions)}."
    )


def main():
    quick = "--quick" in sys.argv
    on_cpu = jax.default_backend() == "cpu"
    page = PAGE if on_cpu else PAGE.with_name("performance_gpu.md")
    parts = [machine()]
    print(parts[0], flush=True)
    sizes = tomllib.loads(FILE.read_text())
    for table in tables(sizes["quick" if quick else "full" if on_cpu else "gpu"]):
        parts.append(str(table))
        print(f"\n{table}", flush=True)
    if not quick:
        pages.write(page, parts)
