import functools
import itertools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.privacy import noise
from dpbilevel.privacy.chacha20 import CHACHA20
from dpbilevel.privacy.exact import normal
from dpbilevel.privacy.keys import GENERATORS, check_key, follows
from tests.cases import fast_first, slow

ALPHA = 1e-4


def standard_normal(like, *, key):
    return jax.jit(lambda key: normal.standard_normal(like, key=key))(key)


@functools.cache
def sample_of(partitionable=True):
    shape = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
    with jax.threefry_partitionable(partitionable):
        return np.asarray(standard_normal(shape, key=jax.random.key(3)))


@pytest.mark.parametrize("dtype", [jnp.float32, *slow(jnp.float64)])
def test_values_are_the_nearest_numbers_of_integers(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        key = jax.random.key(2)
        (drawn,) = normal.normal_integers([(1000,)], jnp.int32(42), key=key)
        exact = np.asarray(drawn, np.int64)
        value = standard_normal(jnp.zeros(1000, dtype), key=jax.random.key(2))
    assert value.dtype == dtype
    np.testing.assert_array_equal(np.asarray(value) * 2.0**52, exact.astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_noise_is_at_least_of_single_precision_in_every_dtype(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        value = standard_normal(jnp.zeros(1000, dtype), key=jax.random.key(1))
    assert value.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
    assert len(np.unique(value)) == 1000  # bfloat16 has 128 normal values


def test_jax_normal_in_float32_stops_at_five_point_four_sigma():
    # The control: what the library would do with jax.random.normal.
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    extremes = np.sqrt(2) * jax.lax.erf_inv(jnp.asarray([lowest, -lowest]))
    assert np.abs(extremes).max() < 5.5


@pytest.mark.parametrize("partitionable", [True, *slow(False)])
def test_noise_is_standard_normal(partitionable):
    sample = sample_of(partitionable)
    assert scipy.stats.kstest(sample, "norm").pvalue > ALPHA
    # The test must be able to fail: a 5% smaller scale is rejected.
    assert scipy.stats.kstest(sample / 0.95, "norm").pvalue < ALPHA


def tail_pvalue(sample, threshold):
    count = int(np.sum(np.abs(sample) > threshold))
    law = scipy.stats.binom(sample.size, 2 * scipy.stats.norm.sf(threshold))
    return min(1.0, 2 * min(law.cdf(count), law.sf(count - 1)))


@pytest.mark.parametrize("threshold", [2.0, 3.0, 4.0])
def test_tails_hold_as_many_values_as_the_normal(threshold):
    sample = sample_of()
    assert tail_pvalue(sample, threshold) > ALPHA
    assert tail_pvalue(0.95 * sample, threshold) < ALPHA


def test_noise_is_symmetric():
    sample = sample_of()
    assert scipy.stats.ks_2samp(sample, -sample).pvalue > ALPHA
    shifted = sample + 0.03
    assert scipy.stats.ks_2samp(shifted, -shifted).pvalue < ALPHA


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


TREE = {
    "a": jnp.zeros((3, 4)),
    "b": [jnp.zeros(5, jnp.bfloat16), jnp.zeros(())],
    "c": jnp.zeros((2, 1, 2)),
}


def test_a_whole_pytree_is_one_draw():
    def draws(tree):
        jaxpr = jax.make_jaxpr(lambda key: standard_normal(tree, key=key))
        return list(primitives(jaxpr(jax.random.key(0)).jaxpr)).count("random_bits")

    assert draws(TREE) == draws(jnp.zeros(3)) == 1


def test_noise_has_the_shapes_of_the_tree_and_no_value_twice():
    noise = standard_normal(TREE, key=jax.random.key(6))
    assert jax.tree.map(jnp.shape, noise) == jax.tree.map(jnp.shape, TREE)
    flat = np.concatenate([np.ravel(v) for v in jax.tree.leaves(noise)])
    assert len(np.unique(flat)) == flat.size


def correlation(left, right):
    return abs(float(np.mean(np.asarray(left) * np.asarray(right))))


@pytest.mark.parametrize("partitionable", [True, *slow(False)])
def test_leaves_keys_and_lanes_are_uncorrelated(partitionable):
    n = 20_000
    tree = {"a": jnp.zeros(n), "b": jnp.zeros(n)}
    with jax.threefry_partitionable(partitionable):
        keys = jax.random.split(jax.random.key(7))
        noise = jax.vmap(lambda key: standard_normal(tree, key=key))(keys)
    streams = [*noise["a"], *noise["b"]]
    limit = 4.9 / np.sqrt(n)
    pairs = itertools.combinations(streams, 2)
    assert max(correlation(*pair) for pair in pairs) < limit
    # The control: a tenth of one stream leaking into the other is seen.
    assert correlation(streams[0], streams[1] + 0.1 * streams[0]) > limit


@pytest.mark.parametrize("dtype", ["float32", *slow("float64")])
def test_exponential_and_gumbel_values_follow_their_laws_into_both_tails(
    dtype, monkeypatch
):
    with jax.enable_x64(True):
        key, other, third, fourth = jax.random.split(jax.random.key(5), 4)
        sample = noise.standard_exponential((50_000,), dtype, key=key)
        gumbel = noise.standard_gumbel((50_000,), dtype, key=other)
        assert sample.dtype == gumbel.dtype == dtype
        assert scipy.stats.kstest(np.asarray(sample), "expon").pvalue > ALPHA
        assert scipy.stats.kstest(np.asarray(gumbel), "gumbel_r").pvalue > ALPHA
        # The control: values 2 % larger are seen.
        assert scipy.stats.kstest(1.02 * np.asarray(sample), "expon").pvalue < ALPHA
        words = 3 if dtype == "float64" else 2
        least = np.zeros((words, 1), np.uint32)
        monkeypatch.setattr(noise, "_words", lambda *_: least)
        largest = noise.standard_exponential((1,), dtype, key=third)
        np.testing.assert_allclose(largest, (32 * words + 1) * np.log(2), rtol=1e-6)
        least = least + np.uint32([[2**31]] + [[0]] * (words - 1))
        smallest = noise.standard_exponential((1,), dtype, key=fourth)
        np.testing.assert_allclose(smallest, 2.0 ** -(32 * words + 1), rtol=1e-6)


def test_integers_get_no_noise():
    with pytest.raises(TypeError, match="floating-point values, got int32"):
        standard_normal({"a": jnp.zeros(2, jnp.int32)}, key=jax.random.key(0))


@pytest.mark.parametrize("key", [0, None, np.zeros(2, np.uint32), "raw"])
def test_only_typed_keys_are_accepted(key):
    if isinstance(key, str):
        key = jax.random.key_data(jax.random.key(0))
    with pytest.raises(TypeError, match=r"must be a typed key.*dpbilevel\.root_key"):
        check_key(key)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "philox2x32"])
def test_generators_unfit_for_noise_are_refused(impl):
    with pytest.raises(ValueError, match="unfit for privacy"):
        standard_normal(jnp.zeros(2), key=jax.random.key(0, impl=impl))
    with pytest.raises(ValueError, match="randomness must be one of"):
        dpb.root_key(impl)


def test_a_batch_of_keys_is_refused_but_vmap_takes_it():
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=r"got shape \(3,\).*jax\.vmap"):
        standard_normal(jnp.zeros(2), key=keys)
    noise = jax.vmap(lambda key: standard_normal(jnp.zeros(2), key=key))(keys)
    assert len(np.unique(noise)) == 6


@pytest.mark.parametrize(
    ("impl", "bits"),
    [
        ("threefry2x32", 64),
        ("threefry4x32", 128),
        ("philox4x32", 64),
        ("chacha20", 256),
    ],
)
def test_root_keys_differ_and_carry_all_their_bits(impl, bits):
    keys = [dpb.root_key(impl) for _ in range(64)]
    for key in keys:
        check_key(key)
    data = np.stack([jax.random.key_data(key) for key in keys])
    assert data.itemsize * 8 * data.shape[1] == bits
    assert len({row.tobytes() for row in data}) == 64
    # Every single bit takes both values: none is left at zero as by a short seed.
    seen = np.unpackbits(data.view(np.uint8), axis=1)
    assert (seen.any(axis=0) & ~seen.all(axis=0)).all()


def test_a_seed_loses_its_high_word_which_a_root_key_does_not():
    data = jax.random.key_data(jax.random.key(2**40 + 1))
    assert data.tolist() == [0, 1]


@pytest.mark.parametrize("impl", ["philox4x32", CHACHA20, *slow("threefry4x32")])
def test_noise_is_normal_under_the_other_generators(impl):
    sample = standard_normal(jnp.zeros(50_000), key=jax.random.key(8, impl=impl))
    assert scipy.stats.kstest(np.asarray(sample), "norm").pvalue > ALPHA


@pytest.mark.reuses_keys
@pytest.mark.parametrize("generator", fast_first(GENERATORS))
def test_keys_that_follow_from_contents_are_unrelated(generator):
    key = jax.random.key(0, impl=generator)
    contents = [np.full(3, i * 1e-16).tobytes() for i in range(400)]
    keys = [follows(key, content) for content in contents]
    assert str(jax.random.key_impl(keys[0])) == str(jax.random.key_impl(key))
    words = {np.asarray(jax.random.key_data(v)).tobytes() for v in keys}
    assert len(words) == len(contents)
    again = np.asarray(jax.random.key_data(follows(key, contents[3]))).tobytes()
    assert again == np.asarray(jax.random.key_data(keys[3])).tobytes()
    other = follows(jax.random.key(1, impl=generator), contents[3])
    assert np.asarray(jax.random.key_data(other)).tobytes() not in words
    drawn = jax.vmap(jax.random.normal)(jnp.stack(keys))
    assert scipy.stats.kstest(np.asarray(drawn), "norm").pvalue > ALPHA
    pairs = scipy.stats.spearmanr(drawn[1:], drawn[:-1])
    assert pairs.pvalue > ALPHA
