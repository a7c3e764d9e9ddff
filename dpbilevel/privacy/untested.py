"""A release of JAX that this version of the library was not tested with."""

import functools
import warnings

import jax

from .._version import TESTED_JAX, __version__


@functools.cache
def check_release() -> None:
    """Warn, once in a process, if JAX is newer than the newest tested release.

    Privacy:
        Touches no data.
    """
    if jax.__version_info__ <= tuple(map(int, TESTED_JAX.split("."))):
        return
    warnings.warn(
        f"dpbilevel {__version__} was tested with JAX up to {TESTED_JAX}, and this is "
        f"JAX {jax.__version__}. Run `dpbilevel device`, which tests more on this "
        f"device, or install jax=={TESTED_JAX}.",
        stacklevel=3,
    )
