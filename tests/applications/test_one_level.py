"""OneLevel: noisy descent on the records of one level, or of both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel import OneLevel
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.keys import derive, step_keys
from tests.applications.sources import (
    BUDGET,
    DATA,
    GD,
    RIDGE,
    SELECTED,
    TWO,
    W0,
    WEIGHTING,
    alone,
    long,
    one_level,
    runs,
)
from tests.cases import Audited, Case, planned, slow

CONTRACT = {
    "one_level": Case(WEIGHTING, OneLevel(GD), DATA, W0, "disjoint", keeps_x=True),
    "one_level_both": Case(
        WEIGHTING, OneLevel(GD, "both"), DATA, W0, "overlapping", keeps_x=True
    ),
}
AUDITS = {
    "OneLevel, both levels": Audited(planned(OneLevel(TWO, "both"), "overlapping")),
    "OneLevel": Audited(planned(OneLevel(TWO), "disjoint")),
}


@pytest.mark.parametrize("level", ["upper", *slow("lower")])
def test_one_level_is_noisy_descent_on_the_records_of_that_level(level):
    noisy = GD.with_noise(1.0)
    solver = OneLevel(noisy, level).with_sizes(WEIGHTING.sizes_of(DATA, "disjoint"))
    ours = jax.jit(dpb.solve)(WEIGHTING, solver, DATA, W0, key=jax.random.key(0)).value
    # The key of the only run, so that the noise is the same.
    key = derive(step_keys(jax.random.key(0), 1)[1][0], "model")[0]
    ridge = RIDGE if level == "lower" else 0.0
    theirs = one_level(getattr(DATA, level), noisy, ridge=ridge, key=key)
    np.testing.assert_allclose(ours[1], theirs, rtol=1e-6)
    np.testing.assert_array_equal(ours[0], W0[0])


@pytest.mark.slow
def test_one_level_on_both_descends_on_the_mean_over_all_records():
    lower = {name: DATA.lower[name] for name in DATA.upper}
    pooled = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), DATA.upper, lower)
    # In units of the lower mean: 90 records over 60.
    (_, y), _ = runs(OneLevel(long(20), "both"))
    expected = alone(pooled, long(20, 0.5 * 90 / 60), ridge=RIDGE * 60 / 90)
    np.testing.assert_allclose(y, expected, rtol=1e-4)


@pytest.mark.parametrize("people", ["disjoint", "overlapping"])
def test_a_person_of_each_level_weighs_the_same_where_both_are_read(people):
    sizes = dpb.Sizes(30, 60, people)
    ledger = OneLevel(GD, "both").with_noise(2.0).ledger(WEIGHTING, sizes)
    (release,) = ledger.releases
    assert len({q.clip_norm / q.size for q in release.queries}) == 1
    for event in ledger.events().values():
        # Someone with two records moves the joint sum by their two lengths.
        assert profiles.gaussian_mu(event) == pytest.approx(
            1 / 2.0 if people == "overlapping" else 0.5 / 2.0
        )


def test_people_of_a_level_that_is_not_read_spend_nothing():
    sizes = dpb.Sizes(30, 60, "disjoint")
    for level in ("upper", "lower"):
        plan = dpb.calibrate(WEIGHTING, OneLevel(GD, level), BUDGET, sizes=sizes)
        spent = plan.solver.ledger(WEIGHTING, sizes).epsilons(BUDGET.delta)
        assert spent == {level: pytest.approx(BUDGET.epsilon, rel=1e-6)}


def test_fits_on_both_levels_need_sizes():
    with pytest.raises(ValueError, match=r"call solver.with_sizes\(sizes\)"):
        OneLevel(GD, "both").objective("model", WEIGHTING, W0, {})
    with pytest.raises(ValueError, match="reads must be one of"):
        OneLevel(GD, "all")
    with pytest.raises(ValueError, match=r"call solver.with_sizes\(sizes\)"):
        _ = dataclasses.replace(SELECTED, fit_reads="both").fit_penalty
    with pytest.raises(ValueError, match="fit_reads must be one of"):
        dataclasses.replace(SELECTED, fit_reads="all")
