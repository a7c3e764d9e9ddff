"""The fully first-order method."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from tests.bilevel.test_single_loop import (
    CLIPPED,
    HUGE,
    mean_before_the_noise,
    quadratic,
    solved,
    with_first_record_scaled,
)
from tests.cases import Audited, Case, fast_first, planned
from tests.problems import (
    LASSO,
    LEVELS,
    POISSON,
    QUADRATIC,
    SHARED_QUADRATIC,
    TUNING,
    WEIGHTING,
    X0,
    Y0,
    ridge_tuning,
)

small = functools.partial(dpb.bilevel.F2SA, 6, 5.0, step_size=0.5, lower_step_size=0.5)
CONTRACT = {
    "f2sa": Case(WEIGHTING, small(), LEVELS, (X0, Y0), "disjoint"),
    "f2sa_proximal": Case(LASSO, small(), LEVELS, (jnp.full(2, 0.1), Y0), "disjoint"),
    "f2sa_shared_poisson": Case(
        QUADRATIC.problem,
        small(sampling=POISSON, step_size=0.1, output=dpb.outputs.Mean()),
        SHARED_QUADRATIC,
        QUADRATIC.w0,
        "shared",
    ),
}


def planned_f2sa(people, scale=1.0, **fields):
    defaults = {"step_size": 0.1, "lower_step_size": 0.1, "upper_clip_norm": 1.5}
    return planned(dpb.bilevel.F2SA(3, 4.0, **(defaults | fields)), people, scale)


AUDITS = {
    "F2SA, disjoint": Audited(planned_f2sa("disjoint", 0.5)),
    "F2SA, shared": Audited(planned_f2sa("shared"), True),
    "F2SA, Poisson": Audited(
        planned_f2sa("shared", 0.5, sampling=dpb.Poisson(0.2)), True, exact=False
    ),
}


def f2sa(steps=3, penalty=4.0, **fields):
    defaults = {"step_size": 0.05, "lower_step_size": 0.2}
    return dpb.bilevel.F2SA(steps, penalty, **(defaults | fields))


def noiseless(steps, penalty=4.0, **fields):
    unclipped = dict.fromkeys(("clip_norm", "cross_clip_norm", "upper_clip_norm"), HUGE)
    return (
        f2sa(steps, penalty, **(unclipped | fields))
        .with_noise(0.0)
        .with_precision("float")
    )


def test_three_steps_equal_the_pseudocode_in_numpy(x64):
    example, penalty = quadratic(), 4.0
    found = solved(example, noiseless(3, penalty), trajectory=True)
    problem, data = example.problem, example.data

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def mean(level, argument, x, y):
        loss = {
            "upper": dpb.debug.upper_objective,
            "lower": dpb.debug.lower_objective,
        }[level]
        return jax.grad(loss, argument)(problem, x, y, data)

    x = y = z = jnp.zeros(3)
    for _ in range(3):
        q_y = mean("lower", 2, x, y)
        q_z = mean("lower", 2, x, z) + mean("upper", 2, x, z) / penalty
        q_x = mean("upper", 1, x, z)
        q_x += penalty * (mean("lower", 1, x, z) - mean("lower", 1, x, y))
        x, y, z = x - 0.05 * q_x, y - 0.2 * q_y, z - 0.2 * q_z
    np.testing.assert_allclose(found.x, x, rtol=1e-9)
    np.testing.assert_allclose(found.y, y, rtol=1e-9)


def hypergradient_of(example, penalty, x):
    """The direction of x once y and z have settled at this x, per unit of step."""
    start = dataclasses.replace(example, w0=(x, example.lower_solution(x)))
    solver = noiseless(501, penalty, step_size=1e-9, lower_step_size=0.5)
    before, after = solved(start, solver, trajectory=True).trajectory[0][-2:]
    return (before - after) / 1e-9


@pytest.mark.slow
def test_without_noise_the_bias_falls_like_one_over_the_penalty(x64):
    rng = np.random.default_rng(1)
    records = [
        {"features": rng.normal(size=(n, 4)), "label": np.sign(rng.normal(size=n))}
        for n in (30, 40)
    ]
    example = ridge_tuning(*jax.tree.map(jnp.asarray, records))
    x, penalties = jnp.asarray([-0.3]), (10.0, 40.0, 160.0)
    exact = example.hypergradient(x)
    biases = [
        float(jnp.abs(hypergradient_of(example, penalty, x) - exact).max())
        for penalty in penalties
    ]
    slopes = np.diff(np.log(biases)) / np.diff(np.log(penalties))
    np.testing.assert_allclose(slopes, -1, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "role", [pytest.param("upper", marks=pytest.mark.slow), "lower"]
)
@pytest.mark.parametrize("name", fast_first(CLIPPED))
def test_a_huge_record_moves_the_release_by_what_the_ledger_says(name, role):
    problem, data, w0 = CLIPPED[name]
    solver = (
        f2sa(1, clip_norm=0.5, cross_clip_norm=0.3, upper_clip_norm=2.0)
        .with_noise(0.0)
        .with_precision("float")
    )
    (release,) = solver.ledger(problem, problem.sizes_of(data)).releases
    claimed = {q.role: q.contribution for q in release.queries}[role]
    with_it, without = (
        mean_before_the_noise(
            problem, solver, with_first_record_scaled(data, role, scale), w0
        )
        for scale in (1e5, jnp.nan)
    )
    change = float(jnp.linalg.norm(with_it - without))
    assert 0.99 * claimed <= change <= claimed * (1 + 1e-5)  # float32


def test_the_upper_block_of_z_is_bounded_by_its_share_of_the_penalty():
    sizes = dpb.Sizes(30, 60, "disjoint")
    contributions = [
        {
            query.role: query.contribution
            for query in f2sa(1, penalty)
            .with_noise(1.0)
            .ledger(TUNING, sizes)
            .releases[0]
            .queries
        }
        for penalty in (2.0, 8.0)
    ]
    assert contributions[0]["lower"] == contributions[1]["lower"]
    assert contributions[0]["upper"] == pytest.approx(4 * contributions[1]["upper"])


def test_the_x_block_is_free_exactly_where_no_record_meets_x():
    sizes = dpb.Sizes(30, 60, "disjoint")
    names = [
        f2sa().with_noise(1.0).ledger(problem, sizes).releases[0].name
        for problem in (TUNING, WEIGHTING)
    ]
    assert names == [
        "directions of (y / 1.41, z / 1.41)",
        "directions of (y / 1.58, z / 1.58, x / 2.24)",
    ]


@pytest.mark.slow
def test_optax_optimizers_replace_the_step_sizes():
    rules = {"step_size": optax.sgd(0.05), "lower_step_size": optax.sgd(0.2)}
    runs = [
        solved(quadratic(), f2sa(4, **fields).with_noise(0.1)).value
        for fields in ({}, rules)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *runs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"penalty": 0.0}, "penalty must be positive"),
        ({"lower_step_size": None}, "give lower_step_size="),
        ({"cross_clip_norm": -1.0}, "cross_clip_norm must be positive"),
        ({"budget_split": (1.0, 1.0)}, "for y, z, x"),
        ({"sampling": dpb.privacy.SinglePass(3)}, "F2SA"),
    ],
)
def test_a_wrong_field_is_named_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        f2sa(**fields)
