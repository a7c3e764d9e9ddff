"""Strict promotion for the whole suite, fixed seeds, derandomized searches."""

import itertools
import os
import pathlib

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The processes of a run, and later runs, share what they compile.
CACHE = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", os.fspath(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

hypothesis.settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, max_examples=40
)
hypothesis.settings.load_profile("fixed")


@pytest.fixture
def getkey():
    counter = itertools.count()
    return lambda: jax.random.fold_in(jax.random.key(20), next(counter))
