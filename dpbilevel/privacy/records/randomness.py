"""Randomness in a loss: a key for each record and each release."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import _checks
from ..chacha20 import CHACHA20
from ..keys import PRNGKey, wrapped
from .rows import Padded, unpacked


class Keyed(eqx.Module):
    """A record, and the key of its loss in one release.

    Attributes:
        record: The record.
        key: A typed key for this record and this release alone.
    """

    record: PyTree
    key: PRNGKey


@dataclasses.dataclass(frozen=True)
class Randomized:
    r"""A loss with randomness, such as dropout or augmentation: `loss(w, record, key)`.

    In place of a plain loss, as in `FiniteSum(dpb.Randomized(loss))`. With several
    augmentations $K$ a record's loss is the mean over $K$ keys,

    $$\ell(w, z) = \frac{1}{K} \sum_{k=1}^{K} \mathrm{loss}(w, z, \kappa_k),$$

    so that the mean of $K$ gradients is clipped once. Methods of one
    level that clip each record's gradient, such as `NoisyGD`, `onelevel.AdaptiveGD` and
    `onelevel.CorrelatedGD`, give losses keys; other methods refuse such a loss.

    Args:
        loss: The loss; the last argument is a typed key of JAX.
        augmentations: $K$, the number of keys of a record in each release.

    Raises:
        TypeError: `loss` is not a function.
        ValueError: `augmentations` is not a positive integer.

    Privacy:
        That of a plain loss. The key of a record follows from the key of the release
        and the row of the record in the data, and from no value of a record. Clipping
        bounds the value for every key, so that under replace-one the guarantee holds
        for any keys, known ones included. Under add-or-remove-one a record less may
        shift the rows of others. As keys of rows are independent and alike, that
        changes no distribution; there they must be as secret as the batches. The noise
        has another key.

    References:
        De, Berrada, Hayes, Smith and Balle, "Unlocking high-accuracy differentially
        private image classification through scale", 2022 (augmentation multiplicity).

    Example:
        >>> import jax, dpbilevel as dpb
        >>> def loss(w, record, key):
        ...     return w @ (record * jax.random.bernoulli(key, 0.5, record.shape))
        >>> problem = dpb.FiniteSum(dpb.Randomized(loss, augmentations=4))
    """

    loss: Callable[..., Any]
    augmentations: int = 1

    def __post_init__(self):
        _checks.function("Randomized", loss=self.loss)
        _checks.count("Randomized", augmentations=self.augmentations)

    def __call__(self, *args: Any) -> Any:
        """Return the loss of the last argument, a `Keyed` record, a mean over its keys.

        Raises:
            TypeError: The record has no key.
        """
        *variables, keyed = args
        if not isinstance(keyed, Keyed):
            raise TypeError(
                "Randomized: this method gives losses no key. Use NoisyGD, AllocatedGD "
                "or AdaptiveClipGD."
            )

        def loss(key):
            return self.loss(*variables, keyed.record, key)

        if self.augmentations == 1:
            return loss(keyed.key)
        # One gradient of the mean: layers keep a factor for each augmentation.
        return jnp.mean(jax.vmap(loss)(jax.random.split(keyed.key, self.augmentations)))


def with_keys(
    fun: Callable[[Keyed], PyTree], records: PyTree, *, key: PRNGKey
) -> tuple[Callable[[PyTree], PyTree], PyTree]:
    """Return `fun` as a function of numbered records, and the numbered records.

    `fun` is of a `Keyed` record, and `key` a typed key for this release alone. A number
    is that of the row in the data, before a batch is drawn.
    """
    rows, present = unpacked(records)
    if isinstance(rows, _checks.AbstractStored):
        raise ValueError(
            "Randomized: losses with a key need records in memory, got "
            f"{type(rows).__name__}. Load the records, or give a loss without a key."
        )
    count = _checks.leading_axis("records", rows)
    numbered = rows, jnp.arange(count, dtype=jnp.int32)
    # A generator that compiles fast, unless keys are to be cryptographic: those of
    # `threefry2x32` have 64 bits.
    is_secret = jax.random.key_impl(key) == CHACHA20
    generator, size = ("chacha20", 8) if is_secret else ("threefry2x32", 2)
    words = jax.random.bits(key, (size,), jnp.uint32)
    words = jax.lax.optimization_barrier(words)

    def of_numbered(numbered):
        record, number = numbered
        return fun(Keyed(record, jax.random.fold_in(wrapped(words, generator), number)))

    return of_numbered, numbered if present is None else Padded(numbered, present)
