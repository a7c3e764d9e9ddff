"""The environment of the tests, which the processes that they start inherit."""

import os
import pathlib

# This run, its processes and later runs share what they compile.
CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "compiled"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# One thread for the programs of a process: a batch of factorizations waits for threads
# of the pool that it runs in, and jaxlib 0.10 with two of them may wait for ever.
os.environ["NPROC"] = "1"
