"""NON-PRIVATE. The one place where audits open a sealed value."""

import jax
import numpy as np
from jaxtyping import Float

from ..clipping import Bounded


def opened(bounded: Bounded) -> list[Float[np.ndarray, " d"]]:
    """NON-PRIVATE. The sealed value in float64, one flat array per leaf.

    Args:
        bounded: Computed from public or synthetic records.
    """
    return [np.ravel(v).astype(np.float64) for v in jax.tree.leaves(bounded.raw)]
