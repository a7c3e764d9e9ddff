"""Typed keys, each derived and used once, and refusals of seeds."""

import hashlib
import hmac
import secrets
from collections.abc import Hashable, Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.typing import ArrayLike
from jaxtyping import Array, Key, PyTree

from .. import _checks
from .chacha20 import CHACHA20

PRNGKey = Key[Array, ""]

# Counter-based generators whose keys batch correctly under vmap, with the 32-bit words
# of a key. The rbg family uses only the first key of a batch, and philox2x32 has one
# word. The last one alone is cryptographic.
GENERATORS: dict[Hashable, int] = {
    "threefry2x32": 2,
    "threefry4x32": 4,
    "philox4x32": 2,
    CHACHA20: 8,
}
_NAMED = {str(impl): impl for impl in GENERATORS}

# Names that keys are derived for, each listed once. A new name changes no other key.
NAMES = """next step sampling noise upper lower penalized outer search refit answer
first then select walk cell smooth reject restart side distance proposal rival index
stages accept ask tell repeats model models mixture score fit remixture screen setting
value base length move moments remoments usability run lengths prepare curvature rows
loss
""".split()


def check_key(key: Any) -> PRNGKey:
    """Return `key`, checked to be one typed key of a generator fit for noise.

    Raises:
        TypeError: `key` is no typed key (a raw `uint32` array, an integer, None).
        ValueError: `key` is a batch of keys, or of a generator whose keys do not
            batch under `vmap` or are too short.
    """
    dtype = key.dtype if isinstance(key, jax.Array) else None
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"key must be a typed key, got {type(key).__name__}. Take "
            "dpbilevel.root_key(), or jax.random.key(seed) for tests."
        )
    if key.shape != ():
        raise ValueError(f"key must be one key, got shape {key.shape}; use jax.vmap.")
    impl = jax.random.key_impl(key)
    if impl not in GENERATORS:
        raise ValueError(
            f"generator {str(impl)!r} is unfit for privacy; use dpbilevel.root_key()."
        )
    return key


def check_shared(key: PRNGKey, value: PyTree) -> None:
    """Raise `ValueError` if processes that hold parts of a value have different keys.

    Each would add a noise of its own to one value, and the mean of what they publish
    has less noise than any. Inside `jax.jit` nothing is known, and nothing is refused.

    Raises:
        ValueError: The keys differ; in all of these processes.
    """
    arrays = [v for v in jax.tree.leaves(value) if isinstance(v, jax.Array)]
    known = not isinstance(key, Tracer)
    arrays = [v for v in arrays if known and not isinstance(v, Tracer)]
    if all(v.is_fully_addressable for v in arrays):
        return
    every = multihost_utils.process_allgather(np.asarray(jax.random.key_data(key)))
    if (every != every[0]).any():
        raise ValueError("keys of processes differ; call root_key() together.")


def wrapped(words: ArrayLike, generator: str) -> Key[Array, "..."]:
    """Return the typed keys made of these 32-bit words, a key a row.

    Raises:
        ValueError: The generator is not fit for privacy noise.
    """
    _checks.one_of("wrapped", "generator", generator, _NAMED)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=_NAMED[generator])


def root_key(randomness: str = "threefry4x32") -> PRNGKey:
    """Return a fresh typed key from the operating system's entropy source.

    `jax.random.key(seed)` keeps 32 bits of the seed unless 64-bit mode is on, few
    enough to try them all. This key is drawn whole: 256 bits for `chacha20`, 128 for
    `threefry4x32`, 64 for the others.

    In a program of several processes (`jax.distributed`) all of them call this together
    and get the key of process 0: with keys of their own they would publish one value
    under several noises, which cancel out.

    Args:
        randomness: The generator. `chacha20` is cryptographic: whoever can predict its
            bits breaks the cipher. JAX's own `threefry4x32`, `threefry2x32` and
            `philox4x32` compile faster and only pass statistical tests.

    Returns:
        A scalar typed key. Whoever knows it can subtract the noise: do not store it.

    Raises:
        ValueError: The generator is not fit for privacy noise.
    """
    _checks.one_of("root_key", "randomness", randomness, _NAMED)
    generator = _NAMED[randomness]
    entropy = secrets.token_bytes(4 * GENERATORS[generator])
    words = np.frombuffer(entropy, np.uint32)
    if jax.process_count() > 1:
        words = multihost_utils.broadcast_one_to_all(words)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=generator)


def number_of(name: str) -> int:
    """Return the public number of a name: 31 bits of its hash, and a leading one.

    So it is far above the numbers of the children that `jax.random.split` gives, and a
    derived key is no other child.
    """
    digest = hashlib.sha256(f"dpbilevel/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") | 2**31


def derive(key: PRNGKey, *domains: str) -> Key[Array, " domains"]:
    """Return an array of keys, one for each name in `domains`; `key` is used up.

    A key is either drawn from or derived from, once: all that is needed of it is
    derived in one call. `jax.debug_key_reuse(True)` sees any second use, which it would
    not see of `jax.random.fold_in` alone.

    Returns:
        A batch of keys in the order of `domains`, to be unpacked. `key` cannot be
        computed from them, nor one of them from another.

    Raises:
        ValueError: A domain that is not in the table, or that is named twice.
    """
    for name in domains:
        if name not in NAMES:
            raise ValueError(
                f"derive: {name!r} is not in NAMES of dpbilevel/privacy/keys.py; add "
                "it there."
            )
    if len(set(domains)) < len(domains):
        raise ValueError(f"derive: give different names, got {[*domains]}.")
    numbers = np.asarray([number_of(name) for name in domains], np.uint32)
    derived = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.clone(key), numbers)
    # A split uses the key up, also one into no keys. They are joined to the others so
    # that JAX does not remove the split as a value that nothing reads.
    return computed_once(jnp.concatenate([jax.random.split(key, 0), derived]))


def follows(key: PRNGKey, content: bytes) -> PRNGKey:
    """Return a key that depends on `key` and on all of `content`; `key` is used up.

    For the same key, two contents give keys that are as unrelated as two random ones,
    and `key` cannot be computed from them. For a content that does not depend on the
    key, the key that is returned is as random as `key`. Not for use in `jax.jit`.
    """
    words = np.asarray(jax.random.key_data(key))
    digest = hmac.digest(words.tobytes(), content, "sha256")
    found = np.frombuffer(digest, words.dtype)[: words.size].reshape(words.shape)
    return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(key))


def computed_once(keys: Key[Array, "..."]) -> Key[Array, "..."]:
    """Return the same keys behind an optimization barrier: XLA computes them once.

    Without it XLA computes a hash again in every operation that reads it, and takes
    seconds to compile a chain of hashes. The barrier is on the words of the keys,
    because `jax.debug_key_reuse` counts a barrier on typed keys as a use of them.
    """
    words = jax.lax.optimization_barrier(jax.random.key_data(keys))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))


def step_keys(key: PRNGKey, count: int) -> tuple[PRNGKey, Key[Array, " count"]]:
    """Return the key for all later steps, and an array of keys for the next `count`.

    Both follow from `key` step by step, so that a run in chunks draws what a run in one
    piece draws, and the key of the steps to come does not tell those of the steps done.
    `key` is used up.
    """
    return jax.lax.scan(_next_and_step, key, length=count)


def _next_and_step(key: PRNGKey, _: None) -> tuple[PRNGKey, PRNGKey]:
    following, step = derive(key, "next", "step")
    return following, step


_WHY = {
    "sample_weight": "weights would let one record count for more than the noise "
    "covers. Do not repeat records either.",
    "random_state": "a person who guesses a seed can subtract the noise. Give fit a "
    "key=, such as dpbilevel.root_key(), or nothing: then every fit draws a new key "
    "from the operating system.",
}


def refuse(owner: str, given: Iterable[str]) -> None:
    """Raise `TypeError`, with advice, for the first argument name in `given`, if any.

    Raises:
        TypeError: There is such an argument; the first one is named.
    """
    for name in given:
        reason = _WHY.get(name, "there is no such argument.")
        raise TypeError(f"{owner}: {name} is refused: {reason}")


class Seedless:
    """Mixin of estimators that refuses `random_state` by an error with advice."""

    def __new__(cls, *args: Any, **parameters: Any) -> Self:
        """Make an estimator; raise `TypeError` if `random_state` is given.

        Raises:
            TypeError: `random_state` is given.
        """
        refuse(cls.__name__, parameters.keys() & {"random_state"})
        return super().__new__(cls)

    def set_params(self, **parameters: Any) -> Self:
        """Set parameters by name, refuse `random_state`, and return the estimator.

        Raises:
            TypeError: `random_state` is given.
            ValueError: There is no such parameter.
        """
        refuse(type(self).__name__, parameters.keys() & {"random_state"})
        parent: Any = super()
        return parent.set_params(**parameters)
