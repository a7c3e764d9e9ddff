"""Strict promotion for the whole suite, fixed seeds, derandomized searches."""

import itertools

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, max_examples=40
)
hypothesis.settings.load_profile("fixed")


@pytest.fixture
def getkey():
    counter = itertools.count()
    return lambda: jax.random.fold_in(jax.random.key(20), next(counter))
