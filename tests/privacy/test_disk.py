import concurrent.futures
import functools
import logging
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core.levels import check_disjoint
from dpbilevel.core.loop import planned_rows, scan_steps
from dpbilevel.privacy import clipped_mean
from dpbilevel.privacy.keys import step_keys
from dpbilevel.privacy.per_example import microbatches
from dpbilevel.privacy.per_example.clipping import unsealed
from dpbilevel.privacy.records import stores
from dpbilevel.privacy.records.disk import OnDisk, _Chunks
from dpbilevel.privacy.records.rows import padded, reader
from dpbilevel.privacy.sampling.fixed_size import RandomAllocation
from dpbilevel.runs.checkpoint import after, first_checkpoint
from tests.cases import fast_first, slow
from tests.privacy.test_stores import write

COLUMNS = {"features": [f"x{j}" for j in range(20)], "label": "y"}
BUDGET = dpb.PrivacyBudget(epsilon=1.0, delta=1e-6)
N = 1984  # rows that a program treats alike: a multiple of 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of few records, of parts and batches that do not divide them."""
    budget = {jax.default_backend(): 40_000}
    monkeypatch.setattr(microbatches, "_MICROBATCH_BYTES", budget)
    monkeypatch.setattr(stores, "_PART", 50)
    monkeypatch.setattr(stores, "_BATCH", 130)


def records(n=N, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, 20)).astype(np.float32)
    features[n // 3 :: 97] = np.nan
    label = np.sign(rng.standard_normal(n)).astype(np.float32)
    return {"features": features, "label": label}


def mapped(folder, data, **options):
    for name, values in data.items():
        np.save(folder / f"{name}.npy", values)
    maps = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in data}
    return OnDisk.arrays(maps, **options)


def parquet(folder, data, **options):
    pytest.importorskip("pyarrow")
    paths, cuts = [], [0, 3, len(data["label"]) // 2, len(data["label"])]
    for i in range(3):
        rows = {k: v[cuts[i] : cuts[i + 1]] for k, v in data.items()}
        numbers = map(np.ascontiguousarray, rows["features"].T)
        table = dict(zip(COLUMNS["features"], numbers, strict=True))
        paths.append(write(folder / f"{i}.parquet", table | {"y": rows["label"]}))
    return OnDisk.parquet(paths, COLUMNS, **options)


def logistic(w, record):
    return jnp.log1p(jnp.exp(-record["label"] * jnp.vdot(record["features"], w["a"])))


def softmax(w, record):
    logits = record["features"] @ w["a"] + w["b"]
    return -record["label"] * jax.nn.log_softmax(logits)[0]


def network(w, record):
    return jnp.sum(jnp.tanh(record["features"] @ w["a"]) @ w["b"]) * record["label"]


def start(*shapes):
    rng = np.random.default_rng(5)
    names = "ab"[: len(shapes)]
    return {
        k: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for k, shape in zip(names, shapes, strict=True)
    }


LOSSES = {
    "micro-batches": (network, start((20, 16), (16, 3))),
    "taken whole in memory": (logistic, start((20,))),
    "whole, with groups": (softmax, start((20, 2), (2,))),
}
places = pytest.mark.parametrize("place", [mapped, *slow(parquet)])
CHUNKS = [(1984, 64), (7, 3), (1984, 300), (1984, 1984)]
problem = dpb.FiniteSum(logistic)
W0, W1 = {"a": jnp.zeros(20)}, {"a": jnp.ones(20)}


def mean(loss, w, data, **options):
    fun = lambda record: jax.grad(loss)(w, record)  # noqa: E731
    return unsealed(clipped_mean(fun, data, clip_norm=0.5, precision="grid", **options))


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def fitted(data):
    solver = dpb.NoisyGD(3, clip_norm=1.0, step_size=0.5)
    key = jax.random.key(0)
    return dpb.fit(problem, solver, data, W0, budget=BUDGET, key=key).value


@places
@pytest.mark.parametrize("case", fast_first(LOSSES))
def test_clipped_means_have_the_bits_of_records_in_memory(tmp_path, place, case):
    got, want = (
        mean(*LOSSES[case], v) for v in (place(tmp_path, records()), records())
    )
    assert_same_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [48, 512, 2**20])
def test_they_have_them_for_any_micro_batch(tmp_path, microbatch):
    loss, w = LOSSES["micro-batches"]
    disk = mapped(tmp_path, records(1501))
    got, want = (mean(loss, w, v, microbatch=microbatch) for v in (disk, records(1501)))
    assert_same_bits(got, want)


def test_a_chunk_that_is_left_out_is_seen(tmp_path):
    loss, w = LOSSES["micro-batches"]
    fewer = mapped(tmp_path, {k: v[: N - 64] for k, v in records().items()})
    got = mean(loss, w, fewer, denominator=N)
    with pytest.raises(AssertionError):
        assert_same_bits(got, mean(loss, w, records()))


def one_record_twice(chunks):
    leaves, fresh = chunks[-1]
    new = np.flatnonzero(fresh)
    for leaf in leaves:
        leaf[new[1]] = leaf[new[0]]
    return leaves, fresh


def one_chunk_twice(chunks):
    return chunks[-2 if len(chunks) == 7 else -1]


def one_record_masked(chunks):
    leaves, fresh = chunks[-1]
    fresh[np.flatnonzero(fresh)[-1]] &= len(chunks) != 3
    return leaves, fresh


def filled_up_with_a_record(chunks):
    leaves, fresh = chunks[-1]
    for leaf in leaves:
        leaf[~fresh] = leaf[fresh][0]
    return leaves, np.ones_like(fresh)


def the_same(chunks):
    return chunks[-1]


@pytest.mark.parametrize(
    "broken",
    [
        the_same,
        one_record_twice,
        one_record_masked,
        *slow(one_chunk_twice, filled_up_with_a_record),
    ],
)
def test_a_reader_that_errs_in_one_row_is_seen(tmp_path, monkeypatch, broken):
    data, options = records(1501), {"microbatch": 64}
    data = {k: np.nan_to_num(v) for k, v in data.items()}
    want = mean(*LOSSES["micro-batches"], data, **options)
    right, chunks = _Chunks._read, []

    def read(*arguments):
        chunks.append(right(*arguments))
        return broken(chunks)

    monkeypatch.setattr(_Chunks, "_read", read)
    got = mean(*LOSSES["micro-batches"], mapped(tmp_path, data), **options)
    if broken is the_same:
        assert_same_bits(got, want)
    else:
        with pytest.raises(AssertionError):
            assert_same_bits(got, want)


@pytest.mark.slow
def test_a_run_releases_the_bits_of_records_in_memory(tmp_path):
    assert_same_bits(fitted(mapped(tmp_path, records())), fitted(records()))


@pytest.mark.slow
@pytest.mark.reuses_keys
def test_compiled_and_vectorized_runs_do_too(tmp_path):
    solver = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.5, sizes=N).with_noise(5.0)
    keys = jax.random.split(jax.random.key(1), 2)

    @functools.partial(jax.vmap, in_axes=(None, 0))
    def runs(data, key):
        return jax.jit(dpb.solve)(problem, solver, data, W0, key=key).value

    assert_same_bits(runs(mapped(tmp_path, records()), keys), runs(records(), keys))


def test_one_array_in_both_levels_is_refused_as_disjoint():
    array = np.zeros((8, 2), np.float32)
    stored = dpb.OnDisk.arrays(array)
    for other in (array, dpb.OnDisk.arrays(array[2:])):
        with pytest.raises(ValueError, match="are the same array or parts of it"):
            check_disjoint(dpb.Levels(other, stored))
    check_disjoint(dpb.Levels(array.copy(), stored))


def test_one_file_in_both_levels_is_refused_as_disjoint(tmp_path):
    def loss(x, w, record):
        return logistic(w, record)

    two = dpb.BilevelProblem(loss, loss)
    data = dpb.Levels(mapped(tmp_path, records()), mapped(tmp_path, records()))
    w0 = jnp.zeros(()), W0
    assert two.sizes_of(data) == dpb.Sizes(N, N, "overlapping")
    two.check(w0, data)
    with pytest.raises(ValueError, match="contradicts the data: both levels read one"):
        two.sizes_of(data, "disjoint")


@pytest.mark.slow
def test_a_private_number_of_records_is_padded(tmp_path):
    solver = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.5, sizes=N)
    solver = solver.with_neighbours(dpb.Neighbours.ADD_OR_REMOVE_ONE)

    def read(data):
        return jax.jit(lambda w, data: mean_of_batch(w, data))(W1, data)

    def mean_of_batch(w, data):
        batch = dpb.FullBatch().draw(data, N, key=None)
        fun = lambda record: jax.grad(logistic)(w, record)  # noqa: E731
        return unsealed(clipped_mean(fun, batch, clip_norm=0.5, precision="grid"))

    seen = set()
    for n in (0, 1, N - 1, N + 1):
        disk = mapped(tmp_path, records(n), progress=lambda *rows: seen.add(rows))
        got, want = (read(planned_rows(solver, data)) for data in (disk, records(n)))
        assert_same_bits(got, want)
    assert len({total for _, total in seen}) == 1  # which does not depend on n
    with pytest.raises(ValueError, match="more records than"):
        planned_rows(solver, mapped(tmp_path, records(N + 65)))


@pytest.mark.slow
@pytest.mark.reuses_keys
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    solver = dpb.NoisyGD(4, clip_norm=1.0, step_size=0.5, sizes=N).with_noise(5.0)
    begin = first_checkpoint(
        problem, solver, W0, key=jax.random.key(3), fingerprint={}, with_start=False
    )

    def run(data, saved, keep):
        @jax.jit
        def part(state, keys):
            return scan_steps(problem, solver, data, state, keys, trajectory=True)

        while saved.done < 4:
            key, keys = step_keys(saved.key, 2)
            saved = after(saved, key, 2, *part(saved.state, keys))
            keep(saved)
        return saved.path

    kept = []
    whole = run(mapped(tmp_path, records()), begin, kept.append)
    resumed = run(mapped(tmp_path, records()), kept[0], lambda saved: None)
    assert kept[0].done == 2
    assert_same_bits(resumed, whole)
    assert_same_bits(resumed, run(records(), begin, lambda saved: None))


def test_nothing_is_read_before_a_program_runs_and_no_record_is_in_it(tmp_path):
    reads = []
    disk = mapped(tmp_path, records(), progress=lambda *rows: reads.append(rows))
    traced = jax.make_jaxpr(lambda w: mean(logistic, w, disk))(W1)
    assert reads == []
    assert all(np.size(v) <= 20 for v in traced.consts)
    mean(logistic, W1, disk)["a"].block_until_ready()
    done, totals = zip(*reads, strict=True)
    assert sorted(done) == list(done)
    assert done[-1] == totals[0] >= N


@pytest.mark.slow
def test_passes_at_the_same_time_read_the_same_records(tmp_path):
    disk = mapped(tmp_path, records())
    run = jax.jit(lambda w, data: mean(logistic, w, data, microbatch=64))
    starts = [{"a": jnp.full(20, k / 8)} for k in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda w: run(w, disk), starts))
    for one, w in zip(got, starts, strict=True):
        assert_same_bits(one, run(w, disk))
        # Of another program, which may round a value of a record to the next count.
        np.testing.assert_allclose(one["a"], run(w, records())["a"], 1e-4, 1e-8)


def test_no_thread_is_left(tmp_path):
    before = set(threading.enumerate())
    mean(logistic, W0, mapped(tmp_path, records()))["a"].block_until_ready()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_files_that_change_or_vanish_are_refused_with_their_name(tmp_path):
    disk = mapped(tmp_path, records())
    mapped(tmp_path, records(64))
    with pytest.raises(OSError, match=r"features\.npy has changed"):
        mean(logistic, W0, disk)
    disk = mapped(tmp_path, records())
    (tmp_path / "label.npy").unlink()
    with pytest.raises(OSError, match=r"cannot read .*label\.npy: No such file"):
        mean(logistic, W0, disk)


def test_an_error_in_a_pass_is_raised_once(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)  # JAX logs what it raises
    label = tmp_path / "label.npy"

    def spoil(done, total):
        label.unlink(missing_ok=True)

    disk = mapped(tmp_path, records(), progress=spoil)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"OSError: .*label\.npy"):
        jax.block_until_ready(mean(logistic, W0, disk))
    assert threading.active_count() < 50


def batch_of(sampling, rows, n=N):
    """One batch of these rows, drawn by the same key as any other."""
    sampling = sampling.in_pass(rows, key=jax.random.key(1))
    return sampling.draw(rows, n, key=jax.random.key(0), index=2)


SAMPLINGS = [
    dpb.Poisson(0.1),
    dpb.FixedSize(64),
    dpb.FixedSize(N),
    dpb.privacy.SinglePass(64),
    RandomAllocation(5),
]


@places
@pytest.mark.parametrize("sampling", fast_first(SAMPLINGS), ids=repr)
def test_batches_have_the_bits_of_records_in_memory(tmp_path, place, sampling):
    data = records()
    batch = batch_of(sampling, place(tmp_path, data))
    chex.assert_trees_all_equal(
        batch, batch_of(sampling, jax.tree.map(jnp.array, data))
    )


@places
def test_batches_from_padded_rows_do_too(tmp_path, place):
    data, n = records(N - 5), N - 5
    rows = padded(jax.tree.map(jnp.array, data), N)
    disk = place(tmp_path, data).padded(N)
    for sampling in (dpb.Poisson(0.9), RandomAllocation(2)):
        batch = batch_of(sampling, disk, n)
        chex.assert_trees_all_equal(batch, batch_of(sampling, rows, n))
    assert int(batch.mask.sum()) < len(batch.mask)


@pytest.mark.slow
def test_batches_of_people_do_too(tmp_path):
    data, ids = records(), np.repeat(np.arange(N // 4), 4)
    disk = mapped(tmp_path, data).by_person(ids, most_rows=3)
    people = jax.tree.map(jnp.array, dpb.by_person(data, ids, most_rows=3))
    for sampling in (dpb.Poisson(0.1), dpb.FixedSize(20)):
        batch = batch_of(sampling, disk, N // 4)
        chex.assert_trees_all_equal(batch, batch_of(sampling, people, N // 4))


def test_a_batch_that_reads_another_row_is_seen(tmp_path, monkeypatch):
    disk, take = mapped(tmp_path, records()), stores.ArrayStore.take
    right = batch_of(dpb.FixedSize(64), disk)
    shifted = lambda store, numbers, leaves: take(store, numbers - 1, leaves)  # noqa: E731
    monkeypatch.setattr(stores.ArrayStore, "take", shifted)
    wrong = batch_of(dpb.FixedSize(64), mapped(tmp_path, records()))
    assert not np.array_equal(right.records["label"], wrong.records["label"])


def test_a_batch_reads_its_own_rows_of_arrays_and_no_others(tmp_path, monkeypatch):
    read, filled = [], stores._filled
    counted = lambda file, rows: (read.append(len(rows)), filled(file, rows))  # noqa: E731
    monkeypatch.setattr(stores, "_filled", counted)
    batch = batch_of(dpb.Poisson(0.05), mapped(tmp_path, records()))
    assert sum(read) == 2 * int(batch.mask.sum()) < N / 5  # of two arrays


@pytest.mark.reuses_keys
@pytest.mark.slow
def test_runs_on_sampled_batches_release_the_bits_of_records_in_memory(tmp_path):
    data, key = records(), jax.random.key(0)
    sampling = dpb.Poisson(0.1)
    solver = dpb.NoisyGD(3, clip_norm=1.0, step_size=0.5, sampling=sampling)
    found = [
        dpb.fit(problem, solver, rows, W0, budget=BUDGET, key=key).value
        for rows in (data, mapped(tmp_path, data))
    ]
    chex.assert_trees_all_equal(*found)


def test_what_needs_records_in_memory_says_so(tmp_path):
    disk = mapped(tmp_path, records())
    with pytest.raises(ValueError, match="must be in memory here"):
        dpb.bilevel.certificates.sensitivities._mean(lambda total: total, disk, N)
    with pytest.raises(ValueError, match="share their leading axis"):
        fitted({"both": disk})
    with pytest.raises(ValueError, match="OnDisk records take no mask="):
        mean(logistic, W0, disk, mask=jnp.ones(N, bool))


def test_bad_arrays_are_refused(tmp_path):
    with pytest.raises(TypeError, match="must be a NumPy array"):
        OnDisk.arrays({"features": [1.0, 2.0]})
    with pytest.raises(ValueError, match="must be a numeric array"):
        OnDisk.arrays({"features": np.asarray(["red", "blue"])})
    with pytest.raises(ValueError, match="share their leading axis"):
        OnDisk.arrays({"features": np.ones((3, 2)), "label": np.ones(4)})
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        fitted(OnDisk.arrays(records(0)))


@pytest.mark.slow
def test_parts_of_mapped_arrays_are_read_too(tmp_path):
    np.save(tmp_path / "both.npy", records()["features"])
    both = np.load(tmp_path / "both.npy", mmap_mode="r")
    label = np.ones(N - 10, np.float32)
    for features in (both[10:], np.asfortranarray(both[:-10][::-1])):
        data = {"features": features, "label": label}
        assert_same_bits(
            mean(logistic, W0, OnDisk.arrays(data)), mean(logistic, W0, data)
        )


@places
@pytest.mark.parametrize(("n", "rows"), [*CHUNKS[:2], *slow(*CHUNKS[2:])])
def test_chunks_hold_every_record_once_in_its_place(tmp_path, place, n, rows):
    data = {k: np.nan_to_num(v) for k, v in records(n).items()}
    for padding in (0, 500):
        disk, total = place(tmp_path, data), n + padding
        read = reader(disk, None, total, rows)
        held = {
            k: np.pad(v, [(0, padding)] + [(0, 0)] * (v.ndim - 1))
            for k, v in data.items()
        }
        seen = np.zeros(total, int)
        order = np.random.default_rng(0).permutation(-(-total // rows))
        for number in [*range(len(order)), *order]:  # as a pass reads them, and not
            chunk, keep = jax.tree.map(np.asarray, read(jnp.asarray(number)))
            first = min(number * rows, total - rows)
            seen[first : first + rows] += keep
            for name, values in chunk.items():
                want = held[name][first : first + rows]
                np.testing.assert_array_equal(values[keep], want[keep])
        np.testing.assert_array_equal(seen, np.repeat([2, 0], [n, padding]))


def test_no_record_is_a_mean_of_zero():
    disk = OnDisk.arrays(records(0))
    assert_same_bits(mean(logistic, W0, disk), W0)


@pytest.mark.slow
def test_arrays_take_the_dtypes_that_they_have_in_memory():
    rng = np.random.default_rng(0)
    data = {
        "features": rng.standard_normal((300, 20)),
        "label": rng.integers(0, 2, 300).astype(bool),
        "table": rng.integers(0, 5, 300),
    }
    data["features"][7] = 1e300

    def loss(w, record):
        weight = jnp.where(record["label"], 1.0, 2.0)
        return weight * w["a"][record["table"]] * jnp.sum(record["features"])

    w = {"a": jnp.ones(5)}
    assert_same_bits(mean(loss, w, OnDisk.arrays(data)), mean(loss, w, data))
