"""Passes over records on disk: their time beside reading the files, and memory.

`python -m benchmarks out_of_core [--records=N]`: files of NumPy and, where pyarrow is
installed, Parquet, in a folder of $TMPDIR. `--task=NumPy` takes one kind of files,
`--batch=B` times the clipped mean of a sampled batch beside a pass, and nothing else.
"""

import importlib.util
import itertools
import multiprocessing
import os
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from . import pages

FILES, PIECE, BLOCK = 4, 2**16, 2**15  # files; rows written and read at once
MEMORY = 2**20  # records of a pass in memory, to compare with
REPEATS, STEPS, WIDTH = 4, 2, 100
NAMES = [f"x{j}" for j in range(WIDTH)]  # of the features


def pieces(count, seed):
    rng = np.random.default_rng(seed)
    for first in range(0, count, PIECE):
        rows = min(PIECE, count - first)
        features = rng.standard_normal((rows, WIDTH), np.float32)
        yield features, np.sign(features[:, 0] + rng.standard_normal(rows, np.float32))


def write_arrays(folder, count):
    shapes, first = {"features.npy": (count, WIDTH), "label.npy": (count,)}, 0
    arrays = [
        np.lib.format.open_memmap(folder / name, "w+", np.float32, shape)
        for name, shape in shapes.items()
    ]
    for parts in pieces(count, 0):
        for part, array in zip(parts, arrays, strict=True):
            array[first : first + len(part)] = part
        first += len(parts[0])
    return [folder / name for name in shapes]


def read_arrays(paths):
    buffer = memoryview(bytearray(4 * WIDTH * BLOCK))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def arrays(paths):
    features, label = (np.load(path, mmap_mode="r") for path in paths)
    return dpb.OnDisk.arrays({"features": features, "label": label})


def write_parquet(folder, count):
    import pyarrow
    from pyarrow import parquet

    paths = []
    for i in range(FILES):
        paths.append(folder / f"{i}.parquet")
        rows = count // FILES + (i < count % FILES)
        columns = [(name, pyarrow.float32()) for name in [*NAMES, "label"]]
        schema = pyarrow.schema(columns)
        with parquet.ParquetWriter(paths[-1], schema, use_dictionary=False) as out:
            for features, label in pieces(rows, i):
                values = [np.ascontiguousarray(v) for v in (*features.T, label)]
                out.write_table(pyarrow.table(values, schema=schema))
    return paths


def read_parquet(paths):
    from pyarrow import parquet

    table = np.empty((BLOCK, WIDTH + 1), np.float32, order="F")
    for path in paths:
        with parquet.ParquetFile(path, buffer_size=2**18) as file:
            for batch in file.iter_batches(BLOCK):
                for j, column in enumerate(batch.columns):
                    table[: len(batch), j] = column.to_numpy()


def parquet(paths):
    return dpb.OnDisk.parquet(paths, {"features": NAMES, "label": "label"})


def forget(paths):
    """Drop files from the system's cache, where it can be asked to."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(fun):
    begin = np.asarray([time.perf_counter(), time.process_time()])
    fun()
    return [time.perf_counter(), time.process_time()] - begin


def elsewhere(fun, *arguments):
    """Call a function in another process, whose memory is not counted here."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(fun, arguments)


def peak():
    """Return the most memory that this process had, in GiB; unknown but on Linux."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    sizes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return sizes[0] / 2**20 if sizes else float("nan")


def clipped(w, records):
    def gradient(record):
        return jax.grad(dpb.logistic_loss)(w, record)

    return dpb.privacy.clipped_mean(gradient, records, clip_norm=1.0, precision="grid")


def gradients(records):
    mean, w = jax.jit(clipped), jnp.zeros(WIDTH)
    mean(w, records)
    return lambda: jax.block_until_ready(mean(w, records))


def batches(records, size):
    count, w, root = records.rows, jnp.zeros(WIDTH), dpb.root_key()
    numbers = itertools.count()

    def timed(sampling):
        @jax.jit
        def mean(w, number, records):
            key = jax.random.fold_in(root, number)
            batch = sampling.draw(records, count, key=key, index=number)
            return clipped(w, batch)

        mean(w, next(numbers), records)
        return lambda: jax.block_until_ready(mean(w, next(numbers), records))

    kinds = dpb.Poisson(size / count), dpb.FixedSize(size), dpb.privacy.SinglePass(size)
    return {f"a batch, {type(kind).__name__}": timed(kind) for kind in kinds}


def descent(records):
    solver = dpb.NoisyGD(STEPS, clip_norm=1.0, step_size=0.5, sizes=records.rows)
    problem, key = dpb.FiniteSum(dpb.logistic_loss), dpb.root_key()
    run = jax.jit(dpb.solve)
    args = problem, solver.with_noise(1e3), records, jnp.zeros(WIDTH)
    run(*args, key=key)
    return lambda: jax.block_until_ready(run(*args, key=key).value)


def in_turns(calls, repeats, before=lambda: None):
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            before()
            times[name].append(seconds(call))
    return {name: np.min(both, axis=0) for name, both in times.items()}


def timed_on_disk(kind, paths, batch):
    _, read, opened = KINDS[kind]
    records = opened(paths)
    calls = {"a pass": gradients(records)}
    if batch:
        times = in_turns(calls | batches(records, batch), REPEATS)
        return times, peak()
    calls[f"a run of {STEPS} steps"] = descent(records)
    times = in_turns(calls, REPEATS)
    most = peak()
    calls = {"reading": lambda: read(paths), "a pass": calls["a pass"]}
    again = in_turns(calls, REPEATS)
    times["a pass"] = np.minimum(times["a pass"], again["a pass"])
    times["reading"] = again["reading"]
    if hasattr(os, "posix_fadvise"):
        cold = in_turns(calls, REPEATS // 2, lambda: forget(paths))
        times |= {f"{name}, cold": both for name, both in cold.items()}
    return times, most


def timed_in_memory():
    features, label = map(np.concatenate, zip(*pieces(MEMORY, 0), strict=True))
    memory = {"features": jnp.asarray(features), "label": jnp.asarray(label)}
    return in_turns({"pass": gradients(memory)}, REPEATS)["pass"]


def measure(kind, folder, count, batch):
    paths = elsewhere(KINDS[kind][0], folder, count)
    size = sum(os.path.getsize(path) for path in paths) / 2**30
    times, most = elsewhere(timed_on_disk, kind, paths, batch)
    if not batch:
        in_memory = elsewhere(timed_in_memory)
        times["a pass in memory, extrapolated"] = in_memory * count / MEMORY
    print(f"{kind}: {size:.2f} GiB; peak memory of the process {most:.2f} GiB")
    for name, (clock, cores) in times.items():
        print(f"  {name}: {clock:.2f} s by the clock, {cores:.2f} s of all cores")


KINDS = {
    "NumPy": (write_arrays, read_arrays, arrays),
    "Parquet": (write_parquet, read_parquet, parquet),
}


def main():
    options = pages.options()
    count, batch = int(options.get("records", 200_000)), int(options.get("batch", 0))
    print(f"{count} records of {WIDTH} features and a label, float32")
    for kind in pages.chosen(KINDS):
        if kind == "Parquet" and importlib.util.find_spec("pyarrow") is None:
            print("Parquet: pyarrow is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            measure(kind, pathlib.Path(folder), count, batch)
