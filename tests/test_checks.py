"""Checks of fields by their annotations."""

import math
from typing import Literal

import equinox as eqx
import pytest

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
