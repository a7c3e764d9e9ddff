"""Dry runs on records that a function of the user draws."""

import jax
import jax.numpy as jnp
import pytest

import dpbilevel as dpb
from dpbilevel.planning.synthetic import FunctionPopulation
from tests.cases import slow

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


def test_test_records_are_further_records_of_the_same_call():
    calls = []

    def numbered(key, sizes):
        calls.append(sizes)
        upper = ones(sizes.upper) | {"t": jnp.arange(12.0)}
        return dpb.Levels(upper, ones(sizes.lower))

    drawn = FunctionPopulation(numbered).draw(PROBLEM, W0, SIZES, jax.random.key(0))
    assert calls == [dpb.Sizes(12, 9, "disjoint")]
    assert PROBLEM.sizes_of(drawn.data, "disjoint") == SIZES
    found = jnp.concatenate([drawn.data.upper["t"], drawn.test["t"]])
    assert jnp.array_equal(jnp.sort(found), jnp.arange(12.0))
    assert not jnp.array_equal(found, jnp.arange(12.0))  # a sorted table is mixed


def test_one_level_and_shared_levels_get_twice_the_records():
    one = dpb.FiniteSum(lambda w, r: (r["a"] @ w - r["t"]) ** 2)
    drawn = FunctionPopulation(rows).draw(one, W0[0], 5, jax.random.key(0))
    assert drawn.data["t"].shape == drawn.test["t"].shape == (5,)
    sizes = dpb.Sizes(5, 5, "shared")
    shared = FunctionPopulation(lambda key, n: dpb.Levels.shared(rows(key, n.upper)))
    drawn = shared.draw(PROBLEM, W0, sizes, jax.random.key(0))
    assert PROBLEM.sizes_of(drawn.data) == sizes
    assert drawn.test["t"].shape == (5,)


@pytest.mark.slow
def test_fields_that_the_default_records_lack_are_answered_with_a_function():
    with pytest.raises(ValueError, match=r"records=.*or synthetic=, a function"):
        dpb.auto(PROBLEM, BUDGET, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"synthetic": 3}, TypeError, "synthetic must be a function"),
        ({"synthetic": ()}, ValueError, "at least one population"),
        ({"synthetic": lambda key: 1}, ValueError, "synthetic failed for"),
        *slow(
            (
                {"synthetic": lambda k, n: rows(k, 6)},
                ValueError,
                "must be an instance of Levels",
            ),
            (
                {"synthetic": lambda k, n: {}["a"]},
                ValueError,
                "synthetic failed for .*test records included. KeyError",
            ),
            (
                {"synthetic": lambda *_: dpb.Levels(ones(5), ones(9))},
                ValueError,
                r"returned .* people=.disjoint.\), not Sizes\(upper=12, .* test",
            ),
            (
                {"synthetic": lambda *_: dpb.Levels(ones(12), {"a": jnp.ones((9, 3))})},
                ValueError,
                "w0, a loss and the records of synthetic do not fit. .*'t'",
            ),
        ),
    ],
)
def test_other_functions_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        dpb.auto(PROBLEM, BUDGET, **OPTIONS, **options)
