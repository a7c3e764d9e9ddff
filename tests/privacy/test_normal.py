"""Normal integers: the exact law of the table, of doublings, and of what is drawn."""

import decimal
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpbilevel.privacy.exact import normal as module
from dpbilevel.privacy.exact.normal import MOST_DOUBLINGS, probabilities
from tests.cases import slow

T = 2**10
REACH = 2**14
ALPHA = 1e-4
DIGITS = decimal.Context(prec=90)
FIELDS = [length for _, _, length in module._FIELDS]

# Written again from docs/mathematics.md: the number of bits of every doubling.
COUNTS = [7, 6, 6, 5, 5, 5] + [4] * 5 + [3] * 10 + [2] * 21
# And where they are read: word and place of the first bit of a field, and its length.
# The j-th bit of a field belongs to doubling `length - j`, of the late ones to 14 more.
PLACES = [(3, 18, 14), (3, 4, 14), (4, 18, 14), (4, 7, 11), (4, 1, 6), (3, 1, 3)]
PLACES += [(3, 0, 1)]
LATE_PLACES = [(5, 0, 28), (6, 0, 28), (7, 0, 7)]


@functools.cache
def density_at_zero():
    """1 / sqrt(2 pi), by Machin's formula."""

    def arctan_of_inverse(k):
        terms = (
            DIGITS.divide((-1) ** n, (2 * n + 1) * k ** (2 * n + 1)) for n in range(70)
        )
        return functools.reduce(DIGITS.add, terms)

    fifth, other = arctan_of_inverse(5), arctan_of_inverse(239)
    pi = DIGITS.subtract(DIGITS.multiply(16, fifth), DIGITS.multiply(4, other))
    return DIGITS.divide(1, DIGITS.sqrt(DIGITS.multiply(2, pi)))


@functools.cache
def upper_tail(x):
    """P(Z > x) for a fraction x, to 40 digits of itself up to x = 12."""
    with decimal.localcontext(DIGITS):
        x = decimal.Decimal(x.numerator) / decimal.Decimal(x.denominator)
        term, total, n = x, x, 1
        while abs(term) > decimal.Decimal(10) ** -85:
            term *= x * x / (2 * n + 1)
            total, n = total + term, n + 1
        half = decimal.Decimal("0.5")
        return half - total * (-x * x / 2).exp() * density_at_zero()


def window(low, high, scale):
    """P(low < scale Z < high) for fractions of integers."""
    if high <= 0:  # away from the subtraction of numbers close to one
        low, high = -high, -low
    low, high = (upper_tail(Fraction(v) / scale) for v in (low, high))
    return DIGITS.subtract(low, high)


def half(numerator):
    return Fraction(numerator, 2)


def test_probabilities_are_those_of_a_rounded_normal():
    found = probabilities()
    assert len(found) == 2 * REACH
    assert sum(found) == 2**96
    assert found[1:] == found[:0:-1]  # symmetric, and nothing at -REACH
    for a in (1, 2, -3, 500, -1024, 3000, 5000, -8000, 10_000, 11_000, 11_500, 16_000):
        exact = window(half(2 * a - 1), half(2 * a + 1), T)
        error = DIGITS.subtract(found[a + REACH], DIGITS.multiply(exact, 2**96))
        assert abs(error) <= decimal.Decimal("0.5000001"), a
    # The cell of zero takes the rounding of all others.
    exact = DIGITS.multiply(window(half(-1), half(1), T), 2**96)
    assert abs(found[REACH] - exact) <= REACH


def test_the_table_draws_with_these_probabilities_exactly():
    law, full = [0] * (2 * REACH), 2**81
    for column, (first, second, third) in enumerate(module._alias_table().tolist()):
        bound = (first & (2**17 - 1)) << 64 | second << 32 | third
        law[column] += bound
        law[first >> 17] += full - bound
    assert law == list(probabilities())


def test_a_cell_is_its_column_below_the_bound_and_the_alias_from_there():
    rng = np.random.default_rng(0)
    table = module._alias_table()
    columns = rng.integers(0, 2 * REACH, 3000)
    bounds = [
        (int(a) & (2**17 - 1)) << 64 | int(b) << 32 | int(c)
        for a, b, c in table[columns]
    ]
    steps = rng.choice([-(2**64), -(2**32), -1, 0, 1, 2**32, 2**64], 3000)
    draws = [
        min(max(b + int(s), 0), 2**81 - 1) for b, s in zip(bounds, steps, strict=True)
    ]
    words = [
        (int(c) << 17 | v >> 64, v >> 32 & 0xFFFFFFFF, v & 0xFFFFFFFF)
        for c, v in zip(columns, draws, strict=True)
    ]
    cells = jax.jit(module._cell)(jnp.asarray(words, jnp.uint32).T)
    below = np.asarray([v < b for v, b in zip(draws, bounds, strict=True)])
    assert 0.2 < below.mean() < 0.8
    expected = np.where(below, columns, table[columns, 0] >> 17).astype(int) - REACH
    np.testing.assert_array_equal(cells, expected)


@pytest.mark.parametrize("doublings", [0, 1, 2, 3, 7, 13, 14])
def test_doublings_add_numbers_of_ones(doublings):
    words = np.random.default_rng(1).integers(0, 2**32, (8, 500), dtype=np.uint32)
    found, twice_mean = jax.jit(module._leading_bits, static_argnums=1)(
        jnp.asarray(words), module._FIELDS, jnp.int32(14 - doublings)
    )
    total, mean = np.zeros(500, np.int64), 0.0
    for b in range(1, doublings + 1):
        bits = [
            words[word] >> np.uint32(start + length - b) & np.uint32(1)
            for word, start, length in module._FIELDS
            if length >= b
        ]
        total = 2 * total + np.sum(bits, axis=0, dtype=np.int64)
        mean = 2 * mean + len(bits) / 2
    np.testing.assert_array_equal(found, total)
    assert int(twice_mean) == 2 * mean


def test_no_random_bit_is_read_twice():
    for fields in (module._FIELDS, module._LATE_FIELDS):
        read = [(w, s + i) for w, s, length in fields for i in range(length)]
        assert len(read) == len(set(read))
        assert all(place < 32 for _, place in read)
    assert {w for w, _, _ in module._FIELDS} == {3, 4}
    assert {w for w, _, _ in module._LATE_FIELDS} == {5, 6, 7}


def bound_of_doubling(b, reach=11.02):
    """The relative error of doubling b in docs/mathematics.md."""
    k = COUNTS[b - 1]
    tau = T * 2.0 ** (b - 1)
    return (reach / (4 * tau)) ** k * math.exp(reach * k / (2 * tau))


def test_the_doublings_together_change_the_law_by_less_than_claimed():
    assert sum(map(bound_of_doubling, range(1, MOST_DOUBLINGS + 1))) < 2.0**-55
    # Derivatives of the normal density are bounded by powers up to there.
    z = np.linspace(0, 11.02, 20_001)
    for k in range(2, 8):
        hermite = np.polynomial.hermite_e.hermeval(z, [0] * k + [1])
        assert np.abs(hermite).max() <= 11.02**k * (1 + 1e-12)


def law_of_bits(fields, doublings):
    """The law of what the doublings add, in units of 2**-(number of bits)."""
    law = np.asarray([1], object)
    for b in range(1, doublings + 1):
        spread = np.zeros(2 * len(law) - 1, object)
        spread[::2] = law
        k = sum(length >= b for length in fields)
        law = np.convolve(spread, [math.comb(k, j) for j in range(k + 1)])
    return law.tolist()


def ratio_to_claim(n, doublings, fields):
    """P(N = n) over the law of a rounded Gaussian plus independent noise, less one."""
    law = law_of_bits(fields, doublings)
    scale, drawn, ideal = 2**doublings, decimal.Decimal(0), decimal.Decimal(0)
    with decimal.localcontext(DIGITS):
        for added, weight in enumerate(law):
            if (n - added) % scale == 0:
                a = (n - added) // scale
                drawn += weight * window(half(2 * a - 1), half(2 * a + 1), T)
            low, high = n - added - half(scale), n - added + half(scale)
            ideal += weight * window(low, high, T * scale) / scale
        return float(drawn / ideal - 1)


@pytest.mark.parametrize("doublings", [1, 2, 4])
@pytest.mark.parametrize("z", [0.0, 0.7, -2.5, 6.0, -10.9])
def test_the_law_is_a_rounded_gaussian_plus_noise_to_what_is_claimed(doublings, z):
    n = round(z * T * 2**doublings)
    for neighbour in (n, n + 1):
        assert abs(ratio_to_claim(neighbour, doublings, FIELDS)) < 2.0**-55
    # The control: three bits a doubling are too few.
    few = [abs(ratio_to_claim(v, doublings, [26] * 3)) for v in (n, n + 1)]
    assert max(few) > 2.0**-55


integers = jax.jit(
    lambda size, doublings, key: module.normal_integers([(size,)], doublings, key=key)[
        0
    ],
    static_argnums=0,
)


def draws(size, doublings, key):
    """Draws in units of their standard deviation."""
    value = integers(size, jnp.int32(doublings), key)
    return np.asarray(value, np.float64) / 2.0 ** (10 + doublings)


@pytest.mark.parametrize("doublings", [0, 1, 14, 26, 42])
def test_draws_are_standard_normal_at_their_scale(doublings):
    sample = draws(100_000, doublings, jax.random.key(doublings))
    assert scipy.stats.kstest(sample, "norm").pvalue > ALPHA
    # A 5% larger scale is rejected.
    assert scipy.stats.kstest(sample * 1.05, "norm").pvalue < ALPHA
    tail = scipy.stats.binomtest(
        int((np.abs(sample) > 3).sum()), len(sample), 2 * scipy.stats.norm.sf(3)
    )
    assert tail.pvalue > ALPHA


@pytest.mark.reuses_keys
@pytest.mark.parametrize("impl", ["threefry2x32", *slow("threefry4x32", "philox4x32")])
def test_draws_are_independent_over_places_keys_and_lanes(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 2)
    run = functools.partial(integers, 20_000, jnp.int32(20))
    left, right = sample = np.asarray(jax.vmap(run)(keys), np.int64)
    assert len(np.unique(sample)) > 39_900
    for one, other in ((left, right), (left[1:], left[:-1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(20_000)
    np.testing.assert_array_equal(run(keys[0]), left)


def test_arrays_share_one_draw():
    key = jax.random.key(6, impl="threefry4x32")
    shapes = [(3, 2), (), (5,)]
    arrays = module.normal_integers(shapes, jnp.int32(30), key=key)
    (flat,) = module.normal_integers([(12,)], jnp.int32(30), key=jax.random.clone(key))
    assert [v.shape for v in arrays] == shapes
    joined = np.concatenate([np.asarray(v).reshape(-1) for v in arrays])
    np.testing.assert_array_equal(joined, np.asarray(flat))


def test_values_reach_beyond_eight_standard_deviations():
    found = probabilities()
    reached = [a - REACH for a, p in enumerate(found) if p > 0]
    assert reached == list(range(-reached[-1], reached[-1] + 1))
    assert reached[-1] > 10.7 * T


@pytest.mark.slow
@pytest.mark.parametrize("doublings", [0, 3])
def test_ten_million_draws_have_the_law_cell_by_cell(doublings):
    size, rounds = 1_000_000, 10
    run = functools.partial(integers, size, jnp.int32(doublings))
    keys = jax.random.split(jax.random.key(77), rounds)
    sample = np.concatenate([np.asarray(run(key)) for key in keys])
    scale = T * 2**doublings
    edges = np.round(scipy.stats.norm.ppf(np.arange(1, 400) / 400) * scale) + 0.5
    bits = np.asarray(law_of_bits(FIELDS, doublings), float)
    bits /= bits.sum()
    shift = np.arange(len(bits)) - math.ceil((np.arange(len(bits)) * bits).sum() - 1e-9)
    table = np.asarray(probabilities(), float) / 2.0**96
    law = np.zeros(2 * REACH * 2**doublings + len(bits) + 1)
    start = -REACH * 2**doublings + shift[0]
    for added, weight in enumerate(bits):
        law[added : added + 2 * REACH * 2**doublings : 2**doublings] += weight * table
    places = np.arange(len(law)) + start
    cells = np.digitize(places, edges)
    expected = np.bincount(cells, law, 400) * len(sample)
    observed = np.bincount(np.digitize(sample, edges), minlength=400)
    assert scipy.stats.chisquare(observed, expected).pvalue > ALPHA
    few = [np.bincount(v % 16, w, 16) for v, w in ((sample, None), (places, law))]
    assert scipy.stats.chisquare(few[0], few[1] * len(sample)).pvalue > ALPHA
    # The control: a scale smaller by three thousandths is rejected.
    narrow = np.round(sample * 0.997)
    observed = np.bincount(np.digitize(narrow, edges), minlength=400)
    assert scipy.stats.chisquare(observed, expected).pvalue < ALPHA


def places_of(doubling):
    """The word and the place of every bit of one doubling."""
    late = doubling > 14
    number = doubling - 14 * late
    fields = LATE_PLACES if late else PLACES
    return [(w, s + length - number) for w, s, length in fields if length >= number]


def test_every_doubling_has_its_number_of_bits_and_no_bit_is_read_twice():
    read = [place for b in range(1, MOST_DOUBLINGS + 1) for place in places_of(b)]
    assert [len(places_of(b)) for b in range(1, MOST_DOUBLINGS + 1)] == COUNTS
    assert len(set(read)) == len(read) == 126
    assert {word for word, _ in read} == set(
        range(3, 8)
    )  # the table has the first three


def test_what_is_drawn_from_given_words_is_the_definition_for_every_scale():
    words = np.random.default_rng(3).integers(0, 2**32, (8, 60), dtype=np.uint32)
    words[3:, :3], words[3:, 3:6] = 0, 2**32 - 1
    cells = np.asarray(jax.jit(module._cell)(jnp.asarray(words))).tolist()
    scales = jnp.arange(MOST_DOUBLINGS + 1, dtype=jnp.int32)
    drawn = jax.jit(jax.vmap(module._from_words, (None, 0)))(jnp.asarray(words), scales)
    drawn = np.asarray(drawn).tolist()
    values, mean = cells, 0  # twice the mean
    for h, row in enumerate(drawn):
        if h:
            bits = [
                sum(int(words[w, i]) >> p & 1 for w, p in places_of(h))
                for i in range(len(values))
            ]
            values = [2 * v + b for v, b in zip(values, bits, strict=True)]
            mean = 2 * mean + COUNTS[h - 1]
        assert row == [v - -(-mean // 2) for v in values]


def test_every_bit_of_the_words_moves_what_it_should():
    words = np.random.default_rng(4).integers(0, 2**32, 8, dtype=np.uint32)
    flips = np.repeat(words[:, None], 8 * 32 + 1, axis=1)
    for w in range(8):
        for p in range(32):
            flips[w, 32 * w + p] ^= np.uint32(1 << p)
    drawn = module._from_words(jnp.asarray(flips), jnp.int32(MOST_DOUBLINGS))
    *moved, base = np.asarray(drawn).tolist()
    moved = [v - base for v in moved]
    places = {
        place: 2 ** (MOST_DOUBLINGS - b)
        for b in range(1, MOST_DOUBLINGS + 1)
        for place in places_of(b)
    }
    for w in range(3, 8):
        for p in range(32):
            assert abs(moved[32 * w + p]) == places.get((w, p), 0)
    # The bits of the table move a whole cell, so many doublings up.
    assert all(v % 2**MOST_DOUBLINGS == 0 for v in moved[: 3 * 32])
    assert any(moved[: 3 * 32])


@pytest.mark.parametrize("impl", ["threefry2x32", *slow("threefry4x32", "philox4x32")])
@pytest.mark.parametrize(
    "size", [4000, *slow(20_000)]
)  # drawn one by one, and in blocks
def test_no_word_of_any_number_is_another_word(impl, size):
    key = jax.random.key(5, impl=impl)
    words = np.stack(jax.jit(module._words, static_argnums=0)(size, key))
    assert words.shape == (8, size)
    # Of 160 000 words of 32 bits some three pairs are equal by chance.
    assert words.size - len(np.unique(words)) < 20
    bits = np.unpackbits(words.view(np.uint8), axis=1).astype(float) - 0.5
    found = np.corrcoef(bits) - np.eye(8)
    assert np.abs(found).max() < 5 / math.sqrt(bits.shape[1])
    # The control: one word read in place of another is seen by both.
    words[7] = words[5]
    assert words.size - len(np.unique(words)) > size / 2
