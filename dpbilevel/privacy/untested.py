"""A release of JAX that this version of the library was not tested with."""

import functools
import warnings

import jax

from .._version import TESTED_JAX, __version__
from .per_example.mixing import check_rows


def check_release(owner: str) -> None:
    """Check that the device keeps records apart, if JAX is newer than those tested.

    A warning says so, once in a process.

    Args:
        owner: The function that an error names.

    Raises:
        ValueError: As `check_rows`.

    Privacy:
        Touches no data.
    """
    if jax.__version_info__ > tuple(map(int, TESTED_JAX.split("."))):
        check_rows(owner)
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"dpbilevel {__version__} was tested with JAX up to {TESTED_JAX}, and this is "
        f"JAX {jax.__version__}. A short test on this device passed. Run `dpbilevel "
        f"device` for a longer one, or install jax=={TESTED_JAX}.",
        stacklevel=4,
    )
