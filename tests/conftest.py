"""Strict promotion, derandomized searches, keys followed, programs shared."""

import itertools
import os
from pathlib import Path

import hypothesis
import jax
import pytest

TESTS = itertools.count(1)
# A batch of factorizations waits for threads of the pool that it runs in: two may hang.
os.environ["NPROC"] = "1"
# This run, the processes that it starts and later runs share what they compile.
CACHE = str(Path(__file__).parents[1] / ".pytest_cache" / "compiled")
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # nine tenths of tracing
hypothesis.settings.register_profile("few", max_examples=40, derandomize=True)
hypothesis.settings.load_profile("few")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test fails, fixtures included, where a key is used twice."""
    with jax.debug_key_reuse(item.get_closest_marker("reuses_keys") is None):
        result = yield
    # Linux allows 65 530 maps; programs take most of them, and most of the memory.
    maps = Path("/proc/self/maps")
    if (
        next(TESTS) % 10 == 0
        and maps.exists()
        and maps.read_text().count("\n") > 15_000
    ):
        jax.clear_caches()
    return result


@pytest.fixture
def getkey():
    keys = map(
        jax.random.fold_in, itertools.repeat(jax.random.key(20)), itertools.count()
    )
    return lambda: next(keys)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
