"""Strict promotion for the whole suite, fixed keys, derandomized searches.

With DPBILEVEL_KEYS=chacha20 all keys from seeds are of the cryptographic generator.
"""

import functools
import gc
import itertools
import os
import pathlib

import jax
import pytest
from hypothesis import settings

from dpbilevel.core import process_spending
from dpbilevel.privacy.chacha20 import CHACHA20
from dpbilevel.privacy.exact import matmul_check
from dpbilevel.privacy.per_example import mixing

MAPS = pathlib.Path("/proc/self/maps" if os.path.exists("/proc") else os.devnull)
TESTS = itertools.count(1)
EVERYWHERE = jax.config.jax_debug_key_reuse
# What claims something about noise, laws, roundings or leaks is compiled as by users,
# whatever the environment asks for: what else is claimed does not depend on how well
# programs are compiled.
AS_BY_USERS = {"attacks", "audit", "draws", "privacy"}
OPTIMIZATION = "JAX_DISABLE_MOST_OPTIMIZATIONS"
IS_QUICK = jax.config.read(OPTIMIZATION.lower())

if os.environ.get("DPBILEVEL_KEYS") == "chacha20":
    jax.random.key = functools.partial(jax.random.key, impl=CHACHA20)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
settings.register_profile("few", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("few")


def pytest_collection_finish():
    """Garbage is looked for among what lives on: a tenth of the time by default."""
    gc.freeze()
    gc.set_threshold(50_000)


def compile_for(folder):
    """Compile the tests of a folder with the optimizations that they need."""
    quick = IS_QUICK and folder not in AS_BY_USERS
    if jax.config.read(OPTIMIZATION.lower()) != quick:
        jax.config.update(OPTIMIZATION.lower(), quick)
        os.environ[OPTIMIZATION] = str(int(quick))  # for processes that tests start
        jax.clear_caches()
        # The checks of a device before a run are compiled as that run is.
        matmul_check._worst.cache_clear()
        mixing._mixed.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A key used twice fails its test; programs take maps, of which Linux has few.

    The check of keys doubles the time of what is not compiled. The contract of all
    solvers and the attacks have it always, other tests if JAX_DEBUG_KEY_REUSE=1.
    """
    if next(TESTS) % 25 == 0 and MAPS.read_text().count("\n") > 25_000:
        jax.clear_caches()
    compile_for(item.path.parent.name)
    is_checked = EVERYWHERE or item.path.parent.name in ("contract", "attacks")
    reuses = item.get_closest_marker("reuses_keys") is not None
    with jax.debug_key_reuse(is_checked and not reuses):
        return (yield)


@pytest.fixture(autouse=True)
def fresh_process():
    """Every test starts as a process does: without private runs."""
    process_spending._process = process_spending._Process()


@pytest.fixture
def getkey():
    root, counter = jax.random.key(20), itertools.count()
    return lambda: jax.random.fold_in(root, next(counter))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
