"""NON-PRIVATE. Opening of sealed values, for audits only."""

import jax
import numpy as np
from jaxtyping import Float

from ..privacy.exact.grid import Grid
from ..privacy.exact.int61 import is_limbs
from ..privacy.per_example.clipping import Bounded


def open_value(bounded: Bounded) -> list[Float[np.ndarray, " d"]]:
    """Return the sealed value in float64, one flat array per leaf. NON-PRIVATE.

    Args:
        bounded: A value of public or synthetic records, or a batch of such values.
    """
    if not isinstance(bounded.raw, Grid):
        return [np.ravel(v).astype(np.float64) for v in jax.tree.leaves(bounded.raw)]
    exponent = np.asarray(bounded.raw.exponent, np.float64)
    # A batch of values has a batch of exponents: leading axes that the counts share.
    return [
        np.ravel(np.asarray(v, np.float64).T * 2.0**exponent.T, order="F")
        for v in jax.tree.leaves(bounded.raw.counts, is_leaf=is_limbs)
    ]
