"""Dry runs on records that a function of the user draws."""

import jax
import jax.numpy as jnp
import pytest

import dpbilevel as dpb
from dpbilevel.planning.synthetic import Synthetic

SIZES = dpb.Sizes(6, 9, "disjoint")
W0 = (jnp.zeros(3), jnp.zeros(3))
OPTIONS = {"sizes": SIZES, "w0": W0}
BUDGET = dpb.PrivacyBudget(1.0, 1e-3)


def loss(x, y, record):
    return (record["a"] @ y - record["t"]) ** 2


PROBLEM = dpb.BilevelProblem(loss, loss)


def rows(key, n):
    a = jax.random.normal(key, (n, 3))
    return {"a": a, "t": a @ jnp.ones(3)}


def ones(n):
    return {"a": jnp.ones((n, 3)), "t": jnp.ones(n)}


def synthetic(key, sizes):
    keys = jax.random.split(key)
    return dpb.Levels(rows(keys[0], sizes.upper), rows(keys[1], sizes.lower))


def test_records_of_any_fields_are_drawn_anew_for_each_test():
    twin = Synthetic(synthetic).draw(PROBLEM, W0, SIZES, jax.random.key(0))
    assert PROBLEM.sizes_of(twin.data, "disjoint") == SIZES
    assert twin.test["a"].shape == (6, 3)
    assert not jnp.array_equal(twin.test["a"], twin.data.upper["a"])


def test_fields_that_the_default_records_lack_are_answered_with_a_function():
    with pytest.raises(ValueError, match=r"pass synthetic=[^?]*dpb\.Levels"):
        dpb.auto(PROBLEM, BUDGET, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"synthetic": 3}, TypeError, "synthetic must be a function"),
        ({"synthetic": synthetic, "twins": ()}, ValueError, "got both"),
        ({"synthetic": lambda k, n: rows(k, 6)}, TypeError, "must be dpbilevel.Levels"),
        (
            {"synthetic": lambda *_: dpb.Levels(ones(5), ones(9))},
            ValueError,
            "synthetic must return records of the planned",
        ),
    ],
)
def test_other_functions_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        dpb.auto(PROBLEM, BUDGET, **OPTIONS, **options)
