"""ChaCha20 against RFC 8439, and children that share no block with random bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.chacha20 import CHACHA20, blocks
from dpbilevel.privacy.keys import check_key, wrapped
from dpbilevel.privacy.report import CRYPTOGRAPHIC, GENERATOR

# RFC 8439, 2.3.2: key 00 to 1f, nonce 000000090000004a00000000, counter 1.
BLOCK = """
10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e
d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e
"""
# RFC 8439, A.1, vectors 1 and 2: the first two blocks of key 0 and nonce 0.
STREAM = """
76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7
da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586
9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed
29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f
"""
MANY = 2**12 + 40  # words of more blocks than are computed at once


def words(text):
    return np.frombuffer(bytes.fromhex(text), "<u4")


def zero_key():
    return wrapped(np.zeros(8, np.uint32), "chacha20")


def test_a_block_is_that_of_the_rfc():
    key = np.frombuffer(bytes(range(32)), "<u4")
    inputs = np.r_[np.uint32(1), words("000000090000004a00000000")]
    found = np.asarray(blocks(jnp.asarray(key), jnp.asarray(inputs)[None]))
    assert found.tobytes() == bytes.fromhex(BLOCK)


def test_random_bits_are_the_key_stream_of_the_rfc_however_many_are_drawn():
    for size in (32, MANY):
        bits = np.asarray(jax.random.bits(zero_key(), (size,)))
        assert bits[:32].tobytes() == bytes.fromhex(STREAM)
    # Every block has its own counter, also across the parts of a long draw.
    key = jnp.zeros(8, jnp.uint32)
    counters = jnp.arange(250, 259, dtype=jnp.uint32)[:, None]
    alone = np.asarray(blocks(key, jnp.pad(counters, ((0, 0), (0, 3)))))
    np.testing.assert_array_equal(bits[16 * 250 :], np.ravel(alone)[: MANY - 16 * 250])


@pytest.mark.reuses_keys
def test_bits_and_children_of_a_key_share_no_word():
    key = zero_key()
    split = jax.random.key_data(jax.random.split(key, 60))
    folded = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(20)]
    parts = [jax.random.bits(key, (2**10,)), split, *folded]
    every = np.concatenate([np.ravel(v) for v in parts])
    assert len(np.unique(every)) == every.size
    # The control: a word that is in two of them is seen.
    assert len(np.unique(np.r_[every, split[3, 2]])) == every.size


@pytest.mark.parametrize("width", [8, 16, 64])
def test_bits_of_other_widths_come_from_the_same_stream(width):
    with jax.enable_x64(width == 64):
        drawn = np.asarray(jax.random.bits(zero_key(), (3,), f"uint{width}"))
    stream = words(STREAM)
    expected = stream[:6].view("<u8") if width == 64 else stream[:3].astype(drawn.dtype)
    np.testing.assert_array_equal(drawn, expected)


def test_a_batch_of_keys_draws_as_each_key_alone():
    keys = jax.random.split(jax.random.key(4, impl=CHACHA20), 3)
    together = jax.vmap(lambda key: jax.random.bits(key, (40,)))(keys)
    alone = [jax.random.bits(wrapped(v, "chacha20"), (40,)) for v in words_of(keys)]
    np.testing.assert_array_equal(together, alone)
    assert len(np.unique(together)) == together.size


def words_of(keys):
    return np.asarray(jax.random.key_data(keys))


def test_a_report_says_which_generator_the_keys_are_of():
    problem = dpb.FiniteSum(lambda w, z: 0.5 * (w - z) ** 2)
    solver = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.1)
    data, budget = (
        np.linspace(-1.0, 1.0, 20, dtype=np.float32),
        dpb.PrivacyBudget(1, 0.01),
    )
    plan = dpb.calibrate(problem, solver, budget, sizes=20, precision="float")
    start = np.float32(0)

    def started(randomness):
        key = dpb.root_key(randomness)
        return dpb.start(problem, plan, data, start, key=key).solution.report

    key, options = dpb.root_key("chacha20"), {"budget": budget, "precision": "float"}
    fitted = dpb.fit(problem, solver, data, start, key=key, **options).report
    secure, fast = started("chacha20"), started("threefry4x32")
    for report in (fitted, secure):
        assert {CRYPTOGRAPHIC, GENERATOR} & {*report.assumptions} == {CRYPTOGRAPHIC}
        assert "ChaCha20" in report.prng
    assert fast == plan.report  # which does not know the keys of its runs
    assert GENERATOR in fast.assumptions


def test_a_generator_of_the_same_name_is_refused():
    (*functions, name, tag) = CHACHA20._impl
    names = "key_shape", "seed", "split", "random_bits", "fold_in"
    options = dict(zip(names, functions, strict=True)) | {"name": name, "tag": tag}
    weak = options | {"fold_in": lambda key, data: key}
    fake = jax.extend.random.define_prng_impl(**weak)
    with pytest.raises(ValueError, match="'chacha20' is unfit for privacy"):
        check_key(jax.random.key(0, impl=fake))
