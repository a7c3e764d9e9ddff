"""Files in programs of several processes: process 0 reads and writes for all."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

_KINDS = {"OSError": OSError, "ValueError": ValueError}


def on_process_zero(action: Callable[[], bytes | None]) -> bytes | None:
    """Call `action` in process 0; return its result in every process.

    All processes call this together; each waits until the action has ended. In a
    program of one process it is a plain call.

    Raises:
        OSError, ValueError: The action raised it; in all processes, so that none waits
            for the others without end.
    """
    if jax.process_count() == 1:
        return action()
    outcome, content, raised = "nothing", b"", None
    if jax.process_index() == 0:
        try:
            found = action()
            if found is not None:
                outcome, content = "bytes", found
        except (OSError, ValueError) as error:
            raised, content = error, str(error).encode()
            outcome = "OSError" if isinstance(error, OSError) else "ValueError"
    outcome, content = _broadcast(outcome.encode()).decode(), _broadcast(content)
    if outcome in _KINDS:
        raise raised or _KINDS[outcome](content.decode())
    return content if outcome == "bytes" else None


def _broadcast(content: bytes) -> bytes:
    """Return the bytes of process 0 in all processes."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    own = np.zeros(size, np.uint8)  # those of other processes are ignored
    if jax.process_index() == 0:
        own = np.frombuffer(content, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes()
