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

from . import gradients, pages, private_peers, solver_steps, workloads

PAGE = pages.RESULTS / "performance.md"
SIZES = pages.ROOT / "benchmarks/performance.toml"
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


def gradient_tables(sizes):
    works, rows = [], []
    for name in sizes["gradients"]:
        work = workloads.named(name)
        rows.append(gradients.gradient_row(work, sizes["seconds"]))
        # Without their records, which would fill the memory of all later rows.
        works.append(dataclasses.replace(work, records=(None, range(work.size))))
        print("|", *(f"{cell(v)} |" for v in rows[-1].values()), flush=True)
    bandwidth, rate = gradients.hardware()
    yield Table(
        "Clipped gradients",
        "Clipped, summed and released with noise, over the plain gradient of the mean "
        "loss. `grid` and `float` are the precisions of `clipped_mean` under "
        "replace-one, `add or remove` is `grid` under the other relation. Rows where "
        "another library is faster than `grid` stand first, with its name. "
        f"Left out (-): a library that is not installed, or more than "
        f"{gradients.memory_limit() / 1e9:.0f} GB of per-record gradients. `% of "
        f"hardware` compares with reading the records once at {bandwidth / 1e9:.1f} "
        f"GB/s or the plain gradient's operations at {rate / 1e9:.0f} GFLOP/s, what "
        "takes longer; a long sum and a matrix product are that fast here.",
        gradients.losses_first(rows),
    )
    peers = gradients.torch_table(works, rows, sizes["seconds"])
    yield Table(
        "Beside PyTorch",
        "Opacus and PyTorch on the same shapes, in a process of their own: a private "
        "step (per-sample gradients, or ghost clipping) over PyTorch's plain gradient."
        if peers
        else "PyTorch or Opacus is not installed.",
        gradients.losses_first(peers),
    )


def memory_table(sizes):
    return Table(
        "Memory",
        "Temporary memory and results of the compiled step, by the compiler's account, "
        "without the records; `grid` and `float` over plain.",
        [gradients.memory_row(workloads.named(name)) for name in sizes["memory"]],
    )


def microbatch_table(sizes):
    works = map(workloads.named, sizes["microbatches"])
    measured = sizes["budgets"], sizes["seconds"]
    return Table(
        "Micro-batches",
        "`grid` over plain, by what a micro-batch may occupy; in brackets how many "
        "records it held. `all`: taken all at once, whatever the budget.",
        [gradients.microbatch_row(work, *measured) for work in works],
    )


def solver_table(sizes):
    rows = []
    if sizes["bilevel"]:
        rows += solver_steps.bilevel_rows(*sizes["bilevel"], sizes["seconds"])
    rows += [
        solver_steps.extragradient_row(*sizes["saddle"], sizes["seconds"]),
        solver_steps.epoch_row(*sizes["epoch"], sizes["seconds"]),
    ]
    return Table(
        "Solvers",
        "A step in precision `grid`, noise and projections included, over a public one "
        "of the same problem.",
        rows,
    )


def tables(sizes):
    yield from gradient_tables(sizes)
    for table in (memory_table, microbatch_table, solver_table):
        yield table(sizes)


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
    if not private_peers.has_jax_privacy():
        parts.append("jax_privacy is not installed; its column is empty.")
        print(parts[-1])
    sizes = tomllib.loads(SIZES.read_text())
    for table in tables(sizes["quick" if quick else "full" if on_cpu else "gpu"]):
        parts.append(str(table))
        print(f"\n{table}", flush=True)
    if not quick:
        pages.write(page, parts)
