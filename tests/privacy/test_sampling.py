import functools
import itertools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.privacy.keys import derive
from dpbilevel.privacy.records.rows import padded_rows
from dpbilevel.privacy.sampling.base import masked_batch
from dpbilevel.privacy.sampling.fixed_size import RandomAllocation
from tests.cases import slow

REPLACE, ADD_OR_REMOVE = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE
ALPHA = 1e-4
GAUSSIAN = dp_accounting.GaussianDpEvent(2.0)
N, DRAWS = 12, 20_000


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


@functools.cache
def inclusions(sampling, n=N, draws=DRAWS, seed=0, partitionable=True):
    """How often every record is in each of many batches."""
    records = jnp.arange(n)

    @jax.jit
    @jax.vmap
    def counts(key):
        batch = sampling.draw(records, n, key=key)
        kept = jnp.ones(len(batch.records), bool) if batch.mask is None else batch.mask
        return jnp.zeros(n, jnp.int32).at[batch.records].add(kept.astype(jnp.int32))

    with jax.threefry_partitionable(partitionable):
        return np.asarray(counts(keys(draws, seed)))


def worst_binomial_pvalue(counts, trials, rate):
    law = scipy.stats.binom(trials, rate)
    tails = np.minimum(law.cdf(counts), law.sf(counts - 1))
    return min(1.0, 2 * float(tails.min()) * np.size(counts))


def pair_counts(included):
    return np.asarray(
        [
            np.sum(included[:, i] * included[:, j])
            for i, j in itertools.combinations(range(included.shape[1]), 2)
        ]
    )


@pytest.mark.parametrize(
    ("rate", "partitionable"),
    [(0.03, True), *slow((0.3, True), (0.9, True), (0.3, False))],
)
def test_poisson_includes_each_record_and_each_pair_at_its_rate(rate, partitionable):
    included = inclusions(dpb.Poisson(rate, N), partitionable=partitionable)
    assert included.max() == 1
    assert worst_binomial_pvalue(included.sum(0), DRAWS, rate) > ALPHA
    assert worst_binomial_pvalue(pair_counts(included), DRAWS, rate**2) > ALPHA
    # The test must be able to fail: a rate 20% higher is rejected.
    assert worst_binomial_pvalue(included.sum(0), DRAWS, min(1.2 * rate, 0.97)) < ALPHA


@pytest.mark.slow
def test_poisson_batch_sizes_are_binomial_which_fixed_sizes_are_not():
    law = DRAWS * scipy.stats.binom.pmf(np.arange(N + 1), N, 0.5)

    def pvalue(sampling):
        sizes = np.bincount(inclusions(sampling).sum(1), minlength=N + 1)
        return scipy.stats.chisquare(sizes, law).pvalue

    assert pvalue(dpb.Poisson(0.5, N)) > ALPHA
    assert pvalue(dpb.FixedSize(6)) < ALPHA


@pytest.mark.parametrize("rate", [1e-12, 0.01, 1 / 3, 0.5, 1 - 1e-12])
def test_the_realised_rate_is_what_the_bits_give_and_what_is_accounted(rate):
    sampling = dpb.Poisson(rate)
    realised = sampling.realised_rate
    assert 0 < realised < 1
    assert abs(realised - rate) <= 2.0**-32
    assert (realised * 2**32).is_integer()
    event = sampling.event(GAUSSIAN, ADD_OR_REMOVE, 100)
    assert event.sampling_probability == realised
    assert sampling.denominator(100) == 100 * realised


@pytest.mark.reuses_keys
def test_a_record_is_chosen_exactly_when_its_bits_are_below_the_rate(getkey):
    key, n, sampling = getkey(), 1000, dpb.Poisson(0.25, capacity=1000)
    members, _ = derive(key, "sampling", "rows")
    bits = np.asarray(jax.random.bits(members, (n,), jnp.uint32))
    batch = sampling.draw(jnp.arange(n), n, key=key)
    chosen = np.asarray(batch.records)[np.asarray(batch.mask)]
    np.testing.assert_array_equal(chosen, np.flatnonzero(bits < 2**30))


def test_bits_equal_to_the_rate_choose_no_record(getkey, monkeypatch):
    bits = jnp.asarray([2**30 - 1, 2**30, 2**30 + 1], jnp.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda *_: bits)
    batch = dpb.Poisson(0.25).draw(jnp.arange(3), 3, key=getkey())
    assert batch.records[batch.mask].tolist() == [0]


def test_an_overflowing_batch_is_full_and_raises_nothing(getkey):
    sampling = dpb.Poisson(0.9, capacity=3)
    records = {"x": jnp.arange(50), "y": jnp.ones((50, 2))}
    batch = sampling.draw(records, 50, key=getkey())
    assert batch.mask.sum() == 3
    assert batch.records["x"].shape == (64,)
    assert len(np.unique(batch.records["x"][batch.mask])) == 3


def test_the_chance_of_overflow_is_the_binomial_tail():
    sampling = dpb.Poisson(0.1, capacity=20)
    tail = scipy.stats.binom.sf(20, 128, sampling.realised_rate)  # of all rows
    for relation in dpb.Neighbours:
        assert sampling.failure(relation, 100) == pytest.approx(tail, rel=1e-9)


@pytest.mark.slow
def test_a_fixed_capacity_is_refused_for_more_records_than_it_is_accounted_for(getkey):
    query = dpb.privacy.Query("records", 100, 1.0, dpb.Poisson(0.1, capacity=40))
    with pytest.raises(ValueError, match="for 100 records, got 1000 rows"):
        query.read(lambda z: z, jnp.ones(1000), precision="float", key=getkey())
    for fitting in (90, 128):
        query.read(lambda z: z, jnp.ones(fitting), precision="float", key=getkey())


def test_batches_overflow_as_often_as_accounted():
    tail = dpb.Poisson(0.3, 24).failure(REPLACE, 63)  # of 64 rows
    overflows = int(np.sum(inclusions(dpb.Poisson(0.3, 64), 64).sum(1) > 24))
    assert scipy.stats.binomtest(overflows, DRAWS, tail).pvalue > ALPHA
    assert scipy.stats.binomtest(overflows, DRAWS, 0.9 * tail).pvalue < ALPHA


@pytest.mark.parametrize("relation", dpb.Neighbours)
@pytest.mark.parametrize("size", [10, 1000, 60_000, 10_000_000])
@pytest.mark.parametrize("rate", [1e-6, 0.001, 0.03, 0.5, 0.99])
def test_the_room_of_a_batch_is_outgrown_as_rarely_as_accounted(relation, size, rate):
    sampling, rows = dpb.Poisson(rate), padded_rows(size)
    room, failure = sampling.rows(size), sampling.failure(relation, size)
    assert room % 64 == 0
    assert 0 < room <= rows
    # Ten million draws cost a thousandth of a delta of 1e-15, at epsilon 20.
    assert 1e7 * failure * (1 + math.exp(20)) < 1e-3 * 1e-15
    if room == rows:
        assert failure == 0
    else:
        law = scipy.stats.binom(rows, sampling.realised_rate)
        assert 0 < law.sf(room) <= failure
        # A block less would not do by the bound, which is tight to a factor of 500.
        assert room == 64 or law.sf(room - 64) > failure / 500


def test_the_default_capacity_fits_more_records_than_planned(getkey):
    # Under add-or-remove-one the real number of records is private and may differ.
    sampling = dpb.Poisson(0.5)
    batch = sampling.draw(jnp.arange(4000), 100, key=getkey())
    assert not batch.mask.all()
    assert batch.denominator == 50
    assert int(batch.mask.sum()) > 1500


def test_a_batch_without_a_chance_of_overflow_has_room_for_all_rows(getkey):
    sampling, rows = dpb.Poisson(0.3), 256  # more than planned, on several devices
    assert sampling.failure(ADD_OR_REMOVE, 50) == 0
    batch = sampling.draw(jnp.arange(rows), 50, key=getkey())
    assert len(batch.mask) >= rows
    # The control: a plan for as many records has less room, and counts the chance.
    assert sampling.rows(rows - 1) < rows
    assert sampling.failure(ADD_OR_REMOVE, rows - 1) > 0


@pytest.mark.parametrize("n", [0, 1])
def test_poisson_draws_from_no_records_and_from_one(n, getkey):
    records = {"x": jnp.ones((n, 3)), "k": jnp.arange(n)}
    batch = dpb.Poisson(0.5).draw(records, 10, key=getkey())
    assert batch.records["x"].shape[1:] == (3,)
    assert int(batch.mask.sum()) <= n


@pytest.mark.parametrize(
    ("size", "partitionable"), [(1, True), *slow((5, True), (N, True), (5, False))]
)
def test_fixed_size_batches_are_uniform_subsets_without_replacement(
    size, partitionable
):
    included = inclusions(dpb.FixedSize(size), partitionable=partitionable)
    assert included.max() == 1
    assert (included.sum(1) == size).all()
    rate, pair = size / N, size * (size - 1) / (N * (N - 1))
    assert worst_binomial_pvalue(included.sum(0), DRAWS, rate) > ALPHA
    assert worst_binomial_pvalue(pair_counts(included), DRAWS, pair) > ALPHA
    if 1 < size < N:
        # The control: pairs are rarer than if records were drawn independently.
        assert worst_binomial_pvalue(pair_counts(included), DRAWS, rate**2) < ALPHA


@pytest.mark.parametrize(("size", "n", "subsets"), [(2, 5, 10), *slow((2, 9, 36))])
def test_every_small_subset_is_equally_likely(size, n, subsets):
    included = inclusions(dpb.FixedSize(size), n=n, draws=50_000, seed=1)
    counts = np.unique(included @ 2 ** np.arange(n), return_counts=True)[1]
    assert len(counts) == subsets
    assert scipy.stats.chisquare(counts).pvalue > ALPHA
    uneven = counts + 3000 // subsets * (np.arange(subsets) < subsets // 2)
    assert scipy.stats.chisquare(uneven).pvalue < ALPHA


@pytest.mark.parametrize(("size", "n"), [(1, 4), (2, 9), (10, 40), (60, 1000)])
def test_a_small_subset_runs_out_of_members_as_rarely_as_it_is_charged(size, n):
    sampling = dpb.FixedSize(size)

    def short(tries):
        """The probability of too few different ones, by the chain of their number."""
        law = np.zeros(size + 1)
        law[0] = 1.0
        for _ in range(tries):
            known = np.append(np.arange(size), n) / n  # enough stay enough
            law, moved = law * known, law * (1 - known)
            law[1:] += moved[:-1]
        return law[:-1].sum()

    tries = sampling._tries(n)
    assert short(tries) <= sampling.failure(REPLACE, n)
    # The control: half of the spare ones would not do.
    assert size == 1 or short((size + tries) // 2) > sampling.failure(REPLACE, n)


def test_fixed_size_is_refused_under_add_or_remove_with_the_reason():
    with pytest.raises(ValueError, match=r"other members.*Use Poisson"):
        dpb.FixedSize(5).event(GAUSSIAN, ADD_OR_REMOVE, 10)


def test_a_fixed_size_larger_than_the_data_is_refused(getkey):
    message = "no batch of 11 from 10 records"
    with pytest.raises(ValueError, match=message):
        dpb.FixedSize(11).event(GAUSSIAN, REPLACE, 10)
    with pytest.raises(ValueError, match=message):
        dpb.FixedSize(11).draw(jnp.zeros(10), 10, key=getkey())


def test_a_full_batch_is_everything_under_either_relation(getkey):
    batch = dpb.FullBatch().draw(jnp.arange(7), 7, key=getkey())
    np.testing.assert_array_equal(batch.records, np.arange(7))
    assert batch.mask is None
    assert batch.denominator == 7
    for relation in (REPLACE, ADD_OR_REMOVE):
        assert dpb.FullBatch().event(GAUSSIAN, relation, 7) is GAUSSIAN
        assert dpb.FullBatch().failure(relation, 7) == 0


def test_batches_in_which_a_record_moves_others_on_say_so(getkey):
    numbers = np.arange(64, dtype=np.float32)

    def of(sampling):
        sampling = sampling.in_pass(numbers, key=getkey())
        return sampling.draw(numbers, 64, key=getkey(), index=0)

    chosen = numbers % 3 == 0
    joins = masked_batch(numbers, None, chosen, 64, 1.0)
    stays = masked_batch(numbers, None, chosen & (numbers > 0), 64, 1.0)
    moved = joins.mask & stays.mask & (joins.records != stays.records)
    assert int(np.sum(moved)) == 21  # all others
    assert not joins.rows_fixed
    assert not of(dpb.Poisson(rate=0.3)).rows_fixed
    assert not of(RandomAllocation(4)).rows_fixed
    # The control: schemes in which it takes the row of another.
    assert of(dpb.FullBatch()).rows_fixed
    assert of(dpb.FixedSize(30)).rows_fixed


@pytest.mark.reuses_keys
@pytest.mark.parametrize("sampling", [dpb.Poisson(0.3, N), *slow(dpb.FixedSize(5))])
def test_the_key_and_nothing_else_decides_the_batch(sampling, getkey):
    assert len(np.unique(inclusions(sampling)[:50], axis=0)) > 10
    key = getkey()
    draws = (  # traced twice, so that nothing of Python's decides either
        jax.jit(lambda key: sampling.draw(jnp.arange(N), N, key=key).records)(key)
        for _ in range(2)
    )
    np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 100, np.nan, None])
def test_rates_outside_the_unit_interval_are_refused(rate):
    with pytest.raises(ValueError, match=r"strictly between 0 and 1.*batch size / num"):
        dpb.Poisson(rate)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_counts_must_be_positive_integers(count):
    with pytest.raises(ValueError, match="FixedSize: size must be an integer"):
        dpb.FixedSize(count)
    with pytest.raises(ValueError, match="Poisson: capacity must be an integer"):
        dpb.Poisson(0.5, count)
