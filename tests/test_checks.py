"""Checks of fields by their annotations, and what refusals show."""

import math
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import _checks
from dpbilevel._checks import Checked, Count, Positive


class Inner(Checked):
    size: Positive = 1.0


class Outer(Checked):
    steps: Count = eqx.field(static=True)
    clip: Positive | None = None
    rule: Literal["last", "mean"] = eqx.field(static=True, default="last")
    inner: Inner = Inner()


# As in a module that begins with `from __future__ import annotations`.
Texts = type(
    "Texts",
    (Checked,),
    {"__annotations__": {"clip": "Positive"}, "__module__": __name__},
)


def test_values_that_annotations_admit_are_kept():
    outer = Outer(3, None, "mean", Inner(2.0))
    assert (outer.steps, outer.clip, outer.rule, outer.inner.size) == (
        3,
        None,
        "mean",
        2.0,
    )


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"steps": 0}, ValueError, "Outer: steps must be an integer of at least 1"),
        ({"steps": True}, ValueError, "Outer: steps must be an integer"),
        ({"clip": math.nan}, ValueError, "Outer: clip must be positive and finite"),
        ({"clip": -1.0}, ValueError, "Outer: clip must be positive and finite"),
        ({"rule": "best"}, ValueError, "Outer: rule must be one of"),
        ({"inner": 3.0}, TypeError, "Outer: inner must be an instance of Inner"),
    ],
)
def test_other_values_are_refused_by_name(fields, error, message):
    with pytest.raises(error, match=message):
        Outer(**({"steps": 1} | fields))


def test_annotations_that_are_texts_are_checked_too():
    assert Texts(1.0).clip == 1.0
    with pytest.raises(ValueError, match="Texts: clip must be positive"):
        Texts(-1.0)


SECRET = 0.123456
RECORDS = {
    "dict": {"features": np.full((3, 2), SECRET)},
    "list": [SECRET, SECRET],
    "tuple": (SECRET, SECRET),
    "array": np.full((3, 2), SECRET),
    "JAX array": jnp.full((3, 2), SECRET),
}
MISPLACED = {
    "sizes": lambda value: dpb.calibrate(SUM, DESCENT, BUDGET, sizes=value),
    "loss": dpb.FiniteSum,
    "upper": lambda value: dpb.BilevelProblem(value, dpb.logistic_loss),
    "people": lambda value: dpb.Sizes(3, 3, value),
    "budget": lambda value: dpb.calibrate(SUM, DESCENT, value, sizes=3),
    "step_size": lambda value: dpb.NoisyGD(3, 1.0, step_size=value),
    "clip_norm": lambda value: dpb.NoisyGD(3, value, step_size=0.1),
}
SUM = dpb.FiniteSum(dpb.logistic_loss)
DESCENT = dpb.NoisyGD(3, 1.0, step_size=0.1)
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("place", MISPLACED)
@pytest.mark.parametrize("kind", RECORDS)
def test_records_in_a_wrong_place_are_refused_without_their_values(place, kind):
    with pytest.raises((TypeError, ValueError)) as error:
        MISPLACED[place](RECORDS[kind])
    assert "0.12" not in str(error.value)


@pytest.mark.slow
def test_numpy_integers_are_sizes_and_numpy_floats_a_start():
    records = {"features": np.eye(4), "label": np.ones(4)}
    plan = dpb.calibrate(SUM, DESCENT, BUDGET, sizes=np.int64(4))
    assert type(plan.solver.sizes) is int
    found = dpb.solve(SUM, plan.solver, records, np.zeros(4), key=jax.random.key(0))
    assert found.value.dtype == jnp.float32
    assert type(dpb.Sizes(np.int64(3), 4).upper) is int


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_start_of_half_precision_is_refused_with_the_remedy(dtype):
    records = {"features": np.eye(4), "label": np.ones(4)}
    solver, start = DESCENT.with_noise(1.0).with_sizes(4), jnp.zeros(4, dtype)
    with pytest.raises(ValueError, match=r"use float32 or float64"):
        dpb.solve(SUM, solver, records, start, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("sampling", "Poisson", r"Give dpb\.Poisson"),
        ("output", "Mean", r"Give dpb\.outputs\.TailMean"),
    ],
)
def test_a_part_of_a_wrong_class_is_refused_with_the_remedy(field, value, remedy):
    with pytest.raises(TypeError, match=remedy):
        dpb.NoisyGD(3, 1.0, step_size=0.1, **{field: value})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("batch_size", r"Use sampling=dpb\.Poisson\(rate\), whose batches"),
        ("max_grad_norm", r"Use clip_norm\. It has num_steps, clip_norm"),
        ("clipnorm", r"did you mean 'clip_norm'\?\)\. It has"),
        ("zebra", r"zebra.\. It has num_steps"),
    ],
)
def test_an_argument_of_another_library_is_refused_with_the_name_it_has_here(
    name, hint
):
    with pytest.raises(TypeError, match=f"NoisyGD: there is no argument .*{hint}"):
        dpb.NoisyGD(num_steps=3, step_size=0.1, **{name: 1.0})


def test_a_loss_in_the_place_of_a_problem_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"got function as problem\. Give dpb\.Finite"):
        dpb.calibrate(dpb.logistic_loss, DESCENT, BUDGET, sizes=4)


@pytest.mark.parametrize("value", ["1", None])
def test_what_is_no_number_is_refused_as_that(value):
    with pytest.raises(ValueError, match="epsilon must be a number, positive and fin"):
        dpb.PrivacyBudget(value, 1e-5)


def test_the_name_of_an_optimizer_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"step_size must be .* optax\.adam.*'adam'"):
        dpb.NoisyGD(3, 1.0, step_size="adam")


def test_a_list_of_records_is_refused_in_few_words():
    records = [(np.ones(2), np.ones(()))] * 1000
    with pytest.raises(ValueError, match="share their leading axis") as refused:
        _checks.leading_axis("data", records)
    assert len(str(refused.value)) < 300
