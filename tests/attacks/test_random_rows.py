"""Rows at random: a record that joins moves its own groups alone, by its share."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.privacy.per_example import clipping, summation
from dpbilevel.privacy.per_example.clipping import clipped_mean
from dpbilevel.privacy.per_example.factored import Factored
from dpbilevel.privacy.sampling.base import Batch
from tests.attacks.test_products import P, Q, distance, factors, gradient

ADDED = Neighbours.ADD_OR_REMOVE_ONE
UNIT = 2.0**-24


def rule(value, n, *, joins=True):
    one = jnp.float32(1)
    return summation.GridSum(value, one, one, n, n, joins=joins)


def of_places(places, width=P):
    sides = (jax.ShapeDtypeStruct((places, d), np.float32) for d in (width, Q))
    return Factored(*sides, (width, Q), (0,), (1,))


def bound(rule, leaves):
    """How far one that joins moves the rounded sum, by docs/mathematics.md."""
    squares = 0.0
    for factor, several in ((1, False), (16, True)):
        kind = [v for v in leaves if (v.places > 1) is several]
        sizes = [rule.group_size(v) for v in kind]
        terms = [k * v.places + 4 for k, v in zip(sizes, kind, strict=True)]
        worst = max(
            (m * UNIT / (1 - m * UNIT)) ** 2 * k
            for m, k in zip(terms, sizes, strict=True)
        )
        squares += factor**2 * worst * max(sizes)
    numbers = sum(v.shape[0] * v.shape[1] for v in leaves)
    return rule.clip_fraction + 2 * squares**0.5 + 2 * UNIT * numbers**0.5


@pytest.mark.parametrize("n", [64, 5000])
def test_the_margin_of_a_record_that_joins_is_that_of_docs_mathematics_md(n):
    leaves = [of_places(1), of_places(1, 5000), of_places(7), of_places(30)]
    assert 1 - 1e-4 < bound(rule(leaves, n), leaves) <= 1
    # The control: the margin of a replacement does not cover it.
    assert bound(rule(leaves, n, joins=False), leaves) > 1


def test_the_share_that_a_record_may_fill_does_not_depend_on_the_batch():
    leaves = [of_places(1), of_places(1, 5000), of_places(25)]
    shares = {rule(leaves, n).clip_fraction for n in (512, 2**20)}
    assert len(shares) == 1
    assert shares.pop() > 0.99


@pytest.fixture
def counts(monkeypatch):
    """Sums of rows in an order that is given."""
    orders = []
    sort = jax.lax.sort

    def given(operands, num_keys=1, **options):
        if num_keys != clipping._WORDS:
            return sort(operands, num_keys=num_keys, **options)
        return *operands[:-1], orders[-1]

    monkeypatch.setattr(jax.lax, "sort", given)

    @jax.jit  # one program compiles sooner than all of its operations
    def summed(data, mask, order):
        orders.append(order)
        batch = Batch(data, mask, 1.0, rows_fixed=False, key=jax.random.key(0))
        return clipped_mean(gradient, batch, clip_norm=1.0).raw.counts

    return summed


def test_whoever_joins_moves_the_sum_by_a_share_whatever_the_rows(counts):
    n, joins = 192, 40
    rng = np.random.default_rng(0)
    data = factors(n, 3)
    others = [*range(joins), *range(joins + 1, n)]
    rest = [v[[*others, joins]] for v in data]
    found = []
    for _ in range(4):
        rows = rng.permutation(n)  # of the others in order, then of the one
        order = np.argsort(np.insert(rows[:-1], joins, rows[-1]))
        there = counts(data, np.ones(n, bool), order)
        gone = counts(rest, np.arange(n) < n - 1, np.argsort(rows))
        found.append(distance(there, gone))
    assert 0.9 < min(found) <= max(found) <= 1


def test_the_others_have_the_same_rows_with_and_without_it():
    n, draws = 4, 4000
    records = jnp.arange(n)

    @jax.jit
    @jax.vmap
    def placed(key):
        rows, _, _ = clipping._in_random_rows(records, None, n, n, key=key)
        return jnp.argsort(rows)

    rows = np.asarray(placed(jax.random.split(jax.random.key(5), draws)))
    every = [*itertools.permutations(range(n), 2)]

    def pvalue(pairs):
        seen = collections.Counter(map(tuple, pairs.tolist()))
        return scipy.stats.chisquare([seen[pair] for pair in every]).pvalue

    # Records 0 and 2 without the record 1 between them are in the place of 0 and 1.
    assert pvalue(rows[:, [0, 2]]) > 1e-6
    assert pvalue(rows[:, [0, 1]]) > 1e-6
    # The control: a rotation gives every record each row, but not every pair.
    turns = np.random.default_rng(0).integers(0, n, (draws, 1))
    assert pvalue((turns + np.arange(2)) % n) < 1e-6


def test_padding_beyond_the_rows_of_records_stays_last():
    records, mask = jnp.arange(8.0), jnp.arange(8) < 5
    rows, kept = jax.jit(
        lambda key: clipping._in_random_rows(records, mask, 8, 6, key=key)[:2]
    )(jax.random.key(3))
    assert sorted(np.asarray(rows[:6]).tolist()) == [0, 1, 2, 3, 4, 5]
    assert sorted(np.asarray(rows[kept]).tolist()) == [0, 1, 2, 3, 4]
    assert not kept[6:].any()


def test_batches_that_move_records_have_keys_of_their_own(getkey):
    rows, key = jnp.zeros(64), getkey()
    drawn = jax.jit(lambda key: dpb.Poisson(0.5).draw(rows, 60, key=key).key)(key)
    assert (jax.random.key_data(drawn) != jax.random.key_data(key)).any()
    full = dpb.FullBatch().draw(rows, 60, key=None)
    assert full.key is None


def test_a_mean_of_rows_at_random_is_good_for_either_relation(getkey):
    @jax.jit
    def sealed(records, key):
        options = {"clip_norm": 1.0, "denominator": 1.0, "key": key}
        return clipped_mean(gradient, records, neighbours=ADDED, **options)

    bounded = sealed(factors(8, 1), getkey())
    assert float(bounded.sensitivity(ADDED)) == 1
    assert float(bounded.sensitivity()) == 2
