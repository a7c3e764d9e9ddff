"""What `test_shards` runs on several devices; prints its findings as JSON.

Arguments are cases, and `all` for all else that is found; before them a port and the
number of one of two processes of two devices each.
"""

import hashlib
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpbilevel as dpb
from dpbilevel.core.loop import planned_rows
from dpbilevel.privacy.per_example.clipping import Bounded, clipped_mean, unsealed

N, D = 4096, 16
MICROBATCH = 128
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
PLANS = {}
FEWER = 63 * 64  # rows in blocks that eight devices do not divide
REPLACED, ADDED = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE
# Batches of 7 micro-batches, which eight devices fill up.
POISSON, FIXED = dpb.Poisson(rate=0.17), dpb.FixedSize(7 * MICROBATCH)


def logistic(w, record):
    x, t = record
    return jnp.logaddexp(0, -t * (x @ w))


def network(w, record):
    x, t = record
    return jnp.logaddexp(0, -t * jnp.sum(jax.nn.relu(x @ w["in"]) @ w["out"]))


def dropout(w, record, key):
    x, t = record
    return logistic(w, (x * jax.random.bernoulli(key, 0.5, x.shape), t))


@jax.jit
def scaled(x):
    return x * np.linspace(1, 2, D, dtype=np.float32)


def loop(w, record):
    """With calls, a loop, and what they close over."""
    x, t = record
    total = jax.lax.fori_loop(0, 2, lambda _, v: jax.nn.relu(v + scaled(x) @ w), 0.0)
    return jnp.logaddexp(0, -t * total)


BILEVEL = dpb.BilevelProblem(
    upper=lambda x, y, z: logistic(y, z),
    lower=lambda x, y, z: logistic(y, z) + jnp.exp(x[0]) * jnp.sum(y**2) / 2,
)


def collectives(text):
    """The sizes of the arrays that a compiled program sends between devices."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    lines = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [math.prod(map(int, filter(None, s.split(",")))) for s in shapes]


def mean(loss, w, records, sampling=None, precision="grid", neighbours=REPLACED):
    """The clipped mean gradient of all records, or of a batch of them."""
    if sampling is not None:
        records = sampling.draw(records, N, key=jax.random.key(1))
    denominator = float(N) if sampling is None else None
    return clipped_mean(
        lambda z: jax.grad(loss)(w, z),
        records,
        clip_norm=1.0,
        precision=precision,
        microbatch=MICROBATCH,
        denominator=denominator,
        neighbours=neighbours,
    )


def sliced(loss, w, records):
    """Micro-batches of rows that follow each other, whatever device they are on."""

    def add(total, start):
        some = jax.tree.map(
            lambda v: jax.lax.dynamic_slice_in_dim(v, start, MICROBATCH), records
        )
        each = jax.vmap(lambda z: jax.grad(loss)(w, z))(some)
        return total + jnp.sum(each, axis=0), None

    return jax.lax.scan(add, jnp.zeros(D), jnp.arange(0, N, MICROBATCH))[0]


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D)).astype(np.float32)
    w = {"in": rng.normal(size=(D, 8)), "out": rng.normal(size=(8, 2))}
    w = jax.tree.map(lambda v: v.astype(np.float32) / 2, w)
    return (x, np.sign(rng.normal(size=N).astype(np.float32))), w


def solved(problem, solver, records, start, people=None):
    sizes = problem.sizes_of(records, people) if people else N
    name = repr(solver)
    if name not in PLANS:
        PLANS[name] = dpb.calibrate(problem, solver, BUDGET, sizes=sizes).solver
    return dpb.solve(problem, PLANS[name], records, start, key=jax.random.key(3)).value


def hosted(tree):
    return [
        np.asarray(v.addressable_data(0) if isinstance(v, jax.Array) else v)
        for v in jax.tree.leaves(tree)
    ]


def digest(tree):
    joined = b"".join(v.tobytes() for v in hosted(tree))
    return hashlib.sha256(joined).hexdigest()[:12]


def bits(cases, place):
    records, weights = data()
    w, zero = np.full(D, 0.1, np.float32), np.zeros(D, np.float32)
    parts = [jax.tree.map(lambda v, s=s: place(v[s::2]), records) for s in (0, 1)]
    fewer = jax.tree.map(lambda v: place(v[:FEWER]), records)
    records = jax.tree.map(place, records)
    levels, starts = dpb.Levels(*parts), (np.zeros(1, np.float32), zero)

    def read(loss, w, sampling=None, neighbours=REPLACED, rows=records):
        def counts(w):  # with the share of the clip norm that rounding leaves
            return mean(loss, w, rows, sampling, neighbours=neighbours).raw.counts

        # No program may close over records of several processes.
        return (jax.jit(counts) if jax.process_count() == 1 else counts)(w)

    def inside(w, records):
        return mean(logistic, w, records).raw.counts

    def descent(sampling, **fields):
        return dpb.NoisyGD(3, 1.0, 0.5, sampling=sampling, **fields)

    def one(sampling, loss=logistic, **fields):
        problem = dpb.FiniteSum(loss)
        return solved(problem, descent(sampling, **fields), records, zero)

    def two(solver):
        return solved(BILEVEL, solver, levels, starts, "disjoint")

    rates = {"step_size": 0.1, "lower_step_size": 0.1}
    runs = {
        "gradient": lambda: read(logistic, w),
        "inside jit": lambda: jax.jit(inside)(w, records),
        "fewer inside jit": lambda: jax.jit(inside)(w, fewer),
        "fewer": lambda: read(logistic, w, rows=fewer),
        "fewer without jit": lambda: inside(w, fewer),
        "loop": lambda: read(loop, w),
        "network": lambda: read(network, weights),
        "network, any place": lambda: read(network, weights, None, ADDED),
        "network, Poisson": lambda: read(network, weights, POISSON),
        "network, fixed": lambda: read(network, weights, FIXED),
        "full": lambda: one(dpb.FullBatch()),
        "poisson": lambda: one(dpb.Poisson(rate=0.5)),
        "padded": lambda: one(dpb.Poisson(rate=0.5), neighbours=ADDED),
        "dropout": lambda: one(dpb.FullBatch(), dpb.Randomized(dropout)),
        "dropout, Poisson": lambda: one(dpb.Poisson(rate=0.5), dpb.Randomized(dropout)),
        "fixed": lambda: one(dpb.FixedSize(2 * 7 * MICROBATCH)),
        "penalty": lambda: two(
            dpb.PenaltyBilevel(2, 4.0, descent(dpb.FullBatch()), step_size=0.1)
        ),
        "single": lambda: two(dpb.SingleLoopBilevel(2, linear_step_size=0.1, **rates)),
        "f2sa": lambda: two(dpb.bilevel.F2SA(2, 4.0, **rates)),
    }
    return {case: digest(runs[case]()) for case in cases if case in runs}


def moved(place, more):
    """The sizes of the largest array that is sent, and of the sum."""
    records, weights = data()
    # In blocks that eight devices do not divide, and in no blocks.
    fewer, ragged = (
        jax.tree.map(lambda v, n=n: place(v[:n]), records) for n in (FEWER, FEWER - 8)
    )
    records = jax.tree.map(place, records)
    w = np.full(D, 0.1, np.float32)

    def sent(fun, w, records=records):
        text = jax.jit(fun).lower(w, records).compile().as_text()
        return max(collectives(text), default=0), sum(map(np.size, jax.tree.leaves(w)))

    found = {
        "gradient": sent(lambda w, _: mean(logistic, w, records).raw, w),
        "batch": sent(lambda w, _: mean(logistic, w, records, POISSON).raw, w),
        "control": sent(lambda w, r: sliced(logistic, w, r), w),
    }
    if not more:
        return found
    return found | {
        "network": sent(lambda w, _: mean(network, w, records).raw, weights),
        "inside jit": sent(lambda w, r: mean(logistic, w, r).raw, w),
        "fewer": sent(lambda w, r: mean(logistic, w, r).raw, w, fewer),
        "ragged": sent(lambda w, r: mean(logistic, w, r).raw, w, ragged),
        "batch inside jit": sent(lambda w, r: mean(logistic, w, r, POISSON).raw, w),
    }


def batches(place, samplings):
    """Whether rows and mask are those of records on one device, which are copied."""
    records, _ = data()
    key = jax.random.key(1)

    def same(sampling):
        want, got = (
            sampling.draw(jax.tree.map(put, records), N, key=key)
            for put in (jnp.asarray, place)
        )
        size = len(want.records[1])
        mask = np.ones(size, bool) if want.mask is None else want.mask
        rows, padding = (
            [np.asarray(v)[part] for v in (got.mask, *got.records)]
            for part in (slice(size), slice(size, None))
        )
        pairs = zip(rows, (mask, *want.records), strict=True)
        return bool(
            all(np.array_equal(a, b, equal_nan=a.dtype != bool) for a, b in pairs)
            and len(padding[0]) > 0
            and not padding[0].any()
            and all(np.isnan(v).all() for v in padding[1:])
        )

    return list(map(same, samplings))


def floats(place):
    """How far a sum in floating point is from that on one device, in clip norms."""
    records, weights = data()

    def found(put):
        spread = jax.tree.map(put, records)
        read = jax.jit(lambda w: mean(network, w, spread, None, "float").raw)
        return hosted(read(weights))

    pairs = zip(found(jnp.asarray), found(place), strict=True)
    return float(max(np.max(np.abs(a - b)) for a, b in pairs)) * N


def gaps(place):
    """How far a replaced record moves sums of rows with padding, in sensitivities.

    With copies that are broken: the padding counts, or parts are clipped, not records.
    """
    n, rows = 60, 64
    mask = place(np.arange(rows) < n)

    def rows_of(sign):  # the padding repeats the last record
        last = np.eye(1, D, dtype=np.float32) * sign
        return place(np.concatenate([np.zeros((n - 1, D)), *[last] * (rows - n + 1)]))

    @jax.jit  # one program compiles sooner than all of its operations
    def read(records, mask):
        return clipped_mean(
            lambda z: 100 * z,
            records,
            clip_norm=1.0,
            mask=mask,
            denominator=float(n),
            precision="grid",
        )

    @jax.jit
    def parts(records, mask):
        sums = jnp.where(mask[:, None], records, 0).reshape(8, -1, D).sum(1)
        norms = jnp.linalg.norm(sums, axis=1, keepdims=True)
        units = jnp.sum(sums / jnp.maximum(norms, 1), axis=0) * 8
        return Bounded(units / n, 1.0 / n)

    def gap(mean, mask):
        one, other = (mean(rows_of(sign), mask) for sign in (1, -1))
        pair = [np.asarray(unsealed(v), np.float64) for v in (one, other)]
        return float(np.linalg.norm(pair[0] - pair[1])) / float(one.sensitivity())

    return {
        "library": gap(read, mask),
        "padding": gap(read, None),
        "parts": gap(parts, np.arange(rows) < n),
    }


def stds(mesh, place):
    """The standard deviation of the noise over that which is claimed.

    With a copy that is broken: every device draws noise of its own, and they are
    averaged.
    """
    size, mechanism = 4096, dpb.privacy.Gaussian(1.0, precision="grid")
    records = place(np.zeros((8, size), np.float32))
    read = jax.jit(
        lambda v: clipped_mean(lambda z: z, v, clip_norm=1.0, precision="grid")
    )
    bounded = read(records)
    claimed = float(bounded.sensitivity())

    def noisy(key):
        return mechanism.release(bounded, key=key)

    def averaged(key):
        def one():
            own = jax.random.fold_in(key, jax.lax.axis_index("data"))
            noise = claimed * jax.random.normal(own, (size,))
            return jax.lax.pmean(noise, "data")

        return jax.shard_map(
            one, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False
        )()

    key = jax.random.key(0)
    found = {"library": jax.jit(noisy)(key), "averaged": jax.jit(averaged)(key)}
    return {name: float(jnp.std(v)) / claimed for name, v in found.items()}


def parameters(place):
    """The bits of a run with spread parameters."""
    records, _ = data()
    value = solved(
        dpb.FiniteSum(logistic),
        dpb.NoisyGD(3, 1.0, 0.5),
        jax.tree.map(place, records),
        place(np.zeros(D, np.float32)),
    )
    return digest(np.asarray(value))


def steep(record):
    return 1e6 * jnp.sin(1e7 * jnp.vdot(record, jnp.linspace(0.3, 1.7, D)))[None]


def shifts(rows):
    """How far a record of a steep function moves its sum by a move to another row.

    Of so many rows on three devices, a record in each in turn and nothing in others.
    """
    mesh = jax.make_mesh(
        (3,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:3]
    )
    read = jax.jit(
        lambda v: unsealed(
            clipped_mean(steep, v, clip_norm=1.0, denominator=1.0, precision="float")
        )
    )
    records = np.random.default_rng(3).normal(size=(3, D)).astype(np.float32)

    def found(record, row):
        data = np.full((rows, D), np.nan, np.float32)
        data[row] = record
        return float(read(jax.device_put(data, NamedSharding(mesh, P("data"))))[0])

    moved = (np.ptp([found(v, row) for row in range(rows)]) for v in records)
    return float(max(moved))


def plans():
    """Rows that records are padded to: spread over three devices, and in a program."""
    solver = dpb.NoisyGD(1, 1.0, 0.5, neighbours=ADDED)
    solver = solver.with_sizes(120)
    mesh = jax.make_mesh((3,), ("data",), devices=jax.devices()[:3])

    def rows(records):
        return len(planned_rows(solver, records).present)

    data = jax.device_put(np.zeros((99, D)), NamedSharding(mesh, P("data")))
    programs = {
        jax.eval_shape(
            lambda v: planned_rows(solver, v), jnp.zeros((n, D))
        ).present.shape[0]
        for n in range(90, 101)
    }
    return [rows(data), sorted(programs)]


def alone(page, cases, meshes, places):
    """What one process finds besides the bits of spread records."""
    explicit, auto = (places(meshes[name]) for name in ("Explicit", "Auto"))
    if jax.device_count() in (1, 8):
        page["bits"]["none"] = bits(cases, jnp.asarray)
    if jax.device_count() == 8:
        page["moved"] = moved(auto, "all" in cases)
        samplings = (POISSON, FIXED) if "all" in cases else (POISSON,)
        page["batches"] = batches(explicit, samplings)
        if "all" in cases:
            page["floats"] = [floats(explicit), floats(auto)]
        page["gaps"] = gaps(auto)
        page["stds"] = stds(meshes["Auto"], auto)
        shards = auto(data()[0][0]).addressable_shards
        page["plans"] = plans()
        page["shifts"] = {rows: shifts(rows) for rows in (129, 192)}
        page["held"] = [len(shard.data) for shard in shards]
    if "parameters" in cases:
        page["parameters"] = parameters(auto)


def together(page, place):
    """What two processes find about their keys: one by `root_key`, refused others."""
    words = np.asarray(jax.random.key_data(dpb.root_key())).tobytes()
    every = multihost_utils.process_allgather(np.frombuffer(words, np.uint8))
    page["keys"] = len({row.tobytes() for row in every})
    bounded = clipped_mean(
        lambda z: z, place(np.ones(N, np.float32)), clip_norm=1.0, precision="float"
    )
    key = jax.random.key(jax.process_index())
    try:
        dpb.privacy.Gaussian(1.0, precision="float").release(bounded, key=key)
    except ValueError as error:
        page["error"] = str(error)


def main(*cases):
    port = None
    if cases[0].isdigit():
        port, number, *cases = cases
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    meshes = {
        kind.name: jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kind,))
        for kind in (AxisType.Explicit, AxisType.Auto)
    }

    def places(mesh):
        sharding = NamedSharding(mesh, P("data"))
        return lambda v: jax.make_array_from_callback(
            v.shape, sharding, lambda index: v[index]
        )

    page = {"bits": {name: bits(cases, places(mesh)) for name, mesh in meshes.items()}}
    if port is None:
        alone(page, cases, meshes, places)
    else:
        together(page, places(meshes["Auto"]))
    print(json.dumps(page))


if __name__ == "__main__":
    main(*sys.argv[1:])
