import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.exact import matmul_check
from dpbilevel.privacy.exact.matmul_check import (
    Product,
    check_products,
    highest,
    product_errors,
)
from tests.onelevel.test_inner_solvers import planned_noisy_gd

SQUARE = Product("gkp,gkq->gpq", 64, 128, 128)
SMALL = Product("gkp,gkq->gpq", 8, 16, 16)
THREE = ((1, 0), (0, 1), (0, 0))
SIX = ((2, 0), (0, 2), (1, 1), *THREE)
NINE = ((2, 2), (1, 2), (2, 1), *SIX)


def short_form(multiply=highest, dtype="float32"):
    return list(product_errors(dtype, matmul_check._BEFORE_SUMS, multiply))


def rounded(bits):
    def multiply(subscripts, *factors):
        return highest(
            subscripts, *(jax.lax.reduce_precision(v, 8, bits) for v in factors)
        )

    return multiply


def cut_off(bits):
    def cut(v):
        kept = jax.lax.bitcast_convert_type(v, jnp.int32) & (-1 << (23 - bits))
        return jax.lax.bitcast_convert_type(kept, jnp.float32)

    return lambda subscripts, *factors: highest(subscripts, *map(cut, factors))


def passes(bits, which):
    """Each factor as a sum of coarser ones, and some products of those."""

    def parts(v):
        found = []
        for _ in range(1 + max(i for pair in which for i in pair)):
            found.append(jax.lax.reduce_precision(v, 8, bits))
            v = jax.lax.optimization_barrier(v - found[-1])
        return found

    def multiply(subscripts, *factors):
        left, right = map(parts, factors)
        return sum(highest(subscripts, left[i], right[j]) for i, j in which)

    return multiply


def added(exponent, mantissa):
    """Exact terms, added one after the other in another format."""

    def multiply(subscripts, left, right):
        inputs, out = subscripts.split("->")
        axes = inputs.split(",")
        left, right = (
            jnp.moveaxis(v, a.index("k"), 0)
            for v, a in zip((left, right), axes, strict=True)
        )
        term = f"{inputs.replace('k', '')}->{out}"

        def add(total, pair):
            total = total + highest(term, *pair)
            return jax.lax.reduce_precision(total, exponent, mantissa), None

        zero = jnp.zeros_like(highest(term, left[0], right[0]))
        return jax.lax.scan(add, zero, (left, right))[0]

    return multiply


def halves(subscripts, *factors):
    factors = (v.astype(jnp.float16) for v in factors)
    return highest(subscripts, *factors).astype(jnp.float32)


def without_small(subscripts, *factors):
    result = highest(subscripts, *factors)
    return jnp.where(jnp.abs(result) < 2.0**-100, 0, result)


def in_float32(subscripts, *factors):
    factors = (v.astype(jnp.float32) for v in factors)
    return highest(subscripts, *factors).astype(jnp.float64)


COARSE = {
    "bfloat16": rounded(7),
    "TF32": rounded(10),
    "bfloat16, cut off": cut_off(7),
    "TF32, cut off": cut_off(10),
    "22 bits": rounded(21),
    "float16": halves,
    "zero below 2^-100": without_small,
    "bfloat16, 3 passes": passes(7, THREE),
    "bfloat16, 4 passes": passes(7, ((1, 1), *THREE)),
    "TF32, 3 passes": passes(10, THREE),
    "sums in float16": added(5, 10),
    "sums in bfloat16": added(8, 7),
    "sums in 22 bits": added(8, 21),
}
FINE = {
    "as asked for": highest,
    "one after the other": added(8, 23),
    "bfloat16, 6 passes": passes(7, SIX),
    "bfloat16, 9 passes": passes(7, NINE),
}


# The nearest to what passes, and the two that accelerators have.
NEAR = "TF32, 3 passes", "bfloat16, 4 passes", "sums in 22 bits"


@pytest.mark.parametrize(
    "name",
    [pytest.param(v, marks=() if v in NEAR else pytest.mark.slow) for v in COARSE],
)
def test_reduced_precision_fails_on_every_product_of_the_short_form(name):
    assert not any(error.passed for error in short_form(COARSE[name]))


@pytest.mark.parametrize("name", FINE)
def test_arithmetic_as_good_as_float32_passes(name):
    assert all(error.passed for error in short_form(FINE[name]))


def test_every_product_of_this_device_is_within_the_bound():
    assert all(error.passed for error in product_errors())


@pytest.mark.parametrize("product", matmul_check.PRODUCTS, ids=str)
def test_every_product_shows_three_passes_of_tf32(product):
    (error,) = product_errors(products=(product,), multiply=COARSE["TF32, 3 passes"])
    assert 1.5 < error.ratio < 3
    assert error.case == "few terms"


def test_adding_in_the_worst_order_reaches_the_bound():
    (error,) = product_errors(products=(SQUARE,), multiply=added(8, 23))
    assert 0.95 < error.ratio <= 1
    assert error.case == "small after large"


def test_float64_passes_and_float32_in_its_place_does_not(x64):
    assert all(error.passed for error in short_form(dtype="float64"))
    assert not any(error.passed for error in short_form(in_float32, "float64"))


def off_by(value):
    return lambda subscripts, *factors: highest(subscripts, *factors) + value


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_result_that_is_not_finite_is_infinitely_far_off(value):
    (error,) = product_errors(products=(SMALL,), multiply=off_by(value))
    assert math.isinf(error.ratio)
    assert not error.passed


def exactly(computed, left, right):
    """The error and the sum of absolute values of one product."""
    pairs = zip(left.tolist(), right.tolist(), strict=True)
    terms = [Fraction(a) * Fraction(b) for a, b in pairs]
    return abs(Fraction(float(computed)) - sum(terms)), sum(map(abs, terms))


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 49), ("float64", 98)])
def test_errors_are_those_of_exact_arithmetic(dtype, digits, x64):
    for names, left, right in matmul_check._factors(SMALL, np.dtype(dtype)):
        computed = np.asarray(jnp.einsum(SMALL.subscripts, left, right))
        errors, magnitudes = matmul_check._exact_errors(computed, left, right)
        for g, p, q in np.random.default_rng(1).integers(len(names), size=(50, 3)):
            exact, magnitude = exactly(computed[g, p, q], left[g, :, p], right[g, :, q])
            error = Fraction(float(errors[g, p, q]))
            assert abs(error - exact) <= magnitude / 2**digits + Fraction(2) ** -1060
            assert error >= exact or dtype == "float64"
            assert magnitudes[g, p, q] == pytest.approx(float(magnitude), rel=1e-14)


def test_the_default_precision_of_matrix_products_makes_no_difference():
    with jax.default_matmul_precision("bfloat16"):
        text = jax.jit(lambda a, b: highest("kp,kq->pq", a, b)).lower(
            jnp.ones((2, 3)), jnp.ones((2, 3))
        )
    assert "precision = [HIGHEST, HIGHEST]" in text.as_text()


@pytest.fixture
def no_memory():
    matmul_check._worst.cache_clear()
    yield
    matmul_check._worst.cache_clear()


@pytest.fixture
def coarse(no_memory, monkeypatch):
    planted = functools.partial(product_errors, multiply=COARSE["TF32"])
    monkeypatch.setattr(matmul_check, "product_errors", planted)


REFUSED = r"on .+ \(.pu, JAX .*\), products in float32 err"


def test_a_device_with_reduced_precision_is_refused_with_what_to_do(coarse):
    with pytest.raises(ValueError, match=f"^here: {REFUSED}") as error:
        check_products("here")
    text = str(error.value)
    assert "4.09e+03 times the bound" in text
    assert "JAX_PLATFORMS=cpu" in text
    assert "NVIDIA_TF32_OVERRIDE=0" in text
    assert "default matmul precision makes no difference" in text


def test_a_plan_is_refused_on_such_a_device(coarse):
    problem = dpb.FiniteSum(lambda w, z: jnp.sum((w - z) ** 2))
    solver, data = planned_noisy_gd(), jnp.ones((40, 2))
    with pytest.raises(ValueError, match=f"^solve: {REFUSED}"):
        dpb.solve(problem, solver, data, jnp.zeros(2), key=jax.random.key(0))


def test_a_second_check_computes_nothing(no_memory, monkeypatch):
    check_products("here")
    monkeypatch.setattr(matmul_check, "product_errors", None)
    check_products("there")
    assert matmul_check._worst.cache_info().misses == 1


def checked(x):
    check_products("here")
    return jnp.sum(x * x)


def in_loop(x):
    return jax.lax.scan(lambda total, _: (total + checked(x), None), 0.0, length=2)


TRACED = {
    "jit": jax.jit(checked),
    "vmap": jax.vmap(checked),
    "grad": jax.grad(checked),
    "jit of grad": jax.jit(jax.grad(checked)),
    "checkpoint": jax.grad(jax.checkpoint(checked)),
    "loop": in_loop,
    "shapes alone": lambda x: jax.eval_shape(lambda v: checked(v), x),
}


@pytest.mark.parametrize("name", TRACED)
def test_the_check_runs_at_once_where_a_program_is_traced(name, no_memory):
    TRACED[name](jnp.ones(3))
    assert matmul_check._worst.cache_info().misses == 1


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_the_check_runs_under_a_mesh(kind, no_memory):
    kinds = (getattr(jax.sharding.AxisType, kind),)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=kinds)):
        jax.jit(checked)(jnp.ones(3))
    assert matmul_check._worst.cache_info().misses == 1


def test_with_64_bit_both_dtypes_are_checked(x64, no_memory):
    jax.jit(checked)(jnp.ones(3))
    assert matmul_check._worst.cache_info().misses == 2


def test_checks_on_another_device_are_separate(no_memory):
    with jax.default_device("cpu"):
        check_products("here")
    with jax.default_device(jax.devices("cpu")[0]):
        check_products("here")
    assert matmul_check._worst.cache_info().misses == 1
