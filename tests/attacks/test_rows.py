"""No shape or place tells of a record: rows of a public number, each in its place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core.loop import planned_rows, scan_steps
from dpbilevel.privacy.keys import step_keys
from dpbilevel.privacy.per_example import microbatches, norms
from dpbilevel.privacy.records.rows import Padded, padded, padded_rows
from tests.cases import slow

pytestmark = pytest.mark.reuses_keys  # the same noise on both sides shows what moves

ADDED = dpb.Neighbours.ADD_OR_REMOVE_ONE
STEEP = 1e6  # slopes of order one that turn around with the last bits of a product


def steep(d):
    """A loss whose clipped gradient changes wherever a product is rounded otherwise."""
    rng = np.random.default_rng(0)
    w = {
        "W": jnp.asarray(rng.normal(size=(32, d)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=32), jnp.float32),
    }

    def loss(w, record):
        net = jnp.dot(w["b"], jnp.tanh(w["W"] @ record))
        return jnp.sin(STEEP * net) / STEEP

    return w, loss


def records_of(n, d):
    rows = np.random.default_rng(n).normal(size=(n, d)) / math.sqrt(d)
    rows[0] = 0  # the record that goes has a gradient of zero
    return rows.astype(np.float32)


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return math.sqrt(sum(float(jnp.sum((u - v) ** 2)) for u, v in pairs))


@pytest.mark.parametrize(
    "sampling",
    [dpb.FullBatch(), pytest.param(dpb.Poisson(0.5), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("d", [200, pytest.param(784, marks=pytest.mark.slow)])
def test_a_record_less_changes_the_rounding_of_no_other(sampling, d):
    w, loss = steep(d)
    n = 33
    solver = dpb.NoisyGD(1, 1.0, step_size=1.0, sampling=sampling, neighbours=ADDED)
    solver = solver.with_precision("grid").with_noise(1e-6)
    solver = solver.with_sizes(n)
    run = jax.jit(dpb.solve)
    rows = records_of(n, d)

    def released(rows, key):
        return run(dpb.FiniteSum(loss), solver, jnp.asarray(rows), w, key=key).value

    share = 1.0 / sampling.denominator(n)
    # The first record is the one that all others are moved by when it goes; under
    # Poisson sampling the same draw must then be made of places, not of records.
    last = np.concatenate([rows[1:], rows[:1]])
    for seed in range(3):
        key = jax.random.key(seed)
        if isinstance(sampling, dpb.FullBatch):
            moved = distance(released(rows, key), released(rows[1:], key))
        else:
            moved = distance(released(last, key), released(last[:-1], key))
        assert moved < 1e-3 * share


@pytest.mark.parametrize("d", [200, *slow(784)])
def test_shapes_of_records_do_change_rounding(d):  # the control of the test above
    w, loss = steep(d)

    @jax.jit
    def mean(rows):
        gradient = jax.grad(loss)
        return dpb.privacy.clipped_mean(
            lambda z: gradient(w, z),
            rows,
            clip_norm=1.0,
            denominator=1.0,
            precision="grid",
        ).raw.values()

    rows = records_of(33, d)
    assert distance(mean(jnp.asarray(rows)), mean(jnp.asarray(rows[1:]))) > 0.5


@pytest.mark.parametrize("microbatch", [7, 64, "auto", "cached", *slow(1, 9, 17, 33)])
@pytest.mark.parametrize("d", [64, *slow(200)])
def test_a_row_contributes_the_same_in_every_place(d, microbatch, monkeypatch):
    if microbatch == "cached":  # parts of records that do not fit in a cache
        monkeypatch.setattr(microbatches, "cached_bytes", lambda: 2**16)
        monkeypatch.setattr(microbatches, "_PART_BYTES", 2**15)
        microbatch = "auto"
    w = jnp.asarray(np.random.default_rng(0).normal(size=d) * 3, jnp.float32)
    rows = jnp.asarray(records_of(1000, d) * math.sqrt(d))

    @jax.jit
    def counts(rows, mask):
        def loss(w, z):
            return jnp.sin(40 * jnp.dot(w, z))

        return dpb.privacy.clipped_mean(
            lambda z: jax.grad(loss)(w, z),
            rows,
            mask=mask,
            clip_norm=1.0,
            precision="grid",
            microbatch=microbatch,
        ).raw.counts

    first, last = jnp.arange(1000) != 0, jnp.arange(1000) != 999
    moved = counts(jnp.roll(rows, -1, axis=0), last)
    np.testing.assert_array_equal(counts(rows, first), moved)


@pytest.mark.parametrize("d", [200, *slow(3)])
def test_a_row_contributes_the_same_whatever_the_others_hold(d):
    w, loss = steep(d)
    rows = jnp.asarray(records_of(100, d))

    @jax.jit
    def counts(rows, mask):
        gradient = jax.grad(loss)
        return dpb.privacy.clipped_mean(
            lambda z: gradient(w, z), rows, mask=mask, clip_norm=1.0, precision="grid"
        ).raw.counts

    mask = jnp.arange(100) != 7
    expected = counts(rows, mask)
    for value in (0.0, 1.0, -1e30, np.inf, np.nan):
        found = counts(rows.at[7].set(value), mask)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(a, b)


SOLVERS = {
    "steps": dpb.NoisyGD(2, 1.0, step_size=0.5, neighbours=ADDED),
    "sampled": dpb.NoisyGD(
        2,
        1.0,
        step_size=0.5,
        sampling=dpb.Poisson(0.5),
        neighbours=ADDED,
    ),
    "draw": dpb.draws.ExponentialMechanism(
        dpb.draws.Grid(jnp.linspace(-1.0, 1.0, 5)[:, None]),
        clip_range=1.0,
        mechanism=dpb.draws.Exponential(neighbours=ADDED),
    ),
    "candidates": dpb.search.RandomSearch(
        4, 2.0, dpb.draws.Exponential(neighbours=ADDED)
    ),
    "losses": dpb.search.NoisyUCB(3, 2.0, neighbours=ADDED),
    "repetitions": dpb.search.RepeatAndSelect(12, 2.0, mean=2.0, neighbours=ADDED),
}
LINE = dpb.FiniteSum(
    lambda w, z: jnp.sum((w - z) ** 2), w_set=dpb.sets.Box(-jnp.ones(1), jnp.ones(1))
)


@pytest.mark.parametrize(
    "name", ["sampled", "draw", *slow("steps", "candidates", "losses", "repetitions")]
)
def test_padding_counts_for_nothing(name):
    solver = SOLVERS[name].with_noise(0.3).with_sizes(50).with_counts(LINE)
    records = jnp.asarray(np.random.default_rng(0).normal(size=(50, 1)), jnp.float32)
    rows = planned_rows(solver, records)
    assert rows.present.shape == (64,)
    assert rows.present.sum() == 50
    assert np.isnan(rows.records[50:]).all()
    far = rows.records.at[50:].set(0.9)
    hidden, counted = Padded(far, rows.present), Padded(far, jnp.ones(64, bool))

    @jax.jit
    def run(data, key):
        def one(key):
            _, keys = step_keys(key, solver.num_steps)
            return scan_steps(LINE, solver, data, solver.init(LINE, jnp.zeros(1)), keys)

        return solver.released(jax.vmap(one)(jax.random.split(key, 20))[0])

    key = jax.random.key(0)
    released = [np.asarray(run(data, key)) for data in (rows, hidden, counted)]
    assert np.isfinite(released[0]).all()
    np.testing.assert_array_equal(released[0], released[1])
    # The control: had they been records, something else would have been released.
    assert (released[0] != released[2]).any()


def test_a_record_that_goes_leaves_every_other_in_its_slot():
    records = padded(jnp.arange(50.0), 64)
    gone = Padded(records.records, records.present.at[21].set(False))
    key = jax.random.key(1)
    one, other = (dpb.Poisson(0.5).draw(r, 50, key=key) for r in (records, gone))
    assert 21 in one.records[one.mask]
    np.testing.assert_array_equal(one.records, other.records)
    assert (one.mask != other.mask).sum() == 1


@pytest.mark.parametrize("capacity", [None, *slow(33)])
def test_a_record_that_is_drawn_changes_the_rounding_of_no_other(capacity):
    sampling = dpb.Poisson(1 - 2.0**-32, capacity)  # all that are there
    w = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.float32)

    def loss(w, z):
        return jnp.sin(10 * STEEP * jnp.dot(w, jnp.tanh(z)))

    @jax.jit
    def counts(rows):
        batch = sampling.draw(rows, 33, key=jax.random.key(0))
        return dpb.privacy.clipped_mean(
            lambda z: jax.grad(loss)(w, z), batch, clip_norm=1.0, precision="grid"
        ).raw.counts

    rows = records_of(33, 200) * np.float32(math.sqrt(200))
    for turn in range(32):  # each record comes last once
        others = np.roll(rows[1:], turn, axis=0)
        with_it = np.concatenate([rows[:1], others])
        np.testing.assert_array_equal(counts(with_it), counts(others))


def test_the_number_of_rows_is_that_of_the_plan():
    assert [padded_rows(n) for n in (1, 63, 64, 65, 1000)] == [64, 64, 128, 128, 1024]
    records = {"x": jnp.ones((3, 2)), "k": jnp.arange(3), "b": jnp.ones(3, bool)}
    rows = padded(records, 64)
    assert {v.shape[0] for v in jax.tree.leaves(rows)} == {64}
    assert rows.records["k"][3:].sum() == 0
    assert not rows.records["b"][3:].any()


def test_more_records_than_the_plan_has_rows_are_refused():
    solver = SOLVERS["steps"].with_noise(1.0).with_sizes(50)
    with pytest.raises(ValueError, match=r"more records than the 64 rows .* larger"):
        dpb.solve(LINE, solver, jnp.zeros((65, 1)), jnp.zeros(1), key=jax.random.key(0))


def test_both_levels_are_padded_and_shared_records_once():
    inner = dpb.NoisyGD(2, 1.0, step_size=0.1)
    solver = dpb.PenaltyBilevel(2, penalty=5.0, inner=inner, step_size=0.1)
    solver = solver.with_neighbours(ADDED).with_noise(1.0).with_sizes(dpb.Sizes(10, 70))
    levels = planned_rows(solver, dpb.Levels(jnp.ones((10, 2)), jnp.ones((70, 2))))
    assert levels.upper.present.shape == (64,)
    assert levels.lower.present.shape == (128,)
    shared = solver.with_sizes(dpb.Sizes(10, 10, "shared"))
    levels = planned_rows(shared, dpb.Levels.shared(jnp.ones((10, 2))))
    assert levels.upper is levels.lower


@pytest.mark.slow
def test_a_batch_is_clipped_whole_and_its_padding_counts_for_nothing():
    records = jnp.zeros((1000, 1)).at[0].set(1.0)
    batch = dpb.Poisson(0.05).draw(records, 1000, key=jax.random.key(0))
    whole = dpb.privacy.clipped_mean(
        lambda z: z, batch, clip_norm=1.0, precision="float"
    )
    forgotten = dpb.privacy.clipped_mean(
        lambda z: z,
        batch.records,
        clip_norm=1.0,
        denominator=batch.denominator,
        precision="float",
    )
    np.testing.assert_array_equal(whole.raw, forgotten.raw)
    with pytest.raises(ValueError, match="has its mask"):
        dpb.privacy.clipped_mean(
            lambda z: z, batch, clip_norm=1.0, denominator=3.0, precision="float"
        )


FAST = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": False,
    "xla_cpu_fast_math_honor_infs": False,
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of the CPU backend")
@pytest.mark.parametrize("precision", ["float", "grid"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e30])
def test_no_option_of_the_compiler_lets_a_record_count_for_more(precision, value):
    def mean(z):
        raw = dpb.privacy.clipped_mean(
            lambda r: r, z, clip_norm=1.0, precision=precision
        ).raw
        return raw.values() if precision == "grid" else raw

    records = jnp.asarray([0.0] * 9 + [value], jnp.float32)[:, None]
    found = jax.jit(mean, compiler_options=FAST)(records)
    assert abs(float(found[0])) <= 0.1
    np.testing.assert_allclose(found, jax.jit(mean)(records), atol=1e-6)


FOLDED = {
    "times infinity": lambda r: r * jnp.inf,
    "infinity less infinity": lambda r: (r + 1) * 3e38 * 10 - (r + 1) * 3e38 * 9,
    "constant infinity": lambda r: (r + 1) * 3e38 * 3e38,
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of the CPU backend")
@pytest.mark.parametrize("name", FOLDED)
def test_nor_does_a_function_that_the_compiler_takes_for_impossible(name):
    def mean(z):
        return dpb.privacy.clipped_mean(
            FOLDED[name], z, clip_norm=1.0, precision="grid"
        ).raw.values()

    run = jax.jit(mean, compiler_options=FAST)
    for _ in range(5):
        found = np.asarray(run(jnp.zeros((10, 64), jnp.float32)), np.float64)
        assert np.linalg.norm(found) <= 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of the CPU backend")
@pytest.mark.parametrize("precision", ["float", "grid"])
def test_a_row_counts_for_nothing_when_a_compiler_leaves_any_bits_in_it(
    monkeypatch, precision
):
    # A value that such a compiler takes for impossible is not stored: memory holds what
    # was there before, instead of what `_scaled` puts in its place.
    monkeypatch.setattr(norms, "_scaled", lambda value, clip_norm: value)

    def mean(z):
        raw = dpb.privacy.clipped_mean(
            lambda r: r, z, clip_norm=1.0, precision=precision
        ).raw
        return raw.values() if precision == "grid" else raw

    run = jax.jit(mean, compiler_options=FAST)
    rng = np.random.default_rng(0)
    infinite = np.asarray([np.nan, -np.nan, np.inf, -np.inf, 3e38, 1.0], np.float32)
    for kind in infinite[:-1]:
        assert np.all(np.asarray(run(jnp.full((10, 64), kind))) == 0)
    for _ in range(5):
        bits = rng.integers(2**32, size=(10, 64), dtype=np.uint32).view(np.float32)
        for left in (bits, rng.choice(infinite, (10, 64))):
            assert np.linalg.norm(np.asarray(run(left), np.float64)) <= 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of the CPU backend")
def test_a_compiler_can_be_let_to_forget_that_numbers_may_be_nan():
    # The control of the test above.
    def kept(rows):
        finite = jnp.isfinite(jnp.sum(rows * rows, axis=1))
        return jnp.sum(jnp.where(finite[:, None], rows, 0.0), axis=0)

    rows = jnp.asarray([[1.0], [np.nan]], jnp.float32)
    assert jax.jit(kept)(rows) == 1
    assert np.isnan(jax.jit(kept, compiler_options=FAST)(rows))
