"""Clipped gradients: rows of their time and memory over those of a plain gradient."""

import functools
import timeit

import jax
import jax.numpy as jnp

import dpbilevel as dpb
from dpbilevel.privacy.per_example import clipping

from . import private_peers
from .pages import memory, ratios

PLAIN, GRID = "plain", "grid"
OURS = (GRID, "grid, no noise", "float", "add or remove")
MIB = 2**20


def plain(loss):
    def run(p, records, key):
        def mean(p):
            return jnp.mean(jax.vmap(lambda record: loss(p, record))(records))

        return jax.grad(mean)(p)

    return run


REPLACE_ONE = dpb.privacy.Neighbours.REPLACE_ONE


def released(loss, precision, neighbours=REPLACE_ONE, *, noise=True):
    """Return the clipped mean of the gradients; NON-PRIVATE without noise."""

    def run(p, records, key):
        size = len(jax.tree.leaves(records)[0])
        settings = {"clip_norm": 1.0, "denominator": size, "precision": precision}
        if neighbours is not REPLACE_ONE:
            key, settings["key"] = jax.random.split(key)
        bounded = dpb.privacy.clipped_mean(
            lambda record: jax.grad(loss)(p, record),
            records,
            neighbours=neighbours,
            **settings,
        )
        if not noise:
            return clipping.unsealed(bounded)
        mechanism = dpb.privacy.Gaussian(1.0, neighbours, precision)
        return mechanism.release(bounded, key=key)

    return run


def memory_limit():
    return 2e9 if jax.default_backend() == "cpu" else 2e10


def candidates(work):
    loss, n = work.loss, work.size
    one_more = dpb.privacy.Neighbours.ADD_OR_REMOVE_ONE
    found = {
        PLAIN: plain(loss),
        GRID: released(loss, "grid"),
        "grid, no noise": released(loss, "grid", noise=False),
        "float": released(loss, "float"),
        "add or remove": released(loss, "grid", one_more),
    }
    fits = work.formed < memory_limit()
    if fits:
        found["vmap, then clip"] = private_peers.vmap_then_clip(loss)
        found["optax"] = private_peers.by_optax(loss)
    if private_peers.has_jax_privacy():
        rows = next(rows for rows in range(256, 0, -1) if n % rows == 0)
        found[f"jax_privacy {rows}"] = private_peers.by_jax_privacy(loss, rows)
        if fits:
            found["jax_privacy"] = private_peers.by_jax_privacy(loss, None)
    return found


@functools.cache
def hardware():
    """Bytes read and floating-point operations done in a second, as measured here."""
    size, side = (2**26, 1024) if jax.default_backend() == "cpu" else (2**29, 8192)
    vector, matrix = jnp.ones(size), jnp.ones((side, side))
    read, product = best(jnp.sum, vector), best(jnp.matmul, matrix, matrix)
    return vector.nbytes / read, 2 * side**3 / product


def best(fun, *arguments):
    compiled = jax.jit(fun)

    def run():
        jax.block_until_ready(compiled(*arguments))

    return min(timeit.repeat(run, repeat=31, number=1))


def least_time(work):
    """Return the least time of reading the records, or of the plain gradient."""
    bandwidth, rate = hardware()
    lowered = jax.jit(plain(work.loss)).lower(*arguments(work))
    # A GPU knows the cost of compiled programs only.
    cost = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return max(work.read / bandwidth, cost["flops"] / rate)


def arguments(work):
    return work.parameters, work.records, jax.random.key(0)


def gradient_row(work, seconds):
    found = ratios(candidates(work), *arguments(work), reference=PLAIN, seconds=seconds)
    ratio = {name: measured[1] for name, measured in found.items()}
    theirs = {name: ratio.get(name) for name in ("vmap, then clip", "optax")}
    jax_privacy = [r for name, r in ratio.items() if name.startswith("jax_privacy")]
    theirs["jax_privacy"] = min(jax_privacy, default=None)
    times = {name: found[name] for name in (PLAIN, GRID)}
    least = least_time(work)
    return {
        "slower than": ahead(theirs, ratio[GRID]),
        "task": work.name,
        "plain, ms": 1e3 * found[PLAIN][0],
        **{name: ratio[name] for name in OURS},
        **theirs,
        **{f"{n}, M records/s": work.size / t[0] / 1e6 for n, t in times.items()},
        **{f"{n}, compile s": t[2] for n, t in times.items()},
        **{f"{n}, % of hardware": 100 * least / t[0] for n, t in times.items()},
    }


def ahead(theirs, ours):
    """Return the names of those that are faster, the fastest first."""
    faster = {name: t for name, t in theirs.items() if t is not None and t < ours}
    return ", ".join(sorted(faster, key=faster.get))


def losses_first(rows):
    return sorted(rows, key=lambda row: not row["slower than"])


def torch_table(works, rows, seconds):
    pairs = [(w, row) for w, row in zip(works, rows, strict=True) if w.layers]
    shapes = [(work.layers, work.size) for work, _ in pairs]
    measured = private_peers.torch_times(shapes, seconds)
    if measured is None:
        return []
    table = []
    for (work, row), times in zip(pairs, measured, strict=True):
        rate = {name: work.size / t / 1e6 for name, (t, _) in times.items()}
        slower = ahead(
            {f"Opacus, {name}": 1 / r for name, r in rate.items() if name != "plain"},
            1 / row["grid, M records/s"],
        )
        shown = {
            "slower than": slower,
            "task": work.name,
            "JAX, plain, M records/s": row["plain, M records/s"],
            "grid, M records/s": row["grid, M records/s"],
            "grid, ratio": row["grid"],
            "PyTorch, plain, M records/s": rate["plain"],
            "Opacus per-sample, M records/s": rate.get("per-sample"),
            "ratio": times.get("per-sample", (None, None))[1],
            "Opacus ghost, M records/s": rate["ghost"],
            "ghost ratio": times["ghost"][1],
        }
        table.append(shown)
    return table


def memory_row(work):
    functions = {n: released(work.loss, n) for n in (GRID, "float")}
    functions[PLAIN] = plain(work.loss)
    taken = {n: memory(run, *arguments(work)) for n, run in functions.items()}
    return {
        "task": work.name,
        "parameters": work.dimension,
        "records, MiB": work.read / MIB,
        "all gradients formed, MiB": work.formed / MIB,
        "plain, MiB": taken[PLAIN] / MIB,
        "grid, MiB": taken[GRID] / MIB,
        "grid": taken[GRID] / taken[PLAIN],
        "float": taken["float"] / taken[PLAIN],
    }
