"""Files in programs of several processes: process 0 reads and writes for all."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

_ERRORS = {kind.__name__: kind for kind in (OSError, ValueError)}


def by_first(action: Callable[[], bytes | None]) -> bytes | None:
    """Calls `action` in process 0, and returns in every process what it returned.

    All processes call this together; each waits until the action has ended. In a
    program of one process it is a plain call.

    Raises:
        OSError, ValueError: The action raised it; in all of the processes, so that none
            waits for the others for ever.
    """
    if jax.process_count() == 1:
        return action()
    found, raised = (b"", b""), None
    if jax.process_index() == 0:
        try:
            content = action()
            found = (b"none", b"") if content is None else (b"", content)
        except tuple(_ERRORS.values()) as error:
            raised = error
            kind = next(k for k, v in _ERRORS.items() if isinstance(error, v))
            found = kind.encode(), str(error).encode()
    kind, content = map(_from_first, found)
    if kind == b"none":
        return None
    if kind:
        raise raised or _ERRORS[kind.decode()](content.decode())
    return content


def _from_first(content: bytes) -> bytes:
    """The bytes of process 0, in all processes."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    own = np.zeros(size, np.uint8)  # of the others, nothing is read
    if jax.process_index() == 0:
        own = np.frombuffer(content, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes()
