"""Passes over records on disk: their time over that of reading the file, and memory.

Run by `python -m benchmarks out_of_core [records] [features]`. The files, NumPy's own
and, where pyarrow is installed, Parquet, are written to a temporary folder.
"""

import concurrent.futures
import importlib.util
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

FILES, PIECE, BLOCK = 4, 2**16, 2**15  # files; rows written and read at once
MEMORY = 2**18  # records of a pass in memory, to compare with


def pieces(count, width, seed):
    """The records of one file, some at a time."""
    rng = np.random.default_rng(seed)
    for first in range(0, count, PIECE):
        rows = min(PIECE, count - first)
        features = rng.standard_normal((rows, width), np.float32)
        yield features, np.sign(features[:, 0] + rng.standard_normal(rows, np.float32))


def write_arrays(folder, count, width):
    """Two arrays in NumPy's format, written without holding one of them."""
    paths = [folder / "features.npy", folder / "label.npy"]
    with open(paths[0], "wb") as features, open(paths[1], "wb") as label:
        for file, shape in ((features, (count, width)), (label, (count,))):
            about = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, about)
        for parts in pieces(count, width, 0):
            for part, file in zip(parts, (features, label), strict=True):
                part.tofile(file)
    return paths


def read_arrays(paths):
    for path in paths:
        array = np.load(path, mmap_mode="r")
        size = array[0].size
        with open(path, "rb") as file:
            file.seek(array.offset)
            while len(np.fromfile(file, np.float32, BLOCK * size)):
                pass


def arrays(paths):
    features, label = (np.load(path, mmap_mode="r") for path in paths)
    return dpb.OnDisk.arrays({"features": features, "label": label})


def names(width):
    return [f"x{j}" for j in range(width)]


def write_parquet(folder, count, width):
    import pyarrow
    from pyarrow import parquet

    paths = []
    for i in range(FILES):
        paths.append(folder / f"{i}.parquet")
        rows = count // FILES + (i < count % FILES)
        columns = [(name, pyarrow.float32()) for name in [*names(width), "label"]]
        schema = pyarrow.schema(columns)
        with parquet.ParquetWriter(paths[-1], schema, use_dictionary=False) as out:
            for features, label in pieces(rows, width, i):
                values = [np.ascontiguousarray(v) for v in (*features.T, label)]
                out.write_table(pyarrow.table(values, schema=schema))
    return paths


def read_parquet(paths):
    from pyarrow import dataset

    for batch in dataset.dataset(paths).scanner(batch_size=BLOCK).to_batches():
        for column in batch.columns:
            column.to_numpy(zero_copy_only=False)


def parquet(paths):
    from pyarrow import parquet

    width = len(parquet.read_schema(paths[0])) - 1
    return dpb.OnDisk.parquet(paths, {"features": names(width), "label": "label"})


def seconds(fun, *arguments, repeats=5):
    """The least time of a call: by the clock, and of all cores together."""
    times = []
    for _ in range(repeats):
        begin = np.asarray([time.perf_counter(), time.process_time()])
        fun(*arguments)
        times.append([time.perf_counter(), time.process_time()] - begin)
    return np.min(times, axis=0)


def elsewhere(fun, *arguments):
    """Calls a function in another process, whose memory is not counted here."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(fun, *arguments).result()


def peak():
    """The most memory that this process had, in GiB; unknown but on Linux."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    sizes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return sizes[0] / 2**20 if sizes else float("nan")


def measure(kind, folder, count, width):
    """Prints the times of reading the files and of a pass over them."""
    write, read, opened = KINDS[kind]
    paths = elsewhere(write, folder, count, width)
    size = sum(os.path.getsize(path) for path in paths) / 2**30
    reading = elsewhere(seconds, read, paths)
    a_pass = timed(opened(paths), width)
    most = peak()
    part = [np.concatenate(v) for v in zip(*pieces(MEMORY, width, 0), strict=True)]
    memory = dict(zip(("features", "label"), map(jnp.asarray, part), strict=True))
    in_memory = timed(memory, width) * count / MEMORY
    print(f"{kind}: {size:.2f} GiB; peak memory of the process {most:.2f} GiB")
    for i, clock in enumerate(("by the clock", "of all cores together")):
        print(
            f"  seconds {clock}: read {reading[i]:.2f}, pass {a_pass[i]:.2f}, that is "
            f"{a_pass[i] / reading[i]:.2f} times reading and "
            f"{a_pass[i] / in_memory[i]:.2f} times a pass in memory"
        )


def timed(records, width):
    """The seconds that a clipped mean of gradients takes, compiled."""

    @jax.jit
    def mean(w, records):
        return dpb.privacy.clipped_mean(
            lambda record: jax.grad(dpb.logistic_loss)(w, record),
            records,
            clip_norm=1.0,
            precision="grid",
        )

    w = jnp.zeros(width)
    mean(w, records)
    return seconds(lambda: jax.block_until_ready(mean(w, records)))


KINDS = {
    "NumPy": (write_arrays, read_arrays, arrays),
    "Parquet": (write_parquet, read_parquet, parquet),
}


def main():
    given = [int(number) for number in sys.argv[1:]]
    count, width = given + [200_000, 100][len(given) :]
    print(f"{count} records of {width} features and a label, float32, files cached")
    for kind in KINDS:
        if kind == "Parquet" and importlib.util.find_spec("pyarrow") is None:
            print("Parquet: pyarrow is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            measure(kind, pathlib.Path(folder), count, width)
