"""Strict promotion for the whole suite, fixed seeds, derandomized searches."""

import gc
import itertools
import os
import pathlib

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A tenth of the time of tracing; failures show whole tracebacks.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_traceback_filtering", "off")

# One thread for the programs of a process: a batch of factorizations waits for threads
# of the pool that it runs in, and jaxlib 0.10 with two of them may wait for ever.
os.environ["NPROC"] = "1"

# This run, the processes that it starts and later runs share what they compile.
CACHE = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", os.fspath(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.fspath(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

_TESTS = itertools.count(1)
# Most of the time of these is compiling, and what they claim does not depend on how
# well. What claims something about noise, rounding or leaks, and every slow test, is
# compiled as by users.
_COMPILED_IN_HASTE = {
    "test_alternating",
    "test_applications",
    "test_baselines",
    "test_cli",
    "test_constants",
    "test_contract",
    "test_design",
    "test_exponential",
    "test_extragradient",
    "test_finite",
    "test_games",
    "test_games_config",
    "test_gibo",
    "test_gp",
    "test_grid_walk",
    "test_grid_walk_draws",
    "test_implicit",
    "test_inner_solvers",
    "test_keys",
    "test_oracles",
    "test_linear",
    "test_peers",
    "test_refusals",
    "test_penalty",
    "test_runner",
    "test_saddle",
    "test_search",
    "test_warm_start",
}

# Nothing in these makes noise of its own, or it does so through the command line, whose
# keys test_runner follows. Following keys costs a third of a test's time.
_WITHOUT_KEYS = {
    "test_accounting",
    "test_calibration",
    "test_cli",
    "test_config",
    "test_config_page",
    "test_constants",
    "test_faults",
    "test_golden_accounting",
    "test_interrupts",
    "test_ledger",
    "test_lock",
    "test_oracles",
    "test_layout",
    "test_linear",
    "test_peers",
    "test_refusals",
    "test_report",
    "test_saddle",
    "test_secrets",
    "test_sensitivity",
    "test_sets",
    "test_spending",
    "test_waiting",
}

hypothesis.settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, max_examples=40
)
hypothesis.settings.load_profile("fixed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test that makes noise fails, fixtures included, where a key is used twice."""
    module = item.module.__name__.rpartition(".")[2]
    reuses = item.get_closest_marker("reuses_keys") is not None
    slow = item.get_closest_marker("slow") is not None
    hasty = module in _COMPILED_IN_HASTE and not slow
    jax.config.update("jax_disable_most_optimizations", hasty)
    with jax.debug_key_reuse(not reuses and module not in _WITHOUT_KEYS):
        result = yield
    if next(_TESTS) % 10 == 0 and (_memory_maps() > 40_000 or _gigabytes() > _LIMIT):
        _drop_programs()
    return result


_LIMIT = 1.8  # GiB, of a process


def _drop_programs():
    """Not all of what they take goes back to the system: allow some growth again."""
    global _LIMIT
    jax.clear_caches()
    gc.collect()
    _LIMIT = max(_LIMIT, _gigabytes() + 0.5)


def _memory_maps():
    """How many this process has: each program takes some, and Linux allows 65 530."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def _gigabytes():
    """How much memory this process holds: programs that are kept take most of it."""
    pages = pathlib.Path("/proc/self/statm")
    held = int(pages.read_text().split()[1]) if pages.exists() else 0
    return held * os.sysconf("SC_PAGE_SIZE") / 2**30


@pytest.fixture
def getkey():
    counter = itertools.count()
    return lambda: jax.random.fold_in(jax.random.key(20), next(counter))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
