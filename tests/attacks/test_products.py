"""No record moves a sum of products by more than its share, whatever the factors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel.privacy.per_example import factored, norms, summation
from dpbilevel.privacy.per_example.clipping import clipped_mean
from dpbilevel.privacy.per_example.factored import Factored
from dpbilevel.privacy.per_example.norms import TOO_LONG, scale_and_norm
from dpbilevel.privacy.sampling.base import Batch
from tests.cases import slow

# Losses whose gradient with respect to W is sum_t left_t right_t^T, for any factors.
P, Q = 24, 20


def gradient(record):
    left, right = record
    return jax.grad(lambda W: jnp.sum((left @ W) * right))(jnp.zeros((P, Q)))


def product(left, right):
    return np.einsum("ntp,ntq->npq", np.asarray(left, float), np.asarray(right, float))


@jax.jit
def counts(left, right, mask):
    return clipped_mean(
        gradient,
        (left, right),
        mask=mask,
        clip_norm=1.0,
        denominator=1.0,
        precision="grid",
    ).raw.counts


def moved(first, second, mask=None):
    """How far the sums of two data sets are apart, in shares of one record."""
    mask = jnp.ones(len(first[0]), bool) if mask is None else mask
    return distance(counts(*first, mask), counts(*second, mask))


def distance(first, second):
    """Between two sums of counts, in shares; their unit is 2^-23 of one."""
    difference = np.asarray(first) - np.asarray(second)
    return float(np.linalg.norm(difference.astype(np.float64))) * 2.0**-23


def factors(n, places, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda width: rng.normal(size=(n, places, width)).astype(np.float32)  # noqa: E731
    return draw(P), draw(Q)


def with_last(data, left, right):
    """The same records with another last one."""
    made = [np.array(v) for v in data]
    made[0][-1], made[1][-1] = left, right
    return tuple(made)


HOSTILE = {
    "huge": (3e20, 1e18),
    "tiny and huge": (1e-30, 1e30),
    "denormal": (1e-40, 1e38),
    "denormal the other way": (1e38, 1e-40),
    "overflowing": (1e38, 1e38),
    "ordinary": (1.0, 1.0),
    "nothing": (0.0, 0.0),
}


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_moves_the_sum_by_its_share_at_most(name, places):
    data = factors(100, places)
    sides = (np.float32(size) for size in HOSTILE[name])
    left, right = (
        size * v[0] for size, v in zip(sides, factors(1, places, 1), strict=True)
    )
    assert moved(with_last(data, left, right), with_last(data, -left, right)) <= 2
    # One place of several that is not a number takes the whole record away.
    for bad in (np.nan, np.inf, -np.inf):
        for side in range(2):
            record = [left.copy(), right.copy()]
            record[side][-1, 0] = bad
            assert moved(with_last(data, *record), data) <= 2
            gone = moved(with_last(data, *record), with_last(data, 0 * left, right))
            assert gone < 1e-3


def test_a_masked_row_may_hold_anything():
    data = factors(70, 2)
    mask = jnp.arange(70) != 69
    expected = counts(*data, mask)
    for value in (np.nan, np.inf, 3e38, 1.0):
        hidden = with_last(data, np.float32(value), np.float32(value))
        np.testing.assert_array_equal(counts(*hidden, mask), expected)


def test_places_that_cancel_count_for_their_rounding():
    data = factors(32, 2)
    left, right = factors(1, 2, 1)
    # Two places that are the same but for one part in a million.
    left = np.repeat(left[0, :1], 2, axis=0) * np.float32(1e6)
    right = np.stack([right[0, 0], -right[0, 0] * np.float32(1 + 1e-6)])
    there, back = with_last(data, left, right), with_last(data, left, -right)
    assert moved(there, back) <= 2


@pytest.mark.parametrize("places", [1, *slow(2, 7, 64)])
@pytest.mark.parametrize("scale", [1e-12, *slow(1.0, 1e12)])
def test_the_norm_of_a_product_is_bounded_closely_and_from_above(places, scale):
    left, right = factors(20, places)
    value = Factored(left, np.float32(scale) * right, (P, Q), (0,), (1,))
    sums, bounds, lengths = jax.vmap(lambda v: scale_and_norm(v, jnp.float32(scale)))(
        value
    )
    exact = np.linalg.norm(product(sums.left, sums.right), axis=(1, 2))
    assert (np.asarray(bounds, float) >= exact).all()
    np.testing.assert_allclose(bounds, exact, rtol=2e-4 * places)
    apart = np.linalg.norm(sums.left, axis=2) * np.linalg.norm(sums.right, axis=2)
    if places > 1:  # one place does not cancel
        assert (np.asarray(lengths, float) >= apart.sum(1)).all()
        np.testing.assert_allclose(lengths, apart.sum(1), rtol=1e-4)
    # In units of the clip norm the value is what it was.
    np.testing.assert_allclose(
        product(sums.left, sums.right), product(left, right), atol=1e-4 * places
    )


def test_the_norm_of_places_that_nearly_cancel_is_bounded_from_above():
    # Two places 16 times as long as their sum: the most that the weights allow for.
    n, cancelled = 1000, np.float32(1 / 8)
    left, right = factors(n, 2)
    left[:, 1], right[:, 1] = left[:, 0], (cancelled - 1) * right[:, 0]
    value = Factored(left, right, (P, Q), (0,), (1,))
    sums, bounds, lengths = jax.vmap(lambda v: scale_and_norm(v, jnp.float32(1)))(value)
    exact = np.linalg.norm(product(sums.left, sums.right), axis=(1, 2))
    np.testing.assert_allclose(lengths, 15 * exact, rtol=1e-3)
    assert (np.asarray(bounds, float) >= exact).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("side", [0, 1])
def test_a_factor_that_is_not_finite_makes_the_norm_too_long(bad, places, side):
    pair = [v[0] for v in factors(1, places)]
    pair[side][0, 1] = bad
    value = Factored(jnp.asarray(pair[0]), jnp.asarray(pair[1]), (P, Q), (0,), (1,))
    _, norm, _ = scale_and_norm(value, jnp.float32(1.0))
    assert not norm < TOO_LONG


UNEVEN = 1.3  # a clip norm that is no multiple of the spacing of large sums


def worst_rounding(size):
    """Sums of `size` equal records, of which the last one turns around.

    All entries of a sum are equal, so that they round alike.
    """
    left, right = np.ones((size, 1, 2), np.float32), np.ones((size, 1, 2), np.float32)
    worst = 0.0
    for part in np.linspace(0.1, 0.9, 9, dtype=np.float32):
        right[[0, -2]] = part / 4  # not clipped: moves sums against their roundings
        for sign in (1, -1):
            others = left, sign * right
            there = with_last(others, 1.0, 1.0)
            worst = max(worst, moved2(there, with_last(others, 1.0, -1.0)))
    return worst


@jax.jit
def counts2(left, right):
    def gradient(record):
        left, right = record
        return jax.grad(lambda W: jnp.sum((left @ W) * right))(jnp.zeros((2, 2)))

    return clipped_mean(
        gradient,
        (left, right),
        clip_norm=UNEVEN,
        denominator=1.0,
        precision="grid",
        microbatch=2**17,
    ).raw.counts


def moved2(first, second):
    return distance(counts2(*first), counts2(*second)) / UNEVEN


def test_the_rounding_of_a_full_group_stays_within_the_margin():
    assert 1.99 < worst_rounding(factored.GROUP) <= 2
    assert 1.99 < worst_rounding(4 * factored.GROUP) <= 2


def cleared():
    for fun in (counts, counts2):
        fun.clear_cache()


@pytest.fixture
def broken(monkeypatch):
    """Patches a function of the library, in fresh programs."""

    def patch(module, name, value):
        cleared()
        monkeypatch.setattr(module, name, value)

    yield patch
    monkeypatch.undo()
    cleared()


def test_groups_that_are_too_large_for_their_margin_are_seen(broken):
    margin, honest = summation.AbstractSum.rounding, summation.AbstractSum.group_size
    claims = []  # not empty while the margin is claimed

    def group_size(self, value):
        return honest(self, value) if claims else 2**17

    def claimed(self):
        claims.append(None)
        try:
            return margin.fget(self)
        finally:
            claims.clear()

    broken(summation.AbstractSum, "group_size", group_size)
    broken(summation.AbstractSum, "rounding", property(claimed))
    assert worst_rounding(2**17) > 2


def multiple_that_rounds_up():
    """The length, in shares, of a row of ones whose entries are rounded upwards."""
    # Entries of 2**21 / sqrt(d) coarse steps: .75 of one is rounded up, .25 is not.
    d = next(d for d in range(4000, 5000) if 0.72 < 2**21 / d**0.5 % 1 < 0.78)
    row = Factored(jnp.ones((1, d)), jnp.ones((1, 1)), (d,), (0,), ())
    rule = summation.GridSum(row, jnp.float32(1), jnp.float32(1), 1, 1)
    row = jax.tree.map(lambda v: v[None], row)
    counts = rule.add(rule.empty(), jnp.asarray([rule.clip_fraction / d**0.5]), row)
    return distance(counts, 0)


def test_the_rounding_of_a_multiple_of_a_row_stays_within_the_share():
    assert 1 - 1e-4 < multiple_that_rounds_up() <= 1


def test_coarse_rounding_that_is_not_paid_for_is_seen(broken):
    broken(summation, "COARSE", 1)
    assert multiple_that_rounds_up() > 1


def without_cross_terms(honest, leaf, clip_norm):
    part = honest(leaf, clip_norm)
    squares = jnp.sum(part.value.left**2, 1) * jnp.sum(part.value.right**2, 1)
    return norms._Part(part.value, jnp.sum(squares), part.size, part.squared_length)


def of_the_first_place(honest, leaf, clip_norm):
    first = Factored(
        leaf.left[:1], leaf.right[:1], leaf.shape, leaf.left_axes, leaf.right_axes
    )
    part, whole = honest(first, clip_norm), honest(leaf, clip_norm)
    return norms._Part(whole.value, part.squares, part.size, part.squared_length)


@pytest.mark.parametrize("norm", [without_cross_terms, of_the_first_place])
def test_a_norm_that_leaves_something_out_is_seen(broken, norm):
    data = factors(10, 3)
    left, right = (np.repeat(v[0][:1], 3, axis=0) for v in factors(1, 3, 1))
    there, back = with_last(data, left, right), with_last(data, -left, right)
    assert moved(there, back) <= 2
    broken(norms, "_factored", functools.partial(norm, norms._factored))
    assert moved(there, back) > 3


def test_masked_rows_that_are_added_are_seen(broken):
    honest = factored.products
    data = factors(10, 2)
    mask = jnp.arange(10) != 9
    hidden = with_last(data, np.float32(1), np.float32(1))
    assert moved(data, hidden, mask) == 0
    broken(
        factored,
        "products",
        lambda weights, *rest: honest(jnp.full_like(weights, weights[0]), *rest),
    )
    assert moved(data, hidden, mask) > 0.1


PLACES, WIDTH = 64, 256


def hostile_rows(joins):
    """Places whose sums round otherwise in other groups, as found by an attack.

    After three records whose ends cancel but for tiny parts comes a large one. One more
    record, of a norm of zero, moves all others by a row.
    """
    unit = 2.0**-22
    cancelling = np.full(PLACES, unit)
    cancelling[[0, -1]] = 4 - 200 * unit, -(4 - 200 * unit)
    large = np.zeros(PLACES)
    large[0] = 400 * unit
    kinds = [np.zeros(PLACES)] * joins + [
        cancelling,
        cancelling,
        cancelling,
        large,
    ] * 64
    kinds += [np.zeros(PLACES)] * (260 - len(kinds))
    return np.asarray(kinds, np.float32)


@functools.partial(jax.jit, static_argnames="rows_fixed")
def hostile_counts(numbers, rows_fixed):
    side = jnp.full(WIDTH, 1 / math.sqrt(WIDTH), jnp.float32)

    def gradient(numbers):
        left, right = jnp.outer(numbers, side), jnp.tile(side, (PLACES, 1))
        zeros = jnp.zeros((WIDTH, WIDTH))
        return jax.grad(lambda W: jnp.sum((left @ W) * right))(zeros)

    batch = Batch(numbers, None, 1.0, rows_fixed=rows_fixed)
    return clipped_mean(gradient, batch, clip_norm=1.0, precision="grid").raw.counts


@pytest.mark.slow
def test_a_record_that_is_drawn_moves_the_rounding_of_others_within_the_margin():
    def apart(rows_fixed):
        joins, stays = (hostile_counts(hostile_rows(n), rows_fixed) for n in (1, 0))
        return distance(joins, stays)

    margin = 2.0**-11  # what grouped sums keep where others stay in their rows
    assert apart(rows_fixed=False) < 1e-6
    assert apart(rows_fixed=True) > margin  # the control: a flag that is wrong


def test_the_margins_of_sums_of_places_are_those_of_docs_mathematics_md():
    n, places, cancellation_factor, unit = 300, 8, 16, 2.0**-24
    size = jax.ShapeDtypeStruct((places, P), np.float32)
    value = Factored(
        size, jax.ShapeDtypeStruct((places, Q), np.float32), (P, Q), (0,), (1,)
    )

    def rule(rows_fixed):
        one = jnp.float32(1)
        return summation.GridSum(value, one, one, n, n, rows_fixed)

    def gamma(size):
        terms = size * places + 4
        return terms * unit / (1 - terms * unit)

    there, moved = rule(True), rule(False)
    size = there.group_size(value)
    exact = cancellation_factor * size * gamma(size)
    assert exact <= there.rounding <= 1.01 * exact
    size = moved.group_size(value)
    rounded = math.sqrt(math.ceil(n / size) ** 2 * P * Q) * 2 * unit
    exact = 2 * cancellation_factor * n * gamma(size) + rounded
    assert exact <= moved.rounding <= 1.01 * exact


@pytest.mark.parametrize(("n", "together"), [(512, 64), (9000, 32)])
def test_the_margin_of_sums_in_any_order_covers_a_move_of_all_groups(n, together):
    data = factors(n, 1)
    data[0][0] = 0
    moved_on = [np.roll(v, -1, axis=0) for v in data]

    def counted(left, right):
        batch = Batch((left, right), None, 1.0, rows_fixed=False)
        return clipped_mean(gradient, batch, clip_norm=1.0, precision="grid").raw

    first, second = (jax.jit(counted)(*v).counts for v in (data, moved_on))
    size = (
        jax.ShapeDtypeStruct((1, P), jnp.float32),
        jax.ShapeDtypeStruct((1, Q), float),
    )
    one = Factored(*size, (P, Q), (0,), (1,))
    rule = summation.GridSum(
        one, jnp.float32(1), jnp.float32(1), n, n, rows_fixed=False
    )
    assert rule.group_size(one) == together
    assert 0 < distance(first, second) < rule.rounding <= 1 / 16
