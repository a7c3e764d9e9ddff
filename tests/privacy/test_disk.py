import functools
import logging
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core.loop import advance, planned_rows
from dpbilevel.core.resume import first_checkpoint, run_in_parts
from dpbilevel.privacy import clipped_mean, clipping, stores
from dpbilevel.privacy.clipping import unsealed
from dpbilevel.privacy.disk import OnDisk

COLUMNS = {"features": [f"x{j}" for j in range(20)], "label": "y"}
BUDGET = dpb.PrivacyBudget(epsilon=1.0, delta=1e-6)
N = 1984  # rows that a program treats alike: a multiple of 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of few records, of parts and batches that do not divide them."""
    monkeypatch.setattr(clipping, "_MICROBATCH_BYTES", {"cpu": 40_000})
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


def write(path, columns, groups=171, **options):
    arrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    tables.write_table(arrow.table(columns), path, row_group_size=groups, **options)
    return path


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
    "taken whole in memory": (logistic, start((20,))),
    "whole, with groups": (softmax, start((20, 2), (2,))),
    "micro-batches": (network, start((20, 16), (16, 3))),
}
problem = dpb.FiniteSum(logistic)
W0, W1 = {"a": jnp.zeros(20)}, {"a": jnp.ones(20)}


def mean(loss, w, data, **options):
    fun = lambda record: jax.grad(loss)(w, record)  # noqa: E731
    return unsealed(clipped_mean(fun, data, clip_norm=0.5, precision="grid", **options))


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def fitted(data, steps=3, **options):
    solver = dpb.NoisyGD(steps, clip_norm=1.0, step_size=0.5)
    key = jax.random.key(0)
    return dpb.fit(problem, solver, data, W0, budget=BUDGET, key=key, **options).value


@functools.cache
def fitted_in_memory():
    return fitted(records())


@pytest.mark.parametrize("place", [mapped, parquet])
@pytest.mark.parametrize("case", LOSSES)
def test_clipped_means_have_the_bits_of_records_in_memory(tmp_path, place, case):
    got, want = (
        mean(*LOSSES[case], v) for v in (place(tmp_path, records()), records())
    )
    assert_same_bits(got, want)


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


@pytest.mark.parametrize("place", [mapped, parquet])
def test_a_run_releases_the_bits_of_records_in_memory(tmp_path, place):
    assert_same_bits(fitted(place(tmp_path, records())), fitted_in_memory())


@pytest.mark.reuses_keys
def test_compiled_and_vectorized_runs_do_too(tmp_path):
    disk = mapped(tmp_path, records())
    solver = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.5)
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=N)

    def run(data, key):
        return jax.jit(dpb.solve)(problem, plan.solver, data, W0, key=key).value

    keys = jax.random.split(jax.random.key(1), 2)
    many = jax.vmap(run, in_axes=(None, 0))
    assert_same_bits(many(disk, keys), many(records(), keys))


@pytest.mark.reuses_keys
def test_two_levels_read_from_disk(tmp_path):
    (tmp_path / "upper").mkdir()
    upper = mapped(tmp_path / "upper", records(640, seed=1))
    lower = mapped(tmp_path, records())

    def loss(x, w, record):
        return logistic(w, record) + 0.5 * jnp.exp(x) * jnp.sum(w["a"] ** 2)

    two = dpb.BilevelProblem(loss, loss)
    solver = dpb.bilevel.F2SA(2, penalty=2.0, step_size=0.1, lower_step_size=0.1)
    w0, key = (jnp.zeros(()), W0), jax.random.key(0)
    disk, memory = (
        dpb.fit(two, solver, data, w0, budget=BUDGET, people="disjoint", key=key).value
        for data in (
            dpb.Levels(upper, lower),
            dpb.Levels(records(640, seed=1), records()),
        )
    )
    assert_same_bits(disk, memory)
    data = dpb.Levels(lower, mapped(tmp_path, records()))
    with pytest.raises(ValueError, match="contradicts the data: both levels read one"):
        dpb.fit(two, solver, data, w0, budget=BUDGET, people="disjoint", key=key)


def test_a_private_number_of_records_is_padded(tmp_path):
    noise = dpb.privacy.Gaussian(neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE)
    solver = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.5, noise=noise, sizes=N)

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


@pytest.mark.reuses_keys
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    solver = dpb.NoisyGD(4, clip_norm=1.0, step_size=0.5, sizes=N).with_noise(5.0)
    begin = first_checkpoint(
        problem, solver, W0, key=jax.random.key(3), fingerprint={}, with_start=False
    )

    def run(data, saved, keep):
        @jax.jit
        def part(state, keys):
            return advance(problem, solver, data, state, keys, trajectory=True)

        return run_in_parts(lambda s, k: part(s.state, k), saved, 4, keep, chunk=2).path

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


@pytest.mark.parametrize(
    "sampling",
    [dpb.Poisson(0.1), dpb.FixedSize(64), dpb.FixedSize(N), dpb.privacy.SinglePass(64)],
)
def test_other_samplings_are_refused(tmp_path, sampling):
    disk = mapped(tmp_path, records())
    with pytest.raises(ValueError, match=r"must be in memory here.*Use FullBatch\(\)"):
        sampling.draw(disk, N, key=jax.random.key(0), index=0)


def test_what_needs_records_in_memory_says_so(tmp_path):
    disk = mapped(tmp_path, records())
    with pytest.raises(ValueError, match="must be in memory here"):
        dpb.bilevel.certified._mean(lambda total: total, disk, N)
    with pytest.raises(ValueError, match="share their leading axis"):
        fitted({"both": disk})
    with pytest.raises(ValueError, match="mask= is for records in memory"):
        mean(logistic, W0, disk, mask=jnp.ones(N, bool))


def test_bad_arrays_are_refused(tmp_path):
    with pytest.raises(TypeError, match="instance of ndarray"):
        OnDisk.arrays({"features": [1.0, 2.0]})
    with pytest.raises(ValueError, match="must be a numeric array"):
        OnDisk.arrays({"features": np.asarray(["red", "blue"])})
    with pytest.raises(ValueError, match="share their leading axis"):
        OnDisk.arrays({"features": np.ones((3, 2)), "label": np.ones(4)})
    with pytest.raises(ValueError, match="sizes must be an integer of at least 1"):
        fitted(OnDisk.arrays(records(0)))


def test_parts_of_mapped_arrays_are_read_too(tmp_path):
    np.save(tmp_path / "both.npy", records()["features"])
    both = np.load(tmp_path / "both.npy", mmap_mode="r")
    label = np.ones(N - 10, np.float32)
    for features in (both[10:], np.asfortranarray(both[:-10][::-1])):
        data = {"features": features, "label": label}
        assert_same_bits(
            mean(logistic, W0, OnDisk.arrays(data)), mean(logistic, W0, data)
        )


def test_no_record_is_a_mean_of_zero():
    disk = OnDisk.arrays(records(0))
    assert_same_bits(mean(logistic, W0, disk), W0)


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


def test_parquet_nulls_are_refused_before_anything_is_released(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    columns = {
        "number": arrow.array([1.0, None, 3.0, 4.0, 5.0]),
        "whole": arrow.array([1, 2, 3, 4, None]),
        "good": arrow.array([True, False, True, False, True]),
    }
    for options in ({}, {"write_statistics": False}):
        path = write(tmp_path / "nulls.parquet", columns, groups=2, **options)
        for bad in ("number", "whole"):
            with pytest.raises(ValueError, match=f"column '{bad}' of .* has nulls"):
                OnDisk.parquet(path, {"v": ["good", bad]})
        assert OnDisk.parquet(path, {"v": "good"}).rows == 5


def test_bad_parquet_files_are_refused(tmp_path):
    numbers = np.arange(4.0)
    good = write(tmp_path / "good.parquet", {"a": numbers, "b": numbers})
    other = write(tmp_path / "other.parquet", {"a": numbers.astype(int), "b": numbers})
    text = write(tmp_path / "text.parquet", {"a": ["red", "blue"], "b": [1.0, 2.0]})
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(OSError, match=r"cannot read .*none\.parquet: No such file"):
        OnDisk.parquet(tmp_path / "none.parquet", {"v": "a"})
    with pytest.raises(OSError, match=r"broken\.parquet cannot be read as Parquet"):
        OnDisk.parquet(broken, {"v": "a"})
    with pytest.raises(ValueError, match="exactly one column 'c'; it has 'a', 'b'"):
        OnDisk.parquet(good, {"v": ["a", "c"]})
    with pytest.raises(ValueError, match=r"column 'a' .* numbers or truth values"):
        OnDisk.parquet(text, {"v": "a"})
    with pytest.raises(ValueError, match=r"other\.parquet have other types"):
        OnDisk.parquet([good, other], {"v": "a"})
    with pytest.raises(ValueError, match="at least one file"):
        OnDisk.parquet([], {"v": "a"})


def test_a_missing_pyarrow_is_named(monkeypatch):
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"'\.\[parquet\]'.*pip install pyarrow"):
        OnDisk.parquet("records.parquet", {"v": "a"})
