"""Strict promotion for the whole suite, fixed seeds, derandomized searches."""

import gc
import itertools
import os
import pathlib

import hypothesis
import jax
import pytest
from jax._src import compiler as _compiler

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
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

_TESTS = itertools.count(1)
# What these claim is about noise, rounding and leaks, or the bits of another process:
# they are compiled as by users, and so are all slow ones. XLA's former emitters compile
# the others, in two thirds of the time.
_COMPILED_AS_BY_USERS = {
    "test_audit",
    "test_clipping",
    "test_draw_attacks",
    "test_faults",
    "test_grid",
    "test_hostile",
    "test_interrupts",
    "test_mechanisms",
    "test_noise",
    "test_private_search_attacks",
    "test_resolvent_attacks",
    "test_roundings",
    "test_rows",
    "test_secrets",
    "test_sensitivity",
    "test_sensitivity_search",
}

# Most of the time of these is compiling still, and what they claim does not depend on
# how well.
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
    "test_oracles_linear",
    "test_oracles_peers",
    "test_oracles_refusals",
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
    "test_oracles_layout",
    "test_oracles_linear",
    "test_oracles_peers",
    "test_oracles_refusals",
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


def pytest_collection_modifyitems(items):
    items.sort(key=_by_users, reverse=True)  # each process changes its compiler once


def _by_users(item):
    slow = item.get_closest_marker("slow") is not None
    return slow or item.module.__name__ in _COMPILED_AS_BY_USERS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test that makes noise fails, fixtures included, where a key is used twice."""
    module = item.module.__name__
    reuses = item.get_closest_marker("reuses_keys") is not None
    _compile_with({} if _by_users(item) else _FORMER)
    hasty = module in _COMPILED_IN_HASTE and not _by_users(item)
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


_OPTIONS = {}  # of XLA, for the test at hand


def _compile_with(options):
    if options != _OPTIONS:
        jax.clear_caches()
        _OPTIONS.clear()
        _OPTIONS.update(options)


def _with_options(make):
    """JAX has no setting for options of XLA, only an argument of each `jax.jit`."""

    def made(*args, env_options_overrides=None, **kwargs):
        overrides = _OPTIONS | (env_options_overrides or {})
        return make(*args, env_options_overrides=overrides, **kwargs)

    return made


_compiler.get_compile_options = _with_options(_compiler.get_compile_options)


def _where_known(options):
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return {}  # of another release
    return options


_FORMER = _where_known({"xla_cpu_use_fusion_emitters": False})


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
